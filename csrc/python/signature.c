/* What a site knows about each shape of batch: sizes that worked and that failed. */
#include "step.h"

/* The entry of this call's shape, or NULL when there is none and `create` is 0. */
oomkit_signature *
oomkit_signature_get(oomkit_call *call, int create)
{
    oomkit_step *step = call->step;
    oomkit_signature *entry = NULL;
    int i, oldest = 0;

    if (!call->has_signature) {
        call->signature = oomkit_batch_signature(&call->batch);
        call->has_signature = 1;
    }
    for (i = 0; i < step->signature_count; i++) {
        if (step->signatures[i].hash == call->signature) {
            step->signatures[i].used = step->calls;
            return &step->signatures[i];
        }
        if (step->signatures[i].used < step->signatures[oldest].used) {
            oldest = i;
        }
    }
    if (!create) {
        return NULL;
    }
    entry = step->signature_count < OOMKIT_SIGNATURES
                ? &step->signatures[step->signature_count++]
                : &step->signatures[oldest];
    memset(entry, 0, sizeof(*entry));
    entry->hash = call->signature;
    entry->used = step->calls;
    return entry;
}

void
oomkit_signature_observe(oomkit_call *call, oomkit_plan_observations *seen)
{
    const oomkit_options *options = call->options;
    const oomkit_signature *known = oomkit_signature_get(call, 0);

    memset(seen, 0, sizeof(*seen));
    seen->batch = call->batch.rows;
    seen->min_micro_batch = options->min_micro_batch;
    seen->multiple_of = options->multiple_of;
    seen->start_accumulation = options->accumulation_steps;
    seen->ooms_in_call = call->ooms;
    seen->baseline_bytes = call->baseline_bytes;
    seen->requested_bytes = call->requested_bytes;
    if (known != NULL) {
        seen->largest_ok = known->largest_ok;
        seen->smallest_failed = known->smallest_failed;
        seen->successes = known->successes;
        seen->peak_bytes = known->peak_bytes;
    }
}

void
oomkit_signature_succeeded(oomkit_call *call, int64_t micro_batch, uint64_t peak_bytes)
{
    oomkit_signature *entry = oomkit_signature_get(call, 1);

    entry->successes++;
    if (micro_batch >= entry->largest_ok) {
        entry->largest_ok = micro_batch;
        if (peak_bytes != OOMKIT_UNKNOWN) {
            entry->peak_bytes = peak_bytes;
        }
    }
}

void
oomkit_signature_failed(oomkit_call *call, int64_t micro_batch)
{
    oomkit_signature *entry = oomkit_signature_get(call, 1);

    if (entry->smallest_failed == 0 || micro_batch < entry->smallest_failed) {
        entry->smallest_failed = micro_batch;
    }
    if (entry->largest_ok >= micro_batch) { /* what worked once works no more */
        entry->largest_ok = 0;
    }
}

/* The step turned out not to be splittable: its next call is tried whole again. */
void
oomkit_signature_forget(oomkit_call *call)
{
    oomkit_signature *entry = oomkit_signature_get(call, 0);
    if (entry != NULL) {
        entry->smallest_failed = entry->largest_ok = 0;
    }
}

/* Copies of gradients at entry are an insurance: taken when asked for, while the call
 * is split, while this shape is unproven, and when its last peak came near the budget.
 */
int
oomkit_call_wants_copies(oomkit_call *call)
{
    const oomkit_signature *known;

    if (call->grads.force_copies) {
        return 1;
    }
    if (call->options->gradient_safety != OOMKIT_SAFETY_AUTO) {
        return call->options->gradient_safety == OOMKIT_SAFETY_COPY;
    }
    if (call->split) {
        return 1;
    }
    known = oomkit_signature_get(call, 1);
    if (known->successes == 0) {
        return 1;
    }
    if (call->window.budget_bytes == OOMKIT_UNKNOWN || known->peak_bytes == 0) {
        return 0;
    }
    return (double)known->peak_bytes > 0.9 * (double)call->window.budget_bytes;
}
