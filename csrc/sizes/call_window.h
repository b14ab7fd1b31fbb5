/* What is measured of a call: its window, and the highest figures of those that are
 * closed. On the way of a healthy call. */
#ifndef OOMKIT_SIZES_CALL_WINDOW_H
#define OOMKIT_SIZES_CALL_WINDOW_H

#include "../call/call_types.h"

/* --- call_window.c --- */
/* The window of the call, and what is allocated before it; after a failure a new one.
 */
void
oomkit_window_begin(oomkit_call *call);
void
oomkit_window_anew(oomkit_call *call);
/* A loop has none: its parts are measured one by one. What is allocated before it. */
void
oomkit_window_of_loop(oomkit_call *call);
/* A part of it took so much at most (OOMKIT_UNKNOWN: it was not measured). */
void
oomkit_window_of_part(oomkit_call *call, uint64_t peak_bytes);

/* All that was measured until now was in vain: the call goes on with the plan it has.
 */
void
oomkit_window_lost(oomkit_call *call);
/* An update that ran out of memory was or will be made once more, in this attempt. */
void
oomkit_window_update_again(oomkit_call *call);
/* The plan that it went on with last came to a higher rung on the way. */
void
oomkit_window_climbed(oomkit_call *call);

/* What the phases took until now, or NULL; they are not measured further. Borrowed from
 * the call. */
const oomkit_phases *
oomkit_phases_of_call(oomkit_call *call);

/* Keeps the highest peaks of the windows of this call. */
static inline void
oomkit_window_merge(oomkit_call *call)
{
    oomkit_sizes_seen *sizes = &call->sizes;
    const oomkit_peak_window *w = &sizes->window;

    if (w->peak_allocated_bytes != OOMKIT_UNKNOWN &&
        w->peak_allocated_bytes > sizes->peak_allocated) {
        sizes->peak_allocated = w->peak_allocated_bytes;
    }
    if (w->peak_reserved_bytes != OOMKIT_UNKNOWN &&
        w->peak_reserved_bytes > sizes->peak_reserved) {
        sizes->peak_reserved = w->peak_reserved_bytes;
    }
}

static inline void
oomkit_window_end(oomkit_call *call)
{
    oomkit_device_end(call->st, &call->sizes.window);
    oomkit_window_merge(call);
}

/* The end of all measuring. */
static inline void
oomkit_meter_release(oomkit_call *call)
{
    if (call->sizes.meter != NULL) {
        oomkit_meter_close(call->st, call->sizes.meter);
        MEMORY_CLEAR(call->sizes.meter);
    }
}

/* One that nobody else has ended, of a call whose figures are not recorded. */
static inline void
oomkit_window_close(oomkit_call *call)
{
    if (call->sizes.window.open) {
        oomkit_device_end(call->st, &call->sizes.window);
    }
}

/* The peak of the last window, and the highest of all. */
static inline uint64_t
oomkit_window_peak(const oomkit_call *call)
{
    return call->sizes.window.peak_allocated_bytes;
}

/* What the window shows so far, while it is open. */
static inline uint64_t
oomkit_window_peak_now(const oomkit_call *call)
{
    return oomkit_device_peak(call->st, &call->sizes.window);
}

static inline uint64_t
oomkit_peak_of_call(const oomkit_call *call)
{
    return call->sizes.peak_allocated;
}

/* What was allocated at entry, gradients that the step drops too. */
static inline uint64_t
oomkit_baseline_at_entry(const oomkit_call *call)
{
    return call->sizes.baseline;
}

/* Where that could not be told, this is taken for it. */
static inline void
oomkit_baseline_else(oomkit_call *call, uint64_t bytes)
{
    if (call->sizes.baseline == OOMKIT_UNKNOWN) {
        call->sizes.baseline = bytes;
    }
}

/* All of it into the record of the call. */
static inline void
oomkit_sizes_record(const oomkit_call *call, oomkit_record *record)
{
    const oomkit_sizes_seen *sizes = &call->sizes;

    record->baseline_bytes = sizes->baseline;
    record->peak_allocated_bytes =
        sizes->peak_allocated == 0 ? OOMKIT_UNKNOWN : sizes->peak_allocated;
    record->peak_reserved_bytes =
        sizes->peak_reserved == 0 ? OOMKIT_UNKNOWN : sizes->peak_reserved;
    record->device_free_bytes = sizes->window.free_bytes;
    record->budget_bytes = sizes->window.budget_bytes;
}

#endif
