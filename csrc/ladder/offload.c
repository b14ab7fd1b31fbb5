/* The offload itself: which storages stay, and its place among torch's hooks. */
#include "offload.h"
#include "../core/status.h"
#include "../py/errors.h"
#include "../py/tensor.h"

#include <stddef.h>
#include <structmember.h>

int
oomkit_offload_possible(const oomkit_state *st)
{
    return oomkit_has_bridge(st) && st->push_saved_hooks != NULL &&
           st->pop_saved_hooks != NULL && st->top_saved_hooks != NULL &&
           st->saved_hooks_off != NULL;
}

PyObject *
oomkit_offload_empty(oomkit_offload *self, uint64_t bytes, int on_host)
{
    oomkit_state *st = self->st;
    OWNED PyObject *size = PyLong_FromUnsignedLongLong(bytes);
    PyObject *args[] = {size, st->uint8, on_host ? st->str_cpu_name : self->device_name,
                        on_host && self->pinned ? Py_True : Py_False}; /* borrowed */
    PyObject *made = NULL; /* owned, returned */

    if (size == NULL) {
        return NULL;
    }
    if (!on_host) {
        return PyObject_Vectorcall(st->torch_empty, args, 1, self->names);
    }
    EXEMPT (st) {
        made = PyObject_Vectorcall(st->torch_empty, args, 1, self->names);
    }
    if (made == NULL && self->pinned && oomkit_pinning_failed()) {
        self->pinned = 0;
        return oomkit_offload_empty(self, bytes, 1);
    }
    st->pinned_any |= self->pinned;
    return made;
}

/* --- making one --- */

/* Holds the storages of a sequence of tensors weakly. 0 or -1. */
static int
offload_keep(oomkit_offload *self, PyObject *tensors)
{
    Py_ssize_t count = PySequence_Fast_GET_SIZE(tensors);
    PyObject **items = PySequence_Fast_ITEMS(tensors); /* borrowed from tensors */
    PyObject **found;                                  /* the holds, as addresses */

    for (Py_ssize_t i = 0; i < count; i++) {
        if (!oomkit_tensor_check(self->st, items[i])) {
            PyErr_Format(
                PyExc_TypeError,
                "expected a tensor to keep, got '%.200s'" SEE("internal-error"),
                Py_TYPE(items[i])->tp_name);
            return -1;
        }
    }
    self->kept = PyMem_Calloc((size_t)count + 1, sizeof(void *));
    if (self->kept == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (self->bridge->storages_hold((const void *const *)items, self->st->impl_offset,
                                    (size_t)count, self->kept) != OOMKIT_OK) {
        PyErr_SetString(
            PyExc_RuntimeError,
            "torch does not report a tensor's storage" SEE("internal-error"));
        return -1;
    }
    self->kept_count = (size_t)count;
    found = (PyObject **)self->kept; /* a set compares addresses and nothing else */
    return oomkit_addresses_fill(&self->kept_set, found, count);
}

/* What torch.empty() and torch's hooks are given. 0 or -1. */
static int
offload_prepare(oomkit_offload *self, PyObject *module)
{
    char text[OOMKIT_DEVICE_TEXT];

    oomkit_device_text(self->device, text);
    self->pinned = self->device.type == OOMKIT_DEVICE_CUDA;
    self->device_name = PyUnicode_FromString(text);
    if (self->device_name == NULL) {
        return -1;
    }
    self->names = Py_BuildValue("(sss)", "dtype", "device", "pin_memory");
    if (self->names == NULL) {
        return -1;
    }
    self->unpack = oomkit_hook_new(self->st, module, "_offload_unpack");
    return self->unpack == NULL ? -1 : 0;
}

static PyObject *
offload_vectorcall(PyObject *op, PyObject *const *args, size_t nargsf,
                   PyObject *kwnames)
{
    if (PyVectorcall_NARGS(nargsf) != 1 || kwnames != NULL) {
        PyErr_SetString(PyExc_TypeError,
                        "an offload packs one saved tensor" SEE("internal-error"));
        return NULL;
    }
    return oomkit_pack(oomkit_offload_CAST(op), args[0]);
}

PyObject *
oomkit_offload_new(oomkit_state *st, oomkit_device device, PyObject *kept,
                   uint64_t host_bytes)
{
    PyTypeObject *type = (PyTypeObject *)st->offload_type; /* borrowed */
    OWNED PyObject *tensors = NULL, *made = NULL;
    oomkit_offload *self;

    if (!oomkit_offload_possible(st)) {
        PyErr_SetString(
            PyExc_RuntimeError,
            "saved tensors cannot go to the host without oomkit._bridge" SEE("bridge"));
        return NULL;
    }
    tensors = PySequence_Fast(kept, "expected the tensors to keep");
    made = tensors == NULL ? NULL : type->tp_alloc(type, 0);
    if (made == NULL) {
        return NULL;
    }
    self = oomkit_offload_CAST(made);
    self->vectorcall = offload_vectorcall;
    self->st = st;
    self->bridge = st->bridge;
    self->device = device;
    self->room_bytes = host_bytes;
    if (offload_prepare(self, PyType_GetModule(type)) < 0 ||
        offload_keep(self, tensors) < 0) {
        return NULL;
    }
    return STEAL(made);
}

uint64_t
oomkit_offload_bytes(PyObject *offload)
{
    return oomkit_offload_CAST(offload)->moved_bytes;
}

static void
offload_dealloc(PyObject *op)
{
    PyTypeObject *tp = Py_TYPE(op);
    oomkit_offload *self = oomkit_offload_CAST(op);

    if (self->kept != NULL) {
        self->bridge->storages_release(self->kept, self->kept_count);
    }
    oomkit_addresses_free(&self->kept_set);
    MEMORY_CLEAR(self->kept);
    MEMORY_CLEAR(self->table);
    Py_CLEAR(self->device_name);
    Py_CLEAR(self->names);
    Py_CLEAR(self->unpack);
    tp->tp_free(op);
    Py_DECREF(tp);
}

/* --- torch's stack of hooks --- */

/* The pair on top of this thread's stack, None where it is empty. New reference or
 * NULL. */
static PyObject *
hooks_top(oomkit_state *st)
{
    return PyObject_CallOneArg(st->top_saved_hooks, Py_True);
}

/* The packing one of a pair. Borrowed; NULL without an exception. */
static PyObject *
pair_pack(PyObject *pair)
{
    return PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) == 2
               ? PyTuple_GET_ITEM(pair, 0)
               : NULL;
}

