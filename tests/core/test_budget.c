#include "check.h"
#include "wrap.h"

#include "budget.h"
#include "status.h"

#include <pthread.h>
#include <stdatomic.h>

static void
test_starts_empty_and_unlimited(void)
{
    oomkit_budget *budget = oomkit_budget_create();
    uint64_t after = 0;

    CHECK(oomkit_budget_used(budget) == 0);
    CHECK(oomkit_budget_limit(budget) == OOMKIT_BUDGET_UNLIMITED);
    CHECK(oomkit_budget_reserve(budget, 100, &after) == OOMKIT_OK && after == 100);
    CHECK(oomkit_budget_reserve(budget, 23, &after) == OOMKIT_OK && after == 123);
    oomkit_budget_release(budget, 100);
    CHECK(oomkit_budget_used(budget) == 23);
    oomkit_budget_destroy(budget);
}

static void
test_refuses_one_byte_too_many(void)
{
    oomkit_budget *budget = oomkit_budget_create();
    uint64_t after = 7;

    oomkit_budget_set_limit(budget, 100);
    CHECK(oomkit_budget_limit(budget) == 100);
    CHECK(oomkit_budget_reserve(budget, 101, &after) == OOMKIT_EREFUSED);
    CHECK(oomkit_budget_used(budget) == 0 && after == 7);
    CHECK(oomkit_budget_reserve(budget, 60, &after) == OOMKIT_OK && after == 60);
    CHECK(oomkit_budget_reserve(budget, 41, &after) == OOMKIT_EREFUSED);
    CHECK(oomkit_budget_used(budget) == 60 && after == 60);
    CHECK(oomkit_budget_reserve(budget, 40, &after) == OOMKIT_OK && after == 100);
    CHECK(oomkit_budget_reserve(budget, 1, &after) == OOMKIT_EREFUSED);
    oomkit_budget_release(budget, 1);
    CHECK(oomkit_budget_reserve(budget, 1, &after) == OOMKIT_OK && after == 100);
    oomkit_budget_destroy(budget);
}

static void
test_a_limit_below_what_is_used(void)
{
    oomkit_budget *budget = oomkit_budget_create();
    uint64_t after;

    CHECK(oomkit_budget_reserve(budget, 50, &after) == OOMKIT_OK);
    oomkit_budget_set_limit(budget, 10);
    CHECK(oomkit_budget_used(budget) == 50);
    CHECK(oomkit_budget_reserve(budget, 1, &after) == OOMKIT_EREFUSED);
    oomkit_budget_release(budget, 40);
    CHECK(oomkit_budget_reserve(budget, 1, &after) == OOMKIT_EREFUSED);
    oomkit_budget_release(budget, 1);
    CHECK(oomkit_budget_reserve(budget, 1, &after) == OOMKIT_OK && after == 10);
    oomkit_budget_set_limit(budget, OOMKIT_BUDGET_UNLIMITED);
    CHECK(oomkit_budget_reserve(budget, 1000, &after) == OOMKIT_OK && after == 1010);
    oomkit_budget_destroy(budget);
}

static void
test_sums_do_not_overflow(void)
{
    oomkit_budget *budget = oomkit_budget_create();
    uint64_t after;

    CHECK(oomkit_budget_reserve(budget, 10, &after) == OOMKIT_OK);
    CHECK(oomkit_budget_reserve(budget, UINT64_MAX, &after) == OOMKIT_EREFUSED);
    CHECK(oomkit_budget_reserve(budget, UINT64_MAX - 9, &after) == OOMKIT_EREFUSED);
    CHECK(oomkit_budget_used(budget) == 10);
    CHECK(oomkit_budget_reserve(budget, UINT64_MAX - 10, &after) == OOMKIT_OK);
    CHECK(after == UINT64_MAX);
    CHECK(oomkit_budget_reserve(budget, 1, &after) == OOMKIT_EREFUSED);
    oomkit_budget_release(budget, UINT64_MAX);
    oomkit_budget_set_limit(budget, 100);
    CHECK(oomkit_budget_reserve(budget, 10, &after) == OOMKIT_OK);
    CHECK(oomkit_budget_reserve(budget, UINT64_MAX - 5, &after) == OOMKIT_EREFUSED);
    CHECK(oomkit_budget_used(budget) == 10);
    oomkit_budget_destroy(budget);
}

