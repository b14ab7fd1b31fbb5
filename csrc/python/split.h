/* Finding the batch in a call's arguments, slicing it, and joining results. */
#ifndef OOMKIT_PYTHON_SPLIT_H
#define OOMKIT_PYTHON_SPLIT_H

#include "options.h"

typedef enum {
    OOMKIT_NODE_OTHER = 0, /* passed whole, as it is */
    OOMKIT_NODE_TENSOR,
    OOMKIT_NODE_TUPLE, /* named tuples too */
    OOMKIT_NODE_LIST,
    OOMKIT_NODE_DICT,
    OOMKIT_NODE_OBJECT, /* a subclass of dict, a UserDict, a data class */
    OOMKIT_NODE_ARRAY   /* of numpy */
} oomkit_node_kind;

enum {                            /* oomkit_node.flags */
       OOMKIT_NODE_ATTRIBUTE = 1, /* an attribute of the object that it is in */
       OOMKIT_NODE_SLOT = 2,      /* which lies in a slot */
       OOMKIT_NODE_MIRRORED = 4,  /* an entry that is an attribute as well */
       OOMKIT_NODE_OWN_DICT = 8,  /* `self.__dict__ = self` */
       OOMKIT_NODE_CUSTOM = 16,   /* sliced by what was registered for its type */
       OOMKIT_NODE_STATIC = 32    /* static= names it: gives no rows, passed whole */
};

/* One value of the arguments; containers are followed by their children (pre-order). */
typedef struct oomkit_node {
    PyObject *object;      /* owned */
    PyObject *key;         /* owned: the key in the parent dict, or the name of the
                              attribute, else NULL */
    Py_ssize_t children;   /* direct children of a container */
    int64_t rows;          /* size of dimension `dim` of a tensor or array, -1 if it has
                              none, and inside what a registered splitter slices */
    uint64_t shape_hash;   /* of a tensor: dtype and the other sizes; of a list that was
                              too long or too deep to be opened: its length */
    uint32_t version;      /* of a tensor, at capture; of an array a hash of values */
    int32_t entries;       /* of an object: its first children are those of a mapping */
    int32_t same;          /* set by oomkit_batch_find: an earlier node with the same
                              object, built alike; else -1 */
    uint8_t requires_grad; /* of a tensor, at capture */
    uint8_t kind;          /* oomkit_node_kind */
    uint8_t split;         /* decided by oomkit_batch_find: this leaf is sliced */
    uint8_t flags;
    int8_t device_type, device_index; /* of a tensor */
} oomkit_node;

#define OOMKIT_BATCH_INLINE 12

/* The arguments of one call, taken apart before the function can change them. A tree
 * that is all zero is empty and may be released. */
typedef struct oomkit_batch {
    PyObject *const *args; /* borrowed from the caller: vectorcall layout */
    Py_ssize_t positional; /* number of positional arguments */
    Py_ssize_t total;      /* positional + keyword arguments */
    PyObject *kwnames;     /* borrowed, may be NULL */
    PyObject *names;       /* borrowed from the step: parameter names, may be NULL */
    oomkit_node *nodes;    /* pre-order, argument after argument */
    Py_ssize_t count, room;
    int64_t rows;                  /* B, or -1 before oomkit_batch_find has found it */
    int device_type, device_index; /* of the first tensor; CPU when there is none */
    int searched;
    int empty; /* set by oomkit_batch_find when it refuses a batch for having no rows */
    Py_ssize_t lead; /* node of the leaf that the record takes the rows from, or -1 */
    int views;       /* all rows are a view, too, and not the object itself */
    int twins;       /* some node has `same` */
    uint64_t sizes;  /* hash of the rows of all leaves */
    PyObject *saved; /* owned: restore_batch=True: list of host copies, or NULL */
    int provable;    /* a reading in doubt may be tried: a proof comes before its use */
    PyObject *doubt; /* owned str: why it is, for where that proof fails, or NULL */
    oomkit_node inline_nodes[OOMKIT_BATCH_INLINE];
} oomkit_batch;

