/* oomkit.chunks: a batch handed out in parts, and again in smaller ones after a guard
 * has ended an out-of-memory error of the loop's body. */
#ifndef OOMKIT_LOOP_CHUNKS_H
#define OOMKIT_LOOP_CHUNKS_H

#include "../call/step.h"

#define OOMKIT_CHUNKS_FRAMES 4 /* a loop's own frame, below generators (tqdm) */

typedef enum {
    OOMKIT_CHUNKS_FRESH = 0,
    OOMKIT_CHUNKS_RUNNING,
    OOMKIT_CHUNKS_CLOSED
} oomkit_chunks_stage;

/* Where a loop asked for the part that is out. */
typedef struct oomkit_chunks_frame {
    PyObject *frame; /* owned while the part is out, or NULL */
    int instruction; /* that it was at */
} oomkit_chunks_frame;

typedef struct oomkit_chunks {
    PyObject_HEAD
    oomkit_state *st;   /* borrowed from the module, which the type keeps alive */
    PyObject *weakrefs; /* weak references to the iterator */
    oomkit_options options;
    PyObject **args; /* owned: the arguments in vectorcall layout */
    Py_ssize_t positional, total;
    PyObject *kwnames; /* owned tuple, or NULL */
    PyObject *names;   /* owned tuple of the arguments' names, or NULL */
    int as_call;       /* parts are (args, kwargs) */
    int64_t largest;   /* rows of the largest part that is tried; 0: all */
    int64_t rows;      /* of the batch, once known; else 0 */
    uint64_t bucket;   /* of bucket=, or 0 */
    oomkit_step *site; /* owned: what is remembered */
    oomkit_chunks_stage stage;
    int busy;      /* at work: what it calls of the user's must neither ask nor close */
    int out;       /* a part is with the loop */
    int failed;    /* and a guard has ended its out-of-memory error */
    int guards;    /* entered for it, of those that hand it out again */
    uint64_t part; /* number of it, over all attempts */
    uint64_t handed;   /* number of it among those of all loops */
    PyObject *shared;  /* owned while the part is out: why it is not repeated, for other
                          ranks have a share in it; or NULL */
    PyObject *reduces; /* owned likewise: whose gradients a backward in it would
                          reduce over ranks, or NULL */
    int64_t
        last_chance; /* rows up to and with the smallest part that was tried again */
    uint64_t part_baseline_bytes, engine_runs;
    oomkit_join join; /* results that oomkit.map has us keep */
    PyObject *func;   /* owned: what the parts are for, searched for who takes part, or
                         NULL */
    oomkit_participants
        *parts;               /* counted reference, for loops like this one, or NULL */
    oomkit_plain_found plain; /* where `func` stores, found with them */
    unsigned long thread;
    oomkit_chunks_frame frames[OOMKIT_CHUNKS_FRAMES];
    struct oomkit_chunks *newer, *older; /* borrowed: others with a part out */
    oomkit_call call;
    oomkit_cut cut;
} oomkit_chunks;

#define chunks_CAST(op) ((oomkit_chunks *)(op))

/* --- chunks.c --- */

/* The next part; NULL without an exception when there is none. New reference. */
PyObject *
oomkit_chunks_next(oomkit_chunks *self);

/* The loop is left, or at its end: what was learned is kept, everything else let go of.
 * Keeps an exception in flight. */
void
oomkit_chunks_close(oomkit_chunks *self, int finished);

/* --- loop_site.c --- */

/* Finds or makes self->site: by `key` (borrowed), by the label, or by the line that the
 * running frame is at. 0 or -1. */
int
oomkit_chunks_site(oomkit_chunks *self, PyObject *key);

/* Who takes part, as found by an earlier loop of the site for the same function and
 * without participants=. Counted reference, or NULL; never fails. */
oomkit_participants *
oomkit_chunks_known_parts(const oomkit_chunks *self);
/* Notes self->parts for it. 0 or -1. */
int
oomkit_chunks_know_parts(const oomkit_chunks *self);

/* --- handout.c --- */

/* The part is with the loop from now on; and it is not any more. 0 or -1. */
int
oomkit_chunks_hand_out(oomkit_chunks *self);
void
oomkit_chunks_take_in(oomkit_chunks *self);

/* --- shared_part.c --- */

/* The loop that has a part in this thread, the innermost one. Borrowed, or NULL. */
oomkit_chunks *
oomkit_chunks_of_thread(const oomkit_state *st);
/* Its call. */
oomkit_call *
oomkit_chunks_call(const oomkit_state *st);

/* Another part, or none: nothing is known of what it shares with other ranks. */
void
oomkit_chunks_share_nothing(oomkit_chunks *self);

/* A backward that accumulates begins in this thread, outside every call. 0, or -1 with
 * SplitError where it would reduce gradients for a part that other ranks do not have.
 */
int
oomkit_chunks_backward_begins(oomkit_state *st);

extern PyMethodDef oomkit_shared_part_methods[];

/* --- parts_plan.c --- */

/* The first plan. 0, or -1 with SplitError. */
int
oomkit_chunks_plan(oomkit_chunks *self);
/* The part at slice_index has failed, and nothing smaller is allowed. 0 it is handed
 * out once more, or -1 with oomkit.OutOfMemory. */
int
oomkit_chunks_exhausted(oomkit_chunks *self);
/* A part has needed this much at most (bytes allocated; OOMKIT_UNKNOWN). */
void
oomkit_chunks_measured(oomkit_chunks *self, uint64_t peak_bytes);
/* The call's record, and what it has taught. */
void
oomkit_chunks_learn(oomkit_chunks *self, int finished);

#endif
