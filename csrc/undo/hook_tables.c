/* Hooks that the step's own code registers or removes: of modules, parameters and
 * optimizers. An attempt that fails between register_forward_hook() and remove() must
 * not leave the hook to the next one, whose own would run beside it.
 *
 * torch's RemovableHandle reports both (oomkit._engine.patches), with the table that
 * the hook is in: a step that has no hooks pays nothing. What libraries register, as
 * sharding does when a module first runs, is theirs: they note elsewhere that they
 * have.
 *
 * Of each table: a weak reference, a copy as it was at the first report of the call,
 * and the ids of the hooks that were reported. Only those go, or come back. */
#include "undo.h"

enum { TABLE = 0, COPY, TOUCHED };

/* New reference or NULL. */
static PyObject *
note_new(PyObject *table)
{
    OWNED PyObject *ref = PyWeakref_NewRef(table, NULL);
    OWNED PyObject *copy = ref == NULL ? NULL : PyDict_Copy(table);
    OWNED PyObject *touched = copy == NULL ? NULL : PyDict_New();

    return touched == NULL ? NULL : PyTuple_Pack(3, ref, copy, touched);
}

int
oomkit_hooks_note(const oomkit_state *st, PyObject *table, PyObject *id)
{
    oomkit_call *call = oomkit_call_noting(st);
    OWNED PyObject *address = NULL, *there = NULL, *fresh = NULL;
    PyObject *note, *hook; /* borrowed */

    if (call == NULL || !PyDict_Check(table)) {
        return 0;
    }
    hook = PyDict_GetItemWithError(table, id);
    if (hook == NULL ? PyErr_Occurred() != NULL
                     : Py_IS_TYPE(hook, (PyTypeObject *)st->hook_type)) {
        return hook == NULL ? -1 : 0; /* our own, from C: the frame is the user's */
    }
    if (call->entry.hooks == NULL && (call->entry.hooks = PyDict_New()) == NULL) {
        return -1;
    }
    address = PyLong_FromVoidPtr(table);
    note = address ? PyDict_GetItemWithError(call->entry.hooks, address) : NULL;
    if (note != NULL) { /* else that one is gone, and this one lies where it lay */
        there = oomkit_reference_get(PyTuple_GET_ITEM(note, TABLE));
    }
    if (there == NULL) {
        fresh = PyErr_Occurred() ? NULL : note_new(table);
        if (fresh == NULL || PyDict_SetItem(call->entry.hooks, address, fresh) < 0) {
            return -1;
        }
        note = fresh;
    }
    return PyDict_SetItem(PyTuple_GET_ITEM(note, TOUCHED), id, Py_None);
}

/* --- going back --- */

/* 1, 0 or -1. */
static int
is_touched(PyObject *note, PyObject *id)
{
    return PyDict_Contains(PyTuple_GET_ITEM(note, TOUCHED), id);
}

/* Takes out what was added. Needs no memory. 1 something was there, 0, or -1; `back`:
 * it is gone. */
static int
added_back(PyObject *note, PyObject *table, int back)
{
    PyObject *id, *unused; /* borrowed from the dict */
    Py_ssize_t at = 0;
    int moved = 0;

    while (PyDict_Next(PyTuple_GET_ITEM(note, TOUCHED), &at, &id, &unused)) {
        const int before = PyDict_Contains(PyTuple_GET_ITEM(note, COPY), id);
        const int now = before == 0 ? PyDict_Contains(table, id) : 0;
        if (before < 0 || now < 0 ||
            (now == 1 && back && PyObject_DelItem(table, id) < 0)) {
            return -1;
        }
        moved |= now;
    }
    return moved;
}

/* Is one missing that was removed, and is it kept? 1, 0 or -1. */
static int
is_missing(PyObject *note, PyObject *table)
{
    PyObject *id, *hook; /* borrowed from the dict */
    Py_ssize_t at = 0;
    int missing = 0;

    while (missing == 0 && PyDict_Next(PyTuple_GET_ITEM(note, COPY), &at, &id, &hook)) {
        missing = hook == Py_None ? 0 : is_touched(note, id);
        if (missing == 1) {
            missing = PyDict_Contains(table, id);
            missing = missing < 0 ? -1 : !missing;
        }
    }
    return missing;
}

/* Puts back what was removed, in the order at entry; what libraries have added
 * meanwhile comes behind. Nothing is lost on the way, and all of it may be done again.
 * 0 or -1. */
