/* Joining the values at one place of the results; between join.c, join_rules.c,
 * join_numbers.c, join_tensors.c, join_memory.c, join_lists.c, join_numpy.c, detach.c
 * and loss_place.c. */
#ifndef OOMKIT_RESULT_JOIN_RULES_H
#define OOMKIT_RESULT_JOIN_RULES_H

#include "facts.h"
#include "../py/options.h"
#include "../tree/tree.h"

/* One place in the results: as the reader would write it, in pieces from the outside in
 * so that nothing is made unless a message needs it. */
typedef struct oomkit_place {
    const struct oomkit_place *outer; /* NULL for the result itself */
    PyObject *key;                    /* borrowed: key in a mapping, or NULL */
    PyObject *name;                   /* borrowed: an attribute or field, or NULL */
    Py_ssize_t number;                /* element of a sequence */
    int is_loss;
    int in_list; /* an element of a list: choices are said for the list */
} oomkit_place;

typedef struct oomkit_rules {
    oomkit_state *st;
    const oomkit_options *options;
    oomkit_result_site *site; /* borrowed, or NULL: nothing is known, nothing said */
    Py_ssize_t count;         /* of micro-batches */
    int64_t *rows;            /* owned by the outermost rules: of each, and their sum */
    double *weights;          /* likewise: of each */
    int64_t total;
    PyObject *marks;      /* borrowed from oomkit_join, or NULL */
    PyObject *sources;    /* likewise */
    PyObject **refusal;   /* owned by join.c: what makes tensors that refuse gradients,
                             made when the first is needed */
    Py_ssize_t first;     /* number of the micro-batch that values[0] is of */
    Py_ssize_t batches;   /* all micro-batches: `count` unless one is looked at alone */
    int rows_sure;        /* as in oomkit_join */
    int evaluation;       /* likewise */
    int parked;           /* likewise */
    oomkit_memo *updated; /* borrowed likewise */
    int one_loss;         /* likewise */
    int proving;          /* likewise */
    int is_sum;           /* so are the weights: micro-batches' losses are added */
    int found;            /* as in oomkit_join */
    const double *group_weights; /* borrowed from the join; NULL unless the result is a
                                    sequence of one loss for each group */
    Py_ssize_t groups;
    Py_ssize_t loss_at;    /* as in oomkit_join */
    PyObject **losses;     /* owned by the outermost rules: the loss of each result, or
                              NULL where one has none */
    PyObject **whole_loss; /* owned by join.c: the joined one, once it is there */
} oomkit_rules;

/* --- join_rules.c --- */

/* One step further in: node `at` of an opened container, its child `number`. Borrows
 * from both. */
oomkit_place
oomkit_place_inner(const oomkit_place *outer, const oomkit_tree *opened, Py_ssize_t at,
                   Py_ssize_t number);

/* The place as the reader would write it: "result['x'][0].y". New reference or NULL. */
PyObject *
oomkit_place_text(const oomkit_place *where);

/* The nearest name around the place: a key or an attribute; NULL when there is none.
 * Borrowed. */
PyObject *
oomkit_place_name(const oomkit_place *where);

/* Logs once per site what was chosen at this place. 0 or -1. */
int
oomkit_place_say(const oomkit_rules *r, const oomkit_place *where, const char *choice);

/* That floating-point numbers were averaged, or added when `summed`: in an evaluation
 * averaging what is no loss (for which there is reduction=) is a warning, for it is
 * right for means over rows alone. 0 or -1. */
int
oomkit_place_say_mean(const oomkit_rules *r, const oomkit_place *where, int summed);

/* The same as a warning. */
int
oomkit_place_warn(const oomkit_rules *r, const oomkit_place *where, const char *what);

/* NULL always: SplitError that says "result['x'] <what>". Steals `what`, which may be
 * NULL with an exception. */
PyObject *
oomkit_place_refuse(const oomkit_rules *r, const oomkit_place *where, PyObject *what);
PyObject *
oomkit_place_differs(const oomkit_rules *r, const oomkit_place *where, PyObject *a,
                     PyObject *b);

/* An exception in flight that only means that the values cannot be compared or put
 * together, as for arrays or tensors of several devices: not out-of-memory. */
int
oomkit_error_is_no_answer(const oomkit_state *st);

/* Are numbers that are no loss weighed by rows at this place, whatever the loss weighs?
 * 1, 0 or -1. */
int
oomkit_rules_by_rows(const oomkit_rules *r, const oomkit_place *where);

/* The factor of micro-batch i. */
double
oomkit_rules_weight(const oomkit_rules *r, const oomkit_place *where, Py_ssize_t i,
                    int by_rows);

/* May this scalar be the norm of gradients that all but the last micro-batch had
 * parked? */
int
oomkit_rules_may_be_norm(const oomkit_rules *r, const oomkit_place *where);

/* Has a proof shown that the numbers at this place are at least that
 * (OOMKIT_FIGURE_*)? 1, 0 or -1. */
