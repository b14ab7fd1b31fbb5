/* The slot of record number `index` has sequence 2 * index + 1 while it is written and
 * 2 * index + 2 afterwards; the upper bits count how often it has been amended. A
 * reader that finds the same sequence before and after its copy, and in it the number
 * that it asked for, has a whole record.
 *
 * Records are stored as atomic words. A plain copy that races with the writer would be
 * undefined even if it is thrown away afterwards; a release store and an acquire load
 * of a word cost nothing on x86 and order it against the sequence without a fence. */
#include "ring.h"
#include "../core/status.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define WORDS (sizeof(oomkit_record) / sizeof(uint64_t))

_Static_assert(sizeof(oomkit_record) % sizeof(uint64_t) == 0, "whole words");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "zero bytes are an atomic 0");

#define AMENDED_SHIFT 48 /* records: 2^47 steps are not reached */
#define NUMBER_MASK (((uint64_t)1 << AMENDED_SHIFT) - 1)

typedef struct ring_slot {
    _Atomic uint64_t sequence;
    _Atomic uint64_t words[WORDS];
} ring_slot;

struct oomkit_ring {
    uint64_t capacity;
    _Atomic uint64_t count;
    ring_slot slots[];
};

/* Where a record lies. A division takes as long as writing it. */
static uint64_t
place_of(const oomkit_ring *ring, uint64_t index)
{
    const uint64_t mask = ring->capacity - 1;

    return (ring->capacity & mask) == 0 ? index & mask : index % ring->capacity;
}

oomkit_ring *
oomkit_ring_create(uint64_t capacity)
{
    oomkit_ring *ring;

    if (capacity == 0 || capacity > (SIZE_MAX - sizeof(*ring)) / sizeof(ring_slot)) {
        return NULL;
    }
    ring = calloc(1, sizeof(*ring) + (size_t)capacity * sizeof(ring_slot));
    if (ring == NULL) {
        return NULL;
    }
    ring->capacity = capacity;
    /* The rest is zero already. Touching it would make a hundred kilobytes of each
     * ring resident, most of which a step that is called a few times never needs. */
    return ring;
}

void
oomkit_ring_destroy(oomkit_ring *ring)
{
    free(ring);
}

static void
slot_write(oomkit_ring *ring, uint64_t index, uint64_t amended,
           const oomkit_record *record)
{
    ring_slot *slot = &ring->slots[place_of(ring, index)];
    uint64_t sequence = (amended << AMENDED_SHIFT) | (2 * index + 1);
    uint64_t word;
    size_t i;

    atomic_store_explicit(&slot->sequence, sequence, memory_order_relaxed);
    for (i = 0; i < WORDS; i++) {
        memcpy(&word, (const char *)record + i * sizeof(word), sizeof(word));
        atomic_store_explicit(&slot->words[i], word, memory_order_release);
    }
    atomic_store_explicit(&slot->sequence, sequence + 1, memory_order_release);
}

void
oomkit_ring_push(oomkit_ring *ring, const oomkit_record *record)
{
    uint64_t index = atomic_load_explicit(&ring->count, memory_order_relaxed);

    slot_write(ring, index, 0, record);
    atomic_store_explicit(&ring->count, index + 1, memory_order_release);
}

void
oomkit_ring_amend(oomkit_ring *ring, uint64_t index, const oomkit_record *record)
{
    uint64_t count = atomic_load_explicit(&ring->count, memory_order_relaxed);

    if (index < count && index + ring->capacity >= count) {
        const ring_slot *slot = &ring->slots[place_of(ring, index)];
        uint64_t amended =
            atomic_load_explicit(&slot->sequence, memory_order_relaxed) >>
            AMENDED_SHIFT;
        slot_write(ring, index, amended + 1, record);
    }
}

uint64_t
oomkit_ring_count(const oomkit_ring *ring)
{
    return atomic_load_explicit(&ring->count, memory_order_acquire);
}

uint64_t
oomkit_ring_capacity(const oomkit_ring *ring)
{
    return ring->capacity;
}

int
oomkit_ring_read(const oomkit_ring *ring, uint64_t index, oomkit_record *record)
{
    const ring_slot *slot = &ring->slots[place_of(ring, index)];
    uint64_t words[WORDS], before, after;
    size_t i;

    if (index >= oomkit_ring_count(ring)) {
        return OOMKIT_EINVAL;
    }
    /* The count says that it was written whole. A word of a later write brings that
     * write's sequence with it, so the comparison behind the copy sees every overlap.
     * What is torn by a later record is overwritten for good; what is torn by an amend
     * is read again. */
    do {
        before = atomic_load_explicit(&slot->sequence, memory_order_acquire);
        for (i = 0; i < WORDS; i++) {
            words[i] = atomic_load_explicit(&slot->words[i], memory_order_acquire);
        }
        after = atomic_load_explicit(&slot->sequence, memory_order_relaxed);
        if ((after & NUMBER_MASK) > 2 * index + 2) {
            return OOMKIT_EREFUSED;
        }
    } while (before != after || (after & 1) != 0);
    memcpy(record, words, sizeof(words));
    return OOMKIT_OK;
}

void
oomkit_ring_read_own(const oomkit_ring *ring, uint64_t index, oomkit_record *record)
{
    const ring_slot *slot = &ring->slots[place_of(ring, index)];
    const ring_slot *next = &ring->slots[place_of(ring, index + 1)];
    uint64_t word;
    size_t i;

    for (i = 0; i < WORDS; i++) {
        word = atomic_load_explicit(&slot->words[i], memory_order_relaxed);
        memcpy((char *)record + i * sizeof(word), &word, sizeof(word));
    }
#if defined(__GNUC__)
    for (i = 0; i < WORDS; i += 64 / sizeof(uint64_t)) {
        __builtin_prefetch((const char *)next + i * sizeof(uint64_t), 1);
    }
    __builtin_prefetch((const char *)(next + 1) - 1, 1);
#endif
}
