/* Joining the values at one place of the results; between join.c, join_rules.c, loss.c.
 */
#ifndef OOMKIT_PYTHON_JOIN_RULES_H
#define OOMKIT_PYTHON_JOIN_RULES_H

#include "split.h"

/* One place in the results: as the reader would write it, in pieces from the outside in
 * so that nothing is made unless a message needs it. */
typedef struct oomkit_place {
    const struct oomkit_place *outer; /* NULL for the result itself */
    PyObject *key;                    /* borrowed: key in a mapping, or NULL */
    Py_ssize_t number;                /* element of a sequence */
    int is_loss;
} oomkit_place;

typedef struct oomkit_rules {
    oomkit_state *st;
    const oomkit_options *options;
    Py_ssize_t count; /* of micro-batches */
    int64_t *rows;    /* owned: of each, and their sum */
    double *weights;  /* owned: of each */
    int64_t total;
    int parked; /* as in oomkit_join */
    int is_sum; /* so are the weights: micro-batches' losses are added */
    const double *group_weights; /* borrowed from the join; NULL unless the result is a
                                    sequence of one loss for each group */
    Py_ssize_t groups;
} oomkit_rules;

/* Is the loss of `result` at element `number`, or under `key` (not NULL in a mapping)?
 * 1, 0 or -1 with an exception. */
int
oomkit_loss_is_at(oomkit_state *st, PyObject *result, Py_ssize_t number, PyObject *key);

/* NULL always: SplitError that says "result['x'] <what>". Steals `what`, which may be
 * NULL with an exception. */
PyObject *
oomkit_place_refuse(const oomkit_rules *r, const oomkit_place *where, PyObject *what);
PyObject *
oomkit_place_differs(const oomkit_rules *r, const oomkit_place *where, PyObject *a,
                     PyObject *b);

/* The joined value out of `count` values of one type (floats: of numbers). New
 * reference or NULL with an exception. */
PyObject *
oomkit_join_floats(const oomkit_rules *r, const oomkit_place *where,
                   PyObject *const *values);
PyObject *
oomkit_join_integers(const oomkit_rules *r, PyObject *const *values);
PyObject *
oomkit_join_tensors(const oomkit_rules *r, const oomkit_place *where,
                    PyObject *const *values);
PyObject *
oomkit_join_equal(const oomkit_rules *r, const oomkit_place *where,
                  PyObject *const *values);

#endif
