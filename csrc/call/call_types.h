/* One protected call: everything that belongs to it, from entry to return. */
#ifndef OOMKIT_CALL_CALL_TYPES_H
#define OOMKIT_CALL_CALL_TYPES_H

#include "loss_types.h"
#include "records.h"
#include "../device/device.h"
#include "../members/members.h"
#include "../result/facts.h"
#include "../tree/nodes.h"
#include "../core/plan.h"
#include "../core/status.h"

/* --- gradients.c --- */
typedef enum {
    OOMKIT_OWED_NOTHING = 0,
    OOMKIT_OWED_LATER, /* what the failed attempt has added is to be taken off */
    OOMKIT_OWED_NOW,   /* it is being computed again, see recompute.c */
    OOMKIT_OWED_DONE   /* and has been taken off */
} oomkit_owed;

typedef struct oomkit_grads {
    oomkit_grad_mark *marks; /* one per parameter; weak holds of the bridge */
    PyObject **held;         /* without a bridge: owned weak references (or None) */
    uint32_t *held_versions; /* without a bridge */
    oomkit_grad_mark *after; /* after a backward of the last micro-batch, or NULL */
    PyObject **copies;       /* owned host copies of the gradients at entry, or NULL */
    PyObject **parked;       /* owned gradients of finished micro-batches, or NULL */
    PyObject **aside; /* owned gradients that hold the whole contribution, or NULL */
    int aside_said;   /* the error that ends the call tells of them */
    oomkit_grad_mark *began;  /* split: marks when the micro-batch began, or NULL */
    uint32_t *began_versions; /* the same without a bridge: version + 1, 0 for none */
    PyObject *
        *entry;   /* owned: the caller's gradients, put away while ours accumulate */
    int stashing; /* what accumulates is for a stash: .grad stays the caller's */
    int apart;    /* ours accumulate beside the caller's and are added last */
    int away;     /* entry holds them now */
    int dropped;  /* the step clears them between its backwards: nothing is added */
    uint64_t engine_runs; /* state->engine_runs when the marks were taken */
    int force_copies;     /* whatever the options say */
    int no_aside;         /* nothing may be set aside in this call */
    oomkit_owed owed;     /* what was set aside holds too much */
    int may_owe;          /* such may be set aside: another attempt follows */
    int marked;           /* marks are taken in this attempt */
    int is_parked;
    int at_entry; /* some parameter had a gradient when the marks were taken */
} oomkit_grads;

/* --- buffers.c --- */
typedef struct oomkit_buffer {
    PyObject *tensor; /* owned until the end of the call */
    PyObject *module; /* owned likewise */
    PyObject *key;    /* owned: name in module._buffers */
    uint32_t version;
    uint8_t copied; /* parts->copies has its value at entry; 2: parts->images has */
    uint8_t bare;   /* it neither required grad at entry nor had a gradient */
} oomkit_buffer;

typedef struct oomkit_buffers {
    oomkit_buffer *items;
    Py_ssize_t count, room;
    int all_copied; /* first call of the site */
} oomkit_buffers;

/* --- random.c --- */
typedef struct oomkit_rng {
    PyObject *cpu_state;    /* owned tensor, or NULL */
    PyObject *cpu_bytes;    /* owned: the same for comparing alone, or NULL */
    PyObject *others;       /* owned list of (generator, state...), or NULL */
    PyObject *random_state; /* owned, or NULL */
    PyObject *numpy_state;  /* owned, or NULL */
    PyObject *streams;      /* owned list of (generator, state), or NULL */
} oomkit_rng;

/* --- optimizer.c --- */
typedef struct oomkit_state_item {
    PyObject *key; /* owned: name in a parameter's state, NULL for a parameter itself */
    PyObject *value; /* owned: tensor or plain value */
    PyObject *dict;  /* owned: the state dict it is in */
    uint32_t version;
    uint8_t is_tensor;
} oomkit_state_item;

typedef struct oomkit_optimizer_mark {
    PyObject *optimizer;      /* owned until the end of the call */
    PyObject *state;          /* owned: optimizer.state */
    PyObject *params_seen;    /* owned: list of keys of state at the mark */
    PyObject *groups;         /* owned: list of shallow copies of param_groups */
    PyObject *attributes;     /* owned: shallow copy of its dictionary */
    oomkit_state_item *items; /* parameters and state values */
    Py_ssize_t count, room;
    PyObject **copies; /* owned host copies (optimizer_safety="copy"), or NULL */
    PyObject *beside;  /* owned: what it keeps elsewhere (keepsake), or NULL */
} oomkit_optimizer_mark;

/* --- method.c --- */
typedef struct oomkit_interception {
    PyObject *target;      /* owned until removed */
    PyObject *dict;        /* owned: the instance dictionary */
    PyObject *name;        /* borrowed from state: "step", "update", "unscale_" */
    PyObject *interceptor; /* owned */
    oomkit_owner_kind kind;
} oomkit_interception;

#define OOMKIT_COURSE 24

