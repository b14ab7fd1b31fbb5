#include "check.h"

#include "knowledge.h"
#include "memory_model.h"
#include "numbers.h"
#include "plan.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const device_model models[] = {
    {1893, 17, 586, 631}, {1893, 5, 1747, 631}, {293, 28, 82.7, 98}, {30, 1, 0.05, 30},
    {3000, 10, 2, 1500},  {10, 2, 4, 3},        {200, 60, 30, 20},
};

static int
index_of(const char *name)
{
    int i;
    for (i = 0; i < oomkit_number_count(); i++) {
        if (strcmp(oomkit_number_name(i), name) == 0) {
            return i;
        }
    }
    printf("no number %s\n", name);
    exit(1);
}

static int
set(oomkit_knowledge *known, const char *name, uint64_t whole)
{
    oomkit_number number = {whole, 0.0};
    return oomkit_number_set(known, index_of(name), &number);
}

/* Out as numbers and in again, as a new run gets it. */
static oomkit_knowledge
carried(const oomkit_knowledge *known)
{
    oomkit_knowledge copy;
    int i;

    memset(&copy, 0, sizeof(copy));
    for (i = 0; i < oomkit_number_count(); i++) {
        oomkit_number number;
        oomkit_number_get(known, i, &number);
        if (!oomkit_number_is_nothing(i, &number)) {
            CHECK(oomkit_number_set(&copy, i, &number) == OOMKIT_OK);
        }
    }
    CHECK(oomkit_numbers_end(&copy) == OOMKIT_OK);
    return copy;
}

static void
test_names_are_there_once(void)
{
    int i, j;

    CHECK(oomkit_number_count() == 18 + 2 * (4 + 2 * OOMKIT_POINTS));
    for (i = 0; i < oomkit_number_count(); i++) {
        for (j = 0; j < i; j++) {
            CHECK(strcmp(oomkit_number_name(i), oomkit_number_name(j)) != 0);
        }
    }
    CHECK(oomkit_number_kind_of(index_of("later_ok_room")) == OOMKIT_NUMBER_ROOM);
    CHECK(oomkit_number_kind_of(index_of("margin")) == OOMKIT_NUMBER_SHARE);
    CHECK(oomkit_number_kind_of(index_of("first_rows_4")) == OOMKIT_NUMBER_WHOLE);
}

static void
test_what_goes_out_comes_in(void)
{
    size_t i;
    int64_t k = 0;
    int call;

    for (i = 0; i < sizeof(models) / sizeof *models; i++) {
        uint64_t budget =
            (uint64_t)((models[i].baseline + models[i].gradients + models[i].row * 40) *
                       (double)MIB);
        oomkit_knowledge known, copy;
        memset(&known, 0, sizeof(known));
        for (call = 0; call < 6; call++) {
            CHECK(run_call(&models[i], &known, 256, budget, &k) >= 0);
            copy = carried(&known);
            CHECK(copy.recalled && !known.recalled);
            copy.recalled = 0;
            copy.retried = known.retried;
            CHECK(memcmp(&copy, &known, sizeof(known)) == 0);
        }
    }
}

