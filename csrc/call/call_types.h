/* One protected call: everything that belongs to it, from entry to return. What belongs
 * to one concern is defined here because the call embeds it: the comment begins with
 * its folder, and no other one names its fields (tests/house/test_concerns.py). */
#ifndef OOMKIT_CALL_CALL_TYPES_H
#define OOMKIT_CALL_CALL_TYPES_H

#include "loss_types.h"
#include "proven.h"
#include "records.h"
#include "../device/device.h"
#include "../members/members.h"
#include "../result/facts.h"
#include "../batch/arguments.h"
#include "../core/plan.h"
#include "../core/status.h"

/* --- undo: gradients.c --- */
typedef enum {
    OOMKIT_OWED_NOTHING = 0,
    OOMKIT_OWED_LATER,  /* what the failed attempt has added is to be taken off */
    OOMKIT_OWED_NOW,    /* it is being computed again, see recompute.c */
    OOMKIT_OWED_PARTLY, /* some of it has been taken off: it cannot be computed anew */
    OOMKIT_OWED_DONE    /* and has been taken off */
} oomkit_owed;

typedef struct oomkit_grads {
    oomkit_grad_mark *marks; /* one per parameter; weak holds of the bridge */
    oomkit_grad_mark *after; /* after a backward of the last micro-batch, or NULL */
    PyObject **copies;       /* owned host copies of the gradients at entry, or NULL */
    PyObject **parked;       /* owned gradients of finished micro-batches, or NULL */
    uint32_t *parked_at;     /* their versions when they were parked, or NULL */
    PyObject **hosted;       /* owned: sums so far that are on the host, or NULL */
    PyObject **aside; /* owned gradients that hold the whole contribution, or NULL */
    int aside_said;   /* the error that ends the call tells of them */
    oomkit_grad_mark *began; /* split: marks when the micro-batch began, or NULL */
    PyObject *
        *entry; /* owned: the caller's gradients, put away while ours accumulate */
    int eager;  /* what accumulates waits for the caller's backward, .grad stays his */
    int apart;  /* ours accumulate beside the caller's and are added last */
    int away;   /* entry holds them now */
    uint64_t engine_runs; /* state->engine_runs when the marks were taken */
    int force_copies;     /* whatever the options say */
    int no_aside;         /* nothing may be set aside in this call */
    oomkit_owed owed;     /* what was set aside holds too much */
    int may_owe;          /* such may be set aside: another attempt follows */
    int remade; /* the window makes them again: 1, it does not: -1, not asked: 0 */
    int may_go; /* they may go for that: another attempt follows */
    int gone;   /* they have, and have not been made again yet */
    int marked; /* marks are taken in this attempt */
    int is_parked;
    int at_entry; /* some parameter had a gradient when the marks were taken */
} oomkit_grads;

/* --- undo: buffers.c --- */
typedef struct oomkit_buffer {
    PyObject *tensor; /* owned until the end of the call */
    PyObject *module; /* owned likewise */
    PyObject *key;    /* owned: name in module._buffers */
    uint32_t version;
    uint8_t copied; /* parts->copies has its value at entry; 2: parts->images has */
    uint8_t bare;   /* it neither required grad at entry nor had a gradient */
} oomkit_buffer;

typedef struct oomkit_buffers {
    oomkit_buffer *items; /* those of one module stand together */
    Py_ssize_t count, room;
    int taken; /* all that take part are among them, and nothing is put back yet */
    int used;  /* beside a replay: by others since the call */
    oomkit_memo *attributes; /* of modules, see late_modules.c; or NULL */
    oomkit_memo *values;     /* beside a replay: tensors: host copy; or NULL */
} oomkit_buffers;

/* --- undo: undone_buffers.c --- */
typedef struct oomkit_undone_buffer {
    PyObject *module; /* owned until the end of the call: weak reference */
    PyObject *key;    /* owned: name in module._buffers */
    int made;         /* the attempt has made it; else it has moved it */
} oomkit_undone_buffer;

