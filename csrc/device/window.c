/* Measurements that are open from begin to end: peaks that nest, of several threads. */
#include "slot.h"
#include "../py/tensor.h"
#include "../core/status.h"

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
    device_slot *slot = oomkit_slot_find(window->device);
    oomkit_memory_stats stats;

    if (slot == NULL) {
        return;
    }
    /* A device that is initialised inside the window has no figures yet; what its
     * counters say at the end all happened in between. */
    if (oomkit_accelerator_stats(st, window->device, &stats) == OOMKIT_OK) {
        if (!slot->looked) {
            oomkit_device_look(st, window->device);
        }
        slot_merge(st, slot, &stats);
        window->baseline_bytes = stats.allocated;
        window->alloc_retries = stats.num_alloc_retries;
        window->reset = reset &&
                        stats.peak_allocated != OOMKIT_UNKNOWN && /* some have none */
                        oomkit_accelerator_reset_peak(st, slot) == OOMKIT_OK;
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
    device_slot *slot = oomkit_slot_find(window->device);
    oomkit_memory_stats stats;

    if (slot == NULL) {
        return;
    }
    if (oomkit_accelerator_stats(st, window->device, &stats) == OOMKIT_OK) {
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
    window->budget_bytes = oomkit_slot_limit(slot);
    window->free_bytes = left_of(window->budget_bytes, stats.reserved);
}

void
oomkit_device_prepare(oomkit_state *st, oomkit_device device)
{
    if (device.type == OOMKIT_DEVICE_CPU) {
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
    if (!st->bridge->cpu_installed()) {
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
oomkit_device_peak(oomkit_state *st, const oomkit_peak_window *window)
{
    oomkit_memory_stats stats;

    if (!window->open || window->device.type != OOMKIT_DEVICE_CPU) {
        if (window->open &&
            oomkit_accelerator_stats(st, window->device, &stats) == OOMKIT_OK) {
            return larger_known(window->peak_allocated_bytes, stats.peak_allocated);
        }
        return window->peak_allocated_bytes;
    }
    return window->cpu_window < 0 ? OOMKIT_UNKNOWN
                                  : st->bridge->cpu_peak_read(window->cpu_window);
}
