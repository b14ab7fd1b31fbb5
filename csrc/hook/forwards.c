/* Modules with buffers that no name of a step leads to and that run in it: a container
 * around a known layer, a model that a method reads as a global. All modules with
 * buffers are known (hidden.c). In a step's first call those that take no part get a
 * hook before their forward: one that runs takes part, and its buffers are marked, if
 * they are those of the entry still. One that runs for the first time in a later call,
 * and moves them, is refused where an attempt has failed before: what that one did is
 * not known. */
#include "hook.h"
#include "../call/call.h"
#include "../call/step.h"
#include "../py/errors.h"
#include "../py/tensor.h"
#include "../undo/undo.h"

/* --- what a module's buffers are, to see that they still are --- */

/* Is it of a kind that can be copied and put back anywhere, without holes or overlaps?
 */
static int
buffer_is_common(const oomkit_call *call, PyObject *tensor,
                 const oomkit_tensor_facts *facts)
{
    const oomkit_state *st = call->st;
    oomkit_storage_facts lies = {0};

    if (st->bridge->storage_facts(tensor, st->impl_offset, &lies) == OOMKIT_OK &&
        lies.end - lies.begin != facts->bytes) {
        return 0;
    }
    return Py_IS_TYPE(tensor, (PyTypeObject *)st->Tensor) && facts->has_version &&
           facts->is_strided && !facts->requires_grad &&
           (facts->device_type == OOMKIT_DEVICE_CPU ||
            facts->device_type == call->device.type);
}

/* (name, weak reference, version) of one. New tuple, or NULL: with an exception, or
 * where it is of an uncommon kind. */
static PyObject *
buffer_note(const oomkit_call *call, PyObject *name, PyObject *tensor)
{
    oomkit_tensor_facts facts = {0};
    OWNED PyObject *ref = NULL;

    if (tensor != Py_None &&
        (!oomkit_tensor_check(call->st, tensor) ||
         oomkit_tensor_facts_get(call->st, tensor, 0, &facts) < 0 ||
         !buffer_is_common(call, tensor, &facts))) {
        return NULL;
    }
    ref = tensor == Py_None ? Py_NewRef(Py_None) : PyWeakref_NewRef(tensor, NULL);
    return ref ? Py_BuildValue("(OOk)", name, ref, (unsigned long)facts.version) : NULL;
}

/* Of all buffers of a module. New list, or NULL likewise, or where it has none. */
static PyObject *
forward_note(const oomkit_call *call, PyObject *module)
{
    OWNED PyObject *dict = oomkit_own_attribute(module, call->st->str_buffers);
    OWNED PyObject *note = dict && PyDict_Check(dict) ? PyDict_Items(dict) : NULL;
    Py_ssize_t i;

    for (i = 0; note != NULL && i < PyList_GET_SIZE(note); i++) {
        PyObject *item = PyList_GET_ITEM(note, i); /* borrowed, a pair */
        PyObject *one =                            /* owned, then by note */
            buffer_note(call, PyTuple_GET_ITEM(item, 0), PyTuple_GET_ITEM(item, 1));
        if (one == NULL) {
            return NULL;
        }
        PyList_SetItem(note, i, one);
    }
    return note != NULL && PyList_GET_SIZE(note) > 0 ? STEAL(note) : NULL;
}

/* Does a tensor stand where it stood, unmoved, or marked by another module that has it?
 * `now` and `then` are of buffer_note(). There is one weak reference to what is alive.
 */
static int
buffer_is_noted(const oomkit_call *call, PyObject *now, PyObject *then, int marked_too)
{
    PyObject *ref = PyTuple_GET_ITEM(now, 1); /* borrowed */

    return ref == PyTuple_GET_ITEM(then, 1) &&
           (ref == Py_None ||
            PyLong_AsUnsignedLong(PyTuple_GET_ITEM(now, 2)) ==
                PyLong_AsUnsignedLong(PyTuple_GET_ITEM(then, 2)) ||
            (marked_too && oomkit_buffer_is_marked(call, PyWeakref_GET_OBJECT(ref))));
}

