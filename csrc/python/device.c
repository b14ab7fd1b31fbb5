/* Memory figures of the CPU (the bridge's budget allocator) and of accelerators (the
 * bridge, or torch's own calls where there is none). */
#include "device.h"
#include "device_calls.h"
#include "errors.h"

#include "../core/status.h"

#define DEVICE_SLOTS 64
#define TRIES 3 /* an allocator that throws each time is not asked again */

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
    int stats_thrown;              /* in a row: a pluggable allocator has none and says
                                      so by throwing, which takes microseconds */
    int resets_thrown;
} device_slot;

static device_slot device_slots[DEVICE_SLOTS];
static int device_slot_count;

/* NULL when the table is full and `device` not in it. */
static device_slot *
slot_find(oomkit_device device)
{
    device_slot *slot;
    for (int i = 0; i < device_slot_count; i++) {
        slot = &device_slots[i];
        if (slot->device.type == device.type && slot->device.index == device.index) {
            return slot;
        }
    }
    if (device_slot_count == DEVICE_SLOTS) {
        return NULL;
    }
    slot = &device_slots[device_slot_count++];
    *slot = (device_slot){
        .device = device,
        .budget_bytes = OOMKIT_UNKNOWN,
        .share_bytes = OOMKIT_UNKNOWN,
    };
    return slot;
}

/* The limit in force: ours, else the share that the program has asked torch for. */
static uint64_t
slot_limit(const device_slot *slot)
{
    return slot->budget_bytes != OOMKIT_UNKNOWN ? slot->budget_bytes
                                                : slot->share_bytes;
}

static uint64_t
left_of(uint64_t budget_bytes, uint64_t used_bytes)
{
    if (budget_bytes == OOMKIT_UNKNOWN || used_bytes == OOMKIT_UNKNOWN) {
        return OOMKIT_UNKNOWN;
    }
    return used_bytes < budget_bytes ? budget_bytes - used_bytes : 0;
}

static uint64_t
larger_known(uint64_t seen, uint64_t value)
{
    return seen == OOMKIT_UNKNOWN || seen < value ? value : seen;
}

static void
stats_clear(oomkit_memory_stats *stats)
{
    *stats = (oomkit_memory_stats){
        .allocated = OOMKIT_UNKNOWN,
        .reserved = OOMKIT_UNKNOWN,
        .peak_allocated = OOMKIT_UNKNOWN,
        .peak_reserved = OOMKIT_UNKNOWN,
        .free = OOMKIT_UNKNOWN,
        .total = OOMKIT_UNKNOWN,
        .num_alloc_retries = OOMKIT_UNKNOWN,
        .num_ooms = OOMKIT_UNKNOWN,
    };
}

/* --- accelerators, by either way --- */

/* OOMKIT_OK with *stats filled, else everything OOMKIT_UNKNOWN. Keeps an exception that
 * is in flight. */
static int
accelerator_stats(oomkit_state *st, oomkit_device device, oomkit_memory_stats *stats)
{
    device_slot *slot = slot_find(device);
    PyObject *in_flight; /* owned */
    int status;

    stats_clear(stats);
    if (slot != NULL && slot->stats_thrown == TRIES) {
        return OOMKIT_EFAILED;
    }
    if (oomkit_device_by_bridge(st, device.type)) {
        status = st->bridge->device_stats(device.type, device.index, stats);
    } else {
        in_flight = oomkit_exception_take();
        status = oomkit_torch_stats(st, device, stats);
        if (in_flight != NULL) {
            oomkit_exception_give(in_flight);
        }
    }
    if (status != OOMKIT_OK) {
        stats_clear(stats);
    }
    if (slot != NULL) {
        slot->stats_thrown = status == OOMKIT_EFAILED ? slot->stats_thrown + 1 : 0;
    }
    return status;
}

static int
accelerator_reset_peak(oomkit_state *st, device_slot *slot)
{
    const oomkit_device device = slot->device;
    PyObject *in_flight; /* owned */
    int status;

    if (slot->resets_thrown == TRIES) {
        return OOMKIT_EFAILED;
    }
    if (oomkit_device_by_bridge(st, device.type)) {
        status = st->bridge->device_reset_peak(device.type, device.index);
    } else {
        in_flight = oomkit_exception_take();
        status = oomkit_torch_reset_peak(st, device);
        if (in_flight != NULL) {
            oomkit_exception_give(in_flight);
        }
    }
    slot->resets_thrown = status == OOMKIT_EFAILED ? slot->resets_thrown + 1 : 0;
    return status;
}

