/* A window has a bit in two masks. `taken` says that the slot has an owner; `open` says
 * that notes raise it, and is set only after the slot holds its starting value. With
 * one mask a note between taking the slot and storing the start would be overwritten,
 * or a late note for the previous owner would be seen by the next one. */
#include "peak.h"
#include "status.h"

#include <stdatomic.h>
#include <stdlib.h>

struct oomkit_peak {
    _Atomic uint64_t maximum_bytes;
    _Atomic uint64_t taken;
    _Atomic uint64_t open;
    _Atomic uint64_t highest_bytes[OOMKIT_PEAK_WINDOWS];
};

_Static_assert(OOMKIT_PEAK_WINDOWS == 64, "one bit of a uint64_t for each window");

oomkit_peak *
oomkit_peak_create(void)
{
    oomkit_peak *peak = calloc(1, sizeof(*peak));
    int i;

    if (peak == NULL) {
        return NULL;
    }
    atomic_init(&peak->maximum_bytes, 0);
    atomic_init(&peak->taken, 0);
    atomic_init(&peak->open, 0);
    for (i = 0; i < OOMKIT_PEAK_WINDOWS; i++) {
        atomic_init(&peak->highest_bytes[i], 0);
    }
    return peak;
}

void
oomkit_peak_destroy(oomkit_peak *peak)
{
    free(peak);
}

/* Index of the lowest bit that is set; `mask` is not 0. */
static int
lowest(uint64_t mask)
{
#if defined(__GNUC__) /* one instruction: this is asked at every allocation */
    return __builtin_ctzll(mask);
#else
    int index = 0;

    for (; (mask & 1) == 0; mask >>= 1) {
        index++;
    }
    return index;
#endif
}

static void
raise_to(_Atomic uint64_t *highest, uint64_t value)
{
    uint64_t seen = atomic_load_explicit(highest, memory_order_relaxed);

    while (seen < value &&
           !atomic_compare_exchange_weak_explicit(
               highest, &seen, value, memory_order_relaxed, memory_order_relaxed)) {
    }
}

void
oomkit_peak_note(oomkit_peak *peak, uint64_t value_bytes)
{
    uint64_t open = atomic_load_explicit(&peak->open, memory_order_acquire);

    raise_to(&peak->maximum_bytes, value_bytes);
    for (; open != 0; open &= open - 1) {
        raise_to(&peak->highest_bytes[lowest(open)], value_bytes);
    }
}

int
oomkit_peak_push(oomkit_peak *peak, uint64_t value_bytes, int *window)
{
    uint64_t taken = atomic_load_explicit(&peak->taken, memory_order_relaxed);
    uint64_t bit;
    int index;

    do {
        if (taken == UINT64_MAX) {
            return OOMKIT_EREFUSED;
        }
        index = lowest(~taken);
        bit = UINT64_C(1) << index;
    } while (!atomic_compare_exchange_weak_explicit(
        &peak->taken, &taken, taken | bit, memory_order_acquire, memory_order_relaxed));
    atomic_store_explicit(&peak->highest_bytes[index], value_bytes,
                          memory_order_relaxed);
    atomic_fetch_or_explicit(&peak->open, bit, memory_order_release);
    raise_to(&peak->maximum_bytes, value_bytes);
    *window = index;
    return OOMKIT_OK;
}

uint64_t
oomkit_peak_pop(oomkit_peak *peak, int window)
{
    uint64_t bit, value;

    if (window < 0 || window >= OOMKIT_PEAK_WINDOWS) {
        return 0;
    }
    bit = UINT64_C(1) << window;
    if ((atomic_fetch_and_explicit(&peak->open, ~bit, memory_order_relaxed) & bit) ==
        0) {
        return 0; /* not open: the slot may have no owner, or be on its way to one */
    }
    value = atomic_load_explicit(&peak->highest_bytes[window], memory_order_relaxed);
    atomic_fetch_and_explicit(&peak->taken, ~bit, memory_order_release);
    return value;
}

uint64_t
oomkit_peak_read(const oomkit_peak *peak, int window)
{
    if (window < 0 || window >= OOMKIT_PEAK_WINDOWS) {
        return 0;
    }
    return atomic_load_explicit(&peak->highest_bytes[window], memory_order_relaxed);
}

uint64_t
oomkit_peak_maximum(const oomkit_peak *peak)
{
    return atomic_load_explicit(&peak->maximum_bytes, memory_order_relaxed);
}
