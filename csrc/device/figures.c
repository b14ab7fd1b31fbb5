/* Memory figures of the CPU (the bridge's budget allocator) and of accelerators (the
 * bridge, or torch's own calls where there is none). */
#include "slot.h"
#include "torch_calls.h"
#include "../py/errors.h"
#include "../py/tensor.h"
#include "../core/status.h"

#define DEVICE_SLOTS 64
#define TRIES 3 /* an allocator that throws each time is not asked again */

static device_slot device_slots[DEVICE_SLOTS];
static int device_slot_count;

device_slot *
oomkit_slot_find(oomkit_device device)
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

uint64_t
oomkit_slot_limit(const device_slot *slot)
{
    return slot->budget_bytes != OOMKIT_UNKNOWN ? slot->budget_bytes
                                                : slot->share_bytes;
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
oomkit_accelerator_stats(oomkit_state *st, oomkit_device device,
                         oomkit_memory_stats *stats)
{
    device_slot *slot = oomkit_slot_find(device);
    int status = OOMKIT_EFAILED;

    stats_clear(stats);
    if (slot != NULL && slot->stats_thrown == TRIES) {
        return OOMKIT_EFAILED;
    }
    if (oomkit_device_by_bridge(st, device.type)) {
        status = st->bridge->device_stats(device.type, device.index, stats);
    } else {
        KEEPING_EXCEPTION {
            status = oomkit_torch_stats(st, device, stats);
        }
    }
    if (status != OOMKIT_OK) {
        stats_clear(stats);
    }
    if (slot != NULL) {
        slot->stats_thrown = status == OOMKIT_EFAILED ? slot->stats_thrown + 1
                             : status == OOMKIT_EOOM  ? slot->stats_thrown
                                                      : 0;
    }
    return status;
}

int
oomkit_accelerator_reset_peak(oomkit_state *st, device_slot *slot)
{
    const oomkit_device device = slot->device;
    int status = OOMKIT_EFAILED;

    if (slot->resets_thrown == TRIES) {
        return OOMKIT_EFAILED;
    }
    if (oomkit_device_by_bridge(st, device.type)) {
        status = st->bridge->device_reset_peak(device.type, device.index);
    } else {
        KEEPING_EXCEPTION {
            status = oomkit_torch_reset_peak(st, device);
        }
    }
    slot->resets_thrown = status == OOMKIT_EFAILED ? slot->resets_thrown + 1 : 0;
    return status;
}

/* What the driver says of a ready device into *stats, where that is asked for, and the
 * program's share of it into its slot. Of a device without a context either would make
 * one: both stay unknown. 0 or -1. */
static int
slot_look(oomkit_state *st, device_slot *slot, oomkit_device device,
          oomkit_memory_stats *stats)
{
    double fraction = 1.0;
    oomkit_memory_stats own;

    if (!oomkit_torch_has_context(device)) {
        return 0;
    }
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
    device_slot *slot = oomkit_slot_find(device);

    if (device.type == OOMKIT_DEVICE_CPU || slot == NULL ||
        !oomkit_device_ready(st, device)) {
        return;
    }
    KEEPING_EXCEPTION {
        if (slot_look(st, slot, device, NULL) < 0) {
            oomkit_error_dismiss(); /* the share is a hint until the driver answers */
        }
    }
}

/* --- the interface --- */

uint64_t
oomkit_device_allocated(oomkit_state *st, oomkit_device device)
{
    oomkit_memory_stats stats;
    oomkit_cpu_stats cpu;

    if (device.type != OOMKIT_DEVICE_CPU) {
        oomkit_accelerator_stats(st, device, &stats);
        return stats.allocated;
    }
    if (!st->bridge->cpu_installed()) {
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
    oomkit_accelerator_stats(st, device, &stats);
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
        slot = oomkit_slot_find(device);
        (void)oomkit_accelerator_stats(st, device,
                                       stats); /* some allocators have none */
        if (oomkit_device_ready(st, device) && slot_look(st, slot, device, stats) < 0) {
            return -1;
        }
        if (slot != NULL) {
            *budget_bytes = oomkit_slot_limit(slot);
        }
        return 0;
    }
    stats_clear(stats);
    if (!st->bridge->cpu_installed()) {
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
        slot = oomkit_slot_find(device);
        return slot == NULL ? OOMKIT_UNKNOWN : oomkit_slot_limit(slot);
    }
    st->bridge->cpu_stats(&cpu);
    return cpu.limit == OOMKIT_UNKNOWN || !st->bridge->cpu_installed() ? OOMKIT_UNKNOWN
                                                                       : cpu.limit;
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
    device_slot *slot = oomkit_slot_find(device);
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
    const device_slot *slot = oomkit_slot_find(device);

    return slot == NULL ? OOMKIT_UNKNOWN : slot->budget_bytes;
}

uint64_t
oomkit_device_run_peak(oomkit_state *st, oomkit_device device)
{
    oomkit_memory_stats stats;
    oomkit_cpu_stats cpu;
    device_slot *slot;

    if (device.type == OOMKIT_DEVICE_CPU) {
        if (!st->bridge->cpu_installed()) {
            return OOMKIT_UNKNOWN;
        }
        st->bridge->cpu_stats(&cpu);
        return cpu.peak_allocated;
    }
    slot = oomkit_slot_find(device);
    if (oomkit_accelerator_stats(st, device, &stats) != OOMKIT_OK || slot == NULL) {
        return OOMKIT_UNKNOWN;
    }
    return larger_known(slot->peak_bytes, stats.peak_allocated);
}
