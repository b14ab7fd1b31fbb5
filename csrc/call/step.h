/* The decorated step: auto_batch's callable and what its site has learned. */
#ifndef OOMKIT_CALL_STEP_H
#define OOMKIT_CALL_STEP_H

#include "events.h"
#include "proven.h"
#include "../records/history.h"
#include "../core/knowledge.h"

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
    int64_t apart_rows;  /* most that ended well with an update behind another one */
    int forward_only;    /* the last call that finished ran no backward */
} oomkit_signature;

/* What the calls with a whole batch have done so far. */
typedef struct oomkit_whole_calls {
    uint8_t seen;             /* there was one */
    uint8_t without_backward; /* one ran no backward */
    uint8_t without_update;   /* one stepped no optimizer */
} oomkit_whole_calls;

/* Does a backward of the step begin behind an update of it? Whole calls show it. */
typedef enum oomkit_apart {
    OOMKIT_APART_UNKNOWN, /* no call has stepped all optimizers so far */
    OOMKIT_APART_NO,
    OOMKIT_APART_YES
} oomkit_apart;

/* What is said once of a step. */
enum {
    OOMKIT_SAID_RUNGS = (1 << 6) - 1, /* a bit for each rung of the ladder */
    OOMKIT_SAID_FALL = 1 << 6,        /* a smaller plan, at WARNING */
    OOMKIT_SAID_WHOLE_ONLY = 1 << 7,  /* its split was refused */
    OOMKIT_SAID_NEITHER = 1 << 8,     /* no backward or update in a split call */
    OOMKIT_SAID_HALF = 1 << 9,        /* fp16 with a scaler was looked for */
    OOMKIT_SAID_HOOKS = 1 << 10,      /* hooks on gradients */
    OOMKIT_SAID_EFFECTS = 1 << 11,    /* what it changes besides was looked at */
    OOMKIT_SAID_AVERAGED = 1 << 12,   /* one of `averaged` */
    OOMKIT_SAID_UNGUARDED = 1 << 13   /* of a loop: its body has no guard */
};

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
    oomkit_history *history; /* owned, of a step with a parent borrowed from it */
    oomkit_signature signatures[OOMKIT_SIGNATURES];
    int signature_count;
    oomkit_loss_site losses;
    oomkit_proven proven[OOMKIT_PROVEN];
    uint32_t proven_next; /* the place that gives way */
    oomkit_whole_calls whole;
    uint64_t calls;
    oomkit_options *careful; /* owned memory: the options of calls that keep copies of
                                what their updates change, or NULL */
    oomkit_apart updates_apart;
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
    int whole_only;  /* a split was refused: whole batches while some rung has room */
    int single_loss; /* a returned loss of several rows had one element in dimensions:
                        2, had not: 1, 0 while unknown */
    const PyTypeObject *plain_node; /* borrowed, compared only: type of a node that made
                                       a returned loss which was no view */
    unsigned said;                  /* OOMKIT_SAID_... */
    oomkit_plain_found plain;
    PyObject *averaged; /* owned: dict of addresses to weak references, of parameters
                           that each micro-batch moves alike, or NULL */
    PyObject
        *alike; /* owned: dict of places to what is known of them (alike.c), or NULL */
    PyObject *left_out;   /* owned: modules that cannot be computed twice, or NULL */
    int room_for_state;   /* calls in a row that had room for state on the host */
    int seen_oom;         /* sizes may be remembered: look the signature up at entry */
    int recall;           /* the next call is to look for what an earlier run knew */
    PyObject *origin;     /* owned: tuple that says where a checkpoint's sizes are from,
                             until then, or NULL */
    PyObject *memory_key; /* owned: what notes for later runs go by, or NULL */
    Py_ssize_t skip;      /* leading arguments that are a method's own object */
    int is_module;        /* func is a module: attributes are set on it */
    int is_forward;       /* a function of the name forward: see bound_type.c */
    PyObject *given;      /* owned: dict of the options but for the participants */
    /* per_object.c: what is known about a method is known for one object of its class
     */
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

static inline int
oomkit_has_said(const oomkit_step *step, unsigned what)
{
    return (step->said & what) != 0;
}

/* 1 the first time. */
static inline int
oomkit_say_once(oomkit_step *step, unsigned what)
{
    const int first = !oomkit_has_said(step, what);

    step->said |= what;
    return first;
}

/* The step that knows about `object` (borrowed). Borrowed from `step`, or NULL with an
 * exception. As good as free for the object of the last call. */
static inline oomkit_step *
oomkit_step_for(oomkit_step *step, PyObject *object)
{
    oomkit_step *recent = step->recent;
    if (recent->owner != NULL && PyWeakref_GET_OBJECT(recent->owner) == object) {
        return recent;
    }
    return step->st->wiring->step_of_object(step, object);
}

/* The next call reads the code once more: modules take part of which it did not know.
 */
static inline void
oomkit_step_look_again(oomkit_step *step)
{
    step->plain.looked = step->plain.looked > 0;
}

#endif