/* What a site has learned about its arguments; zeroed at start, freed by clear. Written
 * by oomkit_batch_learn: for each argument position and name, the B and the leading
 * size seen, so that a tensor whose size stays while B changes is passed whole. */
typedef struct oomkit_batch_site oomkit_batch_site;

/* Takes the arguments apart: containers of exact type dict, list, tuple, named tuples,
 * subclasses of dict, UserDict and data classes are opened, tensors and arrays get
 * their marks (version, rows). Cheap: no Python code
 * runs, nothing is allocated through Python while OOMKIT_BATCH_INLINE nodes suffice.
 * `skip` leading positional arguments (a bound self) are left alone; `names` are the
 * parameters' (borrowed until the release, may be NULL). 0, or -1 with MemoryError. */
int
oomkit_batch_capture(oomkit_state *st, const oomkit_options *options,
                     PyObject *const *args, Py_ssize_t positional, PyObject *kwnames,
                     Py_ssize_t skip, PyObject *names, oomkit_batch *batch);

/* Guess of B without deciding roles, for the record of a healthy call: the rows of the
 * first leaf that has some, of the arguments that batch= and static= leave. -1 when
 * there is none. No Python code runs. */
int64_t
oomkit_batch_rows(const oomkit_batch *batch);

/* Hash of dtypes and shapes without the batch dimension. No Python code runs. */
uint64_t
oomkit_batch_signature(const oomkit_batch *batch);

/* Dimension of the samples of one argument. INT64_MIN with an exception. */
int64_t
oomkit_argument_dim(const oomkit_options *options, const oomkit_batch *batch,
                    Py_ssize_t argument);

/* Decides which arguments are the batch and marks their leaves as split. `names` are
 * the function's parameter names (tuple, for batch= / static= and for messages; may be
 * NULL). 1 found (batch->rows set), 0 no batch, -1 with SplitError naming arguments and
 * shapes (disagreement, unknown names). `site` may be NULL. */
int
oomkit_batch_find(oomkit_state *st, const oomkit_options *options,
                  const oomkit_batch_site *site, PyObject *names, oomkit_batch *batch);

/* `text` (stolen, may be NULL with an exception) with what comes nearest to a batch
 * among the arguments: a loader, an object that holds tensors. New reference or NULL.
 */
PyObject *
oomkit_batch_missing(oomkit_state *st, const oomkit_batch *batch, PyObject *text);

/* After a successful healthy call. Never fails (what cannot be noted is not noted). */
void
oomkit_batch_learn(oomkit_batch_site **site, const oomkit_batch *batch);
void
oomkit_batch_site_clear(oomkit_batch_site **site);

/* Has a tensor leaf moved since capture? 0 no; -1 with SplitError that names the
 * argument and says how to change the line (`x = x.div(255)` instead of `x.div_(255)`),
 * or restore_batch=True. With saved copies it restores instead and returns 0. */
int
oomkit_batch_check(oomkit_state *st, oomkit_batch *batch, PyObject *names);

/* restore_batch=True: copies every tensor leaf to the host, outside the budget. */
int
oomkit_batch_save(oomkit_state *st, oomkit_batch *batch);

/* Arguments for rows start .. start + length: containers rebuilt as their own type,
 * split leaves narrowed (views), everything else as it is. vector gets batch->total new
 * references (room for them is the caller's). 0 or -1. */
int
oomkit_batch_build(oomkit_state *st, const oomkit_options *options,
                   const oomkit_batch *batch, int64_t start, int64_t length,
                   PyObject **vector);

/* The arguments that are split, sliced, as weight= gets them: one object when there is
 * one, else a tuple. `vector` is what oomkit_batch_build made. New reference or NULL.
 */
PyObject *
oomkit_batch_argument(const oomkit_batch *batch, PyObject *const *vector);

void
oomkit_batch_release(oomkit_batch *batch);

/* Moves a tree, whose inline nodes nothing may point to from outside; `from` is empty
 * afterwards. `args` (borrowed) are the arguments where they live now. */
