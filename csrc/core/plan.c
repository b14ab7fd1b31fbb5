/* What is planned next. In units of `multiple_of` rows, as slices are (slices.c). */
#include "plan.h"
#include "slices.h"
#include "status.h"

#include <stddef.h>

/* Bytes, as many as can be said at most. */
static uint64_t
plus(uint64_t a, uint64_t b)
{
    return b < OOMKIT_UNKNOWN - a ? a + b : OOMKIT_UNKNOWN - 1;
}

static int
request_valid(const oomkit_plan_request *request)
{
    return request->batch >= 1 && request->min_micro_batch >= 1 &&
           request->multiple_of >= 1 && request->start_accumulation >= 1 &&
           request->margin >= 0.0 && request->margin < 1.0;
}

/* The largest k with no slice below min_micro_batch (the leftover at the end of a plan
 * with multiple_of excepted); 1 when the batch itself is below. Such a k need not reach
 * the minimum: 20 rows in equal slices of at least 6 are 7, 7, 6. */
static int64_t
largest_k(const oomkit_plan_request *request)
{
    int64_t units = divide_up(request->batch, request->multiple_of);
    int64_t least = divide_up(request->min_micro_batch, request->multiple_of);
    int64_t k;

    if (request->multiple_of == 1) { /* equal slices: the smallest has batch / k rows */
        k = request->batch / least;
        return k > 1 ? k : 1;
    }
    if (least == 1) {
        return units;
    }
    k = (units - 1) / (least - 1); /* the largest with ceil(units / k) > least - 1 */
    return k > 1 ? k : 1;
}

static int
room_has_grown(uint64_t room, uint64_t then)
{
    return room != OOMKIT_UNKNOWN && then != OOMKIT_UNKNOWN && room > then + then / 64;
}

/* Bytes that a micro-batch may take above the baseline. */
static uint64_t
room_to_use(const oomkit_knowledge *known, const oomkit_plan_request *request)
{
    double margin = known->margin > request->margin ? known->margin : request->margin;
    uint64_t budget = request->budget_bytes;

    if (budget != OOMKIT_UNKNOWN) {
        budget = (uint64_t)((double)budget * (1.0 - margin));
    }
    return oomkit_room(request->baseline_bytes, budget);
}

/* One peak alone makes a ray, which counts the part that does not grow with rows once
 * for each: where it forbids what nothing else does, the middle between what worked and
 * what failed is tried, once. */
static int
worth_a_try(const oomkit_knowledge *known, oomkit_role role, int64_t rows)
{
    const oomkit_sizes *bound = &known->roles[role];

    return known->roles[OOMKIT_FIRST].count <= 1 &&
           known->roles[OOMKIT_LATER].count <= 1 && known->missed == 0 &&
           bound->largest_ok > 0 && bound->smallest_failed / 2 >= bound->largest_ok &&
           rows <= (bound->largest_ok + bound->smallest_failed) / 2;
}

/* Beyond the sum of a first micro-batch's peak and all gradients: while a gradient is
 * added to what is there it exists twice. When that is, and how much of the activations
 * is left by then, a later micro-batch's own peak tells; until there was one the most
 * that it can be is assumed. */
static uint64_t
twice_there(const oomkit_knowledge *known, const oomkit_plan_request *request,
            oomkit_role role)
{
    return role == OOMKIT_LATER && known->late == 0 &&
                   known->roles[OOMKIT_LATER].count == 0
               ? request->largest_gradient
               : 0;
}

/* Has a micro-batch of this size failed, in no less room? */
static int
size_failed(const oomkit_knowledge *known, const oomkit_plan_request *request,
            oomkit_role role, int64_t rows)
{
    const oomkit_sizes *bound = &known->roles[role];
    uint64_t room = oomkit_room(request->baseline_bytes, request->budget_bytes);

    return bound->smallest_failed != 0 && rows >= bound->smallest_failed &&
           !room_has_grown(room, bound->failed_room);
}

#define HEALTHY_CALLS 8 /* before a larger size is tried where there are no figures */

/* Has the plan worked long enough for an error to be worth the look? Longer each time
 * that one was met. */
static int
may_probe(const oomkit_knowledge *known)
{
    return known->healthy >= (uint32_t)HEALTHY_CALLS
                                 << (known->missed > 4 ? 4 : known->missed);
}

/* Do bounds and peaks allow a micro-batch of this size? Where nothing was measured,
 * what has worked does, or half of what failed; after a while the middle of both. */
