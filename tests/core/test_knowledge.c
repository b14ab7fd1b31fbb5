#include "check.h"

#include "knowledge.h"
#include "memory_model.h"
#include "plan.h"

#include <math.h>
#include <string.h>

static oomkit_knowledge
nothing(void)
{
    oomkit_knowledge known;
    memset(&known, 0, sizeof(known));
    return known;
}

/* Tells of a micro-batch without budget or gradients. */
static void
tell(oomkit_knowledge *known, oomkit_role role, int64_t rows, uint64_t bytes)
{
    oomkit_know_measured(known, role, rows, bytes, OOMKIT_UNKNOWN, OOMKIT_UNKNOWN, 0);
}

static void
test_room(void)
{
    CHECK(oomkit_room(3, 10) == 7);
    CHECK(oomkit_room(10, 3) == 0);
    CHECK(oomkit_room(3, OOMKIT_UNKNOWN) == OOMKIT_UNKNOWN);
    CHECK(oomkit_room(OOMKIT_UNKNOWN, 3) == OOMKIT_UNKNOWN);
    CHECK(oomkit_room_enough(100, 101) && !oomkit_room_enough(90, 100));
    CHECK(oomkit_room_enough(OOMKIT_UNKNOWN, 5) &&
          !oomkit_room_enough(5, OOMKIT_UNKNOWN));
}

static void
test_predictions(void)
{
    oomkit_knowledge known = nothing();

    CHECK(oomkit_predict(&known, OOMKIT_FIRST, 4, 0) == OOMKIT_UNKNOWN);
    tell(&known, OOMKIT_FIRST, 4, 400);
    CHECK(oomkit_predict(&known, OOMKIT_FIRST, 4, 0) == 400);
    CHECK(oomkit_predict(&known, OOMKIT_FIRST, 8, 0) == 800); /* the ray */
    CHECK(oomkit_predict(&known, OOMKIT_FIRST, 0, 0) == OOMKIT_UNKNOWN);
    CHECK(oomkit_predict(&known, OOMKIT_LATER, 8, 50) == 850); /* and gradients */
    tell(&known, OOMKIT_FIRST, 8, 700);
    CHECK(oomkit_predict(&known, OOMKIT_FIRST, 16, 0) == 1300); /* the secant */
    CHECK(oomkit_predict(&known, OOMKIT_FIRST, 6, 0) == 550);
    tell(&known, OOMKIT_LATER, 8, 790); /* measured: no estimate is needed */
    CHECK(oomkit_predict(&known, OOMKIT_LATER, 8, 50) == 790);
    CHECK(oomkit_predict(&known, OOMKIT_LATER, 16, 50) == 1390);

    known = nothing(); /* a plateau has no slope to go by */
    tell(&known, OOMKIT_FIRST, 1, 1000);
    tell(&known, OOMKIT_FIRST, 2, 1010);
    CHECK(oomkit_predict(&known, OOMKIT_FIRST, 4, 0) == 2020);
    known = nothing(); /* more rows that need less */
    tell(&known, OOMKIT_FIRST, 2, 1000);
    tell(&known, OOMKIT_FIRST, 4, 900);
    CHECK(oomkit_predict(&known, OOMKIT_FIRST, 8, 0) == 1800);

    known = nothing(); /* only later ones were measured */
    tell(&known, OOMKIT_LATER, 4, 500);
    CHECK(oomkit_predict(&known, OOMKIT_FIRST, 8, 100) == 900);
    CHECK(oomkit_predict(&known, OOMKIT_LATER, 8, 100) == 900);
    CHECK(oomkit_predict(&known, OOMKIT_FIRST, 8, 600) == 500);
    CHECK(oomkit_predict(&known, OOMKIT_FIRST, INT64_MAX, 0) < OOMKIT_UNKNOWN);
}

static void
test_points_in_order_and_the_outer_ones_kept(void)
{
    oomkit_knowledge known = nothing();
    static const int64_t rows[] = {8, 2, 32, 16, 64, 1, 64, 24};
    static const int64_t kept[] = {1, 24, 32, 64};
    size_t i;

    for (i = 0; i < sizeof(rows) / sizeof *rows; i++) {
        tell(&known, OOMKIT_FIRST, rows[i], (uint64_t)rows[i] * 10 + i);
        CHECK(oomkit_knowledge_valid(&known));
    }
    CHECK(known.roles[0].count == OOMKIT_POINTS);
    for (i = 0; i < OOMKIT_POINTS; i++) {
        CHECK(known.roles[0].points[i].rows == kept[i]);
    }
    CHECK(known.roles[0].points[3].bytes == 646); /* the latest of that size */
}

