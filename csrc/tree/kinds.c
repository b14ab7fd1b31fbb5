/* What the values of a type are, remembered: arguments of the same few types come with
 * every call. */
#include "kinds.h"
#include "tree.h"
#include "../py/tensor.h"

#include <string.h>

/* Interned names in dictionaries of types are found without Python code and without
 * failing. */
int
oomkit_type_defines(PyTypeObject *type, PyObject *name)
{
    PyObject *mro = type->tp_mro; /* borrowed from the type */
    Py_ssize_t i;

    for (i = 0; mro != NULL && i < PyTuple_GET_SIZE(mro); i++) {
        PyTypeObject *each = (PyTypeObject *)PyTuple_GET_ITEM(mro, i);
        if ((each->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0 && each->tp_dict != NULL &&
            PyDict_GetItemWithError(each->tp_dict, name) != NULL) {
            return 1;
        }
    }
    return 0;
}

int
oomkit_type_is_named_tuple(const oomkit_state *st, PyTypeObject *type)
{
    return type != &PyTuple_Type && oomkit_type_defines(type, st->str_fields);
}

/* Made by @dataclass, or comes from such a class. */
static int
type_is_data_class(const oomkit_state *st, PyTypeObject *type)
{
    return oomkit_type_defines(type, st->str_dataclass_fields);
}

PyTypeObject *
oomkit_output_base(PyTypeObject *type)
{
    while (type->tp_base != NULL && (type->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0) {
        type = type->tp_base;
    }
    return type;
}

/* Are its instances built on `object` alone, with a dictionary or slots? */
static int
type_is_plain_object(PyTypeObject *type)
{
    return (type->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0 &&
           oomkit_output_base(type) == &PyBaseObject_Type;
}

int
oomkit_output_type(const oomkit_state *st, PyTypeObject *type)
{
    if (PyType_FastSubclass(type, Py_TPFLAGS_DICT_SUBCLASS)) {
        return type != &PyDict_Type;
    }
    if (strcmp(type->tp_name, "types.SimpleNamespace") == 0) {
        return 1;
    }
    if (!type_is_plain_object(type) ||
        PyType_IsSubtype(type, (PyTypeObject *)st->Module)) {
        return 0;
    }
    return PyType_IsSubtype(type, (PyTypeObject *)st->UserDict) ||
           type_is_data_class(st, type);
}

/* The type, or one that it comes from, that has a splitter. Borrowed from the state;
 * NULL when there is none. Hashing types runs no Python code but that of a metaclass.
 */
PyObject *
oomkit_splitter_of(const oomkit_state *st, PyTypeObject *type)
{
    PyObject *found = NULL; /* borrowed from st->splitters */
    Py_ssize_t i;

    if (st->splitters == NULL || type->tp_mro == NULL) {
        return NULL;
    }
    for (i = 0; found == NULL && i < PyTuple_GET_SIZE(type->tp_mro); i++) {
        found = PyDict_GetItem(st->splitters, PyTuple_GET_ITEM(type->tp_mro, i));
    }
    return found;
}

static int
is_array(const PyTypeObject *type)
{
    for (; type != NULL; type = type->tp_base) {
        if (strcmp(type->tp_name, "numpy.ndarray") == 0) {
            return 1;
        }
    }
    return 0;
}

static int
is_model(const oomkit_state *st, PyTypeObject *type)
{
    return PyType_IsSubtype(type, (PyTypeObject *)st->Module) ||
           PyType_IsSubtype(type, (PyTypeObject *)st->Optimizer) ||
           PyType_IsSubtype(type, (PyTypeObject *)st->LRScheduler) ||
           PyType_IsSubtype(type, (PyTypeObject *)st->GradScaler);
}

static int
kind_find(const oomkit_state *st, PyTypeObject *type)
{
    int custom = oomkit_splitter_of(st, type) != NULL ? OOMKIT_KIND_CUSTOM : 0;

    if (PyType_FastSubclass(type, Py_TPFLAGS_TUPLE_SUBCLASS)) {
        if (type == (PyTypeObject *)st->Size || !oomkit_type_is_named_tuple(st, type)) {
            return custom | OOMKIT_KIND_CLOSED;
        }
        if (PyType_IsSubtype(type, (PyTypeObject *)st->PackedSequence)) {
            custom |= OOMKIT_KIND_PACKED;
        }
        return custom | OOMKIT_KIND_TUPLE;
    }
    if (PyType_IsSubtype(type, (PyTypeObject *)st->Tensor)) {
        return PyType_IsSubtype(type, (PyTypeObject *)st->Parameter)
                   ? OOMKIT_KIND_CLOSED
                   : custom | OOMKIT_KIND_TENSOR;
    }
    if (is_model(st, type)) {
        return custom | OOMKIT_KIND_MODEL;
    }
    if (is_array(type)) {
        return custom | OOMKIT_KIND_ARRAY;
    }
    if (oomkit_output_type(st, type) || (custom != 0 && type_is_plain_object(type))) {
        return custom | OOMKIT_KIND_OBJECT;
    }
    return custom | OOMKIT_KIND_CLOSED;
}

/* A type that was freed may leave its address to another one, but never its tag; one
 * without a tag (0) is looked at anew each time. Types written in C stay. */
int
oomkit_kind_of(oomkit_state *st, PyTypeObject *type)
{
    size_t place = ((size_t)(uintptr_t)type >> 4) ^ ((size_t)(uintptr_t)type >> 10);
    oomkit_type_kind *known = &st->kinds[place % OOMKIT_TYPE_KINDS];
    unsigned int tag =
        (type->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0 ? type->tp_version_tag : UINT_MAX;

    if (known->type == type && known->tag == tag && tag != 0) {
        return known->kind;
    }
    *known = (oomkit_type_kind){
        .type = type, .tag = tag, .kind = (uint8_t)kind_find(st, type)};
    return known->kind;
}

void
oomkit_kinds_forget(oomkit_state *st)
{
    memset(st->kinds, 0, sizeof(st->kinds));
}

/* --- what functions return --- */

static int
is_struct_sequence(oomkit_state *st, PyObject *object)
{
    OWNED PyObject *count =
        PyObject_GetAttr((PyObject *)Py_TYPE(object), st->str_n_sequence_fields);

    if (count == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear();
        return 0;
    }
    return PyLong_Check(count); /* torch.return_types */
}

int
oomkit_output_is_tuple(oomkit_state *st, PyObject *object)
{
    if (!PyTuple_Check(object)) {
        return 0;
    }
    if (PyTuple_CheckExact(object) || oomkit_type_is_named_tuple(st, Py_TYPE(object))) {
        return 1;
    }
    return is_struct_sequence(st, object);
}

int
oomkit_output_is_cache_name(PyObject *name)
{
    const char *text; /* borrowed from name */

    if (name == NULL || !PyUnicode_Check(name)) {
        return 0;
    }
    text = PyUnicode_AsUTF8(name);
    if (text == NULL) {
        PyErr_Clear(); /* not a name that can be written: not one of these */
        return 0;
    }
    return strncmp(text, "past_", 5) == 0 || strstr(text, "cache") != NULL ||
           strcmp(text, "mems") == 0;
}

/* None, a number or a string: holds no tensor. */
static int
is_plain(PyObject *value)
{
    return value == Py_None || PyFloat_Check(value) || PyLong_Check(value) ||
           PyUnicode_Check(value) || PyBytes_Check(value) || PyType_Check(value);
}

int
oomkit_output_is_cache(const oomkit_state *st, PyObject *name, PyObject *value)
{
    const char *type = Py_TYPE(value)->tp_name;
    size_t length = strlen(type);

    if (is_plain(value) || PyTuple_Check(value) || PyList_Check(value) ||
        PyDict_Check(value) || oomkit_tensor_check(st, value)) {
        return 0;
    }
    if (oomkit_output_is_cache_name(name)) {
        return 1;
    }
    return length >= 5 && strcmp(type + length - 5, "Cache") == 0 &&
           (Py_TYPE(value)->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0;
}
