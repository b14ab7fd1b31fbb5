/* Hooks that the step's own code registers or removes: of modules, parameters and
 * optimizers. An attempt that fails between register_forward_hook() and remove() must
 * not leave the hook to the next one, whose own would run beside it.
 *
 * torch's RemovableHandle reports both (oomkit._engine.patches), with the table that
 * the hook is in: a step that has no hooks pays nothing. What libraries register, as
 * sharding does when a module first runs, is theirs: they note elsewhere that they
 * have.
 *
 * A step may register once and note that it has where nothing is put back. A hook whose
 * handle is still held behind a roll-back stays, then, until the retry registers one in
 * the same line: it was no such hook, and something else holds what the failed attempt
 * has left. Of hooks that went the retry must register one in the same line again.
 *
 * Of each table: a weak reference; a copy as it was at the first report of the call;
 * the ids of the hooks that were reported, which alone go or come back, with (weak
 * reference to the handle, line) where one was registered; the lines whose hooks went;
 * the ids of those that stayed, with their lines. */
#include "undo.h"

enum { TABLE = 0, COPY, TOUCHED, UNDONE, KEPT };

/* New reference or NULL. */
static PyObject *
note_new(PyObject *table)
{
    OWNED PyObject *ref = PyWeakref_NewRef(table, NULL);
    OWNED PyObject *copy = ref == NULL ? NULL : PyDict_Copy(table);
    OWNED PyObject *touched = copy == NULL ? NULL : PyDict_New();
    OWNED PyObject *undone = touched == NULL ? NULL : PyDict_New();
    OWNED PyObject *kept = undone == NULL ? NULL : PyDict_New();

    return kept == NULL ? NULL : PyTuple_Pack(5, ref, copy, touched, undone, kept);
}

/* 1, 0 or -1. */
static int
is_touched(PyObject *note, PyObject *id)
{
    return PyDict_Contains(PyTuple_GET_ITEM(note, TOUCHED), id);
}

/* One is registered in the line of those that stayed: they go. 0 or -1. */
static int
kept_go(PyObject *note, PyObject *table, PyObject *line)
{
    PyObject *kept = PyTuple_GET_ITEM(note, KEPT); /* borrowed */
    OWNED PyObject *ids = PyDict_GET_SIZE(kept) == 0 ? NULL : PyDict_Keys(kept);
    Py_ssize_t i;

    for (i = 0; ids != NULL && i < PyList_GET_SIZE(ids); i++) {
        PyObject *id = PyList_GET_ITEM(ids, i); /* borrowed */
        const int same =
            PyObject_RichCompareBool(PyDict_GetItemWithError(kept, id), line, Py_EQ);
        const int there = same == 1 ? PyDict_Contains(table, id) : 0;
        if (same < 0 || there < 0 || (there == 1 && PyObject_DelItem(table, id) < 0) ||
            (same == 1 && PyDict_DelItem(kept, id) < 0)) {
            return -1;
        }
    }
    return PyErr_Occurred() ? -1 : 0;
}

int
oomkit_hooks_note(const oomkit_state *st, PyObject *table, PyObject *id,
                  PyObject *registered)
{
    oomkit_call *call = oomkit_call_noting(st);
    OWNED PyObject *address = NULL, *there = NULL, *fresh = NULL;
    PyObject *note, *hook; /* borrowed */
    int known;

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
    if (registered != Py_None &&
        kept_go(note, table, PyTuple_GET_ITEM(registered, 1)) < 0) {
        return -1;
    }
    known = registered == Py_None ? is_touched(note, id) : 0;
    if (known != 0) {
        return known < 0 ? -1 : 0; /* registered in this call, too */
    }
    return PyDict_SetItem(PyTuple_GET_ITEM(note, TOUCHED), id, registered);
}

/* --- going back --- */

/* One that was registered goes; where `held` is 1 only if nobody holds its handle any
 * more. 1 it does, 0, or -1. */
static int
is_to_go(PyObject *reported, int held)
{
    OWNED PyObject *handle = held && PyTuple_Check(reported)
                                 ? oomkit_reference_get(PyTuple_GET_ITEM(reported, 0))
                                 : NULL;

    return handle == NULL ? (PyErr_Occurred() ? -1 : 1) : 0;
}

/* 0 or -1. */
static int
added_take_out(PyObject *note, PyObject *table, PyObject *id, PyObject *reported)
{
    if (PyObject_DelItem(table, id) < 0) {
        return -1;
    }
    if (!PyTuple_Check(reported)) {
        return 0;
    }
    if (PyDict_SetItem(PyTuple_GET_ITEM(note, UNDONE), PyTuple_GET_ITEM(reported, 1),
                       Py_None) < 0) {
        return -1;
    }
    /* the value of a key that is there */
    return PyDict_SetItem(PyTuple_GET_ITEM(note, TOUCHED), id, Py_None);
}

