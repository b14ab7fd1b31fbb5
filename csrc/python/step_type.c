/* auto_batch's callable: construction, binding, attributes. All state is made before
 * the object can be seen; there is no __init__. */
#include "step_type.h"
#include "errors.h"
#include "step.h"

#include <structmember.h>

/* The function behind methods, partials, static methods and objects with __call__, for
 * its flags. New reference, or NULL without an exception for other callables. *names is
 * 1 when its parameters are those of `func`, *skip 1 when the first of them is bound.
 */
static PyObject *
step_function(oomkit_state *st, PyObject *func, int *names, int *skip)
{
    PyObject *inner, *at = Py_NewRef(func); /* owned */
    int depth;

    *skip = 0;
    *names = 1;
    for (depth = 0; depth < 16; depth++) {
        if (PyFunction_Check(at)) {
            return at;
        }
        if (PyMethod_Check(at)) {
            *skip = 1;
            Py_SETREF(at, Py_NewRef(PyMethod_GET_FUNCTION(at)));
            continue;
        }
        inner = PyObject_GetAttrString(at, "__func__"); /* static and class methods */
        if (inner == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
            *names = 0; /* a partial binds some, an object its self */
            inner = PyObject_GetAttr(at, st->str_func);
        }
        if (inner == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
            inner = PyType_Check(at)
                        ? NULL
                        : PyObject_GetAttr((PyObject *)Py_TYPE(at), st->str_call);
        }
        Py_SETREF(at, inner);
        if (at == NULL) {
            break;
        }
    }
    if (PyErr_Occurred()) {
        PyErr_Clear(); /* a callable without such attributes: nothing is known of it */
    }
    Py_XDECREF(at);
    return NULL;
}

/* async def and generator functions hand out their work later: there is nothing to
 * retry when the call returns. */
static int
step_refuse_kinds(PyObject *function, PyObject *func)
{
    int flags = ((PyCodeObject *)PyFunction_GET_CODE(function))->co_flags;

    if (flags & (CO_COROUTINE | CO_ASYNC_GENERATOR)) {
        PyErr_Format(PyExc_TypeError,
                     "auto_batch() cannot protect the async function %R: decorate the "
                     "synchronous step that it awaits",
                     func);
        return -1;
    }
    if (flags & (CO_GENERATOR | CO_ITERABLE_COROUTINE)) {
        PyErr_Format(PyExc_TypeError,
                     "auto_batch() cannot protect the generator function %R: decorate "
                     "the step that its loop runs",
                     func);
        return -1;
    }
    return 0;
}

/* Parameter names in the order of the arguments, with "*args" and "**kwargs" in their
 * places, as oomkit_batch_find takes them. New reference or NULL. */
static PyObject *
step_parameter_names(PyObject *function, int skip)
{
    PyCodeObject *code = (PyCodeObject *)PyFunction_GET_CODE(function); /* borrowed */
    PyObject *all = PyObject_GetAttrString((PyObject *)code, "co_varnames"); /* owned */
    PyObject *list = PyList_New(0), *names = NULL;                           /* owned */
    PyObject *star = NULL, *stars = NULL;                                    /* owned */
    int i, failed = all == NULL || list == NULL;

    star = failed ? NULL : PyUnicode_FromString("*args");
    stars = star == NULL ? NULL : PyUnicode_FromString("**kwargs");
    failed = stars == NULL;
    for (i = skip; !failed && i < code->co_argcount + code->co_kwonlyargcount; i++) {
        if (i == code->co_argcount && code->co_flags & CO_VARARGS) {
            failed = PyList_Append(list, star) < 0;
        }
        failed = failed || PyList_Append(list, PyTuple_GET_ITEM(all, i)) < 0;
    }
    if (!failed && code->co_kwonlyargcount == 0 && code->co_flags & CO_VARARGS) {
        failed = PyList_Append(list, star) < 0;
    }
    if (!failed && code->co_flags & CO_VARKEYWORDS) {
        failed = PyList_Append(list, stars) < 0;
    }
    if (!failed) {
        names = PyList_AsTuple(list);
    }
    Py_XDECREF(star);
    Py_XDECREF(stars);
    Py_XDECREF(list);
    Py_XDECREF(all);
    return names;
}

