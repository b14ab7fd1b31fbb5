/* What a site knows about the results of its calls, and what it has said about joining
 * them. */
#ifndef OOMKIT_RESULT_FACTS_H
#define OOMKIT_RESULT_FACTS_H

#include "../py/state.h"

#include <string.h>

#define OOMKIT_RESULT_FACTS 24
#define OOMKIT_RESULT_DEPTH 2

/* Where a value is: `depth` steps into the result, each by the key of a dict or by the
 * position in a tuple or list. */
typedef struct oomkit_result_path {
    int depth;
    PyObject *keys[OOMKIT_RESULT_DEPTH]; /* exact str; NULL in a tuple or list. Owned in
                                            a fact, borrowed where one is looked for */
    Py_ssize_t positions[OOMKIT_RESULT_DEPTH]; /* -1 beside a key */
} oomkit_result_path;

typedef enum oomkit_result_kind {
    OOMKIT_RESULT_INTEGER,
    OOMKIT_RESULT_ARRAY, /* a tensor or array that has dimensions */
    OOMKIT_RESULT_LIST,
} oomkit_result_kind;

/* What whole calls returned at one place. */
typedef struct oomkit_result_fact {
    oomkit_result_path path;
    oomkit_result_kind kind;
    int64_t rows; /* of the last batch; for an integer, of the largest that gave it */

    long long value; /* an integer: at the last whole call */
    uint32_t calls, changes;
    int varied; /* the same number for different numbers of rows; of a list: its
                   rows were chosen, see fact_list() */

    int64_t size;   /* an array: of the batch's dimension; a list: its length */
    uint64_t shape; /* a tensor: hash of its dtype and other sizes; else 0 */
    int square;     /* an array: one of the other sizes was the number of rows */
} oomkit_result_fact;

/* How micro-batches' numbers at one place are joined, as a proof has shown. */
enum {
    OOMKIT_FIGURE_LAST = 0,    /* that of the last one is the whole's */
    OOMKIT_FIGURE_NO_NORM,     /* 0 where gradients were not */
    OOMKIT_FIGURE_OF_ROWS,     /* their mean or their sum is, the last one is not */
    OOMKIT_FIGURE_HOW = 3,     /* the bits of these */
    OOMKIT_FIGURE_BY_ROWS = 4, /* their mean weighs rows, whatever the loss weighs */
    OOMKIT_FIGURE_BY_LOSS = 8, /* their mean weighs what the loss weighs */
    OOMKIT_FIGURE_MET = 16,    /* alone: there was one, which showed nothing else */
    OOMKIT_FIGURE_NO_LOSS = 32 /* 0 in the place of a loss that is added, and was not */
};

/* Zeroed at start, freed by clear. */
typedef struct oomkit_result_site {
    PyObject *said;    /* owned set of str: what was logged, or NULL */
    PyObject *figures; /* owned dict of str to int: OOMKIT_FIGURE_* of places that a
                          proof has decided (oomkit/_proof/judge.py), or NULL */
    int count;
    int integers_only; /* nothing else is to be learned now */
    int next; /* where the fact that is looked for next will be: they are met in order
               */
    oomkit_result_fact facts[OOMKIT_RESULT_FACTS];
} oomkit_result_site;

void
oomkit_result_learn_from(oomkit_state *st, oomkit_result_site *site, PyObject *result,
                         int64_t rows, int64_t dim);

/* After a healthy call that was not split. Never fails and runs no Python code. */
static inline void
oomkit_result_learn(oomkit_state *st, oomkit_result_site *site, PyObject *result,
                    int64_t rows, int64_t dim)
{
    if (Py_IS_TYPE(result, (PyTypeObject *)st->Tensor) || PyDict_Check(result) ||
        PyTuple_Check(result) || PyList_Check(result) ||
        strcmp(Py_TYPE(result)->tp_name, "numpy.ndarray") == 0) {
        oomkit_result_learn_from(st, site, result, rows, dim);
    }
}

/* What is known of a place. Borrowed from the site; NULL when nothing is. */
const oomkit_result_fact *
oomkit_result_known(const oomkit_result_site *site, const oomkit_result_path *path);

/* Is the integer, which all micro-batches of `rows` rows together gave alike, known not
 * to depend on the rows? *sure is 0 where few calls showed it. `fact` may be NULL. */
int
oomkit_result_is_constant(const oomkit_result_fact *fact, PyObject *value, int64_t rows,
                          int *sure);

/* In the first micro-batch: a tensor in the result that has the `total` rows of the
 * whole batch, and is not known to have that size whatever the batch is, is not of this
 * micro-batch. Its place as a new str; NULL without an exception when there is none. */
PyObject *
oomkit_result_of_whole(oomkit_state *st, const oomkit_result_site *site,
                       PyObject *result, int64_t total, int64_t dim);

/* Logs `text` (borrowed) once per site, by the logger's method `level`. 0 or -1. Runs
 * handlers of the logger. */
int
oomkit_result_say(oomkit_state *st, oomkit_result_site *site, const char *level,
                  PyObject *text);

void
oomkit_result_site_clear(oomkit_result_site *site);

typedef struct oomkit_join {
    PyObject *results; /* owned: list of results, tensors detached */
    PyObject *rows;    /* owned: list of int */
    PyObject *weights; /* owned: list of float */
    PyObject *marks;   /* owned: list of dict, see detach.c */
    PyObject *sources; /* owned: list of the leaves that gradients are wanted of, set
                          before joining when `required`, or NULL */
    int required;      /* some tensor in the results required grad */
    struct oomkit_result_site *site; /* borrowed from the step, or NULL */
    int evaluation; /* nothing needs a gradient: what is returned is all there is */
    int rows_sure;  /* whole calls of the site knew the number of rows as well */
    int one_loss;   /* the loss is one number, of whatever shape */
    int proving;    /* by a proof: what is chosen is not said, it may be chosen anew */
    Py_ssize_t loss_at; /* of it in a tuple or list, before its graph was dropped */
    int parked; /* gradients were parked between the micro-batches: a scalar that is 0
                   in all but the last (the norm that clip_grad_norm_ returns) is its
                   own, and the loss has been through its backward */
    oomkit_memo *updated; /* figures that the real update has changed (learning rates):
                             what they are now */
    int is_sum;           /* the loss is a sum, whatever reduction= says */
    int found;            /* a proof has found the weights: they are the loss's alone */
    const double *group_weights; /* borrowed from the call: results x groups, for the
                                    losses of a sequence as long as `groups` */
    Py_ssize_t groups;           /* 0 without */
    PyObject *convert; /* borrowed while a result is added: what each tensor is kept as,
                          a callable, or NULL */
} oomkit_join;

#endif
