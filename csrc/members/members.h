/* Who takes part in a step: parameters, modules with buffers, optimizers, schedulers,
 * scalers, generators and the user's own objects. Found once per site, kept by weak
 * reference, checked at every call. */
#ifndef OOMKIT_MEMBERS_MEMBERS_H
#define OOMKIT_MEMBERS_MEMBERS_H

#include "../py/options.h"

typedef struct oomkit_call oomkit_call;

typedef enum {
    OOMKIT_OWNER_OPTIMIZER = 0,
    OOMKIT_OWNER_SCHEDULER,
    OOMKIT_OWNER_SCALER,
    OOMKIT_OWNER_AVERAGED,
    OOMKIT_OWNER_GENERATOR,
    OOMKIT_OWNER_USER,        /* state_dict/load_state_dict or save/restore */
    OOMKIT_OWNER_ACCELERATOR, /* accelerate's: its count of batches */
    OOMKIT_OWNER_PIPELINE     /* a stage of a pipeline over ranks, or its schedule */
} oomkit_owner_kind;

/* Where a participant was found, so that a call can see whether it is still the one. */
typedef struct oomkit_source {
    PyObject *container; /* owned: dict (globals) or cell; NULL for an argument. For an
                            attribute: weak reference to the object that has it */
    PyObject *key;       /* owned: name in the dict or of the attribute; else NULL */
    void *object;        /* borrowed address, only ever compared */
    Py_ssize_t argument; /* position in the call's arguments, -1 otherwise */
    Py_ssize_t item;     /* index in a list or tuple argument, -1 otherwise */
} oomkit_source;

/* Of an optimizer: what its update was seen to need. */
typedef struct oomkit_update_need {
    Py_ssize_t items; /* parameters and state values that the figures are of; 0: none */
    uint64_t roomy;   /* with so many bytes left nobody has to look closer, */
    uint64_t roomy_now; /* nor with these while the same parameters have gradients */
    uint64_t peak;      /* measured above what was there before it; 0: not measured */
    uint64_t key;       /* of the update that it was measured of, or is about to be */
    int failed;         /* it ran out of memory where it was to fit: so many in parts */
    int near;           /* it was to fit, with less to spare than it needs */
    int grads_out;      /* gradients are on the host from the beginning */
    int state_out;      /* state too, in the next one: an earlier run had it there */
    uint64_t went;      /* number of the call that last made it in parts; 0: none */
    Py_ssize_t most;    /* parameters of a part, after one of more had failed; 0: any */
    uint64_t
        slice_bytes; /* what is larger is updated by rows, so many bytes; 0: none */
} oomkit_update_need;

/* A dictionary as it was seen: oomkit_dict_tag(). */
typedef struct oomkit_seen_dict {
    const PyObject *dict; /* borrowed address, only ever compared */
    uint64_t tag;
} oomkit_seen_dict;

/* Of an optimizer, from call to call. */
typedef struct oomkit_kept {
    void *layout;           /* memory without references: see optimizer_mark.c */
    PyObject *groups;       /* owned: its groups as they were, or NULL: groups.c */
    oomkit_seen_dict *seen; /* the groups that these are of */
} oomkit_kept;

typedef struct oomkit_owner {
    PyObject *ref; /* owned: weak reference (a generator has none: a strong one) */
    oomkit_owner_kind kind;
    const PyTypeObject *type; /* borrowed, compared only: its class, */
    unsigned version;         /* tp_version_tag of that, and then: */
    int is_torchs;            /* oomkit_owner_is_torchs() */
    oomkit_update_need need;
    oomkit_kept kept;
} oomkit_owner;

enum {
    OOMKIT_NORM_BATCH = 1, /* normalises by statistics of the batch, where it trains */
    OOMKIT_NORM_SAMPLE     /* by those of each sample, or running ones */
};

enum { OOMKIT_BUFFER_RESTS = 0, OOMKIT_BUFFER_MOVES, OOMKIT_BUFFER_NEW };

