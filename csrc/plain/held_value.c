/* One value of the user's plain state, held over an attempt. What is small is held as
 * it is. What is large must not live longer for it: a tensor that the step replaces,
 * the outputs of the step before with their graph. */
#include "plain_state.h"
#include "../py/tensor.h"

#define LIGHT_ITEMS 64
#define LIGHT_DEPTH 3

int
oomkit_is_array(const PyTypeObject *type)
{
    for (; type != NULL; type = type->tp_base) {
        if (strcmp(type->tp_name, "numpy.ndarray") == 0) {
            return 1;
        }
    }
    return 0;
}

static int
is_light(oomkit_state *st, PyObject *value, int depth);

/* No graph behind it, and few bytes. 1, 0 or -1. */
static int
tensor_is_light(oomkit_state *st, PyObject *tensor)
{
    oomkit_tensor_facts facts;
    int leaf = 1;

    if (oomkit_tensor_is_parameter(st, tensor)) {
        return 1; /* the model has it */
    }
    if (oomkit_tensor_facts_get(st, tensor, 0, &facts) < 0) {
        return -1;
    }
    if (facts.bytes > OOMKIT_PLAIN_SMALL) {
        return 0;
    }
    if (facts.requires_grad) {
        leaf = oomkit_tensor_is_leaf(tensor, &facts);
    }
    return leaf;
}

static int
array_is_light(PyObject *array)
{
    Py_buffer view;
    int light;

    if (PyObject_GetBuffer(array, &view, PyBUF_FULL_RO) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) {
            return -1;
        }
        PyErr_Clear(); /* a dtype without a buffer */
        return 0;
    }
    light = view.len <= OOMKIT_PLAIN_SMALL;
    PyBuffer_Release(&view);
    return light;
}

/* Lists, tuples and dicts. 1, 0 or -1. */
static int
container_is_light(oomkit_state *st, PyObject *value, int depth)
{
    PyObject *key, *item; /* borrowed */
    Py_ssize_t at = 0, i;
    int light = 1;

    if (PyDict_Check(value)) {
        light = PyDict_GET_SIZE(value) <= LIGHT_ITEMS;
        while (light == 1 && PyDict_Next(value, &at, &key, &item)) {
            light = is_light(st, item, depth - 1);
        }
        return light;
    }
    light = PySequence_Fast_GET_SIZE(value) <= LIGHT_ITEMS;
    for (i = 0; light == 1 && i < PySequence_Fast_GET_SIZE(value); i++) {
        light = is_light(st, PySequence_Fast_GET_ITEM(value, i), depth - 1);
    }
    return light;
}

/* An object made in Python: by what its dictionary holds. 1, 0 or -1. */
static int
object_is_light(oomkit_state *st, PyObject *value, int depth)
{
    OWNED PyObject *dict = PyObject_GenericGetDict(value, NULL);

    if (dict == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear(); /* slots */
        return 0;
    }
    return container_is_light(st, dict, depth);
}