typedef struct oomkit_undone_buffers {
    oomkit_undone_buffer *items;
    Py_ssize_t count, room;
} oomkit_undone_buffers;

/* --- undo: random.c --- */
typedef struct oomkit_rng {
    PyObject *cpu_state;    /* owned tensor, or NULL */
    PyObject *cpu_bytes;    /* owned: the same for comparing alone, or NULL */
    oomkit_memo *others;    /* generators: state */
    PyObject *random_state; /* owned, or NULL */
    PyObject *numpy_state;  /* owned, or NULL */
    oomkit_memo *streams;   /* generators of the user's: state */
    int used;               /* beside a replay: by others since the call */
} oomkit_rng;

/* --- optim: optimizer.c --- */
typedef struct oomkit_state_item { /* all of it lies in the mark's layout */
    PyObject *key; /* held: name in a parameter's state, NULL for a parameter itself */
    PyObject *value;   /* held: tensor or plain value */
    PyObject *dict;    /* held: the state dict it is in */
    uint32_t *version; /* NULL: it is no tensor */
    uint8_t was_out;   /* its copy is its value on the host, where it was then */
} oomkit_state_item;

typedef struct oomkit_optimizer_mark {
    PyObject *optimizer;          /* owned until the end of the call */
    PyObject *state;              /* owned: optimizer.state */
    PyObject *groups;             /* owned: list of shallow copies of param_groups */
    PyObject *attributes;         /* owned: its own ones (oomkit_own_taken()) */
    struct oomkit_layout *layout; /* owned memory: what the next two lie in */
    oomkit_state_item *items;     /* parameters and state values */
    PyObject **known;             /* owned: keys of state at the mark */
    Py_ssize_t count, known_count;
    PyObject **copies; /* owned host copies (optimizer_safety="copy"), or NULL */
    PyObject *beside;  /* owned: what it keeps elsewhere (keepsake), or NULL */
} oomkit_optimizer_mark;

/* --- hook: method.c --- */
typedef struct oomkit_interception {
    PyObject *target;      /* owned until removed */
    PyObject *name;        /* borrowed from state: "step", "update", "unscale_" */
    PyObject *interceptor; /* owned */
    oomkit_owner_kind kind;
} oomkit_interception;

#define OOMKIT_SEQUENCE 24

/* What a micro-batch did, in order: outermost backwards and intercepted calls. */
typedef struct oomkit_event {
    const void *target; /* borrowed address; NULL for a backward */
    const void *name;   /* borrowed address of the method's interned name */
    PyObject *where;    /* owned: "file:line", or NULL */
} oomkit_event;

typedef struct oomkit_sequence {
    oomkit_event events[OOMKIT_SEQUENCE];
    int count;
} oomkit_sequence;

/* optim: scheduler_args.c; undo: parameter_slots.c, parameters.c */
typedef struct oomkit_metric oomkit_metric;
typedef struct oomkit_param_slot oomkit_param_slot;
typedef struct oomkit_param_copies oomkit_param_copies;

/* How the loss of a call that ran no backward was returned. */
typedef enum {
    OOMKIT_RETURNED_NOTHING = 0,
    OOMKIT_RETURNED_WHOLE,   /* not split: the caller runs the step's own graph */
    OOMKIT_RETURNED_EAGER,   /* split, a scalar: its gradients are there, and wait */
    OOMKIT_RETURNED_DEFERRED /* split, a row per sample: run again at the backward */
} oomkit_returned;

/* Why an attempt is begun again with the same plan, or nearly. */
enum {
    OOMKIT_RESTART_UNKNOWN = 1, /* to take in tensors that were not known */
    OOMKIT_RESTART_WIDER,       /* the first slice has one row, which is too few */
    OOMKIT_RESTART_PROOF,       /* the step takes a course that no proof has seen */
    OOMKIT_RESTART_ROWS,        /* so do rows of a later micro-batch: it has proven them
                                   when it comes to them again */
    OOMKIT_RESTART_OWED,        /* recompute.c has what it wanted */
    OOMKIT_RESTART_RANKS        /* another rank has failed */
};