/* What the driver says of a ready device into *stats, where that is asked for, and the
 * program's share of it into its slot. 0 or -1. */
static int
slot_look(oomkit_state *st, device_slot *slot, oomkit_device device,
          oomkit_memory_stats *stats)
{
    double fraction = 1.0;
    oomkit_memory_stats own;

    if (stats != NULL && oomkit_torch_free_and_total(st, device, stats) < 0) {
        return -1;
    }
    if (slot == NULL) {
        return 0;
    }
    slot->looked = 1;
    slot->share_bytes = OOMKIT_UNKNOWN;
    if (slot->budget_bytes != OOMKIT_UNKNOWN) {
        return 0; /* the share that torch has now is ours */
    }
    if (oomkit_torch_fraction(st, device, &fraction) < 0) {
        return -1;
    }
    if (fraction >= 1.0) {
        return 0;
    }
    if (stats == NULL) {
        stats = &own;
        stats_clear(stats);
        if (oomkit_torch_free_and_total(st, device, stats) < 0) {
            return -1;
        }
    }
    if (stats->total != OOMKIT_UNKNOWN) {
        slot->share_bytes = (uint64_t)(fraction * (double)stats->total);
    }
    return 0;
}

void
oomkit_device_look(oomkit_state *st, oomkit_device device)
{
    device_slot *slot = slot_find(device);
    PyObject *in_flight; /* owned */

    if (device.type == OOMKIT_DEVICE_CPU || slot == NULL ||
        !oomkit_device_ready(st, device)) {
        return;
    }
    in_flight = oomkit_exception_take();
    if (slot_look(st, slot, device, NULL) < 0) {
        oomkit_error_dismiss(); /* the share is a hint until the driver answers */
    }
    if (in_flight != NULL) {
        oomkit_exception_give(in_flight);
    }
}

/* The device's counters go into every open window and into the maximum of the run, so
 * that a reset that follows loses nothing. */
static void
slot_merge(oomkit_state *st, device_slot *slot, const oomkit_memory_stats *stats)
{
    oomkit_peak_window *window; /* borrowed from the calls that opened them */

    for (window = slot->innermost; window != NULL; window = window->outer) {
        window->peak_allocated_bytes =
            larger_known(window->peak_allocated_bytes, stats->peak_allocated);
        window->peak_reserved_bytes =
            larger_known(window->peak_reserved_bytes, stats->peak_reserved);
    }
    if (stats->peak_allocated != OOMKIT_UNKNOWN) {
        slot->peak_bytes = larger_known(slot->peak_bytes, stats->peak_allocated);
        st->run_peak_bytes = larger_known(st->run_peak_bytes, slot->peak_bytes);
    }
}

/* Windows of several threads may end in any order: take this one out wherever it is. */
static void
slot_remove(device_slot *slot, oomkit_peak_window *window)
{
    oomkit_peak_window **link = &slot->innermost;
    while (*link != NULL && *link != window) {
        link = &(*link)->outer;
    }
    if (*link == window) {
        *link = window->outer;
    }
}

static void
accelerator_begin(oomkit_state *st, int reset, oomkit_peak_window *window)
{
    device_slot *slot = slot_find(window->device);
    oomkit_memory_stats stats;

    if (slot == NULL) {
        return;
    }
    /* A device that is initialised inside the window has no figures yet; what its
     * counters say at the end all happened in between. */
    if (accelerator_stats(st, window->device, &stats) == OOMKIT_OK) {
        if (!slot->looked) {
            oomkit_device_look(st, window->device);
        }
        slot_merge(st, slot, &stats);
        window->baseline_bytes = stats.allocated;
        window->alloc_retries = stats.num_alloc_retries;
        window->reset = reset &&
                        stats.peak_allocated != OOMKIT_UNKNOWN && /* some have none */
                        accelerator_reset_peak(st, slot) == OOMKIT_OK;
        window->peak_allocated_bytes =
            window->reset ? stats.allocated : stats.peak_allocated;
        window->peak_reserved_bytes =
            window->reset ? stats.reserved : stats.peak_reserved;
    }
    window->outer = slot->innermost;
    slot->innermost = window;
}