/* What a micro-batch did, in order: outermost backwards and intercepted calls. */
typedef struct oomkit_event {
    const void *target; /* borrowed address; NULL for a backward */
    const void *name;   /* borrowed address of the method's interned name */
    PyObject *where;    /* owned: "file:line", or NULL */
} oomkit_event;

typedef struct oomkit_course {
    oomkit_event events[OOMKIT_COURSE];
    int count;
} oomkit_course;

/* scheduler_args.c, parameter_slots.c, parameters.c */
typedef struct oomkit_metric oomkit_metric;
typedef struct oomkit_slot oomkit_slot;
typedef struct oomkit_pristine oomkit_pristine;

typedef struct oomkit_slice {
    int64_t start, length;
} oomkit_slice;

/* How the loss of a call that ran no backward was returned. */
typedef enum {
    OOMKIT_RETURNED_NOTHING = 0,
    OOMKIT_RETURNED_WHOLE,   /* not split: the caller runs the step's own graph */
    OOMKIT_RETURNED_STASH,   /* split, a scalar: its gradients wait in a stash */
    OOMKIT_RETURNED_DEFERRED /* split, a row per sample: run again at the backward */
} oomkit_returned;

/* Why an attempt is begun again with the same plan, or nearly. */
enum {
    OOMKIT_RESTART_STRANGERS = 1, /* to take in tensors that were not known */
    OOMKIT_RESTART_WIDER,         /* the first slice has one row, which is too few */
    OOMKIT_RESTART_PROOF,         /* the step takes a course that no proof has seen */
    OOMKIT_RESTART_OWED           /* recompute.c has what it wanted */
};

/* refused_sizes.c: the step itself raised an error for the size of a micro-batch. */
#define OOMKIT_UNFIT 3 /* so often in one call */

typedef struct oomkit_unfit_sizes {
    int64_t least;              /* rows that another size has at least, or 0 */
    int64_t rows[OOMKIT_UNFIT]; /* of the micro-batches that it was raised in */
    int count;
    int even;       /* other sizes are even */
    int by_step;    /* the last micro-batch was ended by the function itself */
    PyObject *said; /* owned: the last of these errors, or NULL */
} oomkit_unfit_sizes;

struct oomkit_step;
struct oomkit_pending;
struct oomkit_proof;

#define OOMKIT_UNMARKED 2

