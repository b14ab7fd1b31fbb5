/* A call whose loss was returned: everything that its second half, the caller's
 * backward, needs to be taken back and replayed.
 *
 * deferred.c makes and frees them, callers_backward.c protects the caller's backward,
 * replay.c runs a call again, eager.c keeps the gradients of calls that were split
 * already. */
#ifndef OOMKIT_DEFERRED_DEFERRED_H
#define OOMKIT_DEFERRED_DEFERRED_H

#include "../call/events.h"

/* What the surroundings of a call were, as far as a replay has to bring them back. */
typedef struct oomkit_modes {
    PyObject *autocast; /* owned: list of (device type, dtype) that were on, or NULL */
    Py_ssize_t functions; /* torch function modes on the stack */
    uint64_t at;          /* how often train() or eval() was reported before */
} oomkit_modes;

struct oomkit_callers;

/* Owned by the graph of the loss (the metadata of its node, the context of our own
 * one), so it dies with that graph and keeps nothing alive longer than the caller. */
typedef struct oomkit_deferred {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    oomkit_state *st; /* borrowed from the module */
    struct oomkit_deferred *next,
        *previous; /* borrowed: those that wait of the same participants */
    struct oomkit_callers
        *callers;             /* borrowed: the backward that is running, or NULL */
    struct oomkit_step *step; /* owned */
    PyObject **args;          /* owned array of owned arguments */
    Py_ssize_t total;
    uint64_t weak;    /* bits of those that are held by weak references */
    PyObject *others; /* owned: list of weak references to tensors that were
                         returned beside the loss, or NULL */
    size_t nargsf;
    PyObject *kwnames; /* owned or NULL */
    oomkit_participants *parts;
    oomkit_device device;
    oomkit_batch batch;
    oomkit_savepoint entry; /* of the call: what a replay begins from */
    oomkit_after after;     /* at its end */
    oomkit_modes modes;
    uint64_t number, record; /* of the call, of its record */
    uint64_t serial;         /* among all that ever waited; 0 while it does not */
    uint64_t signature;
    Py_ssize_t output; /* of the loss among its node's outputs */
    oomkit_returned kind;
    int small;          /* the loss is of a few KiB */
    oomkit_loss value;  /* of the loss of a whole call */
    PyObject *gradient; /* owned: what reached the loss in the backward, or NULL */
    uint32_t gradient_version; /* of it, when it did */
    int hooks_inside;          /* the step itself hung hooks onto the loss */
    int hooked;                /* its node has our pre-hook */
    int fired;                 /* it did */
    int spent;                 /* its marks and its batch are with a replay */
    int replayed;              /* it was run again in this backward */
    int retired;               /* its backward is done: nothing is held any more */
    /* of a call that was split */
    oomkit_slice *slices; /* owned, or NULL */
    int64_t slice_count;
    PyObject **eager; /* owned array of owned gradients (one per parameter), or NULL */
    Py_ssize_t eager_count;
    double assumed; /* the gradient that the eager ones were computed with */
} oomkit_deferred;

#define deferred_CAST(op) ((oomkit_deferred *)(op))

/* What happens in a call concerns (call/events.h): */
extern const oomkit_rule oomkit_deferred_rule, oomkit_recompute_rule;
extern const oomkit_outside oomkit_backward_outside_calls;

/* --- deferred.c --- */

/* After a call that was not split: its loss, if it still needs backward, gets a hook.
 * Takes marks and batch out of the call. 0, or -1 with an exception. */
int
oomkit_deferred_offer(oomkit_call *call, PyObject *result);

/* After a split call that returns a loss: the joined loss gets a node of ours. */
int
oomkit_deferred_attach(oomkit_call *call, PyObject *result);

/* Notes what has reached the loss. 0 or -1. */
int
oomkit_deferred_gradient(oomkit_deferred *pending, PyObject *gradient);

/* Lets go of everything that is held for a replay. */
void
oomkit_deferred_retire(oomkit_deferred *pending);

/* --- held_args.c --- */

/* The arguments of the call: weakly what a method is bound to (an object that keeps its
 * loss, self.loss = loss, would else be kept alive by it), and what else leads to
 * `loss` or `result` (either may be NULL). 0 or -1. */
int
oomkit_deferred_arguments(oomkit_deferred *pending, const oomkit_call *call,
                          PyObject *loss, PyObject *result);

/* A loss of one element that is a view of one of one element: its base's node in place
 * of *node (owned), and what else is that tensor's; else nothing changes. A change of
 * the loss in place gives the view another node, but not its base. 0 or -1. */
int
oomkit_deferred_base(oomkit_deferred *pending, PyObject *loss, PyObject **node);

/* Weak references become what they refer to. 1 when one is gone. */
int
oomkit_deferred_strong(oomkit_deferred *pending);

/* The same for dictionaries and lists that the loss was put into, which know no weak
 * references: they are held as they were at the call. 0 or -1. */
int
oomkit_deferred_containers(oomkit_deferred *pending, PyObject *loss, PyObject *result);

/* Notes the tensors beside the loss that a gradient may pass. 0 or -1. */
int
oomkit_deferred_others(oomkit_deferred *pending, PyObject *result, PyObject *loss);

/* Has the caller hung a hook onto one of them, or called its retain_grad()? 1, 0, -1.
 */
int
oomkit_deferred_watched(const oomkit_deferred *pending);

