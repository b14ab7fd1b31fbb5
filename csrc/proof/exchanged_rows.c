/* What eval mode does not show: some rows of two micro-batches change places, with
 * every module as it is and the same random numbers in each place. Where no row depends
 * on another one, the gradients of both together stay what they are. */
#include "proof.h"
#include "../accum/accum.h"
#include "../batch/batch.h"
#include "../sizes/sizes.h"

/* Two runs of as many rows as the largest micro-batch, one after the other. 1, or 0
 * where there are none. */
static int
places_cut(const oomkit_proof *p, int64_t length, oomkit_slice cut[2])
{
    const int64_t rows = p->call->batch.rows, unit = oomkit_unfit_multiple(p->call);
    int64_t start, most = rows / 2 < length ? rows / 2 : length;

    most = most / unit * unit;
    if (most < 2 * unit || most < oomkit_unfit_least(p->call)) {
        return 0;
    }
    start = p->start + 2 * most <= rows ? p->start : rows - 2 * most;
    cut[0] = (oomkit_slice){start / unit * unit, most};
    cut[1] = (oomkit_slice){cut[0].start + most, most};
    return 1;
}

/* Are all sliced leaves tensors, arrays or lists? Others cannot be mixed. */
static int
places_possible(const oomkit_call *call)
{
    Py_ssize_t i;

    for (i = 0; i < call->batch.count; i++) {
        if (call->batch.nodes[i].split == OOMKIT_SPLIT_CALL ||
            call->batch.nodes[i].split == OOMKIT_SPLIT_CUSTOM) {
            return 0;
        }
    }
    return 1;
}

/* Both as they are, and mixed. 0 or -1. */
static int
places_runs(oomkit_proof *p, const oomkit_slice cut[2])
{
    oomkit_batch *batch = &p->call->batch;
    int status = oomkit_proof_run(p, "whole of both", cut, 2, NULL);

    if (status == 0) {
        batch->places = p->places;
        batch->both = cut[0].start + cut[1].start;
        status = oomkit_proof_run(p, "parts of both", cut, 2, NULL);
        batch->places = NULL;
    }
    return status;
}

/* One turn. 1 shown, as *text (owned) says; 0 not; -1. */
static int
places_turn(oomkit_proof *p, const oomkit_slice cut[2], int turn, PyObject **text)
{
    OWNED PyObject *shown = NULL;
    PyObject *answer = NULL; /* owned, then taken */

    p->places = PyObject_CallMethod(p->judge, "places", "LLLi", (long long)cut[0].start,
                                    (long long)cut[0].length,
                                    (long long)oomkit_unfit_multiple(p->call), turn);
    p->draw = turn;
    if (p->places != NULL && places_runs(p, cut) == 0) {
        EXEMPT (p->call->st) {
            answer = PyObject_CallMethod(p->judge, "coupled", NULL);
        }
        shown = answer == NULL ? NULL : PyObject_GetAttrString(p->places, "shown");
    }
    p->draw = 0;
    Py_CLEAR(p->places);
    if (shown == Py_True && answer != Py_None) {
        *text = Py_NewRef(answer);
    }
    Py_XDECREF(answer);
    return shown == NULL ? -1 : shown == Py_True;
}

int
oomkit_proof_places(oomkit_proof *p, int64_t length, PyObject **text)
{
    oomkit_slice cut[2];
    OWNED PyObject *done = NULL;
    int turn, shown = 1;

    *text = NULL;
    if (!p->trained || !places_possible(p->call) || !places_cut(p, length, cut)) {
        return 0;
    }
    done = PyObject_CallMethod(p->judge, "quiet", "O", Py_False);
    for (turn = 0; done != NULL && shown > 0 && *text == NULL && turn < OOMKIT_TURNS;
         turn++) {
        shown = places_turn(p, cut, turn, text);
    }
    return done == NULL ? -1 : shown;
}