static void
test_numbers_out_of_range(void)
{
    static const uint64_t absurd[] = {(UINT64_C(1) << 60) + 1, UINT64_C(1) << 63,
                                      UINT64_MAX - 1, UINT64_MAX};
    oomkit_knowledge known, before;
    oomkit_number number = {0, 0.0};
    int i, margin = index_of("margin");
    size_t j;

    memset(&known, 0, sizeof(known));
    before = known;
    for (i = 0; i < oomkit_number_count(); i++) {
        for (j = 0; j < sizeof(absurd) / sizeof *absurd; j++) {
            number.whole = absurd[j];
            number.share = -1.0;
            if (oomkit_number_kind_of(i) == OOMKIT_NUMBER_ROOM &&
                absurd[j] == OOMKIT_UNKNOWN) {
                continue;
            }
            CHECK(oomkit_number_set(&known, i, &number) == OOMKIT_EINVAL);
        }
    }
    for (j = 0; j < 4; j++) {
        number.share = j == 0   ? (double)NAN
                       : j == 1 ? (double)INFINITY
                       : j == 2 ? 0.26
                                : -1e-9;
        CHECK(oomkit_number_set(&known, margin, &number) == OOMKIT_EINVAL);
    }
    CHECK(memcmp(&known, &before, sizeof(known)) == 0);
    CHECK(set(&known, "late", UINT64_C(1) << 32) == OOMKIT_EINVAL);
    CHECK(set(&known, "late", UINT32_MAX) == OOMKIT_OK && known.late == UINT32_MAX);
    CHECK(set(&known, "first_ok_room", OOMKIT_UNKNOWN) == OOMKIT_OK);
}

#define WRONG(...)                                                                     \
    do {                                                                               \
        oomkit_knowledge known;                                                        \
        memset(&known, 0, sizeof(known));                                              \
        CHECK(__VA_ARGS__);                                                            \
        CHECK(oomkit_numbers_end(&known) == OOMKIT_EINVAL);                            \
    } while (0)

static void
test_numbers_that_do_not_go_together(void)
{
#define SET(name, value) (set(&known, name, value) == OOMKIT_OK)
    WRONG(SET("batch", 64));
    WRONG(SET("accumulation_steps", 2));
    WRONG(SET("batch", 2) && SET("accumulation_steps", 3));
    WRONG(SET("first_largest_ok", 8) && SET("first_smallest_failed", 8));
    WRONG(SET("first_rows_1", 8));
    WRONG(SET("later_bytes_1", 8));
    WRONG(SET("first_rows_2", 8) && SET("first_bytes_2", 8));
    WRONG(SET("first_rows_1", 8) && SET("first_bytes_1", 8) && SET("first_rows_2", 8) &&
          SET("first_bytes_2", 80));
#undef SET
}

/* Whatever is let in, the planner answers. */
static void
test_numbers_by_chance(void)
{
    uint64_t state = 88172645463325252u, taken = 0;
    int round, i;

    for (round = 0; round < 20000; round++) {
        oomkit_knowledge known;
        oomkit_plan_request request = {64, 1, 1, 1, 1000, 5000, 100, 0, 0, 0.0};
        oomkit_plan_reason reason;
        oomkit_plan plan;
        memset(&known, 0, sizeof(known));
        for (i = 0; i < oomkit_number_count(); i++) {
            oomkit_number number;
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            number.whole = state >> (state % 64);
            number.share = (double)(state % 1000) / 3000.0;
            if (state % 3 == 0 && i != 5) {
                (void)oomkit_number_set(&known, i, &number);
            }
        }
        if (oomkit_numbers_end(&known) != OOMKIT_OK) {
            memset(known.roles, 0, sizeof(known.roles));
            known.k = known.batch = 0;
        }
        known.recalled = 1;
        CHECK(oomkit_plan_choose(&known, &request, &plan, &reason) == OOMKIT_OK);
        for (i = 0; i < 70; i++) {
            oomkit_know_failed(&known, OOMKIT_FIRST, oomkit_plan_micro_batch(&plan),
                               1000, 5000, 100);
            if (oomkit_plan_next(&known, &request, &plan, &plan, &reason) !=
                OOMKIT_OK) {
                break;
            }
        }
        CHECK(i < 70 && oomkit_plan_micro_batch(&plan) == 1);
        taken++;
    }
    CHECK(taken > 0);
}

/* --- knowledge of an earlier run --- */

/* What a run with this model knows after a few calls, as another run gets it. */
static oomkit_knowledge
recalled(const device_model *model, uint64_t budget, int64_t *k)
{
    oomkit_knowledge known;
    int call;

    memset(&known, 0, sizeof(known));
    for (call = 0; call < 8; call++) {
        CHECK(run_call(model, &known, 256, budget, k) >= 0);
    }
    return carried(&known);
}

