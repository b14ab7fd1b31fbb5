/* The names of batch= and static=, and what is said when the batch cannot be found. */
#include "layout.h"

/* --- messages --- */

PyObject *
oomkit_find_describe(const oomkit_find *f, Py_ssize_t index)
{
    OWNED PyObject *path = oomkit_node_path(f->batch, f->names, index);
    OWNED PyObject *shape = NULL, *sizes = NULL;

    if (path == NULL) {
        return NULL;
    }
    if ((f->batch->nodes[index].flags & OOMKIT_NODE_CUSTOM) != 0) {
        return PyUnicode_FromFormat("%U is a '%.200s' of %lld rows", path,
                                    Py_TYPE(f->batch->nodes[index].object)->tp_name,
                                    (long long)f->batch->nodes[index].rows);
    }
    shape = PyObject_GetAttr(f->batch->nodes[index].object, f->st->str_shape);
    sizes = shape == NULL ? NULL : PySequence_List(shape);
    return sizes == NULL ? NULL : PyUnicode_FromFormat("%U has shape %R", path, sizes);
}

PyObject *
oomkit_find_name(const oomkit_find *f, Py_ssize_t index)
{
    Py_ssize_t at = 0, end, argument = 0;
    while ((end = oomkit_node_end(f->batch, at)) <= index) {
        at = end;
        argument++;
    }
    return oomkit_argument_name(f->batch, f->names, argument);
}

int
oomkit_find_raise(const oomkit_find *f, Py_ssize_t index, PyObject *text)
{
    OWNED PyObject *name = text == NULL ? NULL : oomkit_find_name(f, index);

    if (name != NULL) {
        PyErr_Format(
            f->st->SplitError,
            "auto_batch cannot split argument '%U': %U" SEE("argument-not-split"), name,
            text);
    }
    Py_XDECREF(text);
    return -1;
}

/* -1 always: node `b` does not go with node `a` (-1: it alone is wrong). */
int
oomkit_find_disagree(const oomkit_find *f, Py_ssize_t a, Py_ssize_t b)
{
    OWNED PyObject *name = oomkit_find_name(f, b);
    OWNED PyObject *one = a < 0 ? NULL : oomkit_find_describe(f, a);
    OWNED PyObject *two = oomkit_find_describe(f, b);

    if (name != NULL && two != NULL && (one != NULL || a < 0)) {
        PyErr_Format(f->st->SplitError,
                     "auto_batch cannot split argument '%U': tensors disagree in "
                     "dimension %lld: %V%s%U; name what is to be split with batch=... "
                     "or pass it whole with static=..." SEE("argument-not-split"),
                     name, (long long)f->options->dim, one, "", one == NULL ? "" : ", ",
                     two);
    }
    return -1;
}

/* "batch['x'] is a 'Tensor' of shape [8, 3]". New reference or NULL. */
static PyObject *
find_describe_type(const oomkit_find *f, Py_ssize_t index)
{
    const oomkit_node *node = &f->batch->nodes[index];
    OWNED PyObject *path = oomkit_node_path(f->batch, f->names, index);
    OWNED PyObject *shape = NULL;

    if (path == NULL) {
        return NULL;
    }
    if (node->kind == OOMKIT_NODE_TENSOR || node->kind == OOMKIT_NODE_ARRAY) {
        shape = PyObject_GetAttr(node->object, f->st->str_shape);
        if (shape != NULL) {
            Py_SETREF(shape, PySequence_List(shape));
        }
        if (shape == NULL && PyErr_ExceptionMatches(PyExc_Exception)) {
            PyErr_Clear(); /* a nested tensor may have none */
        }
    }
    if (PyErr_Occurred()) {
        return NULL;
    }
    return shape == NULL ? PyUnicode_FromFormat("%U is a '%.200s'", path,
                                                Py_TYPE(node->object)->tp_name)
                         : PyUnicode_FromFormat("%U is a '%.200s' of shape %R", path,
                                                Py_TYPE(node->object)->tp_name, shape);
}

int
oomkit_find_refuse(const oomkit_find *f, Py_ssize_t index, const char *why,
                   const char *advice)
{
    OWNED PyObject *what = find_describe_type(f, index);

    return what == NULL
               ? -1
               : oomkit_find_raise(f, index,
                                   PyUnicode_FromFormat("%U%s; %s", what, why, advice));
}

/* --- names --- */

/* Is `name` one of the tuple? 1, 0 or -1. */
static int
tuple_has(PyObject *tuple, PyObject *name)
{
    return tuple == NULL ? 0 : PySequence_Contains(tuple, name);
}

/* Where the path starts in the name: "batch['x']", "batch.x"; -1 for a plain name. */
static Py_ssize_t
name_path(PyObject *name)
{
    Py_ssize_t length = PyUnicode_GET_LENGTH(name);
    Py_ssize_t item = PyUnicode_FindChar(name, '[', 0, length, 1);
    Py_ssize_t dot = PyUnicode_FindChar(name, '.', 0, length, 1);
    return item < 0 || (dot >= 0 && dot < item) ? dot : item;
}

/* Is an argument passed by position that no parameter stands for? 1, 0 or -1. */
static int
find_has_nameless(const oomkit_find *f)
{
    Py_ssize_t i;

    for (i = 0; i < f->batch->positional; i++) {
        OWNED PyObject *name = oomkit_argument_name(f->batch, f->names, i);
        int nameless =
            name == NULL ? -1 : PyUnicode_CompareWithASCIIString(name, "*args") == 0;
        if (nameless != 0) {
            return nameless;
        }
    }
    return 0;
}