/* Is an offload of ours on top, which is then alone on the stack? 1, 0 or -1. */
static int
hooks_ours(oomkit_state *st)
{
    OWNED PyObject *pair = hooks_top(st);
    PyObject *pack = pair == NULL ? NULL : pair_pack(pair); /* borrowed from pair */

    if (pair == NULL) {
        return -1;
    }
    return pack != NULL && Py_IS_TYPE(pack, (PyTypeObject *)st->offload_type);
}

/* torch.func's transforms and others forbid hooks for a while, and raise where there
 * are some. Ours are nothing that the program has asked for: what is saved meanwhile
 * stays where it is. */
static PyObject *
module_hooks_forbid(PyObject *module, PyObject *args, PyObject *kwargs)
{
    oomkit_state *st = oomkit_state_of_module(module);
    OWNED PyObject *fewer = NULL;
    int ours = 0;

    if (PyTuple_GET_SIZE(args) == 1 && (kwargs == NULL || PyDict_Size(kwargs) == 0)) {
        ours = hooks_ours(st);
    }
    if (ours <= 0) {
        return ours < 0 ? NULL : PyObject_Call(st->forbid_saved_hooks, args, kwargs);
    }
    fewer = PyTuple_Pack(2, PyTuple_GET_ITEM(args, 0), Py_False);
    return fewer == NULL ? NULL : PyObject_Call(st->forbid_saved_hooks, fewer, NULL);
}

/* Once per process, when the first offload is pushed. 0 or -1. */
static int
hooks_watch(oomkit_state *st)
{
    static const char name[] = "_saved_tensors_hooks_disable";
    OWNED PyObject *ours = NULL, *theirs = NULL;

    if (st->forbid_saved_hooks != NULL) {
        return 0;
    }
    ours = PyObject_GetAttrString(PyType_GetModule((PyTypeObject *)st->offload_type),
                                  "_saved_tensors_hooks_disable");
    theirs = ours ? PyObject_GetAttrString(st->autograd_functions, name) : NULL;
    if (theirs == NULL ||
        PyObject_SetAttrString(st->autograd_functions, name, ours) < 0) {
        return -1;
    }
    st->forbid_saved_hooks = STEAL(theirs);
    return 0;
}

int
oomkit_offload_push(PyObject *offload)
{
    oomkit_offload *self = oomkit_offload_CAST(offload);
    oomkit_state *st = self->st;
    OWNED PyObject *off = NULL, *top = NULL, *done = NULL;

    if (self->pushed) {
        PyErr_SetString(PyExc_RuntimeError,
                        "this offload is in use already" SEE("internal-error"));
        return -1;
    }
    if (hooks_watch(st) < 0) {
        return -1;
    }
    off = PyObject_CallNoArgs(st->saved_hooks_off);
    top = off == NULL ? NULL : hooks_top(st);
    if (top == NULL) {
        return -1;
    }
    if (off != Py_None || top != Py_None) {
        return 0;
    }
    done =
        PyObject_CallFunctionObjArgs(st->push_saved_hooks, offload, self->unpack, NULL);
    self->pushed = done != NULL;
    return done == NULL ? -1 : 0;
}

