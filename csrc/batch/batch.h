/* Finding the batch in a call's arguments, slicing it, and joining results. */
#ifndef OOMKIT_BATCH_BATCH_H
#define OOMKIT_BATCH_BATCH_H

#include "arguments.h"
#include "../tree/tree.h"
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
static inline Py_ssize_t
oomkit_node_end(const oomkit_batch *batch, Py_ssize_t index)
{
    return oomkit_tree_end(&batch->tree, index);
}

/* A tensor, an array, or what a registered splitter slices. */
int
oomkit_node_is_cut(const oomkit_node *node);

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

/* The first tensor that has a graph behind it; `batch->count` where none has, -1 with
 * an exception. */
Py_ssize_t
oomkit_node_with_graph(oomkit_state *st, const oomkit_batch *batch);

/* --- numpy_arrays.c --- */

/* Rows, hash of the other sizes and of values of an array. 0 or -1. */
int
oomkit_array_mark(oomkit_state *st, oomkit_node *node, int64_t dim);

/* Does the array hold other values than at capture? 1, 0 or -1. */
int
oomkit_array_moved(oomkit_state *st, const oomkit_node *node);

/* Rows from `start` to `stop` in dimension `dim`: a view. New reference or NULL. */
PyObject *
oomkit_array_slice(oomkit_state *st, PyObject *array, int64_t dim, PyObject *start,
                   int64_t stop);

/* --- slice.c --- */

/* Sets `same` of the nodes. 0 or -1. */
int
oomkit_node_aliases(const oomkit_options *options, oomkit_batch *batch);

/* --- dims.c --- */
/* Dim= as it was given (borrowed, or NULL). 0, or -1 with TypeError or
 * ValueError. */
int
oomkit_options_dim(PyObject *given, oomkit_options *options);
/* Dimension of the samples of one argument. INT64_MIN with an exception. */
int64_t
oomkit_argument_dim(const oomkit_options *options, const oomkit_batch *batch,
                    Py_ssize_t argument);
/* The same of the argument that a node is in. */
int64_t
oomkit_node_dim(const oomkit_options *options, const oomkit_batch *batch,
                Py_ssize_t index);

/* --- capture.c --- */

/* Deeper containers stay closed; longer ones too: they would cost every call. */
#define OOMKIT_CAPTURE_DEPTH 32
#define OOMKIT_CAPTURE_CONTAINER 4096

/* Takes the arguments apart: containers of exact type dict, list, tuple, named tuples,
 * subclasses of dict, UserDict and data classes are opened, tensors and arrays get
 * their marks (version, rows). Cheap: no Python code
 * runs, nothing is allocated through Python while OOMKIT_TREE_INLINE nodes suffice.
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

/* Decides which arguments are the batch and marks their leaves as split. `names` are
 * the function's parameter names (tuple, for batch= / static= and for messages; may be
 * NULL). 1 found (batch->rows set), 0 no batch, -1 with SplitError naming arguments and
 * shapes (disagreement, unknown names). `site` may be NULL. */
int
oomkit_batch_find(oomkit_state *st, const oomkit_options *options,
                  const oomkit_batch_site *site, PyObject *names, oomkit_batch *batch);

/* It cannot be found, or not be cut: every slice of it is the arguments as they are.
 * Its rows are those that a whole call would have noted, or one. 1; 0 where something
 * may change in it that oomkit_batch_check() would not see; -1. */
int
oomkit_batch_keep_whole(oomkit_batch *batch);

/* `text` (stolen, may be NULL with an exception) with what comes nearest to a batch
 * among the arguments: a loader, an object that holds tensors. New reference or NULL.
 */
PyObject *
oomkit_batch_missing(oomkit_state *st, const oomkit_batch *batch, PyObject *text);
/* SplitError with that. -1 always. */
int
oomkit_batch_refuse(oomkit_state *st, const oomkit_batch *batch, PyObject *text);

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

/* What the leaf that leads says, or the list of samples. */
static inline int64_t
oomkit_node_lead_rows(const oomkit_node *node)
{
    return node->rows >= 0 ? node->rows : node->children;
}

/* Is the number of rows that a whole call would have noted (see oomkit_batch_rows) that
 * of the batch? */
static inline int
oomkit_batch_rows_sure(const oomkit_batch *batch)
{
    return batch->lead >= 0 && batch->lead < batch->count &&
           oomkit_node_lead_rows(&batch->nodes[batch->lead]) == batch->rows;
}

/* --- changed.c --- */
/* Has this tensor or array changed since capture? 1, 0 (also for every other
 * node) or -1. */
int
oomkit_node_moved(oomkit_state *st, const oomkit_node *node);
/* Has a leaf? The batch cannot be run again then. As above. */
int
oomkit_batch_moved(oomkit_state *st, const oomkit_batch *batch);

/* --- leaf_layout.c --- */
/* Can the subtree be the data of `rows` samples? */
int
oomkit_node_fits(const oomkit_batch *batch, Py_ssize_t index, int64_t rows);
/* A list or tuple whose elements may be samples: each holds a tensor. */
int
oomkit_node_may_be_items(const oomkit_batch *batch, Py_ssize_t index);
/* Dictionaries, or tensors that differ in size: samples rather than columns. */
int
oomkit_node_holds_samples(const oomkit_batch *batch, Py_ssize_t index);
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

/* --- opaque_objects.c --- */
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

/* --- seen.c --- */
/* The entry of one argument, or NULL. `keyword` is NULL for a positional one. */
const oomkit_seen *
oomkit_site_seen(const oomkit_batch_site *site, Py_ssize_t position, PyObject *keyword);

/* A node with all that is below it, whole, as at capture. New reference or NULL. */
PyObject *
oomkit_node_whole(oomkit_state *st, const oomkit_batch *batch, Py_ssize_t index);

#endif