typedef struct oomkit_call {
    oomkit_state *st;
    struct oomkit_step *step; /* borrowed: the caller of the vectorcall keeps it */
    const oomkit_options *options;
    PyObject *func; /* owned by step */
    PyObject *const *args;
    size_t nargsf;
    PyObject *kwnames;
    oomkit_participants *parts; /* counted reference */
    oomkit_device device;
    oomkit_peak_window window;
    oomkit_peak_window micro; /* of a micro-batch, or of the optimizer behind it */
    int in_optimizer;         /* which of the two */
    oomkit_measured measured; /* of the micro-batches of this attempt */

    /* plan and progress */
    oomkit_plan plan;
    oomkit_plan_reason reason;
    oomkit_slice *slices; /* of this attempt; NULL while the batch is whole */
    int64_t slice_count, slice_room, slice_index;
    double *weights; /* one per slice, NULL while whole */
    int split;       /* more than one slice */
    int is_last;
    int queued;   /* a failed backward has left parts of its graph on this thread */
    int running;  /* the function is being called for a slice */
    int training; /* a backward was seen in this attempt */
    int course_waived; /* the function asked for current() */
    int captured;      /* inside a graph capture: the bare function */
    int forced;        /* slices given by testing.force_slices */
    oomkit_unfit_sizes unfit;
    uint64_t signature;
    int has_signature;
    uint64_t bucket; /* what the caller says tells shapes apart besides, or 0 */
    uint64_t number; /* of the call at its site */
    struct oomkit_proof *proof; /* borrowed: this runs to be compared, or NULL */
    uint64_t proof_key;         /* what proofs of such a call go by; 0: not asked yet */
    uint64_t record;            /* of its record in the ring, once it is there */

    /* a loss that is returned */
    oomkit_returned returned;
    double assumed; /* gradient at the loss that the stash is computed with */
    struct oomkit_pending *replayed; /* borrowed: the call that this one runs again */
    PyObject *inputs;                /* borrowed: inputs= of the caller's backward */
    PyObject *loose; /* borrowed: list of leaves of its graph that are no participants,
                        and had no gradient, or NULL */
    PyObject *compiler; /* owned: what compiles frames, while that is off, or NULL */
    int rowwise;        /* its gradient has a row per sample: no weights */
    int elsewhere; /* a backward of another thread has come to these gradients, ours has
                      not: not to be taken back; OOMKIT_UNMARKED nor marked */

    /* the attempt */
    oomkit_grads grads;
    oomkit_buffers buffers;
    oomkit_rng rng;
    oomkit_thread_modes entry_modes; /* see oomkit_modes_entry */
    int entry_modes_known;
    uint32_t *param_versions; /* at entry of the attempt, and behind them two bytes
                                 for each parameter: see oomkit_tx_params_flags. Or NULL
                               */
    uint64_t *param_samples;  /* while split: hashes of 64 values each, or NULL */
    oomkit_optimizer_mark *optimizers;
    int optimizer_count, optimizer_room;
    oomkit_interception *interceptions;
    int interception_count, interception_room;
    PyObject *epochs;       /* owned: list of (scheduler, last_epoch) while split */
    PyObject *groups_after; /* owned: list of (optimizer, values after micro-batch 1) */
    PyObject *groups_end;   /* owned: the same of optimizers that it did not step */
    oomkit_pristine *pristine; /* parameters as they were, or NULL */
    oomkit_metric *metrics;    /* arguments of schedulers, per micro-batch */
    int metric_count, metric_room;
    oomkit_slot *slots; /* parameters by module and name, while split */
    Py_ssize_t slot_count, slot_room;
    PyObject *scales; /* owned: list of (scaler, scale before its real update()) */
    struct oomkit_plain *plain; /* marks of plain state, or NULL: see plain_state.h */
    PyObject *effects; /* owned: what looks at side effects of micro-batch 1, or NULL */
    PyObject *switches;    /* owned: dict of address to (weak reference to a module, its
                              training flag at entry), or NULL */
    PyObject *strangers;   /* owned: weak references to leaves that are to take part */
    PyObject *step_leaves; /* owned: list of (weak reference, had a gradient) */
    int restart;           /* this attempt is given up: OOMKIT_RESTART_* */
    int widened;           /* so it was to have more than one row in the first slice */
    int restarts;          /* done in this call */
    int whole_tried;       /* as the last way out, after smaller micro-batches */
    int may_hold;          /* a backward over the whole batch ran before the replay */
    PyObject *plain_leaves; /* owned: weak references to leaves of a failed graph */
    int split_intercepted;  /* what only a split call intercepts is in place */
    int parts_moved;      /* finished parts of an evaluation moved more than results */
    int syncs;            /* accelerator.accumulate() entered in this micro-batch */
    PyObject *cleared;    /* owned: where zero_grad() ran after a backward of this
                             micro-batch, or NULL */
    PyObject *cleared_of; /* owned: list of what it was called of, or NULL */
    int discarded;        /* backwards of a micro-batch whose gradients it clears */
    PyObject
        *forward_hook; /* owned: handle of torch's hook while a forward is refused */
    PyObject *updated; /* owned: set of addresses of parameters whose update was due */
    PyObject *updated_where; /* owned: the line of the first update */
    int intercept_depth;
    int closure;     /* an optimizer's step() runs that was handed one, while split */
    int step_failed; /* an optimizer's step ran out of memory and was not finished */
    int stranger_steps; /* steps of unknown optimizers that have begun and not ended */
    int stranger_updates;   /* those that have ended, in this attempt */
    PyObject *scaler_marks; /* owned: list of (scaler, saved per-optimizer states) */
    PyObject
        *copied_owners;   /* owned: list of (object, state_dict) for "copy", or NULL */
    PyObject *user_marks; /* owned: list of (participant, saved state), or NULL */
    PyObject *attributes; /* owned: list of (optimizer, scheduler, its attributes) */
    const PyObject
        *failed_step;   /* borrowed from attributes: whose step() has failed, or NULL */
    int backward_depth; /* backwards of it that are running, one inside another */
    int backwards;      /* outermost ones finished in this micro-batch */
    int backward_failed; /* the exception came out of a backward */
    int updates;         /* optimizer steps that were made in this attempt */
    int params_stuck;    /* parameters changed by the step itself stay changed */
    int committed;       /* a scheduler or scaler moved on: nothing can be taken back */
    int raised;          /* an interceptor raised on purpose: not to be retried */
    const char *refusal; /* why this call must not be retried, or NULL */
    PyObject *refusal_name; /* owned: the hooked parameter it is about, or NULL */
    oomkit_join join;
    oomkit_losses losses;

    /* what happened */
    oomkit_attempt *attempts;
    Py_ssize_t attempt_count, attempt_room;
    uint32_t ooms;
    int forward_only;  /* it has finished, and nothing will accumulate gradients */
    int joining;       /* the results of an evaluation are being put together */
    int join_failures; /* so often there was no memory for that */
    int flushed;       /* a plan was tried again after the cache was emptied */
    uint64_t started_ns, lost_ns, attempt_started_ns;
    uint64_t requested_bytes;
    uint64_t peak_allocated_bytes, peak_reserved_bytes; /* of windows already closed */
    uint64_t baseline_bytes;
    uint64_t entry_gradient_bytes; /* estimate of what lies in it; after an OOM only */
    uint64_t dropped_bytes;        /* what the step dropped of it, see baseline.c */
    int phase_before;
    uint32_t outcome; /* of the record */

    /* What follows is not zeroed at entry: see oomkit_engine_call. */
    oomkit_batch batch;      /* its inline nodes are written before they are read */
    oomkit_course course[2]; /* of the first micro-batch, and of the present one */
} oomkit_call;

#endif
