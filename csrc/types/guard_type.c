/* guard: `with oomkit.guard():`, and the decorator `@oomkit.guard()`. */
#include "heap_types.h"
#include "types.h"

#include <stddef.h>
#include <structmember.h>

#define GUARD_DEPTH 8

/* One `with` block that is open. */
typedef struct guard_entry {
    oomkit_guard_window window;
    unsigned long thread; /* that entered it */
    PyObject *handled;    /* owned: what the caller was handling at entry, or NULL */
    PyObject *chunks;     /* owned: the loop whose body it is in, or NULL */
    uint64_t part;        /* of it, that was out at entry */
    int order;            /* how many guards were entered for that part by then */
    int open;
} guard_entry;

typedef struct guard_object {
    PyObject_HEAD
    oomkit_guard guard;
    PyObject *weakrefs; /* weak references to the guard */
    int given;          /* on_oom= was: it holds in the body of a loop, too */
    guard_entry entries[GUARD_DEPTH];
} guard_object;

#define guard_CAST(op) ((guard_object *)(op))

/* --- making one --- */

/* 1 skip, 0 raise, -1 with an exception. */
static int
guard_parse_on_oom(PyObject *on_oom)
{
    if (on_oom == NULL) {
        return 0;
    }
    if (!PyUnicode_Check(on_oom)) {
        PyErr_Format(
            PyExc_TypeError,
            "guard() expected on_oom to be 'raise' or 'skip', got an object of type "
            "'%s' (as a decorator it is written @oomkit.guard())" SEE("options"),
            Py_TYPE(on_oom)->tp_name);
        return -1;
    }
    if (PyUnicode_CompareWithASCIIString(on_oom, "skip") == 0) {
        return 1;
    }
    if (PyUnicode_CompareWithASCIIString(on_oom, "raise") == 0) {
        return 0;
    }
    PyErr_Format(
        PyExc_ValueError,
        "guard() expected on_oom to be 'raise' or 'skip', got %R" SEE("options"),
        on_oom);
    return -1;
}

static PyObject *
guard_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"on_oom", "label", "reset_peaks", NULL};
    oomkit_state *st = oomkit_state_of_type(type);
    PyObject *on_oom = NULL, *label = NULL, *reset = Py_True; /* borrowed from args */
    PyObject *self;                                           /* owned */
    int skip;

    /* Unknown names first, so that the message does not depend on the Python version.
     */
    if (oomkit_options_known(st, "guard", kwargs, (const char *const *)names) < 0 ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "|OO$O:guard", names, &on_oom,
                                     &label, &reset)) {
        return NULL;
    }
    if (!st->bound) {
        PyErr_SetString(PyExc_RuntimeError,
                        "guard() needs `import oomkit` first" SEE("internal-error"));
        return NULL;
    }
    skip = guard_parse_on_oom(on_oom);
    if (skip < 0) {
        return NULL;
    }
    label = label == Py_None ? NULL : label;
    if (label != NULL && !PyUnicode_Check(label)) {
        PyErr_Format(
            PyExc_TypeError,
            "guard() expected label to be a str or None, got '%s'" SEE("options"),
            Py_TYPE(label)->tp_name);
        return NULL;
    }
    if (!PyBool_Check(reset)) {
        PyErr_Format(
            PyExc_TypeError,
            "guard() expected reset_peaks to be a bool, got '%s'" SEE("options"),
            Py_TYPE(reset)->tp_name);
        return NULL;
    }
    self = type->tp_alloc(type, 0);
    if (self != NULL) {
        oomkit_guard_init(&guard_CAST(self)->guard, st, label, skip, reset == Py_True);
        guard_CAST(self)->given = on_oom != NULL;
    }
    return self;
}

static int
guard_traverse(PyObject *op, visitproc visit, void *arg)
{
    int i;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(guard_CAST(op)->guard.label);
    for (i = 0; i < GUARD_DEPTH; i++) {
        Py_VISIT(guard_CAST(op)->entries[i].handled);
        Py_VISIT(guard_CAST(op)->entries[i].chunks);
    }
    return 0;
}

static int
guard_clear(PyObject *op)
{
    int i;
    for (i = 0; i < GUARD_DEPTH; i++) {
        Py_CLEAR(guard_CAST(op)->entries[i].handled);
        Py_CLEAR(guard_CAST(op)->entries[i].chunks);
    }
    return 0;
}

static void
guard_dealloc(PyObject *op)
{
    guard_object *self = guard_CAST(op);
    PyTypeObject *tp = Py_TYPE(op);
    int i;

    PyObject_GC_UnTrack(op);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    for (i = 0; i < GUARD_DEPTH; i++) { /* entered by hand, and never left */
        if (self->entries[i].open) {
            oomkit_guard_abandon(&self->guard, &self->entries[i].window);
        }
    }
    guard_clear(op);
    oomkit_guard_clear(&self->guard);
    tp->tp_free(op);
    Py_DECREF(tp);
}

