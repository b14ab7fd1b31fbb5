/* dim=: the dimension of the samples, of all arguments or of each. */
#include "batch.h"

/* One dimension: the int in *dim. 0 or -1. */
static int
option_dim_number(PyObject *given, int64_t *dim)
{
    if (!PyLong_Check(given) || PyBool_Check(given)) {
        PyErr_Format(PyExc_TypeError,
                     "auto_batch(dim=...) expected an int, or a dict of argument names "
                     "and ints, got %s" SEE("options"),
                     Py_TYPE(given)->tp_name);
        return -1;
    }
    *dim = PyLong_AsLongLong(given);
    if (*dim < 0) {
        if (!PyErr_Occurred()) {
            PyErr_Format(
                PyExc_ValueError,
                "auto_batch(dim=...) expected 0 or more, got %lld" SEE("options"),
                (long long)*dim);
        }
        return -1;
    }
    return 0;
}

int
oomkit_options_dim(PyObject *given, oomkit_options *options)
{
    PyObject *name, *number; /* borrowed from given */
    Py_ssize_t position = 0;
    int64_t dim;

    if (given == NULL) {
        return 0;
    }
    if (!PyDict_Check(given)) {
        return option_dim_number(given, &options->dim);
    }
    while (PyDict_Next(given, &position, &name, &number)) {
        if (!PyUnicode_Check(name)) {
            PyErr_Format(
                PyExc_TypeError,
                "auto_batch(dim={%R: ...}) expected names of arguments" SEE("options"),
                name);
            return -1;
        }
        if (option_dim_number(number, &dim) < 0) {
            return -1;
        }
        if (PyUnicode_CompareWithASCIIString(name, "return") == 0) {
            options->dim = dim;
        }
    }
    options->dims = PyDict_Copy(given);
    return options->dims == NULL ? -1 : 0;
}

int64_t
oomkit_argument_dim(const oomkit_options *options, const oomkit_batch *batch,
                    Py_ssize_t argument)
{
    OWNED PyObject *name = NULL;
    PyObject *number; /* borrowed from the options */
    int64_t dim = 0;

    if (options->dims == NULL) {
        return options->dim;
    }
    name = oomkit_argument_name(batch, batch->names, argument);
    if (name == NULL) {
        return INT64_MIN;
    }
    number = PyDict_GetItemWithError(options->dims, name);
    if (number != NULL) {
        dim = PyLong_AsLongLong(number);
    }
    return PyErr_Occurred() ? INT64_MIN : dim;
}

int64_t
oomkit_node_dim(const oomkit_options *options, const oomkit_batch *batch,
                Py_ssize_t index)
{
    Py_ssize_t argument = 0, at = 0, end;

    if (options->dims == NULL) {
        return options->dim;
    }
    while ((end = oomkit_node_end(batch, at)) <= index) {
        at = end;
        argument++;
    }
    return oomkit_argument_dim(options, batch, argument);
}
