/* The callable that @oomkit.guard() makes of a function. */
#include "binding.h"
#include "heap_types.h"
#include "types.h"

#include <stddef.h>
#include <structmember.h>

#define UNWRAP_DEPTH 16

typedef struct guarded_object {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *func;     /* owned */
    PyObject *dict;     /* owned: attributes, as a function has them */
    PyObject *weakrefs; /* weak references to the callable */
    oomkit_guard guard;
} guarded_object;

#define guarded_CAST(op) ((guarded_object *)(op))

/* --- calling --- */

/* The call failed with the exception in flight. New reference (None when it is
 * skipped), or NULL with the exception. */
static PyObject *
guarded_failed(oomkit_guard *guard, oomkit_guard_window *window)
{
    PyObject *exception = oomkit_exception_take(); /* owned, dropped or given back */
    OWNED PyObject *handled = PyErr_GetHandledException(); /* the caller's */

    if (!oomkit_guard_is_oom(guard, exception)) {
        oomkit_guard_end(guard, window, OOMKIT_GUARD_ERROR);
        oomkit_exception_give(exception);
        return NULL;
    }
    oomkit_guard_failed(guard, window, exception, handled);
    if (guard->skip) {
        oomkit_exception_drop(guard->st, exception, handled);
        oomkit_guard_flush(guard, window, 0);
        return Py_NewRef(Py_None);
    }
    oomkit_guard_flush(guard, window, 1);
    oomkit_exception_give(exception);
    return NULL;
}

static PyObject *
guarded_vectorcall(PyObject *op, PyObject *const *args, size_t nargsf,
                   PyObject *kwnames)
{
    guarded_object *self = guarded_CAST(op);
    oomkit_guard_window window;
    PyObject *result; /* owned */

    if (oomkit_guard_begin(&self->guard, &window) < 0) {
        return NULL;
    }
    Py_INCREF(op); /* the function may put another one under its name */
    result = PyObject_Vectorcall(self->func, args, nargsf, kwnames);
    if (result != NULL) {
        oomkit_guard_end(&self->guard, &window, OOMKIT_GUARD_FINISHED);
    } else {
        result = guarded_failed(&self->guard, &window);
    }
    Py_DECREF(op);
    return result;
}

static PyObject *
guarded_descr_get(PyObject *op, PyObject *object, PyObject *Py_UNUSED(type))
{
    return object == NULL || object == Py_None ? Py_NewRef(op)
                                               : PyMethod_New(op, object);
}

/* --- making one --- */

/* co_flags of what is behind a callable: partial objects are looked through, an object
 * counts as its __call__. 0 where there is no Python code; -1 with an exception. */
static int
callable_flags(oomkit_state *st, PyObject *callable)
{
    OWNED PyObject *present = Py_NewRef(callable);
    int depth;

    for (depth = 0; depth < UNWRAP_DEPTH; depth++) {
        OWNED PyObject *code = PyObject_GetAttr(present, st->str_code);
        OWNED PyObject *next = NULL;
        if (code != NULL) {
            return PyCode_Check(code) ? ((PyCodeObject *)code)->co_flags : 0;
        }
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear(); /* no code here: a partial or an object with __call__ may have
                          some */
        next = PyObject_GetAttr(present, st->str_func);
        if (next == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
            next = PyType_Check(present)
                       ? NULL
                       : PyObject_GetAttr((PyObject *)Py_TYPE(present), st->str_call);
        }
        if (next == NULL) {
            return PyErr_Occurred() ? -1 : 0;
        }
        Py_SETREF(present, STEAL(next));
    }
    return 0;
}

/* 0, or -1 with TypeError. */
static int
guarded_check(oomkit_state *st, PyObject *func)
{
    int flags;
    const char *kind;

    if (!PyCallable_Check(func)) {
        return PyErr_Format(PyExc_TypeError,
                            "guard() expected a callable, got '%s'" SEE("options"),
                            Py_TYPE(func)->tp_name) == NULL
                   ? -1
                   : 0;
    }
    if (PyType_Check(func)) {
        PyErr_Format(
            PyExc_TypeError,
            "guard() cannot decorate the class %R: decorate a method of it, or make "
            "the object inside `with oomkit.guard():`" SEE("decoration"),
            func);
        return -1;
    }
    flags = callable_flags(st, func);
    if (flags < 0) {
        return -1;
    }
    if ((flags & (CO_COROUTINE | CO_ASYNC_GENERATOR | CO_ITERABLE_COROUTINE)) != 0) {
        kind = "an async function";
    } else if ((flags & CO_GENERATOR) != 0) {
        kind = "a generator function";
    } else {
        return 0;
    }
    PyErr_Format(PyExc_TypeError,
                 "guard() cannot decorate %s: its body runs after the call has "
                 "returned; use `with oomkit.guard():` inside it" SEE("decoration"),
                 kind);
    return -1;
}