/* engine: the step itself raised an error for the size of a micro-batch. */
#define OOMKIT_UNFIT 3 /* so often in one call */

typedef struct oomkit_unfit_sizes {
    int64_t rows[OOMKIT_UNFIT]; /* of the micro-batches that it was raised in */
    int count;
    PyObject *said; /* owned: the last of these errors, or NULL */
    PyObject
        *refusal; /* owned: the SplitError after which the batch runs whole, or NULL */
} oomkit_unfit_sizes;

struct oomkit_step;
struct oomkit_deferred;
struct oomkit_proof;

#define OOMKIT_UNMARKED 2

/* plain: the places that a function's code stores to. */
typedef struct oomkit_plain_found {
    struct oomkit_plain_site *site; /* counted reference, or NULL */
    int looked; /* for them: once, or (2) again: what the first call has made is there
                   then */
} oomkit_plain_found;

/* What the caller has given: a vectorcall. */
typedef struct oomkit_given {
    PyObject *func; /* owned by step */
    PyObject *const *args;
    size_t nargsf;
    PyObject *kwnames;
    oomkit_plain_found *places; /* borrowed: of the step, or of the loop */
    int is_body; /* no function: the body of a loop, in a frame that goes on */
} oomkit_given;

/* Of the call at its site, and of its record. */
typedef struct oomkit_log {
    uint64_t number; /* of the call at its site */
    uint64_t record; /* of its record in the ring, once it is there */
    int phase_before;
    uint32_t outcome; /* of the record */
    uint32_t rung;    /* the highest that was used */
} oomkit_log;

/* At the first backward of this attempt some parameter had a gradient, or none. */
typedef enum {
    OOMKIT_GRADIENTS_UNSEEN = 0,
    OOMKIT_GRADIENTS_NONE,
    OOMKIT_GRADIENTS_THERE
} oomkit_gradients_seen;

/* sizes: what was measured, for the planner and the record. */
typedef struct oomkit_sizes_seen {
    oomkit_peak_window window;
    oomkit_phase_meter *meter;              /* owned, or NULL */
    uint64_t peak_allocated, peak_reserved; /* of windows already closed */
    uint64_t baseline;
    uint64_t entry_gradients; /* estimate of what lies in it; after an OOM only */
    uint64_t dropped;         /* what the step dropped of it, see baseline.c */
    oomkit_gradients_seen gradients;
    int64_t least;    /* rows that another size has at least, or 0: refused_sizes.c */
    int even;         /* other sizes are even, likewise */
    int forward_only; /* the call has finished, and nothing will accumulate gradients */
} oomkit_sizes_seen;

/* What sizes and proofs of such a call go by. */
typedef struct oomkit_shape_of {
    uint64_t signature;
    int known;
    uint64_t bucket;    /* what the caller says tells shapes apart besides, or 0 */
    uint64_t proof_key; /* what proofs of such a call go by; 0: not asked yet */
} oomkit_shape_of;

/* deferred: a loss that is returned to a caller who runs backward. */
typedef struct oomkit_deferral {
    oomkit_returned returned;
    double assumed; /* gradient at the loss that the eager ones go by */
    struct oomkit_deferred *replayed; /* borrowed: the call that this one runs again */
    PyObject *inputs;                 /* borrowed: inputs= of the caller's backward */
    int rowwise;   /* its gradient has a row per sample: no weights */
    int elsewhere; /* a backward of another thread has come to these gradients, ours has
                      not: not to be taken back; OOMKIT_UNMARKED nor marked */
} oomkit_deferral;

/* optim: host memory that copies of an update in parts may take. */
typedef struct oomkit_host_share {
    int limited;   /* it is known how much */
    int short_of;  /* something was left where it is for want of it */
    uint64_t left; /* bytes */
} oomkit_host_share;

