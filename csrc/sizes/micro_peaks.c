/* The peak of each micro-batch while a call is split, that of the optimizer apart: what
 * the planner learns from. The peak of a whole call is its own window's. */
#include "sizes.h"
#include "../batch/batch.h"

/* The peak of a window above what was there before the step; 0 when not known. */
static uint64_t
phase_bytes(const oomkit_call *call, const oomkit_peak_window *window)
{
    uint64_t peak = window->peak_allocated_bytes, below = oomkit_baseline(call);
    return peak == OOMKIT_UNKNOWN || below == OOMKIT_UNKNOWN || peak <= below
               ? 0
               : peak - below;
}

static uint64_t
phase_close(oomkit_call *call)
{
    oomkit_device_end(call->st, &call->cut->micro);
    return phase_bytes(call, &call->cut->micro);
}

/* Of later ones the largest counts, with the highest peak of all: results accumulate,
 * and the last slices may be a row shorter. */
void
oomkit_phase_note(oomkit_call *call, uint64_t bytes)
{
    oomkit_measured *m = &call->cut->measured;
    oomkit_role role = call->cut->at > 0 ? OOMKIT_LATER : OOMKIT_FIRST;
    int64_t rows = call->cut->slices[call->cut->at].length;

    if (rows > m->rows[role]) {
        m->rows[role] = rows;
    }
    if (bytes > m->bytes[role]) {
        m->bytes[role] = bytes;
    }
}

void
oomkit_phase_micro_begin(oomkit_call *call)
{
    if (call->split) {
        call->cut->in_optimizer = 0;
        oomkit_device_begin(call->st, call->device, call->options->reset_peaks,
                            &call->cut->micro);
    }
}

void
oomkit_phase_optimizer(oomkit_call *call)
{
    if (call->cut->micro.open && !call->cut->in_optimizer) {
        oomkit_phase_note(call, phase_close(call));
        call->cut->in_optimizer = 1;
        oomkit_device_begin(call->st, call->device, call->options->reset_peaks,
                            &call->cut->micro);
    }
}

void
oomkit_phase_micro_end(oomkit_call *call, int finished)
{
    uint64_t bytes;

    if (!call->cut->micro.open) {
        return;
    }
    bytes = phase_close(call);
    if (call->cut->in_optimizer) {
        if (bytes > call->cut->measured.optimizer_bytes) {
            call->cut->measured.optimizer_bytes = bytes;
        }
    } else if (finished) {
        oomkit_phase_note(call, bytes);
    }
}

void
oomkit_phase_whole(oomkit_call *call)
{
    call->cut->measured.rows[OOMKIT_FIRST] = oomkit_batch_rows(&call->batch);
    call->cut->measured.bytes[OOMKIT_FIRST] = phase_bytes(call, &call->sizes.window);
}
