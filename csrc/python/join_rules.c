/* How the values at one place become one: a rule for each type. */
#include "join_rules.h"
#include "tensor.h"

#include <string.h>

/* --- messages --- */

static PyObject *
place_text(const oomkit_place *where)
{
    PyObject *outer, *text; /* owned */

    if (where->outer == NULL) {
        return PyUnicode_FromString("result");
    }
    outer = place_text(where->outer);
    if (outer == NULL) {
        return NULL;
    }
    text = where->key != NULL ? PyUnicode_FromFormat("%U[%R]", outer, where->key)
                              : PyUnicode_FromFormat("%U[%zd]", outer, where->number);
    Py_DECREF(outer);
    return text;
}

/* NULL always: SplitError "... result['x']: <what>". Steals `what`, which may be NULL
 * with an exception. */
PyObject *
oomkit_place_refuse(const oomkit_rules *r, const oomkit_place *where, PyObject *what)
{
    PyObject *text = what == NULL ? NULL : place_text(where); /* owned */
    if (text != NULL) {
        PyErr_Format(r->st->SplitError,
                     "auto_batch cannot join the results of %zd micro-batches: %U %U; "
                     "return it in another way or give join=...",
                     r->count, text, what);
    }
    Py_XDECREF(text);
    Py_XDECREF(what);
    return NULL;
}

PyObject *
oomkit_place_differs(const oomkit_rules *r, const oomkit_place *where, PyObject *a,
                     PyObject *b)
{
    if (Py_IS_TYPE(a, Py_TYPE(b))) {
        return oomkit_place_refuse(
            r, where, PyUnicode_FromFormat("differs: %.200R and %.200R", a, b));
    }
    return oomkit_place_refuse(r, where,
                               PyUnicode_FromFormat("is a '%.200s' and then a '%.200s'",
                                                    Py_TYPE(a)->tp_name,
                                                    Py_TYPE(b)->tp_name));
}

static PyObject *
place_shapes(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values,
             Py_ssize_t other)
{
    PyObject *one = PyObject_GetAttr(values[0], r->st->str_shape);     /* owned */
    PyObject *two = PyObject_GetAttr(values[other], r->st->str_shape); /* owned */
    PyObject *what = NULL; /* stolen by oomkit_place_refuse() */

    if (one != NULL && two != NULL) {
        Py_SETREF(one, PySequence_List(one));
        Py_SETREF(two, PySequence_List(two));
    }
    if (one != NULL && two != NULL) {
        what = PyUnicode_FromFormat("has shapes %R and %R for %lld and %lld rows, and "
                                    "differing values",
                                    one, two, (long long)r->rows[0],
                                    (long long)r->rows[other]);
    }
    Py_XDECREF(one);
    Py_XDECREF(two);
    return oomkit_place_refuse(r, where, what);
}

/* --- numbers --- */

/* The factor of micro-batch i: shares of the batch when the reduction is a sum, where
 * only the loss is added up; with several losses and weights, those of the loss. */
static double
rules_weight(const oomkit_rules *r, const oomkit_place *where, Py_ssize_t i)
{
    if (r->group_weights != NULL && where->outer != NULL &&
        where->outer->outer == NULL) {
        return r->group_weights[i * r->groups + where->number];
    }
    if (!r->is_sum) {
        return r->weights[i];
    }
    return where->is_loss ? 1.0 : (double)r->rows[i] / (double)r->total;
}

/* May this scalar be the norm of gradients that all but the last micro-batch had
 * parked? A key that says otherwise (an accuracy can be 0 as well) is believed. */
static int
rules_may_be_norm(const oomkit_rules *r, const oomkit_place *where)
{
    const char *key;
    if (!r->parked || where->is_loss) {
        return 0;
    }
    if (where->key == NULL || !PyUnicode_Check(where->key)) {
        return 1;
    }
    key = PyUnicode_AsUTF8(where->key);
    if (key == NULL) {
        return -1;
    }
    return strstr(key, "norm") != NULL || strstr(key, "grad") != NULL;
}

