/* What the slices of a plan are, and what holds for those of every plan. */
#ifndef OOMKIT_TESTS_SLICES_ARE_H
#define OOMKIT_TESTS_SLICES_ARE_H

#include "check.h"
#include "plan.h"
#include "status.h"

/* Do the slices of the plan have exactly these sizes? The list ends with 0. */
static int
slices_are(const oomkit_plan *plan, const int64_t *sizes)
{
    int64_t start, length, at = 0, i;
    for (i = 0; sizes[i] != 0; i++) {
        if (oomkit_plan_slice(plan, i, &start, &length) != OOMKIT_OK || start != at ||
            length != sizes[i]) {
            return 0;
        }
        at += length;
    }
    return i == oomkit_plan_count(plan) && at == plan->batch;
}

#define SLICES(plan, ...) slices_are((plan), (const int64_t[]){__VA_ARGS__, 0})

/* What holds for every plan: sizes add up, are positive and do not grow; all but the
 * last are multiples. */
static void
check_slices(const oomkit_plan *plan)
{
    int64_t count = oomkit_plan_count(plan), sum = 0, before = INT64_MAX, largest = 0;
    int64_t start, length, i;

    CHECK(count >= 1 && count <= plan->accumulation && count <= plan->batch);
    for (i = 0; i < count; i++) {
        int status = oomkit_plan_slice(plan, i, &start, &length);
        CHECK(status == OOMKIT_OK && start == sum && length >= 1);
        CHECK(length <= before);
        CHECK(i == count - 1 || length % plan->multiple_of == 0);
        sum += length;
        largest = length > largest ? length : largest;
        before = plan->first != 0 && i == 0 ? INT64_MAX : length;
    }
    CHECK(sum == plan->batch);
    CHECK(oomkit_plan_micro_batch(plan) == largest);
    CHECK(oomkit_plan_slice(plan, count, &start, &length) == OOMKIT_EINVAL);
    CHECK(oomkit_plan_slice(plan, -1, &start, &length) == OOMKIT_EINVAL);
}

#endif
