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
    OWNED PyObject *touched = copy == NULL ? NULL : PySet_New(NULL);

    return touched == NULL ? NULL : PyTuple_Pack(3, ref, copy, touched);
}

int
oomkit_hooks_note(PyObject *table, PyObject *id)
{
    oomkit_call *call = oomkit_call_current();
    OWNED PyObject *address = NULL, *there = NULL, *fresh = NULL;
    PyObject *note; /* borrowed */

    if (call == NULL || !PyDict_Check(table)) {
        return 0;
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
    return PySet_Add(PyTuple_GET_ITEM(note, TOUCHED), id);
}

/* --- going back --- */

/* 1, 0 or -1. */
static int
is_touched(PyObject *note, PyObject *id)
{
    return PySet_Contains(PyTuple_GET_ITEM(note, TOUCHED), id);
}

/* The items of a table as they are to be: what was there, in its order, and then what
 * libraries have added. New dict or NULL. */
static PyObject *
table_then(PyObject *note, PyObject *table)
{
    OWNED PyObject *then = PyDict_New();
    PyObject *copy = PyTuple_GET_ITEM(note, COPY); /* borrowed */
    PyObject *id, *hook;                           /* borrowed from the dicts */
    Py_ssize_t at = 0;
    int result = then == NULL ? -1 : 0;

    while (result == 0 && PyDict_Next(copy, &at, &id, &hook)) {
        PyObject *now = PyDict_GetItemWithError(table, id); /* borrowed */
        const int touched = PyErr_Occurred() ? -1 : is_touched(note, id);
        if (touched < 0) {
            return NULL;
        }
        if (now == NULL && (!touched || hook == Py_None)) {
            continue; /* a library has removed it; or nobody kept it */
        }
        result = PyDict_SetItem(then, id, now != NULL ? now : hook);
    }
    for (at = 0; result == 0 && PyDict_Next(table, &at, &id, &hook);) {
        int known = PyDict_Contains(copy, id);
        if (known == 0) {
            known = is_touched(note, id);
        }
        result = known != 0 ? known : PyDict_SetItem(then, id, hook);
        result = result < 0 ? -1 : 0;
    }
    return result < 0 ? NULL : STEAL(then);
}

/* Are there the same keys in the same order? */
static int
table_same(PyObject *table, PyObject *then)
{
    PyObject *id, *other, *unused; /* borrowed */
    Py_ssize_t at = 0, there = 0;

    if (PyDict_GET_SIZE(table) != PyDict_GET_SIZE(then)) {
        return 0;
    }
    while (PyDict_Next(table, &at, &id, &unused) &&
           PyDict_Next(then, &there, &other, &unused)) {
        if (id != other) {
            return 0;
        }
    }
    return 1;
}

/* Nothing is lost on the way, and all of it may be done again. 0 or -1. */
static int
table_become(PyObject *table, PyObject *then)
{
    OWNED PyObject *keys = PyDict_Keys(table);
    OWNED PyObject *order = keys == NULL ? NULL : PyDict_Keys(then);
    Py_ssize_t i;

    for (i = 0; order != NULL && i < PyList_GET_SIZE(keys); i++) {
        PyObject *id = PyList_GET_ITEM(keys, i); /* borrowed */
        const int stays = PyDict_Contains(then, id);
        if (stays < 0 || (stays == 0 && PyObject_DelItem(table, id) < 0)) {
            return -1;
        }
    }
    for (i = 0; order != NULL && i < PyList_GET_SIZE(order); i++) {
        PyObject *id = PyList_GET_ITEM(order, i); /* borrowed */
        OWNED PyObject *moved = NULL;
        if (PyObject_SetItem(table, id, PyDict_GetItemWithError(then, id)) < 0) {
            return -1;
        }
        moved = PyODict_Check(table)
                    ? PyObject_CallMethod(table, "move_to_end", "O", id)
                    : Py_NewRef(Py_None);
        if (moved == NULL) {
            return -1;
        }
    }
    return order == NULL ? -1 : 0;
}

/* 1 it is no more as it was, 0, or -1; `back`: it is put back. */
static int
table_back(PyObject *note, int back)
{
    OWNED PyObject *table = oomkit_reference_get(PyTuple_GET_ITEM(note, TABLE));
    OWNED PyObject *then = NULL;

    if (table == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    then = table_then(note, table);
    if (then == NULL || table_same(table, then)) {
        return then == NULL ? -1 : 0;
    }
    return back && table_become(table, then) < 0 ? -1 : 1;
}

static int
tables_back(PyObject *hooks, int back)
{
    OWNED PyObject *notes = hooks == NULL ? NULL : PyDict_Values(hooks);
    Py_ssize_t i;
    int moved = 0;

    for (i = 0; notes != NULL && i < PyList_GET_SIZE(notes); i++) {
        int result = table_back(PyList_GET_ITEM(notes, i), back);
        if (result < 0) {
            return -1;
        }
        moved |= result;
    }
    return PyErr_Occurred() ? -1 : moved;
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
