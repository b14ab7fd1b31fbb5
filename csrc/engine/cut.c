/* How the batch of a call is cut: its first plan, the slices of a plan, slices that are
 * given, and the call's own ones aside. */
#include "engine.h"
#include "../ladder/ladder.h"
#include "../sizes/sizes.h"

/* --- slices --- */

/* Makes room for `count` slices. 0 or -1. */
static int
cut_room(oomkit_call *call, int64_t count)
{
    void *grown;
    if (count <= call->cut->room) {
        return 0;
    }
    grown =
        PyMem_Realloc(call->cut->slices, (size_t)count * sizeof(*call->cut->slices));
    if (grown == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    call->cut->slices = grown;
    call->cut->room = count;
    return 0;
}

int
oomkit_cut_planned(oomkit_call *call)
{
    int64_t kept = call->cut->count, count = oomkit_plan_count(&call->cut->plan), i;
    int64_t offset = kept == 0 ? 0
                               : call->cut->slices[kept - 1].start +
                                     call->cut->slices[kept - 1].length;

    if (cut_room(call, kept + count) < 0) {
        return -1;
    }
    for (i = 0; i < count; i++) {
        oomkit_slice *slice = &call->cut->slices[kept + i];
        if (oomkit_plan_slice(&call->cut->plan, i, &slice->start, &slice->length) !=
            OOMKIT_OK) {
            PyErr_SetString(PyExc_RuntimeError,
                            "oomkit made a plan without slices" SEE("internal-error"));
            return -1;
        }
        slice->start += offset;
    }
    call->cut->count = kept + count;
    call->split = call->cut->count > 1;
    return 0;
}

int
oomkit_cut_given(oomkit_call *call, const oomkit_slice *slices, int64_t count)
{
    if (cut_room(call, count) < 0) {
        return -1;
    }
    memcpy(call->cut->slices, slices, (size_t)count * sizeof(*slices));
    call->cut->count = count;
    call->cut->at = 0;
    call->split = count > 1;
    return 0;
}

int
oomkit_cut_forced(oomkit_call *call)
{
    PyObject *lengths = call->st->forced_slices; /* borrowed from state */
    int64_t start = 0;
    Py_ssize_t i, n = PyTuple_GET_SIZE(lengths);

    if (cut_room(call, n) < 0) {
        return -1;
    }
    for (i = 0; i < n; i++) {
        call->cut->slices[i].start = start;
        call->cut->slices[i].length = PyLong_AsLongLong(PyTuple_GET_ITEM(lengths, i));
        start += call->cut->slices[i].length;
    }
    if (start != call->batch.rows) {
        oomkit_raise(call->st->SplitError,
                     "force_slices() expected slices that add up to the batch of %lld "
                     "rows, got %R" SEE("options"),
                     (long long)call->batch.rows, lengths);
        return -1;
    }
    call->cut->count = n;
    call->split = n > 1;
    call->cut->forced = 1;
    call->cut->reason = OOMKIT_REASON_ASKED;
    return 0;
}

int64_t
oomkit_cut_largest(const oomkit_call *call, int64_t count)
{
    int64_t largest = 0, i;

    for (i = 0; i < count; i++) {
        largest = call->cut->slices[i].length > largest ? call->cut->slices[i].length
                                                        : largest;
    }
    return largest;
}

/* --- for a run beside the call's own --- */

void
oomkit_cut_aside(oomkit_call *call, oomkit_cut_own *own)
{
    *own = (oomkit_cut_own){call->cut->slices, call->cut->count, call->cut->room,
                            call->split};
    call->cut->slices = NULL;
    call->cut->count = call->cut->room = 0;
}

void
oomkit_cut_back(oomkit_call *call, const oomkit_cut_own *own)
{
    PyMem_Free(call->cut->slices);
    call->cut->slices = own->slices;
    call->cut->count = own->count;
    call->cut->room = own->room;
    call->cut->at = 0;
    call->split = own->split;
    memset(&call->cut->measured, 0, sizeof(call->cut->measured));
}

/* --- the first plan --- */

int
oomkit_cut_choose(oomkit_call *call, const oomkit_knowledge **known)
{
    oomkit_plan_request request;
    int anew;

    oomkit_signature_request(call, &request, known);
    anew = oomkit_ladder_begins(call, &request);
    if (anew < 0) {
        return -1;
    }
    if (anew > 0) {
        oomkit_signature_request(call, &request, known);
    }
    if (oomkit_plan_choose(*known, &request, &call->cut->plan, &call->cut->reason) !=
        OOMKIT_OK) {
        PyErr_SetString(PyExc_RuntimeError,
                        "oomkit could not make a plan" SEE("internal-error"));
        return -1;
    }
    call->cut->plan.rung = (*known)->rung;
    return 0;
}

/* One line where the plan is not that of the last call. 0 or -1. */
int
oomkit_cut_say(oomkit_call *call, const oomkit_knowledge *known)
{
    const int64_t count = oomkit_plan_count(&call->cut->plan);
    int64_t rows = call->batch.rows, k = 1;

    if (count > 1 && call->cut->reason != OOMKIT_REASON_PREDICTED &&
        call->cut->reason != OOMKIT_REASON_GROWN) {
        return 0;
    }
    if (known->batch == call->batch.rows && known->k > 0) {
        k = known->k;
        rows = (rows + k - 1) / k;
    }
    if (k == count) {
        return 0;
    }
    /* Who was told of the fall is told of the way back. */
    return oomkit_plan_say(
        call,
        count < k && oomkit_has_said(call->step, OOMKIT_SAID_FALL) ? "warning" : "info",
        rows, k);
}

int
oomkit_cut_begin(oomkit_call *call, const oomkit_knowledge *known)
{
    return oomkit_cut_planned(call) < 0
               ? -1
               : (call->cut->count == 1 ? 0 : oomkit_cut_say(call, known));
}
