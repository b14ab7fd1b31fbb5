/* One protected call: everything that belongs to it, from entry to return. */
#ifndef OOMKIT_PYTHON_CALL_H
#define OOMKIT_PYTHON_CALL_H

#include "device.h"
#include "options.h"
#include "participants.h"
#include "records.h"
#include "split.h"
#include "tensor.h"
#include "../core/plan.h"
#include "../core/status.h"

/* --- gradients.c --- */
typedef struct oomkit_grads {
    oomkit_grad_mark *marks; /* one per parameter; weak holds of the bridge */
    PyObject **held;         /* without a bridge: owned weak references (or None) */
    uint32_t *held_versions; /* without a bridge */
    oomkit_grad_mark *after; /* after a backward of the last micro-batch, or NULL */
    PyObject **copies;       /* owned host copies of the gradients at entry, or NULL */
    PyObject **parked;       /* owned gradients of finished micro-batches, or NULL */
    PyObject **aside; /* owned gradients that hold the whole contribution, or NULL */
    oomkit_grad_mark *began;  /* split: marks when the micro-batch began, or NULL */
    uint32_t *began_versions; /* the same without a bridge: version + 1, 0 for none */
    PyObject *
        *entry;   /* owned: the caller's gradients, put away while ours accumulate */
    int stashing; /* what accumulates is for a stash: .grad stays the caller's */
    int away;     /* entry holds them now */
    int force_copies; /* whatever the options say */
    int no_aside;     /* nothing may be set aside in this call */
    int marked;       /* marks are taken in this attempt */
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
} oomkit_buffer;

typedef struct oomkit_buffers {
    oomkit_buffer *items;
    Py_ssize_t count, room;
    int all_copied; /* first call of the site */
} oomkit_buffers;

/* --- rng.c --- */
typedef struct oomkit_rng {
    PyObject *cpu_state;    /* owned tensor, or NULL */
    PyObject *others;       /* owned list of (generator, state...), or NULL */
    PyObject *random_state; /* owned, or NULL */
    PyObject *numpy_state;  /* owned, or NULL */
} oomkit_rng;

/* --- optimizers.c --- */
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
    oomkit_state_item *items; /* parameters and state values */
    Py_ssize_t count, room;
    PyObject **copies; /* owned host copies (optimizer_safety="copy"), or NULL */
} oomkit_optimizer_mark;

/* --- intercept.c --- */
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

