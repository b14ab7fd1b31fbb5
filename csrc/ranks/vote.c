/* futexes, sched_yield(), kill() */
#define _GNU_SOURCE

#include "vote.h"

#include <stdalign.h>
#include <stdatomic.h>
#include <string.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

#define LINE 64
#define MAGIC UINT32_C(0x6f6f6d72)
#define MOST 4096 /* ranks */

/* Turns before sleeping: what a rank that comes at the same time needs, and no more,
 * for there may be fewer cores than ranks. */
#define SPINS 2000
#define SPINS_ALONE 200 /* of these without giving way to others */

typedef struct slot {
    alignas(LINE) _Atomic uint64_t round;
    _Atomic int64_t word[2];
    _Atomic uint64_t tag[2];
    _Atomic uint64_t told[2]; /* the round, and how many steps in it: see told_of() */
    _Atomic uint64_t holds;   /* the round that nobody may leave yet, or 0 */
    alignas(LINE) _Atomic uint32_t writes; /* odd while `text` is being written */
    _Atomic uint32_t gone;
    _Atomic char text[OOMKIT_VOTE_TEXT];
    _Atomic int64_t steps[2][OOMKIT_VOTE_STEPS];
} slot;

struct oomkit_vote_memory {
    _Atomic uint32_t magic;
    uint32_t format, world;
    uint64_t epoch;
    alignas(LINE) _Atomic uint32_t event; /* slept on */
    _Atomic uint32_t sleepers;
    slot slots[];
};

/* --- sleeping --- */

#ifdef __linux__
static void
event_sleep(oomkit_vote_memory *memory, uint32_t seen, uint64_t sleep_ns)
{
    const struct timespec time = {.tv_sec = (time_t)(sleep_ns / 1000000000u),
                                  .tv_nsec = (long)(sleep_ns % 1000000000u)};

    syscall(SYS_futex, &memory->event, FUTEX_WAIT, seen, &time, NULL, 0);
}