/* Are a module's buffers those of the note? 1, 0 or -1. */
static int
forward_is_noted(const oomkit_call *call, PyObject *module, PyObject *note,
                 int marked_too)
{
    OWNED PyObject *now = forward_note(call, module);
    Py_ssize_t i;
    int same = now != NULL && PyList_GET_SIZE(now) == PyList_GET_SIZE(note);

    for (i = 0; same > 0 && i < PyList_GET_SIZE(now); i++) {
        PyObject *a = PyList_GET_ITEM(now, i), *b = PyList_GET_ITEM(note, i);
        same = buffer_is_noted(call, a, b, marked_too)
                   ? PyObject_RichCompareBool(PyTuple_GET_ITEM(a, 0),
                                              PyTuple_GET_ITEM(b, 0), Py_EQ)
                   : 0;
    }
    return PyErr_Occurred() ? -1 : same;
}

/* --- the modules that are watched --- */

/* Of one: a list. */
enum {
    WATCHED_MODULE,     /* weak reference */
    WATCHED_NOTE,       /* see forward_note() */
    WATCHED_ATTRIBUTES, /* oomkit_late_attributes() */
    WATCHED_RUNS        /* False; True it has run; None it has, and is marked */
};

/* Those of the registry that take no part, by address. New dict or NULL. */
static PyObject *
forwards_unknown(oomkit_call *call)
{
    PyObject *set = call->st->buffered_all; /* borrowed: hidden.c has looked by now */
    OWNED PyObject *refs =
        set == NULL ? PyTuple_New(0) : PyObject_GetAttrString(set, "data");
    OWNED PyObject *all = refs == NULL ? NULL : PySequence_List(refs);
    OWNED PyObject *known = all ? oomkit_participants_buffered(call->parts) : NULL;
    OWNED PyObject *unknown = known == NULL ? NULL : PyDict_New();
    Py_ssize_t i;

    for (i = 0; unknown != NULL && i < PyList_GET_SIZE(all); i++) {
        PyObject *ref = PyList_GET_ITEM(all, i); /* borrowed */
        OWNED PyObject *module = oomkit_reference_get(ref), *address = NULL;
        OWNED PyObject *note = NULL, *attributes = NULL, *entry = NULL;
        int has;
        if (module == NULL) {
            continue;
        }
        address = PyLong_FromVoidPtr(module);
        has = address == NULL ? -1 : PySet_Contains(known, address);
        note = has == 0 ? forward_note(call, module) : NULL;
        attributes = note == NULL ? NULL : oomkit_late_attributes(module);
        entry = attributes == NULL
                    ? NULL
                    : Py_BuildValue("[OOOO]", ref, note, attributes, Py_False);
        if (PyErr_Occurred() ||
            (entry != NULL && PyDict_SetItem(unknown, address, entry) < 0)) {
            return NULL;
        }
    }
    return STEAL(unknown);
}

/* Puts our hook before all others of a module, which may move buffers, or takes it out;
 * without a handle of torch's, of which there would be one for each. The key is the
 * call's: another thread's may watch the same module. 0 or -1. */
static int
forward_hook(const oomkit_call *call, PyObject *module, int in)
{
    const oomkit_state *st = call->st;
    OWNED PyObject *hooks = oomkit_own_attribute(module, st->str_forward_pre_hooks);
    OWNED PyObject *key = NULL, *done = NULL;

    if (hooks == NULL || !PyODict_Check(hooks)) {
        return PyErr_Occurred() ? -1 : 0;
    }
    key = PyLong_FromVoidPtr((void *)call);
    if (key == NULL) {
        return -1;
    }
    if (in) {
        if (PyObject_SetItem(hooks, key, st->module_runs) < 0) {
            return -1;
        }
        done = PyObject_CallMethod(hooks, "move_to_end", "OO", key, Py_False);
    } else {
        done = PyObject_CallMethod(hooks, "pop", "OO", key, Py_None);
    }
    return done == NULL ? -1 : 0;
}