/* Small requests always fit, all of them together; a large one never does. A budget
 * that adds first and takes back later refuses small ones while the large one is tried.
 */
enum { SMALL_THREADS = 3, ROUNDS = 30000, SMALL_BYTES = 7, LARGE_BYTES = 1000 };

typedef struct contender {
    oomkit_budget *budget;
    atomic_int *running;
    unsigned long wrong;
    unsigned long over;
} contender;

static void *
contend_small(void *argument)
{
    contender *self = argument;
    int i;

    for (i = 0; i < ROUNDS; i++) {
        uint64_t after = 0;
        if (oomkit_budget_reserve(self->budget, SMALL_BYTES, &after) != OOMKIT_OK) {
            self->wrong++;
            continue;
        }
        self->over += after > SMALL_THREADS * SMALL_BYTES || after < SMALL_BYTES;
        oomkit_budget_release(self->budget, SMALL_BYTES);
    }
    atomic_fetch_sub(self->running, 1);
    return NULL;
}

static void *
contend_large(void *argument)
{
    contender *self = argument;

    while (atomic_load(self->running) > 0) {
        uint64_t after = 0;
        if (oomkit_budget_reserve(self->budget, LARGE_BYTES, &after) == OOMKIT_OK) {
            self->wrong++;
            oomkit_budget_release(self->budget, LARGE_BYTES);
        }
        /* A doomed request is not to be seen in the counter either. */
        self->over += oomkit_budget_used(self->budget) > SMALL_THREADS * SMALL_BYTES;
    }
    return NULL;
}

static void
test_a_doomed_request_disturbs_nobody(void)
{
    oomkit_budget *budget = oomkit_budget_create();
    pthread_t threads[SMALL_THREADS + 1];
    contender contenders[SMALL_THREADS + 1];
    atomic_int running = SMALL_THREADS;
    int i;

    oomkit_budget_set_limit(budget, SMALL_THREADS * SMALL_BYTES);
    for (i = 0; i <= SMALL_THREADS; i++) {
        contenders[i] = (contender){budget, &running, 0, 0};
        CHECK(pthread_create(&threads[i], NULL,
                             i < SMALL_THREADS ? contend_small : contend_large,
                             &contenders[i]) == 0);
    }
    for (i = 0; i <= SMALL_THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        CHECK(contenders[i].wrong == 0);
        CHECK(contenders[i].over == 0);
    }
    CHECK(oomkit_budget_used(budget) == 0);
    oomkit_budget_destroy(budget);
}

/* More threads than fit: the limit holds at every moment, and all is given back. */
static void *
crowd(void *argument)
{
    contender *self = argument;
    int i;

    for (i = 0; i < ROUNDS; i++) {
        uint64_t bytes = (uint64_t)(i % 5 + 1);
        uint64_t after = 0;
        if (oomkit_budget_reserve(self->budget, bytes, &after) == OOMKIT_OK) {
            self->over += after > 8 || after < bytes;
            oomkit_budget_release(self->budget, bytes);
        }
    }
    return NULL;
}

static void
test_a_crowd_stays_below_the_limit(void)
{
    oomkit_budget *budget = oomkit_budget_create();
    pthread_t threads[4];
    contender contenders[4];
    int i;

    oomkit_budget_set_limit(budget, 8);
    for (i = 0; i < 4; i++) {
        contenders[i] = (contender){budget, NULL, 0, 0};
        CHECK(pthread_create(&threads[i], NULL, crowd, &contenders[i]) == 0);
    }
    for (i = 0; i < 4; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        CHECK(contenders[i].over == 0);
    }
    CHECK(oomkit_budget_used(budget) == 0);
    oomkit_budget_destroy(budget);
}

int
main(void)
{
    test_starts_empty_and_unlimited();
    test_refuses_one_byte_too_many();
    test_a_limit_below_what_is_used();
    test_sums_do_not_overflow();
    test_a_doomed_request_disturbs_nobody();
    test_a_crowd_stays_below_the_limit();
    CHECK_FAILS_WITHOUT_MEMORY(oomkit_budget_create());
    oomkit_budget_destroy(NULL);
    return check_report();
}
