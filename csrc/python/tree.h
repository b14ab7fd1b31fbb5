/* Arguments taken apart: what capture.c, find.c and split.c share about the nodes. */
#ifndef OOMKIT_PYTHON_TREE_H
#define OOMKIT_PYTHON_TREE_H

#include "split.h"

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

/* The entry of one argument, or NULL. `keyword` is NULL for a positional one. */
const oomkit_seen *
oomkit_site_seen(const oomkit_batch_site *site, Py_ssize_t position, PyObject *keyword);

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

/* A tuple or named tuple of the type of `like`. Steals `list`; new reference or NULL.
 */
PyObject *
oomkit_tuple_like(PyObject *like, PyObject *list);

/* Does the type or one that it comes from define the (interned) name? */
int
oomkit_type_defines(PyTypeObject *type, PyObject *name);

/* Does an object that capture left closed hold a tensor (with `rows` in dimension dim,
 * or any that has it when rows is -1)? Looks into what can be data: subclasses of dict,
 * list and tuple, data classes, UserDict, what has a method to(); with `any_object`
 * into every object's attributes; not into what holds modules. Runs no Python code but
 * attributes of tensor subclasses. 1, 0 or -1. */
int
oomkit_object_holds_tensor(oomkit_state *st, PyObject *object, int64_t dim,
                           int64_t rows, int any_object);

/* The length of a sequence that capture left closed: a deque, a range, a list of one's
 * own type. 1 and *length, 0 for anything else, or -1. */
int
oomkit_closed_length(PyObject *object, Py_ssize_t *length);

/* --- objects.c, arrays.c, splitters.c --- */

/* The object of an OOMKIT_NODE_OBJECT at `at`, made anew with these values of its
 * children. New reference or NULL. Runs no Python code. */
PyObject *
oomkit_object_build(oomkit_state *st, const oomkit_batch *batch, Py_ssize_t at,
                    PyObject *const *values);

/* Does the array hold other values than at capture? 1, 0 or -1. */
int
oomkit_array_moved(oomkit_state *st, const oomkit_node *node);

/* moved.c: has this tensor or array changed since capture? 1, 0 (also for every other
 * node) or -1. */
int
oomkit_node_moved(oomkit_state *st, const oomkit_node *node);

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

/* --- split.c --- */

/* A node with all that is below it, whole, as at capture. New reference or NULL. */
PyObject *
oomkit_node_whole(oomkit_state *st, const oomkit_batch *batch, Py_ssize_t index);

/* twins.c: sets `same` of the nodes. 0 or -1. */
int
oomkit_node_twins(const oomkit_options *options, oomkit_batch *batch);

/* --- reading.c: the nodes as samples --- */

/* Can the subtree be the data of `rows` samples? */
int
oomkit_node_fits(const oomkit_batch *batch, Py_ssize_t index, int64_t rows);

/* A list or tuple whose elements may be samples: each holds a tensor. */
int
oomkit_node_may_be_items(const oomkit_batch *batch, Py_ssize_t index);

/* One of several sequences as long as each other that make up an argument. */
int
oomkit_node_is_zipped(const oomkit_batch *batch, Py_ssize_t index);

/* Samples of one structure in a list: its length is a number of rows. */
int
oomkit_node_is_ragged(const oomkit_batch *batch, Py_ssize_t index);

/* Is every element of the list or tuple a dictionary? */
int
oomkit_node_holds_dicts(const oomkit_batch *batch, Py_ssize_t index);

/* A list of `rows` elements (>= 2) without any tensor. */
int
oomkit_node_is_plain_list(const oomkit_batch *batch, Py_ssize_t index, int64_t rows);

/* The first tensor of the subtree whose size is (equal) or is not `rows`, among those
 * that have the dimension; -1 when there is none. */
Py_ssize_t
oomkit_node_first_tensor(const oomkit_batch *batch, Py_ssize_t index, int64_t rows,
                         int equal);

/* Decides for each leaf of the subtree. `first` is the node of the argument that gave
 * the rows, -1 outside the batch, where lists without tensors are not touched. */
void
oomkit_node_mark(oomkit_batch *batch, Py_ssize_t index, int64_t rows, Py_ssize_t first);

void
oomkit_node_unmark(oomkit_batch *batch, Py_ssize_t index);

#endif
