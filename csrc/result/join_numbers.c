/* Joining numbers: floats and integers of Python, and the shapes of tensors. */
#include "join_rules.h"

#include <string.h>

/* Is it a figure that the update in the last micro-batch has changed: as it was in all
 * others, as it is in the last? 1, 0 or -1. */
static int
is_updated(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values)
{
    PyObject *last = values[r->count - 1]; /* borrowed */
    Py_ssize_t i;
    int found = 0;

    if (r->first != 0 || r->count != r->batches) {
        return 0;
    }
    EACH_MEMO (was, r->updated) {
        found = PyObject_RichCompareBool(last, was.saved, Py_EQ);
        for (i = 0; i < r->count - 1 && found == 1; i++) {
            found = PyObject_RichCompareBool(values[i], was.object, Py_EQ);
        }
        if (found != 0) {
            break;
        }
    }
    if (found > 0) {
        found = oomkit_rules_shown(r, where, OOMKIT_FIGURE_OF_ROWS);
        found = found < 0 ? -1 : !found;
    }
    return found;
}

/* Is it the norm of gradients that all but the last micro-batch had parked? 1, 0 or
 * -1. */
static int
is_norm(const oomkit_rules *r, const oomkit_place *where)
{
    int shown = oomkit_rules_may_be_norm(r, where)
                    ? oomkit_rules_shown(r, where, OOMKIT_FIGURE_NO_NORM)
                    : 1;
    return shown < 0 ? -1 : !shown;
}

PyObject *
oomkit_join_floats(const oomkit_rules *r, const oomkit_place *where,
                   PyObject *const *values)
{
    double sum = 0.0, value = 0.0;
    int equal = 1, zeros = 1;
    const char *choice = NULL;
    double first = PyFloat_AsDouble(values[0]);
    int updated = is_updated(r, where, values), norm;
    int by_rows = updated < 0 ? -1 : oomkit_rules_by_rows(r, where);
    int summed = where->is_loss && r->is_sum && !by_rows;
    Py_ssize_t i;

    if (by_rows < 0 || oomkit_rules_check_number(r, where) < 0) {
        return NULL;
    }
    for (i = 0; i < r->count; i++) {
        value = PyFloat_AsDouble(values[i]);
        if (value == -1.0 && PyErr_Occurred()) {
            return NULL;
        }
        equal = equal && value == first;
        zeros = zeros && (i == r->count - 1 || value == 0.0);
        if (oomkit_rules_weight(r, where, i, by_rows) != 0.0) { /* 0 may be NaN */
            sum += oomkit_rules_weight(r, where, i, by_rows) * value;
        }
    }
    norm = zeros && !equal ? is_norm(r, where) : 0;
    if (norm < 0) {
        return NULL;
    }
    if (equal && !summed) {
        sum = first; /* a learning rate: no rounding */
        choice = "kept";
    } else if (updated || norm) {
        sum = value;
        choice = "taken from the last micro-batch";
    }
    if ((choice ? oomkit_place_say(r, where, choice)
                : oomkit_place_say_mean(r, where, summed)) < 0) {
        return NULL;
    }
    return PyFloat_FromDouble(sum);
}

/* Is the integer that all micro-batches gave no count of theirs? By what a proof, the
 * name or whole calls tell. 1, 0 or -1. */
static int
integers_are_constant(const oomkit_rules *r, const oomkit_place *where,
                      PyObject *const *values)
{
    Py_ssize_t i;
    int constant, counts, sure, told;

    for (i = 1; i < r->count; i++) {
        int same = PyObject_RichCompareBool(values[0], values[i], Py_EQ);
        if (same <= 0) {
            return same;
        }
    }
    told = oomkit_rules_is_one(r, where);
    if (told != 2) {
        return told;
    }
    constant = oomkit_result_is_constant(oomkit_rules_known(r, where), values[0],
                                         r->total, &sure);
    counts = PyObject_IsTrue(values[0]); /* 0 is its own sum */
    if (counts > 0 && constant && !sure) {
        counts = oomkit_place_warn(
            r, where,
            "is kept, because a whole call returned the same number; if it is a count, "
            "return it as a tensor of one element or give join=...");
    } else if (counts > 0 && !constant && r->site != NULL &&
               r->site->figures != NULL) { /* it was 0 */
        counts = oomkit_place_warn(
            r, where,
            "is added, although all micro-batches returned the same number: nothing "
            "has shown whether it is a count; if it is none (the number of a step), "
            "give join=..., or name it, as in {\"step\": n}");
    }
    return counts < 0 ? -1 : constant;
}

