#include "check.h"
#include "wrap.h"

#include "peak.h"
#include "status.h"

#include <pthread.h>

static _Thread_local char here; /* its address tells threads apart */

static void
test_a_window_sees_what_is_noted_while_it_is_open(void)
{
    oomkit_peak *peak = oomkit_peak_create();
    int window = -1;

    CHECK(oomkit_peak_maximum(peak) == 0);
    oomkit_peak_note(peak, 500, &here);
    CHECK(oomkit_peak_push(peak, 100, &here, &window) == OOMKIT_OK);
    CHECK(oomkit_peak_read(peak, window) == 100);
    oomkit_peak_note(peak, 90, &here);
    CHECK(oomkit_peak_read(peak, window) == 100);
    oomkit_peak_note(peak, 300, &here);
    oomkit_peak_note(peak, 200, &here);
    CHECK(oomkit_peak_read(peak, window) == 300);
    CHECK(oomkit_peak_pop(peak, window, &here) == 300);
    oomkit_peak_note(peak, 900, &here);
    CHECK(oomkit_peak_maximum(peak) == 900);
    CHECK(oomkit_peak_push(peak, 1000, &here, &window) == OOMKIT_OK);
    CHECK(oomkit_peak_maximum(peak) == 1000);
    CHECK(oomkit_peak_pop(peak, window, &here) == 1000);
    oomkit_peak_destroy(peak);
}

static void
test_an_inner_window_leaves_the_outer_alone(void)
{
    oomkit_peak *peak = oomkit_peak_create();
    int outer, inner;

    CHECK(oomkit_peak_push(peak, 10, &here, &outer) == OOMKIT_OK);
    oomkit_peak_note(peak, 80, &here);
    CHECK(oomkit_peak_push(peak, 20, &here, &inner) == OOMKIT_OK);
    CHECK(outer != inner);
    oomkit_peak_note(peak, 50, &here);
    CHECK(oomkit_peak_pop(peak, inner, &here) == 50);
    CHECK(oomkit_peak_read(peak, outer) == 80);
    CHECK(oomkit_peak_push(peak, 5, &here, &inner) == OOMKIT_OK);
    oomkit_peak_note(peak, 120, &here);
    CHECK(oomkit_peak_pop(peak, inner, &here) == 120);
    CHECK(oomkit_peak_pop(peak, outer, &here) == 120);
    CHECK(oomkit_peak_maximum(peak) == 120);
    oomkit_peak_destroy(peak);
}

static void
test_windows_may_close_in_any_order(void)
{
    oomkit_peak *peak = oomkit_peak_create();
    int first, second, third;

    CHECK(oomkit_peak_push(peak, 1, &here, &first) == OOMKIT_OK);
    oomkit_peak_note(peak, 10, &here);
    CHECK(oomkit_peak_push(peak, 2, &here, &second) == OOMKIT_OK);
    oomkit_peak_note(peak, 20, &here);
    CHECK(oomkit_peak_pop(peak, first, &here) == 20);
    CHECK(oomkit_peak_push(peak, 3, &here, &third) == OOMKIT_OK);
    CHECK(oomkit_peak_read(peak, third) == 3); /* nothing left in a slot used again */
    oomkit_peak_note(peak, 15, &here);
    CHECK(oomkit_peak_pop(peak, second, &here) == 20);
    CHECK(oomkit_peak_pop(peak, third, &here) == 15);
    oomkit_peak_destroy(peak);
}

