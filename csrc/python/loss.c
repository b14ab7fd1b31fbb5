/* The loss in what a step returns. */
#include "join_rules.h"
#include "tensor.h"
#include "tree.h"

/* Where the loss of a tuple or list is: the field `loss` of a named tuple, else 0. -1
 * with an exception. */
static Py_ssize_t
loss_position(oomkit_state *st, PyObject *sequence)
{
    PyObject *fields, *field; /* owned; borrowed from fields */
    Py_ssize_t i;
    int same;

    if (PyList_Check(sequence) || !oomkit_type_is_named_tuple(st, Py_TYPE(sequence))) {
        return 0;
    }
    fields = PyObject_GetAttr((PyObject *)Py_TYPE(sequence), st->str_fields);
    if (fields == NULL) {
        return -1;
    }
    for (i = 0; PyTuple_Check(fields) && i < PyTuple_GET_SIZE(fields); i++) {
        field = PyTuple_GET_ITEM(fields, i);
        same = PyObject_RichCompareBool(field, st->str_loss, Py_EQ);
        if (same != 0) {
            Py_DECREF(fields);
            return same < 0 ? -1 : i;
        }
    }
    Py_DECREF(fields);
    return 0;
}

int
oomkit_loss_is_at(oomkit_state *st, PyObject *result, Py_ssize_t number, PyObject *key)
{
    Py_ssize_t position;
    if (key != NULL) {
        return PyObject_RichCompareBool(key, st->str_loss, Py_EQ);
    }
    position = loss_position(st, result);
    return position < 0 ? -1 : position == number;
}

/* An error of the result's own code: it has no loss then. Memory that runs out and what
 * is no Exception (KeyboardInterrupt) pass. */
static int
loss_is_not_there(void)
{
    if (PyErr_ExceptionMatches(PyExc_MemoryError) ||
        !PyErr_ExceptionMatches(PyExc_Exception)) {
        return 0;
    }
    PyErr_Clear(); /* of whatever kind: it was only asked */
    return 1;
}

/* What stands where a loss stands, of whatever type; NULL as oomkit_result_loss. */
static PyObject *
loss_candidate(oomkit_state *st, PyObject *result)
{
    PyObject *value; /* owned */

    if (oomkit_tensor_check(st, result)) {
        return Py_NewRef(result);
    }
    if (PyTuple_Check(result) || PyList_Check(result)) {
        Py_ssize_t position =
            PySequence_Fast_GET_SIZE(result) == 0 ? -1 : loss_position(st, result);
        return position < 0 ? NULL : PySequence_GetItem(result, position);
    }
    if (result == Py_None || PyUnicode_Check(result) || PyFloat_Check(result) ||
        PyLong_Check(result)) {
        return NULL;
    }
    if (PyDict_Check(result)) { /* not by its __missing__, which may add an entry */
        value = PyDict_GetItemWithError(result, st->str_loss);
        if (value != NULL || PyErr_Occurred() || PyDict_CheckExact(result)) {
            return Py_XNewRef(value);
        }
    } else if (PyMapping_Check(result)) {
        value = PyObject_GetItem(result, st->str_loss);
        if (value != NULL || !loss_is_not_there()) {
            return value;
        }
    }
    value = PyObject_GetAttr(result, st->str_loss);
    if (value == NULL) {
        loss_is_not_there();
    }
    return value;
}

PyObject *
oomkit_result_loss(oomkit_state *st, PyObject *result)
{
    PyObject *value = loss_candidate(st, result); /* owned */
    if (value != NULL && !oomkit_tensor_check(st, value)) {
        Py_CLEAR(value);
    }
    return value;
}