int
oomkit_rules_shown(const oomkit_rules *r, const oomkit_place *where, long figure);

/* Has a proof shown an integer that was the same in the whole and in all of its parts,
 * so that no sum is right where micro-batches differ (a maximum)? 1, 0 or -1. */
int
oomkit_rules_was_one(const oomkit_rules *r, const oomkit_place *where);

/* Is the integer that all micro-batches gave that of the whole (1), or do they add up
 * (0)? By what a proof has shown, else by its name; 2 where neither tells, or -1. */
int
oomkit_rules_is_one(const oomkit_rules *r, const oomkit_place *where);

/* What whole calls returned at this place; NULL when nothing is known. Borrowed. */
const oomkit_result_fact *
oomkit_rules_known(const oomkit_rules *r, const oomkit_place *where);

/* Does the name say that an integer here is no count? */
int
oomkit_place_is_no_count(const oomkit_place *where);

/* Values that have no rule of their own must be the same or equal. */
PyObject *
oomkit_join_equal(const oomkit_rules *r, const oomkit_place *where,
                  PyObject *const *values);

/* --- loss_place.c --- */

/* Is the loss of a tuple or list, which is at `at` where no name tells, at element
 * `number`? 1, 0 or -1 with an exception. */
int
oomkit_loss_is_at(oomkit_state *st, PyObject *result, Py_ssize_t number, Py_ssize_t at);

/* --- join_numbers.c, join_tensors.c: the joined value out of `count` values. New
 * reference or NULL with an exception. --- */
PyObject *
oomkit_join_floats(const oomkit_rules *r, const oomkit_place *where,
                   PyObject *const *values);
PyObject *
oomkit_join_integers(const oomkit_rules *r, const oomkit_place *where,
                     PyObject *const *values);
PyObject *
oomkit_join_tensors(const oomkit_rules *r, const oomkit_place *where,
                    PyObject *const *values);

/* The shape of a tensor? */
int
oomkit_is_shape(PyObject *value);

/* Of shapes: the rows added, the other sizes must agree. */
PyObject *
oomkit_join_shapes(const oomkit_rules *r, const oomkit_place *where,
                   PyObject *const *values);

/* Did whole calls return rows here, of which a micro-batch of one row left a single
 * number? -1 with SplitError then, else 0. */
int
oomkit_rules_check_number(const oomkit_rules *r, const oomkit_place *where);

/* A joined tensor as one that requires grad and raises when a gradient reaches it.
 * Steals `joined`; new reference or NULL. */
PyObject *
oomkit_join_refusing(const oomkit_rules *r, const oomkit_place *where,
                     PyObject *joined);

/* --- join_custom.c: values of a type that was registered with a join= --- */
PyObject *
oomkit_join_custom(const oomkit_rules *r, const oomkit_place *where,
                   PyObject *const *values);

/* --- join_memory.c --- */

/* The tensors of one place in all micro-batches. */
typedef struct oomkit_column {
    int required;   /* some required grad */
    int moved;      /* some were written to after their micro-batch */
    int same;       /* one object */
    PyObject *leaf; /* borrowed from the marks: all are this leaf, or NULL */
    int shared;     /* two have their first element at the same address */
    int all_shared; /* all do */
} oomkit_column;

/* What the marks and the addresses tell. 0 or -1. */
int
oomkit_column_read(const oomkit_rules *r, PyObject *const *values,
                   oomkit_column *column);

/* Why these, which have the sizes of rows, are none: static text, or NULL (with an
 * exception on failure: check). */
const char *
oomkit_column_refusal(const oomkit_rules *r, PyObject *const *values,
                      const oomkit_column *column);

/* --- join_lists.c --- */

/* Has each of these lists an element for each row of its micro-batch? 1, 0 or -1. What
 * only may be so is said once. */
int
oomkit_lists_are_rows(const oomkit_rules *r, const oomkit_place *where,
                      PyObject *const *values);

/* --- join.c --- */

/* The joined value of one place, whatever it is. */
PyObject *
oomkit_join_place(const oomkit_rules *r, const oomkit_place *where,
                  PyObject *const *values);

/* --- join_numpy.c --- */
int
oomkit_is_numpy_array(PyObject *value);
int
oomkit_is_numpy_number(PyObject *value);

/* Of one type, arrays or numbers. */
PyObject *
oomkit_join_numpy(const oomkit_rules *r, const oomkit_place *where,
                  PyObject *const *values);

/* --- detach.c --- */

/* What was noted of a kept tensor of micro-batch `number`. */
typedef struct oomkit_kept {
    int required;   /* it required grad */
    PyObject *leaf; /* borrowed from the marks: it was this leaf, which has no graph */
    uint32_t version;
} oomkit_kept;

/* 1 found, 0 not one of ours, -1. */
int
oomkit_kept_get(PyObject *marks, Py_ssize_t number, PyObject *tensor,
                oomkit_kept *kept);

#endif
