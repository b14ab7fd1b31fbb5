#include "check.h"
#include "wrap.h"

#include "fault.h"
#include "status.h"

#include <pthread.h>

static oomkit_fault_schedule
schedule(uint64_t nth, uint64_t times)
{
    return (oomkit_fault_schedule){nth, times, 0, OOMKIT_PHASE_ANY, NULL};
}

static void
test_nothing_fails_unarmed(void)
{
    oomkit_fault *fault = oomkit_fault_create();

    CHECK(!oomkit_fault_armed(fault));
    CHECK(oomkit_fault_phase() == OOMKIT_PHASE_FORWARD);
    CHECK(oomkit_fault_check(fault, 100) == OOMKIT_OK);
    CHECK(oomkit_fault_seen(fault) == 0 && oomkit_fault_fired(fault) == 0);
    oomkit_fault_disarm(fault);
    CHECK(!oomkit_fault_armed(fault));
    oomkit_fault_destroy(fault);
}

static void
test_exactly_the_named_ones_fail(void)
{
    oomkit_fault *fault = oomkit_fault_create();
    uint64_t nth, times, i, fired;

    for (nth = 1; nth <= 6; nth++) {
        for (times = 0; times <= 4; times++) {
            oomkit_fault_schedule plan = schedule(nth, times);
            CHECK(oomkit_fault_arm(fault, &plan) == OOMKIT_OK);
            CHECK(oomkit_fault_armed(fault));
            for (fired = 0, i = 1; i <= 12; i++) {
                int fails = i >= nth && (times == 0 || i < nth + times);
                fired += (uint64_t)fails;
                CHECK(oomkit_fault_check(fault, i) ==
                      (fails ? OOMKIT_EOOM : OOMKIT_OK));
                CHECK(oomkit_fault_seen(fault) == i);
                CHECK(oomkit_fault_fired(fault) == fired);
            }
            CHECK(oomkit_fault_armed(fault));
            oomkit_fault_disarm(fault);
            CHECK(oomkit_fault_check(fault, 1) == OOMKIT_OK);
            CHECK(oomkit_fault_seen(fault) == 12);
            CHECK(oomkit_fault_fired(fault) == fired);
        }
    }
    oomkit_fault_destroy(fault);
}

static void
test_extreme_numbers(void)
{
    oomkit_fault *fault = oomkit_fault_create();
    oomkit_fault_schedule plan = schedule(2, UINT64_MAX);

    CHECK(oomkit_fault_arm(fault, &plan) == OOMKIT_OK);
    CHECK(oomkit_fault_check(fault, 1) == OOMKIT_OK);
    CHECK(oomkit_fault_check(fault, UINT64_MAX) == OOMKIT_EOOM);
    CHECK(oomkit_fault_check(fault, 1) == OOMKIT_EOOM);
    oomkit_fault_disarm(fault);
    plan = schedule(UINT64_MAX, 0);
    CHECK(oomkit_fault_arm(fault, &plan) == OOMKIT_OK);
    CHECK(oomkit_fault_check(fault, 1) == OOMKIT_OK);
    oomkit_fault_destroy(fault);
}

static void
test_arming(void)
{
    oomkit_fault *fault = oomkit_fault_create();
    oomkit_fault_schedule never = schedule(0, 1), first = schedule(1, 1);
    oomkit_fault_schedule third = schedule(3, 1);

    CHECK(oomkit_fault_arm(fault, &never) == OOMKIT_EINVAL);
    CHECK(!oomkit_fault_armed(fault));
    CHECK(oomkit_fault_arm(fault, &third) == OOMKIT_OK);
    CHECK(oomkit_fault_check(fault, 1) == OOMKIT_OK);
    CHECK(oomkit_fault_arm(fault, &first) == OOMKIT_EREFUSED);
    CHECK(oomkit_fault_arm(fault, &never) == OOMKIT_EINVAL);
    CHECK(oomkit_fault_check(fault, 1) ==
          OOMKIT_OK); /* the third still, not the first */
    CHECK(oomkit_fault_check(fault, 1) == OOMKIT_EOOM);
    oomkit_fault_disarm(fault);
    CHECK(oomkit_fault_fired(fault) == 1);
    CHECK(oomkit_fault_arm(fault, &first) == OOMKIT_OK);
    CHECK(oomkit_fault_seen(fault) == 0 && oomkit_fault_fired(fault) == 0);
    CHECK(oomkit_fault_check(fault, 1) == OOMKIT_EOOM);
    oomkit_fault_destroy(fault);
}

static void
test_small_requests_do_not_count(void)
{
    oomkit_fault *fault = oomkit_fault_create();
    oomkit_fault_schedule plan = schedule(2, 1);

    plan.min_bytes = 64;
    CHECK(oomkit_fault_arm(fault, &plan) == OOMKIT_OK);
    CHECK(oomkit_fault_check(fault, 63) == OOMKIT_OK);
    CHECK(oomkit_fault_check(fault, 64) == OOMKIT_OK);
    CHECK(oomkit_fault_check(fault, 63) == OOMKIT_OK);
    CHECK(oomkit_fault_seen(fault) == 1);
    CHECK(oomkit_fault_check(fault, 64) == OOMKIT_EOOM);
    oomkit_fault_disarm(fault);

    plan = schedule(1, 0); /* min_bytes 0: still not those of zero bytes */
    CHECK(oomkit_fault_arm(fault, &plan) == OOMKIT_OK);
    CHECK(oomkit_fault_check(fault, 0) == OOMKIT_OK);
    CHECK(oomkit_fault_seen(fault) == 0);
    CHECK(oomkit_fault_check(fault, 1) == OOMKIT_EOOM);
    oomkit_fault_destroy(fault);
}

