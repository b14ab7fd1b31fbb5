/* The decorated step: auto_batch's callable and what its site has learned. */
#ifndef OOMKIT_PYTHON_STEP_H
#define OOMKIT_PYTHON_STEP_H

#include "call.h"
#include "proof.h"
#include "results.h"

#define OOMKIT_SIGNATURES 32
#define OOMKIT_RECORDS 1024

/* What is known about one shape of batch at one site. */
typedef struct oomkit_signature {
    uint64_t hash;
    uint64_t family;  /* of shapes that differ in other dimensions than the batch's */
    double row_bytes; /* of the batch's own tensors; 0 while no OOM was seen */
    uint64_t used;    /* call number of the last use, for giving way */
    oomkit_knowledge known;
    uint64_t peak_bytes; /* allocated at most in a call with the largest micro-batch */
    int64_t peak_rows;   /* that micro-batch */
    uint64_t noted;      /* of what was noted for later runs; 0: nothing */
    int forward_only;    /* the last call that finished ran no backward */
} oomkit_signature;

/* What the calls with a whole batch have done so far. */
typedef struct oomkit_whole_calls {
    uint8_t seen;             /* there was one */
    uint8_t without_backward; /* one ran no backward */
    uint8_t without_update;   /* one stepped no optimizer */
    uint8_t said;             /* that the micro-batches of a call did neither */
} oomkit_whole_calls;

typedef struct oomkit_step {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *func;     /* owned */
    PyObject *dict;     /* owned: attributes, as a function has them */
    PyObject *weakrefs; /* weak references to the step */
    PyObject *names;    /* owned: tuple of parameter names, or NULL */
    oomkit_state *st;   /* borrowed from the module, which the type keeps alive */
    oomkit_options options;
    oomkit_participants *parts; /* counted reference, or NULL before the first call */
    oomkit_batch_site *batch_site;
    oomkit_result_site results;
    oomkit_ring *ring;
    oomkit_signature signatures[OOMKIT_SIGNATURES];
    int signature_count;
    oomkit_loss_site losses;
    oomkit_proven proven[OOMKIT_PROVEN];
    uint32_t proven_next; /* the place that gives way */
    PyObject
        *proven_text;   /* owned: str, them for another run (proof_recall.c), or NULL */
    PyObject *recalled; /* owned: list of str, proofs of earlier runs, or NULL */
    oomkit_whole_calls whole;
    uint64_t calls;
    int updates; /* optimizer steps in a finished whole call; -1 while unknown */
    PyObject
        *last_gradient; /* owned: what last reached a returned scalar loss, or NULL */
    uint64_t gradient_bytes;   /* of all parameters, summed at the last OOM; 0 before */
    uint64_t largest_gradient; /* bytes of the largest of them */
    int drops_gradients;       /* 1 those at entry are dropped, -1 kept, 0 never seen */
    uint64_t param_count, param_bytes; /* of them at that time */
    oomkit_device device;
    int surveyed;          /* those figures are there */
    uint64_t surveyed_at;  /* in which call they were taken */
    uint64_t device_bytes; /* free and ours on the device then, or OOMKIT_UNKNOWN */
    double last_factor;    /* the same over the scaler's scale; 0 while unknown */
    int half;        /* a returned loss was computed with fp16 somewhere on the way */
    int least_rows;  /* of a micro-batch: with fewer it has raised an error, or 0 */
    int even_rows;   /* the same with an odd number */
    int single_loss; /* a returned loss of several rows had one element in dimensions:
                        2, had not: 1, 0 while unknown */
    const PyTypeObject *plain_node; /* borrowed, compared only: type of a node that made
                                       a returned loss which was no view */
    int half_said;                  /* fp16 with a scaler was looked for and said */
    int hooks_said;                 /* the warning about hooks on gradients was given */
    struct oomkit_plain_site *plain; /* places that its code stores to, or NULL */
    int plain_looked;                /* for them: once, or (2) again after a failure */
    int effects_said;     /* what the step changes besides was looked at and said */
    int seen_oom;         /* sizes may be remembered: look the signature up at entry */
    int recall;           /* the next call is to look for what an earlier run knew */
    PyObject *origin;     /* owned: tuple that says where a checkpoint's sizes are from,
                             until then, or NULL */
    PyObject *memory_key; /* owned: what notes for later runs go by, or NULL */
    Py_ssize_t skip;      /* leading arguments that are a method's own object */
    int is_module;        /* func is a module: attributes are set on it */
    int is_forward;       /* a function of the name forward: see bound_type.c */
    PyObject *given;      /* owned: dict of the options but for the participants */
    /* instances.c: what is known about a method is known for one object of its class */
    PyObject *owner;            /* owned: weak reference to that object, or NULL */
    PyObject *instances;        /* owned: dict of address to the steps of others */
    struct oomkit_step *parent; /* owned: the step that has this one in there */
    PyObject *loop_of; /* owned: weak reference to what a loop's parts were found
                          for (of a method its object), or NULL */
    const void
        *loop_function; /* borrowed address: of a method its function; compared */
    struct oomkit_step *recent; /* borrowed: the step itself, or one in instances */
} oomkit_step;

