/* The names of batch= and static=, and what is said when the batch cannot be found. */
#include "find.h"

/* --- messages --- */

/* "batch['x'] has shape [8, 3]". New reference or NULL. */
static PyObject *
find_describe(const oomkit_find *f, Py_ssize_t index)
{
    PyObject *path = oomkit_node_path(f->batch, f->names, index); /* owned */
    PyObject *shape = NULL, *sizes = NULL, *text = NULL;          /* owned */

    if (path == NULL) {
        return NULL;
    }
    shape = PyObject_GetAttr(f->batch->nodes[index].object, f->st->str_shape);
    sizes = shape == NULL ? NULL : PySequence_List(shape);
    if (sizes != NULL) {
        text = PyUnicode_FromFormat("%U has shape %R", path, sizes);
    }
    Py_XDECREF(sizes);
    Py_XDECREF(shape);
    Py_DECREF(path);
    return text;
}

/* Name of the argument that a node belongs to. New reference or NULL. */
static PyObject *
find_name(const oomkit_find *f, Py_ssize_t index)
{
    Py_ssize_t at = 0, end, argument = 0;
    while ((end = oomkit_node_end(f->batch, at)) <= index) {
        at = end;
        argument++;
    }
    return oomkit_argument_name(f->batch, f->names, argument);
}

/* -1 always: node `b` does not go with node `a` (-1: it alone is wrong). */
int
oomkit_find_disagree(const oomkit_find *f, Py_ssize_t a, Py_ssize_t b)
{
    PyObject *name = find_name(f, b);                   /* owned */
    PyObject *one = a < 0 ? NULL : find_describe(f, a); /* owned */
    PyObject *two = find_describe(f, b);                /* owned */

    if (name != NULL && two != NULL && (one != NULL || a < 0)) {
        PyErr_Format(
            f->st->SplitError,
            "auto_batch cannot split argument '%U': tensors disagree in "
            "dimension %lld: %V%s%U; name what is to be split with batch=... or "
            "pass it whole with static=...",
            name, (long long)f->options->dim, one, "", one == NULL ? "" : ", ", two);
    }
    Py_XDECREF(name);
    Py_XDECREF(one);
    Py_XDECREF(two);
    return -1;
}

/* -1 always: SplitError about one node; `format` takes argument, path and type name. */
int
oomkit_find_refuse(const oomkit_find *f, Py_ssize_t index, const char *why,
                   const char *advice)
{
    PyObject *name = find_name(f, index);                         /* owned */
    PyObject *path = oomkit_node_path(f->batch, f->names, index); /* owned */

    if (name != NULL && path != NULL) {
        PyErr_Format(f->st->SplitError,
                     "auto_batch cannot split argument '%U': %U is a '%.200s'%s; %s",
                     name, path, Py_TYPE(f->batch->nodes[index].object)->tp_name, why,
                     advice);
    }
    Py_XDECREF(name);
    Py_XDECREF(path);
    return -1;
}

/* --- names --- */

/* Is `name` one of the tuple? 1, 0 or -1. */
static int
tuple_has(PyObject *tuple, PyObject *name)
{
    return tuple == NULL ? 0 : PySequence_Contains(tuple, name);
}

/* Is it a parameter, or a keyword of this call? Everything is where there is **kwargs.
 */
static int
find_name_known(const oomkit_find *f, PyObject *name)
{
    Py_ssize_t i;
    int known = tuple_has(f->batch->kwnames, name);

    if (known != 0 || f->names == NULL) {
        return known < 0 ? -1 : 1;
    }
    for (i = 0; i < PyTuple_GET_SIZE(f->names); i++) {
        PyObject *each = PyTuple_GET_ITEM(f->names, i); /* borrowed from names */
        if (PyUnicode_Check(each) && PyUnicode_GET_LENGTH(each) > 1 &&
            PyUnicode_READ_CHAR(each, 0) == '*' &&
            PyUnicode_READ_CHAR(each, 1) == '*') {
            return 1;
        }
    }
    return tuple_has(f->names, name);
}

int
oomkit_find_check_names(const oomkit_find *f, PyObject *given, const char *option)
{
    Py_ssize_t i, count = given == NULL ? 0 : PyTuple_GET_SIZE(given);

    for (i = 0; i < count; i++) {
        PyObject *name = PyTuple_GET_ITEM(given, i); /* borrowed from given */
        PyObject *comma, *list;                      /* owned */
        int known = find_name_known(f, name);
        if (known != 0) {
            if (known < 0) {
                return -1;
            }
            continue;
        }
        comma = PyUnicode_FromString(", ");
        list = comma == NULL ? NULL : PyUnicode_Join(comma, f->names);
        if (list != NULL) {
            PyErr_Format(
                f->st->SplitError,
                "auto_batch got %s=%R, expected a parameter of the function: %U",
                option, name, list);
        }
        Py_XDECREF(comma);
        Py_XDECREF(list);
        return -1;
    }
    return 0;
}

/* Gives the roles that static= and batch= give. */
int
oomkit_find_roles(oomkit_find *f)
{
    Py_ssize_t argument, index;

    EACH_ARGUMENT(f, argument, index)
    {
        PyObject *name = oomkit_argument_name(f->batch, f->names, argument); /* owned */
        int named, whole;
        if (name == NULL) {
            return -1;
        }
        named = tuple_has(f->options->batch, name);
        whole = tuple_has(f->options->statics, name);
        Py_DECREF(name);
        if (named < 0 || whole < 0) {
            return -1;
        }
        f->roles[argument] =
            (uint8_t)(named ? OOMKIT_ROLE_BATCH
                            : (whole ? OOMKIT_ROLE_STATIC : OOMKIT_ROLE_OTHER));
        if (named && f->first < 0) {
            f->first = index;
        }
    }
    return 0;
}