static void
test_all_windows_at_once(void)
{
    oomkit_peak *peak = oomkit_peak_create();
    int windows[OOMKIT_PEAK_WINDOWS];
    int extra = -7;
    int i;

    for (i = 0; i < OOMKIT_PEAK_WINDOWS; i++) {
        CHECK(oomkit_peak_push(peak, (uint64_t)i, &here, &windows[i]) == OOMKIT_OK);
        CHECK(windows[i] >= 0 && windows[i] < OOMKIT_PEAK_WINDOWS);
    }
    CHECK(oomkit_peak_push(peak, 1, &here, &extra) == OOMKIT_EREFUSED && extra == -7);
    oomkit_peak_note(peak, 40, &here);
    for (i = 0; i < OOMKIT_PEAK_WINDOWS; i++) {
        CHECK(oomkit_peak_read(peak, windows[i]) == (uint64_t)(i > 40 ? i : 40));
    }
    CHECK(oomkit_peak_pop(peak, windows[63], &here) == 63);
    CHECK(oomkit_peak_push(peak, 1, &here, &extra) == OOMKIT_OK &&
          extra == windows[63]);
    CHECK(oomkit_peak_pop(peak, windows[17], &here) == 40);
    CHECK(oomkit_peak_push(peak, 1, &here, &extra) == OOMKIT_OK &&
          extra == windows[17]);
    oomkit_peak_destroy(peak);
}

static void
test_a_window_that_is_not_open(void)
{
    oomkit_peak *peak = oomkit_peak_create();
    int window, again;

    CHECK(oomkit_peak_pop(peak, -1, &here) == 0);
    CHECK(oomkit_peak_pop(peak, OOMKIT_PEAK_WINDOWS, &here) == 0);
    CHECK(oomkit_peak_read(peak, -1) == 0);
    CHECK(oomkit_peak_read(peak, OOMKIT_PEAK_WINDOWS) == 0);
    CHECK(oomkit_peak_push(peak, 5, &here, &window) == OOMKIT_OK);
    CHECK(oomkit_peak_pop(peak, window, &here) == 5);
    CHECK(oomkit_peak_pop(peak, window, &here) == 0);
    CHECK(oomkit_peak_push(peak, 6, &here, &again) == OOMKIT_OK);
    CHECK(oomkit_peak_pop(peak, again, &here) == 6);
    oomkit_peak_destroy(peak);
}

typedef struct visit {
    oomkit_peak *peak;
    int window;
    uint64_t value, found;
} visit;

static void *
note_and_pop(void *argument)
{
    visit *self = argument;

    oomkit_peak_note(self->peak, self->value, &here);
    self->found = oomkit_peak_pop(self->peak, self->window, &here);
    return NULL;
}

/* The thread that opened it may be about to store into it. */
static void
test_a_window_that_another_thread_closes(void)
{
    oomkit_peak *peak = oomkit_peak_create();
    pthread_t other;
    visit visitor = {peak, -1, 70, 0};
    int window, i, windows[OOMKIT_PEAK_WINDOWS];

    CHECK(oomkit_peak_push(peak, 5, &here, &visitor.window) == OOMKIT_OK);
    oomkit_peak_note(peak, 60, &here);
    CHECK(pthread_create(&other, NULL, note_and_pop, &visitor) == 0);
    CHECK(pthread_join(other, NULL) == 0);
    CHECK(visitor.found == 70);
    CHECK(oomkit_peak_pop(peak, visitor.window, &here) == 0);
    CHECK(oomkit_peak_push(peak, 1, &here, &window) == OOMKIT_OK);
    CHECK(window != visitor.window);
    CHECK(oomkit_peak_pop(peak, window, &here) == 1);
    for (i = 0; i < OOMKIT_PEAK_WINDOWS; i++) { /* the last to be used again */
        CHECK(oomkit_peak_push(peak, 2, &here, &windows[i]) == OOMKIT_OK);
        CHECK((windows[i] == visitor.window) == (i == OOMKIT_PEAK_WINDOWS - 1));
    }
    oomkit_peak_note(peak, 3, &here);
    for (i = 0; i < OOMKIT_PEAK_WINDOWS; i++) {
        CHECK(oomkit_peak_pop(peak, windows[i], &here) == 3);
    }
    CHECK(oomkit_peak_push(peak, 2, &here, &windows[0]) == OOMKIT_OK);
    CHECK(windows[0] == 0);
    oomkit_peak_destroy(peak);
}

/* Whoever notes a value finds it, however many raise the same window at that moment. */
enum { CLIMBERS = 4, STEPS = 100000 };

typedef struct climber {
    oomkit_peak *peak;
    int window;
    uint64_t number;
    unsigned long wrong;
} climber;