static void
test_bounds(void)
{
    oomkit_knowledge known = nothing();
    const oomkit_sizes *first = &known.roles[OOMKIT_FIRST];

    oomkit_know_failed(&known, OOMKIT_FIRST, 32, 10, 100, 0);
    CHECK(first->smallest_failed == 32 && first->failed_room == 90);
    CHECK(known.failures == 1 && known.late == 0);
    oomkit_know_failed(&known, OOMKIT_LATER, 16, 10, 100, 0);
    CHECK(first->smallest_failed == 32);
    CHECK(known.roles[OOMKIT_LATER].smallest_failed == 16);
    oomkit_know_measured(&known, OOMKIT_FIRST, 16, 50, 10, 100, 0);
    CHECK(first->largest_ok == 16 && first->ok_room == 90 && first->count == 1);
    oomkit_know_measured(&known, OOMKIT_FIRST, 8, 0, 20, 100, 0);
    CHECK(first->largest_ok == 16 && first->ok_room == 90);
    oomkit_know_failed(&known, OOMKIT_FIRST, 16, 10, 100, 0); /* works no more */
    CHECK(first->largest_ok == 0 && first->smallest_failed == 16);
    CHECK(first->count == 0);
    oomkit_know_measured(&known, OOMKIT_FIRST, 20, 60, 10, 200, 0);
    CHECK(first->smallest_failed == 0 && first->largest_ok == 20);
}

static void
test_margins(void)
{
    oomkit_knowledge known = nothing();
    double before;
    int i;

    oomkit_know_measured(&known, OOMKIT_FIRST, 4, 400, 600, 2000, 0);
    CHECK(known.margin == 0.0);
    oomkit_know_measured(&known, OOMKIT_FIRST, 8, 900, 600, 2000, 0); /* said 800 */
    CHECK(known.margin > 0.07 && known.margin < 0.0715);
    before = known.margin;
    for (i = 0; i < 100; i++) {
        const oomkit_measured same = {.batch = 8,
                                      .k = 1,
                                      .rows = {8, 0},
                                      .bytes = {900, 0},
                                      .baseline_bytes = 600,
                                      .budget_bytes = 2000};
        oomkit_know_worked(&known, &same);
    }
    CHECK(known.margin < before / 7);
    oomkit_know_failed(&known, OOMKIT_FIRST, 9, 600, 2000, 0); /* said 1025 of 1400 */
    CHECK(known.margin > 0.2 && known.margin <= 0.25);
    oomkit_know_measured(&known, OOMKIT_FIRST, 9, UINT64_MAX / 2, 600, 2000, 0);
    CHECK(known.margin == 0.25);
}

static oomkit_measured
measured(int64_t rows, uint32_t retries)
{
    oomkit_measured m = {.batch = rows * 2, .k = 2};
    m.rows[OOMKIT_FIRST] = m.rows[OOMKIT_LATER] = rows;
    m.bytes[OOMKIT_FIRST] = m.bytes[OOMKIT_LATER] = (uint64_t)rows;
    m.baseline_bytes = 0;
    m.budget_bytes = 100;
    m.alloc_retries = retries;
    return m;
}

static void
test_calls(void)
{
    oomkit_knowledge known = nothing();
    oomkit_measured m = measured(8, 0);

    oomkit_know_worked(&known, &m);
    oomkit_know_worked(&known, &m);
    CHECK(known.successes == 2 && known.healthy == 2 && known.k == 2);
    CHECK(known.roles[OOMKIT_LATER].largest_ok == 8);
    m.k = 3;
    m.optimizer_bytes = 7;
    oomkit_know_worked(&known, &m);
    CHECK(known.healthy == 1 && known.optimizer_bytes == 7);
    oomkit_know_failed(&known, OOMKIT_LATER, 8, 0, 100, 0);
    CHECK(known.late == 1 && known.failures == 0 && known.healthy == 0);

    known = nothing(); /* two calls in a row in which the allocator had to retry */
    m = measured(8, 1);
    oomkit_know_worked(&known, &m);
    CHECK(known.roles[OOMKIT_LATER].smallest_failed == 0);
    m.alloc_retries = 0;
    oomkit_know_worked(&known, &m);
    m.alloc_retries = 3;
    oomkit_know_worked(&known, &m);
    CHECK(known.roles[OOMKIT_LATER].smallest_failed == 0);
    oomkit_know_worked(&known, &m);
    CHECK(known.roles[OOMKIT_LATER].smallest_failed == 8);
    m = measured(1, 1); /* one row cannot be cut: nothing is learned from it */
    known = nothing();
    oomkit_know_worked(&known, &m);
    oomkit_know_worked(&known, &m);
    CHECK(known.roles[OOMKIT_LATER].smallest_failed == 0);
}

