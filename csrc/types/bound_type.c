/* `module.forward` where the class of a module has decorated its forward. A plain bound
 * method would do, but torch.compile() asks inspect for the file of every bound method
 * that is a module's forward, and inspect knows those of Python functions only. */
#include "step_type.h"
#include "types.h"

#include <stddef.h>
#include <structmember.h>

#define FEW_ARGUMENTS 8

typedef struct bound_object {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *step;     /* owned */
    PyObject *object;   /* owned: what it is bound to */
    PyObject *weakrefs; /* weak references to it */
} bound_object;

#define bound_CAST(op) ((bound_object *)(op))

PyObject *
oomkit_bound_step(PyObject *op)
{
    return bound_CAST(op)->step;
}

/* The object in front of the arguments, as a method does it. */
static PyObject *
bound_vectorcall(PyObject *op, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    bound_object *self = bound_CAST(op);
    Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    Py_ssize_t total = count + (kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames));
    PyObject *few[FEW_ARGUMENTS], **all = few, *result; /* borrowed; owned */

    if (nargsf & PY_VECTORCALL_ARGUMENTS_OFFSET) {
        PyObject **before = (PyObject **)args - 1;
        PyObject *saved = before[0]; /* whoever's it is, it is put back */
        before[0] = self->object;
        result = PyObject_Vectorcall(self->step, before, (size_t)count + 1, kwnames);
        before[0] = saved;
        return result;
    }
    if (total + 1 > FEW_ARGUMENTS) {
        all = PyMem_Malloc(((size_t)total + 1) * sizeof(*all));
        if (all == NULL) {
            return PyErr_NoMemory();
        }
    }
    all[0] = self->object;
    if (total > 0) {
        memcpy(all + 1, args, (size_t)total * sizeof(*all));
    }
    result = PyObject_Vectorcall(self->step, all, (size_t)count + 1, kwnames);
    if (all != few) {
        PyMem_Free(all);
    }
    return result;
}

PyObject *
oomkit_bound_new(oomkit_state *st, PyObject *step, PyObject *object)
{
    bound_object *self = PyObject_GC_New(bound_object, (PyTypeObject *)st->bound_type);

    if (self == NULL) {
        return NULL;
    }
    self->vectorcall = bound_vectorcall;
    self->step = Py_NewRef(step);
    self->object = Py_NewRef(object);
    self->weakrefs = NULL;
    PyObject_GC_Track(self);
    return (PyObject *)self;
}

/* type(method)(function, object), as weakref.WeakMethod rebuilds one. */
static PyObject *
bound_tp_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    oomkit_state *st = oomkit_state_of_type(type);
    PyObject *step, *object; /* borrowed from args */

    if (!PyArg_ParseTuple(args, "OO:BoundStep", &step, &object)) {
        return NULL;
    }
    if (!oomkit_step_check(st, step)) {
        return oomkit_raise(PyExc_TypeError,
                            "BoundStep() expected a step, got %s" SEE("internal-error"),
                            Py_TYPE(step)->tp_name);
    }
    return oomkit_bound_new(st, step, object);
}

static int
bound_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(bound_CAST(op)->step);
    Py_VISIT(bound_CAST(op)->object);
    return 0;
}

