#define _GNU_SOURCE /* fork(), mmap(), kill() */
#include "check.h"

#include "vote.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define EPOCH UINT64_C(77)
#ifndef ROUNDS
#define ROUNDS 3000
#endif
#define HELD_ROUNDS 300
#define SLEEP_NS UINT64_C(1000000)
#define MOST_RANKS 8

static void *
shared(uint32_t world)
{
    void *memory = mmap(NULL, oomkit_vote_bytes(world), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        abort();
    }
    oomkit_vote_format(memory, world, EPOCH);
    return memory;
}

static void
test_only_the_same_epoch_opens(void)
{
    oomkit_vote vote;
    void *memory = shared(2);

    CHECK(oomkit_vote_open(&vote, memory, 2, 1, EPOCH) == 0);
    CHECK(oomkit_vote_open(&vote, memory, 2, 1, EPOCH + 1) == -1);
    CHECK(oomkit_vote_open(&vote, memory, 3, 1, EPOCH) == -1);
    CHECK(oomkit_vote_open(&vote, memory, 2, 2, EPOCH) == -1);
    memset(memory, 0, oomkit_vote_bytes(2));
    CHECK(oomkit_vote_open(&vote, memory, 2, 1, EPOCH) == -1);
    CHECK(oomkit_vote_bytes(0) == 0);
    CHECK(oomkit_vote_bytes(UINT32_MAX) == 0);
    munmap(memory, oomkit_vote_bytes(2));
}

/* What rank r gives in a round: every rank can work out the largest by itself. */
static int64_t
word_of(uint32_t rank, uint64_t round)
{
    uint64_t x = (round * 31 + rank + 1) * UINT64_C(0x9e3779b97f4a7c15);
    return (int64_t)(x >> 40) - 5000000;
}

/* Votes ROUNDS times; how often the answer was wrong. */
static int
vote_on(void *memory, uint32_t world, uint32_t rank)
{
    oomkit_vote vote;
    oomkit_voted voted;
    uint64_t round;
    int wrong = 0;
    uint32_t i;

    if (oomkit_vote_open(&vote, memory, world, rank, EPOCH) < 0) {
        return ROUNDS;
    }
    for (round = 1; round <= ROUNDS; round++) {
        int64_t most = INT64_MIN;
        uint32_t who = 0;
        for (i = 0; i < world; i++) {
            if (word_of(i, round) > most) {
                most = word_of(i, round);
                who = i;
            }
        }
        oomkit_vote_cast(&vote, word_of(rank, round), round % 100 == 0 ? rank + 1 : 5);
        while (oomkit_vote_wait(&vote, SLEEP_NS, &voted) == OOMKIT_VOTE_WAITS) {
        }
        wrong += voted.word != most || voted.rank != who ||
                 voted.one_matter != (round % 100 != 0 || world == 1);
    }
    return wrong;
}

typedef struct voter {
    pthread_t thread;
    void *memory;
    uint32_t world, rank;
    int wrong;
} voter;

static void *
voter_run(void *argument)
{
    voter *self = argument;

    self->wrong = vote_on(self->memory, self->world, self->rank);
    return NULL;
}

static void
test_all_get_the_largest(uint32_t world)
{
    voter voters[MOST_RANKS];
    void *memory = shared(world);
    uint32_t i;

    for (i = 0; i < world; i++) {
        voters[i] = (voter){.memory = memory, .world = world, .rank = i};
        CHECK(pthread_create(&voters[i].thread, NULL, voter_run, &voters[i]) == 0);
    }
    for (i = 0; i < world; i++) {
        pthread_join(voters[i].thread, NULL);
        CHECK(voters[i].wrong == 0);
    }
    munmap(memory, oomkit_vote_bytes(world));
}