static void
event_wake(oomkit_vote_memory *memory)
{
    syscall(SYS_futex, &memory->event, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static void
give_way(void)
{
    syscall(SYS_sched_yield);
}
#else /* nobody shares memory there: see oomkit/_ranks */
static void
event_sleep(oomkit_vote_memory *memory, uint32_t seen, uint64_t sleep_ns)
{
    (void)memory, (void)seen, (void)sleep_ns;
}

static void
event_wake(oomkit_vote_memory *memory)
{
    (void)memory;
}

static void
give_way(void)
{
}
#endif

static void
pause_briefly(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Something has changed that somebody may wait for. Who is about to sleep has counted
 * himself before he looked for the last time, so that one of us sees the other. */
static void
event_tell(oomkit_vote_memory *memory)
{
    if (atomic_load(&memory->sleepers) > 0) {
        atomic_fetch_add(&memory->event, 1);
        event_wake(memory);
    }
}

/* --- memory --- */

size_t
oomkit_vote_bytes(uint32_t world)
{
    return world == 0 || world > MOST
               ? 0
               : sizeof(oomkit_vote_memory) + (size_t)world * sizeof(slot);
}

void
oomkit_vote_format(void *memory, uint32_t world, uint64_t epoch)
{
    oomkit_vote_memory *m = memory;

    m->format = OOMKIT_VOTE_FORMAT;
    m->world = world;
    m->epoch = epoch;
    atomic_store(&m->magic, MAGIC);
}

int
oomkit_vote_open(oomkit_vote *vote, void *memory, uint32_t world, uint32_t rank,
                 uint64_t epoch)
{
    oomkit_vote_memory *m = memory;

    if (atomic_load(&m->magic) != MAGIC || m->format != OOMKIT_VOTE_FORMAT ||
        m->world != world || m->epoch != epoch || rank >= world) {
        return -1;
    }
    *vote = (oomkit_vote){.memory = m, .world = world, .rank = rank};
    return 0;
}

/* --- voting --- */

void
oomkit_vote_cast(oomkit_vote *vote, int64_t word, uint64_t tag)
{
    slot *own = &vote->memory->slots[vote->rank];

    /* Steps that it makes while it waits belong to this round, as those before. */
    vote->round++;
    atomic_store_explicit(&own->word[vote->round & 1], word, memory_order_relaxed);
    atomic_store_explicit(&own->tag[vote->round & 1], tag, memory_order_relaxed);
    vote->waits = 1;
    atomic_store(&own->round, vote->round); /* all orders: see event_tell() */
    event_tell(vote->memory);
}

void
oomkit_vote_leave(oomkit_vote *vote)
{
    vote->waits = 0;
    vote->steps = 0;
}

int
oomkit_vote_has_come(const oomkit_vote *vote, uint32_t rank)
{
    const slot *one = &vote->memory->slots[rank];

    return atomic_load(&one->round) >= vote->round &&
           atomic_load(&one->holds) != vote->round;
}

uint64_t
oomkit_vote_tag(const oomkit_vote *vote, uint32_t rank)
{
    return atomic_load(&vote->memory->slots[rank].tag[vote->round & 1]);
}

/* How many, from `first` on, have come; then also what they say. Where all have, it is
 * looked again for one that holds the round: it had begun before the last one came. */
static uint32_t
vote_come(const oomkit_vote *vote, uint32_t first)
{
    uint32_t holder = 0;

    while (first < vote->world && oomkit_vote_has_come(vote, first)) {
        first++;
    }
    while (first == vote->world && holder < vote->world &&
           oomkit_vote_has_come(vote, holder)) {
        holder++;
    }
    return first < vote->world ? first : holder;
}

int
oomkit_vote_hold(oomkit_vote *vote)
{
    slot *slots = vote->memory->slots;
    uint32_t come = 0;

    if (!vote->waits) {
        return 1;
    }
    /* Before the look at the others: who comes after it sees this. */
    atomic_store(&slots[vote->rank].holds, vote->round);
    while (come < vote->world && atomic_load(&slots[come].round) >= vote->round) {
        come++;
    }
    if (come == vote->world) {
        oomkit_vote_release(vote);
    }
    return come < vote->world;
}

void
oomkit_vote_release(oomkit_vote *vote)
{
    atomic_store(&vote->memory->slots[vote->rank].holds, 0);
    event_tell(vote->memory);
}

/* Steps that a rank has told of in a round. */
static uint32_t
told_of(const slot *one, uint64_t round)
{
    const uint64_t told = atomic_load(&one->told[round & 1]);

    return told >> 32 == (round & UINT32_MAX) ? (uint32_t)told : 0;
}

/* A rank that has made more steps of a round than `made`, or NULL. */
static const slot *
vote_ahead(const oomkit_vote *vote, uint64_t round, uint32_t made)
{
    const slot *slots = vote->memory->slots;
    uint32_t i;

    for (i = 0; i < vote->world; i++) {
        if (told_of(&slots[i], round) > made) {
            return &slots[i];
        }
    }
    return NULL;
}

int64_t
oomkit_vote_step(const oomkit_vote *vote)
{
    const slot *ahead = vote_ahead(vote, vote->round, vote->steps);

    return ahead == NULL
               ? 0
               : atomic_load(
                     &ahead->steps[vote->round & 1][vote->steps % OOMKIT_VOTE_STEPS]);
}

/* May this step of the round be told? */
static oomkit_told
tell_may(const oomkit_vote *vote, uint64_t round, int64_t what, int64_t stop)
{
    const slot *slots = vote->memory->slots;
    const unsigned at = round & 1;
    uint32_t i;

    for (i = 0; i < vote->world; i++) {
        const uint32_t theirs = told_of(&slots[i], round);
        if (i == vote->rank) {
            continue;
        }
        if (atomic_load(&slots[i].round) >= round &&
            atomic_load(&slots[i].word[at]) >= stop) {
            return OOMKIT_TOLD_STOP;
        }
        if (theirs > vote->steps &&
            atomic_load(&slots[i].steps[at][vote->steps % OOMKIT_VOTE_STEPS]) != what) {
            return OOMKIT_TOLD_OTHERS;
        }
        if (theirs + OOMKIT_VOTE_STEPS <= vote->steps) {
            return OOMKIT_TOLD_FAR;
        }
    }
    return OOMKIT_TOLD;
}

oomkit_told
oomkit_vote_tell(oomkit_vote *vote, int64_t what, int64_t stop)
{
    slot *own = &vote->memory->slots[vote->rank];
    const uint64_t round = vote->round + !vote->waits;
    const oomkit_told may = tell_may(vote, round, what, stop);

    if (may == OOMKIT_TOLD) {
        atomic_store_explicit(&own->steps[round & 1][vote->steps % OOMKIT_VOTE_STEPS],
                              what, memory_order_relaxed);
        vote->steps++;
        atomic_store(&own->told[round & 1], round << 32 | vote->steps);
        event_tell(vote->memory);
    }
    return may;
}

static oomkit_vote_state
vote_count(const oomkit_vote *vote, oomkit_voted *voted)
{
    const unsigned at = vote->round & 1;
    const slot *slots = vote->memory->slots;
    uint64_t tag = OOMKIT_VOTE_ANY;
    uint32_t i;

    *voted = (oomkit_voted){.word = INT64_MIN, .one_matter = 1};
    for (i = 0; i < vote->world; i++) {
        const int64_t word =
            atomic_load_explicit(&slots[i].word[at], memory_order_relaxed);
        const uint64_t theirs =
            atomic_load_explicit(&slots[i].tag[at], memory_order_relaxed);
        if (word > voted->word) {
            voted->word = word;
            voted->rank = i;
        }
        if (tag == OOMKIT_VOTE_ANY) {
            tag = theirs;
        }
        voted->one_matter &= theirs == tag || theirs == OOMKIT_VOTE_ANY;
    }
    return OOMKIT_VOTE_DONE;
}

oomkit_vote_state
oomkit_vote_wait(oomkit_vote *vote, uint64_t sleep_ns, oomkit_voted *voted)
{
    oomkit_vote_memory *memory = vote->memory;
    uint32_t come = vote_come(vote, 0), seen;
    const int spins = sleep_ns > 0 ? SPINS : SPINS_ALONE;
    int spin;

    for (spin = 0; come < vote->world && spin < spins; spin++) {
        if (vote_ahead(vote, vote->round, vote->steps) != NULL) {
            return OOMKIT_VOTE_BEHIND;
        }
        if (spin < SPINS_ALONE) {
            pause_briefly();
        } else {
            give_way();
        }
        come = vote_come(vote, come);
    }
    if (come < vote->world && sleep_ns > 0) {
        atomic_fetch_add(&memory->sleepers, 1);
        seen = atomic_load(&memory->event);
        come = vote_come(vote, come);
        if (come < vote->world && vote_ahead(vote, vote->round, vote->steps) == NULL) {
            event_sleep(memory, seen, sleep_ns);
        }
        atomic_fetch_sub(&memory->sleepers, 1);
        come = vote_come(vote, come);
    }
    if (vote_ahead(vote, vote->round, vote->steps) != NULL) { /* before it ends, too */
        return OOMKIT_VOTE_BEHIND;
    }
    if (come < vote->world) {
        return OOMKIT_VOTE_WAITS;
    }
    oomkit_vote_leave(vote);
    return vote_count(vote, voted);
}

/* --- last words --- */

void
oomkit_vote_say(const oomkit_vote *vote, const char *text, int gone)
{
    slot *own = &vote->memory->slots[vote->rank];
    size_t i, length = strlen(text);

    length = length < OOMKIT_VOTE_TEXT - 1 ? length : OOMKIT_VOTE_TEXT - 1;
    atomic_fetch_add(&own->writes, 1);
    for (i = 0; i <= length; i++) {
        atomic_store(&own->text[i], i < length ? text[i] : '\0');
    }
    atomic_fetch_add(&own->writes, 1);
    if (gone) {
        atomic_store(&own->gone, 1);
        event_tell(vote->memory);
    }
}

int
oomkit_vote_said(const oomkit_vote *vote, uint32_t rank, char *text)
{
    const slot *other = &vote->memory->slots[rank];
    uint32_t before;
    int tries;
    size_t i;

    for (tries = 0; tries < 100; tries++) { /* one that died while writing stays odd */
        before = atomic_load(&other->writes);
        for (i = 0; i < OOMKIT_VOTE_TEXT; i++) {
            text[i] = atomic_load(&other->text[i]);
        }
        if ((before & 1) == 0 && atomic_load(&other->writes) == before) {
            break;
        }
        give_way();
    }
    text[OOMKIT_VOTE_TEXT - 1] = '\0';
    return (int)atomic_load(&other->gone);
}