static void
test_a_new_run_begins_where_the_last_one_ended(void)
{
    size_t i;

    for (i = 0; i < sizeof(models) / sizeof *models; i++) {
        uint64_t budget =
            (uint64_t)((models[i].baseline + models[i].gradients + models[i].row * 40) *
                       (double)MIB);
        device_model fresh = models[i]; /* its optimizer has no state yet */
        int64_t before = 0, k = 0;
        oomkit_knowledge known = recalled(&models[i], budget, &before);
        CHECK(run_call(&models[i], &known, 256, budget, &k) == 0 && k == before);
        CHECK(!known.recalled);
        known = recalled(&models[i], budget, &before);
        fresh.baseline *= 0.4;
        CHECK(run_call(&fresh, &known, 256, budget, &k) == 0 && k == before);
    }
}

static void
test_less_room_than_in_the_last_run_is_planned_for(void)
{
    const device_model *model = &models[2];
    int64_t before = 0, k = 0;
    oomkit_knowledge known = recalled(model, 4000 * MIB, &before);

    CHECK(run_call(model, &known, 256, 2000 * MIB, &k) == 0);
    CHECK(k == best_k(model, 256, 2000 * MIB) && k > before);
    known = recalled(model, 4000 * MIB, &before);
    CHECK(run_call(model, &known, 256, 9000 * MIB, &k) == 0);
    CHECK(run_call(model, &known, 256, 9000 * MIB, &k) == 0);
    CHECK(k == best_k(model, 256, 9000 * MIB) && k < before);
}

/* A model that was edited: rows need more, or less, than the last run says. */
static void
test_what_holds_no_longer_costs_a_few_ooms(void)
{
    const device_model *model = &models[2];
    device_model edited = *model;
    int64_t before = 0, k = 0;
    oomkit_knowledge known = recalled(model, 4000 * MIB, &before), first;
    int call, ooms = 0, anew = 0;

    memset(&first, 0, sizeof(first));
    edited.row *= 5;
    for (call = 0; call < 4; call++) {
        ooms += run_call(&edited, &known, 256, 4000 * MIB, &k);
        anew += run_call(&edited, &first, 256, 4000 * MIB, &k);
        CHECK(call > 0 || ooms >= 1);
    }
    CHECK(ooms <= anew + 1 && known.late == 0);
    CHECK(known.k == best_k(&edited, 256, 4000 * MIB));

    known = recalled(model, 4000 * MIB, &before);
    edited.row = model->row / 5;
    for (call = 0; call < 6; call++) {
        CHECK(run_call(&edited, &known, 256, 4000 * MIB, &k) == 0);
    }
    CHECK(k == best_k(&edited, 256, 4000 * MIB) && k < before);
}

/* A gradient exists twice while it is added to the one that is there: until a later
 * micro-batch was measured that counts, and never against a first one. */
