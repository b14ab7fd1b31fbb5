/* What a step does, told to those whom it concerns. Who they are, and in which order
 * they are told, stands in module/wiring.c alone. */
#ifndef OOMKIT_CALL_EVENTS_H
#define OOMKIT_CALL_EVENTS_H

#include "call_types.h"

struct interceptor_object;
struct oomkit_step;

/* An outermost backward of a call. */
typedef struct oomkit_backward {
    PyObject *roots;     /* borrowed: what the engine was given */
    PyObject *gradients; /* borrowed: theirs */
    double weight;       /* of its gradients; 0: there is nothing to run */
} oomkit_backward;

/* A call of a method of an optimizer, a scheduler, a scaler, an averaged model. */
typedef struct oomkit_update {
    struct interceptor_object *method; /* borrowed: what was called */
    PyObject *optimizer;               /* borrowed: what it updates, or NULL */
    PyObject *const *args;             /* as of a vectorcall */
    size_t nargsf;
    PyObject *kwnames;
    int held; /* it is not to be made now */
} oomkit_update;

/* Arguments of a step() of an optimizer or a scheduler that is held back until the last
 * micro-batch. */
typedef struct oomkit_held_arguments {
    PyObject *target;      /* borrowed: whose step() */
    PyObject *const *args; /* positional ones first */
    Py_ssize_t positional;
    PyObject *kwnames;
    PyObject *instead; /* owned by who tells: takes the place of argument `at`, or NULL
                        */
    Py_ssize_t at;
} oomkit_held_arguments;

/* One concern: what it does at each event, in its own file. Each handler may be NULL.
 * 0, or -1 with an exception, which ends the micro-batch. */
typedef struct oomkit_rule {
    /* it is a call of a process group: before anything is marked */
    int (*group_begins)(oomkit_call *);
    /* at entry of an attempt: a buffer (borrowed) that requires grad */
    int (*leaf_at_entry)(oomkit_call *, PyObject *buffer);
    /* slices are there, and will run as planned */
    int (*before_attempt)(oomkit_call *);
    /* the present slices are about to run, for real or for a proof */
    int (*attempt_begins)(oomkit_call *);
    int (*micro_begins)(oomkit_call *);
    /* an outermost backward, by call->split of a micro-batch or of the whole batch */
    int (*backward_begins)(oomkit_call *, oomkit_backward *);
    int (*backward_ends)(oomkit_call *, const oomkit_backward *);
    /* it raised, which is in flight and stays it */
    void (*backward_fails)(oomkit_call *, const oomkit_backward *);
    /* it has not ended well: it raised, or another rule refused it before it began or
     * behind it; keeps the exception in flight */
    void (*backward_left)(oomkit_call *);
    /* another one inside it that accumulates */
    int (*backward_nests)(oomkit_call *, const oomkit_backward *);
    /* while split, outermost: may be held back; then those that are not are made */
    int (*update_begins)(oomkit_call *, oomkit_update *);
    int (*update_runs)(oomkit_call *, const oomkit_update *);
    /* while split: step() was called with these arguments, held back or not; and it is
     * about to be made with them, once */
    int (*arguments_given)(oomkit_call *, const oomkit_held_arguments *);
    int (*arguments_settle)(oomkit_call *, oomkit_held_arguments *);
    /* zero_grad() is about to be left out: these parameters (a list) seem to have no
     * gradients */
    int (*gradients_cleared)(oomkit_call *, PyObject *params);
    /* while split, outermost: it has been made */
    int (*update_ends)(oomkit_call *, const oomkit_update *);
    /* the function was left, in any way; keeps the exception in flight */
    void (*micro_left)(oomkit_call *);
    /* it has returned: what is wanted of the result now, and what must hold then */
    int (*micro_returns)(oomkit_call *, PyObject *result);
    int (*micro_ends)(oomkit_call *, PyObject *result);
    /* all micro-batches are done, their results are to be joined */
    int (*before_join)(oomkit_call *);
    /* the call has ended well, and what it returns needs a backward */
    int (*call_returns)(oomkit_call *, PyObject *result);
    /* a failure of memory, before anything is dropped: sets call->refused.why where it
     * must not be retried, *committed where something has moved for good */
    int (*failure_is_judged)(oomkit_call *, int *committed);
    /* what it held is gone: why it must not be retried after all (static text), NULL */
    const char *(*failure_remains)(oomkit_call *);
    /* gradients are being put back as they were */
    int (*gradients_go_back)(oomkit_call *);
    /* everything is back; before the next attempt, after a failure or for another
     * reason (OOMKIT_RESTART_*) */
    int (*before_retry)(oomkit_call *);
    int (*before_restart)(oomkit_call *, int why);
    /* all that belongs to an attempt goes; and to a call */
    void (*attempt_ends)(oomkit_call *);
    void (*call_ends)(oomkit_call *);
    /* a whole call has ended well, with so many rows */
    void (*whole_call_ends)(oomkit_call *, int64_t rows);
} oomkit_rule;