/* optim: optimizers, and what was made of their updates. */
typedef struct oomkit_updating {
    oomkit_optimizer_mark *marks, first[1];
    int count;
    Py_ssize_t room;
    int step_failed;   /* an optimizer's step ran out of memory and was not finished */
    int raised;        /* the last one ended with an error, of whatever kind */
    int made;          /* optimizer steps that were made in this attempt */
    int backwards;     /* that were done at the last of them */
    int apart;         /* there was one between two of them */
    int params_stuck;  /* parameters changed by the step itself stay changed */
    int committed;     /* a scheduler or scaler moved on: nothing can be taken back */
    int depth;         /* intercepted methods that run, one inside another */
    int closure;       /* a step() runs that was handed one, while split */
    int shared;        /* what runs has begun a collective: it cannot be made twice */
    int unknown_begun; /* steps of unknown optimizers that have not ended */
    int unknown_made;  /* those that have, in this attempt */
    oomkit_host_share host;
} oomkit_updating;

/* hook: methods of participants that are intercepted. */
typedef struct oomkit_hooked {
    oomkit_interception *items, first[2];
    int count;
    Py_ssize_t room;
    int schedulers;    /* all of them are, also those of torch */
    int for_split;     /* what only a split call intercepts is in place */
    int syncs;         /* accelerator.accumulate() entered in this micro-batch */
    PyObject *watched; /* owned: dict of modules that forwards.c watches, or NULL, */
    int watched_late;  /* and did not in an attempt before */
} oomkit_hooked;

/* optim: arguments of schedulers, per micro-batch. */
typedef struct oomkit_scheduled {
    oomkit_metric *items;
    int count;
    Py_ssize_t room;
} oomkit_scheduled;

/* accum: leaves that the search did not find. */
typedef struct oomkit_unknown {
    PyObject *leaves;   /* owned: weak references to leaves that are to take part */
    PyObject *of_step;  /* owned: list of (weak reference, had a gradient) */
    PyObject *of_graph; /* owned: weak references to leaves of a failed graph */
    PyObject *loose; /* borrowed: list of leaves of a returned loss's graph that had no
                        gradient, or NULL */
} oomkit_unknown;

/* plain: what each micro-batch may change alike. */
typedef struct oomkit_plain_alike {
    PyObject
        *wholes; /* owned: what the whole runs of proofs have left (a dict), or NULL */
    PyObject *first; /* owned: of the present run, by name, that the first part has left
                        the same; of the call itself, what it has left; or NULL */
    int made;        /* something was made where there was nothing */
} oomkit_plain_alike;

/* accum: parameters that the whole rows of a proof have moved. */
typedef struct oomkit_moved {
    PyObject *whole; /* owned: dict of their numbers to what they were then, or NULL */
    oomkit_slice rows;
    Py_ssize_t count; /* in the call itself: how many the last micro-batch has moved */
} oomkit_moved;

/* accum: tensors like gradients that parameters have as attributes, with their versions
 * before a backward. */
typedef struct oomkit_beside {
    oomkit_memo *noted;
} oomkit_beside;

/* accum: what was updated, and would be seen by a forward. */
typedef struct oomkit_stale {
    int watched;          /* an update was due in this micro-batch */
    PyObject *hook;       /* owned: handle of torch's hook while a forward is refused */
    oomkit_hashes params; /* addresses of parameters whose update was due */
    PyObject *where;      /* owned: the line of the first update */
} oomkit_stale;

/* undo: train(), eval() and requires_grad at one moment. */
typedef struct oomkit_flags {
    PyObject *training; /* owned: dict of address to (weak reference to a module, its
                           training flag then), or NULL */
    uint8_t *requires_grad; /* owned memory, of each parameter; NULL: at entry it is
                               behind the versions */
    Py_ssize_t count;       /* of these: more may be found until the call ends */
} oomkit_flags;

/* undo: what the first micro-batch has switched of them. */
typedef struct oomkit_switches {
    oomkit_flags computed; /* as its first backward found them, or its end */
    oomkit_flags left;     /* as it has left them */
    int asked;             /* in this micro-batch */
} oomkit_switches;