/* 1 when the first argument will be the object that a method is bound to. */
static int
step_takes_self(PyObject *names)
{
    PyObject *first; /* borrowed */
    if (PyTuple_GET_SIZE(names) == 0) {
        return 0;
    }
    first = PyTuple_GET_ITEM(names, 0);
    return PyUnicode_CompareWithASCIIString(first, "self") == 0 ||
           PyUnicode_CompareWithASCIIString(first, "cls") == 0;
}

/* label= or the function's qualified name. */
static int
step_label(oomkit_state *st, oomkit_step *self)
{
    PyObject *name; /* owned */

    if (self->options.label != NULL) {
        return 0;
    }
    name = PyObject_GetAttr(self->func, st->str_qualname);
    if (name == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear(); /* a callable object without a name */
        name = PyUnicode_FromString(Py_TYPE(self->func)->tp_name);
    }
    if (name != NULL && !PyUnicode_Check(name)) {
        Py_SETREF(name, PyObject_Str(name));
    }
    self->options.label = name;
    return name == NULL ? -1 : 0;
}

static PyObject *
step_new(oomkit_state *st, PyObject *func, PyObject *kwargs)
{
    PyTypeObject *type = (PyTypeObject *)st->step_type;
    oomkit_step *self;         /* owned */
    PyObject *function, *done; /* owned */
    int names, skip;

    if (!PyCallable_Check(func)) {
        PyErr_Format(PyExc_TypeError, "auto_batch() expected a callable, got %s",
                     Py_TYPE(func)->tp_name);
        return NULL;
    }
    function = step_function(st, func, &names, &skip);
    if (function != NULL && step_refuse_kinds(function, func) < 0) {
        Py_DECREF(function);
        return NULL;
    }
    self = step_CAST(type->tp_alloc(type, 0));
    if (self == NULL) {
        Py_XDECREF(function);
        return NULL;
    }
    self->st = st;
    self->vectorcall = oomkit_engine_call;
    self->updates = -1;
    self->func = Py_NewRef(func);
    self->ring = oomkit_ring_create(OOMKIT_RECORDS);
    if (self->ring == NULL) {
        PyErr_NoMemory();
        goto error;
    }
    if (oomkit_options_parse(st, kwargs, &self->options) < 0 ||
        step_label(st, self) < 0) {
        goto error;
    }
    if (function != NULL && names) {
        self->names = step_parameter_names(function, skip);
        if (self->names == NULL) {
            goto error;
        }
        self->skip = !skip && step_takes_self(self->names);
    }
    Py_CLEAR(function);
    done = PyObject_CallFunctionObjArgs(st->update_wrapper, self, func, NULL);
    if (done == NULL) {
        goto error;
    }
    Py_DECREF(done);
    done = PyObject_CallMethod(st->live_steps, "add", "O", self);
    if (done == NULL) {
        goto error;
    }
    Py_DECREF(done);
    return (PyObject *)self;
error:
    Py_XDECREF(function);
    Py_DECREF(self);
    return NULL;
}

PyObject *
oomkit_auto_batch(PyObject *module, PyObject *args, PyObject *kwargs)
{
    oomkit_state *st = oomkit_state_of_module(module);
    oomkit_options options;
    PyObject *self, *head, *result; /* owned */
    Py_ssize_t n = PyTuple_GET_SIZE(args);

    if (!st->bound) {
        return oomkit_raise(PyExc_RuntimeError,
                            "oomkit._C is not bound: import oomkit");
    }
    if (n > 1) {
        return oomkit_raise(PyExc_TypeError,
                            "auto_batch() takes one positional argument, the function; "
                            "got %zd",
                            n);
    }
    if (n == 1 && PyTuple_GET_ITEM(args, 0) != Py_None) {
        return step_new(st, PyTuple_GET_ITEM(args, 0), kwargs);
    }
    /* Options first: what is wrong with them is said at the line that has them. */
    if (oomkit_options_parse(st, kwargs, &options) < 0) {
        oomkit_options_clear(&options);
        return NULL;
    }
    oomkit_options_clear(&options);
    self = PyObject_GetAttrString(module, "auto_batch");
    head = self ? PyTuple_Pack(1, self) : NULL;
    result = head ? PyObject_Call(st->partial, head, kwargs) : NULL;
    Py_XDECREF(head);
    Py_XDECREF(self);
    return result;
}

static PyObject *
step_descr_get(PyObject *self, PyObject *instance, PyObject *Py_UNUSED(owner))
{
    if (instance == NULL || instance == Py_None) {
        return Py_NewRef(self);
    }
    return PyMethod_New(self, instance);
}