/* 0, or -1: then some have it. */
static int
forwards_hook(oomkit_call *call, int in)
{
    PyObject *key, *entry; /* borrowed from the dict, which nobody else changes */
    Py_ssize_t at = 0;

    while (PyDict_Next(call->hooked.watched, &at, &key, &entry)) {
        OWNED PyObject *module =
            oomkit_reference_get(PyList_GET_ITEM(entry, WATCHED_MODULE));
        if (module != NULL && forward_hook(call, module, in) < 0) {
            if (in) {
                return -1;
            }
            oomkit_error_unraised(module); /* the others are taken out all the same */
        }
    }
    return 0;
}

/* Where anything is compiled a hook would make it compile again. 1, 0 or -1. */
static int
forwards_are_compiled(oomkit_call *call)
{
    const int off = call->compiler == NULL;
    OWNED PyObject *compiled = NULL;

    if (off && oomkit_compiler_off(call) < 0) {
        return -1;
    }
    compiled = PyObject_CallNoArgs(call->st->is_compiling);
    if ((off && oomkit_compiler_on(call) < 0) || compiled == NULL) {
        return -1;
    }
    return PyObject_IsTrue(compiled);
}

/* What has happened to its buffers in an attempt that has failed is not known. -1 with
 * SplitError. */
static int
forward_refuse(oomkit_call *call, const PyObject *module)
{
    return oomkit_refuse_step(
        call,
        "a %s runs in it that was not found in the arguments, self, closure or globals "
        "of the step, and whose buffers may have been updated already; pass model=... "
        "to auto_batch" SEE("parameters-not-found"),
        Py_TYPE(module)->tp_name);
}

/* The attempt before has failed: one that ran in it, and was not marked in time, has
 * the buffers that it had at entry. 0, or -1 with SplitError. */
static int
forwards_check(oomkit_call *call)
{
    PyObject *key, *entry; /* borrowed from the dict, which nobody else changes */
    Py_ssize_t at = 0;

    while (!call->hooked.watched_late &&
           PyDict_Next(call->hooked.watched, &at, &key, &entry)) {
        OWNED PyObject *module =
            oomkit_reference_get(PyList_GET_ITEM(entry, WATCHED_MODULE));
        int as_it_was = 1;
        if (module != NULL && PyList_GET_ITEM(entry, WATCHED_RUNS) == Py_True) {
            as_it_was =
                forward_is_noted(call, module, PyList_GET_ITEM(entry, WATCHED_NOTE), 1);
        }
        if (as_it_was <= 0) {
            return as_it_was < 0 ? -1 : forward_refuse(call, module);
        }
    }
    return 0;
}

int
oomkit_forwards_watch(oomkit_call *call)
{
    int compiled;

    if (call->hooked.watched != NULL) {
        return forwards_check(call);
    }
    if (oomkit_call_is_replay(call)) {
        return 0;
    }
    call->hooked.watched = forwards_unknown(call);
    if (call->hooked.watched == NULL) {
        return -1;
    }
    call->hooked.watched_late = call->tries.ooms > 0;
    if (PyDict_GET_SIZE(call->hooked.watched) == 0) {
        return 0;
    }
    compiled = forwards_are_compiled(call);
    if (compiled != 0) {
        PyDict_Clear(call->hooked.watched);
        return compiled < 0 ? -1 : 0;
    }
    return forwards_hook(call, 1);
}

/* Those that have run take part in the next calls, where they are marked at entry. 0 or
 * -1. */