static void
test_processes_do(void)
{
    const uint32_t world = 3;
    pid_t children[3];
    void *memory = shared(world);
    uint32_t i;
    int status;

    for (i = 1; i < world; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            _exit(vote_on(memory, world, i) == 0 ? 0 : 1);
        }
    }
    CHECK(vote_on(memory, world, 0) == 0);
    for (i = 1; i < world; i++) {
        CHECK(waitpid(children[i], &status, 0) == children[i] && status == 0);
    }
    munmap(memory, oomkit_vote_bytes(world));
}

static void
test_who_has_not_come(void)
{
    oomkit_vote first, second;
    oomkit_voted voted;
    void *memory = shared(2);

    CHECK(oomkit_vote_open(&first, memory, 2, 0, EPOCH) == 0);
    CHECK(oomkit_vote_open(&second, memory, 2, 1, EPOCH) == 0);
    oomkit_vote_cast(&first, 3, 9);
    CHECK(oomkit_vote_wait(&first, SLEEP_NS, &voted) == OOMKIT_VOTE_WAITS);
    CHECK(oomkit_vote_has_come(&first, 0));
    CHECK(!oomkit_vote_has_come(&first, 1));
    oomkit_vote_cast(&second, 3, 8);
    CHECK(oomkit_vote_tag(&first, 1) == 8);
    CHECK(oomkit_vote_wait(&first, 0, &voted) == OOMKIT_VOTE_DONE);
    CHECK(voted.word == 3 && voted.rank == 0 && !voted.one_matter);
    oomkit_vote_cast(&first, 4, 9); /* a round ahead: the other still reads the last */
    CHECK(oomkit_vote_wait(&second, 0, &voted) == OOMKIT_VOTE_DONE);
    CHECK(voted.word == 3);
    oomkit_vote_cast(&second, 4,
                     OOMKIT_VOTE_ANY); /* it votes on whatever the other does */
    CHECK(oomkit_vote_wait(&second, 0, &voted) == OOMKIT_VOTE_DONE && voted.one_matter);
    CHECK(oomkit_vote_wait(&first, 0, &voted) == OOMKIT_VOTE_DONE && voted.one_matter);
    CHECK(oomkit_vote_tag(&second, 0) == 9);
    munmap(memory, oomkit_vote_bytes(2));
}

/* Who waits makes the steps of those who have not come. */
static void
test_steps_of_others(void)
{
    oomkit_vote first, second;
    oomkit_voted voted;
    void *memory = shared(2);
    int64_t step;

    CHECK(oomkit_vote_open(&first, memory, 2, 0, EPOCH) == 0);
    CHECK(oomkit_vote_open(&second, memory, 2, 1, EPOCH) == 0);
    CHECK(oomkit_vote_tell(&first, 10, 2) == OOMKIT_TOLD);
    CHECK(oomkit_vote_tell(&second, 11, 2) == OOMKIT_TOLD_OTHERS);
    oomkit_vote_cast(&second, 2, 9);
    CHECK(oomkit_vote_wait(&second, SLEEP_NS, &voted) == OOMKIT_VOTE_BEHIND);
    CHECK(oomkit_vote_step(&second) == 10);
    CHECK(oomkit_vote_tell(&second, 10, INT64_MAX) == OOMKIT_TOLD);
    CHECK(oomkit_vote_wait(&second, SLEEP_NS, &voted) == OOMKIT_VOTE_WAITS);
    CHECK(oomkit_vote_tell(&first, 12, 3) == OOMKIT_TOLD);
    CHECK(oomkit_vote_tell(&first, 13, 2) == OOMKIT_TOLD_STOP);
    oomkit_vote_cast(&first, 0, 9);
    CHECK(oomkit_vote_wait(&first, 0, &voted) == OOMKIT_VOTE_DONE && voted.word == 2);
    /* A round ahead, with a step of that round; the other one has a step to make. */
    CHECK(oomkit_vote_tell(&first, 20, 2) == OOMKIT_TOLD);
    CHECK(oomkit_vote_wait(&second, 0, &voted) == OOMKIT_VOTE_BEHIND);
    CHECK(oomkit_vote_step(&second) == 12);
    CHECK(oomkit_vote_tell(&second, 12, INT64_MAX) == OOMKIT_TOLD);
    CHECK(oomkit_vote_wait(&second, 0, &voted) == OOMKIT_VOTE_DONE && voted.word == 2);
    CHECK(oomkit_vote_tell(&second, 20, 2) == OOMKIT_TOLD);
    for (step = 0; step < OOMKIT_VOTE_STEPS; step++) {
        CHECK(oomkit_vote_tell(&first, step, 2) == OOMKIT_TOLD);
    }
    CHECK(oomkit_vote_tell(&first, step, 2) == OOMKIT_TOLD_FAR);
    munmap(memory, oomkit_vote_bytes(2));
}

