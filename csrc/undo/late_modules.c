/* Modules that nothing but their forward has led to (hook/forwards.c). In the call in
 * which they first run nobody has read their code (plain state) before: with their
 * buffers go numbers, names and flags among their own attributes, for one that makes
 * its buffers ready when it first runs notes that it has. Where it notes that elsewhere
 * the retry is refused (undone_buffers.c). */
#include "undo.h"
#include "../py/compat.h"
#include "../py/errors.h"

/* Leads to nothing else, and takes no room to speak of. */
static int
late_is_plain(const PyObject *value)
{
    return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) ||
           PyFloat_CheckExact(value) || PyUnicode_CheckExact(value) ||
           PyBytes_CheckExact(value);
}

/* Of a list or a dictionary of the module's own (not torch's tables): which one, and
 * how long. Neither it nor what is in it is held. Ellipsis of all else. New reference
 * or NULL. */
static PyObject *
late_length(PyObject *name, PyObject *value)
{
    static const char *const torchs[] = {"_parameters", "_buffers", "_modules"};
    size_t i;

    for (i = 0; i < sizeof(torchs) / sizeof(*torchs); i++) {
        if (PyUnicode_CompareWithASCIIString(name, torchs[i]) == 0) {
            return Py_NewRef(Py_Ellipsis);
        }
    }
    return PyList_CheckExact(value)   ? Py_BuildValue("(Nn)", PyLong_FromVoidPtr(value),
                                                      PyList_GET_SIZE(value))
           : PyDict_CheckExact(value) ? Py_BuildValue("(Nn)", PyLong_FromVoidPtr(value),
                                                      PyDict_GET_SIZE(value))
                                      : Py_NewRef(Py_Ellipsis);
}

/* Takes out what was added to it at its end. 0 or -1. */
static int
late_shorten(PyObject *value, PyObject *noted)
{
    const Py_ssize_t length = PyLong_AsSsize_t(PyTuple_GET_ITEM(noted, 1));
    OWNED PyObject *keys = NULL;
    Py_ssize_t i;

    if (PyLong_AsVoidPtr(PyTuple_GET_ITEM(noted, 0)) != value) {
        return 0; /* another one stands there */
    }
    if (PyList_CheckExact(value)) {
        return PyList_GET_SIZE(value) <= length
                   ? 0
                   : PyList_SetSlice(value, length, PY_SSIZE_T_MAX, NULL);
    }
    keys = PyDict_CheckExact(value) ? PyDict_Keys(value) : NULL;
    for (i = length; keys != NULL && i < PyList_GET_SIZE(keys); i++) {
        if (PyDict_DelItem(value, PyList_GET_ITEM(keys, i)) < 0) {
            return -1;
        }
    }
    return PyErr_Occurred() ? -1 : 0;
}

PyObject *
oomkit_late_attributes(PyObject *module)
{
    OWNED PyObject *own = oomkit_own_attributes(module);
    OWNED PyObject *noted = own == NULL ? NULL : PyDict_New();
    Py_ssize_t i;

    for (i = 0; noted != NULL && i < PyTuple_GET_SIZE(own); i += 2) {
        PyObject *name = PyTuple_GET_ITEM(own, i);      /* borrowed */
        PyObject *value = PyTuple_GET_ITEM(own, i + 1); /* borrowed */
        OWNED PyObject *note = NULL;
        if (!PyUnicode_CheckExact(name)) {
            continue;
        }
        note = late_is_plain(value) ? Py_NewRef(value) : late_length(name, value);
        if (note == NULL || PyDict_SetItem(noted, name, note) < 0) {
            return NULL;
        }
    }
    return STEAL(noted);
}

int
oomkit_late_modules_now(const oomkit_memo *notes, oomkit_memo **now)
{
    Py_ssize_t i;

    for (i = 0; notes != NULL && i < notes->count; i++) {
        PyObject *module = notes->items[i].object; /* borrowed */
        if (oomkit_memo_add(now, module, oomkit_late_attributes(module)) < 0) {
            return -1;
        }
    }
    return 0;
}

/* One module: what was plain has its value again, what is new and plain goes, lists and
 * dictionaries lose what was added. 0 or -1. */
static int
late_put(PyObject *module, PyObject *noted)
{
    OWNED PyObject *now = oomkit_late_attributes(module);
    OWNED PyObject *names = now == NULL ? NULL : PyDict_Keys(now);
    PyObject *name, *value; /* borrowed from the dicts, which nobody else has */
    Py_ssize_t i, at = 0;

    for (i = 0; names != NULL && i < PyList_GET_SIZE(names); i++) {
        name = PyList_GET_ITEM(names, i);
        if (PyDict_GetItemWithError(noted, name) == NULL &&
            PyDict_GetItemWithError(now, name) != Py_Ellipsis &&
            oomkit_own_attribute_set(module, name, NULL) < 0) {
            return -1;
        }
    }
    while (names != NULL && PyDict_Next(noted, &at, &name, &value)) {
        if (PyTuple_CheckExact(value)) {
            OWNED PyObject *list = oomkit_own_attribute(module, name);
            if (list == NULL ? PyErr_Occurred() != NULL
                             : late_shorten(list, value) < 0) {
                return -1;
            }
        } else if (value != Py_Ellipsis &&
                   PyDict_GetItemWithError(now, name) != value &&
                   oomkit_own_attribute_set(module, name, value) < 0) {
            return -1;
        }
    }
    return names == NULL || PyErr_Occurred() ? -1 : 0;
}

int
oomkit_late_modules_put(oomkit_memo *notes)
{
    EACH_MEMO (one, notes) {
        if (late_put(one.object, one.saved) < 0) {
            return -1;
        }
    }
    return 0;
}