static int
forwards_join(oomkit_call *call)
{
    PyObject *key, *entry; /* borrowed from the dict, which nobody else changes */
    Py_ssize_t at = 0;

    while (PyDict_Next(call->hooked.watched, &at, &key, &entry)) {
        OWNED PyObject *module =
            oomkit_reference_get(PyList_GET_ITEM(entry, WATCHED_MODULE));
        if (module != NULL && PyList_GET_ITEM(entry, WATCHED_RUNS) == Py_True &&
            oomkit_participants_add_late(call->st, call->parts, module) < 0) {
            return -1;
        }
    }
    return 0;
}

void
oomkit_forwards_end(oomkit_call *call, int finished)
{
    KEEPING_EXCEPTION {
        (void)forwards_hook(call, 0);
        if (forwards_join(call) < 0) {
            oomkit_error_dismiss(); /* they are met again */
            finished = 0;
        }
        Py_CLEAR(call->hooked.watched);
    }
    call->parts->watched |= finished;
    call->parts->watches += finished;
    if (call->parts->some_late) {
        oomkit_step_look_again(call->step);
    }
}

/* --- one of them runs --- */

/* Is what copies a tensor seen by nobody else here: no transform of torch.func, no
 * mode? 1, 0 or -1. */
static int
forward_is_plain(const oomkit_call *call)
{
    const int inside = oomkit_refusal_transform(call->st);
    oomkit_thread_modes modes = {0};

    if (inside != 0) {
        return inside < 0 ? -1 : 0;
    }
    return call->st->bridge->modes_get(&modes) == OOMKIT_OK && modes.dispatch <= 0 &&
           (call->device.type == OOMKIT_DEVICE_CPU ||
            oomkit_device_is_capturing(call->st, call->device) == 0);
}

/* After a failed attempt in which nobody watched it: the second time it runs it shows
 * whether that moves its buffers; in one piece it does not run again. 0, or -1 with
 * SplitError. */
static int
forward_is_late(oomkit_call *call, PyObject *module, PyObject *note, int again)
{
    int moves;

    if (again || call->split) {
        moves = forward_is_noted(call, module, note, 1);
        moves = moves < 0 ? -1 : !moves;
    } else {
        moves = oomkit_module_is_training(call->st, module);
    }
    return moves > 0 ? forward_refuse(call, module) : moves;
}

int
oomkit_forwards_see(PyObject *module)
{
    oomkit_call *call = oomkit_call_current();
    OWNED PyObject *address = NULL, *entry = NULL;
    PyObject *note; /* borrowed from entry */
    int as_it_was, again;

    if (call == NULL || call->hooked.watched == NULL) {
        return 0;
    }
    address = PyLong_FromVoidPtr(module);
    entry = address == NULL
                ? NULL
                : Py_XNewRef(PyDict_GetItemWithError(call->hooked.watched, address));
    if (entry == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    if (PyWeakref_GET_OBJECT(PyList_GET_ITEM(entry, WATCHED_MODULE)) != module) {
        return 0;
    }
    note = PyList_GET_ITEM(entry, WATCHED_NOTE);
    again = PyList_GET_ITEM(entry, WATCHED_RUNS) != Py_False;
    if (!again) {
        PyList_SetItem(entry, WATCHED_RUNS, Py_NewRef(Py_True));
    }
    if (call->hooked.watched_late) {
        return forward_is_late(call, module, note, again);
    }
    as_it_was = again ? 0 : forward_is_plain(call);
    as_it_was = as_it_was > 0 ? forward_is_noted(call, module, note, 0) : as_it_was;
    if (as_it_was > 0) {
        as_it_was = oomkit_buffers_mark_late(
            call, module, PyList_GET_ITEM(entry, WATCHED_ATTRIBUTES));
    }
    if (as_it_was > 0) {
        PyList_SetItem(entry, WATCHED_RUNS, Py_NewRef(Py_None));
    }
    return as_it_was < 0 ? -1 : 0;
}