/* What happened in the attempts. */
typedef struct oomkit_tries {
    int whole_tried; /* as the last way out, after smaller micro-batches */
    oomkit_attempt *items;
    Py_ssize_t count, room;
    uint32_t ooms;
    int none_after;        /* the last attempt failed, and none has begun since */
    int joining;           /* the results of an evaluation are being put together */
    int join_failures;     /* so often there was no memory for that */
    int no_room;           /* no micro-batch makes room for the last request */
    oomkit_holding of_run; /* at a failure of the proof's own run, until it is noted */
    int run_failed;        /* of_run is there; 2: gradients had accumulated */
    int again;             /* the smallest plan was tried again, for it has worked */
    int flushed;           /* a plan was tried again after the cache was emptied */
    int update_again;      /* so was one that failed in an update */
    int update_smaller;    /* an update that failed goes on in smaller parts */
    int state_moved;       /* the ladder has moved state: an update may bring it back */
    int by_step;           /* the last micro-batch was ended by the function itself */
    int parked;            /* ... of a proof, by an error, while gradients were away */
    int restart;           /* this attempt is given up: OOMKIT_RESTART_* */
    int widened;           /* so it was to have more than one row in the first slice */
    int restarts;          /* done in this call */
    int repeats;           /* its rows have done the same twice */
    int keeps_made;  /* one has made a module, which stays; what it has done with that
                        may have gone back: */
    int groups_went; /* an optimizer had more groups than at entry */
    int may_hold;    /* a backward over the whole batch ran in one: gradients of what
                        does not go back may hold it */
    uint64_t requested; /* bytes, of the last failure */
    uint64_t began_ns, lost_ns, started_ns;
} oomkit_tries;

struct oomkit_call;

/* A backward, given torch's own engine and what that is to be called with. New
 * reference or NULL. */
typedef PyObject *(*oomkit_engine_run)(struct oomkit_call *call, PyObject *engine,
                                       PyObject *const *args, size_t nargsf,
                                       PyObject *kwnames);

/* Backwards of this micro-batch. */
typedef struct oomkit_backwards {
    oomkit_engine_run instead; /* of each outermost one; NULL: it runs */
    int queued; /* a failed backward has left parts of its graph on this thread */
    int depth;  /* backwards of it that are running, one inside another */
    int done;   /* outermost ones finished in this micro-batch */
    int failed; /* the exception came out of a backward */
    PyObject *cleared; /* owned: where zero_grad() ran after one of them, or NULL */
} oomkit_backwards;

/* ranks: agree.c. */
typedef struct oomkit_ranked {
    PyObject *agreed; /* owned: what this call agrees on with other ranks, or NULL */
    int sharded;      /* its model is: no version tells that a gradient has moved */
    int committed;    /* all have come to the update, or to the end */
    int tight;        /* how near to its end memory is in an update of some rank */
    int updated;      /* the call has ended, with all its updates made */
    const oomkit_options
        *before;             /* the step's, while this call's have copies, or NULL */
    oomkit_options *careful; /* owned memory: those, or NULL */
    /* global_weight=: what the loss of each backward counts among those of all ranks,
     * whose mean is taken. NULL: as much as another rank's. */
    double *shares;
    Py_ssize_t share_count;
} oomkit_ranked;

/* Why this call must not be retried. */
typedef struct oomkit_refused {
    int raised;            /* an interceptor raised on purpose: not to be retried */
    PyObject *split_alone; /* owned: text of the last of them that is of the split
                              alone: see oomkit_split_alone(); or NULL */
    int going_whole;       /* such a one is being undone */
    const char *why;       /* why this call must not be retried, or NULL */
    PyObject *hooked;      /* owned: the hooked parameter it is about, or NULL */
} oomkit_refused;