PyObject *
oomkit_join_floats(const oomkit_rules *r, const oomkit_place *where,
                   PyObject *const *values)
{
    double sum = 0.0, value = 0.0;
    int equal = 1, zeros = 1, norm = rules_may_be_norm(r, where);
    double first = PyFloat_AsDouble(values[0]);
    Py_ssize_t i;

    for (i = 0; i < r->count; i++) {
        value = PyFloat_AsDouble(values[i]);
        if (norm < 0 || (value == -1.0 && PyErr_Occurred())) {
            return NULL;
        }
        equal = equal && value == first;
        zeros = zeros && (i == r->count - 1 || value == 0.0);
        if (rules_weight(r, where, i) != 0.0) { /* a share of nothing may be NaN */
            sum += rules_weight(r, where, i) * value;
        }
    }
    if (equal && !(where->is_loss && r->is_sum)) {
        return PyFloat_FromDouble(first); /* a learning rate: no rounding */
    }
    return PyFloat_FromDouble(norm && zeros ? value : sum);
}

/* Integers are counts: added. */
PyObject *
oomkit_join_integers(const oomkit_rules *r, PyObject *const *values)
{
    PyObject *sum = Py_NewRef(values[0]); /* owned */
    Py_ssize_t i;

    for (i = 1; sum != NULL && i < r->count; i++) {
        Py_SETREF(sum, PyNumber_Add(sum, values[i]));
    }
    return sum;
}

/* --- tensors --- */

/* Bitwise equal? 1, 0 or -1. */
static int
tensors_equal(const oomkit_rules *r, PyObject *a, PyObject *b)
{
    PyObject *stack[2] = {a, b}; /* borrowed from the results */
    PyObject *answer;            /* owned */
    int equal;

    if (a == b) {
        return 1;
    }
    answer = PyObject_Vectorcall(r->st->torch_equal, stack, 2, NULL);
    if (answer == NULL) {
        return -1;
    }
    equal = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return equal;
}

static int
tensors_all_equal(const oomkit_rules *r, PyObject *const *values)
{
    Py_ssize_t i;
    int equal = 1;
    for (i = 1; equal > 0 && i < r->count; i++) {
        equal = tensors_equal(r, values[0], values[i]);
    }
    return equal;
}

/* sum of weight * value in the tensors' own dtype, or the plain sum. New reference. */
static PyObject *
tensors_add(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values,
            int weighted)
{
    PyObject *sum = NULL; /* owned */
    Py_ssize_t i;

    for (i = 0; i < r->count; i++) {
        double weight = weighted ? rules_weight(r, where, i) : 1.0;
        PyObject *term; /* owned */
        if (weight == 0.0) {
            continue; /* a share of nothing may be NaN */
        }
        term = Py_NewRef(values[i]);
        if (weighted) {
            PyObject *factor = PyFloat_FromDouble(weight); /* owned */
            Py_SETREF(term, factor == NULL ? NULL
                                           : PyObject_CallMethodOneArg(
                                                 term, r->st->str_mul, factor));
            Py_XDECREF(factor);
        }
        if (term != NULL && sum != NULL) {
            Py_SETREF(term, PyObject_CallMethodOneArg(sum, r->st->str_add, term));
        }
        Py_XSETREF(sum, term);
        if (sum == NULL) {
            return NULL;
        }
    }
    return sum;
}

/* Is the last one alone not 0? 1, 0 or -1. Reads the values, so only for a possible
 * norm. */
static int
tensors_zero_but_last(const oomkit_rules *r, PyObject *const *values)
{
    Py_ssize_t i;
    for (i = 0; i < r->count - 1; i++) {
        int truth = PyObject_IsTrue(values[i]);
        if (truth != 0) {
            return truth < 0 ? -1 : 0;
        }
    }
    return 1;
}

