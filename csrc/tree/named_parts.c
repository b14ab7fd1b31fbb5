/* Mappings and data classes by their parts. */
#include "named_parts.h"
#include "kinds.h"
#include "../py/tensor.h"

#include <structmember.h>
#include <string.h>

int
oomkit_output_check(const oomkit_state *st, PyObject *object)
{
    return oomkit_output_type(st, Py_TYPE(object));
}

void
oomkit_parts_clear(oomkit_parts *parts)
{
    Py_CLEAR(parts->entries);
    Py_CLEAR(parts->attributes);
}

/* The instance's dictionary. New reference; NULL without an exception when there is
 * none. */
static PyObject *
instance_dict(PyObject *object)
{
    PyObject *dict = PyObject_GenericGetDict(object, NULL); /* owned */
    if (dict == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
    }
    return dict;
}

/* Entries in the mapping's own order, by the methods of the type in C: a subclass may
 * have changed what indexing means. New dictionary or NULL. */
static PyObject *
mapping_entries(PyObject *mapping)
{
    OWNED PyObject *entries = PyDict_New();
    OWNED PyObject *keys = oomkit_output_base(Py_TYPE(mapping))->tp_iter(mapping);

    while (entries != NULL && keys != NULL) {
        OWNED PyObject *key = PyIter_Next(keys);
        PyObject *value; /* borrowed from mapping */
        if (key == NULL) {
            return PyErr_Occurred() ? NULL : STEAL(entries);
        }
        value = PyDict_GetItemWithError(mapping, key);
        if (value == NULL || PyDict_SetItem(entries, key, value) < 0) {
            break;
        }
    }
    if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_RuntimeError, "a mapping changed while it was read");
    }
    return NULL;
}

