/* oomkit.chunks as a type: its options, the iterator, what can be asked of it. */
#include "heap_types.h"
#include "types.h"
#include "../call/call.h"
#include "../loop/parts_join.h"
#include "../plain/plain_state.h"
#include "../result/result.h"
#include "../undo/undo.h"

#include <stddef.h>
#include <structmember.h>

/* --- making one --- */

/* Owns copies of the arguments: `args` and `kwargs` (borrowed, may be NULL). 0 or -1.
 */
static int
chunks_arguments(oomkit_chunks *self, PyObject *args, PyObject *kwargs)
{
    Py_ssize_t n = PyTuple_GET_SIZE(args), at = 0, i;
    Py_ssize_t named = kwargs == NULL ? 0 : PyDict_GET_SIZE(kwargs);
    PyObject *key, *value; /* borrowed */

    self->args = PyMem_Calloc((size_t)(n + named) + 1, sizeof(PyObject *));
    self->kwnames = named == 0 ? NULL : PyTuple_New(named);
    if (self->args == NULL || (named > 0 && self->kwnames == NULL)) {
        if (!PyErr_Occurred()) {
            PyErr_NoMemory();
        }
        return -1;
    }
    self->positional = n;
    for (i = 0; i < n; i++) {
        self->args[i] = Py_NewRef(PyTuple_GET_ITEM(args, i));
    }
    for (; named > 0 && PyDict_Next(kwargs, &at, &key, &value); i++) {
        PyTuple_SET_ITEM(self->kwnames, i - n, Py_NewRef(key));
        self->args[i] = Py_NewRef(value);
    }
    self->total = i;
    return 0;
}

/* All that is handed to chunks() itself is the batch: ("batch",), or ("batch0", ...),
 * all of them named where there are several. 0 or -1. */
static int
chunks_names(oomkit_chunks *self)
{
    Py_ssize_t i, n = self->positional;
    PyObject *name; /* owned, then stolen by the tuple */

    self->names = PyTuple_New(n);
    for (i = 0; self->names != NULL && i < n; i++) {
        name = n == 1 ? PyUnicode_FromString("batch")
                      : PyUnicode_FromFormat("batch%zd", i);
        if (name == NULL) {
            return -1;
        }
        PyTuple_SET_ITEM(self->names, i, name);
    }
    if (self->names != NULL && n > 1 && self->options.batch == NULL) {
        self->options.batch = Py_NewRef(self->names);
    }
    return self->names == NULL ? -1 : 0;
}

/* New reference or NULL. */
static oomkit_chunks *
chunks_make(oomkit_state *st, PyObject *args, PyObject *kwargs, PyObject *names,
            PyObject *options, PyObject *func, PyObject *key)
{
    PyTypeObject *type = (PyTypeObject *)st->chunks_type; /* borrowed */
    oomkit_chunks *self;                                  /* owned */

    if (!st->bound) {
        PyErr_SetString(PyExc_RuntimeError,
                        "chunks() needs `import oomkit` first" SEE("internal-error"));
        return NULL;
    }
    self = chunks_CAST(type->tp_alloc(type, 0));
    if (self == NULL) {
        return NULL;
    }
    self->st = st;
    self->as_call = names != NULL;
    self->names = Py_XNewRef(names);
    self->func = Py_XNewRef(func);
    if (oomkit_chunks_options(self, options) < 0 ||
        chunks_arguments(self, args, kwargs) < 0 ||
        (names == NULL && chunks_names(self) < 0) ||
        oomkit_chunks_site(self, key) < 0) {
        Py_CLEAR(self);
    }
    return self;
}