/* optim: schedulers, scalers and the user's own objects, as they were. */
typedef struct oomkit_owner_marks {
    oomkit_memo *epochs;       /* schedulers: last_epoch, while split */
    oomkit_memo *groups_after; /* optimizers: values at their step() in micro-batch 1 */
    oomkit_memo *groups_end;   /* optimizers: values at the end of micro-batch 1 */
    oomkit_memo *groups_made;  /* and behind the last update that was made */
    oomkit_memo *scales;       /* scalers: scale before the real update() */
    oomkit_memo *scalers;      /* scalers: saved per-optimizer states */
    oomkit_memo *copied;       /* for "copy": state_dict */
    oomkit_memo *user;         /* participants: saved state */
    oomkit_memo *attributes;   /* optimizers, schedulers: attributes */
    const PyObject
        *failed_step; /* borrowed from attributes: whose step() has failed, or NULL */
} oomkit_owner_marks;

/* undo: parameters by module and name, while split. */
typedef struct oomkit_param_slots {
    oomkit_param_slot *items;
    Py_ssize_t count, room;
} oomkit_param_slots;

/* undo: gradients of earlier calls that the step has cleared, see gradients_back.c. */
typedef struct oomkit_earlier_grad oomkit_earlier_grad;

typedef struct oomkit_earlier_grads {
    oomkit_earlier_grad *items; /* of each parameter that had one at entry; or NULL */
    Py_ssize_t count;
    int noted;    /* they are known in this call */
    int out;      /* some stand-ins are in .grad now */
    int was_read; /* a value of one was asked for in this attempt */
} oomkit_earlier_grads;

/* undo: how everything that can go back was at entry of the attempt, or is beside a
 * replay; a value, which moves by oomkit_savepoint_move(). The table in
 * undo/savepoint.c says what is done with each field. */
typedef struct oomkit_savepoint {
    oomkit_rng rng;
    oomkit_buffers buffers;    /* marks; the values are the participants' */
    oomkit_owner_marks owners; /* of optim */
    oomkit_param_slots slots;
    oomkit_thread_modes modes; /* of call: see oomkit_modes_entry */
    int modes_known;
    uint32_t *versions; /* of parameters, behind them two bytes for each and which
                           gradient it had: see oomkit_params_flags; or NULL */
    uint64_t *samples;  /* while split: hashes of 64 values each, or NULL */
    oomkit_param_copies *copies; /* parameters as they were, or NULL */
    struct oomkit_plain *plain;  /* of plain: its marks, or NULL; see plain_state.h */
    oomkit_flags flags;
    PyObject *hooks; /* owned: dict of address to what hook_tables.c notes of a table of
                        hooks, or NULL */
    oomkit_undone_buffers undone; /* what outlives the attempt that has moved them */
    oomkit_earlier_grads earlier; /* this too */
} oomkit_savepoint;

/* undo: the end of a call whose loss is returned. Have others used what it has marked
 * since? */
typedef struct oomkit_after {
    oomkit_rng rng;          /* for comparing alone */
    uint32_t *buffers;       /* owned memory: versions, or NULL */
    uint64_t buffers_serial; /* parts->buffers_serial at the marks */
} oomkit_after;

/* How the batch is cut, where the call is in it, and all that only a call needs that is
 * cut, or may be. While it is whole there is none: see oomkit_call_cut(). */
typedef struct oomkit_cut {
    oomkit_plan plan;
    oomkit_plan_reason reason;
    oomkit_slice *slices; /* of this attempt; NULL while the batch is whole */
    int64_t count, room, at;
    double *weights;          /* one per slice, NULL while whole */
    int forced;               /* slices given by testing.force_slices */
    oomkit_peak_window micro; /* of a micro-batch, or of the optimizer behind it */
    int in_optimizer;         /* which of the two */
    oomkit_measured measured; /* of the micro-batches of this attempt */
    oomkit_unfit_sizes unfit;
    oomkit_scheduled scheduled;
    oomkit_stale stale;
    oomkit_switches switches;
    oomkit_beside beside;
    oomkit_plain_alike alike;
    oomkit_moved moved;
    PyObject *offload; /* of ladder, owned: saved tensors on the host, or NULL */
    int offloads;      /* ... on whichever rung: a run of a proof */
    PyObject
        *recompute; /* of ladder, owned: modules that are computed again, or NULL */
    PyObject *host_grads; /* of ladder, owned: hooks of the backward that runs (a dict),
                             or NULL */
    PyObject *effects; /* of accum, owned: what looks at side effects of micro-batch 1,
                          or NULL */
    oomkit_join join;
    oomkit_losses losses;
    oomkit_paths paths;     /* of accum */
    PyObject *verification; /* of proof, owned: backwards and updates are withheld while
                               rows run without a graph; or NULL */
    PyObject *terms;        /* of proof, owned: _proof.graphs.terms.Terms, or NULL */
    /* What follows is not zeroed at the begin. */
    oomkit_sequence sequence[2]; /* of the first micro-batch, and of the present one */
} oomkit_cut;