struct oomkit_step;
struct oomkit_pending;

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
    int forced;        /* slices given by testing.force_slices */
    uint64_t signature;
    int has_signature;
    uint64_t number; /* of the call at its site */

    /* a loss that is returned */
    oomkit_returned returned;
    double assumed; /* gradient at the loss that the stash is computed with */
    struct oomkit_pending *replayed; /* borrowed: the call that this one runs again */
    PyObject *inputs;                /* borrowed: inputs= of the caller's backward */
    int rowwise;                     /* its gradient has a row per sample: no weights */

    /* the attempt */
    oomkit_grads grads;
    oomkit_buffers buffers;
    oomkit_rng rng;
    uint32_t *param_versions; /* at entry of the attempt, or NULL */
    uint64_t *param_samples;  /* while split: hashes of 64 values each, or NULL */
    oomkit_optimizer_mark *optimizers;
    int optimizer_count, optimizer_room;
    oomkit_interception *interceptions;
    int interception_count, interception_room;
    PyObject *epochs;       /* owned: list of (scheduler, last_epoch) while split */
    PyObject *groups_after; /* owned: list of (optimizer, values after micro-batch 1) */
    PyObject *strangers;    /* owned: weak references to leaves that are to take part */
    PyObject *step_leaves;  /* owned: list of (weak reference, had a gradient) */
    int restart;            /* this attempt is given up to take them in */
    int restarts;           /* done in this call */
    int may_hold;           /* a backward over the whole batch ran before the replay */
    uint64_t *moving_marks; /* of buffers after the first micro-batch, or NULL */
    PyObject *plain_leaves; /* owned: weak references to leaves of a failed graph */
    int split_intercepted;  /* what only a split call intercepts is in place */
    int syncs;              /* accelerator.accumulate() entered in this micro-batch */
    PyObject *cleared;      /* owned: where zero_grad() ran after a backward of this
                               micro-batch, or NULL */
    PyObject
        *forward_hook; /* owned: handle of torch's hook while a forward is refused */
    PyObject *updated; /* owned: set of addresses of parameters whose update was due */
    PyObject *updated_where; /* owned: the line of the first update */
    int intercept_depth;
    int step_failed;    /* an optimizer's step ran out of memory and was not finished */
    int stranger_steps; /* steps of unknown optimizers that have begun and not ended */
    PyObject *scaler_marks; /* owned: list of (scaler, saved per-optimizer states) */
    PyObject
        *copied_owners;   /* owned: list of (object, state_dict) for "copy", or NULL */
    PyObject *user_marks; /* owned: list of (participant, saved state), or NULL */
    int backward_depth;
    int backwards;       /* outermost ones finished in this micro-batch */
    int backward_failed; /* the exception came out of a backward */
    int committed;       /* a scheduler or scaler moved on: nothing can be taken back */
    int raised;          /* an interceptor raised on purpose: not to be retried */
    const char *refusal; /* why this call must not be retried, or NULL */
    oomkit_join join;

    /* what happened */
    oomkit_attempt *attempts;
    Py_ssize_t attempt_count, attempt_room;
    uint32_t ooms;
    uint64_t started_ns, lost_ns, attempt_started_ns;
    uint64_t requested_bytes;
    uint64_t peak_allocated_bytes, peak_reserved_bytes; /* of windows already closed */
    uint64_t baseline_bytes;
    int phase_before;
    uint32_t outcome; /* of the record */

    /* What follows is not zeroed at entry: see oomkit_engine_call. */
    oomkit_batch batch;      /* its inline nodes are written before they are read */
    oomkit_course course[2]; /* of the first micro-batch, and of the present one */
} oomkit_call;

/* The call in progress on this thread, or NULL. */
oomkit_call *
oomkit_call_current(void);
void
oomkit_call_set_current(oomkit_call *call);

/* gradients.c. restore: 0 restored; 1 refused, *why tells (static text); -1 error. */
int
oomkit_grads_mark(oomkit_call *call);
int
oomkit_grads_park(oomkit_call *call);
int
oomkit_grads_unpark(oomkit_call *call);
int
oomkit_grads_settle(oomkit_call *call);
int
oomkit_grads_put_away(oomkit_call *call);
int
oomkit_grads_bring_back(oomkit_call *call);
void
oomkit_grads_abandon(oomkit_call *call);
int
oomkit_grads_restore(oomkit_call *call, const char **why, PyObject **which);
void
oomkit_grads_end_attempt(oomkit_call *call);
int
oomkit_grads_grow(oomkit_call *call, Py_ssize_t old);
void
oomkit_grads_release(oomkit_call *call);

/* escaped.c: gradients that no backward of ours explains */
int
oomkit_grads_begin_micro(oomkit_call *call);
void
oomkit_grads_end_micro(oomkit_call *call);
int
oomkit_grads_refuse_unexpected(oomkit_call *call);

/* nested.c: backwards inside backwards */
int
oomkit_nested_any(void);
int
oomkit_nested_refuse(oomkit_state *st, oomkit_call *call);
void *
oomkit_nested_enter(const oomkit_call *call);
void
oomkit_nested_leave(const oomkit_call *call, void *outer);

/* buffers.c */
int
oomkit_buffers_mark(oomkit_call *call);
int
oomkit_buffers_restore(oomkit_call *call, PyObject **which);
int
oomkit_buffers_moved(oomkit_call *call);
void
oomkit_buffers_learn(oomkit_call *call);
void
oomkit_buffers_release(oomkit_call *call);
void
oomkit_buffers_free(oomkit_buffers *buffers);
int
oomkit_buffers_say_norm(oomkit_call *call);

