/* auto_batch's callable: binding, attributes, release. All state is made before the
 * object can be seen (step_make.c); there is no __init__. */
#include "binding.h"
#include "step_type.h"
#include "types.h"
#include "../accum/accum.h"
#include "../batch/batch.h"
#include "../device/device.h"
#include "../plain/plain_state.h"
#include "../sizes/remember.h"

#include <structmember.h>

static PyObject *
step_descr_get(PyObject *op, PyObject *instance, PyObject *Py_UNUSED(owner))
{
    oomkit_step *self = step_CAST(op);

    if (instance == NULL || instance == Py_None) {
        return Py_NewRef(op);
    }
    if (self->is_forward &&
        PyObject_TypeCheck(instance, (PyTypeObject *)self->st->Module)) {
        return oomkit_bound_new(self->st, op, instance);
    }
    return PyMethod_New(op, instance);
}

/* Does the callable have a state of its own (a module, a trainer), which is what
 * `step.state_dict()` has to be then? */
static int
step_is_callables_state(const oomkit_step *self, PyObject *name)
{
    return self->func != NULL && !PyFunction_Check(self->func) &&
           (PyUnicode_Compare(name, self->st->str_state_dict) == 0 ||
            PyUnicode_Compare(name, self->st->str_load_state_dict) == 0) &&
           PyObject_HasAttr(self->func, name);
}

/* Attributes of the callable are the step's too: libraries read __code__, __defaults__,
 * a module's parameters(). */
static PyObject *
step_getattro(PyObject *op, PyObject *name)
{
    if (step_is_callables_state(step_CAST(op), name)) {
        return PyObject_GetAttr(step_CAST(op)->func, name);
    }
    return oomkit_wrap_getattr(step_CAST(op)->st, op, step_CAST(op)->func, name);
}

/* What is set goes where the attribute is: on a module, and what a function computes
 * with. */
static int
step_setattro(PyObject *op, PyObject *name, PyObject *value)
{
    oomkit_step *self = step_CAST(op);
    int special = PyUnicode_Check(name) && PyUnicode_GET_LENGTH(name) > 1 &&
                  PyUnicode_READ_CHAR(name, 0) == '_' &&
                  PyUnicode_READ_CHAR(name, 1) == '_';

    if (self->func != NULL &&
        ((self->is_module && !special) ||
         (special && PyFunction_Check(self->func) &&
          (PyUnicode_Compare(name, self->st->str_defaults) == 0 ||
           PyUnicode_Compare(name, self->st->str_kwdefaults) == 0 ||
           PyUnicode_Compare(name, self->st->str_code) == 0)))) {
        return PyObject_SetAttr(self->func, name, value);
    }
    return PyObject_GenericSetAttr(op, name, value);
}

/* A callable that wants to know its name in a class is told. */
static PyObject *
step_set_name(PyObject *op, PyObject *const *args, Py_ssize_t count)
{
    PyObject *func = step_CAST(op)->func; /* borrowed from op */
    OWNED PyObject *method = NULL;

    if (count != 2) {
        return oomkit_raise(
            PyExc_TypeError,
            "__set_name__() takes a class and a name, got %zd arguments", count);
    }
    method =
        PyObject_GetAttr((PyObject *)Py_TYPE(func), step_CAST(op)->st->str_set_name);
    if (method == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return NULL;
        }
        PyErr_Clear(); /* most callables do not */
        Py_RETURN_NONE;
    }
    return PyObject_CallFunctionObjArgs(method, func, args[0], args[1], NULL);
}

static PyObject *
step_repr(PyObject *op)
{
    return PyUnicode_FromFormat("<oomkit.auto_batch step %U>",
                                step_CAST(op)->options.label);
}

static PyObject *
step_get_records(PyObject *op, void *Py_UNUSED(closure))
{
    oomkit_step *self = step_CAST(op);

    return oomkit_history_records(self->st, self->history, self->options.label);
}

static PyObject *
step_get_summary(PyObject *op, void *Py_UNUSED(closure))
{
    oomkit_step *self = step_CAST(op);
    OWNED_MEMORY oomkit_totals *totals = PyMem_Malloc(sizeof(*totals));

    if (totals == NULL) {
        return PyErr_NoMemory();
    }
    oomkit_history_total(self->history, totals);
    return oomkit_summary_new(self->st, totals, self->options.label);
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
    Py_VISIT(self->left_out);
    Py_VISIT(self->alike);
    Py_VISIT(self->averaged);
    Py_VISIT(self->given);
    Py_VISIT(self->instances);
    Py_VISIT(self->parent);
    Py_VISIT(self->last_gradient);
    Py_VISIT(self->memory_key);
    if (self->parts != NULL && self->parts->refs == 1) {
        int result = oomkit_participants_traverse(self->parts, visit, arg);
        if (result != 0) {
            return result;
        }
    }
    if (oomkit_plain_site_traverse(self->plain.site, visit, arg) != 0) {
        return -1;
    }
    return oomkit_options_traverse(&self->options, visit, arg);
}

