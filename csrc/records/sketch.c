/* Numbers below 64 have a range each; of the others the highest bit and the five below
 * it tell the range. */
#include "sketch.h"

#define BITS 5 /* of a number, below its highest, that tell ranges apart */
#define PARTS (1u << BITS)

_Static_assert(OOMKIT_SKETCH_RANGES == (64 - BITS + 1) * PARTS, "all of 64 bits");

/* Position of the highest bit that is set; `value` is not 0. */
static unsigned
highest(uint64_t value)
{
    unsigned position = 0, width;

    for (width = 32; width > 0; width /= 2) {
        if (value >> width != 0) {
            value >>= width;
            position += width;
        }
    }
    return position;
}

static unsigned
range_of(uint64_t value)
{
    unsigned above;

    if (value < 2 * PARTS) {
        return (unsigned)value;
    }
    above = highest(value) - BITS;
    return above * PARTS + (unsigned)(value >> above);
}

/* The middle of a range. */
static uint64_t
range_middle(unsigned range)
{
    unsigned above;

    if (range < 2 * PARTS) {
        return range;
    }
    above = range / PARTS - 1;
    return ((uint64_t)(range % PARTS + PARTS) << above) + (UINT64_C(1) << above) / 2;
}

static void
range_add(uint32_t *range, uint64_t count)
{
    *range = count > UINT32_MAX - *range ? UINT32_MAX : *range + (uint32_t)count;
}

void
oomkit_sketch_add(oomkit_sketch *sketch, uint64_t value)
{
    if (sketch->count == 0 || value < sketch->least) {
        sketch->least = value;
    }
    if (sketch->count == 0 || value > sketch->most) {
        sketch->most = value;
    }
    sketch->count++;
    range_add(&sketch->ranges[range_of(value)], 1);
}

void
oomkit_sketch_merge(oomkit_sketch *into, const oomkit_sketch *from)
{
    unsigned i;

    if (from->count == 0) {
        return;
    }
    if (into->count == 0 || from->least < into->least) {
        into->least = from->least;
    }
    if (into->count == 0 || from->most > into->most) {
        into->most = from->most;
    }
    into->count += from->count;
    for (i = 0; i < OOMKIT_SKETCH_RANGES; i++) {
        range_add(&into->ranges[i], from->ranges[i]);
    }
}

uint64_t
oomkit_sketch_quantile(const oomkit_sketch *sketch, double share)
{
    uint64_t rank = (uint64_t)(share * (double)sketch->count), seen = 0, value;
    unsigned i;

    rank += (double)rank < share * (double)sketch->count; /* rounded up */
    for (i = 0; i < OOMKIT_SKETCH_RANGES && sketch->count > 0; i++) {
        seen += sketch->ranges[i];
        if (seen >= rank && sketch->ranges[i] > 0) {
            value = range_middle(i);
            return value < sketch->least  ? sketch->least
                   : value > sketch->most ? sketch->most
                                          : value;
        }
    }
    return sketch->most;
}
