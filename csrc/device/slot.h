/* The table of the accelerators that figures were asked of. Only what is about devices
 * uses this. */
#ifndef OOMKIT_DEVICE_SLOT_H
#define OOMKIT_DEVICE_SLOT_H

#include "device.h"

/* What is known of one accelerator. The counters of a device belong to the process, and
 * so does this; the GIL guards it. */
typedef struct device_slot {
    oomkit_device device;
    oomkit_peak_window *innermost; /* borrowed: open windows, the latest first */
    uint64_t budget_bytes;         /* OOMKIT_UNKNOWN without a limit of ours */
    uint64_t share_bytes;          /* of the program, as it was when last looked at;
                                      OOMKIT_UNKNOWN without one */
    uint64_t peak_bytes;           /* highest of the run, 0 before the first figure */
    int looked;                    /* share_bytes has been looked at */
    int stats_thrown;              /* in a row: an allocator that has none says so
                                      by throwing, which takes microseconds */
    int resets_thrown;
} device_slot;

static inline uint64_t
left_of(uint64_t budget_bytes, uint64_t used_bytes)
{
    if (budget_bytes == OOMKIT_UNKNOWN || used_bytes == OOMKIT_UNKNOWN) {
        return OOMKIT_UNKNOWN;
    }
    return used_bytes < budget_bytes ? budget_bytes - used_bytes : 0;
}

static inline uint64_t
larger_known(uint64_t seen, uint64_t value)
{
    return seen == OOMKIT_UNKNOWN || seen < value ? value : seen;
}

/* NULL when the table is full and `device` not in it. */
device_slot *
oomkit_slot_find(oomkit_device device);

/* The limit in force: ours, else the share that the program has asked torch for. */
uint64_t
oomkit_slot_limit(const device_slot *slot);

/* OOMKIT_OK with *stats filled, else everything OOMKIT_UNKNOWN. Keeps an exception that
 * is in flight. */
int
oomkit_accelerator_stats(oomkit_state *st, oomkit_device device,
                         oomkit_memory_stats *stats);

/* The same contract. */
int
oomkit_accelerator_reset_peak(oomkit_state *st, device_slot *slot);

#endif
