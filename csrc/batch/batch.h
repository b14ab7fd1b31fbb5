/* Finding the batch in a call's arguments, slicing it, and joining results. */
#ifndef OOMKIT_BATCH_BATCH_H
#define OOMKIT_BATCH_BATCH_H

#include "../tree/tree.h"

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

/* Is the number of rows that a whole call would have noted (see oomkit_batch_rows) that
 * of the batch? */
static inline int
oomkit_batch_rows_sure(const oomkit_batch *batch)
{
    return batch->lead >= 0 && batch->lead < batch->count &&
           batch->nodes[batch->lead].rows == batch->rows;
}

/* --- changed.c --- */
/* Has this tensor or array changed since capture? 1, 0 (also for every other
 * node) or -1. */
int
oomkit_node_moved(oomkit_state *st, const oomkit_node *node);

/* --- leaf_layout.c --- */
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