static PyObject *
chunks_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (PyTuple_GET_SIZE(args) == 0) {
        return oomkit_raise(PyExc_TypeError,
                            "chunks() expected a batch: a tensor, a list, or a tuple "
                            "or dict of tensors" SEE("options"));
    }
    if (kwargs != NULL && oomkit_item(kwargs, "join") != NULL) { /* map's */
        return oomkit_raise(PyExc_TypeError,
                            "chunks() got an unknown option 'join': the body of the "
                            "loop collects the results" SEE("options"));
    }
    if (oomkit_ranks_watched(oomkit_state_of_type(type)) < 0) {
        return NULL;
    }
    return (PyObject *)chunks_make(oomkit_state_of_type(type), args, NULL, NULL, kwargs,
                                   NULL, NULL);
}

/* `like` is a loop of the same call before this one: its participants serve again. */
static PyObject *
chunks_of(PyObject *module, PyObject *arguments)
{
    oomkit_state *st = oomkit_state_of_module(module);
    PyObject *args, *kwargs, *names, *options, *func, *key, *like; /* borrowed */
    oomkit_chunks *self;                                           /* owned */

    if (!PyArg_ParseTuple(arguments, "O!O!O!O!OOO:_chunks_of", &PyTuple_Type, &args,
                          &PyDict_Type, &kwargs, &PyTuple_Type, &names, &PyDict_Type,
                          &options, &func, &key, &like)) {
        return NULL;
    }
    self = oomkit_ranks_watched(st) < 0
               ? NULL
               : chunks_make(st, args, kwargs, names, options, func, key);
    if (self != NULL && Py_IS_TYPE(like, (PyTypeObject *)st->chunks_type) &&
        chunks_CAST(like)->parts != NULL && chunks_CAST(like)->func == func) {
        self->parts = chunks_CAST(like)->parts;
        self->parts->refs++;
        oomkit_plain_share(&self->plain, &chunks_CAST(like)->plain);
    }
    return (PyObject *)self;
}

PyMethodDef oomkit_chunks_methods[] = {
    {"_chunks_of", chunks_of, METH_VARARGS,
     "_chunks_of(args, kwargs, names, options, func, key, like, /)\n--\n\n"
     "chunks() over the arguments of a call; parts are (args, kwargs)."},
    {NULL, NULL, 0, NULL},
};

/* --- the object --- */

static int
chunks_traverse(PyObject *op, visitproc visit, void *arg)
{
    oomkit_chunks *self = chunks_CAST(op);
    const oomkit_batch *batch = &self->call.batch;
    Py_ssize_t i;

    Py_VISIT(Py_TYPE(op));
    for (i = 0; i < self->total; i++) {
        Py_VISIT(self->args[i]);
    }
    for (i = 0; i < OOMKIT_CHUNKS_FRAMES; i++) {
        Py_VISIT(self->frames[i].frame);
    }
    for (i = 0; self->stage == OOMKIT_CHUNKS_RUNNING && i < batch->count; i++) {
        Py_VISIT(batch->nodes[i].object);
        Py_VISIT(batch->nodes[i].key);
    }
    Py_VISIT(self->func);
    Py_VISIT(self->site);
    i = oomkit_join_traverse(&self->join, visit, arg);
    i = i != 0 ? i : oomkit_savepoint_traverse(&self->call.entry, visit, arg);
    i = i != 0 ? i : oomkit_plain_site_traverse(self->plain.site, visit, arg);
    return i != 0 ? (int)i : oomkit_options_traverse(&self->options, visit, arg);
}

static int
chunks_clear(PyObject *op)
{
    oomkit_chunks *self = chunks_CAST(op);
    Py_ssize_t i, n = self->total;

    oomkit_chunks_close(self, 0);
    self->total = 0;
    for (i = 0; i < n; i++) {
        Py_CLEAR(self->args[i]);
    }
    Py_CLEAR(self->func);
    oomkit_plain_share(&self->plain, NULL);
    oomkit_join_clear(&self->join);
    return 0;
}