/* c10::ScalarType: 5-7 and 15 are floating, 8-10 complex, 23 on the 8-bit floats. */
static int
dtype_is_floating(int32_t dtype)
{
    return (dtype >= 5 && dtype <= 10) || dtype == 15 || (dtype >= 23 && dtype <= 26);
}

static PyObject *
join_scalars(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values,
             int32_t dtype)
{
    int answer;

    if (dtype_is_floating(dtype)) {
        answer = rules_may_be_norm(r, where);
        answer = answer > 0 ? tensors_zero_but_last(r, values) : answer;
        if (answer != 0) {
            return answer < 0 ? NULL : Py_NewRef(values[r->count - 1]);
        }
        return tensors_add(r, where, values, 1);
    }
    if (dtype != 11) {
        return tensors_add(r, where, values, 0);
    }
    answer = tensors_all_equal(r, values); /* bool */
    if (answer != 0) {
        return answer < 0 ? NULL : Py_NewRef(values[0]);
    }
    return oomkit_place_differs(r, where, values[0], values[r->count - 1]);
}

static PyObject *
tensors_cat(const oomkit_rules *r, PyObject *const *values)
{
    PyObject *list = PyList_New(r->count);                /* owned */
    PyObject *dim = PyLong_FromLongLong(r->options->dim); /* owned */
    PyObject *joined = NULL;                              /* owned */
    Py_ssize_t i;

    if (list != NULL && dim != NULL) {
        PyObject *stack[2] = {list, dim}; /* borrowed from this function */
        for (i = 0; i < r->count; i++) {
            PyList_SET_ITEM(list, i, Py_NewRef(values[i]));
        }
        joined = PyObject_Vectorcall(r->st->torch_cat, stack, 2, NULL);
    }
    Py_XDECREF(list);
    Py_XDECREF(dim);
    return joined;
}

PyObject *
oomkit_join_tensors(const oomkit_rules *r, const oomkit_place *where,
                    PyObject *const *values)
{
    int scalars = 1, slices = 1, equal = 1;
    int32_t dtype = -1;
    Py_ssize_t i;

    for (i = 0; i < r->count; i++) {
        oomkit_tensor_facts facts;
        if (oomkit_tensor_facts_get(r->st, values[i], r->options->dim, &facts) < 0) {
            return NULL;
        }
        scalars = scalars && facts.ndim == 0;
        slices = slices && facts.size == r->rows[i];
        dtype = i == 0 || !dtype_is_floating(dtype) ? facts.dtype : dtype;
    }
    if (scalars) {
        return join_scalars(r, where, values, dtype);
    }
    if (slices) {
        return tensors_cat(r, values);
    }
    for (i = 1; equal > 0 && i < r->count; i++) {
        equal = tensors_equal(r, values[0], values[i]);
    }
    if (equal < 0) {
        return NULL;
    }
    return equal ? Py_NewRef(values[0]) : place_shapes(r, where, values, i - 1);
}

/* --- everything else --- */

/* Values that have no rule of their own must be the same or equal. */
PyObject *
oomkit_join_equal(const oomkit_rules *r, const oomkit_place *where,
                  PyObject *const *values)
{
    Py_ssize_t i;

    for (i = 1; i < r->count; i++) {
        int same;
        if (!Py_IS_TYPE(values[i], Py_TYPE(values[0]))) {
            return oomkit_place_differs(r, where, values[0], values[i]);
        }
        same = PyObject_RichCompareBool(values[0], values[i], Py_EQ);
        if (same < 0) {
            if (!PyErr_ExceptionMatches(PyExc_ValueError) &&
                !PyErr_ExceptionMatches(PyExc_TypeError)) {
                return NULL;
            }
            PyErr_Clear(); /* == has no single answer, as for arrays */
        }
        if (same <= 0) {
            return oomkit_place_differs(r, where, values[0], values[i]);
        }
    }
    return Py_NewRef(values[0]);
}