typedef struct oomkit_buffered {
    PyObject *ref; /* owned: weak reference to a module that has buffers */
    int is_norm;   /* forward owns its running statistics: OOMKIT_NORM_* */
    int is_late;   /* nothing but its forward has led to it */
} oomkit_buffered;

/* Outlives the list: somebody may keep a weak reference of ours, and its callback. */
typedef struct oomkit_watch {
    struct oomkit_participants *parts; /* NULL once the list is freed */
} oomkit_watch;

/* The bytes of a small buffer as they were at entry. */
typedef struct oomkit_image {
    void *bytes;
    uint64_t size;
} oomkit_image;

#define OOMKIT_ARGUMENT_TYPES 8

/* Counted by hand: the site holds one reference, every call in progress another. Strong
 * references are held to parameters alone, and dropped when one of the modules or
 * optimizers that lead to them dies, so that a deleted model is freed. */
struct oomkit_deferred;

typedef struct oomkit_participants {
    Py_ssize_t refs;
    struct oomkit_deferred *deferred; /* borrowed: losses that wait, the newest first */
    struct oomkit_participants *waiting_next,
        *waiting_previous; /* borrowed: others of which losses wait, in the state */
    int busy; /* calls at work with it now: copies of buffers serve one at a time */
    uint64_t buffers_serial; /* grows when the copies of buffers are taken anew */
    uint64_t generation;     /* st->structure_generation when it was made */
    int dead;                /* somebody died or changed: find anew */
    oomkit_source *sources;
    Py_ssize_t source_count, source_room;
    PyObject **params; /* owned tensors, each once */
    Py_ssize_t param_count, param_room;
    Py_ssize_t adopted_count; /* the last ones, held for a call only */
    PyObject *adopted;        /* owned: list of weak references to leaves that nothing
                                 known leads to, or NULL */
    int some_lazy;            /* some of them had no shape yet when they were found */
    int leaves_die; /* unknown leaves of this step were made in it, and died with it */
    oomkit_buffered *buffered;
    Py_ssize_t buffered_count, buffered_room;
    int some_late; /* some of them came by oomkit_participants_add_late() */
    oomkit_owner *owners;
    Py_ssize_t owner_count, owner_room;
    oomkit_watch *watch; /* what the callbacks of our weak references point to */
    PyObject *capsule;   /* owned: over watch, shared by those callbacks */
    PyObject *roots;   /* owned: list of weak references whose death makes this dead */
    PyObject *seen;    /* owned while searching: set of addresses; NULL otherwise */
    int optimizer_led; /* a parameter was found in an optimizer first */
    PyTypeObject *plain_types[OOMKIT_ARGUMENT_TYPES]; /* borrowed, compared: argument
                                                          types that led to nothing */
    int plain_count;
    int uses_random, uses_numpy; /* the code names these modules */
    PyObject *writes; /* owned: (where, hidden) of a write to parameters that the code
                         shows, None; NULL: not looked for. See parameter_writes.c */
    void *spare_marks,
        *spare_versions;           /* oomkit_spare_take(): of a call's parameters */
    int device_type, device_index; /* of the first parameter that is not on the CPU */
    /* OOMKIT_BUFFER_*, learned by buffers.c; parallel to the flat buffer order */
    uint8_t *moving;
    PyObject **copies;    /* owned tensors or NULL */
    oomkit_image *images; /* bytes of small CPU buffers, which need no tensor */
    Py_ssize_t moving_count;
    int looked_for_accelerators; /* the same for accelerate's Accelerator */
    uint64_t hidden_taken; /* st->hidden_made when those that nothing leads to were
                              taken: see hidden.c */
    int watched, watches; /* a call with this list, and calls with those before it, have
                             seen which modules run: hook/forwards.c */
    int norm_said;        /* the BatchNorm warning was given */
    Py_ssize_t wrapped;   /* how many of them wrap others for several ranks; -1 if none
                             does, 0 before it was asked */
} oomkit_participants;

/* Finds the participants of a function for these arguments. New reference (release with
 * oomkit_participants_release), or NULL with an exception. Runs Python code (attribute
 * look-ups). */
oomkit_participants *
oomkit_participants_find(oomkit_state *st, const oomkit_options *options,
                         PyObject *func, PyObject *const *args, Py_ssize_t positional,
                         Py_ssize_t total);

