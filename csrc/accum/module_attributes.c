/* Plain attributes of a model's modules, as _code/side_effects.py compares them around
 * the first micro-batch. In C, for it stands between an error and its replay, and a
 * model has hundreds of modules that are alike. What it does not know it leaves to
 * Python. */
#include "module_attributes.h"
#include "../py/tensor.h"

/* Arguments of _scan_modules, all borrowed. */
typedef struct scan {
    oomkit_state *st;
    PyObject *found;    /* dict of value by path, filled here */
    PyObject *root;     /* the module that is looked at first */
    PyObject *but;      /* frozenset of names that torch keeps itself */
    PyObject *skip;     /* set of id() of what is not recorded */
    PyObject *slots_of; /* class -> list of its slots */
    PyObject *length;   /* (name of the class, length) -> what a container is kept as */
    PyObject *mark;     /* tensor -> what it is kept as */
    Py_ssize_t modules; /* looked at, at most */
    Py_ssize_t values;  /* in `found`, at most */
    PyObject *parts;    /* list: path and module, path and module ... */
    PyTypeObject *kind; /* borrowed: the last class that was as expected */
    int odd;            /* something is there that Python has to look at */
} scan;

/* Has this class slots, or a named_modules() of its own? Then what it has is not all in
 * the dictionaries. 0 no, 1 yes, -1. */
static int
class_is_odd(scan *s, PyTypeObject *kind)
{
    OWNED PyObject *mine = NULL, *torchs = NULL, *slots = NULL;

    mine = PyObject_GetAttr((PyObject *)kind, s->st->str_named_modules);
    torchs =
        mine == NULL ? NULL : PyObject_GetAttr(s->st->Module, s->st->str_named_modules);
    if (torchs == NULL) {
        return -1;
    }
    if (mine != torchs) {
        return 1;
    }
    slots = PyObject_CallOneArg(s->slots_of, (PyObject *)kind);
    return slots == NULL               ? -1
           : !PyList_CheckExact(slots) ? 1
                                       : PyList_GET_SIZE(slots) > 0;
}

/* Is the module in `parts`? They are few, and may have an == of their own. */
static int
scan_has(const scan *s, const PyObject *module)
{
    Py_ssize_t i = 1;

    while (i < PyList_GET_SIZE(s->parts) && PyList_GET_ITEM(s->parts, i) != module) {
        i += 2;
    }
    return i < PyList_GET_SIZE(s->parts);
}

/* Path and module to `parts`, when it is as expected. 0 or -1. */
static int
scan_add(scan *s, PyObject *path, PyObject *module)
{
    if (Py_TYPE(module) != s->kind) {
        int odd = PyObject_TypeCheck(module, (PyTypeObject *)s->st->Module)
                      ? class_is_odd(s, Py_TYPE(module))
                      : 1;
        if (odd != 0) {
            s->odd = odd > 0;
            return odd < 0 ? -1 : 0;
        }
        s->kind = Py_TYPE(module);
    }
    return PyList_Append(s->parts, path) < 0 || PyList_Append(s->parts, module) < 0 ? -1
                                                                                    : 0;
}

/* A module and those in it, in the order of named_modules(). 0 or -1. */
static int
scan_walk(scan *s, PyObject *path, PyObject *module)
{
    OWNED PyObject *own = NULL, *inner = NULL, *before = NULL;
    PyObject *key, *value; /* borrowed from inner */
    Py_ssize_t position = 0;
    int result = 0;

    if (s->odd || PyList_GET_SIZE(s->parts) >= 2 * s->modules || scan_has(s, module)) {
        return 0;
    }
    if (scan_add(s, path, module) < 0 || s->odd) {
        return s->odd ? 0 : -1;
    }
    own = PyObject_GenericGetDict(module, NULL);
    if (own != NULL) { /* held: a class's slots are found by Python code */
        inner = Py_XNewRef(PyDict_GetItemWithError(own, s->st->str_modules));
    }
    s->odd = own != NULL && !PyErr_Occurred() &&
             (inner == NULL || !PyDict_CheckExact(inner) ||
              PyDict_GetItemWithError(own, s->st->str_named_modules) != NULL);
    if (s->odd || PyErr_Occurred()) {
        return s->odd ? 0 : -1;
    }
    if (Py_EnterRecursiveCall(" while the modules of a model are looked at")) {
        return -1;
    }
    before = PyUnicode_Concat(path, s->st->str_dot);
    result = before == NULL ? -1 : 0;
    while (result == 0 && !s->odd && PyList_GET_SIZE(s->parts) < 2 * s->modules &&
           PyDict_Next(inner, &position, &key, &value)) {
        OWNED PyObject *child = NULL, *at = NULL;
        s->odd = !PyUnicode_CheckExact(key);
        if (s->odd || value == Py_None) {
            continue;
        }
        child = Py_NewRef(value);
        at = PyUnicode_Concat(before, key);
        result = at == NULL ? -1 : scan_walk(s, at, child);
    }
    Py_LeaveRecursiveCall();
    return result;
}

