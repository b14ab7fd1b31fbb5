/* Walking the nodes of the arguments, and naming them for messages. */
#include "tree.h"
#include "tensor.h"

#define CLOSED_DEPTH 8 /* how deep a closed object is searched for tensors */

Py_ssize_t
oomkit_node_end(const oomkit_batch *batch, Py_ssize_t index)
{
    Py_ssize_t pending = 1;
    while (pending > 0) {
        pending += batch->nodes[index++].children - 1;
    }
    return index;
}

int
oomkit_node_holds_tensor(const oomkit_batch *batch, Py_ssize_t index)
{
    Py_ssize_t end = oomkit_node_end(batch, index);
    for (; index < end; index++) {
        if (batch->nodes[index].kind == OOMKIT_NODE_TENSOR) {
            return 1;
        }
    }
    return 0;
}

int
oomkit_node_is_split(const oomkit_batch *batch, Py_ssize_t index)
{
    Py_ssize_t end = oomkit_node_end(batch, index);
    for (; index < end; index++) {
        if (batch->nodes[index].split != OOMKIT_SPLIT_WHOLE) {
            return 1;
        }
    }
    return 0;
}

/* Does the type or one that it comes from define the name? Interned names in
 * dictionaries of types are found without Python code and without failing. */
static int
type_defines(PyTypeObject *type, PyObject *name)
{
    for (; type != NULL; type = type->tp_base) {
        if ((type->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0 && type->tp_dict != NULL &&
            PyDict_GetItemWithError(type->tp_dict, name) != NULL) {
            return 1;
        }
    }
    return 0;
}

int
oomkit_type_is_named_tuple(const oomkit_state *st, PyTypeObject *type)
{
    return type != &PyTuple_Type && type_defines(type, st->str_fields);
}

int
oomkit_type_is_data_class(const oomkit_state *st, PyTypeObject *type)
{
    return type_defines(type, st->str_dataclass_fields);
}

PyObject *
oomkit_argument_name(const oomkit_batch *batch, PyObject *names, Py_ssize_t argument)
{
    Py_ssize_t i;

    if (argument >= batch->positional) {
        return Py_NewRef(
            PyTuple_GET_ITEM(batch->kwnames, argument - batch->positional));
    }
    for (i = 0; names != NULL && i <= argument && i < PyTuple_GET_SIZE(names); i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i); /* borrowed from names */
        int starred = PyUnicode_Check(name) && PyUnicode_GET_LENGTH(name) > 0 &&
                      PyUnicode_READ_CHAR(name, 0) == '*';
        if (i == argument || starred) {
            return starred ? PyUnicode_FromString("*args") : Py_NewRef(name);
        }
    }
    return PyUnicode_FromString("*args");
}

/* text + "[key]" of the child. Steals `text`; new reference or NULL. */
static PyObject *
path_extend(PyObject *text, const oomkit_node *child, Py_ssize_t number)
{
    PyObject *longer; /* owned */
    longer = child->key != NULL ? PyUnicode_FromFormat("%U[%R]", text, child->key)
                                : PyUnicode_FromFormat("%U[%zd]", text, number);
    Py_DECREF(text);
    return longer;
}

PyObject *
oomkit_node_path(const oomkit_batch *batch, PyObject *names, Py_ssize_t index)
{
    Py_ssize_t at = 0, end, number = 0;
    PyObject *text; /* owned, stolen by path_extend() */

    while ((end = oomkit_node_end(batch, at)) <= index) {
        at = end;
        number++;
    }
    text = oomkit_argument_name(batch, names, number);
    while (text != NULL && at != index) {
        at++; /* the first child */
        for (number = 0; (end = oomkit_node_end(batch, at)) <= index; number++) {
            at = end;
        }
        text = path_extend(text, &batch->nodes[at], number);
    }
    return text;
}

/* --- objects that stay closed --- */

static int
closed_search(oomkit_state *st, PyObject *object, int64_t dim, int64_t rows, int depth);

/* 1, 0 or -1 with an exception. */
static int
closed_tensor(oomkit_state *st, PyObject *tensor, int64_t dim, int64_t rows)
{
    oomkit_tensor_facts facts;
    if (PyType_IsSubtype(Py_TYPE(tensor), (PyTypeObject *)st->Parameter)) {
        return 0;
    }
    if (rows < 0) {
        return 1;
    }
    if (oomkit_tensor_facts_get(st, tensor, dim, &facts) < 0) {
        return -1;
    }
    return facts.size == rows;
}

static int
closed_dict(oomkit_state *st, PyObject *dict, int64_t dim, int64_t rows, int depth)
{
    PyObject *key, *value; /* borrowed from dict */
    Py_ssize_t position = 0;
    int found = 0;

    while (found == 0 && PyDict_Next(dict, &position, &key, &value)) {
        PyObject *kept = Py_NewRef(value); /* owned: a subclass may run Python code */
        found = closed_search(st, kept, dim, rows, depth + 1);
        Py_DECREF(kept);
    }
    return found;
}

static int
closed_sequence(oomkit_state *st, PyObject *object, int64_t dim, int64_t rows,
                int depth)
{
    int is_list = PyList_Check(object);
    Py_ssize_t i;
    int found = 0;

    for (i = 0; found == 0 && i < PySequence_Fast_GET_SIZE(object); i++) {
        PyObject *kept = Py_NewRef(is_list ? PyList_GET_ITEM(object, i)
                                           : PyTuple_GET_ITEM(object, i)); /* owned */
        found = closed_search(st, kept, dim, rows, depth + 1);
        Py_DECREF(kept);
    }
    return found;
}

/* Data classes and UserDict keep their values in the instance's dictionary. Any other
 * object (a trainer, a configuration) may hold tensors that are no batch. */
static int
closed_instance(oomkit_state *st, PyObject *object, int64_t dim, int64_t rows,
                int depth)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject *dict; /* owned */
    int found = 0;

    if ((type->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0 ||
        PyType_IsSubtype(type, (PyTypeObject *)st->Module)) {
        return 0;
    }
    dict = PyObject_GenericGetDict(object, NULL);
    if (dict == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear(); /* no dictionary: nothing to look at */
        return 0;
    }
    if (PyDict_Check(dict)) {
        /* borrowed from dict */
        PyObject *data = PyDict_GetItemWithError(dict, st->str_data); /* borrowed */
        int wraps = data != NULL && PyDict_Check(data) && PyMapping_Check(object);
        if (wraps || oomkit_type_is_data_class(st, type)) {
            found = closed_dict(st, dict, dim, rows, depth);
        }
    }
    Py_DECREF(dict);
    return found;
}

static int
closed_search(oomkit_state *st, PyObject *object, int64_t dim, int64_t rows, int depth)
{
    if (depth > CLOSED_DEPTH || object == Py_None || PyType_Check(object)) {
        return 0;
    }
    if (oomkit_tensor_check(st, object)) {
        return closed_tensor(st, object, dim, rows);
    }
    if (PyDict_Check(object)) {
        return closed_dict(st, object, dim, rows, depth);
    }
    if (PyList_Check(object) || PyTuple_Check(object)) {
        return closed_sequence(st, object, dim, rows, depth);
    }
    return closed_instance(st, object, dim, rows, depth);
}

int
oomkit_object_holds_tensor(oomkit_state *st, PyObject *object, int64_t dim,
                           int64_t rows)
{
    if (oomkit_tensor_check(st, object)) {
        return 0; /* capture could not read it, or it is a Parameter: passed whole */
    }
    return closed_search(st, object, dim, rows, 0);
}