/* 1 when `parts` is still right for these arguments, else 0. Runs no Python code. */
int
oomkit_participants_valid(oomkit_state *st, const oomkit_participants *parts,
                          PyObject *const *args, Py_ssize_t total);

void
oomkit_participants_release(oomkit_participants *parts);

int
oomkit_participants_traverse(oomkit_participants *parts, visitproc visit, void *arg);

/* The object behind a weak reference, or NULL when it is gone. New reference. */
PyObject *
oomkit_reference_get(PyObject *ref);

/* `EACH_OWNER(one, parts, kinds) { ... one.object ... }`: those of some kinds that are
 * alive, in order, each held while the block runs, which may be left in any way. */
typedef struct oomkit_owner_walk {
    const oomkit_participants *parts;
    unsigned kinds;
    Py_ssize_t next;
    PyObject *object; /* owned */
    oomkit_owner_kind kind;
} oomkit_owner_walk;

#define OWNERS_OF(kind) (1u << (kind))
#define OWNERS_ALL (~0u)

static inline int
oomkit_owner_next(oomkit_owner_walk *walk)
{
    Py_CLEAR(walk->object);
    while (walk->object == NULL && walk->next < walk->parts->owner_count) {
        const oomkit_owner *owner = &walk->parts->owners[walk->next++];
        if (walk->kinds & OWNERS_OF(owner->kind)) {
            walk->object = oomkit_reference_get(owner->ref);
            walk->kind = owner->kind;
        }
    }
    return walk->object != NULL;
}

static inline void
oomkit_owner_end(oomkit_owner_walk *walk)
{
    Py_CLEAR(walk->object);
}

#define EACH_OWNER(walk, of, some)                                                     \
    for (oomkit_owner_walk walk OOMKIT_AT_END(oomkit_owner_end) = {.parts = (of),      \
                                                                   .kinds = (some)};   \
         oomkit_owner_next(&walk);)

/* What is known of an optimizer that takes part, borrowed; NULL where it does not. */
static inline oomkit_owner *
oomkit_optimizer_among(const oomkit_participants *parts, const PyObject *optimizer)
{
    Py_ssize_t i;

    for (i = 0; i < parts->owner_count; i++) {
        oomkit_owner *owner = &parts->owners[i];
        if (owner->kind == OOMKIT_OWNER_OPTIMIZER &&
            PyWeakref_GET_OBJECT(owner->ref) == optimizer) {
            return owner;
        }
    }
    return NULL;
}

static inline oomkit_update_need *
oomkit_update_need_of(const oomkit_participants *parts, const PyObject *optimizer)
{
    oomkit_owner *owner = oomkit_optimizer_among(parts, optimizer);
    return owner == NULL ? NULL : &owner->need;
}

/* Is the class of an optimizer one of torch.optim? Is that of a scheduler, with torch's
 * methods alone? */
int
oomkit_owner_is_torchs(const oomkit_state *st, const oomkit_participants *parts,
                       PyObject *object);

/* --- used between members.c, search.c and still_valid.c --- */

/* Types that are never a participant and hold none; asked first, for they are most. */
static inline int
oomkit_is_plain(PyObject *object)
{
    return object == Py_None || PyBool_Check(object) || PyLong_CheckExact(object) ||
           PyFloat_CheckExact(object) || PyUnicode_CheckExact(object) ||
           PyBytes_CheckExact(object) || PyType_Check(object) ||
           PyCFunction_Check(object);
}

/* While they are searched: 1 when the object was not seen yet, 0 when it was, -1 with
 * an exception. */
int
oomkit_participants_first_time(oomkit_participants *parts, PyObject *object);

int
oomkit_participants_add(oomkit_state *st, oomkit_participants *parts, PyObject *object,
                        int depth);

/* Is it among the owners? */
int
oomkit_participants_have(const oomkit_participants *parts, const PyObject *object);

/* A scheduler or averaged model that was found by other means. 1, or -1. */
int
oomkit_participants_add_hidden(oomkit_participants *parts, PyObject *object,
                               oomkit_owner_kind kind);