static void
chunks_dealloc(PyObject *op)
{
    oomkit_chunks *self = chunks_CAST(op);
    PyTypeObject *tp = Py_TYPE(op);

    PyObject_GC_UnTrack(op);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    chunks_clear(op);
    oomkit_participants_release(self->parts);
    PyMem_Free(self->args);
    oomkit_options_clear(&self->options);
    Py_CLEAR(self->kwnames);
    Py_CLEAR(self->names);
    Py_CLEAR(self->site);
    tp->tp_free(op);
    Py_DECREF(tp);
}

static PyObject *
chunks_repr(PyObject *op)
{
    return PyUnicode_FromFormat("<oomkit.chunks label=%R>",
                                chunks_CAST(op)->options.label);
}

/* Once: a second loop over what is used up would be one without a row. */
static PyObject *
chunks_iter(PyObject *op)
{
    if (chunks_CAST(op)->stage == OOMKIT_CHUNKS_CLOSED) {
        return oomkit_raise(
            PyExc_RuntimeError,
            "%U has been iterated already: call chunks() again for another loop" SEE(
                "chunks"),
            chunks_CAST(op)->options.label);
    }
    return Py_NewRef(op);
}

static PyObject *
chunks_iternext(PyObject *op)
{
    return oomkit_chunks_next(chunks_CAST(op));
}

PyDoc_STRVAR(chunks_close_doc,
             "close($self, /)\n--\n\n"
             "End the loop: no further part, and the batch is let go of.");

static PyObject *
chunks_close(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    if (chunks_CAST(op)->busy) { /* it would free what its caller works with */
        return oomkit_raise(PyExc_ValueError,
                            "%U is closed while it prepares or restores a part: close "
                            "it in the loop's body, or after the loop" SEE("chunks"),
                            chunks_CAST(op)->options.label);
    }
    oomkit_chunks_close(chunks_CAST(op), 0);
    Py_RETURN_NONE;
}

/* --- attributes --- */

/* Rows from `begin` on or up to its end; None where no part is out. New reference. */
static PyObject *
chunks_row(const oomkit_chunks *self, int end)
{
    const oomkit_slice *slice;

    if (!self->out) {
        Py_RETURN_NONE;
    }
    slice = &self->call.cut->slices[self->call.cut->at];
    return PyLong_FromLongLong(slice->start + (end ? slice->length : 0));
}

static PyObject *
chunks_get_start(PyObject *op, void *Py_UNUSED(closure))
{
    return chunks_row(chunks_CAST(op), 0);
}

static PyObject *
chunks_get_stop(PyObject *op, void *Py_UNUSED(closure))
{
    return chunks_row(chunks_CAST(op), 1);
}

static PyObject *
chunks_get_rows(PyObject *op, void *Py_UNUSED(closure))
{
    const oomkit_chunks *self = chunks_CAST(op);

    if (self->stage == OOMKIT_CHUNKS_FRESH || self->rows <= 0) {
        Py_RETURN_NONE;
    }
    return PyLong_FromLongLong(self->rows);
}

static PyObject *
chunks_get_summary(PyObject *op, void *Py_UNUSED(closure))
{
    return PyObject_GetAttrString((PyObject *)chunks_CAST(op)->site, "summary");
}

static PyObject *
chunks_get_records(PyObject *op, void *Py_UNUSED(closure))
{
    return PyObject_GetAttrString((PyObject *)chunks_CAST(op)->site, "records");
}