/* moving.c */
int
oomkit_buffers_say_moving(oomkit_call *call);

/* rng.c */
int
oomkit_rng_mark(oomkit_call *call);
int
oomkit_rng_restore(oomkit_call *call);
int
oomkit_rng_moved(oomkit_call *call);
void
oomkit_rng_free(oomkit_rng *rng);
void
oomkit_rng_release(oomkit_call *call);

/* optimizers.c. moved: 1 when a parameter or a state tensor changed in place. */
int
oomkit_optimizer_mark_take(oomkit_call *call, PyObject *optimizer, int *index);
int
oomkit_optimizer_moved(oomkit_call *call, int index);
int
oomkit_optimizer_undo(oomkit_call *call, int index);
int
oomkit_optimizer_copy(oomkit_call *call, int index);
int
oomkit_optimizer_restore_copy(oomkit_call *call, int index);
int
oomkit_optimizer_is_foreach(oomkit_call *call, int index);
int
oomkit_optimizers_any_moved(oomkit_call *call);
void
oomkit_optimizers_release(oomkit_call *call);

/* intercept.c */
int
oomkit_intercept_install(oomkit_call *call);
void
oomkit_intercept_remove(oomkit_call *call);
int
oomkit_intercept_split(oomkit_call *call);
int
oomkit_intercept_zero_grad(oomkit_call *call, Py_ssize_t r);

/* backward.c */
int
oomkit_backward_install(oomkit_state *st);
int
oomkit_backward_drain(oomkit_state *st);
int
oomkit_backward_nesting(void);
int
oomkit_backward_run(oomkit_call *call, PyObject *result);

/* refuse.c: why this call must not be replayed or split (static text), or NULL. 0 or
 * -1. */
int
oomkit_refusal(oomkit_call *call, const char **why);

/* strangers.c */
int
oomkit_strangers_alive(oomkit_call *call);
int
oomkit_strangers_meet(oomkit_call *call, PyObject *roots);
void
oomkit_strangers_note(oomkit_call *call, PyObject *roots);
int
oomkit_strangers_optimizer_begins(PyObject *optimizer);
void
oomkit_strangers_optimizer_ends(void);

/* adopt.c: 1 something was taken in, 0 nothing, -1 with an exception. */
int
oomkit_strangers_adopt(oomkit_call *call, PyObject *leaf, PyObject *all);
int
oomkit_strangers_known(const oomkit_call *call, const PyObject *leaf);
int
oomkit_strangers_kept(oomkit_call *call, PyObject *leaf, PyObject *ours);
PyObject *
oomkit_modules_alive(oomkit_state *st);

/* restart.c */
#define OOMKIT_RESTARTS 4 /* of one call: each one has taken something in */
int
oomkit_strangers_restart(oomkit_call *call);
int
oomkit_strangers_check(oomkit_call *call, PyObject *result);

/* notes.c. 0 or -1. */
int
oomkit_note_error(oomkit_call *call, PyObject *exception);

/* attempt.c: nothing but results came out of this attempt so far, so that finished
 * parts of an evaluation may be kept. */
int
oomkit_attempt_only_results(const oomkit_call *call);

/* course.c. 0, or -1 with SplitError that names both lines. */
int
oomkit_course_note(oomkit_call *call, const void *target, const void *name);
int
oomkit_course_finish(oomkit_call *call);
void
oomkit_course_clear(oomkit_course *course);
PyObject *
oomkit_course_where(void);

/* accelerate.c */
int
oomkit_accelerate_split(oomkit_call *call);
PyObject *
oomkit_accelerator_save(PyObject *accelerator);
int
oomkit_accelerator_restore(PyObject *accelerator, PyObject *saved);