/* May it be held, at no cost of memory? 1, 0 or -1. */
static int
is_light(oomkit_state *st, PyObject *value, int depth)
{
    PyTypeObject *type = Py_TYPE(value);

    if (value == Py_None || PyFloat_CheckExact(value) || PyLong_CheckExact(value) ||
        PyBool_Check(value) || PyUnicode_CheckExact(value)) {
        return 1;
    }
    if (oomkit_tensor_check(st, value)) {
        return tensor_is_light(st, value);
    }
    if (depth <= 0) {
        return 0;
    }
    if (PyList_Check(value) || PyTuple_Check(value) || PyDict_Check(value)) {
        return container_is_light(st, value, depth);
    }
    if (oomkit_is_array(type)) {
        return array_is_light(value);
    }
    if (!PyObject_IS_GC(value) || PyWeakref_Check(value) || PyType_Check(value) ||
        PyFunction_Check(value) || PyModule_Check(value) ||
        PyObject_TypeCheck(value, (PyTypeObject *)st->Module) ||
        PyObject_TypeCheck(value, (PyTypeObject *)st->Optimizer)) {
        return 1;
    }
    if (PyAnySet_Check(value)) {
        return PySet_GET_SIZE(value) <= LIGHT_ITEMS;
    }
    return (type->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0
               ? object_is_light(st, value, depth)
               : 0;
}

/* The value of a tensor that may be gone when it is to come back. 0 or -1. */
static int
held_copy(oomkit_state *st, PyObject *tensor, uint64_t *room, oomkit_held *held)
{
    oomkit_tensor_facts facts;

    if (oomkit_tensor_facts_get(st, tensor, 0, &facts) < 0) {
        return -1;
    }
    held->is_state = !facts.requires_grad;
    if (facts.requires_grad) {
        const int leaf = oomkit_tensor_is_leaf(tensor, &facts);
        if (leaf < 0) {
            return -1;
        }
        held->is_leaf = leaf > 0;
        held->has_graph = leaf == 0;
    }
    if (facts.bytes <= OOMKIT_PLAIN_SMALL) { /* its graph must not be held, it may */
        held->copy = PyObject_CallMethodNoArgs(tensor, st->str_detach);
        return held->copy == NULL ? -1 : 0;
    }
    if (facts.bytes > *room) {
        return 0;
    }
    *room -= facts.bytes;
    held->copy = oomkit_host_copy(st, tensor);
    if (held->copy == NULL) {
        if (!oomkit_exception_is_oom(st)) {
            return -1;
        }
        PyErr_Clear(); /* accounted for: said, should it be missing */
        return 0;
    }
    held->device = PyObject_GetAttr(tensor, st->str_device);
    return held->device == NULL ? -1 : 0;
}

int
oomkit_held_take(oomkit_state *st, PyObject *value, int what, uint64_t *room,
                 oomkit_held *held)
{
    int light;

    memset(held, 0, sizeof(*held));
    if (value == NULL) {
        return 0;
    }
    held->address = value;
    light = (what & OOMKIT_PLAIN_ALL) != 0 && !oomkit_tensor_check(st, value)
                ? 1
                : is_light(st, value, LIGHT_DEPTH);
    if (light != 0) {
        held->kind = OOMKIT_HELD_STRONG;
        held->value = light < 0 ? NULL : Py_NewRef(value);
        return light < 0 ? -1 : 0;
    }
    held->kind = OOMKIT_HELD_ADDRESS;
    if (!PyType_SUPPORTS_WEAKREFS(Py_TYPE(value))) {
        return 0;
    }
    held->value = PyWeakref_NewRef(value, NULL);
    if (held->value == NULL) {
        return -1;
    }
    held->kind = OOMKIT_HELD_WEAK;
    return oomkit_tensor_check(st, value) ? held_copy(st, value, room, held) : 0;
}

int
oomkit_held_same(const oomkit_held *held, const PyObject *now)
{
    switch (held->kind) {
    case OOMKIT_HELD_ABSENT:
        return now == NULL;
    case OOMKIT_HELD_WEAK:
        return now != NULL && PyWeakref_GET_OBJECT(held->value) == now;
    default:
        return held->address == now;
    }
}

/* The values of a tensor that is gone. New reference or NULL. */
static PyObject *
held_values(oomkit_state *st, const oomkit_held *held)
{
    PyObject *value; /* owned, returned */

    if (held->device == NULL) {
        return Py_NewRef(held->copy);
    }
    value = PyObject_CallMethodOneArg(held->copy, st->str_to, held->device);
    if (value == held->copy) { /* on the CPU: a second roll-back needs the copy */
        Py_SETREF(value, PyObject_CallMethodNoArgs(value, st->str_clone));
    }
    return value;
}

/* In its place where it had a graph: no backward must end there without a word. Steals
 * `value`. New reference or NULL. */
static PyObject *
held_without_graph(oomkit_call *call, PyObject *value)
{
    const Py_ssize_t n = call->parts->param_count;
    OWNED PyObject *leaves = PyTuple_New(n);
    PyObject *made; /* owned, returned */
    Py_ssize_t i;

    for (i = 0; leaves != NULL && i < n; i++) {
        PyTuple_SET_ITEM(leaves, i, Py_NewRef(call->parts->params[i]));
    }
    made = leaves == NULL ? NULL
                          : PyObject_CallFunctionObjArgs(call->st->lost_graph, value,
                                                         leaves, NULL);
    Py_DECREF(value);
    return made;
}

PyObject *
oomkit_held_give(oomkit_call *call, const oomkit_held *held)
{
    oomkit_state *st = call->st;
    PyObject *value = NULL; /* owned, returned */

    if (held->kind == OOMKIT_HELD_STRONG) {
        return Py_NewRef(held->value);
    }
    if (held->kind == OOMKIT_HELD_WEAK) {
        value = oomkit_reference_get(held->value);
    }
    if (value != NULL || held->copy == NULL) {
        return value;
    }
    value = held_values(st, held);
    if (value != NULL && held->has_graph) { /* a backward must not end there */
        value = held_without_graph(call, value);
    } else if (value != NULL && held->is_leaf &&
               PyObject_SetAttr(value, st->str_requires_grad, Py_True) < 0) {
        Py_CLEAR(value);
    }
    return value;
}

void
oomkit_held_clear(oomkit_held *held)
{
    Py_CLEAR(held->value);
    Py_CLEAR(held->copy);
    Py_CLEAR(held->device);
}