void
oomkit_batch_move(oomkit_batch *to, oomkit_batch *from, PyObject *const *args);

/* --- results --- */

struct oomkit_result_site; /* results.h */

typedef struct oomkit_join {
    PyObject *results; /* owned: list of results, tensors detached */
    PyObject *rows;    /* owned: list of int */
    PyObject *weights; /* owned: list of float */
    PyObject *marks;   /* owned: list of dict, see keep.c */
    PyObject *sources; /* owned: list of the leaves that gradients are wanted of, set
                          before joining when `required`, or NULL */
    int required;      /* some tensor in the results required grad */
    struct oomkit_result_site *site; /* borrowed from the step, or NULL */
    int evaluation;     /* nothing needs a gradient: what is returned is all there is */
    int rows_sure;      /* whole calls of the site knew the number of rows as well */
    int one_loss;       /* the loss is one number, of whatever shape */
    Py_ssize_t loss_at; /* of it in a tuple or list, before its graph was dropped */
    int parked; /* gradients were parked between the micro-batches: a scalar that is 0
                   in all but the last (the norm that clip_grad_norm_ returns) is its
                   own, and the loss has been through its backward */
    PyObject *updated; /* owned: list of (was, now) of figures that the real update has
                          changed (learning rates), or NULL */
    int is_sum;        /* the loss is a sum, whatever reduction= says */
    const double *group_weights; /* borrowed from the call: results x groups, for the
                                    losses of a sequence as long as `groups` */
    Py_ssize_t groups;           /* 0 without */
    PyObject *convert; /* borrowed while a result is added: what each tensor is kept as,
                          a callable, or NULL */
} oomkit_join;

/* Keeps a result of a micro-batch: tensors that carry a graph are detached at once, so
 * that nothing of the micro-batch's graph stays alive, and caches of models are dropped
 * (with join= everything that is not a tensor stays). 0 or -1. */
int
oomkit_join_add(oomkit_state *st, const oomkit_options *options, oomkit_join *join,
                PyObject *result, int64_t rows, double weight);

/* A result with convert(tensor) (anything) in place of each tensor, containers made
 * anew; every other value stays. New reference or NULL. */
PyObject *
oomkit_keep_converted(oomkit_state *st, const oomkit_options *options, PyObject *result,
                      PyObject *convert);

/* Drops the results from number `keep` on (roll back). */
int
oomkit_join_truncate(oomkit_join *join, Py_ssize_t keep);

/* The result of the whole batch. Rules: tensors whose dim 0 is the micro-batch's are
 * concatenated in order; a 0-d tensor or a float is the weighted sum with the weights
 * (they sum to 1 for a mean; with reduction sum the loss's are all 1 and other floats
 * get rows/B); integers added, but kept where they are no counts; booleans must agree;
 * equal strings and None kept; lists whose length is the micro-batch's are
 * concatenated; mappings, data classes, tuples, lists and named tuples by element and
 * rebuilt as their own type; anything else must be equal or is an error that names the
 * place and proposes join=. A tensor that required grad comes back requiring grad, by a
 * node that raises when a gradient reaches it; not so the loss while nothing is parked.
 * New reference, or NULL with SplitError. */
PyObject *
oomkit_join_finish(oomkit_state *st, const oomkit_options *options, oomkit_join *join);

void
oomkit_join_clear(oomkit_join *join);

/* The loss in a result: the result itself when it is a tensor, ["loss"] of a mapping,
 * .loss; of a tuple or list the first element, or the only 0-d tensor that requires
 * grad where the first is none: (logits, loss). New reference, or NULL without an
 * exception when there is none, NULL with an exception on failure (check
 * PyErr_Occurred). */
PyObject *
oomkit_result_loss(oomkit_state *st, PyObject *result);

/* The number of that element, 0 where there are none; -1 with an exception. */
Py_ssize_t
oomkit_loss_place(oomkit_state *st, PyObject *result);

/* The same of a result whose tensors have lost their graphs. */
PyObject *
oomkit_result_loss_at(oomkit_state *st, PyObject *result, Py_ssize_t at);

#endif
