/* The loss in what a step returns. */
#include "join_rules.h"
#include "result.h"
#include "../py/tensor.h"
#include "../tree/kinds.h"

#define PLACES 8 /* longer tuples and lists are rows rather than places */

/* A tensor that a caller may run backward on: 1; 2 of one element; 0; -1. */
static int
loss_is_open(oomkit_state *st, PyObject *value)
{
    oomkit_tensor_facts facts;

    if (!oomkit_tensor_check(st, value)) {
        return 0;
    }
    if (oomkit_tensor_facts_get(st, value, 0, &facts) < 0) {
        return -1;
    }
    return !facts.requires_grad ? 0 : facts.ndim == 0 ? 2 : 1;
}

/* Where the loss of a tuple or list without names is: the first element, unless that is
 * no number to run backward on and one other is, as in (logits, loss). -1 with an
 * exception. */
static Py_ssize_t
loss_number(oomkit_state *st, PyObject *sequence)
{
    PyObject *const *items = PySequence_Fast_ITEMS(sequence); /* borrowed */
    Py_ssize_t i, at = 0, n = PySequence_Fast_GET_SIZE(sequence);
    oomkit_tensor_facts facts;
    int open = n < 2 || n > PLACES ? 2 : loss_is_open(st, items[0]);

    if (open == 1 && oomkit_tensor_facts_get(st, items[0], 0, &facts) == 0) {
        open += facts.ndim == 1 && facts.size == 1; /* a loss of shape [1] */
    }
    for (i = 1; open >= 0 && open < 2 && i < n; i++) {
        int other = loss_is_open(st, items[i]);
        if (other < 0 || (other == 2 && at > 0)) {
            return other < 0 ? -1 : 0; /* two of them: not known */
        }
        at = other == 2 ? i : at;
    }
    return open < 0 || PyErr_Occurred() ? -1 : at;
}

/* Where the loss of a tuple or list is: the field `loss` of a named tuple; else, by
 * `known` or what the elements are (negative), its number. -1 with an exception. */
static Py_ssize_t
loss_position(oomkit_state *st, PyObject *sequence, Py_ssize_t known)
{
    OWNED PyObject *fields = NULL;
    PyObject *field; /* borrowed from fields */
    Py_ssize_t i;
    int same;

    if (PyList_Check(sequence) || !oomkit_type_is_named_tuple(st, Py_TYPE(sequence))) {
        return known < 0 ? loss_number(st, sequence)
                         : (known < PySequence_Fast_GET_SIZE(sequence) ? known : 0);
    }
    fields = PyObject_GetAttr((PyObject *)Py_TYPE(sequence), st->str_fields);
    if (fields == NULL) {
        return -1;
    }
    for (i = 0; PyTuple_Check(fields) && i < PyTuple_GET_SIZE(fields); i++) {
        field = PyTuple_GET_ITEM(fields, i);
        same = PyObject_RichCompareBool(field, st->str_loss, Py_EQ);
        if (same != 0) {
            return same < 0 ? -1 : i;
        }
    }
    return known < 0 ? loss_number(st, sequence) : known;
}

Py_ssize_t
oomkit_loss_place(oomkit_state *st, PyObject *result)
{
    return PyTuple_Check(result) || PyList_Check(result) ? loss_position(st, result, -1)
                                                         : 0;
}

int
oomkit_loss_is_at(oomkit_state *st, PyObject *result, Py_ssize_t number, Py_ssize_t at)
{
    Py_ssize_t position = loss_position(st, result, at);
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
loss_candidate(oomkit_state *st, PyObject *result, Py_ssize_t at)
{
    PyObject *value; /* owned */

    if (oomkit_tensor_check(st, result)) {
        return Py_NewRef(result);
    }
    if (PyTuple_Check(result) || PyList_Check(result)) {
        Py_ssize_t position =
            PySequence_Fast_GET_SIZE(result) == 0 ? -1 : loss_position(st, result, at);
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
oomkit_result_loss_at(oomkit_state *st, PyObject *result, Py_ssize_t at)
{
    PyObject *value = loss_candidate(st, result, at); /* owned */
    if (value != NULL && !oomkit_tensor_check(st, value)) {
        Py_CLEAR(value);
    }
    return value;
}

PyObject *
oomkit_result_loss(oomkit_state *st, PyObject *result)
{
    return oomkit_result_loss_at(st, result, -1);
}

int
oomkit_result_wants_backward(oomkit_state *st, PyObject *result, PyObject **loss,
                             oomkit_tensor_facts *facts)
{
    OWNED PyObject *found = NULL;

    if (result == Py_None) {
        return 0;
    }
    found = oomkit_result_loss(st, result);
    if (found == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    if (facts == NULL) {
        return oomkit_tensor_wants_grad(st, found);
    }
    if (oomkit_tensor_facts_get(st, found, 0, facts) < 0) {
        return -1;
    }
    if (facts->requires_grad && loss != NULL) {
        *loss = STEAL(found);
    }
    return facts->requires_grad != 0;
}