static int
size_fits(const oomkit_knowledge *known, const oomkit_plan_request *request,
          oomkit_role role, int64_t rows)
{
    const oomkit_sizes *bound = &known->roles[role];
    uint64_t room = oomkit_room(request->baseline_bytes, request->budget_bytes);
    uint64_t needed = OOMKIT_UNKNOWN;

    if (size_failed(known, request, role, rows)) {
        return 0;
    }
    if (rows <= bound->largest_ok && oomkit_room_enough(room, bound->ok_room)) {
        return 1;
    }
    /* A prediction that was too low once would be so again, a row further down. */
    if (bound->smallest_failed != 0 && known->fooled > 0 &&
        rows > bound->largest_ok + (bound->smallest_failed - bound->largest_ok) / 2 &&
        !room_has_grown(room, bound->failed_room)) {
        return 0;
    }
    if (room != OOMKIT_UNKNOWN) {
        needed = oomkit_predict(known, role, rows, request->gradient_bytes);
    }
    if (needed != OOMKIT_UNKNOWN) {
        needed = plus(needed, twice_there(known, request, role));
        return needed <= room_to_use(known, request) || worth_a_try(known, role, rows);
    }
    if (bound->smallest_failed == 0 || rows <= bound->largest_ok) {
        return 1;
    }
    return rows <= divide_up(bound->largest_ok + bound->smallest_failed, 2) &&
           (bound->largest_ok == 0 || may_probe(known));
}

static void
plan_set(const oomkit_plan_request *request, int64_t k, oomkit_plan *plan)
{
    plan->batch = request->batch;
    plan->accumulation = k;
    plan->first = 0;
    plan->multiple_of = request->multiple_of;
    plan->rung = 0;
}

/* The sizes of a plan's first micro-batch and of the largest later one (0 = none). */
static void
plan_sizes(const oomkit_plan *plan, int64_t rows[OOMKIT_ROLES])
{
    int64_t start;

    rows[OOMKIT_FIRST] = rows[OOMKIT_LATER] = 0;
    if (oomkit_plan_slice(plan, 0, &start, &rows[OOMKIT_FIRST]) != OOMKIT_OK ||
        oomkit_plan_count(plan) < 2 ||
        oomkit_plan_slice(plan, 1, &start, &rows[OOMKIT_LATER]) != OOMKIT_OK) {
        return;
    }
}

static int
plan_fits(const oomkit_knowledge *known, const oomkit_plan_request *request,
          const oomkit_plan *plan)
{
    int64_t rows[OOMKIT_ROLES];

    plan_sizes(plan, rows);
    return size_fits(known, request, OOMKIT_FIRST, rows[OOMKIT_FIRST]) &&
           (rows[OOMKIT_LATER] == 0 ||
            size_fits(known, request, OOMKIT_LATER, rows[OOMKIT_LATER]));
}

/* The smallest k in [from, most] whose equal slices fit; `most` when none does. From 2
 * on a larger k never fits less, so halving the interval finds it; with 1 no
 * micro-batch finds accumulated gradients. */
static int64_t
smallest_k(const oomkit_knowledge *known, const oomkit_plan_request *request,
           int64_t from, int64_t most)
{
    oomkit_plan plan;

    plan_set(request, from, &plan);
    if (plan_fits(known, request, &plan)) {
        return from;
    }
    while (from < most) {
        int64_t k = from + (most - from) / 2;
        plan_set(request, k, &plan);
        if (k > 1 && plan_fits(known, request, &plan)) {
            most = k;
        } else {
            from = k + 1;
        }
    }
    return from;
}

/* Without figures: is it sizes that worked and failed alone that decide? */
static int
is_blind(const oomkit_knowledge *known, const oomkit_plan_request *request)
{
    return known->successes > 0 && known->roles[OOMKIT_FIRST].largest_ok > 0 &&
           oomkit_room(request->baseline_bytes, request->budget_bytes) ==
               OOMKIT_UNKNOWN;
}

/* One micro-batch fewer than `k`, which worked, where its sizes lie above the middle of
 * what worked and what failed, and between them no other does. */
static int64_t
probe_k(const oomkit_knowledge *known, const oomkit_plan_request *request,
        int64_t fewest, int64_t k)
{
    int64_t rows[OOMKIT_ROLES];
    oomkit_plan plan;

    if (k <= fewest || known->batch != request->batch || known->k != k ||
        !may_probe(known) || !is_blind(known, request)) {
        return k;
    }
    plan_set(request, k - 1, &plan);
    plan_sizes(&plan, rows);
    return size_failed(known, request, OOMKIT_FIRST, rows[OOMKIT_FIRST]) ||
                   (rows[OOMKIT_LATER] > 0 &&
                    size_failed(known, request, OOMKIT_LATER, rows[OOMKIT_LATER]))
               ? k
               : k - 1;
}

/* A larger first micro-batch and k - 1 equal ones where k equal ones do not fit: the
 * first one is as much larger as brings both peaks to the same height, then smaller
 * until all the others can be equal. 1 with *plan, or 0. */