#define step_CAST(op) ((oomkit_step *)(op))

/* step_make.c: `func` decorated with the options of `kwargs` (borrowed, may be NULL).
 * New reference or NULL. */
PyObject *
oomkit_step_make(oomkit_state *st, PyObject *func, PyObject *kwargs);

/* step_copy.c: the options as keyword arguments, participants included; those that
 * `memo` (borrowed, may be NULL) has a copy of are that copy. New dict or NULL. */
PyObject *
oomkit_step_options(const oomkit_step *step, PyObject *memo);
PyObject *
oomkit_step_reduce(PyObject *op, PyObject *ignored);
PyObject *
oomkit_step_copy(PyObject *op, PyObject *ignored);
PyObject *
oomkit_step_deepcopy(PyObject *op, PyObject *memo);

/* instances.c: the step that knows about `object` (borrowed). Borrowed from `step`, or
 * NULL with an exception. */
oomkit_step *
oomkit_step_of_instance(oomkit_step *step, PyObject *object);
void
oomkit_step_drop_instances(oomkit_step *step);

/* The same; as good as free for the object of the last call. */
static inline oomkit_step *
oomkit_step_for(oomkit_step *step, PyObject *object)
{
    oomkit_step *recent = step->recent;
    if (recent->owner != NULL && PyWeakref_GET_OBJECT(recent->owner) == object) {
        return recent;
    }
    return oomkit_step_of_instance(step, object);
}

/* bound_type.c */
PyObject *
oomkit_bound_new(oomkit_state *st, PyObject *step, PyObject *object);
PyObject *
oomkit_bound_step(PyObject *op); /* borrowed */

static inline int
oomkit_step_check(const oomkit_state *st, const PyObject *object)
{
    return Py_TYPE(object) == (PyTypeObject *)st->step_type ||
           Py_TYPE(object) == (PyTypeObject *)st->step_object_type;
}

/* engine.c: the protected call. */
PyObject *
oomkit_engine_call(PyObject *op, PyObject *const *args, size_t nargsf,
                   PyObject *kwnames);

/* recover.c: from a failed attempt (the exception is in flight) to the result of a
 * replay, or NULL with an exception. Also entered without an exception when the plan
 * splits from the start. */
PyObject *
oomkit_recover(oomkit_call *call, int failed);

/* passing.c: an error that is not ours to recover from. While the call is split, and
 * for a KeyboardInterrupt, the attempt is taken back first, so that no stash and no
 * half-done accumulation is left; the error keeps its traceback and gets a note. Steals
 * `exception`. -1 always. */
int
oomkit_recover_pass(oomkit_call *call, PyObject *exception);
void
oomkit_pass_abandon(oomkit_call *call, PyObject *exception);
/* Notes on an error (borrowed, not in flight) with the tensors that sizes may be wrong
 * of. Keeps no exception. */
void
oomkit_pass_tensors(oomkit_call *call, PyObject *exception);

/* attempt.c: one try of the present plan, split or whole. */
PyObject *
oomkit_attempt_run(oomkit_call *call);
int
oomkit_attempt_slices(oomkit_call *call);

/* recover.c. Plain values of the failure, before its exception (borrowed) goes. 0 or
 * -1.
 */
int
oomkit_recover_note(oomkit_call *call, PyObject *exception);
/* Clears what still holds memory of the failed attempt: the autocast cache, cycles when
 * more is allocated than before it, and the allocator's cache once. 0 or -1. */
int
oomkit_recover_reclaim(oomkit_call *call, uint64_t baseline_bytes);

/* At entry of an attempt: a buffer (borrowed) that requires grad takes part as a leaf.
 * 0 or -1. */
int
oomkit_restart_with_buffer(oomkit_call *call, PyObject *buffer);

/* nothing.c: before a backward from `root` (borrowed, NULL for several) of a split call
 * and after it. 0, or -1 with SplitError: it was of a mean over nothing. */
void
oomkit_nothing_begin(oomkit_call *call, PyObject *root);
int
oomkit_nothing_end(oomkit_call *call);
/* losses.c */
int
oomkit_loss_is_nan(oomkit_state *st, PyObject *root, int32_t dtype);

