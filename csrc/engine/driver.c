/* What every call is made of, whoever runs its micro-batches: begin, failure and end of
 * a step, of a loop, of a replay. */
#include "engine.h"
#include "../accum/accum.h"
#include "../batch/batch.h"
#include "../hook/hook.h"
#include "../ladder/activations.h"
#include "../result/result.h"
#include "../sizes/sizes.h"
#include "../undo/undo.h"

#define MASKED_RETRIES 2

/* --- begin --- */

int
oomkit_call_take_part(oomkit_call *call, oomkit_participants *parts)
{
    call->parts = parts;
    parts->refs++;
    parts->busy++;
    return parts->adopted == NULL ? 0 : oomkit_participants_hold(parts);
}

/* --- failure --- */

int
oomkit_oom_is_retried(oomkit_class class_, uint32_t ooms)
{
    return class_ == OOMKIT_CLASS_CERTAIN ||
           (class_ == OOMKIT_CLASS_MASKED && ooms <= MASKED_RETRIES);
}

void
oomkit_call_lost(oomkit_call *call)
{
    uint64_t now;

    oomkit_window_lost(call); /* first: what phases have lost is part of the rest */
    now = oomkit_now_ns();
    call->tries.lost_ns += now - call->tries.started_ns;
    call->tries.started_ns = now;
    call->tries.none_after = 0;
}

/* --- end --- */

void
oomkit_call_record(const oomkit_call *call, oomkit_record *record)
{
    int64_t rows = call->batch.kept_whole == OOMKIT_BATCH_UNCOUNTED ? -1
                   : call->batch.rows > 0 ? call->batch.rows
                                          : oomkit_batch_rows(&call->batch);
    int64_t largest = rows < 0 ? 0 : oomkit_cut_largest(call, call->cut->count);

    memset(record, 0, sizeof(*record));
    record->step = call->log.number;
    record->batch_size = rows < 0 ? OOMKIT_UNKNOWN : (uint64_t)rows;
    record->micro_batch_size = largest > 0 ? (uint64_t)largest : record->batch_size;
    record->requested_bytes =
        call->tries.ooms > 0 ? call->tries.requested : OOMKIT_UNKNOWN;
    oomkit_sizes_record(call, record);
    record->began_ns = call->tries.began_ns;
    record->time_ns = oomkit_now_ns() - call->tries.began_ns;
    record->lost_ns = call->tries.lost_ns;
    record->accumulation_steps = call->cut->count > 0 ? (uint32_t)call->cut->count : 1;
    record->attempts = (uint32_t)call->tries.count + 1;
    record->ooms = call->tries.ooms;
    record->reason = (uint32_t)call->cut->reason;
    record->outcome = call->log.outcome;
    if (call->tries.count > 0 && (record->outcome % 2 == 1 ||
                                  (record->outcome == 2 && call->tries.none_after))) {
        record->attempts--; /* none came after the last one that failed */
    }
    record->rung = call->log.rung;
    record->rank = call->st->rank;
    record->unused = 0;
}

void
oomkit_call_recorded(oomkit_call *call)
{
    oomkit_history *history = call->step->history;
    const oomkit_phases *phases = NULL;
    oomkit_record record;

    if (oomkit_earlier_runs(call->options)) { /* its record is there */
        call->log.record = UINT64_MAX;
        return;
    }
    oomkit_call_record(call, &record);
    call->log.record = oomkit_history_count(history);
    oomkit_history_push(history, &record);
    if (call->options->phases) {
        oomkit_history_phases_add(history, call->log.record,
                                  oomkit_phases_of_call(call));
        phases = oomkit_history_phases(history, call->log.record);
    }
    oomkit_sinks_tell(call->st, &record, phases, call->options->label,
                      call->options->sinks);
}

void
oomkit_call_leave(oomkit_call *call, int finished, PyObject *exception)
{
    oomkit_intercept_remove(call);
    oomkit_forwards_leave(call, finished);
    if (!finished) {
        call->log.outcome = call->log.outcome == 0 ? 2 : call->log.outcome;
        if (exception != NULL) {
            oomkit_pass_abandon(call, exception);
        }
        if (call->refused.raised && call->shape.known) {
            oomkit_signature_forget(call);
        }
    }
    oomkit_window_end(call);
}

void
oomkit_call_free(oomkit_call *call)
{
    Py_ssize_t i;

    oomkit_savepoint_end(call);
    oomkit_tell_call_ends(call);
    if (oomkit_call_is_cut(call)) {
        oomkit_activations_end(call);
        oomkit_join_clear(&call->cut->join);
        PyMem_Free(call->cut->slices);
        PyMem_Free(call->cut->weights);
        Py_CLEAR(call->cut->unfit.said);
        Py_CLEAR(call->cut->unfit.refusal);
    }
    oomkit_batch_release(&call->batch);
    for (i = 0; i < call->tries.count; i++) {
        Py_CLEAR(call->tries.items[i].location);
        Py_CLEAR(call->tries.items[i].inner);
        Py_CLEAR(call->tries.items[i].message);
    }
    MEMORY_CLEAR(call->tries.items);
    oomkit_meter_release(call);
    if (call->parts != NULL) {
        call->parts->busy--;
    }
    oomkit_participants_release(call->parts);
}