static void
bound_dealloc(PyObject *op)
{
    PyTypeObject *tp = Py_TYPE(op);

    PyObject_GC_UnTrack(op);
    if (bound_CAST(op)->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    Py_XDECREF(bound_CAST(op)->step);
    Py_XDECREF(bound_CAST(op)->object);
    tp->tp_free(op);
    Py_DECREF(tp);
}

/* --- attributes --- */

static PyObject *
bound_getattro(PyObject *op, PyObject *name)
{
    PyObject *step = bound_CAST(op)->step; /* borrowed from op */
    oomkit_state *st = step_CAST(step)->st;
    PyObject *value; /* owned */

    if (PyUnicode_Compare(name, st->str_module) == 0 ||
        PyUnicode_Compare(name, st->str_doc) == 0) {
        return PyObject_GetAttr(step, name); /* the type has some of its own */
    }
    value = PyObject_GenericGetAttr(op, name);
    if (value == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear(); /* not the type's: the step's own */
        value = PyObject_GetAttr(step, name);
    }
    return value;
}

/* What undecorated code would see here. */
static PyObject *
bound_get_wrapped(PyObject *op, void *Py_UNUSED(closure))
{
    PyObject *func = step_CAST(bound_CAST(op)->step)->func; /* borrowed from the step */

    if (func == NULL) {
        return oomkit_raise(PyExc_AttributeError, "__wrapped__");
    }
    return PyMethod_New(func, bound_CAST(op)->object);
}

static PyObject *
bound_repr(PyObject *op)
{
    return PyUnicode_FromFormat("<bound oomkit.auto_batch step %U of %R>",
                                step_CAST(bound_CAST(op)->step)->options.label,
                                bound_CAST(op)->object);
}

/* Equal as methods are: the same step of the same object. */
static PyObject *
bound_richcompare(PyObject *op, PyObject *other, int kind)
{
    int equal;

    if ((kind != Py_EQ && kind != Py_NE) || Py_TYPE(op) != Py_TYPE(other)) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    equal = bound_CAST(op)->step == bound_CAST(other)->step &&
            bound_CAST(op)->object == bound_CAST(other)->object;
    return PyBool_FromLong(equal == (kind == Py_EQ));
}

static Py_hash_t
bound_hash(PyObject *op)
{
    Py_hash_t hash = (Py_hash_t)(((uintptr_t)bound_CAST(op)->object >> 4) ^
                                 ((uintptr_t)bound_CAST(op)->step >> 3));
    return hash == -1 ? -2 : hash;
}

static PyObject *
bound_reduce(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    OWNED PyObject *builtins = PyImport_ImportModule("builtins");
    OWNED PyObject *getattr =
        builtins ? PyObject_GetAttrString(builtins, "getattr") : NULL;
    OWNED PyObject *name =
        getattr ? PyObject_GetAttrString(bound_CAST(op)->step, "__name__") : NULL;

    return name ? Py_BuildValue("O(OO)", getattr, bound_CAST(op)->object, name) : NULL;
}

static PyObject *
bound_deepcopy(PyObject *op, PyObject *memo)
{
    oomkit_state *st = step_CAST(bound_CAST(op)->step)->st;
    OWNED PyObject *object =
        PyObject_CallFunctionObjArgs(st->deepcopy, bound_CAST(op)->object, memo, NULL);

    return object ? oomkit_bound_new(st, bound_CAST(op)->step, object) : NULL;
}

static PyMethodDef bound_methods[] = {
    {"__reduce__", bound_reduce, METH_NOARGS, "As a method: the object and the name."},
    {"__deepcopy__", bound_deepcopy, METH_O, "As a method: bound to the copy."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef bound_members[] = {
    {"__self__", T_OBJECT_EX, offsetof(bound_object, object), READONLY,
     "The module that it is bound to."},
    {"__func__", T_OBJECT_EX, offsetof(bound_object, step), READONLY, "The step."},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(bound_object, vectorcall), READONLY,
     NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(bound_object, weakrefs), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef bound_getset[] = {
    {"__wrapped__", bound_get_wrapped, NULL, "The undecorated method.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot bound_slots[] = {
    {Py_tp_new, bound_tp_new},
    {Py_tp_dealloc, bound_dealloc},
    {Py_tp_traverse, bound_traverse},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_getattro, bound_getattro},
    {Py_tp_repr, bound_repr},
    {Py_tp_richcompare, bound_richcompare},
    {Py_tp_hash, bound_hash},
    {Py_tp_methods, bound_methods},
    {Py_tp_members, bound_members},
    {Py_tp_getset, bound_getset},
    {0, NULL},
};

PyType_Spec oomkit_bound_spec = {
    .name = "oomkit._C.BoundStep",
    .basicsize = sizeof(bound_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = bound_slots,
};
