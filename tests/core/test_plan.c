#include "check.h"

#include "blind.h"
#include "observed.h"
#include "plan.h"
#include "slices_are.h"
#include "status.h"

#include <string.h>

static void
test_plans_that_are_none(void)
{
    static const oomkit_plan bad[] = {
        {0, 1, 0, 1, 0},  {-4, 1, 0, 1, 0}, {8, 0, 0, 1, 0},
        {8, -1, 0, 1, 0}, {8, 2, 0, 0, 0},  {8, 2, -1, 1, 0},
        {8, 2, 9, 1, 0},  {8, 1, 4, 1, 0},  {8, 2, 3, 2, 0}};
    observed seen = observations(8);
    oomkit_plan_reason reason = OOMKIT_REASON_FLUSHED;
    oomkit_plan plan;
    int64_t start, length;
    size_t i;

    for (i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        CHECK(oomkit_plan_count(&bad[i]) == 0);
        CHECK(oomkit_plan_micro_batch(&bad[i]) == 0);
        CHECK(oomkit_plan_slice(&bad[i], 0, &start, &length) == OOMKIT_EINVAL);
        CHECK(next_after(&seen, &bad[i], &plan, &reason) == OOMKIT_EINVAL);
    }
    CHECK(next_after(&seen, &(oomkit_plan){9, 1, 0, 1, 0}, &plan, &reason) ==
          OOMKIT_EINVAL);
    CHECK(reason == OOMKIT_REASON_FLUSHED);
}

static void
test_numbers_out_of_range(void)
{
    oomkit_plan whole = {8, 1, 0, 1, 0}, plan;
    oomkit_plan_reason reason;
    int i;

    for (i = 0; i < 6; i++) {
        observed seen = observations(8);
        seen.batch = i == 0 ? 0 : 8;
        seen.min_micro_batch = i == 1 ? 0 : 1;
        seen.multiple_of = i == 2 ? -1 : 1;
        seen.start_accumulation = i == 3 ? 0 : 1;
        seen.largest_ok = i == 4 ? -1 : 0;
        seen.smallest_failed = i == 5 ? -1 : 0;
        CHECK(choose(&seen, &plan, &reason) == OOMKIT_EINVAL);
        CHECK(next_after(&seen, &whole, &plan, &reason) == OOMKIT_EINVAL);
    }
}

static void
test_the_largest_numbers(void)
{
    observed seen = observations(INT64_MAX);
    oomkit_plan plan, failed;
    oomkit_plan_reason reason;
    int64_t start, length;
    int halvings = 0;

    CHECK(choose(&seen, &plan, &reason) == OOMKIT_OK);
    CHECK(reason == OOMKIT_REASON_WHOLE && oomkit_plan_micro_batch(&plan) == INT64_MAX);
    do {
        int64_t count = oomkit_plan_count(&plan);
        CHECK(oomkit_plan_slice(&plan, count - 1, &start, &length) == OOMKIT_OK);
        CHECK(start >= 0 && length >= 1 && INT64_MAX - start == length);
        halvings++;
        failed = plan;
    } while (halvings < 100 && next_after(&seen, &failed, &plan, &reason) == OOMKIT_OK);
    CHECK(halvings == 64 && oomkit_plan_micro_batch(&failed) == 1);

    seen.min_micro_batch = seen.multiple_of = seen.start_accumulation = INT64_MAX;
    seen.smallest_failed = INT64_MAX;
    CHECK(choose(&seen, &plan, &reason) == OOMKIT_OK);
    CHECK(SLICES(&plan, INT64_MAX));
    CHECK(next_after(&seen, &plan, &plan, &reason) == OOMKIT_EREFUSED);
    seen.multiple_of = INT64_MAX - 1;
    seen.min_micro_batch = 1;
    CHECK(choose(&seen, &plan, &reason) == OOMKIT_OK);
    CHECK(SLICES(&plan, INT64_MAX - 1, 1));
}