/* dict[name] = func.name, where there is such an attribute. 0 or -1. */
static int
guarded_copy(PyObject *dict, PyObject *func, PyObject *name)
{
    OWNED PyObject *value = PyObject_GetAttr(func, name);

    if (value == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear();
        return 0;
    }
    return PyDict_SetItem(dict, name, value);
}

/* What help() and pickle look for. Other attributes are found on the function. New
 * reference or NULL. */
static PyObject *
guarded_dict(oomkit_state *st, PyObject *func)
{
    OWNED PyObject *dict = PyDict_New();
    OWNED PyObject *doc = PyUnicode_FromString("__doc__");

    if (dict == NULL || doc == NULL || guarded_copy(dict, func, doc) < 0 ||
        guarded_copy(dict, func, st->str_name) < 0 ||
        guarded_copy(dict, func, st->str_qualname) < 0 ||
        guarded_copy(dict, func, st->str_module) < 0 ||
        PyDict_SetItem(dict, st->str_wrapped, func) < 0) {
        return NULL;
    }
    return STEAL(dict);
}

/* The label of the guard, else the qualified name, else the name of the type. New
 * reference or NULL. */
static PyObject *
guarded_label(const oomkit_guard *guard, PyObject *dict, PyObject *func)
{
    PyObject *name; /* borrowed from dict */

    if (guard->label != NULL) {
        return Py_NewRef(guard->label);
    }
    name = PyDict_GetItemWithError(dict, guard->st->str_qualname);
    if (name != NULL && PyUnicode_Check(name)) {
        return Py_NewRef(name);
    }
    return PyErr_Occurred() ? NULL : PyUnicode_FromString(Py_TYPE(func)->tp_name);
}

static PyObject *
guarded_make(oomkit_state *st, PyObject *func, void *how)
{
    const oomkit_guard *guard = how;
    PyTypeObject *type = (PyTypeObject *)(oomkit_wrap_binds(func)
                                              ? st->guarded_type
                                              : st->guarded_object_type); /* borrowed */
    OWNED PyObject *dict = NULL, *label = NULL;
    PyObject *self; /* owned */

    if (guarded_check(st, func) < 0) {
        return NULL;
    }
    dict = guarded_dict(st, func);
    label = dict == NULL ? NULL : guarded_label(guard, dict, func);
    self = label == NULL ? NULL : type->tp_alloc(type, 0);
    if (self != NULL) {
        guarded_CAST(self)->vectorcall = guarded_vectorcall;
        guarded_CAST(self)->func = Py_NewRef(func);
        guarded_CAST(self)->dict = STEAL(dict);
        oomkit_guard_init(&guarded_CAST(self)->guard, st, label, guard->skip,
                          guard->reset_peaks);
    }
    return self;
}

PyObject *
oomkit_guarded_new(const oomkit_guard *guard, PyObject *func)
{
    void *how = (void *)guard; /* only read */
    PyObject *result = oomkit_wrap_descriptor(guard->st, func, guarded_make, how);

    return result != NULL || PyErr_Occurred() ? result
                                              : guarded_make(guard->st, func, how);
}

static int
guarded_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(guarded_CAST(op)->func);
    Py_VISIT(guarded_CAST(op)->dict);
    Py_VISIT(guarded_CAST(op)->guard.label);
    return 0;
}

/* The function stays until the end: a finaliser may still call. */
static int
guarded_clear(PyObject *op)
{
    Py_CLEAR(guarded_CAST(op)->dict);
    return 0;
}

