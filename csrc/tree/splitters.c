/* Splitters that were registered for types: who they are, and calling them. */
#include "splitters.h"
#include "kinds.h"
#include "tree.h"

enum { SPLITTER_SPLIT, SPLITTER_SIZE, SPLITTER_JOIN };

/* Adds to the user's error whose it is. -1 always. */
static int
splitter_note(PyObject *value, const char *which)
{
    PyObject *error = oomkit_exception_take(); /* owned, given back */

    if (PyObject_TypeCheck(error, (PyTypeObject *)PyExc_Exception)) {
        OWNED PyObject *note = PyUnicode_FromFormat(
            "oomkit: raised by %s= of register_splitter() for a '%.200s'" SEE(
                "register-splitter"),
            which, Py_TYPE(value)->tp_name);
        OWNED PyObject *done =
            note == NULL ? NULL : PyObject_CallMethod(error, "add_note", "O", note);
        if (done == NULL) {
            PyErr_Clear(); /* the user's error is the one to see */
        }
    }
    oomkit_exception_give(error);
    return -1;
}

/* One of the three functions. New reference, None when it was not given; NULL when the
 * type has no splitter. */
static PyObject *
splitter_get(const oomkit_state *st, PyObject *value, int which)
{
    PyObject *entry = oomkit_splitter_of(st, Py_TYPE(value)); /* borrowed from state */
    return entry == NULL ? NULL : Py_NewRef(PyTuple_GET_ITEM(entry, which));
}

int
oomkit_splitter_rows(oomkit_state *st, PyObject *value, int64_t *rows)
{
    OWNED PyObject *size = splitter_get(st, value, SPLITTER_SIZE), *answer = NULL;

    *rows = -1;
    if (size == NULL || size == Py_None) {
        Py_ssize_t length = PyObject_Length(value);
        *rows = length;
        if (length < 0 && PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear(); /* no len(): said by the caller */
            return 1;
        }
        return length < 0 ? splitter_note(value, "size") : 0;
    }
    answer = PyObject_CallOneArg(size, value);
    if (answer == NULL) {
        return splitter_note(value, "size");
    }
    *rows = PyLong_AsLongLong(answer);
    if (*rows >= 0) {
        return 0;
    }
    if (!PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError,
                     "expected 0 rows or more, got %R" SEE("register-splitter"),
                     answer);
    }
    return splitter_note(value, "size");
}

PyObject *
oomkit_splitter_cut(oomkit_state *st, PyObject *value, int64_t start, int64_t length)
{
    OWNED PyObject *split = splitter_get(st, value, SPLITTER_SPLIT), *part = NULL;
    int64_t rows;
    int known;

    if (split == NULL) {
        PyErr_Format(st->SplitError,
                     "a '%.200s' has lost its splitter" SEE("register-splitter"),
                     Py_TYPE(value)->tp_name);
        return NULL;
    }
    part =
        PyObject_CallFunction(split, "OLL", value, (long long)start, (long long)length);
    if (part == NULL) {
        splitter_note(value, "split");
        return NULL;
    }
    known =
        Py_IS_TYPE(part, Py_TYPE(value)) ? oomkit_splitter_rows(st, part, &rows) : 1;
    if (known == 0 && rows != length) {
        PyErr_Format(st->SplitError,
                     "register_splitter(%.200s, split=...) returned %lld rows for "
                     "split(value, %lld, %lld): expected %lld" SEE("register-splitter"),
                     Py_TYPE(value)->tp_name, (long long)rows, (long long)start,
                     (long long)length, (long long)length);
        return NULL;
    }
    return known < 0 ? NULL : STEAL(part);
}

PyObject *
oomkit_splitter_join(oomkit_state *st, PyObject *values, PyObject *rows)
{
    PyObject *first = PyList_GET_ITEM(values, 0); /* borrowed from values */
    OWNED PyObject *join = splitter_get(st, first, SPLITTER_JOIN);
    PyObject *stack[2] = {values, rows}; /* borrowed */
    PyObject *joined;                    /* owned, returned */

    if (join == NULL) {
        return NULL;
    }
    joined = PyObject_Vectorcall(join, stack, 2, NULL);
    if (joined == NULL) {
        splitter_note(first, "join");
    }
    return joined;
}

int
oomkit_splitter_joins(const oomkit_state *st, PyObject *value)
{
    PyObject *entry = oomkit_splitter_of(st, Py_TYPE(value)); /* borrowed from state */
    return entry != NULL && PyTuple_GET_ITEM(entry, SPLITTER_JOIN) != Py_None;
}

/* --- registering --- */

/* Types that oomkit splits itself, and those that are never a batch. */
static int
is_builtin(const oomkit_state *st, PyObject *type)
{
    PyObject *const types[] = {st->Tensor,
                               st->Parameter,
                               st->Module,
                               (PyObject *)&PyBaseObject_Type,
                               (PyObject *)&PyDict_Type,
                               (PyObject *)&PyList_Type,
                               (PyObject *)&PyTuple_Type,
                               (PyObject *)&PyUnicode_Type,
                               (PyObject *)&PyLong_Type,
                               (PyObject *)&PyFloat_Type,
                               (PyObject *)&PyBool_Type,
                               (PyObject *)Py_TYPE(Py_None)};
    size_t i;

    for (i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        if (type == types[i]) {
            return 1;
        }
    }
    return 0;
}

static int
function_check(PyObject *given, const char *name, int required)
{
    if (given == Py_None && !required) {
        return 0;
    }
    if (!PyCallable_Check(given)) {
        PyErr_Format(
            PyExc_TypeError,
            "register_splitter(%s=...) expected a callable, got %s" SEE("options"),
            name, Py_TYPE(given)->tp_name);
        return -1;
    }
    return 0;
}

PyObject *
oomkit_register_splitter(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"", "split", "size", "join", NULL};
    oomkit_state *st = oomkit_state_of_module(module);
    PyObject *type, *split = NULL, *size = Py_None, *join = Py_None; /* borrowed */
    OWNED PyObject *entry = NULL;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$OOO:register_splitter", names,
                                     &type, &split, &size, &join)) {
        return NULL;
    }
    if (split == NULL) {
        PyErr_SetString(PyExc_TypeError,
                        "register_splitter() needs split=: a callable that takes "
                        "(value, start, length)" SEE("options"));
        return NULL;
    }
    if (!PyType_Check(type)) {
        return PyErr_Format(
            PyExc_TypeError,
            "register_splitter() expected a type, got %s" SEE("options"),
            Py_TYPE(type)->tp_name);
    }
    if (is_builtin(st, type)) {
        return PyErr_Format(PyExc_ValueError,
                            "register_splitter() cannot change how '%.200s' is split: "
                            "register a type of your own" SEE("options"),
                            ((PyTypeObject *)type)->tp_name);
    }
    if (function_check(split, "split", 1) < 0 || function_check(size, "size", 0) < 0 ||
        function_check(join, "join", 0) < 0) {
        return NULL;
    }
    if (st->splitters == NULL && (st->splitters = PyDict_New()) == NULL) {
        return NULL;
    }
    entry = PyTuple_Pack(3, split, size, join);
    if (entry == NULL || PyDict_SetItem(st->splitters, type, entry) < 0) {
        return NULL;
    }
    oomkit_kinds_forget(st);
    Py_RETURN_NONE;
}
