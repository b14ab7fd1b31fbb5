/* The search for the batch, between layout.c and named_arguments.c. */
#ifndef OOMKIT_BATCH_LAYOUT_H
#define OOMKIT_BATCH_LAYOUT_H

#include "batch.h"

enum { OOMKIT_ROLE_OTHER = 0, OOMKIT_ROLE_STATIC, OOMKIT_ROLE_BATCH };

typedef struct oomkit_find {
    oomkit_state *st;
    const oomkit_options *options;
    const oomkit_batch_site *site;
    PyObject *names; /* borrowed from the caller, may be NULL */
    oomkit_batch *batch;
    uint8_t *roles;   /* owned: one per argument */
    Py_ssize_t first; /* node of the first batch argument */
    int named;        /* by batch= */
    int per_sample;   /* the batch is lists of per-sample objects */
} oomkit_find;

#define EACH_ARGUMENT(f, argument, index)                                              \
    for (argument = 0, index = 0; argument < (f)->batch->total;                        \
         index = oomkit_node_end((f)->batch, index), argument++)

/* -1 always: SplitError, node `b` does not go with node `a` (-1: `b` alone is wrong).
 */
int
oomkit_find_disagree(const oomkit_find *f, Py_ssize_t a, Py_ssize_t b);

/* -1 always: SplitError, node `index` is of a type that cannot be split because `why`.
 */
int
oomkit_find_refuse(const oomkit_find *f, Py_ssize_t index, const char *why,
                   const char *advice);

/* -1 always: SplitError "cannot split argument 'NAME': " and this text, which is stolen
 * and may be NULL with an exception. */
int
oomkit_find_raise(const oomkit_find *f, Py_ssize_t index, PyObject *text);

/* "batch['x'] has shape [8, 3]". New reference or NULL. */
PyObject *
oomkit_find_describe(const oomkit_find *f, Py_ssize_t index);

/* Name of the argument that a node belongs to. New reference or NULL. */
PyObject *
oomkit_find_name(const oomkit_find *f, Py_ssize_t index);

/* Hides what static= names inside of arguments: "batch['weights']". 0 or -1. */
int
oomkit_find_hide(const oomkit_find *f);

/* The first node of the subtree that capture left closed and that holds a tensor of
 * `rows` (any when -1). 1 and *where, 0, or -1. */
int
oomkit_find_closed(const oomkit_find *f, Py_ssize_t argument, Py_ssize_t index,
                   int64_t rows, Py_ssize_t *where);

/* --- custom_rows.c --- */

/* The rows of a batch that split= slices; -1 with an exception. Runs split= once where
 * a list may be samples or columns. */
int64_t
oomkit_find_called_rows(const oomkit_find *f);

/* --- other_arguments.c --- */

/* What earlier calls showed of an argument. Borrowed from the site; NULL. */
const oomkit_seen *
oomkit_find_seen(const oomkit_find *f, Py_ssize_t argument);

/* An argument beside the batch: is it sliced too? 0 or -1 with SplitError. */
int
oomkit_find_beside(const oomkit_find *f, Py_ssize_t argument, Py_ssize_t index);
/* The same beside a single row, which cannot be split further: what weight= is to count
 * belongs to it, and nothing is refused. */
void
oomkit_find_beside_one_row(const oomkit_find *f, Py_ssize_t argument, Py_ssize_t index);

/* --- rows_or_columns.c --- */

/* Is a list of tensors alike one row in columns? They all have size 1 in front, as ids
 * and labels of one row do; four or more images [1, H, W] are samples. 1, 0 or -1. */
int
oomkit_find_one_row(const oomkit_find *f, Py_ssize_t index);

/* Everything is marked: lists of as many tensors as rows, of as many rows, are samples
 * where another list is, and else refused. 0 or -1 with SplitError. */
int
oomkit_find_columns(const oomkit_find *f);

/* --- ambiguous.c --- */

/* Is it a dtype of floating point numbers (c10::ScalarType)? */
int
oomkit_is_floating(int32_t dtype);

/* Everything is marked: could it be read in another way? 0 or -1 with SplitError. */
int
oomkit_find_ambiguity(const oomkit_find *f);

/* Has a leaf that is sliced another dimension of this size? 1, 0 or -1. */
int
oomkit_find_has_size(const oomkit_find *f, int64_t size);

/* Number of dimensions of a tensor or array; -1 for others. */
int
oomkit_find_dimensions(const oomkit_find *f, Py_ssize_t index);

/* SplitError when a name that `option` gives is no parameter. 0 or -1. */
int
oomkit_find_check_names(const oomkit_find *f, PyObject *given, const char *option);

/* The same of the names that dim= has, but "return", which is of the results. */
int
oomkit_find_check_dims(const oomkit_find *f);

/* Gives the roles that static= and batch= give. 0 or -1. */
int
oomkit_find_roles(oomkit_find *f);

#endif