static PyObject *
step_repr(PyObject *op)
{
    return PyUnicode_FromFormat("<oomkit.auto_batch step %U>",
                                step_CAST(op)->options.label);
}

/* Pickled and copied by reference, as a function is. */
static PyObject *
step_reduce(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    return PyObject_GetAttr(op, step_CAST(op)->st->str_qualname);
}

static PyObject *
step_get_records(PyObject *op, void *Py_UNUSED(closure))
{
    oomkit_step *self = step_CAST(op);
    uint64_t count = oomkit_ring_count(self->ring);
    uint64_t room = oomkit_ring_capacity(self->ring);
    uint64_t i = count > room ? count - room : 0;
    PyObject *tuple, *list = PyList_New(0); /* owned */

    for (; list != NULL && i < count; i++) {
        oomkit_record record;
        PyObject *item; /* owned */
        if (oomkit_ring_read(self->ring, i, &record) != OOMKIT_OK) {
            continue; /* overwritten meanwhile by another thread's step */
        }
        item = oomkit_record_new(self->st, &record, self->options.label);
        if (item == NULL || PyList_Append(list, item) < 0) {
            Py_XDECREF(item);
            Py_CLEAR(list);
            break;
        }
        Py_DECREF(item);
    }
    if (list == NULL) {
        return NULL;
    }
    tuple = PyList_AsTuple(list);
    Py_DECREF(list);
    return tuple;
}

static PyObject *
step_get_label(PyObject *op, void *Py_UNUSED(closure))
{
    return Py_NewRef(step_CAST(op)->options.label);
}

static int
step_traverse(PyObject *op, visitproc visit, void *arg)
{
    oomkit_step *self = step_CAST(op);
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->func);
    Py_VISIT(self->dict);
    Py_VISIT(self->last_gradient);
    if (self->parts != NULL && self->parts->refs == 1) {
        int result = oomkit_participants_traverse(self->parts, visit, arg);
        if (result != 0) {
            return result;
        }
    }
    return oomkit_options_traverse(&self->options, visit, arg);
}

static int
step_clear(PyObject *op)
{
    oomkit_step *self = step_CAST(op);
    oomkit_participants *parts = self->parts;
    PyObject *label =
        Py_XNewRef(self->options.label); /* owned: repr() stays possible */

    self->parts = NULL;
    oomkit_participants_release(parts);
    oomkit_options_clear(&self->options);
    self->options.label = label;
    Py_CLEAR(self->last_gradient);
    Py_CLEAR(self->func);
    Py_CLEAR(self->dict);
    return 0;
}

static void
step_dealloc(PyObject *op)
{
    oomkit_step *self = step_CAST(op);
    PyTypeObject *tp = Py_TYPE(op);

    PyObject_GC_UnTrack(op);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    step_clear(op);
    Py_CLEAR(self->options.label);
    Py_CLEAR(self->names);
    oomkit_batch_site_clear(&self->batch_site);
    oomkit_result_site_clear(&self->results);
    oomkit_loss_site_clear(&self->losses);
    oomkit_ring_destroy(self->ring);
    tp->tp_free(op);
    Py_DECREF(tp);
}

static PyMethodDef step_methods[] = {
    {"__reduce__", step_reduce, METH_NOARGS, "Pickle by reference, as a function."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef step_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(oomkit_step, vectorcall), READONLY,
     NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(oomkit_step, dict), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(oomkit_step, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef step_getset[] = {
    {"records", step_get_records, NULL,
     "The last 1024 StepRecords of this step, oldest first (tuple).", NULL},
    {"label", step_get_label, NULL, "Name of the step in records and reports.", NULL},
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot step_slots[] = {
    {Py_tp_dealloc, step_dealloc},
    {Py_tp_traverse, step_traverse},
    {Py_tp_clear, step_clear},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_descr_get, step_descr_get},
    {Py_tp_repr, step_repr},
    {Py_tp_methods, step_methods},
    {Py_tp_members, step_members},
    {Py_tp_getset, step_getset},
    {Py_tp_doc, "A step protected against out-of-memory, as auto_batch returns it."},
    {0, NULL},
};

PyType_Spec oomkit_step_spec = {
    .name = "oomkit._C.Step",
    .basicsize = sizeof(oomkit_step),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = step_slots,
};
