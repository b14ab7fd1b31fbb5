/* The plan of a loop over a batch, and what the loop teaches its site. */
#include "chunks.h"
#include "../batch/batch.h"
#include "../call/call.h"
#include "../engine/engine.h"
#include "../sizes/sizes.h"

/* The slices of `plan`, after those that are done. 0 or -1. */
static int
plan_make(oomkit_chunks *self, const oomkit_knowledge *known,
          const oomkit_plan_request *request)
{
    oomkit_call *call = &self->call;

    if (oomkit_plan_choose(known, request, &call->cut->plan, &call->cut->reason) !=
        OOMKIT_OK) {
        PyErr_SetString(PyExc_RuntimeError, "oomkit could not make a plan");
        return -1;
    }
    return oomkit_attempt_slices(call);
}

int
oomkit_chunks_plan(oomkit_chunks *self)
{
    oomkit_call *call = &self->call;
    oomkit_plan_request request;
    const oomkit_knowledge *known; /* borrowed from the site */

    if (self->largest > 0) {
        self->options.accumulation_steps =
            (call->batch.rows + self->largest - 1) / self->largest;
    }
    if (self->st->forced_slices != NULL) {
        return oomkit_engine_forced(call);
    }
    oomkit_signature_request(call, &request, &known);
    return plan_make(self, known, &request) < 0 ||
                   (call->cut->count > 1 && oomkit_plan_say_begin(call, known) < 0)
               ? -1
               : 0;
}

/* Nothing smaller is allowed: once more all the same, for what the smallest part lacks
 * may be back by now, collected or given back by somebody else. 0 or -1. */
static int
replan_exhausted(oomkit_chunks *self)
{
    oomkit_call *call = &self->call;
    const oomkit_slice *slice = &call->cut->slices[call->cut->at];
    PyObject *reason; /* owned */

    if (slice->start + slice->length > self->last_chance) {
        self->last_chance = slice->start + slice->length;
        call->cut->reason = OOMKIT_REASON_FLUSHED;
        return oomkit_replan_say(call, slice->length, call->cut->count);
    }
    reason = PyUnicode_FromFormat(
        "%U ran out of memory with a part of %lld of %lld rows, the smallest "
        "allowed; rows 0 to %lld are done",
        self->options.label, (long long)slice->length, (long long)call->batch.rows,
        (long long)slice->start);

    if (reason != NULL) {
        oomkit_give_up(call, reason, 0);
        Py_DECREF(reason);
    }
    return -1;
}

/* The memory was there, but in pieces: the same plan once more. */
static int
replan_same(oomkit_chunks *self)
{
    oomkit_call *call = &self->call;
    const oomkit_attempt *attempt = &call->tries.items[call->tries.count - 1];

    if (!oomkit_plan_fragmented(attempt->reserved_bytes, attempt->allocated_bytes,
                                oomkit_device_budget(self->st, call->device),
                                call->tries.flushed)) {
        return 0;
    }
    call->tries.flushed = 1;
    call->cut->reason = OOMKIT_REASON_FLUSHED;
    return 1;
}

int
oomkit_chunks_replan(oomkit_chunks *self)
{
    oomkit_call *call = &self->call;
    int64_t rows = call->cut->slices[call->cut->at].length, count = call->cut->count;
    oomkit_plan_request request;
    const oomkit_knowledge *known; /* borrowed from the site */
    oomkit_plan failed = {.multiple_of = self->options.multiple_of};
    int status;

    if (replan_same(self)) {
        return oomkit_replan_say(call, rows, count);
    }
    self->site->seen_oom = 1;
    oomkit_signature_failed(call, rows);
    oomkit_signature_request(call, &request, &known);
    request.batch = call->batch.rows - call->cut->slices[call->cut->at].start;
    failed.batch = request.batch;
    failed.accumulation = (request.batch + rows - 1) / rows;
    status =
        oomkit_plan_next(known, &request, &failed, &call->cut->plan, &call->cut->reason);
    if (status == OOMKIT_EREFUSED) {
        return replan_exhausted(self);
    }
    if (status != OOMKIT_OK) {
        PyErr_SetString(PyExc_RuntimeError, "oomkit could not make a plan");
        return -1;
    }
    call->cut->count = call->cut->at;
    if (oomkit_attempt_slices(call) < 0) {
        return -1;
    }
    return oomkit_replan_say(call, rows, count);
}

void
oomkit_chunks_measured(oomkit_chunks *self, uint64_t peak_bytes)
{
    oomkit_call *call = &self->call;
    uint64_t bytes = 0;

    if (peak_bytes != OOMKIT_UNKNOWN) {
        if (peak_bytes > call->sizes.peak_allocated) {
            call->sizes.peak_allocated = peak_bytes;
        }
        if (call->sizes.baseline != OOMKIT_UNKNOWN &&
            peak_bytes > call->sizes.baseline) {
            bytes = peak_bytes - call->sizes.baseline;
        }
    }
    oomkit_phase_note(call, bytes);
}

void
oomkit_chunks_learn(oomkit_chunks *self, int finished)
{
    oomkit_call *call = &self->call;
    oomkit_record record;
    int64_t largest = 0, i;

    if (!finished && call->log.outcome == 0) {
        call->log.outcome = 2;
    }
    if (finished && call->cut->count == 1) { /* as a whole call of auto_batch */
        oomkit_batch_learn(&self->site->batch_site, &call->batch);
    }
    oomkit_call_record(call, &record);
    oomkit_ring_push(self->site->ring, &record);
    for (i = 0; i < call->cut->at && i < call->cut->count; i++) {
        largest =
            call->cut->slices[i].length > largest ? call->cut->slices[i].length : largest;
    }
    if (largest > 0 && call->shape.known && call->cut->measured.rows[0] > 0) {
        call->deferred.forward_only = 1;
        oomkit_signature_succeeded(call, largest, call->sizes.peak_allocated);
    }
    oomkit_error_dismiss(); /* what cannot be noted is not noted */
}