static void
guarded_dealloc(PyObject *op)
{
    PyTypeObject *tp = Py_TYPE(op);

    PyObject_GC_UnTrack(op);
    if (guarded_CAST(op)->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    guarded_clear(op);
    Py_CLEAR(guarded_CAST(op)->func);
    oomkit_guard_clear(&guarded_CAST(op)->guard);
    tp->tp_free(op);
    Py_DECREF(tp);
}

/* --- attributes --- */

/* Its own attributes, then the function's: a library that reads __code__, __defaults__
 * or __annotations__ finds them. */
static PyObject *
guarded_getattro(PyObject *op, PyObject *name)
{
    return oomkit_wrap_getattr(guarded_CAST(op)->guard.st, op, guarded_CAST(op)->func,
                               name);
}

static PyObject *
guarded_repr(PyObject *op)
{
    return PyUnicode_FromFormat("<oomkit.guard of %R>", guarded_CAST(op)->func);
}

static PyObject *
guarded_get_summary(PyObject *op, void *Py_UNUSED(closure))
{
    return oomkit_guard_summary(&guarded_CAST(op)->guard);
}

static PyObject *
guarded_get_records(PyObject *op, void *Py_UNUSED(closure))
{
    return oomkit_guard_records(&guarded_CAST(op)->guard);
}

PyDoc_STRVAR(guarded_reduce_doc,
             "__reduce__($self, /)\n"
             "--\n"
             "\n"
             "Pickled by name, as functions are; what has no name, by its parts.");

static PyObject *
guarded_reduce(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    guarded_object *self = guarded_CAST(op);
    int named = oomkit_wrap_is_named(self->guard.st, op);
    OWNED PyObject *make = NULL;

    if (named != 0) {
        return named < 0 ? NULL : PyObject_GetAttr(op, self->guard.st->str_qualname);
    }
    make = PyObject_GetAttrString(PyType_GetModule(Py_TYPE(op)), "_guarded");
    return make == NULL ? NULL
                        : Py_BuildValue("O(OOii)", make, self->func, self->guard.label,
                                        self->guard.skip, self->guard.reset_peaks);
}

static PyObject *
guarded_again(PyObject *module, PyObject *args)
{
    oomkit_state *st = oomkit_state_of_module(module);
    PyObject *func, *label, *result; /* borrowed from args; owned */
    oomkit_guard guard;
    int skip, reset_peaks;

    if (!PyArg_ParseTuple(args, "OUii:_guarded", &func, &label, &skip, &reset_peaks)) {
        return NULL;
    }
    memset(&guard, 0, sizeof(guard));
    oomkit_guard_init(&guard, st, label, skip, reset_peaks);
    result = oomkit_guarded_new(&guard, func);
    oomkit_guard_clear(&guard);
    return result;
}

PyMethodDef oomkit_guarded_methods[] = {
    {"_guarded", guarded_again, METH_VARARGS,
     "_guarded(function, label, skip, reset_peaks, /)\n--\n\nOut of a pickle."},
    {NULL, NULL, 0, NULL},
};

static PyObject *
guarded_copy_shallow(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    return Py_NewRef(op);
}

/* Guarded methods go with a copy of their object. */
static PyObject *
guarded_deepcopy(PyObject *op, PyObject *memo)
{
    guarded_object *self = guarded_CAST(op);
    PyObject *known; /* owned */
    OWNED PyObject *func =
        oomkit_wrap_deepcopy(self->guard.st, op, self->func, memo, &known);

    if (func == NULL || known != NULL) {
        return known;
    }
    return func == self->func ? Py_NewRef(op)
                              : guarded_make(self->guard.st, func, &self->guard);
}

static PyGetSetDef guarded_getset[] = {
    {"summary", guarded_get_summary, NULL, "All calls of this function (StepSummary).",
     NULL},
    {"records", guarded_get_records, NULL,
     "tuple of StepRecord: the latest calls, in the order in which they ended.", NULL},
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef guarded_members[] = {
    {"label", T_OBJECT, offsetof(guarded_object, guard.label), READONLY,
     "The name in records, notes and log lines."},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(guarded_object, vectorcall), READONLY,
     NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(guarded_object, dict), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(guarded_object, weakrefs), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef guarded_methods[] = {
    {"__reduce__", guarded_reduce, METH_NOARGS, guarded_reduce_doc},
    {"__copy__", guarded_copy_shallow, METH_NOARGS, "The callable itself."},
    {"__deepcopy__", guarded_deepcopy, METH_O, "Itself, or bound to the copy."},
    {NULL, NULL, 0, NULL},
};

#define GUARDED_SLOTS                                                                  \
    {Py_tp_doc,                                                                        \
     (void *)"A function that runs under a guard, as made by @oomkit.guard()."},       \
        {Py_tp_dealloc, guarded_dealloc}, {Py_tp_traverse, guarded_traverse},          \
        {Py_tp_clear, guarded_clear}, {Py_tp_repr, guarded_repr},                      \
        {Py_tp_call, PyVectorcall_Call}, {Py_tp_getattro, guarded_getattro},           \
        {Py_tp_methods, guarded_methods}, {Py_tp_members, guarded_members},            \
    {                                                                                  \
        Py_tp_getset, guarded_getset                                                   \
    }

#define GUARDED_FLAGS                                                                  \
    (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |              \
     Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION)

static PyType_Slot guarded_slots[] = {
    GUARDED_SLOTS, {Py_tp_descr_get, guarded_descr_get}, {0, NULL}};

static PyType_Slot guarded_object_slots[] = {GUARDED_SLOTS, {0, NULL}};

PyType_Spec oomkit_guarded_spec = {
    .name = "oomkit.guarded",
    .basicsize = sizeof(guarded_object),
    .flags = GUARDED_FLAGS | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .slots = guarded_slots,
};

/* Of a callable that does not bind: in a class it stays as it is. */
PyType_Spec oomkit_guarded_object_spec = {
    .name = "oomkit.guarded",
    .basicsize = sizeof(guarded_object),
    .flags = GUARDED_FLAGS,
    .slots = guarded_object_slots,
};