static void
test_numbers_that_are_no_knowledge(void)
{
    oomkit_knowledge known = nothing();
    CHECK(oomkit_knowledge_valid(&known));
    known.roles[1].count = OOMKIT_POINTS + 1;
    CHECK(!oomkit_knowledge_valid(&known));
    known.roles[1].count = 1; /* of no rows */
    CHECK(!oomkit_knowledge_valid(&known));
    known = nothing();
    known.margin = -0.1;
    CHECK(!oomkit_knowledge_valid(&known));
    known.margin = NAN;
    CHECK(!oomkit_knowledge_valid(&known));
    known = nothing();
    known.roles[1].smallest_failed = -1;
    CHECK(!oomkit_knowledge_valid(&known));
}

/* --- whole courses of calls --- */

static const device_model models[] = {
    {1893, 17, 586, 631}, {1893, 5, 1747, 631}, {293, 28, 82.7, 98}, {30, 1, 0.05, 30},
    {3000, 10, 2, 1500},  {10, 2, 4, 3},        {200, 60, 30, 20},
};

static void
test_the_best_size_is_found(void)
{
    static const double shares[] = {0.9, 0.6, 0.45, 0.3, 0.2, 0.12, 0.07};
    int cases = 0, best = 0, total = 0, later = 0;
    size_t i, s;
    int64_t batch, k = 0;
    int call;

    for (i = 0; i < sizeof(models) / sizeof *models; i++) {
        for (batch = 32; batch <= 256; batch *= 2) {
            for (s = 0; s < sizeof(shares) / sizeof *shares; s++) {
                const device_model *model = &models[i];
                oomkit_knowledge known = nothing();
                uint64_t budget =
                    (uint64_t)((model->baseline + model->gradients +
                                model_peak(model, OOMKIT_FIRST, batch) * shares[s]) *
                               (double)MIB);
                int64_t wanted = best_k(model, batch, budget);
                if (wanted < 2) { /* all of it fits, or not even one row */
                    continue;
                }
                cases++;
                for (call = 0; call < 12; call++) {
                    int ooms = run_call(model, &known, batch, budget, &k);
                    CHECK(ooms >= 0);
                    total += ooms;
                    later += call >= 6 ? ooms : 0;
                }
                best += k == wanted;
            }
        }
    }
    CHECK(cases >= 80);
    CHECK(best * 100 >= cases * 98);
    CHECK(total * 10 <= cases * 23);
    CHECK(later == 0);
}

static void
test_it_grows_and_shrinks_with_the_budget(void)
{
    const device_model *model = &models[0];
    oomkit_knowledge known = nothing();
    uint64_t small = 6000 * MIB, large = 12000 * MIB;
    int64_t k = 0;
    int call;

    for (call = 0; call < 4; call++) {
        CHECK(run_call(model, &known, 64, small, &k) >= 0);
    }
    CHECK(k == best_k(model, 64, small));
    for (call = 0; call < 2; call++) { /* another process left */
        CHECK(run_call(model, &known, 64, large, &k) >= 0);
    }
    CHECK(k == best_k(model, 64, large));
    CHECK(run_call(model, &known, 64, small, &k) == 0); /* and is back: no OOM */
    CHECK(k == best_k(model, 64, small));
    CHECK(run_call(model, &known, 64, large, &k) == 0);
    CHECK(k == best_k(model, 64, large));
}

/* Progressive tuning: from one row on, without an OOM, to the best size. */
static void
test_it_grows_from_the_smallest_micro_batch(void)
{
    static const double shares[] = {0.9, 0.45, 0.2, 0.07};
    int cases = 0, best = 0, ooms = 0;
    size_t i, s;

    for (i = 0; i < sizeof(models) / sizeof *models; i++) {
        for (s = 0; s < sizeof(shares) / sizeof *shares; s++) {
            const device_model *model = &models[i];
            oomkit_knowledge known = nothing();
            uint64_t budget =
                (uint64_t)((model->baseline + model->gradients +
                            model_peak(model, OOMKIT_FIRST, 256) * shares[s]) *
                           (double)MIB);
            int64_t wanted = best_k(model, 256, budget), k = 0;
            int call;
            cases += wanted > 0;
            for (call = 0; wanted > 0 && call < 6; call++) {
                int failed = run_asked(model, &known, 256, 256, budget, &k);
                CHECK(failed >= 0 && (call > 0 || k == 256));
                ooms += failed;
            }
            best += wanted > 0 && k == wanted;
        }
    }
    CHECK(cases >= 24);
    CHECK(best * 100 >= cases * 95);
    CHECK(ooms == 0);
}

