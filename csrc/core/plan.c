/* Everything is computed in units of `multiple_of` rows, the last of which may be
 * short: cutting a batch then is dividing its units, and every slice but the last is a
 * whole number of them. */
#include "plan.h"
#include "status.h"

#include <stddef.h>

/* a / b, rounded up; both >= 1. */
static int64_t
divide_up(int64_t a, int64_t b)
{
    return (a - 1) / b + 1;
}

static int64_t
smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* --- slices --- */

/* Can the numbers be a plan at all? */
static int
plan_valid(const oomkit_plan *plan)
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
    if (!plan_valid(plan)) {
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

/* --- decisions --- */

static int
observations_valid(const oomkit_plan_observations *seen)
{
    return seen->batch >= 1 && seen->min_micro_batch >= 1 && seen->multiple_of >= 1 &&
           seen->start_accumulation >= 1 && seen->largest_ok >= 0 &&
           seen->smallest_failed >= 0;
}

/* The largest k with no slice below min_micro_batch (the leftover at the end of a plan
 * with multiple_of excepted); 1 when the batch itself is below. Such a k need not reach
 * the minimum: 20 rows in equal slices of at least 6 are 7, 7, 6. */
static int64_t
largest_k(const oomkit_plan_observations *seen)
{
    int64_t units = divide_up(seen->batch, seen->multiple_of);
    int64_t least = divide_up(seen->min_micro_batch, seen->multiple_of);
    int64_t k;

    if (seen->multiple_of == 1) { /* equal slices: the smallest has batch / k rows */
        k = seen->batch / least;
        return k > 1 ? k : 1;
    }
    if (least == 1) {
        return units;
    }
    k = (units - 1) / (least - 1); /* the largest with ceil(units / k) > least - 1 */
    return k > 1 ? k : 1;
}

/* The smallest k that earlier calls of this signature do not speak against. */
static int64_t
remembered_k(const oomkit_plan_observations *seen)
{
    int64_t units = divide_up(seen->batch, seen->multiple_of);
    int64_t bound; /* units of the largest micro-batch to be tried */

    if (seen->smallest_failed == 0) {
        return 1;
    }
    if (seen->largest_ok > 0 && seen->largest_ok < seen->smallest_failed) {
        if (seen->batch <= seen->largest_ok) {
            return 1;
        }
        bound = seen->largest_ok / seen->multiple_of;
    } else {
        if (seen->batch < seen->smallest_failed) {
            return 1;
        }
        /* Nothing is known to fit: what oomkit_plan_next would try after that failure.
         */
        bound = divide_up(divide_up(seen->smallest_failed, seen->multiple_of), 2);
    }
    return divide_up(units, bound > 0 ? bound : 1);
}

static void
plan_set(const oomkit_plan_observations *seen, int64_t k, oomkit_plan *plan)
{
    plan->batch = seen->batch;
    plan->accumulation = k;
    plan->first = 0;
    plan->multiple_of = seen->multiple_of;
    plan->rung = 0;
}

int
oomkit_plan_choose(const oomkit_plan_observations *seen, oomkit_plan *plan,
                   oomkit_plan_reason *reason)
{
    int64_t most, asked, remembered;

    if (!observations_valid(seen)) {
        return OOMKIT_EINVAL;
    }
    most = largest_k(seen);
    asked = smaller(seen->start_accumulation, most);
    remembered = smaller(remembered_k(seen), most);
    if (remembered > asked) {
        plan_set(seen, remembered, plan);
        *reason = OOMKIT_REASON_REMEMBERED;
    } else {
        plan_set(seen, asked, plan);
        *reason = asked > 1 ? OOMKIT_REASON_ASKED : OOMKIT_REASON_WHOLE;
    }
    return OOMKIT_OK;
}

int
oomkit_plan_next(const oomkit_plan_observations *seen, const oomkit_plan *failed,
                 oomkit_plan *plan, oomkit_plan_reason *reason)
{
    oomkit_plan next; /* `plan` may be `failed` */
    int64_t count, most;

    if (!observations_valid(seen) || !plan_valid(failed) ||
        failed->batch != seen->batch) {
        return OOMKIT_EINVAL;
    }
    count = oomkit_plan_count(failed);
    most = largest_k(seen);
    plan_set(seen, count > most / 2 ? most : 2 * count, &next);
    if (oomkit_plan_micro_batch(&next) >= oomkit_plan_micro_batch(failed)) {
        *reason = OOMKIT_REASON_EXHAUSTED;
        return OOMKIT_EREFUSED;
    }
    *plan = next;
    *reason = OOMKIT_REASON_OOM;
    return OOMKIT_OK;
}

const char *
oomkit_plan_reason_name(oomkit_plan_reason reason)
{
    static const char *const names[] = {"whole", "asked",   "remembered",
                                        "oom",   "flushed", "exhausted"};
    const size_t count = sizeof(names) / sizeof(names[0]);
    return (size_t)reason < count ? names[reason] : "unknown";
}