/* --- autocast.c --- */
int
oomkit_modes_note(oomkit_call *call, oomkit_modes *modes);
/* Why the surroundings cannot be brought back (static text), or NULL. 0 or -1. */
int
oomkit_modes_differ(oomkit_call *call, const oomkit_modes *modes, const char **why);
/* What brings the caller's surroundings back. */
typedef struct oomkit_modes_stack {
    PyObject *autocast; /* owned: contextlib.ExitStack */
    int grad;           /* was gradient recording on? */
} oomkit_modes_stack;
/* Grad mode on and autocast as it was, until oomkit_modes_leave(). 0 or -1. */
int
oomkit_modes_enter(oomkit_state *st, const oomkit_modes *modes,
                   oomkit_modes_stack *stack);
/* Goes as far as it can. 0, or -1: autocast may not be what it was. */
int
oomkit_modes_leave(oomkit_state *st, oomkit_modes_stack *stack);
void
oomkit_modes_clear(oomkit_modes *modes);
/* torch is about to set `training` of a module while losses wait. 0 or -1. */
int
oomkit_mode_log(oomkit_state *st, PyObject *module);

/* --- replay.c --- */

/* Fills a call out of a pending one: 0, 1 with *why (static text) when it cannot be
 * run again, or -1. */
int
oomkit_replay_prepare(oomkit_call *call, oomkit_deferred *pending, const char **why);

/* Runs it with the gradient that reached its loss: after a failure (its exception,
 * stolen) in smaller parts, else (NULL) as it was split, or in halves. 0 or -1. */
int
oomkit_replay_run(oomkit_call *call, oomkit_deferred *pending, PyObject *inputs,
                  PyObject *exception);

/* Ends such a call, whether it was run or not; keeps the exception in flight. `pending`
 * (may be NULL) has the record to amend. */
void
oomkit_replay_end(oomkit_call *call, const oomkit_deferred *pending, int finished);

/* --- eager.c --- */

/* What the gradient at the returned loss will be, as far as is known. 0 or -1. */
int
oomkit_eager_assume(oomkit_call *call, double *gradient);

/* Adds gradient / assumed times the eager gradients to .grad. 0; 1 when that would not
 * be exact and the call has to be run again; -1. `keep`: they are needed once more. */
int
oomkit_eager_deposit(oomkit_deferred *pending, int keep);

/* Before the first backward of a split call: fp16 beside a GradScaler is said once. 0
 * or -1. */
int
oomkit_eager_say_half(oomkit_call *call, PyObject *roots);

void
oomkit_eager_free(oomkit_deferred *pending);

/* --- watched_losses.c --- */

/* Before the engine runs with `args` (roots, their gradients): has the waiting losses
 * that it will pass tell what reaches them. How many the roots lead to, when they lead
 * to small ones alone and through a few nodes; else 0. -1 with an exception. Of several
 * losses *nodes (owned) lists theirs and those between, some of them more than once. */
int
oomkit_graph_watch(oomkit_state *st, PyObject *const *args, PyObject **nodes);

/* --- callers_backward.c --- */

/* Should this backward, outside every protected call, be protected? */
int
oomkit_callers_wanted(const oomkit_state *st);

/* Runs `original` (torch.autograd.backward or the engine) as the second half of the
 * waiting calls that it reaches. */
PyObject *
oomkit_callers_run(oomkit_state *st, PyObject *original, PyObject *const *args,
                   size_t nargsf, PyObject *kwnames);

/* The engine is about to run for the second half of this thread: notes its arguments.
 * 0, or -1 with an exception. */
int
oomkit_callers_engine(oomkit_state *st, PyObject *const *args, size_t nargsf,
                      PyObject *kwnames);

/* A backward that writes to .grad runs inside another one. */
void
oomkit_callers_nested(const oomkit_state *st);

/* A gradient arrived at a waiting loss. */
void
oomkit_callers_arrived(oomkit_deferred *pending);

/* The backward of this thread reaches a waiting loss: it is this one's from here. On a
 * thread of autograd's own it is that of the backward which runs. 0 or -1. */
int
oomkit_callers_claim(oomkit_deferred *pending);

/* Is a second half running on this thread, or is this a thread of its engine? */
int
oomkit_callers_is_running(const oomkit_state *st);

extern PyType_Spec oomkit_deferred_spec, oomkit_between_spec;

/* The waiting loss that this node made, or NULL. Borrowed; *failed on an error. */
oomkit_deferred *
oomkit_node_deferred(oomkit_state *st, PyObject *node, int *failed);

/* --- reached_losses.c --- */
/* What a backward from `roots` reaches: *paths is set when a leaf is reached without
 * passing a waiting loss. Those that are reached are appended to `reached` (a list),
 * and their nodes to `nodes`. 0 or -1. */
int
oomkit_graph_reach(oomkit_state *st, PyObject *roots, PyObject *reached,
                   PyObject *nodes, int *paths);
/* Is there a waiting loss behind those in `reached`? 1, 0 or -1. */
int
oomkit_graph_beneath(oomkit_state *st, PyObject *roots, PyObject *reached);
/* The first waiting loss that is reached, or NULL. Borrowed; *failed on an error. */
oomkit_deferred *
oomkit_graph_waiting(oomkit_state *st, PyObject *roots, int *failed);
/* Is a loss that was split reached? 1, 0 or -1. */
int
oomkit_graph_has_split(oomkit_state *st, PyObject *roots);
/* Is a tensor in fp16 on the way from `root`? 1, 0 or -1. */
int
oomkit_graph_has_half(oomkit_state *st, PyObject *root);
/* Appends the leaves behind `roots` to a list. 0 or -1. */
int
oomkit_graph_leaves(oomkit_state *st, PyObject *roots, PyObject *leaves);

#endif