/* Without a budget nothing says that fewer would fit; a larger asked k stays. */
static void
test_it_stays_where_the_room_is_not_known(void)
{
    oomkit_knowledge known = nothing();
    oomkit_plan_request request = {64, 1, 1, 8, 10, OOMKIT_UNKNOWN, 0, 0, 0, 0.0};
    oomkit_plan_reason why;
    oomkit_plan plan;

    tell(&known, OOMKIT_FIRST, 8, 100);
    CHECK(oomkit_plan_choose(&known, &request, &plan, &why) == OOMKIT_OK);
    CHECK(plan.accumulation == 8 && why == OOMKIT_REASON_ASKED);
    request.budget_bytes = 1000;
    CHECK(oomkit_plan_choose(&known, &request, &plan, &why) == OOMKIT_OK);
    CHECK(plan.accumulation == 1 && why == OOMKIT_REASON_WHOLE);
}

static void
test_what_is_known_of_one_batch_serves_another(void)
{
    const device_model *model = &models[2];
    oomkit_knowledge known = nothing();
    uint64_t budget = 2000 * MIB;
    int64_t k = 0, batch;
    int call;

    for (call = 0; call < 4; call++) {
        CHECK(run_call(model, &known, 64, budget, &k) >= 0);
    }
    for (batch = 1; batch <= 512; batch += 7) {
        CHECK(run_call(model, &known, batch, budget, &k) == 0);
        CHECK(k <= best_k(model, batch, budget) + 1);
    }
}

static void
test_a_neighbour(void)
{
    oomkit_knowledge one = nothing(), other;

    oomkit_know_measured(&one, OOMKIT_FIRST, 8, 800, 100, 2000, 0);
    oomkit_know_failed(&one, OOMKIT_LATER, 16, 100, 2000, 0);
    oomkit_know_neighbour(&other, &one, 0.5); /* ours are smaller: no more than that */
    CHECK(oomkit_knowledge_valid(&other) && other.borrowed);
    CHECK(other.roles[OOMKIT_FIRST].largest_ok == 8);
    CHECK(other.roles[OOMKIT_LATER].smallest_failed == 0);
    CHECK(oomkit_predict(&other, OOMKIT_FIRST, 16, 0) == 1600);
    oomkit_know_neighbour(&other, &one, 3.0);
    CHECK(other.roles[OOMKIT_FIRST].largest_ok == 0);
    CHECK(other.roles[OOMKIT_LATER].smallest_failed == 16);
    CHECK(oomkit_predict(&other, OOMKIT_FIRST, 16, 0) == 4800);
    CHECK(other.successes == 0 && other.k == 0);
    tell(&other, OOMKIT_FIRST, 4, 500); /* what was borrowed goes */
    CHECK(!other.borrowed && other.roles[OOMKIT_FIRST].count == 1);
    CHECK(oomkit_predict(&other, OOMKIT_FIRST, 8, 0) == 1000);
}

/* Lengths that vary: each new one begins with what is known of another. */
static void
test_new_lengths(void)
{
    static const int64_t lengths[] = {512, 256, 128, 384, 64, 500, 448, 300};
    oomkit_knowledge known[8], *nearest;
    uint64_t budget = 6000 * MIB;
    int64_t k = 0;
    int total = 0, call;
    size_t i, j;

    for (i = 0; i < 8; i++) {
        const device_model model = {1893, 17, 586.0 / 512 * (double)lengths[i], 631};
        known[i] = nothing();
        nearest = NULL;
        for (j = 0; j < i; j++) { /* the nearest larger one */
            if (lengths[j] > lengths[i] &&
                (nearest == NULL || lengths[j] < lengths[nearest - known])) {
                nearest = &known[j];
            }
        }
        if (nearest != NULL) {
            oomkit_know_neighbour(&known[i], nearest,
                                  (double)lengths[i] /
                                      (double)lengths[nearest - known]);
        }
        for (call = 0; call < 4; call++) {
            int ooms = run_call(&model, &known[i], 32, budget, &k);
            CHECK(ooms >= 0 && (i == 0 || ooms == 0));
            total += ooms;
        }
        CHECK(k == best_k(&model, 32, budget));
    }
    CHECK(total <= 3);
}

