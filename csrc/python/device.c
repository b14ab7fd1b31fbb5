/* Memory figures of the CPU (the bridge's budget allocator) and of accelerators (the
 * bridge, or torch's own calls where there is none). */
#include "device.h"
#include "errors.h"
#include "device_calls.h"

#include "../core/status.h"

#define DEVICE_SLOTS 64

/* What is known of one accelerator. The counters of a device belong to the process, and
 * so does this; the GIL guards it. */
typedef struct device_slot {
    oomkit_device device;
    oomkit_peak_window *innermost; /* borrowed: open windows, the latest first */
    uint64_t budget_bytes;         /* OOMKIT_UNKNOWN without a limit */
    uint64_t peak_bytes;           /* highest of the run, 0 before the first figure */
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
    slot->device = device;
    slot->innermost = NULL;
    slot->budget_bytes = OOMKIT_UNKNOWN;
    slot->peak_bytes = 0;
    return slot;
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

int
oomkit_device_by_bridge(const oomkit_state *st, int type)
{
    return st->bridge != NULL &&
           (type != OOMKIT_DEVICE_MPS ||
            st->bridge->device_initialized(type) != OOMKIT_EUNSUPPORTED);
}

int
oomkit_device_ready(oomkit_state *st, oomkit_device device)
{
    PyObject *in_flight; /* owned */
    int ready;

    if (device.type == OOMKIT_DEVICE_CPU) {
        return 1;
    }
    if (oomkit_device_by_bridge(st, device.type)) {
        return st->bridge->device_initialized(device.type) == 1;
    }
    in_flight = oomkit_exception_take();
    ready = oomkit_torch_ready(st, device);
    if (in_flight != NULL) {
        oomkit_exception_give(in_flight);
    }
    return ready;
}

int
oomkit_device_expandable(oomkit_state *st, oomkit_device device)
{
    PyObject *in_flight; /* owned */
    int on;

    if (oomkit_device_by_bridge(st, device.type)) {
        return st->bridge->device_expandable(device.type) == 1;
    }
    in_flight = oomkit_exception_take();
    on = oomkit_torch_ready(st, device) && oomkit_torch_expandable();
    if (in_flight != NULL) {
        oomkit_exception_give(in_flight);
    }
    return on;
}

/* OOMKIT_OK with *stats filled, else everything OOMKIT_UNKNOWN. Keeps an exception that
 * is in flight. */
static int
accelerator_stats(oomkit_state *st, oomkit_device device, oomkit_memory_stats *stats)
{
    PyObject *in_flight; /* owned */
    int status;

    stats_clear(stats);
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
    return status;
}

static int
accelerator_reset_peak(oomkit_state *st, oomkit_device device)
{
    PyObject *in_flight; /* owned */
    int status;

    if (oomkit_device_by_bridge(st, device.type)) {
        return st->bridge->device_reset_peak(device.type, device.index);
    }
    in_flight = oomkit_exception_take();
    status = oomkit_torch_reset_peak(st, device);
    if (in_flight != NULL) {
        oomkit_exception_give(in_flight);
    }
    return status;
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
        slot_merge(st, slot, &stats);
        window->baseline_bytes = stats.allocated;
        window->alloc_retries = stats.num_alloc_retries;
        window->reset = reset &&
                        stats.peak_allocated != OOMKIT_UNKNOWN && /* some have none */
                        accelerator_reset_peak(st, window->device) == OOMKIT_OK;
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
    window->budget_bytes = slot->budget_bytes;
    window->free_bytes = left_of(slot->budget_bytes, stats.reserved);
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

/* What the driver says of a ready device, and the limit that somebody else has put on
 * this process where none is ours. 0 or -1. */
static int
driver_figures(oomkit_state *st, oomkit_device device, oomkit_memory_stats *stats,
               uint64_t *budget_bytes)
{
    double fraction;

    if (oomkit_torch_free_and_total(device, stats) < 0 ||
        oomkit_torch_fraction(st, device, &fraction) < 0) {
        return -1;
    }
    if (*budget_bytes == OOMKIT_UNKNOWN && stats->total != OOMKIT_UNKNOWN &&
        fraction < 1.0) {
        *budget_bytes = (uint64_t)(fraction * (double)stats->total);
    }
    return 0;
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
        if (slot != NULL) {
            *budget_bytes = slot->budget_bytes;
        }
        (void)accelerator_stats(st, device, stats); /* a pluggable allocator has none */
        return oomkit_device_ready(st, device)
                   ? driver_figures(st, device, stats, budget_bytes)
                   : 0;
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
        return slot == NULL ? OOMKIT_UNKNOWN : slot->budget_bytes;
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
    return OOMKIT_OK;
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

void
oomkit_exempt_enter(oomkit_state *st)
{
    if (st->bridge != NULL) {
        st->bridge->exempt_enter();
    }
}

void
oomkit_exempt_leave(oomkit_state *st)
{
    if (st->bridge != NULL) {
        st->bridge->exempt_leave();
    }
}

int
oomkit_phase_set(oomkit_state *st, int phase)
{
    return st->bridge == NULL ? OOMKIT_PHASE_FORWARD : st->bridge->set_phase(phase);
}