static void
test_choose_by_example(void)
{
    observed seen = observations(64);
    oomkit_plan_reason reason;
    oomkit_plan plan;

#define CHOICE(k, why)                                                                 \
    (choose(&seen, &plan, &reason) == OOMKIT_OK && plan.accumulation == (k) &&         \
     reason == (why) && plan.batch == seen.batch && plan.first == 0 &&                 \
     plan.multiple_of == seen.multiple_of && plan.rung == 0)

    CHECK(CHOICE(1, OOMKIT_REASON_WHOLE));
    seen.largest_ok =
        16; /* a smaller batch worked: says nothing against a larger one */
    CHECK(CHOICE(1, OOMKIT_REASON_WHOLE));
    seen.smallest_failed = 32;
    CHECK(CHOICE(4, OOMKIT_REASON_REMEMBERED));
    seen.start_accumulation = 4;
    CHECK(CHOICE(4, OOMKIT_REASON_ASKED));
    seen.start_accumulation = 8;
    CHECK(CHOICE(8, OOMKIT_REASON_ASKED));
    seen.start_accumulation = 2;
    CHECK(CHOICE(4, OOMKIT_REASON_REMEMBERED));
    seen.largest_ok = 0; /* nothing is known to work: half of what failed */
    CHECK(CHOICE(4, OOMKIT_REASON_REMEMBERED));
    seen.smallest_failed = 65;
    CHECK(CHOICE(2, OOMKIT_REASON_ASKED));
    seen.start_accumulation = 1000;
    CHECK(CHOICE(64, OOMKIT_REASON_ASKED));
    seen.min_micro_batch = 16;
    CHECK(CHOICE(4, OOMKIT_REASON_ASKED));
    seen.start_accumulation = 1;
    seen.smallest_failed = 2; /* but min_micro_batch allows no less than 16 */
    seen.largest_ok = 1;
    CHECK(CHOICE(4, OOMKIT_REASON_REMEMBERED));

    seen = observations(7);
    seen.min_micro_batch = 8; /* more than there is */
    seen.start_accumulation = 3;
    seen.smallest_failed = 7;
    CHECK(CHOICE(1, OOMKIT_REASON_WHOLE));
    seen = observations(10);
    seen.multiple_of = 4;
    seen.largest_ok = 6;
    seen.smallest_failed = 8;
    CHECK(CHOICE(3, OOMKIT_REASON_REMEMBERED) && SLICES(&plan, 4, 4, 2));
    seen.largest_ok = 10; /* the whole batch, although it is no multiple */
    seen.smallest_failed = 12;
    CHECK(CHOICE(1, OOMKIT_REASON_WHOLE));
    seen = observations(8);
    seen.largest_ok = 8; /* contradicts the failure: the failure counts */
    seen.smallest_failed = 8;
    CHECK(CHOICE(2, OOMKIT_REASON_REMEMBERED));
#undef CHOICE
}

/* Rows of the smallest slice that counts against min_micro_batch: the last one of a
 * plan with multiple_of is what is left over and may be shorter. */
static int64_t
smallest_slice(const oomkit_plan *plan)
{
    int64_t start, length = 0;
    int64_t last = oomkit_plan_count(plan) - 1;
    CHECK(oomkit_plan_slice(plan, plan->multiple_of > 1 ? 0 : last, &start, &length) ==
          OOMKIT_OK);
    return length;
}

static void
check_choice(const observed *seen)
{
    oomkit_plan_reason reason;
    oomkit_plan plan, smallest;
    observed all = *seen;
    int64_t micro, least;

    CHECK(choose(seen, &plan, &reason) == OOMKIT_OK);
    check_slices(&plan);
    CHECK(oomkit_plan_count(&plan) == plan.accumulation);
    CHECK((reason == OOMKIT_REASON_WHOLE) == (plan.accumulation == 1));
    micro = oomkit_plan_micro_batch(&plan);
    CHECK(smallest_slice(&plan) >= seen->min_micro_batch || micro == seen->batch);

    /* The smallest that is allowed is what one gets by asking for k without end. */
    all.start_accumulation = INT64_MAX;
    CHECK(choose(&all, &smallest, &reason) == OOMKIT_OK);
    least = oomkit_plan_micro_batch(&smallest);
    CHECK(micro >= least);
    if (seen->smallest_failed > 0) {
        CHECK(micro < seen->smallest_failed || micro == least);
        CHECK(seen->largest_ok == 0 || seen->largest_ok >= seen->smallest_failed ||
              micro <= seen->largest_ok || micro == least);
    } else {
        CHECK(plan.accumulation <= seen->start_accumulation);
    }
}