/* Takes ours out from under hooks that were left on the stack, which are in *above (an
 * owned list or NULL) then, the topmost first. 0 or -1. */
static int
hooks_dig(oomkit_offload *self, PyObject **above)
{
    for (;;) {
        OWNED PyObject *pair = hooks_top(self->st);
        OWNED PyObject *done = NULL;
        int found = pair == NULL || pair_pack(pair) == (PyObject *)self;
        if (pair == NULL) {
            oomkit_error_dismiss(); /* no memory to look: ours is on top but for once */
        }
        if (pair == Py_None) {
            return 0; /* another thread's: it stays there */
        }
        if (!found && *above == NULL) {
            *above = PyList_New(0);
        }
        if (!found && (*above == NULL || PyList_Append(*above, pair) < 0)) {
            return -1;
        }
        done = PyObject_CallNoArgs(self->st->pop_saved_hooks);
        if (done == NULL || found) {
            return done == NULL ? -1 : 0;
        }
    }
}

static int
hooks_pop(oomkit_offload *self)
{
    OWNED PyObject *above = NULL;
    int failed = hooks_dig(self, &above) < 0;

    for (Py_ssize_t i = above == NULL ? 0 : PyList_GET_SIZE(above); i > 0; i--) {
        KEEPING_EXCEPTION {
            OWNED PyObject *done = PyObject_Call(self->st->push_saved_hooks,
                                                 PyList_GET_ITEM(above, i - 1), NULL);
            failed = failed || done == NULL;
        }
    }
    return failed ? -1 : 0;
}

int
oomkit_offload_pop(PyObject *offload)
{
    oomkit_offload *self = oomkit_offload_CAST(offload);
    int rc = 0;

    if (self->pushed) {
        self->pushed = 0;
        KEEPING_EXCEPTION {
            rc = hooks_pop(self);
        }
    }
    return rc;
}

/* --- as Python sees it --- */

static PyObject *
offload_enter(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    return oomkit_offload_push(op) < 0 ? NULL : Py_NewRef(op);
}

static PyObject *
offload_exit(PyObject *op, PyObject *const *Py_UNUSED(args),
             Py_ssize_t Py_UNUSED(count))
{
    return oomkit_offload_pop(op) < 0 ? NULL : Py_NewRef(Py_False);
}

static PyObject *
module_offload(PyObject *module, PyObject *args)
{
    oomkit_state *st = oomkit_state_of_module(module);
    oomkit_device device;
    PyObject *kept; /* borrowed from args */
    unsigned long long host_bytes;

    if (!PyArg_ParseTuple(args, "iiOK:_offload", &device.type, &device.index, &kept,
                          &host_bytes)) {
        return NULL;
    }
    return oomkit_offload_new(st, device, kept, host_bytes);
}

static PyMethodDef offload_members_methods[] = {
    {"__enter__", offload_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))offload_exit, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef offload_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(oomkit_offload, vectorcall), READONLY,
     NULL},
    {"held_bytes", T_ULONGLONG, offsetof(oomkit_offload, held_bytes), READONLY,
     "On the host now."},
    {"moved_bytes", T_ULONGLONG, offsetof(oomkit_offload, moved_bytes), READONLY,
     "Moved there, ever."},
    {"copies", T_PYSSIZET, offsetof(oomkit_offload, count), READONLY,
     "How many that makes."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot offload_slots[] = {
    {Py_tp_dealloc, offload_dealloc},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, offload_members},
    {Py_tp_methods, offload_members_methods},
    {0, NULL},
};

/* No part in collections: it reaches no object that could reach it. */
PyType_Spec oomkit_offload_spec = {
    .name = "oomkit._C._Offload",
    .basicsize = sizeof(oomkit_offload),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = offload_slots,
};

PyMethodDef oomkit_offload_methods[] = {
    {"_offload", module_offload, METH_VARARGS,
     "_offload(type, index, kept, host_bytes, /)\n--\n\n"
     "A context in which saved tensors of a device go to the host. For tests."},
    {"_offload_unpack", oomkit_unpack, METH_O,
     "_offload_unpack(packed, /)\n--\n\nA torch hook."},
    {"_saved_tensors_hooks_disable", (PyCFunction)(void (*)(void))module_hooks_forbid,
     METH_VARARGS | METH_KEYWORDS,
     "_saved_tensors_hooks_disable(message, fail_if_non_empty=True)\n--\n\n"
     "In the place of torch's: an offload is no reason to fail."},
    {NULL, NULL, 0, NULL},
};
