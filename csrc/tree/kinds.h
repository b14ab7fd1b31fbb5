/* What the values of a type are. */
#ifndef OOMKIT_TREE_KINDS_H
#define OOMKIT_TREE_KINDS_H

#include "../py/state.h"

enum { /* besides those that flatten.c knows itself */
       OOMKIT_KIND_CLOSED = 0,
       OOMKIT_KIND_TENSOR,
       OOMKIT_KIND_TUPLE,  /* named */
       OOMKIT_KIND_OBJECT, /* a subclass of dict, a UserDict, a data class, or a plain
                              object whose type has a splitter */
       OOMKIT_KIND_ARRAY,
       OOMKIT_KIND_MASK = 15,
       OOMKIT_KIND_MODEL = 32,  /* closed: a module, an optimizer, a scheduler */
       OOMKIT_KIND_PACKED = 64, /* a PackedSequence */
       OOMKIT_KIND_CUSTOM = 128 /* the type, or one that it comes from, has a splitter
                                 */
};

/* One of them, with bits. Runs no Python code and cannot fail. */
int
oomkit_kind_of(oomkit_state *st, PyTypeObject *type);

/* After a type was given a splitter. */
void
oomkit_kinds_forget(oomkit_state *st);

/* None, a number or a string: holds nothing. */
static inline int
oomkit_value_is_plain(PyObject *value)
{
    PyTypeObject *type = Py_TYPE(value);
    return value == Py_None || type == &PyLong_Type || type == &PyFloat_Type ||
           type == &PyUnicode_Type || type == &PyBool_Type;
}

/* Does the type or one that it comes from define the (interned) name? */
int
oomkit_type_defines(PyTypeObject *type, PyObject *name);

/* Named tuples: a tuple type that has `_fields` of its own or inherited. */
int
oomkit_type_is_named_tuple(const oomkit_state *st, PyTypeObject *type);

/* Of objects with named parts: a subclass of dict, a UserDict, a data class, a
 * SimpleNamespace? Runs no Python code. */
int
oomkit_output_type(const oomkit_state *st, PyTypeObject *type);

/* The type written in C that the instances are built on. Borrowed. */
PyTypeObject *
oomkit_output_base(PyTypeObject *type);

/* A tuple, named tuple or the tuple that torch.max() returns? 1, 0 or -1. */
int
oomkit_output_is_tuple(oomkit_state *st, PyObject *object);

/* Is this the name under which models return their cache? */
int
oomkit_output_is_cache_name(PyObject *name);

/* An object that only a model can read, named as a cache or under such a name: it would
 * keep the graph of the micro-batch. */
int
oomkit_output_is_cache(const oomkit_state *st, PyObject *name, PyObject *value);

#endif
