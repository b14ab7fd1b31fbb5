/* What no rows of one micro-batch show, or eval mode does not: all micro-batches of the
 * call, and the same where its rows are dealt to them in another way. Where no row
 * depends on another one, their gradients together stay what they are. */
#include "proof.h"
#include "../accum/accum.h"
#include "../batch/batch.h"
#include "../call/call.h"
#include "../sizes/sizes.h"

#define FEW 8 /* rows of micro-batches in which others that go with a row are rare */

/* How many micro-batches become one, in which rows can have others beside them: where
 * each is alone in its own as many as have run with a graph, in host memory. */
static int64_t
dealt_together(const oomkit_proof *p)
{
    const int64_t length = p->cut.slices[0].length;
    const int alone = length < 2 * oomkit_unfit_multiple(p->call) &&
                      p->level != OOMKIT_PROVEN_WEAKLY && p->shown.length > length;

    return alone ? p->shown.length / length : 1;
}

/* May rows be dealt otherwise? Where each is alone in all that has run they come in
 * another order, in which what one leaves behind for the next is seen. Not those that
 * the caller has given gradients of their own, or that parts are given random numbers
 * of; nor where each call is proven anew.
 */
static int
dealt_possible(const oomkit_proof *p)
{
    oomkit_call *call = p->call;
    const oomkit_proven *known = oomkit_proven_find(call);
    Py_ssize_t i;

    if ((!p->trained && p->level != OOMKIT_PROVEN_WEAKLY) || p->cut.count < 2 ||
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

/* New array (PyMem) of the call's micro-batches, so many of them as one; *count of
 * them. */
static oomkit_slice *
dealt_cut(const oomkit_proof *p, int64_t together, int64_t *count)
{
    oomkit_slice *made = PyMem_New(oomkit_slice, (size_t)p->cut.count);
    int64_t i;

    *count = 0;
    for (i = 0; made != NULL && i < p->cut.count; i++) {
        if (i % together == 0) {
            made[(*count)++] = p->cut.slices[i];
        } else {
            made[*count - 1].length += p->cut.slices[i].length;
        }
    }
    return made != NULL ? made : (oomkit_slice *)PyErr_NoMemory();
}

/* Rows as they are, in the call's own micro-batches, which fit as they are and are the
 * same in each turn, and dealt otherwise. Where random numbers go with places in a
 * micro-batch both times in these. 0 or -1. */
static int
dealt_runs(oomkit_proof *p, const oomkit_slice *slices, int64_t count, int turn)
{
    const int own = p->numbers == OOMKIT_NUMBERS_NONE, on_host = p->on_host;
    oomkit_batch *batch = &p->call->batch;
    int status = 0;

    if (!own || turn == 0) {
        p->on_host = own ? 0 : on_host;
        status = oomkit_proof_run(p, "whole of all", own ? p->cut.slices : slices,
                                  own ? p->cut.count : count, NULL);
        p->on_host = on_host;
    }
    if (status == 0) {
        batch->dealt = p->dealt;
        status = oomkit_proof_run(p, "parts of all", slices, count, NULL);
        batch->dealt = NULL;
    }
    return status;
}

/* One turn. 1 shown, as *text (owned) says; 0 not; -1. */
static int
dealt_turn(oomkit_proof *p, const oomkit_slice *slices, int64_t count, int turn,
           PyObject **text)
{
    OWNED PyObject *list = oomkit_proof_slices(slices, count);
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
    if (p->dealt != NULL && dealt_runs(p, slices, count, turn) == 0) {
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
    oomkit_slice *slices; /* owned */
    int64_t count, together;
    int turn, most, shown = 1;

    *text = NULL;
    if (!dealt_possible(p)) {
        return 0;
    }
    together = dealt_together(p);
    slices = dealt_cut(p, together, &count);
    if (slices == NULL) {
        return -1;
    }
    most =
        p->numbers != OOMKIT_NUMBERS_NONE || slices[0].length < FEW ? OOMKIT_TURNS : 1;
    p->on_host = together > 1 && p->call->tries.ooms > 0 ? OOMKIT_ALL_ON_HOST : 0;
    done = PyObject_CallMethod(p->judge, "quiet", "O", Py_False);
    for (turn = 0; done != NULL && shown > 0 && *text == NULL && turn < most; turn++) {
        shown = dealt_turn(p, slices, count, turn, text);
    }
    p->on_host = 0;
    PyMem_Free(slices);
    return done == NULL ? -1 : shown;
}
