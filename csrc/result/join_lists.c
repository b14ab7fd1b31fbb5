/* Is a list one of rows, or one of so many results as the micro-batch has rows? */
#include "join_rules.h"
#include "../py/tensor.h"

/* An element for each row everywhere, and how sure that is: micro-batches that differ
 * in rows leave no doubt. */
static int
lengths_are_rows(const oomkit_rules *r, PyObject *const *values, int *sure)
{
    Py_ssize_t i;

    *sure = 0;
    for (i = 0; i < r->count; i++) {
        if (PyList_GET_SIZE(values[i]) != r->rows[i]) {
            return 0;
        }
        *sure |= r->rows[i] != r->rows[0];
    }
    return 1;
}

/* Rows that were chosen: in whole calls it had one for each row, or now more of them,
 * now fewer, and no micro-batch has more than rows. 1, 0 or -1. */
static int
chosen_rows(const oomkit_rules *r, const oomkit_place *where,
            const oomkit_result_fact *known, PyObject *const *values)
{
    Py_ssize_t i;
    int sure;

    if (known == NULL || known->kind != OOMKIT_RESULT_LIST ||
        !(known->varied || known->size == known->rows)) {
        return 0;
    }
    for (i = 0; i < r->count && PyList_GET_SIZE(values[i]) <= r->rows[i]; i++) {
    }
    if (i < r->count || (known->varied && lengths_are_rows(r, values, &sure))) {
        return i == r->count;
    }
    if (lengths_are_rows(r, values, &sure)) {
        return 0;
    }
    return oomkit_place_warn(
               r, where,
               "has not an element for each row, and had in another call, or another "
               "length: the lists of the micro-batches are put one behind the other "
               "(return a tuple to have numbers averaged)") < 0
               ? -1
               : 1;
}

typedef struct elements {
    PyObject *first; /* borrowed from the results */
    oomkit_tensor_facts facts;
    int alike;   /* of one type, tensors of one number of dimensions */
    int batched; /* tensors that have the micro-batch's rows in front */
} elements;

/* Looks at all elements of one list. 0 or -1. */
static int
elements_read(const oomkit_rules *r, PyObject *list, int64_t rows, elements *e)
{
    Py_ssize_t i;

    for (i = 0; i < PyList_GET_SIZE(list); i++) {
        PyObject *item = PyList_GET_ITEM(list, i); /* borrowed from the results */
        oomkit_tensor_facts facts = {0};
        if (oomkit_tensor_check(r->st, item)) {
            if (oomkit_tensor_facts_get(r->st, item, r->options->dim, &facts) < 0) {
                return -1;
            }
            e->batched = e->batched && facts.ndim > 0 && facts.size == rows;
        } else {
            e->batched = 0;
        }
        if (e->first == NULL) {
            e->first = item;
            e->facts = facts;
        }
        e->alike = e->alike && facts.ndim == e->facts.ndim &&
                   (Py_IS_TYPE(item, Py_TYPE(e->first)) || item == Py_None ||
                    e->first == Py_None);
    }
    return 0;
}

/* Has an element other sizes in one micro-batch than in another? Then it is not the
 * same thing (a layer, a loss) in both. 1, 0 or -1. */
static int
sizes_differ(const oomkit_rules *r, PyObject *const *values)
{
    Py_ssize_t i, k;

    for (k = 0; k < PyList_GET_SIZE(values[0]); k++) {
        oomkit_tensor_facts first, other;
        PyObject *item = PyList_GET_ITEM(values[0], k); /* borrowed from the results */
        if (!oomkit_tensor_check(r->st, item)) {
            return 0;
        }
        if (oomkit_tensor_facts_get(r->st, item, r->options->dim, &first) < 0) {
            return -1;
        }
        for (i = 1; i < r->count && k < PyList_GET_SIZE(values[i]); i++) {
            item = PyList_GET_ITEM(values[i], k);
            if (!oomkit_tensor_check(r->st, item)) {
                return 0;
            }
            if (oomkit_tensor_facts_get(r->st, item, r->options->dim, &other) < 0) {
                return -1;
            }
            if (first.size != other.size || first.shape_hash != other.shape_hash) {
                return 1;
            }
        }
    }
    return 0;
}

/* Could these be something else than rows? Numbers and tensors (losses, layers), None
 * (gradients that are put away), and texts that are the same for all rows (names of
 * classes). 1, 0 or -1. */
static int
is_doubtful(const oomkit_rules *r, PyObject *const *values, PyObject *element)
{
    Py_ssize_t i;
    int same = 1;

    if (!PyUnicode_Check(element)) {
        return element == Py_None || oomkit_tensor_check(r->st, element) ||
               PyFloat_Check(element) || PyLong_Check(element) ||
               oomkit_is_numpy_number(element);
    }
    for (i = 1; same > 0 && i < r->count; i++) {
        same = PyObject_RichCompareBool(values[0], values[i], Py_EQ);
        if (same < 0 && oomkit_error_is_no_answer(r->st)) {
            PyErr_Clear(); /* not texts alone */
            return 0;
        }
    }
    return same;
}

int
oomkit_lists_are_rows(const oomkit_rules *r, const oomkit_place *where,
                      PyObject *const *values)
{
    const oomkit_result_fact *known = oomkit_rules_known(r, where); /* of the site */
    elements e = {.alike = 1, .batched = 1};
    Py_ssize_t i;
    int sure, doubt;

    if (where->outer != NULL || r->group_weights == NULL) {
        const int chosen = chosen_rows(r, where, known, values);
        if (chosen != 0) {
            return chosen;
        }
    }
    if (!lengths_are_rows(r, values, &sure) ||
        (where->outer == NULL && r->group_weights != NULL)) {
        return 0; /* the losses of groups stand side by side */
    }
    if (known != NULL && known->kind == OOMKIT_RESULT_LIST) {
        return known->size == known->rows;
    }
    if (sure) {
        return 1;
    }
    for (i = 0; i < r->count; i++) {
        if (elements_read(r, values[i], r->rows[i], &e) < 0) {
            return -1;
        }
    }
    if (!e.alike) {
        return 0; /* a loss and something beside it */
    }
    if (e.batched && r->rows[0] > 1) {
        return oomkit_place_warn(r, where,
                                 "has as many tensors as a micro-batch has rows, and "
                                 "each of them has the rows: joined tensor by tensor "
                                 "(return a tuple to make that explicit)") < 0
                   ? -1
                   : 0;
    }
    doubt = sizes_differ(r, values);
    if (doubt != 0) {
        return doubt < 0 ? -1 : 1;
    }
    doubt = is_doubtful(r, values, e.first);
    if (doubt > 0) {
        doubt = oomkit_place_warn(
            r, where,
            "has as many elements as a micro-batch has rows and was joined as one "
            "element per row: if it is another list, return a tuple");
    }
    return doubt < 0 ? -1 : 1;
}
