/* Joining arrays and numbers of numpy, which is not needed for it: as tensors and as
 * Python's numbers, and back. */
#include "join_rules.h"

#include <string.h>

int
oomkit_is_numpy_array(PyObject *value)
{
    return strcmp(Py_TYPE(value)->tp_name, "numpy.ndarray") == 0;
}

int
oomkit_is_numpy_number(PyObject *value)
{
    static const char *const kinds[] = {"float", "int", "uint", "bool"};
    const char *name = Py_TYPE(value)->tp_name;
    size_t i;

    if (strncmp(name, "numpy.", 6) != 0) {
        return 0;
    }
    for (i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        if (strncmp(name + 6, kinds[i], strlen(kinds[i])) == 0) {
            return 1;
        }
    }
    return 0;
}

/* A new reference of each value as a tensor or a Python number. 1, 0 when there is no
 * such tensor (strings, objects), or -1. */
static int
numpy_open(const oomkit_rules *r, PyObject *const *values, int arrays,
           PyObject **column)
{
    Py_ssize_t i;

    for (i = 0; i < r->count; i++) {
        column[i] = arrays ? PyObject_CallOneArg(r->st->torch_as_tensor, values[i])
                           : PyObject_CallMethodNoArgs(values[i], r->st->str_item);
        if (column[i] == NULL) {
            if (!oomkit_error_is_no_answer(r->st)) {
                return -1;
            }
            PyErr_Clear(); /* told by the caller, with the place */
            return 0;
        }
    }
    return 1;
}

PyObject *
oomkit_join_numpy(const oomkit_rules *r, const oomkit_place *where,
                  PyObject *const *values)
{
    PyObject **column = /* owned array of owned values */
        PyMem_Calloc((size_t)r->count, sizeof(PyObject *));
    PyObject *joined = NULL; /* owned */
    int arrays = oomkit_is_numpy_array(values[0]), opened;
    Py_ssize_t i;

    if (column == NULL) {
        return PyErr_NoMemory();
    }
    opened = r->count == 1 ? 0 : numpy_open(r, values, arrays, column);
    if (opened == 0) {
        joined = oomkit_join_equal(r, where, values);
    } else if (opened > 0) {
        joined = oomkit_join_place(r, where, column);
        if (joined != NULL) {
            Py_SETREF(joined, arrays
                                  ? PyObject_CallMethodNoArgs(joined, r->st->str_numpy)
                                  : PyObject_CallOneArg((PyObject *)Py_TYPE(values[0]),
                                                        joined));
        }
    }
    for (i = 0; i < r->count; i++) {
        Py_XDECREF(column[i]);
    }
    PyMem_Free(column);
    return joined;
}