static void
test_before_anything_worked_twice_then_four_times(void)
{
    oomkit_knowledge known = nothing();
    oomkit_plan_request request = {
        .batch = 1024, .min_micro_batch = 1, .multiple_of = 1, .start_accumulation = 1};
    oomkit_plan_reason reason;
    oomkit_plan plan;
    static const int64_t expected[] = {2, 8, 32, 128, 512, 1024};
    size_t i;

    request.baseline_bytes = request.budget_bytes = OOMKIT_UNKNOWN;
    CHECK(oomkit_plan_choose(&known, &request, &plan, &reason) == OOMKIT_OK);
    for (i = 0; i < sizeof(expected) / sizeof *expected; i++) {
        oomkit_know_failed(&known, OOMKIT_FIRST, oomkit_plan_micro_batch(&plan),
                           OOMKIT_UNKNOWN, OOMKIT_UNKNOWN, 0);
        CHECK(oomkit_plan_next(&known, &request, &plan, &plan, &reason) == OOMKIT_OK);
        CHECK(reason == OOMKIT_REASON_OOM && oomkit_plan_count(&plan) == expected[i]);
    }
    oomkit_know_failed(&known, OOMKIT_FIRST, 1, OOMKIT_UNKNOWN, OOMKIT_UNKNOWN, 0);
    CHECK(oomkit_plan_next(&known, &request, &plan, &plan, &reason) == OOMKIT_EREFUSED);
}

static void
test_a_larger_first_slice_saves_a_micro_batch(void)
{
    const device_model model = {30, 1, 0.05, 30};
    oomkit_knowledge known = nothing();
    uint64_t budget = 74 * MIB;
    int64_t k = 0;
    int call;

    CHECK(best_k(&model, 1024, budget) == 2); /* equal slices need 4 */
    for (call = 0; call < 6; call++) {
        CHECK(run_call(&model, &known, 1024, budget, &k) >= 0);
    }
    CHECK(k == best_k(&model, 1024, budget));
}

/* What worked and works no more: something took memory that no figure shows. */
static void
test_a_size_given_up_late_is_left_alone(void)
{
    const device_model *model = &models[2];
    oomkit_knowledge known = nothing();
    uint64_t budget = 3000 * MIB;
    uint64_t baseline = (uint64_t)(model->baseline * (double)MIB);
    oomkit_plan_request request = {.batch = 64, .min_micro_batch = 1, .multiple_of = 1,
                                   .start_accumulation = 1, .baseline_bytes = baseline,
                                   .budget_bytes = budget};
    oomkit_plan_reason reason;
    oomkit_plan plan;
    int64_t k = 0, start, given_up, rows;
    int call;

    for (call = 0; call < 5; call++) {
        CHECK(run_call(model, &known, 64, budget, &k) >= 0);
    }
    given_up = known.roles[OOMKIT_LATER].largest_ok;
    CHECK(k > 1 && given_up > 1);
    oomkit_know_failed(&known, OOMKIT_LATER, given_up, baseline, budget, 0);
    CHECK(known.late == 1);
    CHECK(run_call(model, &known, 64, budget - 800 * MIB, &k) >= 0);
    CHECK(oomkit_plan_choose(&known, &request, &plan, &reason) == OOMKIT_OK);
    CHECK(oomkit_plan_count(&plan) == k); /* the room is there again, the doubt too */
    for (call = 0; call < 40; call++) {
        CHECK(run_call(model, &known, 64, budget, &k) == 0);
        CHECK(oomkit_plan_choose(&known, &request, &plan, &reason) == OOMKIT_OK);
        CHECK(oomkit_plan_slice(&plan, 1, &start, &rows) == OOMKIT_OK);
        CHECK(rows < given_up);
    }
    request.budget_bytes = budget + 400 * MIB; /* a reason to try again */
    CHECK(oomkit_plan_choose(&known, &request, &plan, &reason) == OOMKIT_OK);
    CHECK(oomkit_plan_slice(&plan, 1, &start, &rows) == OOMKIT_OK);
    CHECK(rows >= given_up);
}

int
main(void)
{
    test_room();
    test_predictions();
    test_points_in_order_and_the_outer_ones_kept();
    test_bounds();
    test_margins();
    test_calls();
    test_numbers_that_are_no_knowledge();
    test_the_best_size_is_found();
    test_it_grows_and_shrinks_with_the_budget();
    test_it_grows_from_the_smallest_micro_batch();
    test_it_stays_where_the_room_is_not_known();
    test_what_is_known_of_one_batch_serves_another();
    test_a_neighbour();
    test_new_lengths();
    test_before_anything_worked_twice_then_four_times();
    test_a_larger_first_slice_saves_a_micro_batch();
    test_a_size_given_up_late_is_left_alone();
    return check_report();
}
