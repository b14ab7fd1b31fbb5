/* What modules say of labels and their weights: asked in every split call, of each. */
#include "proof.h"
#include "../call/proven.h"
#include "../hook/graph.h"
#include "../members/members.h"
#include "../py/tensor.h"

/* c10::ScalarType; and what is looked through here, of larger ones torch is quicker. */
enum { RANGE_BYTE = 0, RANGE_SHORT = 2, RANGE_INT = 3, RANGE_LONG = 4 };

#define RANGE_BYTES (16 << 10)

/* The values of a dictionary (or of what stands for one) behind `list`. 0 or -1. */
static int
hints_add_values(PyObject *list, PyObject *dict)
{
    OWNED PyObject *values = NULL;
    PyObject *key, *value; /* borrowed */
    Py_ssize_t at = 0;

    if (!PyDict_CheckExact(dict)) {
        values = PyObject_CallMethod(dict, "values", NULL);
        return values == NULL ? -1
                              : PyList_SetSlice(list, PyList_GET_SIZE(list),
                                                PyList_GET_SIZE(list), values);
    }
    while (PyDict_Next(dict, &at, &key, &value)) {
        if (PyList_Append(list, value) < 0) {
            return -1;
        }
    }
    return 0;
}

/* A dictionary that modules have themselves. New reference or NULL. */
static PyObject *
hints_dict(PyObject *object, PyObject *name)
{
    PyObject *own = oomkit_own_attribute(object, name); /* returned */
    return own != NULL || PyErr_Occurred() ? own : PyObject_GetAttr(object, name);
}

/* A module into `found` unless it is there, its children behind `todo`, the first one
 * last. 0 or -1. */
static int
hints_meet(oomkit_state *st, PyObject *object, oomkit_hashes *seen, PyObject *found,
           PyObject *todo)
{
    OWNED PyObject *children = NULL, *list = NULL;
    int is = PyObject_IsInstance(object, st->Module);
    Py_ssize_t end = PyList_GET_SIZE(todo);

    if (is > 0) {
        is = oomkit_hashes_keep(seen, oomkit_hash_mix(0, (uintptr_t)object));
    }
    if (is <= 0) {
        return is;
    }
    if (PyList_Append(found, object) < 0) {
        return -1;
    }
    children = hints_dict(object, st->str_modules);
    if (children == NULL) {
        return -1;
    }
    if (PyDict_CheckExact(children) && PyDict_GET_SIZE(children) == 0) {
        return 0;
    }
    list = PyList_New(0);
    return list == NULL || hints_add_values(list, children) < 0 ||
                   PyList_Reverse(list) < 0
               ? -1
               : PyList_SetSlice(todo, end, end, list);
}

PyObject *
oomkit_proof_modules_of(PyObject *module, PyObject *roots)
{
    oomkit_state *st = oomkit_state_of_module(module);
    OWNED PyObject *found = PyList_New(0), *todo = PySequence_List(roots);
    oomkit_hashes seen = {0};
    int result = found == NULL || todo == NULL ? -1 : PyList_Reverse(todo);

    while (result == 0 && PyList_GET_SIZE(todo) > 0) {
        const Py_ssize_t last = PyList_GET_SIZE(todo) - 1;
        OWNED PyObject *object = Py_NewRef(PyList_GET_ITEM(todo, last));
        result = PyList_SetSlice(todo, last, last + 1, NULL);
        if (result == 0) {
            result = hints_meet(st, object, &seen, found, todo);
        }
    }
    oomkit_hashes_clear(&seen);
    return result < 0 ? NULL : STEAL(found);
}

/* What a module itself has as `ignore_index`, or its class, behind `values`: it looks
 * in three more places for what it has not. 0 or -1. */