static void
test_phases(void)
{
    oomkit_fault *fault = oomkit_fault_create();
    oomkit_fault_schedule plan = schedule(1, 0);
    uint32_t mask;
    int phase, before = OOMKIT_PHASE_FORWARD;

    for (mask = 0; mask < 1u << OOMKIT_PHASES; mask++) {
        plan.phases = mask;
        CHECK(oomkit_fault_arm(fault, &plan) == OOMKIT_OK);
        for (phase = 0; phase < OOMKIT_PHASES; phase++) {
            CHECK(oomkit_fault_set_phase(phase) == before);
            CHECK(oomkit_fault_phase() == phase);
            before = phase;
            CHECK(oomkit_fault_check(fault, 1) ==
                  (mask & 1u << phase ? OOMKIT_EOOM : OOMKIT_OK));
        }
        oomkit_fault_disarm(fault);
    }
    CHECK(oomkit_fault_set_phase(-1) == before);
    CHECK(oomkit_fault_set_phase(OOMKIT_PHASES) == before);
    CHECK(oomkit_fault_phase() == before);
    CHECK(oomkit_fault_set_phase(OOMKIT_PHASE_FORWARD) == before);
    oomkit_fault_destroy(fault);
}

static void *
own_phase(void *argument)
{
    int *seen = argument;

    seen[0] = oomkit_fault_phase(); /* it has none: that of whom it works for */
    seen[1] = oomkit_fault_set_phase(OOMKIT_PHASE_FORWARD);
    seen[2] = oomkit_fault_phase();
    seen[3] = oomkit_fault_set_phase(OOMKIT_PHASE_RECOVERY);
    seen[4] = oomkit_fault_set_phase(OOMKIT_PHASE_FORWARD);
    return NULL;
}

