/* The plan of a loop over a batch, and what the loop teaches its site. */
#include "chunks.h"
#include "../batch/batch.h"
#include "../call/call.h"
#include "../engine/engine.h"
#include "../sizes/sizes.h"

int
oomkit_chunks_plan(oomkit_chunks *self)
{
    oomkit_call *call = &self->call;
    const oomkit_knowledge *known; /* borrowed from the site */

    if (self->largest > 0) {
        self->options.accumulation_steps =
            (call->batch.rows + self->largest - 1) / self->largest;
    }
    if (self->st->forced_slices != NULL) {
        return oomkit_cut_forced(call);
    }
    return oomkit_cut_choose(call, &known) < 0 ? -1 : oomkit_cut_begin(call, known);
}

/* Once more all the same, for what the smallest part lacks may be back by now,
 * collected or given back by somebody else. */
int
oomkit_chunks_exhausted(oomkit_chunks *self)
{
    oomkit_call *call = &self->call;
    const oomkit_slice *slice = &call->cut->slices[call->cut->at];

    if (slice->start + slice->length > self->last_chance) {
        self->last_chance = slice->start + slice->length;
        call->cut->reason = OOMKIT_REASON_FLUSHED;
        return oomkit_replan_say(call, slice->length, call->cut->count);
    }
    return oomkit_give_up_for(
        call, PyUnicode_FromFormat(
                  "%U ran out of memory with a part of %lld of %lld rows, the smallest "
                  "allowed; rows 0 to %lld are done" SEE("out-of-memory"),
                  self->options.label, (long long)slice->length,
                  (long long)call->batch.rows, (long long)slice->start));
}

void
oomkit_chunks_measured(oomkit_chunks *self, uint64_t peak_bytes)
{
    oomkit_window_of_part(&self->call, peak_bytes);
}

void
oomkit_chunks_learn(oomkit_chunks *self, int finished)
{
    oomkit_call *call = &self->call;
    int64_t largest = oomkit_cut_largest(
        call, call->cut->at < call->cut->count ? call->cut->at : call->cut->count);

    oomkit_call_leave(call, finished, NULL);
    if (finished && call->cut->count == 1) { /* as a whole call of auto_batch */
        oomkit_batch_learn(&self->site->batch_site, &call->batch);
    }
    oomkit_call_recorded(call);
    if (largest > 0 && call->shape.known && call->cut->measured.rows[0] > 0) {
        oomkit_signature_forward_only(call, 1);
        oomkit_signature_succeeded(call, largest, oomkit_peak_of_call(call));
    }
    oomkit_error_dismiss(); /* what cannot be noted is not noted */
}