/* A step that only one of them knows of: nobody leaves the round before it is told. */
static void
test_a_round_is_held(void)
{
    oomkit_vote first, second;
    oomkit_voted voted;
    void *memory = shared(2);

    CHECK(oomkit_vote_open(&first, memory, 2, 0, EPOCH) == 0);
    CHECK(oomkit_vote_open(&second, memory, 2, 1, EPOCH) == 0);
    CHECK(oomkit_vote_hold(&first)); /* it does not wait: its round goes on */
    oomkit_vote_release(&first);
    oomkit_vote_cast(&first, 0, 9);
    CHECK(oomkit_vote_hold(&first));
    oomkit_vote_cast(&second, 0, 9);
    CHECK(!oomkit_vote_has_come(&second, 0));
    CHECK(oomkit_vote_wait(&second, SLEEP_NS, &voted) == OOMKIT_VOTE_WAITS);
    CHECK(oomkit_vote_tell(&first, 10, INT64_MAX) == OOMKIT_TOLD);
    CHECK(oomkit_vote_wait(&second, SLEEP_NS, &voted) == OOMKIT_VOTE_BEHIND);
    CHECK(oomkit_vote_tell(&second, 10, INT64_MAX) == OOMKIT_TOLD);
    CHECK(oomkit_vote_wait(&second, SLEEP_NS, &voted) == OOMKIT_VOTE_WAITS);
    oomkit_vote_release(&first);
    CHECK(oomkit_vote_wait(&second, 0, &voted) == OOMKIT_VOTE_DONE);
    CHECK(!oomkit_vote_hold(&first)); /* the other one has left */
    CHECK(oomkit_vote_wait(&first, 0, &voted) == OOMKIT_VOTE_DONE);
    oomkit_vote_cast(&second, 0, 9);
    CHECK(oomkit_vote_hold(&first) && !oomkit_vote_has_come(&second, 0));
    oomkit_vote_cast(&first, 0, 9);
    CHECK(oomkit_vote_wait(&first, 0, &voted) == OOMKIT_VOTE_DONE);
    CHECK(oomkit_vote_wait(&second, 0, &voted) == OOMKIT_VOTE_DONE);
    munmap(memory, oomkit_vote_bytes(2));
}

/* The first one finds a step now and then while it waits: all make as many of them. How
 * often one had made another number of them. */
static void *
follower_run(void *argument)
{
    voter *self = argument;
    _Atomic int *made =
        (_Atomic int *)((char *)self->memory +
                        oomkit_vote_bytes(self->world)); /* by the first */
    oomkit_vote vote;
    oomkit_voted voted;
    int round, mine;

    self->wrong = oomkit_vote_open(&vote, self->memory, self->world, self->rank, EPOCH);
    for (round = 0; round < HELD_ROUNDS && self->wrong == 0; round++) {
        oomkit_vote_state state = OOMKIT_VOTE_WAITS;
        mine = 0;
        oomkit_vote_cast(&vote, 0, 5);
        while (state != OOMKIT_VOTE_DONE) {
            state = oomkit_vote_wait(&vote, self->rank == 0 ? 1000 : SLEEP_NS, &voted);
            if (state == OOMKIT_VOTE_BEHIND) {
                mine += oomkit_vote_tell(&vote, oomkit_vote_step(&vote), INT64_MAX) ==
                        OOMKIT_TOLD;
            } else if (state == OOMKIT_VOTE_WAITS && self->rank == 0 && mine < 3 &&
                       oomkit_vote_hold(&vote)) {
                mine += oomkit_vote_tell(&vote, round, INT64_MAX) == OOMKIT_TOLD;
                atomic_store(&made[round], mine);
                oomkit_vote_release(&vote);
            }
        }
        self->wrong += atomic_load(&made[round]) != mine;
    }
    return NULL;
}