static void
test_every_choice(void)
{
    int64_t batch, k, multiple, min, ok, failed;

    for (batch = 1; batch <= 24; batch++) {
        for (multiple = 1; multiple <= 8; multiple++) {
            for (min = 1; min <= 4; min++) {
                for (k = 1; k <= batch; k += 3) {
                    for (failed = 0; failed <= batch + 1; failed += 2) {
                        for (ok = 0; ok <= failed; ok += 3) {
                            observed seen = observations(batch);
                            seen.multiple_of = multiple;
                            seen.min_micro_batch = min;
                            seen.start_accumulation = k;
                            seen.largest_ok = ok;
                            seen.smallest_failed = failed;
                            check_choice(&seen);
                        }
                    }
                }
            }
        }
    }
}

static void
test_next_by_example(void)
{
    observed seen = observations(7);
    oomkit_plan_reason reason;
    oomkit_plan plan = {7, 1, 0, 1, 0};

#define NEXT() (next_after(&seen, &plan, &plan, &reason))
#define HALVED() (NEXT() == OOMKIT_OK && reason == OOMKIT_REASON_OOM)
#define EXHAUSTED() (NEXT() == OOMKIT_EREFUSED && reason == OOMKIT_REASON_EXHAUSTED)

    CHECK(HALVED() && SLICES(&plan, 4, 3));
    CHECK(HALVED() && SLICES(&plan, 2, 2, 2, 1));
    CHECK(HALVED() && SLICES(&plan, 1, 1, 1, 1, 1, 1, 1));
    CHECK(EXHAUSTED() && plan.accumulation == 7);

    seen = observations(64);
    plan = (oomkit_plan){64, 1, 0, 1, 0};
    seen.min_micro_batch = 12; /* 64, 32, 16, then not 8 but the k nearest to 12 */
    CHECK(HALVED() && plan.accumulation == 2);
    CHECK(HALVED() && plan.accumulation == 4);
    CHECK(HALVED() && SLICES(&plan, 13, 13, 13, 13, 12));
    CHECK(EXHAUSTED());

    seen = observations(8);
    plan = (oomkit_plan){8, 2, 0, 1, 0};
    seen.min_micro_batch = 3;
    CHECK(EXHAUSTED()); /* 3, 3, 2 would have a slice below the minimum */

    seen = observations(22);
    plan = (oomkit_plan){22, 1, 0, 4, 0};
    seen.multiple_of = 4; /* 22 halved is 11, rounded up to 12 */
    CHECK(HALVED() && SLICES(&plan, 12, 10));
    CHECK(HALVED() && SLICES(&plan, 8, 8, 4, 2));
    CHECK(HALVED() && SLICES(&plan, 4, 4, 4, 4, 4, 2));
    CHECK(EXHAUSTED());

    plan = (oomkit_plan){7, 40, 0, 2, 0}; /* really 4 slices, at the smallest */
    seen = observations(7);
    seen.multiple_of = 2;
    CHECK(EXHAUSTED());
    plan = (oomkit_plan){5, 1, 0, 1, 0};
    seen = observations(5);
    seen.min_micro_batch = 9;
    CHECK(EXHAUSTED());

    seen = observations(1024); /* after a larger first slice: equal ones */
    plan = (oomkit_plan){1024, 2, 717, 1, 0};
    CHECK(HALVED() && SLICES(&plan, 256, 256, 256, 256));
#undef EXHAUSTED
#undef HALVED
#undef NEXT
}