static void
test_the_largest_gradient_is_there_twice(void)
{
    const uint64_t base = 10 * MIB, budget = 110 * MIB, gradients = 20 * MIB;
    const oomkit_plan whole = {64, 1, 0, 1, 0};
    oomkit_plan_request request = {.batch = 64,
                                   .min_micro_batch = 1,
                                   .multiple_of = 1,
                                   .start_accumulation = 1,
                                   .baseline_bytes = base,
                                   .budget_bytes = budget,
                                   .gradient_bytes = gradients};
    oomkit_knowledge known;
    oomkit_plan_reason reason;
    oomkit_plan plan;

    memset(&known, 0, sizeof(known));
    oomkit_know_measured(&known, OOMKIT_FIRST, 32, 80 * MIB, base, budget, gradients);
    oomkit_know_failed(&known, OOMKIT_FIRST, 64, base, budget, gradients);
    CHECK(oomkit_plan_next(&known, &request, &whole, &plan, &reason) == OOMKIT_OK);
    CHECK(oomkit_plan_count(&plan) == 2); /* 80 + 20 of 100 */
    request.largest_gradient = 1 * MIB;
    CHECK(oomkit_plan_next(&known, &request, &whole, &plan, &reason) == OOMKIT_OK);
    CHECK(oomkit_plan_count(&plan) == 3);
    request.largest_gradient = OOMKIT_UNKNOWN; /* nonsense, and no way round zero */
    CHECK(oomkit_plan_next(&known, &request, &whole, &plan, &reason) == OOMKIT_OK);
    CHECK(oomkit_plan_count(&plan) >= 2);
    request.largest_gradient = 1 * MIB;
    oomkit_know_measured(&known, OOMKIT_LATER, 32, 100 * MIB, base, budget, gradients);
    CHECK(oomkit_plan_next(&known, &request, &whole, &plan, &reason) == OOMKIT_OK);
    CHECK(oomkit_plan_count(&plan) == 2);
}

/* The optimizer's state comes after the first call: a size that failed in the room that
 * is left was not given up, and what was measured holds. */
static void
test_less_room_is_no_size_given_up(void)
{
    oomkit_knowledge known, kept;
    const oomkit_sizes *later = &known.roles[OOMKIT_LATER];

    memset(&known, 0, sizeof(known));
    known.successes = 1;
    oomkit_know_measured(&known, OOMKIT_LATER, 32, 80 * MIB, 10 * MIB, 110 * MIB, 0);
    oomkit_know_failed(&known, OOMKIT_LATER, 24, 50 * MIB, 110 * MIB, 0);
    CHECK(known.late == 0 && known.missed == 1 && later->smallest_failed == 24);
    CHECK(later->largest_ok == 32 && later->count == 1 && known.margin == 0.0);
    kept = known;
    kept.roles[OOMKIT_LATER].count = 0; /* as it comes out of a file */
    CHECK(oomkit_numbers_end(&kept) == OOMKIT_OK);
    kept = known;
    kept.roles[OOMKIT_LATER].count = 0;
    kept.roles[OOMKIT_LATER].failed_room = kept.roles[OOMKIT_LATER].ok_room;
    CHECK(oomkit_numbers_end(&kept) == OOMKIT_EINVAL);
    oomkit_know_failed(&known, OOMKIT_LATER, 32, 10 * MIB, 110 * MIB, 0);
    CHECK(known.late == 1 && later->largest_ok == 0 && later->count == 0);
}

/* Asked to begin one row at a time, where the gradients that accumulate leave no room
 * for a later micro-batch: the whole batch at once is tried before giving up, and only
 * once.
 */
static void
test_the_whole_batch_is_the_last_resort(void)
{
    const uint64_t base = 10 * MIB, budget = 110 * MIB, gradients = 60 * MIB;
    oomkit_plan_request request = {.batch = 8,
                                   .min_micro_batch = 1,
                                   .multiple_of = 1,
                                   .start_accumulation = 8,
                                   .baseline_bytes = base,
                                   .budget_bytes = budget,
                                   .gradient_bytes = gradients,
                                   .may_be_whole = 1};
    oomkit_knowledge known;
    oomkit_plan_reason reason;
    oomkit_plan plan;

    memset(&known, 0, sizeof(known));
    CHECK(oomkit_plan_choose(&known, &request, &plan, &reason) == OOMKIT_OK);
    CHECK(oomkit_plan_count(&plan) == 8);
    oomkit_know_measured(&known, OOMKIT_FIRST, 1, 70 * MIB, base, budget, gradients);
    oomkit_know_failed(&known, OOMKIT_LATER, 1, base, budget, gradients);
    CHECK(oomkit_plan_next(&known, &request, &plan, &plan, &reason) == OOMKIT_OK);
    CHECK(oomkit_plan_count(&plan) == 1 && reason == OOMKIT_REASON_OOM);
    oomkit_know_failed(&known, OOMKIT_FIRST, 8, base, budget, gradients);
    CHECK(oomkit_plan_next(&known, &request, &plan, &plan, &reason) == OOMKIT_EREFUSED);
    CHECK(reason == OOMKIT_REASON_EXHAUSTED);
    request.may_be_whole = 0; /* tried before, or nothing accumulates */
    memset(&known, 0, sizeof(known));
    plan = (oomkit_plan){8, 8, 0, 1, 0};
    oomkit_know_failed(&known, OOMKIT_LATER, 1, base, budget, 0);
    CHECK(oomkit_plan_next(&known, &request, &plan, &plan, &reason) == OOMKIT_EREFUSED);
}

