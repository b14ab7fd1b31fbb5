/* What plan.c and slices.c have in common. */
#ifndef OOMKIT_CORE_SLICES_H
#define OOMKIT_CORE_SLICES_H

#include "plan.h"

/* a / b, rounded up; both >= 1. */
static inline int64_t
divide_up(int64_t a, int64_t b)
{
    return (a - 1) / b + 1;
}

static inline int64_t
smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Can the numbers be a plan at all? */
int
oomkit_plan_valid(const oomkit_plan *plan);

#endif