static int
hints_add_ignored(const oomkit_state *st, PyObject *object, PyObject *values)
{
    OWNED PyObject *own = oomkit_own_attribute(object, st->str_ignore_index);
    OWNED PyObject *value = NULL;

    if (PyErr_Occurred()) {
        return -1;
    }
    if (own == NULL && _PyType_Lookup(Py_TYPE(object), st->str_ignore_index) == NULL) {
        return 0;
    }
    value = PyObject_GetAttr(object, st->str_ignore_index);
    if (value == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear(); /* a property that has none now */
        return 0;
    }
    return value == NULL ? -1 : PyList_Append(values, value);
}

/* label_hints(modules, norms): see oomkit._proof.weights. */
PyObject *
oomkit_proof_label_hints(PyObject *module, PyObject *args)
{
    const oomkit_state *st = oomkit_state_of_module(module);
    OWNED PyObject *ignored = PyList_New(0), *buffers = PyList_New(0);
    PyObject *modules, *norms; /* borrowed */
    Py_ssize_t i;

    if (ignored == NULL || buffers == NULL ||
        !PyArg_ParseTuple(args, "O!O:label_hints", &PyList_Type, &modules, &norms)) {
        return NULL;
    }
    for (i = 0; i < PyList_GET_SIZE(modules); i++) {
        OWNED PyObject *object = Py_NewRef(PyList_GET_ITEM(modules, i)), *own = NULL;
        const int norm = PyObject_IsInstance(object, norms);
        if (norm < 0 || hints_add_ignored(st, object, ignored) < 0) {
            return NULL;
        }
        own = norm ? NULL : hints_dict(object, st->str_buffers);
        if (!norm && (own == NULL || hints_add_values(buffers, own) < 0)) {
            return NULL;
        }
    }
    return PyTuple_Pack(2, ignored, buffers);
}

/* The number at `at` among integers of that type, c10::ScalarType. */
static int64_t
range_number(const unsigned char *bytes, size_t at, int32_t dtype)
{
    int64_t wide;
    int32_t word;
    int16_t half;

    switch (dtype) {
    case RANGE_LONG:
        memcpy(&wide, bytes + at * sizeof(wide), sizeof(wide));
        return wide;
    case RANGE_INT:
        memcpy(&word, bytes + at * sizeof(word), sizeof(word));
        return word;
    case RANGE_SHORT:
        memcpy(&half, bytes + at * sizeof(half), sizeof(half));
        return half;
    default:
        return bytes[at];
    }
}

/* label_range(tensor): see oomkit._proof.weights. */
PyObject *
oomkit_proof_label_range(PyObject *module, PyObject *tensor)
{
    oomkit_state *st = oomkit_state_of_module(module);
    oomkit_tensor_facts facts;
    OWNED_MEMORY unsigned char *bytes = NULL;
    int64_t low, high, number;
    size_t i, size;

    if (oomkit_tensor_facts_get(st, tensor, 0, &facts) < 0) {
        return NULL;
    }
    size = facts.dtype == RANGE_LONG    ? sizeof(int64_t)
           : facts.dtype == RANGE_INT   ? sizeof(int32_t)
           : facts.dtype == RANGE_SHORT ? sizeof(int16_t)
                                        : 1;
    if ((size == 1 && facts.dtype != RANGE_BYTE) || facts.bytes == 0 ||
        facts.bytes > RANGE_BYTES || facts.device_type != 0) {
        Py_RETURN_NONE;
    }
    bytes = PyMem_Malloc(facts.bytes);
    if (bytes == NULL) {
        return PyErr_NoMemory();
    }
    if (st->bridge->bytes_get(tensor, st->impl_offset, bytes, facts.bytes) !=
        OOMKIT_OK) {
        Py_RETURN_NONE;
    }
    low = high = range_number(bytes, 0, facts.dtype);
    for (i = 1; i < facts.bytes / size; i++) {
        number = range_number(bytes, i, facts.dtype);
        low = number < low ? number : low;
        high = number > high ? number : high;
    }
    return Py_BuildValue("LL", (long long)low, (long long)high);
}
