/* One running backward that is the second half of waiting calls; between
 * callers_backward.c and failed.c. */
#ifndef OOMKIT_DEFERRED_CALLERS_BACKWARD_H
#define OOMKIT_DEFERRED_CALLERS_BACKWARD_H

#include "deferred.h"

#define OOMKIT_CALLERS_FEW 4

/* A call with room for all that it may need. */
typedef struct oomkit_own_call {
    oomkit_call call;
    oomkit_cut cut;
} oomkit_own_call;

typedef struct oomkit_callers {
    oomkit_state *st;
    struct oomkit_callers *outer; /* of this thread */
    struct oomkit_callers *next;  /* of any thread, in the state's list */
    oomkit_deferred **armed; /* owned: waiting calls that it has reached; those whose
                               `second` is this one are still its own */
    oomkit_call **calls; /* marks, one for each list of participants of which any waited
                            when it began */
    int count, call_count, room, call_room;
    PyObject *roots;  /* owned: what the engine was given, or NULL before it ran */
    PyObject *inputs; /* owned: inputs= of the backward, or NULL */
    PyObject *loose; /* owned: leaves of the failed graph that nobody marked, or NULL */
    /* Where several losses are under one root (between.c), else NULL: */
    PyObject *node_hooks; /* owned: dict of nodes between them and our hooks there */
    PyObject *hooks_ran;  /* owned: list of those that ran, in order */
    PyObject *root_gradients; /* owned: of the roots, as the engine was given them */
    int unreached;            /* losses that no gradient has reached yet */
    int changed;              /* what was noted has been changed in place since */
    int arrived;              /* a gradient has reached a loss */
    int engine_seen, keep_graph, create_graph;
    int ours;       /* what failed is, or was to be, a replay */
    int nesting;    /* backwards of this thread that it began inside */
    uint64_t began; /* losses that had been made when it did */
    int foreign;    /* a hook has run another backward inside this one */
    int exempt;     /* allocations are outside the budget until a gradient arrives */
    oomkit_deferred *few_armed[OOMKIT_CALLERS_FEW];
    oomkit_call *few_calls[OOMKIT_CALLERS_FEW];
    oomkit_own_call first; /* not zeroed as a whole: see oomkit_callers_mark */
} oomkit_callers;

/* callers_backward.c: a call with the marks of one pending call's participants. 0 or -1
 * (then oomkit_replay_end still lets go of it). */
int
oomkit_callers_mark(oomkit_callers *s, const oomkit_deferred *p, oomkit_call *call);

/* callers_backward.c: the engine comes to a node between root and losses (1), or has
 * run it (0): what it allocates is outside the budget. */
void
oomkit_callers_between(oomkit_callers *s, int begins);

/* between.c: hangs observers onto those of `nodes` that are no loss's. `gradients` are
 * the roots'. 0 or -1. */
int
oomkit_between_hang(oomkit_callers *s, PyObject *nodes, PyObject *gradients,
                    int losses);

/* between.c: a gradient has reached another loss. */
void
oomkit_between_arrived(oomkit_callers *s);

/* between.c: after a failure, what reaches the losses (`reached`, and their `nodes`)
 * that were not reached yet. Runs hooks of the caller that had not run. 0 or -1. */
int
oomkit_between_resume(oomkit_callers *s, PyObject *reached, PyObject *nodes);

void
oomkit_between_end(oomkit_callers *s);

/* callers_backward.c: the marks of this list of participants, or NULL. */
oomkit_call *
oomkit_callers_call(oomkit_callers *s, const oomkit_participants *parts);

/* threads.c: is a backward of another thread at these participants, and this one
 * not? Gradients that it writes meanwhile, without the interpreter's lock, are not even
 * to be read. */
int
oomkit_callers_is_elsewhere(const oomkit_callers *s, const oomkit_participants *parts);

/* threads.c: `s` comes to a loss of these, which it has marks of: from here on
 * their gradients are no matter of backwards of other threads that have come to none. 0
 * or -1. */
int
oomkit_callers_takes_over(oomkit_callers *s, const oomkit_participants *parts);

/* finish.c: the engine has run. 0 or -1. */
int
oomkit_callers_finish(oomkit_callers *s);

/* failed.c: the backward failed, the exception is in flight. 0 it was replayed;
 * 1 nothing has run yet, run it again (asked only with may_retry); -1 with the
 * exception to raise. */
int
oomkit_callers_failed(oomkit_callers *s, int may_retry);

/* Gradients as they were before the backward, with an exception in flight that goes on.
 */
void
oomkit_callers_take_back(oomkit_callers *s);
/* The exception in flight may say of the one call that failed that nothing has changed:
 * a note tells what could not be taken back. */
void
oomkit_callers_say_changed(PyObject *message);
/* callers_gradients.c: the same of the gradients alone, for where streams and buffers
 * are as they were. */
void
oomkit_callers_gradients_back(oomkit_callers *s);

/* callers_gradients.c: the graph of a backward that ran out of memory could not be
 * looked through. Raises `exception` (stolen), the failure, or what is in flight; where
 * the graph is too deep it may be ours, and gradients go back. */
void
oomkit_callers_unseen(oomkit_callers *s, PyObject *exception);

/* failed.c: runs one waiting call again with marks of its own, on top of what
 * the engine and others have added: after a failure (its exception, stolen) in smaller
 * parts, else (NULL) as it was split, or in halves. 0 or -1. */
int
oomkit_callers_again(oomkit_callers *s, oomkit_deferred *p, PyObject *exception);

#endif
