/* A vote among the ranks of one machine, in memory that they share: everybody gives a
 * word and gets the largest. No Python, no locks, no system call while all come at
 * about the same time.
 *
 * Each rank writes its word for the present round beside its number of rounds, in a
 * cache line of its own, and waits until all others have come as far. There are two
 * words: who is one round ahead cannot overwrite what another one still reads, for he
 * cannot be two rounds ahead. Who waits spins, then sleeps on `event`.
 *
 * Between two votes ranks may tell of what they do together, step by step. Who waits
 * for the others is told of each step that he has not made, in their order, so that he
 * can take part: see oomkit_vote_tell(). */
#ifndef OOMKIT_RANKS_VOTE_H
#define OOMKIT_RANKS_VOTE_H

#include <stddef.h>
#include <stdint.h>

#define OOMKIT_VOTE_FORMAT 3   /* of the shared memory */
#define OOMKIT_VOTE_TEXT 480   /* bytes of a rank's last words, with the final zero */
#define OOMKIT_VOTE_STEPS 1024 /* of a round, that one rank may be ahead of another */

typedef struct oomkit_vote_memory oomkit_vote_memory;

/* One rank's handle. */
typedef struct oomkit_vote {
    oomkit_vote_memory *memory; /* shared; who mapped it unmaps it */
    uint32_t world, rank;
    uint64_t round; /* cast so far, by this rank */
    uint32_t steps; /* told of since */
    int waits;      /* for the others, who have not all come */
} oomkit_vote;

typedef struct oomkit_voted {
    int64_t word;   /* the largest */
    uint32_t rank;  /* the first that gave it */
    int one_matter; /* all have voted on the same, by their tags */
} oomkit_voted;

typedef enum {
    OOMKIT_VOTE_WAITS = 0, /* somebody has not come yet */
    OOMKIT_VOTE_DONE,
    OOMKIT_VOTE_BEHIND /* others have made a step that this rank is to make, too */
} oomkit_vote_state;

typedef enum {
    OOMKIT_TOLD = 0,
    OOMKIT_TOLD_STOP,   /* nothing was told: a rank has cast at least `stop` already */
    OOMKIT_TOLD_OTHERS, /* nothing was told: another rank has made another step here */
    OOMKIT_TOLD_FAR     /* nothing was told: a rank is too many steps behind */
} oomkit_told;

/* Bytes that `world` ranks need; 0 of too many or none. */
size_t
oomkit_vote_bytes(uint32_t world);
/* Makes memory of zeros ready, once, before anybody opens it. `epoch` says which job
 * and which start of it this is. */
void
oomkit_vote_format(void *memory, uint32_t world, uint64_t epoch);
/* 0; -1 where the memory is of another format, world or epoch. */
int
oomkit_vote_open(oomkit_vote *vote, void *memory, uint32_t world, uint32_t rank,
                 uint64_t epoch);

#define OOMKIT_VOTE_ANY 0 /* a tag: what the others vote on, whatever that is */

/* Begins a round. `tag` says what is voted on. */
void
oomkit_vote_cast(oomkit_vote *vote, int64_t word, uint64_t tag);
/* After it: spins, then sleeps for at most `sleep_ns`; with 0 it spins for some
 * microseconds and gives way to nobody. */
oomkit_vote_state
oomkit_vote_wait(oomkit_vote *vote, uint64_t sleep_ns, oomkit_voted *voted);
/* This rank waits no longer, whether all have come or not. */
void
oomkit_vote_leave(oomkit_vote *vote);
/* Has this rank come to the round that is under way, and does not hold it? */
int
oomkit_vote_has_come(const oomkit_vote *vote, uint32_t rank);
/* What it votes on at present. */
uint64_t
oomkit_vote_tag(const oomkit_vote *vote, uint32_t rank);

/* This rank is about to make a step together with all others, in the round that it will
 * cast next, or, while it waits for others, in the one that it has cast. `what` says
 * which. Not where a rank has cast a word of at least `stop` for this round. */
oomkit_told
oomkit_vote_tell(oomkit_vote *vote, int64_t what, int64_t stop);
/* This rank, which waits, may be about to tell of a step that it alone knows of: nobody
 * leaves the round before it has released it, for who has left makes no more steps of
 * it. 0 where all have come already, so that some may have left: then it must not tell
 * of one before its next round. 1 also where it does not wait: its round goes on. */
int
oomkit_vote_hold(oomkit_vote *vote);
void
oomkit_vote_release(oomkit_vote *vote);
/* After OOMKIT_VOTE_BEHIND: which step is to be made next. */
int64_t
oomkit_vote_step(const oomkit_vote *vote);

/* Last words: why this rank votes as it does, or does not come any more. They stay
 * until it says others. `gone`: it will not come again, which wakes who waits. */
void
oomkit_vote_say(const oomkit_vote *vote, const char *text, int gone);
/* A copy of another's, of OOMKIT_VOTE_TEXT bytes; is it gone? */
int
oomkit_vote_said(const oomkit_vote *vote, uint32_t rank, char *text);

/* --- process.c --- */
typedef enum {
    OOMKIT_PROCESS_RUNS = 0,
    OOMKIT_PROCESS_STOPPED, /* by SIGSTOP, or a debugger */
    OOMKIT_PROCESS_DEAD
} oomkit_process_state;

/* When it was started, in the system's own ticks: with its number this names it for
 * good. 0 where it cannot be known. */
uint64_t
oomkit_process_started(int64_t pid);
oomkit_process_state
oomkit_process_look(int64_t pid, uint64_t started);

#endif