static PyGetSetDef chunks_getset[] = {
    {"start", chunks_get_start, NULL,
     "The first row of the part that the loop has, or None.", NULL},
    {"stop", chunks_get_stop, NULL,
     "The row behind the part that the loop has, or None.", NULL},
    {"rows", chunks_get_rows, NULL, "Rows of the batch; None before the loop.", NULL},
    {"summary", chunks_get_summary, NULL, "All parts of this loop (StepSummary).",
     NULL},
    {"records", chunks_get_records, NULL,
     "tuple of StepRecord: the latest loops at this place.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef chunks_members[] = {
    {"label", T_OBJECT, offsetof(oomkit_chunks, options.label), READONLY,
     "The name in records and log lines."},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(oomkit_chunks, weakrefs), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef chunks_methods[] = {
    {"close", chunks_close, METH_NOARGS, chunks_close_doc},
    {"_keep", (PyCFunction)(void (*)(void))oomkit_chunks_keep, METH_FASTCALL,
     "_keep($self, result, convert, /)\n--\n\nKeep the result of the present part."},
    {"_results", oomkit_chunks_results, METH_NOARGS,
     "_results($self, /)\n--\n\nThe list of what was kept."},
    {"_join", oomkit_chunks_join, METH_NOARGS,
     "_join($self, /)\n--\n\nWhat was kept, joined in order."},
    {"_join_items", (PyCFunction)(void (*)(void))oomkit_chunks_join_items,
     METH_FASTCALL,
     "_join_items($self, results, rows, /)\n--\n\nResults of several loops."},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(
    chunks_doc,
    "chunks(*batch, micro_batch=None, min_micro_batch=1, multiple_of=1, dim=0,\n"
    "       static=(), split=None, batch=None, participants=(), rng='torch',\n"
    "       restore_batch=False, bucket=None, on_retry=None, label=None)\n"
    "--\n"
    "\n"
    "Hand out a batch in parts that fit into memory.\n"
    "\n"
    ">>> for part in oomkit.chunks(batch):\n"
    "...     with oomkit.guard():\n"
    "...         outputs.append(model(part))\n"
    "\n"
    "The first part is the whole batch. When the guarded block runs out of memory,\n"
    "the guard ends the error and the loop hands the same rows out again in smaller\n"
    "parts: in order, none twice, none left out. The block must be the last thing\n"
    "in the body. Sizes that worked are remembered for the next loop at this line\n"
    "and grow back.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "*batch\n"
    "    What auto_batch can split, or a list, tuple or range of anything: then a row\n"
    "    is an element. Several give a tuple of parts.\n"
    "micro_batch : int, optional\n"
    "    Rows of the largest part that is tried; the whole batch by default.\n"
    "min_micro_batch, multiple_of : int\n"
    "    The smallest part, and what each but the last is a multiple of.\n"
    "dim, static, split, restore_batch, on_retry\n"
    "    As for auto_batch; the argument's name is `batch` (`batch0`, ...).\n"
    "participants : object or several\n"
    "    What the body changes and a failed part must not: metrics with state_dict()\n"
    "    and load_state_dict(), or save() and restore(); generators; modules whose\n"
    "    buffers move.\n"
    "rng : {'torch', 'all', 'none'}\n"
    "    Random streams that go back with a failed part.\n"
    "bucket : hashable, optional\n"
    "    What the memory of a row depends on besides its shape, such as the number\n"
    "    of tokens to generate: sizes are remembered for each.\n"
    "label : str, optional\n"
    "    The name in records and log lines, and what sizes are remembered by.\n"
    "\n"
    "Attributes\n"
    "----------\n"
    "start, stop, rows : int or None\n"
    "    Rows of the part that the loop has, and of the batch.\n"
    "records : tuple of StepRecord\n"
    "    One for every loop at this place.");

static PyType_Slot chunks_slots[] = {
    {Py_tp_doc, (void *)chunks_doc}, {Py_tp_new, chunks_new},
    {Py_tp_dealloc, chunks_dealloc}, {Py_tp_traverse, chunks_traverse},
    {Py_tp_clear, chunks_clear},     {Py_tp_repr, chunks_repr},
    {Py_tp_iter, chunks_iter},       {Py_tp_iternext, chunks_iternext},
    {Py_tp_methods, chunks_methods}, {Py_tp_members, chunks_members},
    {Py_tp_getset, chunks_getset},   {0, NULL},
};

PyType_Spec oomkit_chunks_spec = {
    .name = "oomkit.chunks",
    .basicsize = sizeof(oomkit_chunks),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = chunks_slots,
};