/* Addresses of the modules with buffers. New set or NULL. */
PyObject *
oomkit_participants_buffered(const oomkit_participants *parts);

/* Weak references to the modules that the search began with or that came late; what is
 * in these takes part, too. New list or NULL. */
PyObject *
oomkit_participants_modules(const oomkit_participants *parts);

/* A module that was seen to run: its buffers take part, once. 0 or -1. */
int
oomkit_participants_add_late(oomkit_state *st, oomkit_participants *parts,
                             PyObject *module);

/* Those of the list before it, which gives way to this one (or is NULL), take part in
 * it. 0 or -1. */
int
oomkit_participants_inherit(oomkit_state *st, oomkit_participants *parts,
                            const oomkit_participants *before);

/* An object that leads to no parameters: the user's own, given by participants=, or one
 * of accelerate's. 0 or -1. */
int
oomkit_participants_add_owner(oomkit_participants *parts, PyObject *object,
                              oomkit_owner_kind kind);

void
oomkit_participants_let_go(oomkit_participants *parts);

/* --- modules_of.c --- */
/* Every module that there is. New list or NULL. */
PyObject *
oomkit_modules_alive(oomkit_state *st);
/* Those of `all` that have what is `reached` (a set of addresses of parameters, which
 * gets theirs), themselves or in a child, outermost last. New list or NULL. */
PyObject *
oomkit_modules_of(oomkit_state *st, PyObject *reached, PyObject *all);
/* At the end of a search: modules whose parameters an optimizer leads to, and which
 * nothing else leads to. 0 or -1. */
int
oomkit_participants_add_modules(oomkit_state *st, oomkit_participants *parts);
/* A module gets this parameter, or module. 0 or -1. */
int
oomkit_parameter_joins(oomkit_state *st, PyObject *param);

/* --- attributes.c --- */
/* What an object has in its own dictionary under this name, which is asked for none
 * where it has not got one yet. New reference; NULL without an exception when there is
 * nothing, or with one. */
PyObject *
oomkit_own_attribute(PyObject *object, PyObject *name);
/* Sets it past the type's __setattr__ and properties; NULL takes it out. 0 or -1. */
int
oomkit_own_attribute_set(PyObject *object, PyObject *name, PyObject *value);
/* The same for a value. What stood there: new reference; NULL without an exception when
 * there was nothing, or with one, and then it is not set. */
PyObject *
oomkit_own_attribute_swap(PyObject *object, PyObject *name, PyObject *value);
/* Sets it where `was` (not NULL, only compared) stands, and else does nothing. 0 or -1.
 */
int
oomkit_own_attribute_replace(PyObject *object, PyObject *name, const PyObject *was,
                             PyObject *value);
/* All of them: a tuple of names, each with its value behind it. New reference or NULL.
 */
PyObject *
oomkit_own_attributes(PyObject *object);
/* All of them as they are now, for the next two, at the least cost; values of a type
 * that nobody wants (or NULL) may be left out. New reference or NULL. */
PyObject *
oomkit_own_taken(PyObject *object, PyTypeObject *but);
/* As oomkit_own_attributes() has them. New reference or NULL. */
PyObject *
oomkit_own_pairs(PyObject *taken);
/* The value that goes with a name, borrowed; NULL, never with an exception. */
PyObject *
oomkit_own_among(PyObject *taken, PyObject *name);

/* --- norms.c --- */
/* OOMKIT_NORM_* of a module, 0 where it is no normalisation; -1. */
int
oomkit_norm_kind(oomkit_state *st, PyObject *module);
/* 1, 0 or -1. */
int
oomkit_module_is_training(oomkit_state *st, PyObject *module);

/* An object of a class of this name (or derived from it) in accelerate. */
int
oomkit_accelerate_is(PyObject *object, const char *name);
/* Is it a stage or a schedule of torch.distributed.pipelining? */
int
oomkit_pipeline_is(PyObject *object);
/* Which kind of participant an object of accelerate's is, or -1. */
int
oomkit_accelerate_kind(PyObject *object);

#endif