/* From any plan, however often it fails: smaller each time, and an end. */
static void
check_descent(const observed *seen, oomkit_plan plan)
{
    oomkit_plan_reason reason;
    oomkit_plan next;
    int64_t micro = oomkit_plan_micro_batch(&plan), count = oomkit_plan_count(&plan);
    int status, rounds;

    for (rounds = 0; rounds < 10; rounds++) {
        int64_t smaller;
        status = next_after(seen, &plan, &next, &reason);
        if (status != OOMKIT_OK) {
            break;
        }
        check_slices(&next);
        smaller = oomkit_plan_micro_batch(&next);
        CHECK(smaller < micro && smallest_slice(&next) >= seen->min_micro_batch);
        CHECK(oomkit_plan_count(&next) <= 2 * count);
        /* Halved, rounded up; or more than that because of min_micro_batch. */
        if (plan.first == 0) {
            int64_t units =
                ((micro + 1) / 2 + seen->multiple_of - 1) / seen->multiple_of;
            int64_t half = units * seen->multiple_of;
            int64_t floor_half = seen->multiple_of > 1 ? half : micro / 2;
            CHECK(smaller == half ||
                  (smaller > half && floor_half < 2 * seen->min_micro_batch));
        }
        plan = next;
        micro = smaller;
        count = oomkit_plan_count(&plan);
    }
    CHECK(status == OOMKIT_EREFUSED && reason == OOMKIT_REASON_EXHAUSTED);
    CHECK(seen->min_micro_batch > 1 || micro <= seen->multiple_of);
    /* Nothing that is refused could have been cut further by equal slices. */
    for (next = plan, next.first = 0; next.accumulation <= seen->batch;
         next.accumulation++) {
        int64_t other = oomkit_plan_micro_batch(&next);
        CHECK(other >= micro || smallest_slice(&next) < seen->min_micro_batch);
    }
}

static void
test_every_descent_ends(void)
{
    int64_t batch, k, multiple, min;

    for (batch = 1; batch <= 64; batch++) {
        for (multiple = 1; multiple <= 8; multiple++) {
            for (min = 1; min <= 4; min++) {
                observed seen = observations(batch);
                seen.multiple_of = multiple;
                seen.min_micro_batch = min;
                for (k = 1; k <= batch; k++) {
                    check_descent(&seen, (oomkit_plan){batch, k, 0, multiple, 0});
                }
                for (k = multiple; k < batch; k += 5 * multiple) {
                    check_descent(&seen, (oomkit_plan){batch, 3, k, multiple, 0});
                }
            }
        }
    }
}

/* First micro-batches work and later ones never do, whatever was predicted: attempts
 * until the call gives up. */
static int
descent_of_later(oomkit_knowledge *known, int64_t batch)
{
    oomkit_plan_request request = {.batch = batch,
                                   .min_micro_batch = 1,
                                   .multiple_of = 1,
                                   .start_accumulation = 1,
                                   .baseline_bytes = 0,
                                   .budget_bytes = 1000};
    oomkit_plan plan = {batch, 1, 0, 1, 0};
    oomkit_plan_reason reason = OOMKIT_REASON_OOM;
    int attempts = 1;

    oomkit_know_failed(known, OOMKIT_FIRST, batch, 0, 1000, 0);
    while (oomkit_plan_next(known, &request, &plan, &plan, &reason) == OOMKIT_OK &&
           attempts < 1000) {
        int64_t start, rows = 0;
        attempts++;
        CHECK(oomkit_plan_slice(&plan, 0, &start, &rows) == OOMKIT_OK);
        oomkit_know_measured(known, OOMKIT_FIRST, rows, (uint64_t)rows * 5, 0, 1000, 0);
        CHECK(oomkit_plan_slice(&plan, 1, &start, &rows) == OOMKIT_OK);
        oomkit_know_failed(known, OOMKIT_LATER, rows, 0, 1000, 0);
    }
    CHECK(reason == OOMKIT_REASON_EXHAUSTED);
    return attempts;
}

/* Predictions that are wrong again and again cost a few attempts, not one for each row.
 */
static void
test_a_hopeless_call_ends_soon(void)
{
    int64_t batch;

    for (batch = 2; batch <= 1024; batch += 17) {
        oomkit_knowledge known = {.successes = 0}, grown = {.successes = 3};
        CHECK(descent_of_later(&known, batch) <= 12);
        CHECK(descent_of_later(&grown, batch) <= 12);
    }
}

static void
test_fragmentation(void)
{
    CHECK(oomkit_plan_fragmented(900, 700, 1000, 0));
    CHECK(!oomkit_plan_fragmented(900, 700, 1000, 1)); /* once */
    CHECK(!oomkit_plan_fragmented(900, 850, 1000, 0)); /* full */
    CHECK(!oomkit_plan_fragmented(OOMKIT_UNKNOWN, 700, 1000, 0));
}