/* Nothing that the step could change in place: it is recorded as it is. */
static int
value_is_plain(const PyObject *value)
{
    const PyTypeObject *kind = Py_TYPE(value);
    return kind == &PyLong_Type || kind == &PyFloat_Type || kind == &PyBool_Type ||
           kind == &PyUnicode_Type || value == Py_None || kind == &PyComplex_Type ||
           kind == &PyBytes_Type;
}

/* What is recorded of a value: new reference; NULL, with an exception or without one
 * where it is among those that are passed over. */
static PyObject *
value_kept(const scan *s, PyObject *value)
{
    OWNED PyObject *id = NULL;
    int skip;

    if (value_is_plain(value)) {
        return Py_NewRef(value);
    }
    id = PyLong_FromVoidPtr(value);
    skip = id == NULL ? -1 : PySet_Contains(s->skip, id);
    if (skip != 0 || PyObject_TypeCheck(value, (PyTypeObject *)s->st->Parameter)) {
        return NULL;
    }
    if (oomkit_tensor_check(s->st, value)) {
        return PyObject_CallOneArg(s->mark, value);
    }
    return PyObject_CallFunction(s->length, "sn", Py_TYPE(value)->tp_name,
                                 PyObject_Size(value));
}

/* Is this of interest? Most of a module's own are torch's, of other classes. */
static int
value_is_kept(const scan *s, PyObject *value, int is_root)
{
    return value_is_plain(value) || PyList_CheckExact(value) ||
           PyDict_CheckExact(value) || Py_IS_TYPE(value, &PySet_Type) ||
           (is_root && oomkit_tensor_check(s->st, value));
}

/* One attribute of a module, at `before` (its path and a dot). 0 or -1. */
static int
scan_attribute(scan *s, PyObject *before, PyObject *name, PyObject *value)
{
    OWNED PyObject *kept = value_kept(s, value), *at = NULL;

    if (kept == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    at = PyUnicode_Concat(before, name);
    return at == NULL ? -1 : PyDict_SetItem(s->found, at, kept);
}

/* The attributes of one module, but those that torch keeps. 0 or -1. */
static int
scan_part(scan *s, PyObject *path, PyObject *module)
{
    OWNED PyObject *own = PyObject_GenericGetDict(module, NULL);
    OWNED PyObject *before = PyUnicode_Concat(path, s->st->str_dot);
    PyObject *name, *value; /* borrowed from own, held while they are used */
    Py_ssize_t position = 0;
    int result = own == NULL || before == NULL ? -1 : 0;

    while (result == 0 && PyDict_GET_SIZE(s->found) < s->values &&
           PyDict_Next(own, &position, &name, &value)) {
        /* Any key but a plain str may have an == of its own. */
        if (!PyUnicode_CheckExact(name) ||
            !value_is_kept(s, value, module == s->root)) {
            continue;
        }
        result = PySet_Contains(s->but, name);
        if (result == 0) {
            Py_INCREF(name);
            Py_INCREF(value);
            result = scan_attribute(s, before, name, value);
            Py_DECREF(name);
            Py_DECREF(value);
        } else if (result > 0) {
            result = 0;
        }
    }
    return result;
}

static PyObject *
method_scan_modules(PyObject *module, PyObject *args)
{
    scan s = {.st = oomkit_state_of_module(module)};
    OWNED PyObject *parts = NULL;
    PyObject *path; /* borrowed */
    Py_ssize_t i;

    if (!PyArg_ParseTuple(args, "UOO!O!O!OOOnn:_scan_modules", &path, &s.root,
                          &PyDict_Type, &s.found, &PyFrozenSet_Type, &s.but,
                          &PySet_Type, &s.skip, &s.slots_of, &s.length, &s.mark,
                          &s.modules, &s.values)) {
        return NULL;
    }
    s.parts = parts = PyList_New(0);
    if (parts == NULL || scan_walk(&s, path, s.root) < 0) {
        return NULL;
    }
    for (i = 0; !s.odd && i + 1 < PyList_GET_SIZE(parts); i += 2) {
        if (scan_part(&s, PyList_GET_ITEM(parts, i), PyList_GET_ITEM(parts, i + 1)) <
            0) {
            return NULL;
        }
    }
    return Py_NewRef(s.odd ? Py_False : Py_True);
}

PyMethodDef oomkit_scan_methods[] = {
    {"_scan_modules", method_scan_modules, METH_VARARGS,
     "_scan_modules(path, module, found, but, skip, slots_of, length, mark, modules, "
     "values, /)\n--\n\n"
     "Plain attributes of a module and of those in it, and its own tensors, into the "
     "dict\n"
     "`found`. False, and nothing found, where Python has to look."},
    {NULL, NULL, 0, NULL},
};