static PyObject *
guard_repr(PyObject *op)
{
    const oomkit_guard *guard = &guard_CAST(op)->guard;
    return PyUnicode_FromFormat("<oomkit.guard on_oom='%s' label=%R>",
                                guard->skip ? "skip" : "raise",
                                guard->label == NULL ? Py_None : guard->label);
}

/* --- the context manager --- */

PyDoc_STRVAR(guard_enter_doc, "__enter__($self, /)\n--\n\nBegin to measure.");

static PyObject *
guard_enter(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    guard_object *self = guard_CAST(op);
    guard_entry *entry;
    int i;

    for (i = 0; i < GUARD_DEPTH && self->entries[i].open; i++) {
    }
    if (i == GUARD_DEPTH) {
        PyErr_Format(
            PyExc_RuntimeError,
            "guard() is entered %d times already: make a guard for each level" SEE(
                "options"),
            GUARD_DEPTH);
        return NULL;
    }
    entry = &self->entries[i];
    entry->open = 1; /* a flush that was put off may let another thread enter */
    if (oomkit_guard_begin(&self->guard, &entry->window) < 0) {
        entry->open = 0;
        return NULL;
    }
    entry->thread = PyThread_get_thread_ident();
    entry->handled = PyErr_GetHandledException();
    if (self->guard.st->chunks_out != NULL && !self->given) {
        entry->chunks =
            oomkit_chunks_guard_enter(self->guard.st, &entry->part, &entry->order);
    }
    entry->window.alone = entry->chunks == NULL && !self->given;
    return Py_NewRef(op);
}

/* The block of this thread that was entered last, or NULL with an exception. Blocks of
 * several threads may end in any order. */
static guard_entry *
guard_latest(guard_object *self)
{
    unsigned long thread = PyThread_get_thread_ident();
    guard_entry *latest = NULL;
    int i;

    for (i = 0; i < GUARD_DEPTH; i++) {
        guard_entry *entry = &self->entries[i];
        if (entry->open && entry->thread == thread &&
            (latest == NULL || entry->window.step > latest->window.step)) {
            latest = entry;
        }
    }
    if (latest == NULL) {
        PyErr_SetString(PyExc_RuntimeError,
                        "guard() is left, but was not entered" SEE("options"));
    }
    return latest;
}

/* In the body of a loop over oomkit.chunks(): 1 when the loop hands its rows out again,
 * 0 when the exception is to be treated as elsewhere, -1 with another one. */
static int
guard_exit_loop(guard_object *self, guard_entry *entry, PyObject *exception,
                PyObject *handled)
{
    PyObject *chunks = entry->chunks; /* owned */
    int again;

    entry->chunks = NULL;
    if (chunks == NULL) {
        return 0;
    }
    again = oomkit_chunks_guard_failed(chunks, entry->part, entry->order, exception,
                                       handled);
    Py_DECREF(chunks);
    if (again > 0) {
        oomkit_guard_record_oom(&self->guard, &entry->window, exception);
    } else if (again < 0) {
        oomkit_guard_end(&self->guard, &entry->window, OOMKIT_GUARD_OOM);
    }
    return again;
}

/* The same for a block that did not run out of memory. */
static void
guard_exit_passed(guard_object *self, guard_entry *entry, int outcome)
{
    OWNED PyObject *chunks = entry->chunks;

    oomkit_guard_end(&self->guard, &entry->window, outcome);
    entry->chunks = NULL;
    if (chunks != NULL && outcome == OOMKIT_GUARD_FINISHED) {
        oomkit_chunks_guard_passed(chunks, entry->part, entry->order,
                                   &entry->window.peak);
    }
}

PyDoc_STRVAR(guard_exit_doc,
             "__exit__($self, exc_type, exc_value, traceback, /)\n"
             "--\n"
             "\n"
             "Record the peak; after running out of memory clean up too.\n"
             "\n"
             "True, which ends the exception, with on_oom='skip', and in the body of\n"
             "a loop over oomkit.chunks(), which then hands the rows out again.");

