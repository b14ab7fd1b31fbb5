/* How numbers are distributed, in constant memory: counts of ranges that are 1/32 of
 * their lower end wide, so that a quantile is right to 2 %. */
#ifndef OOMKIT_RECORDS_SKETCH_H
#define OOMKIT_RECORDS_SKETCH_H

#include <stdint.h>

#define OOMKIT_SKETCH_RANGES 1920

/* All zeros is an empty one. */
typedef struct oomkit_sketch {
    uint64_t count, least, most;
    uint32_t ranges[OOMKIT_SKETCH_RANGES]; /* each stops at its largest value */
} oomkit_sketch;

void
oomkit_sketch_add(oomkit_sketch *sketch, uint64_t value);

void
oomkit_sketch_merge(oomkit_sketch *into, const oomkit_sketch *from);

/* The value that `share` (0 .. 1) of the numbers do not exceed: exact where all
 * numbers are equal. 0 of an empty one. */
uint64_t
oomkit_sketch_quantile(const oomkit_sketch *sketch, double share);

#endif