/* Sizes between two that were measured lie between their peaks; and where predictions
 * leave nothing, what the last call worked with is doubled, not thrown away. */
static void
test_peaks_that_leave_nothing_are_doubted(void)
{
    oomkit_plan_request request = {.batch = 1024,
                                   .min_micro_batch = 1,
                                   .multiple_of = 1,
                                   .start_accumulation = 1,
                                   .baseline_bytes = 10 * MIB,
                                   .budget_bytes = 50 * MIB};
    oomkit_knowledge known;
    oomkit_plan_reason reason;
    oomkit_plan plan;

    memset(&known, 0, sizeof(known));
    oomkit_know_measured(&known, OOMKIT_LATER, 4, 20 * MIB, 0, OOMKIT_UNKNOWN, 0);
    oomkit_know_measured(&known, OOMKIT_LATER, 8, 60 * MIB, 0, OOMKIT_UNKNOWN, 0);
    oomkit_know_measured(&known, OOMKIT_LATER, 64, 64 * MIB, 0, OOMKIT_UNKNOWN, 0);
    CHECK(oomkit_predict(&known, OOMKIT_LATER, 5, 0) == 30 * MIB);
    CHECK(oomkit_predict(&known, OOMKIT_LATER, 36, 0) == 62 * MIB);

    memset(&known, 0, sizeof(known));
    known.successes = known.failures = 1;
    known.batch = 1024;
    known.k = 4;
    oomkit_know_measured(&known, OOMKIT_FIRST, 256, 60 * MIB, 0, OOMKIT_UNKNOWN, 0);
    oomkit_know_measured(&known, OOMKIT_FIRST, 200, 59 * MIB, 0, OOMKIT_UNKNOWN, 0);
    oomkit_know_measured(&known, OOMKIT_FIRST, 100, 58 * MIB, 0, OOMKIT_UNKNOWN, 0);
    known.roles[OOMKIT_LATER] = known.roles[OOMKIT_FIRST];
    request.gradient_bytes = 45 * MIB;
    CHECK(oomkit_plan_choose(&known, &request, &plan, &reason) == OOMKIT_OK);
    CHECK(oomkit_plan_count(&plan) == 8);
    known.batch = 512; /* of another batch nothing is known: the smallest */
    CHECK(oomkit_plan_choose(&known, &request, &plan, &reason) == OOMKIT_OK);
    CHECK(oomkit_plan_count(&plan) == 1024);
}

int
main(void)
{
    test_the_whole_batch_is_the_last_resort();
    test_peaks_that_leave_nothing_are_doubted();
    test_less_room_is_no_size_given_up();
    test_the_largest_gradient_is_there_twice();
    test_names_are_there_once();
    test_what_goes_out_comes_in();
    test_numbers_out_of_range();
    test_numbers_that_do_not_go_together();
    test_numbers_by_chance();
    test_a_new_run_begins_where_the_last_one_ended();
    test_less_room_than_in_the_last_run_is_planned_for();
    test_what_holds_no_longer_costs_a_few_ooms();
    return check_report();
}