static void
accelerator_end(oomkit_state *st, oomkit_peak_window *window)
{
    device_slot *slot = slot_find(window->device);
    oomkit_memory_stats stats;

    if (slot == NULL) {
        return;
    }
    if (accelerator_stats(st, window->device, &stats) == OOMKIT_OK) {
        slot_merge(st, slot, &stats);
    } else {
        window->peak_allocated_bytes = OOMKIT_UNKNOWN;
        window->peak_reserved_bytes = OOMKIT_UNKNOWN;
    }
    window->alloc_retries = stats.num_alloc_retries == OOMKIT_UNKNOWN ||
                                    window->alloc_retries == OOMKIT_UNKNOWN
                                ? OOMKIT_UNKNOWN
                                : stats.num_alloc_retries - window->alloc_retries;
    slot_remove(slot, window);
    window->outer = NULL;
    window->budget_bytes = slot_limit(slot);
    window->free_bytes = left_of(window->budget_bytes, stats.reserved);
}

/* --- the interface --- */

void
oomkit_device_prepare(oomkit_state *st, oomkit_device device)
{
    if (device.type == OOMKIT_DEVICE_CPU && st->bridge != NULL) {
        /* Refused when somebody else's allocator is there: figures stay unknown. */
        (void)st->bridge->cpu_install();
    }
}

void
oomkit_device_begin(oomkit_state *st, oomkit_device device, int reset,
                    oomkit_peak_window *window)
{
    oomkit_cpu_stats cpu;

    *window = (oomkit_peak_window){
        .outer = NULL,
        .device = device,
        .cpu_window = -1,
        .open = 1,
        .baseline_bytes = OOMKIT_UNKNOWN,
        .alloc_retries = OOMKIT_UNKNOWN,
        .peak_allocated_bytes = OOMKIT_UNKNOWN,
        .peak_reserved_bytes = OOMKIT_UNKNOWN,
        .free_bytes = OOMKIT_UNKNOWN,
        .budget_bytes = OOMKIT_UNKNOWN,
    };
    if (device.type != OOMKIT_DEVICE_CPU) {
        accelerator_begin(st, reset, window);
        return;
    }
    if (st->bridge == NULL || !st->bridge->cpu_installed()) {
        return;
    }
    st->bridge->cpu_stats(&cpu);
    window->baseline_bytes = cpu.allocated;
    if (st->bridge->cpu_peak_push(&window->cpu_window) != OOMKIT_OK) {
        window->cpu_window = -1;
    }
}

void
oomkit_device_end(oomkit_state *st, oomkit_peak_window *window)
{
    oomkit_cpu_stats cpu;

    if (!window->open) {
        return;
    }
    window->open = 0;
    if (window->device.type != OOMKIT_DEVICE_CPU) {
        accelerator_end(st, window);
        return;
    }
    if (window->baseline_bytes == OOMKIT_UNKNOWN) {
        return;
    }
    if (window->cpu_window >= 0) {
        window->peak_allocated_bytes = st->bridge->cpu_peak_pop(window->cpu_window);
        window->cpu_window = -1;
    }
    st->bridge->cpu_stats(&cpu);
    window->budget_bytes = cpu.limit;
    window->free_bytes = left_of(cpu.limit, cpu.allocated);
}

uint64_t
oomkit_device_allocated(oomkit_state *st, oomkit_device device)
{
    oomkit_memory_stats stats;
    oomkit_cpu_stats cpu;

    if (device.type != OOMKIT_DEVICE_CPU) {
        accelerator_stats(st, device, &stats);
        return stats.allocated;
    }
    if (st->bridge == NULL || !st->bridge->cpu_installed()) {
        return OOMKIT_UNKNOWN;
    }
    st->bridge->cpu_stats(&cpu);
    return cpu.allocated;
}