enum { LOOK = 0, TAKE, TAKE_ALL };

/* Takes out what was added, TAKE: but for hooks whose handle is held. 1 something was
 * there, 0, or -1. */
static int
added_back(PyObject *note, PyObject *table, int back)
{
    PyObject *id, *reported; /* borrowed from the dict */
    Py_ssize_t at = 0;
    int moved = 0;

    while (PyDict_Next(PyTuple_GET_ITEM(note, TOUCHED), &at, &id, &reported)) {
        OWNED PyObject *held = Py_NewRef(reported);
        const int before = PyDict_Contains(PyTuple_GET_ITEM(note, COPY), id);
        int now = before == 0 ? PyDict_Contains(table, id) : 0;
        if (before == 0 && now == 1 && back) {
            now = is_to_go(held, back == TAKE);
            now = (now == 1 && added_take_out(note, table, id, held) < 0) ||
                          (now == 0 && PyDict_SetItem(PyTuple_GET_ITEM(note, KEPT), id,
                                                      PyTuple_GET_ITEM(held, 1)) < 0)
                      ? -1
                      : now;
        }
        if (before < 0 || now < 0) {
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
    return tables_back(call->entry.hooks, LOOK);
}

int
oomkit_hooks_restore(oomkit_call *call)
{
    /* the body of a loop keeps its locals */
    return tables_back(call->entry.hooks, call->given.is_body ? TAKE_ALL : TAKE) < 0
               ? -1
               : 0;
}

/* --- what must be registered again --- */

/* 1 a hook was registered in this line since, 0 not, -1. */
static int
line_again(PyObject *note, PyObject *line)
{
    PyObject *id, *reported; /* borrowed from the dict */
    Py_ssize_t at = 0;
    int found = 0;

    while (found == 0 &&
           PyDict_Next(PyTuple_GET_ITEM(note, TOUCHED), &at, &id, &reported)) {
        found =
            PyTuple_Check(reported)
                ? PyObject_RichCompareBool(PyTuple_GET_ITEM(reported, 1), line, Py_EQ)
                : 0;
    }
    return found;
}

int
oomkit_hooks_compare(oomkit_call *call)
{
    PyObject *address, *note, *line, *unused; /* borrowed from the dicts */
    Py_ssize_t at = 0;

    while (call->proof == NULL &&
           PyDict_Next(call->entry.hooks, &at, &address, &note)) {
        Py_ssize_t next = 0;
        while (PyDict_Next(PyTuple_GET_ITEM(note, UNDONE), &next, &line, &unused)) {
            const int again = line_again(note, line);
            if (again == 0) {
                return oomkit_refuse(
                    call,
                    "%U cannot be repeated: the hook that %U registered in the attempt "
                    "that ran out of memory was undone with it, and the retry has not "
                    "registered it again. The step notes that it has where oomkit "
                    "cannot "
                    "restore it: keep the handle, or register the hook before the "
                    "step" SEE("undone-hooks"),
                    call->options->label, line);
            }
            if (again < 0) {
                return -1;
            }
        }
    }
    return 0;
}

/* --- beyond the call --- */

int
oomkit_hooks_slim(const oomkit_state *Py_UNUSED(st), oomkit_savepoint *savepoint)
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
oomkit_hooks_now(oomkit_call *call, const oomkit_after *Py_UNUSED(after),
                 oomkit_savepoint *now)
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
                            : PyTuple_Pack(5, PyTuple_GET_ITEM(note, TABLE), copy,
                                           PyTuple_GET_ITEM(note, TOUCHED),
                                           PyTuple_GET_ITEM(note, UNDONE),
                                           PyTuple_GET_ITEM(note, KEPT));
        if (kept == NULL || PyDict_SetItem(now->hooks, address, kept) < 0) {
            return -1;
        }
    }
    return now->hooks == NULL || PyErr_Occurred() ? -1 : 0;
}

int
oomkit_hooks_back(oomkit_call *call, const oomkit_savepoint *now,
                  int Py_UNUSED(finished))
{
    return oomkit_hooks_restore(call) < 0 || tables_back(now->hooks, TAKE) < 0 ? -1 : 0;
}

int
oomkit_hooks_visit(const oomkit_savepoint *savepoint, visitproc visit, void *arg)
{
    Py_VISIT(savepoint->hooks);
    return 0;
}
