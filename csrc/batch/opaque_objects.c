/* Objects that capture left closed: do they hold tensors? Before the first split only.
 */
#include "batch.h"
#include "../py/tensor.h"
#include "../tree/kinds.h"

#include <string.h>

#define CLOSED_DEPTH 8 /* how deep an object is searched */

typedef struct closed {
    oomkit_state *st;
    int64_t dim, rows; /* rows in this dimension, or -1: any tensor that has it */
    int any_object;    /* not only those that look like data */
} closed;

static int
closed_search(const closed *c, PyObject *object, int depth);

/* Is it a type of the interpreter's, which no program can have made or changed? Since
 * 3.12 some of them are on the heap. */
static int
type_is_builtin(const PyTypeObject *type)
{
    return (type->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0 ||
           (type->tp_flags & Py_TPFLAGS_IMMUTABLETYPE) != 0;
}

/* A container written in C that capture does not open; its iterator runs no Python
 * code. */
static int
type_is_closed_container(const PyTypeObject *type)
{
    static const char *const names[] = {"collections.deque", "set", "frozenset",
                                        "dict_values", NULL};
    int i, found = 0;

    for (; !found && type != NULL; type = type->tp_base) {
        for (i = 0; !found && names[i] != NULL; i++) {
            found = type_is_builtin(type) && strcmp(type->tp_name, names[i]) == 0;
        }
    }
    return found;
}

/* UserList and ChainMap: containers by their attributes. */
static int
type_is_wrapper(const PyTypeObject *type)
{
    for (; type != NULL; type = type->tp_base) {
        if (strcmp(type->tp_name, "UserList") == 0 ||
            strcmp(type->tp_name, "ChainMap") == 0) {
            return 1;
        }
    }
    return 0;
}

int
oomkit_closed_length(PyObject *object, Py_ssize_t *length)
{
    PyTypeObject *type = Py_TYPE(object);
    int is_sequence = PyList_Check(object) || PyTuple_Check(object) ||
                      PyRange_Check(object) || type_is_closed_container(type) ||
                      type_is_wrapper(type) ||
                      strcmp(type->tp_name, "array.array") == 0;

    if (!is_sequence || PyAnySet_Check(object)) {
        return 0;
    }
    *length = PyObject_Size(object);
    return *length < 0 ? -1 : 1;
}

/* 1, 0 or -1 with an exception. */
static int
closed_tensor(const closed *c, PyObject *tensor)
{
    oomkit_tensor_facts facts;
    if (PyType_IsSubtype(Py_TYPE(tensor), (PyTypeObject *)c->st->Parameter)) {
        return 0;
    }
    if (oomkit_tensor_facts_get(c->st, tensor, c->dim, &facts) < 0) {
        return -1;
    }
    return c->rows < 0 ? facts.size >= 0 : facts.size == c->rows;
}

static int
closed_dict(const closed *c, PyObject *dict, int depth)
{
    PyObject *key, *value; /* borrowed from dict */
    Py_ssize_t position = 0;
    int found = 0;

    while (found == 0 && PyDict_Next(dict, &position, &key, &value)) {
        OWNED PyObject *kept = Py_NewRef(value); /* a subclass may run Python code */
        found = closed_search(c, kept, depth + 1);
    }
    return found;
}

static int
closed_sequence(const closed *c, PyObject *object, int depth)
{
    int is_list = PyList_Check(object);
    Py_ssize_t i;
    int found = 0;

    for (i = 0; found == 0 && i < PySequence_Fast_GET_SIZE(object); i++) {
        OWNED PyObject *kept = Py_NewRef(is_list ? PyList_GET_ITEM(object, i)
                                                 : PyTuple_GET_ITEM(object, i));
        found = closed_search(c, kept, depth + 1);
    }
    return found;
}

/* A trainer, a configuration: what holds a module or an optimizer is no batch. */
static int
holds_model(const closed *c, PyObject *dict)
{
    PyObject *key, *value; /* borrowed from dict */
    Py_ssize_t position = 0;

    while (PyDict_Next(dict, &position, &key, &value)) {
        if ((oomkit_kind_of(c->st, Py_TYPE(value)) & OOMKIT_KIND_MODEL) != 0) {
            return 1;
        }
    }
    return 0;
}

/* The instance's dictionary of an object that can be data. Any other object (a trainer,
 * a configuration) may hold tensors that are no batch; what has a method `to()` is
 * moved between devices as batches are. */
static int
closed_instance(const closed *c, PyObject *object, int depth)
{
    PyTypeObject *type = Py_TYPE(object);
    OWNED PyObject *dict = NULL;

    if (PyModule_Check(object) || PyFunction_Check(object) || PyMethod_Check(object) ||
        (oomkit_kind_of(c->st, type) & OOMKIT_KIND_MODEL) != 0 ||
        oomkit_type_defines(type, c->st->str_state_dict) ||
        (depth == 0 && !c->any_object && !oomkit_output_type(c->st, type) &&
         !type_is_wrapper(type) && !oomkit_type_defines(type, c->st->str_to))) {
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
    return PyDict_Check(dict) && !holds_model(c, dict) ? closed_dict(c, dict, depth)
                                                       : 0;
}

static int
closed_search(const closed *c, PyObject *object, int depth)
{
    if (depth > CLOSED_DEPTH || object == Py_None || PyType_Check(object)) {
        return 0;
    }
    if (oomkit_tensor_check(c->st, object)) {
        return closed_tensor(c, object);
    }
    if (PyDict_Check(object)) {
        return holds_model(c, object) ? 0 : closed_dict(c, object, depth);
    }
    if (PyList_Check(object) || PyTuple_Check(object)) {
        return closed_sequence(c, object, depth);
    }
    if (type_is_closed_container(Py_TYPE(object)) ||
        Py_IS_TYPE(object, &PyDictProxy_Type)) {
        OWNED PyObject *values = Py_IS_TYPE(object, &PyDictProxy_Type)
                                     ? PyMapping_Values(object)
                                     : PySequence_Tuple(object);
        return values == NULL ? -1 : closed_sequence(c, values, depth);
    }
    return closed_instance(c, object, depth);
}

int
oomkit_object_holds_tensor(oomkit_state *st, PyObject *object, int64_t dim,
                           int64_t rows, int any_object)
{
    closed c = {st, dim, rows, any_object};
    if (oomkit_tensor_check(st, object)) {
        return 0; /* capture could not read it, or it is a Parameter: passed whole */
    }
    return closed_search(&c, object, 0);
}
