/* Joining numbers: floats and integers of Python. */
#include "join_rules.h"

/* Is it a figure that the update in the last micro-batch has changed: as it was in all
 * others, as it is in the last? 1, 0 or -1. */
static int
is_updated(const oomkit_rules *r, PyObject *const *values)
{
    PyObject *last = values[r->count - 1]; /* borrowed */
    Py_ssize_t i, p;
    int found = 0;

    for (p = 0; r->updated != NULL && r->first == 0 && r->count == r->batches &&
                p < PyList_GET_SIZE(r->updated) && found == 0;
         p++) {
        PyObject *pair = PyList_GET_ITEM(r->updated, p); /* borrowed */
        found = PyObject_RichCompareBool(last, PyTuple_GET_ITEM(pair, 1), Py_EQ);
        for (i = 0; i < r->count - 1 && found == 1; i++) {
            found =
                PyObject_RichCompareBool(values[i], PyTuple_GET_ITEM(pair, 0), Py_EQ);
        }
    }
    return found;
}

PyObject *
oomkit_join_floats(const oomkit_rules *r, const oomkit_place *where,
                   PyObject *const *values)
{
    double sum = 0.0, value = 0.0;
    int equal = 1, zeros = 1;
    int summed = where->is_loss && r->is_sum;
    const char *choice = summed ? "added" : "averaged";
    double first = PyFloat_AsDouble(values[0]);
    int updated = where->is_loss ? 0 : is_updated(r, values);
    Py_ssize_t i;

    if (updated < 0) {
        return NULL;
    }

    for (i = 0; i < r->count; i++) {
        value = PyFloat_AsDouble(values[i]);
        if (value == -1.0 && PyErr_Occurred()) {
            return NULL;
        }
        equal = equal && value == first;
        zeros = zeros && (i == r->count - 1 || value == 0.0);
        if (oomkit_rules_weight(r, where, i) != 0.0) { /* 0 shares may be NaN */
            sum += oomkit_rules_weight(r, where, i) * value;
        }
    }
    if (equal && !summed) {
        sum = first; /* a learning rate: no rounding */
        choice = "kept";
    } else if (updated || (zeros && oomkit_rules_may_be_norm(r, where))) {
        sum = value;
        choice = "taken from the last micro-batch";
    }
    return oomkit_place_say(r, where, choice) < 0 ? NULL : PyFloat_FromDouble(sum);
}

/* Is the integer that all micro-batches gave no count of theirs? By what whole calls
 * showed, else by its name. 1, 0 or -1. */
static int
integers_are_constant(const oomkit_rules *r, const oomkit_place *where,
                      PyObject *const *values)
{
    Py_ssize_t i;
    int constant, sure;

    for (i = 1; i < r->count; i++) {
        int same = PyObject_RichCompareBool(values[0], values[i], Py_EQ);
        if (same <= 0) {
            return same;
        }
    }
    if (oomkit_place_is_no_count(where)) {
        return 1;
    }
    constant = oomkit_result_is_constant(oomkit_rules_known(r, where), values[0],
                                         r->total, &sure);
    if (constant && !sure &&
        oomkit_place_warn(
            r, where,
            "is kept, because a whole call returned the same number; if it "
            "is a count, return it as a tensor of one element or give "
            "join=...") < 0) {
        return -1;
    }
    return constant;
}

PyObject *
oomkit_join_integers(const oomkit_rules *r, const oomkit_place *where,
                     PyObject *const *values)
{
    PyObject *sum; /* owned */
    int constant = integers_are_constant(r, where, values);
    int updated = is_updated(r, values);
    Py_ssize_t i;

    if (updated > 0) {
        return oomkit_place_say(r, where, "taken from the last micro-batch") < 0
                   ? NULL
                   : Py_NewRef(values[r->count - 1]);
    }
    if (updated < 0 || constant < 0 ||
        oomkit_place_say(r, where, constant ? "kept" : "added") < 0) {
        return NULL;
    }
    sum = Py_NewRef(values[0]);
    for (i = 1; sum != NULL && !constant && i < r->count; i++) {
        Py_SETREF(sum, PyNumber_Add(sum, values[i]));
    }
    return sum;
}