/* Backwards outside every call: they may be the later half of one. */
typedef struct oomkit_outside {
    /* Is one to be protected? And its run. */
    int (*wanted)(const oomkit_state *st);
    PyObject *(*run)(oomkit_state *st, PyObject *original, PyObject *const *args,
                     size_t nargsf, PyObject *kwnames);
    /* the engine runs, for gradients of leaves or for others alone. 0 or -1. */
    int (*engine)(oomkit_state *st, PyObject *const *args, size_t nargsf,
                  PyObject *kwnames);
    int (*engine_without_leaves)(oomkit_state *st, PyObject *roots);
    /* one that accumulates runs inside another one */
    void (*nests)(const oomkit_state *st);
    /* torch is about to set `training` of a module. 0 or -1. */
    int (*mode_changes)(oomkit_state *st, PyObject *module);
} oomkit_outside;

#define OOMKIT_REPEATS_UNKNOWN 2 /* see step_repeats */

/* Rules of a whole call at most, and the NULL behind them. */
#define OOMKIT_HANDLERS 8

/* What a healthy call tells its rules of, handler by handler without those that are
 * not there: the tables of rules fill many lines of the cache. Each ends with NULL. */
typedef struct oomkit_handlers {
    int (*backward_begins[OOMKIT_HANDLERS])(oomkit_call *, oomkit_backward *);
    int (*backward_ends[OOMKIT_HANDLERS])(oomkit_call *, const oomkit_backward *);
    int (*update_runs[OOMKIT_HANDLERS])(oomkit_call *, const oomkit_update *);
    void (*call_ends[OOMKIT_HANDLERS])(oomkit_call *);
    void (*whole_call_ends[OOMKIT_HANDLERS])(oomkit_call *, int64_t rows);
    int filled;
} oomkit_handlers;

typedef struct oomkit_wiring {
    const oomkit_rule *const *when_whole; /* each list ends with NULL */
    const oomkit_rule *const *when_split;
    /* who is told of updates that a whole call runs into which is only to be compared
     */
    const oomkit_rule *const *when_repeated;
    oomkit_handlers handlers; /* of when_whole: see oomkit_handlers_fill() */
    const oomkit_outside *outside;
    /* a backward that accumulates begins in a part of a loop. 0 or -1. */
    int (*part_runs_backward)(oomkit_state *st);
    /* the call of the loop that has a part out in this thread: borrowed, or NULL */
    oomkit_call *(*part_call)(const oomkit_state *st);
    /* everything was put back, as `result` and *message say, but for gradients of
     * earlier calls that have gone: that of oomkit_take_back() now. `error` (borrowed,
     * or NULL) is raised afterwards */
    int (*gradients_are_gone)(oomkit_call *, int result, PyObject **message,
                              PyObject *error);
    /* before an attempt with the whole batch: does the step do the same again? `runs`:
     * rows may be run to see. 1; 0 or OOMKIT_REPEATS_UNKNOWN with *why (owned); -1 */
    int (*step_repeats)(oomkit_call *, int runs, PyObject **why);
    /* the step that knows about an object; borrowed from the step, or NULL */
    struct oomkit_step *(*step_of_object)(struct oomkit_step *, PyObject *);
    /* a new step. New reference or NULL. */
    PyObject *(*make_step)(oomkit_state *, PyObject *func, PyObject *options);
} oomkit_wiring;