static int
plan_unequal(const oomkit_knowledge *known, const oomkit_plan_request *request,
             int64_t k, oomkit_plan *plan)
{
    int64_t unit = request->multiple_of, low = 1, high, later, first;

    if (k < 2) {
        return 0;
    }
    high = request->batch / k / unit; /* units of a later one: not more than equal */
    while (low < high) {              /* the largest that fits */
        int64_t middle = low + (high - low + 1) / 2;
        if (size_fits(known, request, OOMKIT_LATER, middle * unit)) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    later = low * unit;
    first = request->batch - (k - 1) * later;
    if (high < 1 || later < request->min_micro_batch || first <= later ||
        first % unit != 0) {
        return 0;
    }
    plan_set(request, k, plan);
    plan->first = first;
    return plan_fits(known, request, plan);
}

/* How long a size that was given up is left alone: longer each time, but for more room
 * than whatever failed had. */
static int
may_grow(const oomkit_knowledge *known, const oomkit_plan_request *request)
{
    uint64_t room = oomkit_room(request->baseline_bytes, request->budget_bytes);
    uint32_t doublings = known->late > 6 ? 6 : known->late;
    int role, failed = 0, grown = 1;

    for (role = 0; role < OOMKIT_ROLES; role++) {
        const oomkit_sizes *bound = &known->roles[role];
        failed |= bound->smallest_failed != 0;
        grown &=
            bound->smallest_failed == 0 || room_has_grown(room, bound->failed_room);
    }
    return known->late == 0 || known->healthy >= UINT32_C(8) << doublings ||
           (failed && grown);
}

/* Before anything of this shape has failed what was asked for is tried. */
static int
knows_failure(const oomkit_knowledge *known)
{
    return known->failures > 0 || known->missed > 0 || known->late > 0 ||
           known->roles[OOMKIT_FIRST].smallest_failed != 0 ||
           known->roles[OOMKIT_LATER].smallest_failed != 0;
}

static int
knows_peaks(const oomkit_knowledge *known)
{
    return known->roles[OOMKIT_FIRST].count > 0 || known->roles[OOMKIT_LATER].count > 0;
}

/* Where to begin to look for k. accumulation_steps= is what a shape starts with: as
 * soon as peaks and room are known, fewer are planned if they fit. */
static int64_t
fewest_k(const oomkit_knowledge *known, const oomkit_plan_request *request,
         int64_t asked)
{
    uint64_t room = oomkit_room(request->baseline_bytes, request->budget_bytes);
    return knows_peaks(known) && room != OOMKIT_UNKNOWN ? 1 : asked;
}

/* The k of the last call in place of a smaller one in *plan, where growing has to wait:
 * for a size that was given up, or in the first call of a run, whose optimizer state
 * may not be there yet. */
static void
plan_hold(const oomkit_knowledge *known, const oomkit_plan_request *request,
          int64_t most, oomkit_plan *plan)
{
    oomkit_plan last;

    if (known->batch != request->batch || known->k <= oomkit_plan_count(plan) ||
        (may_grow(known, request) && !known->recalled)) {
        return;
    }
    plan_set(request, smaller(known->k, most), &last);
    if (plan_fits(known, request, &last) ||
        plan_unequal(known, request, smaller(known->k, most), &last)) {
        *plan = last;
    }
}

static oomkit_plan_reason
reason_of(const oomkit_knowledge *known, const oomkit_plan *plan, int64_t asked)
{
    int64_t k = oomkit_plan_count(plan);

    if (known->successes > 0 && known->batch == plan->batch && known->k != 0) {
        if (k < known->k) {
            return OOMKIT_REASON_GROWN;
        }
        if (k == known->k && k > 1 && k != asked) {
            return OOMKIT_REASON_REMEMBERED;
        }
    }
    if (k == asked || k == 1) {
        return k > 1 ? OOMKIT_REASON_ASKED : OOMKIT_REASON_WHOLE;
    }
    return knows_peaks(known) ? OOMKIT_REASON_PREDICTED : OOMKIT_REASON_REMEMBERED;
}

/* Not even the smallest micro-batch is predicted to fit, where the last call worked
 * with larger ones: then peaks of other sizes, or in other room, say too much. Twice as
 * many micro-batches are worth an error; those of one row may cost a hundred times the
 * work. */
static int64_t
doubt_the_peaks(const oomkit_knowledge *known, const oomkit_plan_request *request,
                int64_t fewest, int64_t most)
{
    oomkit_knowledge bounds = *known;
    int64_t k;

    if (known->batch != request->batch || known->k < 1 || known->k > most / 2) {
        return most;
    }
    bounds.roles[OOMKIT_FIRST].count = bounds.roles[OOMKIT_LATER].count = 0;
    k = smallest_k(&bounds, request, fewest, most);
    return k > 2 * known->k ? k : 2 * known->k;
}

int
oomkit_plan_choose(const oomkit_knowledge *known, const oomkit_plan_request *request,
                   oomkit_plan *plan, oomkit_plan_reason *reason)
{
    oomkit_plan unequal;
    int64_t most, asked, fewest, k;

    if (!request_valid(request) || !oomkit_knowledge_valid(known)) {
        return OOMKIT_EINVAL;
    }
    most = largest_k(request);
    asked = smaller(request->start_accumulation, most);
    fewest = fewest_k(known, request, asked);
    plan_set(request, asked, plan);
    if (knows_failure(known) || fewest < asked) {
        k = smallest_k(known, request, fewest, most);
        plan_set(request, k, plan);
        if (k == most && !plan_fits(known, request, plan)) {
            k = doubt_the_peaks(known, request, fewest, most);
        }
        k = probe_k(known, request, fewest, k);
        plan_set(request, k, plan);
        while (--k >= fewest && plan_unequal(known, request, k, &unequal)) {
            *plan = unequal;
        }
        plan_hold(known, request, most, plan);
    }
    *reason = reason_of(known, plan, asked);
    return OOMKIT_OK;
}

/* Do later micro-batches fail however small they are? Gradients that are there need
 * room whatever the rows. */
static int
nothing_later(const oomkit_knowledge *known, const oomkit_plan_request *request,
              int64_t most)
{
    int64_t rows[OOMKIT_ROLES];
    oomkit_plan plan;

    plan_set(request, most, &plan);
    plan_sizes(&plan, rows);
    return rows[OOMKIT_LATER] > 0 &&
           size_failed(known, request, OOMKIT_LATER, rows[OOMKIT_LATER]);
}

/* One micro-batch finds no accumulated gradients: where no later one fits the whole
 * batch may. */
static int
whole_is_left(const oomkit_knowledge *known, const oomkit_plan_request *request)
{
    return request->may_be_whole &&
           !size_failed(known, request, OOMKIT_FIRST, request->batch);
}

int
oomkit_plan_next(const oomkit_knowledge *known, const oomkit_plan_request *request,
                 const oomkit_plan *failed, oomkit_plan *plan,
                 oomkit_plan_reason *reason)
{
    oomkit_plan next; /* `plan` may be `failed` */
    int64_t count, most, k, factor;

    if (!request_valid(request) || !oomkit_knowledge_valid(known) ||
        !oomkit_plan_valid(failed) || failed->batch != request->batch) {
        return OOMKIT_EINVAL;
    }
    count = oomkit_plan_count(failed);
    most = largest_k(request);
    factor = known->successes == 0 && known->failures > 1 ? 4 : 2;
    k = count > most / factor ? most : factor * count;
    if ((knows_peaks(known) && request->budget_bytes != OOMKIT_UNKNOWN) ||
        is_blind(known, request)) {
        int64_t fits = smallest_k(known, request, smaller(count + 1, most), most);
        k = fits < most ? fits : k;
    }
    plan_set(request, k, &next);
    if (oomkit_plan_micro_batch(&next) >= oomkit_plan_micro_batch(failed)) {
        plan_set(request, most, &next); /* peaks that say nothing, sizes in units */
    }
    if (oomkit_plan_micro_batch(&next) >= oomkit_plan_micro_batch(failed) ||
        (count == 1 && nothing_later(known, request, most))) {
        if (count > 1 && whole_is_left(known, request)) {
            plan_set(request, 1, plan);
            *reason = OOMKIT_REASON_OOM;
            return OOMKIT_OK;
        }
        *reason = OOMKIT_REASON_EXHAUSTED;
        return OOMKIT_EREFUSED;
    }
    *plan = next;
    *reason = OOMKIT_REASON_OOM;
    return OOMKIT_OK;
}

#define FRAGMENTED 0.1 /* of the budget, reserved and not allocated */

int
oomkit_plan_fragmented(uint64_t reserved_bytes, uint64_t allocated_bytes,
                       uint64_t budget_bytes, int flushed)
{
    uint64_t whole = budget_bytes != OOMKIT_UNKNOWN ? budget_bytes : reserved_bytes;

    if (flushed || reserved_bytes == OOMKIT_UNKNOWN ||
        allocated_bytes == OOMKIT_UNKNOWN || reserved_bytes <= allocated_bytes) {
        return 0;
    }
    return (double)(reserved_bytes - allocated_bytes) > FRAGMENTED * (double)whole;
}

const char *
oomkit_plan_reason_name(oomkit_plan_reason reason)
{
    static const char *const names[] = {"whole",   "asked",     "remembered", "oom",
                                        "flushed", "exhausted", "predicted",  "grown",
                                        "climbed", "error",     "refused"};
    const size_t count = sizeof(names) / sizeof(names[0]);
    return (size_t)reason < count ? names[reason] : "unknown";
}
