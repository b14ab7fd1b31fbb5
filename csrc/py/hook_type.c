/* What torch calls as a hook. torch.compile takes a bare C function for one of Python's
 * own, and has the user file an issue with PyTorch about it; an object that can be
 * called it leaves alone without a word, and calls it. */
#include "state.h"

#include <stddef.h>
#include <structmember.h>

typedef struct hook {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *function; /* owned: the C function */
} hook;

#define hook_CAST(op) ((hook *)(op))

static PyObject *
hook_vectorcall(PyObject *op, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    return PyObject_Vectorcall(hook_CAST(op)->function, args, nargsf, kwnames);
}

static void
hook_dealloc(PyObject *op)
{
    PyTypeObject *tp = Py_TYPE(op);

    Py_CLEAR(hook_CAST(op)->function);
    tp->tp_free(op);
    Py_DECREF(tp);
}

PyObject *
oomkit_hook_new(const oomkit_state *st, PyObject *module, const char *name)
{
    PyTypeObject *type = (PyTypeObject *)st->hook_type; /* borrowed */
    OWNED PyObject *function = PyObject_GetAttrString(module, name);
    hook *self =
        function == NULL ? NULL : hook_CAST(type->tp_alloc(type, 0)); /* owned */

    if (self == NULL) {
        return NULL;
    }
    self->vectorcall = hook_vectorcall;
    self->function = STEAL(function);
    return (PyObject *)self;
}

static PyMemberDef hook_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(hook, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot hook_slots[] = {
    {Py_tp_dealloc, hook_dealloc},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, hook_members},
    {0, NULL},
};

/* No part in collections: the function it holds is the module's. */
PyType_Spec oomkit_hook_spec = {
    .name = "oomkit._C._Hook",
    .basicsize = sizeof(hook),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = hook_slots,
};