/* Tells every rule in turn, up to the first that fails. */
#define OOMKIT_TELL(rules, event, ...)                                                 \
    do {                                                                               \
        const oomkit_rule *const *rule_;                                               \
        for (rule_ = (rules); *rule_ != NULL; rule_++) {                               \
            if ((*rule_)->event != NULL && (*rule_)->event(__VA_ARGS__) < 0) {         \
                return -1;                                                             \
            }                                                                          \
        }                                                                              \
        return 0;                                                                      \
    } while (0)

#define OOMKIT_TELL_WHOLE(call, event, ...)                                            \
    do {                                                                               \
        size_t i_;                                                                     \
        for (i_ = 0; (call)->st->wiring->handlers.event[i_] != NULL; i_++) {           \
            if ((call)->st->wiring->handlers.event[i_](__VA_ARGS__) < 0) {             \
                return -1;                                                             \
            }                                                                          \
        }                                                                              \
        return 0;                                                                      \
    } while (0)

static inline const oomkit_rule *const *
oomkit_rules_of(const oomkit_call *call)
{
    return call->split ? call->st->wiring->when_split : call->st->wiring->when_whole;
}

static inline int
oomkit_tell_backward_begins(oomkit_call *call, oomkit_backward *backward)
{
    if (!call->split) {
        OOMKIT_TELL_WHOLE(call, backward_begins, call, backward);
    }
    OOMKIT_TELL(call->st->wiring->when_split, backward_begins, call, backward);
}

static inline int
oomkit_tell_backward_ends(oomkit_call *call, const oomkit_backward *backward)
{
    if (!call->split) {
        OOMKIT_TELL_WHOLE(call, backward_ends, call, backward);
    }
    OOMKIT_TELL(call->st->wiring->when_split, backward_ends, call, backward);
}

/* events.c: what is told more seldom. */
/* wiring->handlers, by wiring->when_whole. */
void
oomkit_handlers_fill(oomkit_wiring *wiring);
int
oomkit_tell_leaf_at_entry(oomkit_call *call, PyObject *buffer);
void
oomkit_tell_backward_fails(oomkit_call *call, const oomkit_backward *backward);
void
oomkit_tell_backward_left(oomkit_call *call);
int
oomkit_tell_backward_nests(oomkit_call *call, const oomkit_backward *backward);
int
oomkit_tell_update_begins(oomkit_call *call, oomkit_update *update);
int
oomkit_tell_update_runs(oomkit_call *call, const oomkit_update *update);
int
oomkit_tell_update_ends(oomkit_call *call, const oomkit_update *update);
int
oomkit_tell_arguments_given(oomkit_call *call, const oomkit_held_arguments *arguments);
int
oomkit_tell_arguments_settle(oomkit_call *call, oomkit_held_arguments *arguments);
int
oomkit_tell_gradients_cleared(oomkit_call *call, PyObject *params);
int
oomkit_tell_group_begins(oomkit_call *call);
int
oomkit_tell_before_attempt(oomkit_call *call);
int
oomkit_tell_attempt_begins(oomkit_call *call);
int
oomkit_tell_micro_begins(oomkit_call *call);
void
oomkit_tell_micro_left(oomkit_call *call);
int
oomkit_tell_micro_returns(oomkit_call *call, PyObject *result);
int
oomkit_tell_micro_ends(oomkit_call *call, PyObject *result);
int
oomkit_tell_before_join(oomkit_call *call);
int
oomkit_tell_call_returns(oomkit_call *call, PyObject *result);
int
oomkit_tell_failure_is_judged(oomkit_call *call, int *committed);
const char *
oomkit_tell_failure_remains(oomkit_call *call);
int
oomkit_tell_gradients_go_back(oomkit_call *call);
int
oomkit_tell_before_retry(oomkit_call *call);
int
oomkit_tell_before_restart(oomkit_call *call, int why);
void
oomkit_tell_attempt_ends(oomkit_call *call);
void
oomkit_tell_call_ends(oomkit_call *call);
void
oomkit_tell_whole_call_ends(oomkit_call *call, int64_t rows);

#endif
