/* Nearly every note is of the thread that opened the window, and while gradients
 * accumulate nearly every one raises it. So each window has a maximum that this thread
 * alone writes, by a plain store, and one for all others, raised by compare-exchange.
 *
 * `taken` says that a slot is used. Its `owner` is there only after the slot holds its
 * starting value: with `taken` alone a note between taking the slot and storing the
 * start would be overwritten. A thread may be about to store into a window that another
 * one closes: such a slot is used again only where no other one is left. */
#include "peak.h"
#include "status.h"

#include <stdatomic.h>
#include <stdlib.h>

typedef struct peak_window {
    _Atomic(const void *) owner;   /* NULL: it is not open */
    _Atomic uint64_t own_bytes;    /* the highest that its owner noted */
    _Atomic uint64_t others_bytes; /* ... that other threads noted */
} peak_window;

struct oomkit_peak {
    _Atomic uint64_t maximum_bytes;
    _Atomic uint64_t taken;
    _Atomic uint64_t last; /* closed by a thread that had not opened them */
    peak_window windows[OOMKIT_PEAK_WINDOWS];
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
    atomic_init(&peak->last, 0);
    for (i = 0; i < OOMKIT_PEAK_WINDOWS; i++) {
        atomic_init(&peak->windows[i].owner, NULL);
        atomic_init(&peak->windows[i].own_bytes, 0);
        atomic_init(&peak->windows[i].others_bytes, 0);
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

static void
window_note(peak_window *window, uint64_t value_bytes, const void *thread)
{
    const void *owner = atomic_load_explicit(&window->owner, memory_order_acquire);

    if (owner == thread) {
        if (atomic_load_explicit(&window->own_bytes, memory_order_relaxed) <
            value_bytes) {
            atomic_store_explicit(&window->own_bytes, value_bytes,
                                  memory_order_relaxed);
        }
    } else if (owner != NULL) {
        raise_to(&window->others_bytes, value_bytes);
    }
}

static uint64_t
window_highest(const peak_window *window)
{
    const uint64_t own = atomic_load_explicit(&window->own_bytes, memory_order_relaxed);
    const uint64_t others =
        atomic_load_explicit(&window->others_bytes, memory_order_relaxed);

    return own > others ? own : others;
}

void
oomkit_peak_note(oomkit_peak *peak, uint64_t value_bytes, const void *thread)
{
    uint64_t taken = atomic_load_explicit(&peak->taken, memory_order_relaxed);

    raise_to(&peak->maximum_bytes, value_bytes);
    for (; taken != 0; taken &= taken - 1) {
        window_note(&peak->windows[lowest(taken)], value_bytes, thread);
    }
}

int
oomkit_peak_push(oomkit_peak *peak, uint64_t value_bytes, const void *thread,
                 int *window)
{
    const uint64_t last = atomic_load_explicit(&peak->last, memory_order_relaxed);
    uint64_t taken = atomic_load_explicit(&peak->taken, memory_order_relaxed);
    uint64_t bit, avoided;
    peak_window *slot;
    int index;

    do {
        if (taken == UINT64_MAX) {
            return OOMKIT_EREFUSED;
        }
        avoided = (taken | last) == UINT64_MAX ? taken : taken | last;
        index = lowest(~avoided);
        bit = UINT64_C(1) << index;
    } while (!atomic_compare_exchange_weak_explicit(
        &peak->taken, &taken, taken | bit, memory_order_acquire, memory_order_relaxed));
    if ((last & bit) != 0) {
        atomic_fetch_and_explicit(&peak->last, ~bit, memory_order_relaxed);
    }
    slot = &peak->windows[index];
    atomic_store_explicit(&slot->own_bytes, value_bytes, memory_order_relaxed);
    atomic_store_explicit(&slot->others_bytes, 0, memory_order_relaxed);
    atomic_store_explicit(&slot->owner, thread, memory_order_release);
    raise_to(&peak->maximum_bytes, value_bytes);
    *window = index;
    return OOMKIT_OK;
}

uint64_t
oomkit_peak_pop(oomkit_peak *peak, int window, const void *thread)
{
    peak_window *slot;
    uint64_t bit, value;

    if (window < 0 || window >= OOMKIT_PEAK_WINDOWS) {
        return 0;
    }
    slot = &peak->windows[window];
    bit = UINT64_C(1) << window;
    if (atomic_load_explicit(&slot->owner, memory_order_relaxed) == thread) {
        atomic_store_explicit(&slot->owner, NULL, memory_order_relaxed);
    } else if (atomic_exchange_explicit(&slot->owner, NULL, memory_order_relaxed) ==
               NULL) {
        return 0; /* not open: the slot may have no owner, or be on its way to one */
    } else {
        atomic_fetch_or_explicit(&peak->last, bit, memory_order_relaxed);
    }
    value = window_highest(slot);
    atomic_fetch_and_explicit(&peak->taken, ~bit, memory_order_release);
    return value;
}

uint64_t
oomkit_peak_read(const oomkit_peak *peak, int window)
{
    if (window < 0 || window >= OOMKIT_PEAK_WINDOWS) {
        return 0;
    }
    return window_highest(&peak->windows[window]);
}

uint64_t
oomkit_peak_maximum(const oomkit_peak *peak)
{
    return atomic_load_explicit(&peak->maximum_bytes, memory_order_relaxed);
}