static void
test_names(void)
{
    CHECK(strcmp(oomkit_plan_reason_name(OOMKIT_REASON_WHOLE), "whole") == 0);
    CHECK(strcmp(oomkit_plan_reason_name(OOMKIT_REASON_ASKED), "asked") == 0);
    CHECK(strcmp(oomkit_plan_reason_name(OOMKIT_REASON_REMEMBERED), "remembered") == 0);
    CHECK(strcmp(oomkit_plan_reason_name(OOMKIT_REASON_OOM), "oom") == 0);
    CHECK(strcmp(oomkit_plan_reason_name(OOMKIT_REASON_FLUSHED), "flushed") == 0);
    CHECK(strcmp(oomkit_plan_reason_name(OOMKIT_REASON_EXHAUSTED), "exhausted") == 0);
    CHECK(strcmp(oomkit_plan_reason_name(OOMKIT_REASON_PREDICTED), "predicted") == 0);
    CHECK(strcmp(oomkit_plan_reason_name(OOMKIT_REASON_GROWN), "grown") == 0);
}

static void
test_without_figures_the_best_size_is_found(void)
{
    static const int64_t batches[] = {7, 18, 64, 300};
    int64_t most, later;
    size_t i;

    for (i = 0; i < sizeof(batches) / sizeof(*batches); i++) {
        for (most = 1; most < batches[i]; most += 1 + most / 5) {
            for (later = most; later > 0; later /= 2) {
                const blind_device device = {{most, later}};
                oomkit_knowledge known = knowledge_of(&(observed){0});
                int64_t k = 0;
                int call, ooms = 0;
                for (call = 0; call < 2000; call++) {
                    int more = blind_call(&device, &known, batches[i], &k);
                    CHECK(more >= 0 && (call == 0 || more <= 2));
                    ooms += call == 0 ? 0 : more;
                }
                CHECK(k <= blind_best_k(&device, batches[i]));
                CHECK(ooms <= 12);
                for (call = 0; call < 100; call++) { /* and stays */
                    CHECK(blind_call(&device, &known, batches[i], &k) == 0);
                }
            }
        }
    }
}

static void
test_without_figures_a_larger_size_waits_for_healthy_calls(void)
{
    const blind_device device = {{22, 22}};
    oomkit_knowledge known = knowledge_of(&(observed){0});
    int64_t k = 0;
    int call;

    CHECK(blind_call(&device, &known, 64, &k) == 2 && k == 8); /* 64, 32, 8 rows */
    for (call = 0; call < 7; call++) {
        CHECK(blind_call(&device, &known, 64, &k) == 0 && k == 8);
    }
    CHECK(blind_call(&device, &known, 64, &k) == 0 && k == 4); /* between 8 and 32 */
    for (call = 0; call < 7; call++) {
        CHECK(blind_call(&device, &known, 64, &k) == 0 && k == 4);
    }
    CHECK(blind_call(&device, &known, 64, &k) == 0 && k == 3); /* 22 rows */
    for (call = 0; call < 100; call++) { /* 32 are known to fail */
        CHECK(blind_call(&device, &known, 64, &k) == 0 && k == 3);
    }
}

static void
test_without_figures_a_failed_try_goes_back_to_what_worked(void)
{
    const blind_device device = {{8, 8}};
    oomkit_knowledge known = knowledge_of(&(observed){0});
    int64_t k = 0;
    int call;

    CHECK(blind_call(&device, &known, 64, &k) == 2 && k == 8);
    for (call = 0; call < 7; call++) {
        CHECK(blind_call(&device, &known, 64, &k) == 0);
    }
    CHECK(blind_call(&device, &known, 64, &k) == 1 && k == 8);
}

int
main(void)
{
    test_plans_that_are_none();
    test_numbers_out_of_range();
    test_the_largest_numbers();
    test_choose_by_example();
    test_every_choice();
    test_next_by_example();
    test_every_descent_ends();
    test_a_hopeless_call_ends_soon();
    test_fragmentation();
    test_without_figures_the_best_size_is_found();
    test_without_figures_a_larger_size_waits_for_healthy_calls();
    test_without_figures_a_failed_try_goes_back_to_what_worked();
    test_names();
    return check_report();
}
