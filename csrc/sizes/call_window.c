/* Windows of a call: opened at its entry, and anew after a failure. */
#include "call_window.h"
#include "sizes.h"

void
oomkit_window_begin(oomkit_call *call)
{
    oomkit_device_begin(call->st, call->device, call->options->reset_peaks,
                        &call->sizes.window);
    call->sizes.baseline = call->sizes.window.baseline_bytes;
    if (call->options->phases) {
        call->sizes.meter =
            oomkit_meter_open(call->st, call->device, call->options->reset_peaks);
    }
}

static void
meter_retry(oomkit_call *call, int phase, oomkit_plan_reason reason)
{
    const oomkit_plan_change change = {
        .accumulation_steps = call->cut->count > 0 ? (uint64_t)call->cut->count : 1,
        .rung = call->log.rung,
        .reason = (uint32_t)reason,
    };

    oomkit_phases_retry(&call->sizes.meter->seen, phase, &change);
    call->sizes.meter->changed = phase;
}

void
oomkit_window_climbed(oomkit_call *call)
{
    oomkit_phase_meter *meter = call->sizes.meter;
    oomkit_phase_figures *figures =
        meter == NULL ? NULL : &meter->seen.of[meter->changed];

    if (figures != NULL && figures->retries > 0 &&
        figures->retries <= OOMKIT_PHASE_CHANGES) {
        figures->changes[figures->retries - 1].rung = call->log.rung;
    }
}

void
oomkit_window_lost(oomkit_call *call)
{
    const Py_ssize_t count = call->tries.count;

    if (call->sizes.meter != NULL) {
        oomkit_meter_lost(call->st, call->sizes.meter);
        meter_retry(
            call, count > 0 ? call->tries.items[count - 1].phase : OOMKIT_PHASE_FORWARD,
            call->cut->reason);
    }
}

void
oomkit_window_update_again(oomkit_call *call)
{
    if (call->sizes.meter != NULL) {
        meter_retry(call, OOMKIT_PHASE_OPTIMIZER,
                    call->log.rung > 0 ? OOMKIT_REASON_CLIMBED : OOMKIT_REASON_FLUSHED);
    }
}

const oomkit_phases *
oomkit_phases_of_call(oomkit_call *call)
{
    oomkit_phase_meter *meter = call->sizes.meter;
    uint32_t noted = 0;
    Py_ssize_t i;

    if (meter == NULL) {
        return NULL;
    }
    oomkit_meter_close(call->st, meter);
    for (i = 0; i < OOMKIT_PHASE_FIGURES; i++) {
        meter->seen.of[i].ooms = 0;
    }
    for (i = 0; i < call->tries.count; i++, noted++) {
        meter->seen.of[call->tries.items[i].phase].ooms++;
    }
    /* An update that was made again at once is not an attempt. */
    meter->seen.of[OOMKIT_PHASE_OPTIMIZER].ooms +=
        call->tries.ooms > noted ? call->tries.ooms - noted : 0;
    return &meter->seen;
}

void
oomkit_window_anew(oomkit_call *call)
{
    oomkit_window_end(call);
    oomkit_device_begin(call->st, call->device, call->options->reset_peaks,
                        &call->sizes.window);
}

void
oomkit_window_of_loop(oomkit_call *call)
{
    call->sizes.baseline = oomkit_device_allocated(call->st, call->device);
    call->sizes.window.budget_bytes = oomkit_device_budget(call->st, call->device);
    call->sizes.window.free_bytes = OOMKIT_UNKNOWN;
}

void
oomkit_window_of_part(oomkit_call *call, uint64_t peak_bytes)
{
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