void
oomkit_device_held(oomkit_state *st, oomkit_device device, uint64_t *allocated_bytes,
                   uint64_t *reserved_bytes)
{
    oomkit_memory_stats stats;

    *reserved_bytes = OOMKIT_UNKNOWN;
    if (device.type == OOMKIT_DEVICE_CPU) {
        *allocated_bytes = oomkit_device_allocated(st, device);
        return;
    }
    accelerator_stats(st, device, &stats);
    *allocated_bytes = stats.allocated;
    *reserved_bytes = stats.reserved;
}

int
oomkit_device_figures(oomkit_state *st, oomkit_device device,
                      oomkit_memory_stats *stats, uint64_t *budget_bytes)
{
    oomkit_cpu_stats cpu;
    device_slot *slot;

    *budget_bytes = OOMKIT_UNKNOWN;
    if (device.type != OOMKIT_DEVICE_CPU) {
        slot = slot_find(device);
        (void)accelerator_stats(st, device, stats); /* a pluggable allocator has none */
        if (oomkit_device_ready(st, device) && slot_look(st, slot, device, stats) < 0) {
            return -1;
        }
        if (slot != NULL) {
            *budget_bytes = slot_limit(slot);
        }
        return 0;
    }
    stats_clear(stats);
    if (st->bridge == NULL || !st->bridge->cpu_installed()) {
        return 0;
    }
    st->bridge->cpu_stats(&cpu);
    stats->allocated = cpu.allocated;
    stats->peak_allocated = cpu.peak_allocated;
    stats->free = left_of(cpu.limit, cpu.allocated);
    *budget_bytes = cpu.limit;
    return 0;
}

uint64_t
oomkit_device_budget(oomkit_state *st, oomkit_device device)
{
    oomkit_cpu_stats cpu;
    const device_slot *slot;

    if (device.type != OOMKIT_DEVICE_CPU) {
        slot = slot_find(device);
        return slot == NULL ? OOMKIT_UNKNOWN : slot_limit(slot);
    }
    if (st->bridge == NULL || !st->bridge->cpu_installed()) {
        return OOMKIT_UNKNOWN;
    }
    st->bridge->cpu_stats(&cpu);
    return cpu.limit;
}

uint64_t
oomkit_device_usable(oomkit_state *st, oomkit_device device)
{
    oomkit_memory_stats stats;
    uint64_t budget, usable;

    if (oomkit_device_figures(st, device, &stats, &budget) < 0) {
        oomkit_error_dismiss(); /* the planner goes without it */
        return OOMKIT_UNKNOWN;
    }
    if (stats.free == OOMKIT_UNKNOWN || stats.reserved == OOMKIT_UNKNOWN) {
        return OOMKIT_UNKNOWN;
    }
    usable = stats.free + stats.reserved;
    return budget < usable ? budget : usable;
}

int
oomkit_device_budget_set(oomkit_device device, uint64_t budget_bytes)
{
    device_slot *slot = slot_find(device);
    if (slot == NULL) {
        return OOMKIT_EREFUSED;
    }
    slot->budget_bytes = budget_bytes;
    slot->share_bytes = OOMKIT_UNKNOWN;
    slot->looked = slot->stats_thrown = slot->resets_thrown = 0; /* see for once more */
    return OOMKIT_OK;
}

uint64_t
oomkit_device_budget_noted(oomkit_device device)
{
    const device_slot *slot = slot_find(device);

    return slot == NULL ? OOMKIT_UNKNOWN : slot->budget_bytes;
}

uint64_t
oomkit_device_run_peak(oomkit_state *st, oomkit_device device)
{
    oomkit_memory_stats stats;
    oomkit_cpu_stats cpu;
    device_slot *slot;

    if (device.type == OOMKIT_DEVICE_CPU) {
        if (st->bridge == NULL || !st->bridge->cpu_installed()) {
            return OOMKIT_UNKNOWN;
        }
        st->bridge->cpu_stats(&cpu);
        return cpu.peak_allocated;
    }
    slot = slot_find(device);
    if (accelerator_stats(st, device, &stats) != OOMKIT_OK || slot == NULL) {
        return OOMKIT_UNKNOWN;
    }
    return larger_known(slot->peak_bytes, stats.peak_allocated);
}
