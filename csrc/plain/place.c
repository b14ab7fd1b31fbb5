/* Reading and writing one place: an attribute, a variable, an entry of a dictionary. No
 * property is asked and no __setattr__ of the user's runs; a class has its own way. */
#include "plain_state.h"

static PyObject *
dict_get(PyObject *dict, PyObject *key)
{
    PyObject *value = PyDict_GetItemWithError(dict, key); /* borrowed from dict */
    return Py_XNewRef(value);
}

/* The descriptor of a slot of that name. New reference; NULL, perhaps with an
 * exception. */
static PyObject *
slot_find(PyTypeObject *type, PyObject *name)
{
    Py_ssize_t i;

    for (i = 0; type->tp_mro != NULL && i < PyTuple_GET_SIZE(type->tp_mro); i++) {
        PyTypeObject *base = (PyTypeObject *)PyTuple_GET_ITEM(type->tp_mro, i);
        OWNED PyObject *found = NULL;
        if (base->tp_dict == NULL) {
            continue;
        }
        found = dict_get(base->tp_dict, name);
        if (found != NULL && Py_IS_TYPE(found, &PyMemberDescr_Type)) {
            return STEAL(found);
        }
        if (found != NULL || PyErr_Occurred()) {
            return NULL;
        }
    }
    return NULL;
}

/* In a dictionary, or a slot, or (of a module) among its parts. */
int
oomkit_at_attribute(oomkit_state *st, PyObject *owner, PyObject *name, oomkit_at *at)
{
    OWNED PyObject *dict = NULL, *found = NULL;
    PyObject *parts; /* borrowed from dict */

    memset(at, 0, sizeof(*at));
    if (PyType_Check(owner)) {
        *at = (oomkit_at){Py_NewRef(owner), Py_NewRef(name), OOMKIT_AT_TYPE};
        return 0;
    }
    dict = PyObject_GenericGetDict(owner, NULL);
    if (dict == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear(); /* slots alone */
    }
    found = dict == NULL ? NULL : dict_get(dict, name);
    if (found == NULL && !PyErr_Occurred()) {
        found = slot_find(Py_TYPE(owner), name);
        if (found != NULL) {
            *at = (oomkit_at){Py_NewRef(owner), STEAL(found), OOMKIT_AT_SLOT};
            return 0;
        }
    }
    if (found == NULL && dict != NULL && !PyErr_Occurred() &&
        PyObject_TypeCheck(owner, (PyTypeObject *)st->Module)) {
        parts = PyDict_GetItemWithError(dict, st->str_modules);
        if (parts != NULL && PyDict_Check(parts) &&
            PyDict_GetItemWithError(parts, name) != NULL) {
            Py_SETREF(dict, Py_NewRef(parts));
        }
    }
    if (PyErr_Occurred()) {
        return -1;
    }
    if (dict != NULL) {
        *at = (oomkit_at){STEAL(dict), Py_NewRef(name), OOMKIT_AT_DICT};
    }
    return 0;
}

int
oomkit_at_item(PyObject *owner, PyObject *key, oomkit_at *at)
{
    memset(at, 0, sizeof(*at));
    if (PyDict_Check(owner)) {
        *at = (oomkit_at){Py_NewRef(owner), Py_NewRef(key), OOMKIT_AT_DICT};
    } else if ((PyList_Check(owner) || PyTuple_Check(owner)) && PyLong_Check(key)) {
        *at = (oomkit_at){Py_NewRef(owner), Py_NewRef(key), OOMKIT_AT_SEQUENCE};
    }
    return 0;
}

void
oomkit_at_clear(oomkit_at *at)
{
    at->kind = OOMKIT_AT_NOTHING;
    Py_CLEAR(at->holder);
    Py_CLEAR(at->key);
}

static int
sequence_read(const oomkit_at *at, PyObject **value)
{
    Py_ssize_t i = PyLong_AsSsize_t(at->key);

    if (i == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (i >= 0 && i < PySequence_Fast_GET_SIZE(at->holder)) {
        *value = Py_NewRef(PySequence_Fast_GET_ITEM(at->holder, i));
    }
    return 0;
}

/* One that this build of torch does not let be read stays as it is. 0 or -1. */
static int
switch_read(const oomkit_at *at, PyObject **value)
{
    *value = PyObject_CallNoArgs(PyTuple_GET_ITEM(at->holder, 0));
    if (*value == NULL && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
    }
    return *value == NULL && PyErr_Occurred() ? -1 : 0;
}

static int
switch_write(const oomkit_at *at, PyObject *value)
{
    OWNED PyObject *done =
        value == NULL ? Py_NewRef(Py_None)
                      : PyObject_CallOneArg(PyTuple_GET_ITEM(at->holder, 1), value);

    return done == NULL ? -1 : 0;
}

int
oomkit_at_read(const oomkit_at *at, PyObject **value)
{
    PyTypeObject *type;

    *value = NULL;
    switch (at->kind) {
    case OOMKIT_AT_DICT:
        *value = dict_get(at->holder, at->key);
        break;
    case OOMKIT_AT_CELL:
        *value = Py_XNewRef(PyCell_GET(at->holder));
        return 0;
    case OOMKIT_AT_TYPE:
        type = (PyTypeObject *)at->holder;
        *value = type->tp_dict == NULL ? NULL : dict_get(type->tp_dict, at->key);
        break;
    case OOMKIT_AT_SLOT:
        *value = Py_TYPE(at->key)->tp_descr_get(at->key, at->holder,
                                                (PyObject *)Py_TYPE(at->holder));
        if (*value == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear(); /* empty */
        }
        break;
    case OOMKIT_AT_SWITCH:
        return switch_read(at, value);
    case OOMKIT_AT_SEQUENCE:
        return sequence_read(at, value);
    default:
        break;
    }
    return *value == NULL && PyErr_Occurred() ? -1 : 0;
}

int
oomkit_at_write(const oomkit_at *at, PyObject *value)
{
    int result = 0;

    switch (at->kind) {
    case OOMKIT_AT_DICT:
        result = value != NULL ? PyDict_SetItem(at->holder, at->key, value)
                               : PyDict_DelItem(at->holder, at->key);
        break;
    case OOMKIT_AT_CELL:
        return PyCell_Set(at->holder, value);
    case OOMKIT_AT_SWITCH:
        return switch_write(at, value);
    case OOMKIT_AT_TYPE:
        result = PyObject_SetAttr(at->holder, at->key, value);
        break;
    case OOMKIT_AT_SLOT:
        result = Py_TYPE(at->key)->tp_descr_set(at->key, at->holder, value);
        break;
    default:
        break;
    }
    if (result < 0 && value == NULL &&
        (PyErr_ExceptionMatches(PyExc_KeyError) ||
         PyErr_ExceptionMatches(PyExc_AttributeError))) {
        PyErr_Clear(); /* gone already */
        result = 0;
    }
    return result;
}