/* Adds what lies in slots. 0 or -1. */
static int
open_slots(PyObject *object, PyObject *attributes)
{
    PyTypeObject *type = Py_TYPE(object);

    for (; type != NULL && type != &PyDict_Type; type = type->tp_base) {
        const PyMemberDef *member = type->tp_members;
        for (; member != NULL && member->name != NULL; member++) {
            OWNED PyObject *value = NULL;
            if (strncmp(member->name, "__", 2) == 0) {
                continue; /* __weakref__ and its like */
            }
            value = PyObject_GetAttrString(object, member->name);
            if (value == NULL) {
                if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
                    return -1;
                }
                PyErr_Clear(); /* a slot that was never set */
                continue;
            }
            if (PyDict_SetItemString(attributes, member->name, value) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

/* Everything in the instance's dictionary that is no entry under the same name. */
static int
open_attributes(PyObject *dict, oomkit_parts *parts)
{
    PyObject *name, *value; /* borrowed from dict */
    Py_ssize_t position = 0;

    while (PyDict_Next(dict, &position, &name, &value)) {
        PyObject *entry = NULL; /* borrowed from parts */
        if (parts->entries != NULL) {
            entry = PyDict_GetItemWithError(parts->entries, name);
            if (entry == NULL && PyErr_Occurred()) {
                return -1;
            }
        }
        if (entry == value || (value == parts->entries && value != NULL)) {
            continue;
        }
        if (PyDict_SetItem(parts->attributes, name, value) < 0) {
            return -1;
        }
    }
    return 0;
}

int
oomkit_output_open(oomkit_state *st, PyObject *object, oomkit_parts *parts)
{
    OWNED PyObject *dict = NULL;
    PyObject *data = NULL; /* borrowed from dict */
    int result = -1;

    *parts = (oomkit_parts){NULL, PyDict_New()};
    if (parts->attributes == NULL) {
        return -1;
    }
    dict = instance_dict(object);
    if (dict == NULL && PyErr_Occurred()) {
        goto done;
    }
    if (PyDict_Check(object)) {
        parts->entries = mapping_entries(object);
        if (parts->entries == NULL) {
            goto done;
        }
    } else if (dict != NULL &&
               PyType_IsSubtype(Py_TYPE(object), (PyTypeObject *)st->UserDict)) {
        data = PyDict_GetItemWithError(dict, st->str_data);
        if (data != NULL && PyDict_CheckExact(data)) {
            parts->entries = Py_NewRef(data);
        } else if (PyErr_Occurred()) {
            goto done;
        }
    }
    if (open_slots(object, parts->attributes) < 0 ||
        (dict != NULL && dict != object && open_attributes(dict, parts) < 0)) {
        goto done;
    }
    result = 0;
    if (data != NULL && parts->entries == data) { /* of our own from here on */
        Py_SETREF(parts->entries, PyDict_Copy(data));
        result = parts->entries == NULL ? -1 : 0;
    }
done:
    if (result < 0) {
        oomkit_parts_clear(parts);
    }
    return result;
}

/* --- making one anew --- */

/* The value under this name: of the attributes, then of the entries, then None.
 * Borrowed reference or NULL with an exception. */
static PyObject *
part_named(const oomkit_parts *parts, PyObject *name)
{
    PyObject *value = PyDict_GetItemWithError(parts->attributes, name);
    if (value == NULL && parts->entries != NULL && !PyErr_Occurred()) {
        value = PyDict_GetItemWithError(parts->entries, name);
    }
    return value != NULL || PyErr_Occurred() ? value : Py_None;
}

/* Was the entry an attribute as well, and has its value been dropped? 1, 0 or -1. */
static int
entry_is_dropped(PyObject *like, PyObject *dict, PyObject *name, PyObject *value)
{
    PyObject *before; /* borrowed from like */
    int mirrored;

    if (value != Py_None || dict == NULL || dict == like) {
        return 0;
    }
    mirrored = PyDict_Contains(dict, name);
    if (mirrored <= 0) {
        return mirrored;
    }
    before = PyDict_GetItemWithError(like, name);
    return before == NULL && PyErr_Occurred() ? -1 : before != Py_None;
}

static int
set_entries(PyObject *made, PyObject *like, PyObject *dict, const oomkit_parts *parts)
{
    PyTypeObject *base = oomkit_output_base(Py_TYPE(like));
    PyObject *key, *value; /* borrowed from parts */
    Py_ssize_t position = 0;

    while (PyDict_Next(parts->entries, &position, &key, &value)) {
        int dropped = entry_is_dropped(like, dict, key, value);
        if (dropped < 0 ||
            (!dropped && base->tp_as_mapping->mp_ass_subscript(made, key, value) < 0)) {
            return -1;
        }
    }
    return 0;
}

/* The instance's dictionary, name after name as in `dict`, that of `like`. 0 or -1. */
static int
set_dict(oomkit_state *st, PyObject *made, PyObject *dict, const oomkit_parts *parts)
{
    OWNED PyObject *fresh = PyObject_GenericGetDict(made, NULL);
    PyObject *name, *value; /* borrowed from dict; from parts */
    Py_ssize_t position = 0;
    int user = PyType_IsSubtype(Py_TYPE(made), (PyTypeObject *)st->UserDict);

    while (fresh != NULL && PyDict_Next(dict, &position, &name, &value)) {
        int is_data = user && parts->entries != NULL && PyUnicode_Check(name) &&
                      PyUnicode_Compare(name, st->str_data) == 0;
        value = is_data ? parts->entries : part_named(parts, name);
        if (value == NULL || PyDict_SetItem(fresh, name, value) < 0) {
            return -1;
        }
    }
    return fresh == NULL ? -1 : 0;
}

/* Attributes that `like` does not have in its dictionary lie in slots. 0 or -1. */
static int
set_slots(PyObject *made, PyObject *dict, const oomkit_parts *parts)
{
    PyObject *name, *value; /* borrowed from parts */
    Py_ssize_t position = 0;

    while (PyDict_Next(parts->attributes, &position, &name, &value)) {
        int there = dict == NULL ? 0 : PyDict_Contains(dict, name);
        if (there < 0 ||
            (there == 0 && PyObject_GenericSetAttr(made, name, value) < 0)) {
            return -1;
        }
    }
    return 0;
}

PyObject *
oomkit_output_like(oomkit_state *st, PyObject *like, const oomkit_parts *parts)
{
    PyTypeObject *type = Py_TYPE(like);
    OWNED PyObject *made =
        oomkit_output_base(type)->tp_new(type, st->empty_tuple, NULL);
    OWNED PyObject *dict = NULL;

    if (made == NULL) {
        return NULL;
    }
    dict = instance_dict(like);
    if ((dict == NULL && PyErr_Occurred()) ||
        (PyDict_Check(like) && set_entries(made, like, dict, parts) < 0)) {
        return NULL;
    }
    if (dict == like) { /* `self.__dict__ = self` */
        if (PyObject_GenericSetDict(made, made, NULL) < 0) {
            return NULL;
        }
    } else if ((dict != NULL && set_dict(st, made, dict, parts) < 0) ||
               set_slots(made, dict, parts) < 0) {
        return NULL;
    }
    return STEAL(made);
}