static PyObject *
guard_exit(PyObject *op, PyObject *const *args, Py_ssize_t nargs)
{
    guard_object *self = guard_CAST(op);
    guard_entry *entry;
    OWNED PyObject *handled = NULL;
    PyObject *exception; /* borrowed from args */
    int again = 0;

    if (nargs != 3) {
        PyErr_Format(PyExc_TypeError, "__exit__() expected 3 arguments, got %zd",
                     nargs);
        return NULL;
    }
    entry = guard_latest(self);
    if (entry == NULL) {
        return NULL;
    }
    exception = args[1];
    handled = entry->handled;
    entry->handled = NULL;
    if (!PyExceptionInstance_Check(exception)) {
        guard_exit_passed(self, entry,
                          args[0] == Py_None ? OOMKIT_GUARD_FINISHED
                                             : OOMKIT_GUARD_ERROR);
    } else if (!oomkit_guard_is_oom(&self->guard, exception)) {
        guard_exit_passed(self, entry, OOMKIT_GUARD_ERROR);
        exception = Py_None;
    } else if ((again = guard_exit_loop(self, entry, exception, handled)) == 0) {
        oomkit_guard_failed(&self->guard, &entry->window, exception, handled);
        /* The interpreter owns the exception until this returns. */
        oomkit_guard_flush(&self->guard, &entry->window, 1);
    }
    entry->open = 0;
    if (again < 0) {
        return NULL;
    }
    return PyBool_FromLong(again || (self->guard.skip && exception != Py_None));
}

/* @guard(...) */
static PyObject *
guard_call(PyObject *op, PyObject *args, PyObject *kwargs)
{
    if (PyTuple_GET_SIZE(args) != 1 ||
        (kwargs != NULL && PyDict_GET_SIZE(kwargs) > 0)) {
        PyErr_SetString(
            PyExc_TypeError,
            "guard() as a decorator expected one callable and nothing else" SEE(
                "options"));
        return NULL;
    }
    return oomkit_guarded_new(&guard_CAST(op)->guard, PyTuple_GET_ITEM(args, 0));
}

/* --- attributes --- */

static PyObject *
guard_get_summary(PyObject *op, void *Py_UNUSED(closure))
{
    return oomkit_guard_summary(&guard_CAST(op)->guard);
}

static PyObject *
guard_get_records(PyObject *op, void *Py_UNUSED(closure))
{
    return oomkit_guard_records(&guard_CAST(op)->guard);
}

static PyObject *
guard_get_on_oom(PyObject *op, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(guard_CAST(op)->guard.skip ? "skip" : "raise");
}

static PyGetSetDef guard_getset[] = {
    {"summary", guard_get_summary, NULL, "All stretches of this guard (StepSummary).",
     NULL},
    {"records", guard_get_records, NULL,
     "tuple of StepRecord: the latest blocks, in the order in which they ended.", NULL},
    {"on_oom", guard_get_on_oom, NULL, "'raise' or 'skip'.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef guard_members[] = {
    {"label", T_OBJECT, offsetof(guard_object, guard.label), READONLY,
     "The name in records, notes and log lines, or None."},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(guard_object, weakrefs), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef guard_methods[] = {
    {"__enter__", guard_enter, METH_NOARGS, guard_enter_doc},
    {"__exit__", (PyCFunction)(void (*)(void))guard_exit, METH_FASTCALL,
     guard_exit_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(
    guard_doc,
    "guard(on_oom='raise', label=None, *, reset_peaks=True)\n"
    "--\n"
    "\n"
    "Clean up after code that runs out of memory, and measure it.\n"
    "\n"
    "As a context manager or as a decorator (`@oomkit.guard()`). When the code\n"
    "runs out of memory, the frames below are cleared, so that they hold no\n"
    "tensors, a report is attached to the exception as `report`, one line is\n"
    "logged, and cached memory is returned. Every other exception passes\n"
    "untouched. The code is not run again: that is what auto_batch is for.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "on_oom : {'raise', 'skip'}\n"
    "    'raise' lets the exception pass. 'skip' ends it: execution continues after\n"
    "    the block; a decorated function returns None. Where neither is given, a\n"
    "    block in the body of a loop over oomkit.chunks() has the loop hand the same\n"
    "    rows out again in smaller parts.\n"
    "label : str, optional\n"
    "    The name in records, notes and log lines; that of the function by default.\n"
    "reset_peaks : bool\n"
    "    On an accelerator, reset PyTorch's peak counters at the beginning. With\n"
    "    False they are left alone, and peaks are those since the last reset.\n"
    "\n"
    "Attributes\n"
    "----------\n"
    "records : tuple of StepRecord\n"
    "    One for every block, of the latest 1024. A decorated function has its own.");

static PyType_Slot guard_slots[] = {
    {Py_tp_doc, (void *)guard_doc},
    {Py_tp_new, guard_new},
    {Py_tp_dealloc, guard_dealloc},
    {Py_tp_traverse, guard_traverse},
    {Py_tp_clear, guard_clear},
    {Py_tp_repr, guard_repr},
    {Py_tp_call, guard_call},
    {Py_tp_methods, guard_methods},
    {Py_tp_members, guard_members},
    {Py_tp_getset, guard_getset},
    {0, NULL},
};

PyType_Spec oomkit_guard_spec = {
    .name = "oomkit.guard",
    .basicsize = sizeof(guard_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = guard_slots,
};
