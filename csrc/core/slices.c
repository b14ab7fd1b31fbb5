/* How a plan cuts a batch. Everything is computed in units of `multiple_of` rows, the
 * last of which may be short: cutting a batch then is dividing its units, and every
 * slice but the last is a whole number of them. */
#include "slices.h"
#include "status.h"

int
oomkit_plan_valid(const oomkit_plan *plan)
{
    if (plan->batch < 1 || plan->accumulation < 1 || plan->multiple_of < 1 ||
        plan->first < 0 || plan->first > plan->batch) {
        return 0;
    }
    if (plan->first == 0 || plan->first == plan->batch) {
        return 1;
    }
    return plan->accumulation > 1 && plan->first % plan->multiple_of == 0;
}

/* Number of slices of `rows` rows that are to be k: each has one unit at least. */
static int64_t
equal_count(int64_t rows, int64_t k, int64_t multiple_of)
{
    return smaller(k, divide_up(rows, multiple_of));
}

/* Slice `index` of `count` equal ones, count as from equal_count. */
static void
equal_slice(int64_t rows, int64_t count, int64_t multiple_of, int64_t index,
            int64_t *start, int64_t *length)
{
    int64_t units = divide_up(rows, multiple_of);
    int64_t each = units / count, more = units % count;

    *start = (index * each + smaller(index, more)) * multiple_of;
    if (index == count - 1) {
        *length = rows - *start;
    } else {
        *length = (each + (index < more)) * multiple_of;
    }
}

int64_t
oomkit_plan_count(const oomkit_plan *plan)
{
    if (!oomkit_plan_valid(plan)) {
        return 0;
    }
    if (plan->first == 0) {
        return equal_count(plan->batch, plan->accumulation, plan->multiple_of);
    }
    if (plan->first == plan->batch) {
        return 1;
    }
    return 1 + equal_count(plan->batch - plan->first, plan->accumulation - 1,
                           plan->multiple_of);
}

int64_t
oomkit_plan_micro_batch(const oomkit_plan *plan)
{
    int64_t count = oomkit_plan_count(plan);
    int64_t start, largest = 0, other = 0;

    /* Slices never grow, but for the one after a `first` that is not larger. */
    if (count > 0 && oomkit_plan_slice(plan, 0, &start, &largest) != OOMKIT_OK) {
        return 0;
    }
    if (count > 1 && oomkit_plan_slice(plan, 1, &start, &other) != OOMKIT_OK) {
        return 0;
    }
    return largest > other ? largest : other;
}

int
oomkit_plan_slice(const oomkit_plan *plan, int64_t index, int64_t *start,
                  int64_t *length)
{
    int64_t count = oomkit_plan_count(plan);

    if (index < 0 || index >= count) {
        return OOMKIT_EINVAL;
    }
    if (plan->first == 0) {
        equal_slice(plan->batch, count, plan->multiple_of, index, start, length);
        return OOMKIT_OK;
    }
    if (index == 0) {
        *start = 0;
        *length = plan->first;
        return OOMKIT_OK;
    }
    equal_slice(plan->batch - plan->first, count - 1, plan->multiple_of, index - 1,
                start, length);
    *start += plan->first;
    return OOMKIT_OK;
}