/* Is it a parameter, or a keyword of this call? Everything is where there is **kwargs,
 * or where no names are known; but with arguments that have none, it may be any of
 * them.
 */
typedef enum { NAME_ERROR = -1, NAME_UNKNOWN, NAME_KNOWN, NAME_UNCLEAR } known_name;

static known_name
find_name_known(const oomkit_find *f, PyObject *name)
{
    Py_ssize_t i;
    int known = tuple_has(f->batch->kwnames, name), any = f->names == NULL;

    if (known == 0) {
        known = tuple_has(f->names, name);
    }
    if (known != 0) {
        return known < 0 ? NAME_ERROR : NAME_KNOWN;
    }
    for (i = 0; !any && i < PyTuple_GET_SIZE(f->names); i++) {
        PyObject *each = PyTuple_GET_ITEM(f->names, i); /* borrowed from names */
        any = PyUnicode_Check(each) && PyUnicode_GET_LENGTH(each) > 1 &&
              PyUnicode_READ_CHAR(each, 0) == '*' &&
              PyUnicode_READ_CHAR(each, 1) == '*';
    }
    if (!any) {
        return NAME_UNKNOWN;
    }
    known = find_has_nameless(f);
    return known < 0 ? NAME_ERROR : (known ? NAME_UNCLEAR : NAME_KNOWN);
}

/* -1 always, with SplitError: batch=, static= or dim= has a name that says nothing. */
static int
find_raise_name(const oomkit_find *f, PyObject *name, const char *option, int unclear)
{
    OWNED PyObject *comma = NULL, *list = NULL;

    if (unclear) {
        PyErr_Format(
            f->st->SplitError,
            "auto_batch got %s=%R, and cannot tell which of the arguments passed by "
            "position that is: the function takes *args; pass it by name, or decorate "
            "the function that has the parameter" SEE("options"),
            option, name);
        return -1;
    }
    comma = PyUnicode_FromString(", ");
    list = comma == NULL ? NULL : PyUnicode_Join(comma, f->names);
    if (list != NULL) {
        PyErr_Format(
            f->st->SplitError,
            "auto_batch got %s=%R, expected a parameter of the function: %U" SEE(
                "options"),
            option, name, list);
    }
    return -1;
}

int
oomkit_find_check_names(const oomkit_find *f, PyObject *given, const char *option)
{
    Py_ssize_t i, count = given == NULL ? 0 : PyTuple_GET_SIZE(given);

    for (i = 0; i < count; i++) {
        PyObject *name = PyTuple_GET_ITEM(given, i); /* borrowed from given */
        Py_ssize_t path = name_path(name);
        OWNED PyObject *argument = /* without the path inside it */
            path < 0 ? Py_NewRef(name) : PyUnicode_Substring(name, 0, path);
        known_name known = argument == NULL ? NAME_ERROR : find_name_known(f, argument);
        if (known == NAME_ERROR) {
            return -1;
        }
        if (known != NAME_KNOWN) {
            return find_raise_name(f, name, option, known == NAME_UNCLEAR);
        }
    }
    return 0;
}

/* Is the node named? 1, 0 or -1. */
static int
find_is_hidden(const oomkit_find *f, Py_ssize_t index)
{
    OWNED PyObject *path = oomkit_node_path(f->batch, f->names, index);

    return path == NULL ? -1 : tuple_has(f->options->statics, path);
}

int
oomkit_find_hide(const oomkit_find *f)
{
    Py_ssize_t i, paths = 0, end;

    for (i = 0; i < PyTuple_GET_SIZE(f->options->statics); i++) {
        paths += name_path(PyTuple_GET_ITEM(f->options->statics, i)) >= 0;
    }
    for (i = 0; paths > 0 && i < f->batch->count; i++) {
        int named = find_is_hidden(f, i);
        if (named < 0) {
            return -1;
        }
        if (named == 0) {
            continue;
        }
        for (end = oomkit_node_end(f->batch, i); i < end; i++) {
            f->batch->nodes[i].rows = -1;
            f->batch->nodes[i].flags |= OOMKIT_NODE_STATIC;
        }
        i = end - 1;
    }
    return 0;
}

int
oomkit_find_check_dims(const oomkit_find *f)
{
    PyObject *name; /* borrowed from the options */
    Py_ssize_t position = 0;

    while (f->options->dims != NULL &&
           PyDict_Next(f->options->dims, &position, &name, NULL)) {
        OWNED PyObject *names = NULL;
        if (PyUnicode_CompareWithASCIIString(name, "return") == 0) {
            continue;
        }
        names = PyTuple_Pack(1, name);
        if (names == NULL || oomkit_find_check_names(f, names, "dim") < 0) {
            return -1;
        }
    }
    return 0;
}

/* Gives the roles that static= and batch= give. */
int
oomkit_find_roles(oomkit_find *f)
{
    Py_ssize_t argument, index;

    EACH_ARGUMENT (f, argument, index) {
        OWNED PyObject *name = oomkit_argument_name(f->batch, f->names, argument);
        int named, whole;
        if (name == NULL) {
            return -1;
        }
        named = tuple_has(f->options->batch, name);
        whole = tuple_has(f->options->statics, name);
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
