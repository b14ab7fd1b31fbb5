/* The only place that asks for a Python version. */
#ifndef OOMKIT_PY_COMPAT_H
#define OOMKIT_PY_COMPAT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Attributes of an instance lie in an array of its type's names until somebody asks for
 * their dictionary, and are slower to read ever after. From 3.13 on they stay there. */
#define OOMKIT_DICT_SLOWS_READING (PY_VERSION_HEX < 0x030D0000)
#define OOMKIT_DICT_OR_VALUES (PY_VERSION_HEX >= 0x030C0000) /* share one pointer */

/* A number for the state of a dictionary that no other state of any ever has: where it
 * is the same as before, the dictionary holds the very same objects. 0 where the
 * interpreter keeps none. */
static inline uint64_t
oomkit_dict_tag(PyObject *dict)
{
#if PY_VERSION_HEX < 0x030D0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    return ((PyDictObject *)dict)->ma_version_tag;
#pragma GCC diagnostic pop
#else
    (void)dict;
    return 0;
#endif
}

/* Takes the exception in flight, normalised, with its traceback attached. The caller
 * owns the result; NULL when none is set. The error indicator is clear afterwards. */
static inline PyObject *
oomkit_exception_take(void)
{
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *traceback; /* owned */
    PyErr_Fetch(&type, &value, &traceback);
    if (type == NULL) {
        return NULL;
    }
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL && value != NULL) {
        PyException_SetTraceback(value, traceback);
    }
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
#endif
}

/* Puts an exception back in flight. Steals the reference. */
static inline void
oomkit_exception_give(PyObject *exception)
{
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(exception);
#else
    PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(exception)), exception,
                  PyException_GetTraceback(exception));
#endif
}

#endif