/* NULL always: the first two that differ. */
static PyObject *
numbers_differ(const oomkit_rules *r, const oomkit_place *where,
               PyObject *const *values)
{
    Py_ssize_t i = 1;

    while (i < r->count - 1) {
        int same = PyObject_RichCompareBool(values[0], values[i], Py_EQ);
        if (same < 0) {
            return NULL;
        }
        if (same == 0) {
            break;
        }
        i++;
    }
    return oomkit_place_differs(r, where, values[0], values[i]);
}

/* Are they the numbers of rows of the micro-batches, and nothing tells that they are
 * numbers of one thing? 1, 0 or -1. */
static int
are_rows(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values)
{
    Py_ssize_t i = 0;
    int overflow, told;

    while (i < r->count &&
           PyLong_AsLongLongAndOverflow(values[i], &overflow) == r->rows[i]) {
        i++;
    }
    if (i < r->count) {
        return 0;
    }
    told = oomkit_rules_is_one(r, where);
    return told < 0 ? -1 : told != 1;
}

PyObject *
oomkit_join_integers(const oomkit_rules *r, const oomkit_place *where,
                     PyObject *const *values)
{
    PyObject *sum; /* owned */
    int constant, updated, was_one;
    Py_ssize_t i;

    if (oomkit_rules_check_number(r, where) < 0) {
        return NULL;
    }
    constant = integers_are_constant(r, where, values);
    updated = constant < 0 ? -1 : are_rows(r, where, values);
    if (updated >= 0) { /* rows may be what a number of steps has come to */
        updated = updated > 0 ? 0 : is_updated(r, where, values);
    }
    if (updated > 0) {
        return oomkit_place_say(r, where, "taken from the last micro-batch") < 0
                   ? NULL
                   : Py_NewRef(values[r->count - 1]);
    }
    was_one = updated < 0 || constant ? 0 : oomkit_rules_was_one(r, where);
    if (was_one > 0) {
        return numbers_differ(r, where, values);
    }
    if (updated < 0 || was_one < 0 ||
        oomkit_place_say(r, where, constant ? "kept" : "added") < 0) {
        return NULL;
    }
    sum = Py_NewRef(values[0]);
    for (i = 1; sum != NULL && !constant && i < r->count; i++) {
        Py_SETREF(sum, PyNumber_Add(sum, values[i]));
    }
    return sum;
}

int
oomkit_is_shape(PyObject *value)
{
    return PyTuple_Check(value) && strcmp(Py_TYPE(value)->tp_name, "torch.Size") == 0;
}

/* Is element i the number of rows of each micro-batch? */
static int
sizes_are_rows(const oomkit_rules *r, PyObject *const *values, Py_ssize_t i)
{
    Py_ssize_t k;
    for (k = 0; k < r->count; k++) {
        if (PyLong_AsLongLong(PyTuple_GET_ITEM(values[k], i)) != r->rows[k]) {
            return 0;
        }
    }
    return !PyErr_Occurred();
}

PyObject *
oomkit_join_shapes(const oomkit_rules *r, const oomkit_place *where,
                   PyObject *const *values)
{
    Py_ssize_t size = PyTuple_GET_SIZE(values[0]), dim = (Py_ssize_t)r->options->dim, i;
    OWNED PyObject *list = NULL;

    dim += dim < 0 ? size : 0;
    for (i = 1; i < r->count; i++) {
        if (PyTuple_GET_SIZE(values[i]) != size) {
            return oomkit_place_differs(r, where, values[0], values[i]);
        }
    }
    if (dim < 0 || dim >= size || !sizes_are_rows(r, values, dim)) {
        return PyErr_Occurred() ? NULL : oomkit_join_equal(r, where, values);
    }
    for (i = 1; i < r->count * size; i++) {
        Py_ssize_t k = i / size, j = i % size;
        if (j != dim &&
            PyObject_RichCompareBool(PyTuple_GET_ITEM(values[0], j),
                                     PyTuple_GET_ITEM(values[k], j), Py_EQ) != 1) {
            return PyErr_Occurred()
                       ? NULL
                       : oomkit_place_differs(r, where, values[0], values[k]);
        }
    }
    list = PySequence_List(values[0]);
    if (list == NULL || PyList_SetItem(list, dim, PyLong_FromLongLong(r->total)) < 0) {
        return NULL;
    }
    return PyObject_CallOneArg((PyObject *)Py_TYPE(values[0]), list);
}
