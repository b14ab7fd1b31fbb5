/* What no rows of one micro-batch show, or eval mode does not: all micro-batches of the
 * call, and the same where its rows are dealt to them in another way. Where no row
 * depends on another one, their gradients together stay what they are. */
#include "proof.h"
#include "../accum/accum.h"
#include "../batch/batch.h"
#include "../call/call.h"
#include "../sizes/sizes.h"

#define FEW 8 /* rows of micro-batches in which others that go with a row are rare */

/* May rows be dealt otherwise? Not where each is alone in its micro-batch, nor those
 * that the caller has given gradients of their own, or that parts are given random
 * numbers of; nor where each call is proven anew.
 */
static int
dealt_possible(const oomkit_proof *p)
{
    oomkit_call *call = p->call;
    const oomkit_proven *known = oomkit_proven_find(call);
    Py_ssize_t i;

    if (!p->trained || p->cut.count < 2 ||
        p->cut.slices[0].length < 2 * oomkit_unfit_multiple(call) ||
        p->numbers == OOMKIT_NUMBERS_SAME || oomkit_call_is_replay(call) ||
        oomkit_loss_is_returned(call) ||
        (known != NULL && known->level == OOMKIT_PROVEN_HERE)) {
        return 0;
    }
    for (i = 0; i < call->batch.count; i++) { /* tensors, arrays and lists are dealt */
        if (call->batch.nodes[i].split == OOMKIT_SPLIT_CALL ||
            call->batch.nodes[i].split == OOMKIT_SPLIT_CUSTOM) {
            return 0;
        }
    }
    return 1;
}

/* Rows as they are, and dealt otherwise. 0 or -1. */
static int
dealt_runs(oomkit_proof *p)
{
    oomkit_batch *batch = &p->call->batch;
    int status = oomkit_proof_run(p, "whole of all", p->cut.slices, p->cut.count, NULL);

    if (status == 0) {
        batch->dealt = p->dealt;
        status = oomkit_proof_run(p, "parts of all", p->cut.slices, p->cut.count, NULL);
        batch->dealt = NULL;
    }
    return status;
}

/* One turn. 1 shown, as *text (owned) says; 0 not; -1. */
static int
dealt_turn(oomkit_proof *p, int turn, PyObject **text)
{
    OWNED PyObject *list = oomkit_proof_slices(p->cut.slices, p->cut.count);
    OWNED PyObject *shown = NULL;
    PyObject *answer = NULL; /* owned, then taken */
    const int draws = p->numbers != OOMKIT_NUMBERS_NONE;

    if (list == NULL) {
        return -1;
    }
    p->dealt = PyObject_CallMethod(p->judge, "dealt", "OLOi", list,
                                   (long long)oomkit_unfit_multiple(p->call),
                                   draws ? Py_True : Py_False, turn);
    p->draw = draws ? turn : 0;
    if (p->dealt != NULL && dealt_runs(p) == 0) {
        EXEMPT (p->call->st) {
            answer = PyObject_CallMethod(p->judge, "coupled", NULL);
        }
        shown = answer == NULL ? NULL : PyObject_GetAttrString(p->dealt, "shown");
    }
    p->draw = 0;
    Py_CLEAR(p->dealt);
    if (shown == Py_True && answer != Py_None) {
        *text = Py_NewRef(answer);
    }
    Py_XDECREF(answer);
    return shown == NULL ? -1 : shown == Py_True;
}

int
oomkit_proof_dealt(oomkit_proof *p, PyObject **text)
{
    OWNED PyObject *done = NULL;
    int turn, most, shown = 1;

    *text = NULL;
    if (!dealt_possible(p)) {
        return 0;
    }
    most = p->numbers != OOMKIT_NUMBERS_NONE || p->cut.slices[0].length < FEW
               ? OOMKIT_TURNS
               : 1;
    done = PyObject_CallMethod(p->judge, "quiet", "O", Py_False);
    for (turn = 0; done != NULL && shown > 0 && *text == NULL && turn < most; turn++) {
        shown = dealt_turn(p, turn, text);
    }
    return done == NULL ? -1 : shown;
}