/* buffer_leaves.c: a buffer has been marked. 0 or -1. */
int
oomkit_buffer_leaf(oomkit_call *call, oomkit_buffer *item,
                   const oomkit_tensor_facts *facts);
/* Is parameter number `which` a buffer? It may move in a forward. */
int
oomkit_buffers_have(const oomkit_call *call, Py_ssize_t which);
/* A tensor (borrowed) that this attempt has given its first gradient, as a buffer that
 * neither required grad at entry nor had one: it goes. 1, or 0 it is none. */
int
oomkit_buffers_bare_again(oomkit_call *call, PyObject *tensor);

/* recover.c: parts of it for a call that is run again without a failure of its own. */
int
oomkit_recover_roll_back(oomkit_call *call);

/* takeback.c: "the state is as if the step had not begun", and what is not. */
const char *
oomkit_state_as_before(const oomkit_call *call);

/* takeback.c: an error that is to pass takes the call back with it; what cannot be
 * taken back is a note on it. */
void
oomkit_recover_undo(oomkit_call *call);
int
oomkit_recover_batch(oomkit_call *call);

/* replan.c: the next plan into call->plan and its slices, after a failure of slices of
 * `failed_rows` rows, `failed_count` of them; with `keep` the finished ones stay. 0, or
 * -1 with oomkit.OutOfMemory. The line that says it, and the user's hook. */
int
oomkit_replan(oomkit_call *call, int keep, int64_t failed_rows, int64_t failed_count);
int
oomkit_replan_say(oomkit_call *call, int64_t old_rows, int64_t old_count);
/* Nothing smaller than `micro_batch` rows is allowed: oomkit.OutOfMemory. -1 always. */
int
oomkit_replan_exhausted(oomkit_call *call, int64_t micro_batch);
/* A plan that was not the last call's, and that no failure of this one led to: one
 * line. 0 or -1. */
int
oomkit_plan_say_begin(oomkit_call *call, const oomkit_knowledge *known);
int
oomkit_plan_say(oomkit_call *call, const char *level, int64_t old_rows,
                int64_t old_count);
int
oomkit_recover_split(oomkit_call *call);

/* engine.c. In the process's first protected call: torch's backward is ours. 0 or -1.
 */
int
oomkit_engine_install(oomkit_state *st);
/* testing.force_slices: exactly these slices, whatever the planner says. 0 or -1. */
int
oomkit_engine_forced(oomkit_call *call);
void
oomkit_call_free(oomkit_call *call);
void
oomkit_call_merge_window(oomkit_call *call);
void
oomkit_call_record(const oomkit_call *call, oomkit_record *record);

/* signature.c */
oomkit_signature *
oomkit_signature_get(oomkit_call *call, int create);
/* The key of a shape under these modes; never 0 in practice. */
uint64_t
oomkit_signature_of(const oomkit_call *call, const oomkit_batch *batch, int autocast,
                    int recording);
/* A hash of training or evaluation, autocast and gradient recording. */
uint64_t
oomkit_signature_modes(const oomkit_call *call);
/* What the planner is to know; *known is borrowed from the step. */
void
oomkit_signature_request(oomkit_call *call, oomkit_plan_request *request,
                         const oomkit_knowledge **known);
/* The call is done, with this largest micro-batch. */
void
oomkit_signature_succeeded(oomkit_call *call, int64_t micro_batch, uint64_t peak_bytes);
/* The micro-batch at call->slice_index has failed; without slices the whole batch, of
 * `micro_batch` rows. */
void
oomkit_signature_failed(oomkit_call *call, int64_t micro_batch);
void
oomkit_signature_forget(oomkit_call *call);
/* What predictions depend on besides peaks: gradients, the room on the device. Asks the
 * driver: for failures and first calls. Never fails. */
void
oomkit_signature_survey(oomkit_call *call);

/* recall.c: in a step's first call, before its plan. 0 or -1. Runs Python code. */
int
oomkit_recall(oomkit_call *call);
/* After a call that worked, for a step that remembers: a note for later runs if it has
 * changed what is known. Never fails. Runs Python code. */
void
oomkit_recall_note(oomkit_call *call, oomkit_signature *entry);

/* options.c: fills *options from keyword arguments. 0 or -1 with TypeError/ValueError.
 */
int
oomkit_options_parse(oomkit_state *st, PyObject *kwargs, oomkit_options *options);
void
oomkit_options_clear(oomkit_options *options);
int
oomkit_options_traverse(oomkit_options *options, visitproc visit, void *arg);

#endif