typedef struct oomkit_call {
    oomkit_state *st;
    struct oomkit_step *step; /* borrowed: the caller of the vectorcall keeps it */
    const oomkit_options *options;
    oomkit_participants *parts; /* counted reference */
    oomkit_device device;

    int split; /* more than one slice */
    int is_last;
    int running;                /* the function is being called for a slice */
    int training;               /* a backward was seen in this attempt */
    int sequence_waived;        /* the function asked for current() */
    int captured;               /* inside a graph capture: the bare function */
    struct oomkit_proof *proof; /* borrowed: this runs to be compared, or NULL */

    oomkit_given given;
    oomkit_log log;
    oomkit_cut *cut; /* borrowed: `cut_room`, or nothing but zeros to be read */
    oomkit_cut *cut_room;
    oomkit_sizes_seen sizes;
    oomkit_shape_of shape;
    oomkit_deferral deferred;
    oomkit_savepoint entry;
    PyObject *compiler; /* owned: what compiles frames, while that is off, or NULL */
    oomkit_loss
        whole_loss; /* at the first backward of a whole attempt, failed or not */
    oomkit_updating updating;
    oomkit_hooked hooked;
    oomkit_unknown unknown;
    oomkit_tries tries;
    oomkit_backwards backward;
    oomkit_refused refused;
    oomkit_ranked ranks;
    oomkit_grads grads;
    int parts_moved; /* finished parts of an evaluation moved more than results */

    /* What follows is not zeroed at entry: see oomkit_call_init(). */
    oomkit_batch batch; /* its inline nodes are written before they are read */
} oomkit_call;

/* Has it what only a call that is cut needs? Slices alone do not tell: a returned loss
 * takes them with it. */
static inline int
oomkit_call_is_cut(const oomkit_call *call)
{
    return call->cut == call->cut_room;
}

/* Do rows of it run without a graph, to be compared by their losses? */
static inline int
oomkit_call_is_verified(const oomkit_call *call)
{
    return call->cut->verification != NULL;
}

/* For those below folder ranks: is it agreed on with other ranks? */
static inline int
oomkit_ranks_agreed(const oomkit_call *call)
{
    return call->ranks.agreed != NULL;
}

static inline int
oomkit_ranks_sharded(const oomkit_call *call)
{
    return call->ranks.sharded;
}

/* How its loss is returned, for those below folder deferred: is this the replay of one
 * that was? */
static inline int
oomkit_call_is_replay(const oomkit_call *call)
{
    return call->deferred.replayed != NULL;
}

/* Did the micro-batches of this attempt return one, and run no backward themselves? Are
 * its gradients there already? Has it a row per sample, so that there are no
 * weights? */
static inline int
oomkit_loss_is_returned(const oomkit_call *call)
{
    return call->deferred.returned != OOMKIT_RETURNED_NOTHING;
}

static inline int
oomkit_loss_is_eager(const oomkit_call *call)
{
    return call->deferred.returned == OOMKIT_RETURNED_EAGER;
}

static inline int
oomkit_loss_is_rowwise(const oomkit_call *call)
{
    return call->deferred.rowwise;
}

/* The attempt is over. */
static inline void
oomkit_returned_forget(oomkit_call *call)
{
    call->deferred.returned = OOMKIT_RETURNED_NOTHING;
    call->deferred.rowwise = 0;
}

#endif