static int
removed_back(PyObject *note, PyObject *table)
{
    OWNED PyObject *more = PyDict_Keys(table);
    OWNED PyObject *order =
        more == NULL ? NULL : PyDict_Keys(PyTuple_GET_ITEM(note, COPY));
    Py_ssize_t i;

    if (order == NULL ||
        PyList_SetSlice(order, PyList_GET_SIZE(order), PY_SSIZE_T_MAX, more) < 0) {
        return -1;
    }
    for (i = 0; i < PyList_GET_SIZE(order); i++) {
        PyObject *id = PyList_GET_ITEM(order, i); /* borrowed */
        PyObject *hook = PyDict_GetItemWithError(PyTuple_GET_ITEM(note, COPY), id);
        OWNED PyObject *moved = NULL;
        int there = PyErr_Occurred() ? -1 : PyDict_Contains(table, id);
        const int is_old = i < PyDict_GET_SIZE(PyTuple_GET_ITEM(note, COPY));
        if (there == 0 && hook != NULL && hook != Py_None) {
            there = is_touched(note, id);
            if (there == 1 && PyObject_SetItem(table, id, hook) < 0) {
                return -1;
            }
        }
        if (there == 1 && is_old == (hook != NULL) && PyODict_Check(table)) {
            moved = PyObject_CallMethod(table, "move_to_end", "O", id);
            there = moved == NULL ? -1 : 1;
        }
        if (there < 0) {
            return -1;
        }
    }
    return 0;
}

/* 1 it is no more as it was, 0, or -1; `back`: it is put back. */
static int
table_back(PyObject *note, int back)
{
    OWNED PyObject *table = oomkit_reference_get(PyTuple_GET_ITEM(note, TABLE));
    int added, missing;

    if (table == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    added = added_back(note, table, back);
    missing = added < 0 ? -1 : is_missing(note, table);
    if (missing < 0 || (missing == 1 && back && removed_back(note, table) < 0)) {
        return -1;
    }
    return added | missing;
}

static int
tables_back(PyObject *hooks, int back)
{
    PyObject *address, *note; /* borrowed from the dict, held below */
    Py_ssize_t at = 0;
    int moved = 0;

    while (hooks != NULL && PyDict_Next(hooks, &at, &address, &note)) {
        OWNED PyObject *held = Py_NewRef(note);
        const int result = table_back(held, back);
        if (result < 0) {
            return -1;
        }
        moved |= result;
    }
    return moved;
}

int
oomkit_hooks_moved(oomkit_call *call)
{
    return tables_back(call->entry.hooks, 0);
}

int
oomkit_hooks_restore(oomkit_call *call)
{
    return tables_back(call->entry.hooks, 1) < 0 ? -1 : 0;
}

/* --- beyond the call --- */

int
oomkit_hooks_slim(oomkit_savepoint *savepoint)
{
    OWNED PyObject *notes =
        savepoint->hooks == NULL ? NULL : PyDict_Values(savepoint->hooks);
    Py_ssize_t i;

    for (i = 0; notes != NULL && i < PyList_GET_SIZE(notes); i++) {
        PyObject *copy = PyTuple_GET_ITEM(PyList_GET_ITEM(notes, i), COPY);
        PyObject *id, *hook; /* borrowed from the dict */
        Py_ssize_t at = 0;
        while (PyDict_Next(copy, &at, &id, &hook)) { /* no key is added */
            if (PyDict_SetItem(copy, id, Py_None) < 0) {
                return -1;
            }
        }
    }
    return PyErr_Occurred() ? -1 : 0;
}

int
oomkit_hooks_now(oomkit_call *call, oomkit_savepoint *now)
{
    PyObject *address, *note; /* borrowed from the dict */
    Py_ssize_t at = 0;

    if (call->entry.hooks == NULL) {
        return 0;
    }
    now->hooks = PyDict_New();
    while (now->hooks != NULL && PyDict_Next(call->entry.hooks, &at, &address, &note)) {
        OWNED PyObject *table = oomkit_reference_get(PyTuple_GET_ITEM(note, TABLE));
        OWNED PyObject *copy = NULL, *kept = NULL;
        if (table == NULL) {
            continue;
        }
        copy = PyDict_Copy(table);
        kept = copy == NULL ? NULL
                            : PyTuple_Pack(3, PyTuple_GET_ITEM(note, TABLE), copy,
                                           PyTuple_GET_ITEM(note, TOUCHED));
        if (kept == NULL || PyDict_SetItem(now->hooks, address, kept) < 0) {
            return -1;
        }
    }
    return now->hooks == NULL || PyErr_Occurred() ? -1 : 0;
}

int
oomkit_hooks_restore_now(oomkit_call *call, const oomkit_savepoint *now)
{
    return oomkit_hooks_restore(call) < 0 || tables_back(now->hooks, 1) < 0 ? -1 : 0;
}