/* A thread has a phase of its own once it has set one. */
static void
test_phases_of_threads(void)
{
    int phase, seen[5];
    pthread_t thread;

    for (phase = 0; phase < OOMKIT_PHASES; phase++) {
        CHECK(oomkit_fault_set_phase(phase) == OOMKIT_PHASE_FORWARD);
        CHECK(pthread_create(&thread, NULL, own_phase, seen) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
        CHECK(seen[0] == phase && seen[1] == OOMKIT_PHASE_FORWARD &&
              seen[2] == OOMKIT_PHASE_FORWARD && seen[3] == OOMKIT_PHASE_FORWARD &&
              seen[4] == OOMKIT_PHASE_RECOVERY);
        CHECK(oomkit_fault_phase() == phase);
        CHECK(oomkit_fault_set_phase(OOMKIT_PHASE_FORWARD) == phase);
    }
}

static void
test_schedules_follow_one_another(void)
{
    oomkit_fault *fault = oomkit_fault_create();
    oomkit_fault_schedule third = {2, 0, 0, 1u << OOMKIT_PHASE_RECOVERY, NULL};
    oomkit_fault_schedule second = {1, 1, 0, OOMKIT_PHASE_ANY, &third};
    oomkit_fault_schedule first = {2, 2, 0, OOMKIT_PHASE_ANY, &second};
    int i;

    CHECK(oomkit_fault_arm(fault, &first) == OOMKIT_OK);
    for (i = 1; i <= 5; i++) {
        CHECK(oomkit_fault_check(fault, 1) ==
              (i == 2 || i == 3 || i == 4 ? OOMKIT_EOOM : OOMKIT_OK));
    }
    CHECK(oomkit_fault_fired(fault) == 3 && oomkit_fault_seen(fault) == 0);
    CHECK(oomkit_fault_check_own(fault, 1) == OOMKIT_OK);
    CHECK(oomkit_fault_check_own(fault, 1) == OOMKIT_EOOM);
    CHECK(oomkit_fault_check_own(fault, 1) == OOMKIT_EOOM);
    CHECK(oomkit_fault_fired(fault) == 5 && oomkit_fault_seen(fault) == 3);
    oomkit_fault_disarm(fault);

    second.times = 0; /* the one after it would never come */
    CHECK(oomkit_fault_arm(fault, &first) == OOMKIT_EINVAL);
    CHECK(!oomkit_fault_armed(fault));
    second.times = 1;
    CHECK(oomkit_fault_arm(fault, &first) == OOMKIT_OK);
    CHECK(oomkit_fault_check(fault, 1) == OOMKIT_OK); /* from the first again */
    oomkit_fault_disarm(fault);
    oomkit_fault_destroy(fault);
}

static void
test_at_most_so_many_schedules(void)
{
    oomkit_fault *fault = oomkit_fault_create();
    oomkit_fault_schedule plan[OOMKIT_FAULT_STAGES + 1];
    int i;

    for (i = 0; i <= OOMKIT_FAULT_STAGES; i++) {
        plan[i] = schedule(1, 1);
        plan[i].next = i < OOMKIT_FAULT_STAGES ? &plan[i + 1] : NULL;
    }
    CHECK(oomkit_fault_arm(fault, &plan[0]) == OOMKIT_EINVAL);
    CHECK(oomkit_fault_arm(fault, &plan[1]) == OOMKIT_OK);
    for (i = 0; i < OOMKIT_FAULT_STAGES; i++) {
        CHECK(oomkit_fault_check(fault, 1) == OOMKIT_EOOM);
    }
    CHECK(oomkit_fault_check(fault, 1) == OOMKIT_OK);
    oomkit_fault_disarm(fault);
    oomkit_fault_destroy(fault);
}

static void
test_own_allocations_match_by_name_only(void)
{
    oomkit_fault *fault = oomkit_fault_create();
    oomkit_fault_schedule plan = schedule(1, 0);
    uint32_t mask;
    int phase;

    CHECK(oomkit_fault_check_own(fault, 1) == OOMKIT_OK); /* unarmed */
    CHECK(oomkit_fault_arm(fault, &plan) == OOMKIT_OK);
    CHECK(oomkit_fault_check_own(fault, 1) == OOMKIT_OK);
    CHECK(oomkit_fault_seen(fault) == 0);
    oomkit_fault_disarm(fault);
    for (mask = 0; mask < 1u << OOMKIT_PHASES; mask++) {
        plan.phases = mask;
        CHECK(oomkit_fault_arm(fault, &plan) == OOMKIT_OK);
        for (phase = 0; phase < OOMKIT_PHASES; phase++) {
            oomkit_fault_set_phase(phase);
            CHECK(oomkit_fault_check_own(fault, 0) == OOMKIT_OK);
            CHECK(oomkit_fault_check_own(fault, 1) ==
                  (mask & 1u << OOMKIT_PHASE_RECOVERY ? OOMKIT_EOOM : OOMKIT_OK));
        }
        oomkit_fault_disarm(fault);
    }
    oomkit_fault_set_phase(OOMKIT_PHASE_FORWARD);
    oomkit_fault_destroy(fault);
}

/* Several threads share one schedule: as many fail as it says, whoever they are. */
enum { THREADS = 3, ROUNDS = 20000, NTH = 30001, TIMES = 777 };

typedef struct worker {
    oomkit_fault *fault;
    uint64_t failed;
} worker;

static void *
work(void *argument)
{
    worker *self = argument;
    int i;

    for (i = 0; i < ROUNDS; i++) {
        self->failed += oomkit_fault_check(self->fault, 8) == OOMKIT_EOOM;
    }
    return NULL;
}

static void
test_threads(void)
{
    oomkit_fault *fault = oomkit_fault_create();
    oomkit_fault_schedule plan = schedule(NTH, TIMES);
    pthread_t threads[THREADS];
    worker workers[THREADS];
    uint64_t failed = 0;
    int i;

    CHECK(oomkit_fault_arm(fault, &plan) == OOMKIT_OK);
    for (i = 0; i < THREADS; i++) {
        workers[i] = (worker){fault, 0};
        CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    for (i = 0; i < THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        failed += workers[i].failed;
    }
    CHECK(failed == TIMES);
    CHECK(oomkit_fault_fired(fault) == TIMES);
    CHECK(oomkit_fault_seen(fault) == (uint64_t)THREADS * ROUNDS);
    oomkit_fault_destroy(fault);
}

/* Arming and disarming while another thread allocates. */
static void
test_arming_beside_a_thread(void)
{
    oomkit_fault *fault = oomkit_fault_create();
    oomkit_fault_schedule plan = schedule(1, 0);
    worker other = {fault, 0};
    pthread_t thread;
    int i;

    CHECK(pthread_create(&thread, NULL, work, &other) == 0);
    for (i = 0; i < 2000; i++) {
        CHECK(oomkit_fault_arm(fault, &plan) == OOMKIT_OK);
        CHECK(oomkit_fault_check(fault, 8) == OOMKIT_EOOM);
        oomkit_fault_disarm(fault);
        CHECK(oomkit_fault_check(fault, 8) == OOMKIT_OK);
    }
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(oomkit_fault_check(fault, 8) == OOMKIT_OK);
    oomkit_fault_destroy(fault);
}

int
main(void)
{
    test_nothing_fails_unarmed();
    test_exactly_the_named_ones_fail();
    test_extreme_numbers();
    test_arming();
    test_small_requests_do_not_count();
    test_phases();
    test_phases_of_threads();
    test_schedules_follow_one_another();
    test_at_most_so_many_schedules();
    test_own_allocations_match_by_name_only();
    test_threads();
    test_arming_beside_a_thread();
    CHECK_FAILS_WITHOUT_MEMORY(oomkit_fault_create());
    oomkit_fault_destroy(NULL);
    return check_report();
}