static void
test_all_make_what_one_finds(uint32_t world)
{
    voter voters[MOST_RANKS];
    const size_t bytes = oomkit_vote_bytes(world) + HELD_ROUNDS * sizeof(_Atomic int);
    void *memory =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    uint32_t i;

    if (memory == MAP_FAILED) {
        abort();
    }
    oomkit_vote_format(memory, world, EPOCH);
    for (i = 0; i < world; i++) {
        voters[i] = (voter){.memory = memory, .world = world, .rank = i};
        CHECK(pthread_create(&voters[i].thread, NULL, follower_run, &voters[i]) == 0);
    }
    for (i = 0; i < world; i++) {
        pthread_join(voters[i].thread, NULL);
        CHECK(voters[i].wrong == 0);
    }
    munmap(memory, bytes);
}

static void
test_last_words(void)
{
    char text[OOMKIT_VOTE_TEXT], longer[2 * OOMKIT_VOTE_TEXT];
    oomkit_vote vote;
    void *memory = shared(2);

    CHECK(oomkit_vote_open(&vote, memory, 2, 1, EPOCH) == 0);
    CHECK(oomkit_vote_said(&vote, 1, text) == 0 && strcmp(text, "") == 0);
    oomkit_vote_say(&vote, "out of memory", 0);
    CHECK(oomkit_vote_said(&vote, 1, text) == 0 && strcmp(text, "out of memory") == 0);
    memset(longer, 'x', sizeof(longer) - 1);
    longer[sizeof(longer) - 1] = '\0';
    oomkit_vote_say(&vote, longer, 1);
    CHECK(oomkit_vote_said(&vote, 1, text) == 1);
    CHECK(strlen(text) == OOMKIT_VOTE_TEXT - 1);
    munmap(memory, oomkit_vote_bytes(2));
}

static void
test_processes_are_looked_at(void)
{
    const pid_t child = fork();
    uint64_t started;
    int status;

    if (child == 0) {
        for (;;) {
            pause();
        }
    }
    started = oomkit_process_started(child);
    CHECK(started != 0);
    CHECK(oomkit_process_look(child, started) == OOMKIT_PROCESS_RUNS);
    CHECK(oomkit_process_look(child, started + 1) == OOMKIT_PROCESS_DEAD);
    kill(child, SIGSTOP);
    CHECK(waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status));
    CHECK(oomkit_process_look(child, started) == OOMKIT_PROCESS_STOPPED);
    kill(child, SIGKILL);
    CHECK(waitid(P_PID, (id_t)child, &(siginfo_t){0}, WEXITED | WNOWAIT) == 0);
    CHECK(oomkit_process_look(child, started) == OOMKIT_PROCESS_DEAD); /* a zombie */
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(oomkit_process_look(child, started) == OOMKIT_PROCESS_DEAD);
    CHECK(oomkit_process_started(child) == 0);
}

int
main(void)
{
    test_only_the_same_epoch_opens();
    test_who_has_not_come();
    test_steps_of_others();
    test_a_round_is_held();
    test_last_words();
    test_processes_are_looked_at();
    test_processes_do();
    test_all_make_what_one_finds(2);
    test_all_make_what_one_finds(3);
    test_all_get_the_largest(1);
    test_all_get_the_largest(2);
    test_all_get_the_largest(4);
    test_all_get_the_largest(MOST_RANKS);
    return check_report();
}