/* forward.c: after an update that was held back, a forward of what it updates. */
int
oomkit_forward_watch(oomkit_call *call, PyObject *target, oomkit_owner_kind kind,
                     PyObject *first);
int
oomkit_forward_begins(PyObject *module);
void
oomkit_forward_release(oomkit_call *call);

/* owners.c: schedulers, scalers and the user's own objects */
int
oomkit_scaler_mark(oomkit_call *call, PyObject *scaler);
int
oomkit_owner_copy(oomkit_call *call, PyObject *owner);
int
oomkit_owners_mark(oomkit_call *call);
/* Appends (object, saved) to a list made when needed. Steals `saved`, which may be NULL
 * with an exception. */
int
oomkit_pairs_add(PyObject **list, PyObject *object, PyObject *saved);
/* groups.c */
PyObject *
oomkit_groups_copy(oomkit_state *st, PyObject *optimizer);
int
oomkit_groups_restore(oomkit_state *st, PyObject *optimizer, PyObject *copies);
int
oomkit_owners_groups_note(oomkit_call *call, PyObject *optimizer);
int
oomkit_owners_epochs_note(oomkit_call *call);
int
oomkit_owners_epochs_moved(oomkit_call *call, PyObject **scheduler);
int
oomkit_tx_groups_moved(oomkit_call *call, PyObject *optimizer);
int
oomkit_grads_note_last(oomkit_call *call);
int
oomkit_grads_changed_since(oomkit_call *call);
int
oomkit_owners_groups_changed(oomkit_call *call, PyObject *optimizer, PyObject **name);
int
oomkit_owners_restore(oomkit_call *call);
int
oomkit_owners_restore_copies(oomkit_call *call);
void
oomkit_owners_release(oomkit_call *call);

/* predict.c: before an optimizer's first step: will its state fit? 0, or -1 with
 * oomkit.OutOfMemory before anything moved. */
int
oomkit_predict_update(oomkit_call *call, PyObject *optimizer);

/* describe.c: words for reports. Each gives a new reference or NULL. */
PyObject *
oomkit_describe_tensor(oomkit_call *call, PyObject *tensor);
PyObject *
oomkit_describe_report(oomkit_call *call);
/* Raises oomkit.OutOfMemory with the report; `reason` (borrowed str) leads the message.
 * NULL always. */
PyObject *
oomkit_give_up(oomkit_call *call, PyObject *reason, int committed);

/* returned.c: the loss of a micro-batch that still needs backward. 0 or -1. */
int
oomkit_returned_micro(oomkit_call *call, PyObject *result);

/* transaction.c: a parameter that moved since entry: 1 and its index, 0, -1. */
int
oomkit_tx_params_moved(oomkit_call *call, Py_ssize_t *which);

/* transaction.c: begin an attempt, take it back, end the call. */
int
oomkit_tx_begin(oomkit_call *call);
int
oomkit_tx_begin_micro(oomkit_call *call);
int
oomkit_tx_sample(oomkit_call *call);
void
oomkit_tx_end_attempt(oomkit_call *call);
/* 0 everything is as at entry; 1 it cannot be: *message (owned str) says what and which
 * line to change; -1 error. */
int
oomkit_tx_restore(oomkit_call *call, PyObject **message);
int
oomkit_tx_committed(oomkit_call *call);
int
oomkit_tx_micro_end(oomkit_call *call);
void
oomkit_tx_end(oomkit_call *call);

/* Should gradients that are there at the first backward be copied? (signature.c) */
int
oomkit_call_wants_copies(oomkit_call *call);

/* A host copy of a tensor outside the budget. New reference or NULL. */
PyObject *
oomkit_host_copy(oomkit_state *st, PyObject *tensor);

/* Turns gradient recording off and gives back how it was (1, 0), or -1. */
int
oomkit_grad_mode_off(oomkit_state *st);
int
oomkit_grad_mode_set(oomkit_state *st, int enabled);

#endif
