/* Arguments taken apart: what flatten.c, layout.c and slice.c share about the nodes. */
#ifndef OOMKIT_TREE_TREE_H
#define OOMKIT_TREE_TREE_H

#include "nodes.h"
#include "../py/options.h"

enum { /* oomkit_node.split */
       OOMKIT_SPLIT_WHOLE = 0,
       OOMKIT_SPLIT_NARROW = 1, /* a tensor: narrowed */
       OOMKIT_SPLIT_ITEMS = 2,  /* a list or tuple of per-sample objects: sliced */
       OOMKIT_SPLIT_CALL = 3,   /* an argument that split= slices */
       OOMKIT_SPLIT_CUSTOM = 4  /* what the splitter of its type slices */
};

/* What a site knows about one argument, from calls that were not split. */
typedef struct oomkit_seen {
    PyObject *keyword;   /* owned, NULL for a positional argument */
    Py_ssize_t position; /* of a positional argument, else -1 */
    int64_t size;   /* dimension `dim` of its first tensor, at the last call that was
                       learned from; -1 */
    int64_t length; /* of the argument itself when it is a list or tuple, -1 */
    uint8_t size_stays;   /* stayed the same while the rows changed */
    uint8_t size_other;   /* was not the number of rows once: so it never is */
    uint8_t size_wanders; /* changed while the rows did not */
    uint8_t size_moves;   /* changed with the rows, and was the rows */
    uint8_t length_stays; /* stayed the same while the rows changed */
    uint8_t length_moves; /* was the number of rows, before and after */
} oomkit_seen;

struct oomkit_batch_site {
    int64_t rows;   /* at the last call that was learned from */
    uint64_t sizes; /* likewise: hash of all rows */
    Py_ssize_t count, room;
    oomkit_seen *seen;
};

/* Index of the node after the subtree that starts at `index`. */
Py_ssize_t
oomkit_node_end(const oomkit_batch *batch, Py_ssize_t index);

/* Is there a tensor in the subtree: a leaf that was opened? */
int
oomkit_node_holds_tensor(const oomkit_batch *batch, Py_ssize_t index);

/* Is any leaf of the subtree split? */
int
oomkit_node_is_split(const oomkit_batch *batch, Py_ssize_t index);

/* The name of argument number `argument`; "*args" beyond the names. New reference. */
PyObject *
oomkit_argument_name(const oomkit_batch *batch, PyObject *names, Py_ssize_t argument);

/* The node as the caller would write it: `batch['x'][0]`. New reference or NULL. Runs
 * repr() of dictionary keys. */
PyObject *
oomkit_node_path(const oomkit_batch *batch, PyObject *names, Py_ssize_t index);

/* Named tuples: a tuple type that has `_fields` of its own or inherited. */
int
oomkit_type_is_named_tuple(const oomkit_state *st, PyTypeObject *type);

/* Made by @dataclass, or comes from such a class. */
int
oomkit_type_is_data_class(const oomkit_state *st, PyTypeObject *type);

/* A tensor, an array, or what a registered splitter slices. */
int
oomkit_node_is_cut(const oomkit_node *node);

/* Does the type or one that it comes from define the (interned) name? */
int
oomkit_type_defines(PyTypeObject *type, PyObject *name);

/* --- objects.c, numpy_arrays.c, splitters.c --- */

/* The object of an OOMKIT_NODE_OBJECT at `at`, made anew with these values of its
 * children. New reference or NULL. Runs no Python code. */
PyObject *
oomkit_object_build(oomkit_state *st, const oomkit_batch *batch, Py_ssize_t at,
                    PyObject *const *values);

/* Does the array hold other values than at capture? 1, 0 or -1. */
int
oomkit_array_moved(oomkit_state *st, const oomkit_node *node);

/* Rows from `start` to `stop` in dimension `dim`: a view. New reference or NULL. */
PyObject *
oomkit_array_slice(oomkit_state *st, PyObject *array, int64_t dim, PyObject *start,
                   int64_t stop);

/* What was registered for the type or one that it comes from: (split, size, join).
 * Borrowed from the state, NULL when nothing was. */
PyObject *
oomkit_splitter_of(const oomkit_state *st, PyTypeObject *type);

/* The number of rows of `value`. 0; 1 when that cannot be known (no size= and no
 * len()); -1 with an exception of the user's function, which has a note. */
int
oomkit_splitter_rows(oomkit_state *st, PyObject *value, int64_t *rows);

/* Rows start .. start + length of `value`, checked. New reference or NULL. */
PyObject *
oomkit_splitter_cut(oomkit_state *st, PyObject *value, int64_t start, int64_t length);

/* --- slice.c --- */

/* aliases.c: sets `same` of the nodes. 0 or -1. */
int
oomkit_node_twins(const oomkit_options *options, oomkit_batch *batch);

/* --- leaf_layout.c: the nodes as samples --- */

/* --- dims.c --- */
/* Dim= as it was given (borrowed, or NULL). 0, or -1 with TypeError or
 * ValueError. */
int
oomkit_options_dim(PyObject *given, oomkit_options *options);
/* Dimension of the samples of one argument. INT64_MIN with an exception. */
int64_t
oomkit_argument_dim(const oomkit_options *options, const oomkit_batch *batch,
                    Py_ssize_t argument);

/* --- flatten.c --- */
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
void
oomkit_batch_release(oomkit_batch *batch);
/* Moves a tree, whose inline nodes nothing may point to from outside; `from` is empty
 * afterwards. `args` (borrowed) are the arguments where they live now. */
void
oomkit_batch_move(oomkit_batch *to, oomkit_batch *from, PyObject *const *args);

/* --- slice.c --- */
/* A tuple or named tuple of the type of `like`. Steals `list`; new reference or NULL.
 */
PyObject *
oomkit_tuple_like(PyObject *like, PyObject *list);

#endif