/* A finaliser that the collector runs late. */
static PyObject *
step_cleared_call(PyObject *op, PyObject *const *Py_UNUSED(args),
                  size_t Py_UNUSED(nargsf), PyObject *Py_UNUSED(kwnames))
{
    return PyErr_Format(PyExc_ReferenceError,
                        "%R was called while the garbage collector was freeing it", op);
}

static int
step_clear(PyObject *op)
{
    oomkit_step *self = step_CAST(op);
    oomkit_participants *parts = self->parts;
    oomkit_plain_site *plain = self->plain.site;
    PyObject *label =
        Py_XNewRef(self->options.label); /* owned: repr() stays possible */

    oomkit_kept_put(self);
    self->vectorcall = step_cleared_call;
    oomkit_step_drop_instances(self);
    self->parts = NULL;
    oomkit_participants_release(parts);
    self->plain.site = NULL;
    oomkit_plain_site_release(plain);
    oomkit_options_clear(&self->options);
    self->options.label = label;
    Py_CLEAR(self->given);
    Py_CLEAR(self->last_gradient);
    Py_CLEAR(self->memory_key);
    Py_CLEAR(self->left_out);
    Py_CLEAR(self->alike);
    Py_CLEAR(self->averaged);
    Py_CLEAR(self->func);
    Py_CLEAR(self->dict);
    return 0;
}

static void
step_dealloc(PyObject *op)
{
    oomkit_step *self = step_CAST(op);
    PyTypeObject *tp = Py_TYPE(op);
    const int climbed =
        oomkit_has_said(self, OOMKIT_SAID_RUNGS) || self->options.optimizer_parts;

    PyObject_GC_UnTrack(op);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    step_clear(op);
    if (self->parent == NULL) {
        oomkit_gone_put(self->st, self->options.label, self->history);
    }
    if (climbed) {
        oomkit_host_unpin(oomkit_state_of_type(tp));
    }
    Py_CLEAR(self->options.label);
    Py_CLEAR(self->names);
    Py_CLEAR(self->origin);
    oomkit_batch_site_clear(&self->batch_site);
    oomkit_result_site_clear(&self->results);
    oomkit_loss_site_clear(&self->losses);
    oomkit_proven_clear(self->proven);
    PyMem_Free(self->careful);
    Py_CLEAR(self->owner);
    Py_CLEAR(self->loop_of);
    Py_CLEAR(self->parent);
    tp->tp_free(op);
    Py_DECREF(tp);
}

static PyMethodDef step_methods[] = {
    {"state_dict", oomkit_step_state, METH_NOARGS,
     "state_dict($self)\n--\n\nThe sizes found so far, for a checkpoint (dict of plain "
     "values)."},
    {"load_state_dict", oomkit_step_load, METH_O,
     "load_state_dict($self, state, /)\n--\n\nBegin with the sizes of a state_dict()."},
    {"__reduce__", oomkit_step_reduce, METH_NOARGS,
     "Pickle by reference, as a function; what has no name of its own, by its parts."},
    {"__copy__", oomkit_step_copy, METH_NOARGS, "The step itself, as of a function."},
    {"__deepcopy__", oomkit_step_deepcopy, METH_O,
     "The step itself, or one of the copied object that it is bound to."},
    {"__set_name__", (PyCFunction)(void (*)(void))step_set_name, METH_FASTCALL,
     "Passed on to the callable."},
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
     "StepRecords of this step, oldest first (tuple): the last 1024, and before them "
     "older ones in which something happened.",
     NULL},
    {"summary", step_get_summary, NULL, "All calls of this step (StepSummary).", NULL},
    {"label", step_get_label, NULL, "Name of the step in records and reports.", NULL},
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

#define STEP_SLOTS                                                                     \
    {Py_tp_dealloc, step_dealloc}, {Py_tp_traverse, step_traverse},                    \
        {Py_tp_clear, step_clear}, {Py_tp_call, PyVectorcall_Call},                    \
        {Py_tp_repr, step_repr}, {Py_tp_getattro, step_getattro},                      \
        {Py_tp_setattro, step_setattro}, {Py_tp_methods, step_methods},                \
        {Py_tp_members, step_members}, {Py_tp_getset, step_getset},                    \
        {Py_tp_doc,                                                                    \
         "A step protected against out-of-memory, as auto_batch returns it."}

#define STEP_FLAGS                                                                     \
    (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |            \
     Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION)

static PyType_Slot step_slots[] = {
    STEP_SLOTS, {Py_tp_descr_get, step_descr_get}, {0, NULL}};

static PyType_Slot step_object_slots[] = {STEP_SLOTS, {0, NULL}};

PyType_Spec oomkit_step_spec = {
    .name = "oomkit._C.Step",
    .basicsize = sizeof(oomkit_step),
    .flags = STEP_FLAGS | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .slots = step_slots,
};

/* In a class it stays as it is, as the callable would: the interpreter passes `self` to
 * whatever has the flag, without asking. */
PyType_Spec oomkit_step_object_spec = {
    .name = "oomkit._C.Step",
    .basicsize = sizeof(oomkit_step),
    .flags = STEP_FLAGS,
    .slots = step_object_slots,
};