static void *
climb(void *argument)
{
    climber *self = argument;
    uint64_t i;

    for (i = 0; i < STEPS; i++) {
        uint64_t value = i * CLIMBERS + self->number;
        oomkit_peak_note(self->peak, value, &here);
        self->wrong += oomkit_peak_read(self->peak, self->window) < value;
        self->wrong += oomkit_peak_maximum(self->peak) < value;
    }
    return NULL;
}

static void
test_no_note_is_lost(void)
{
    oomkit_peak *peak = oomkit_peak_create();
    pthread_t threads[CLIMBERS];
    climber climbers[CLIMBERS];
    int i, window;

    CHECK(oomkit_peak_push(peak, 0, &here, &window) == OOMKIT_OK);
    for (i = 0; i < CLIMBERS; i++) {
        climbers[i] = (climber){peak, window, (uint64_t)i, 0};
        CHECK(pthread_create(&threads[i], NULL, climb, &climbers[i]) == 0);
    }
    for (i = 0; i < CLIMBERS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        CHECK(climbers[i].wrong == 0);
    }
    CHECK(oomkit_peak_pop(peak, window, &here) == (uint64_t)CLIMBERS * STEPS - 1);
    oomkit_peak_destroy(peak);
}

/* Threads open, fill and close windows of their own while all of them note. Each must
 * find at least its own largest value, and no more than anybody ever noted. */
enum { THREADS = 4, ROUNDS = 5000, TOP = 1000000 };

typedef struct worker {
    oomkit_peak *peak;
    uint64_t number;
    unsigned long wrong;
} worker;

static void *
work(void *argument)
{
    worker *self = argument;
    uint64_t i, j;

    for (i = 0; i < ROUNDS; i++) {
        uint64_t mine = self->number * 1000 + i % 1000, found;
        int outer, inner;
        if (oomkit_peak_push(self->peak, 1, &here, &outer) != OOMKIT_OK) {
            self->wrong++;
            continue;
        }
        oomkit_peak_note(self->peak, mine, &here);
        if (oomkit_peak_push(self->peak, 1, &here, &inner) != OOMKIT_OK) {
            self->wrong++;
            continue;
        }
        for (j = 0; j < 4; j++) {
            oomkit_peak_note(self->peak, j, &here);
        }
        found = oomkit_peak_pop(self->peak, inner, &here);
        self->wrong += found < 3 || found > TOP;
        found = oomkit_peak_pop(self->peak, outer, &here);
        self->wrong += found < mine || found > TOP;
    }
    oomkit_peak_note(self->peak, TOP - self->number, &here);
    return NULL;
}

static void
test_threads(void)
{
    oomkit_peak *peak = oomkit_peak_create();
    pthread_t threads[THREADS];
    worker workers[THREADS];
    int i, witness, windows[OOMKIT_PEAK_WINDOWS];

    CHECK(oomkit_peak_push(peak, 0, &here, &witness) == OOMKIT_OK);
    for (i = 0; i < THREADS; i++) {
        workers[i] = (worker){peak, (uint64_t)i, 0};
        CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    for (i = 0; i < THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        CHECK(workers[i].wrong == 0);
    }
    CHECK(oomkit_peak_maximum(peak) == TOP);
    CHECK(oomkit_peak_pop(peak, witness, &here) == TOP);
    for (i = 0; i < OOMKIT_PEAK_WINDOWS; i++) { /* no slot was lost */
        CHECK(oomkit_peak_push(peak, 0, &here, &windows[i]) == OOMKIT_OK);
    }
    oomkit_peak_destroy(peak);
}

int
main(void)
{
    test_a_window_sees_what_is_noted_while_it_is_open();
    test_an_inner_window_leaves_the_outer_alone();
    test_windows_may_close_in_any_order();
    test_all_windows_at_once();
    test_a_window_that_is_not_open();
    test_a_window_that_another_thread_closes();
    test_no_note_is_lost();
    test_threads();
    CHECK_FAILS_WITHOUT_MEMORY(oomkit_peak_create());
    oomkit_peak_destroy(NULL);
    return check_report();
}
