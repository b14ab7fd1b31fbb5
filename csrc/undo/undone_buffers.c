/* Buffers that an attempt has moved or made before it was undone. Whether its retry
 * does so, too, depends on a flag, a hook, a cache: where that has not gone back with
 * them (nothing shows it, or nothing can be done), the retry would go on without the
 * value that the whole batch would have had, or from that value once more. A batch that
 * the module asks for its number of rows looks the same, and is not split either. */
#include "undo.h"
#include "../optim/updating.h"
#include "../py/errors.h"
#include "../py/tensor.h"

/* 0 or -1. */
static int
undone_add(oomkit_call *call, PyObject *module, PyObject *key, int made)
{
    oomkit_undone_buffers *u = &call->entry.undone;
    PyObject *ref; /* owned, then by the item: the retry may do without the module */

    if (ARRAY_GROW(u->items, u->count, u->room) < 0 ||
        (ref = PyWeakref_NewRef(module, NULL)) == NULL) {
        return -1;
    }
    u->items[u->count++] = (oomkit_undone_buffer){ref, Py_NewRef(key), made};
    return 0;
}

/* What stands there now: borrowed from the dictionary; NULL, perhaps with an exception.
 */
static PyObject *
undone_now(const oomkit_call *call, PyObject *module, PyObject *key)
{
    OWNED PyObject *dict = PyObject_GetAttr(module, call->st->str_buffers);
    return dict == NULL || !PyDict_Check(dict) ? NULL
                                               : PyDict_GetItemWithError(dict, key);
}

/* One of another shape is a table that grows with its batch, which may do without. 1, 0
 * or -1. */
static int
undone_has_moved(oomkit_call *call, const oomkit_buffer *item)
{
    oomkit_tensor_facts was, is;
    int moved = oomkit_buffer_moved(call, item);
    PyObject *now; /* borrowed */

    if (moved != 2) {
        return moved;
    }
    now = undone_now(call, item->module, item->key);
    if (now == NULL || !oomkit_tensor_check(call->st, now)) {
        return PyErr_Occurred() ? -1 : 0;
    }
    return oomkit_tensor_facts_get(call->st, item->tensor, 0, &was) < 0 ||
                   oomkit_tensor_facts_get(call->st, now, 0, &is) < 0
               ? -1
               : was.size == is.size && was.shape_hash == is.shape_hash;
}

/* Of a module with the marked buffers from `first` on to `end`. 0 or -1. */
static int
undone_note_module(oomkit_call *call, PyObject *module, Py_ssize_t first,
                   Py_ssize_t end)
{
    const oomkit_buffer *items = call->entry.buffers.items;
    OWNED PyObject *dict = PyObject_GetAttr(module, call->st->str_buffers);
    OWNED PyObject *names = NULL;
    Py_ssize_t i, k;

    if (dict == NULL) {
        return -1;
    }
    for (i = first; i < end; i++) {
        int moved = undone_has_moved(call, &items[i]);
        if (moved < 0 || (moved > 0 && undone_add(call, module, items[i].key, 0) < 0)) {
            return -1;
        }
    }
    if (!PyDict_Check(dict) || PyDict_GET_SIZE(dict) == end - first) {
        return 0;
    }
    names = PyDict_Items(dict);
    for (k = 0; names != NULL && k < PyList_GET_SIZE(names); k++) {
        PyObject *key = PyTuple_GET_ITEM(PyList_GET_ITEM(names, k), 0); /* borrowed */
        int known = PyTuple_GET_ITEM(PyList_GET_ITEM(names, k), 1) == Py_None;
        for (i = first; known == 0 && i < end; i++) {
            known = PyObject_RichCompareBool(items[i].key, key, Py_EQ);
        }
        if (known < 0 || (!known && undone_add(call, module, key, 1) < 0)) {
            return -1;
        }
    }
    return names == NULL ? -1 : 0;
}

/* Not of an attempt that has come to its update, behind which a step may move what it
 * likes; nor of a run of a proof, or a split that is refused, which go on to the end of
 * the step. */
int
oomkit_undone_buffers_note(oomkit_call *call)
{
    oomkit_buffers *b = &call->entry.buffers;
    const oomkit_participants *parts = call->parts;
    Py_ssize_t i, end = 0;

    if (!b->taken || call->proof != NULL || call->refused.going_whole ||
        oomkit_update_begun(call)) {
        return 0;
    }
    for (i = 0; i < parts->buffered_count; i++) {
        OWNED PyObject *module = oomkit_reference_get(parts->buffered[i].ref);
        const Py_ssize_t first = end; /* they were marked in this order */
        while (module != NULL && end < b->count && b->items[end].module == module) {
            end++;
        }
        if (module == NULL || (first == end && parts->buffered[i].is_late)) {
            continue; /* another call has met it meanwhile */
        }
        if (undone_note_module(call, module, first, end) < 0) {
            return -1;
        }
    }
    b->taken = 0; /* what is put back next has moved, too, if this is done again */
    return 0;
}

/* Has one that was moved moved again? Of one that was made: has it been made again, or
 * left alone? 1, 0 or -1. */
static int
undone_again(oomkit_call *call, PyObject *module, const oomkit_undone_buffer *one)
{
    const oomkit_buffers *b = &call->entry.buffers;
    PyObject *now = undone_now(call, module, one->key); /* borrowed */
    Py_ssize_t i;

    if (PyErr_Occurred()) {
        return -1;
    }
    if (one->made && (now == NULL || now == Py_None)) {
        /* between a call and its replay the caller may have made it */
        return oomkit_call_is_replay(call);
    }
    for (i = 0; i < b->count; i++) {
        const oomkit_buffer *item = &b->items[i];
        int state = item->module == module
                        ? PyObject_RichCompareBool(item->key, one->key, Py_EQ)
                        : 0;
        if (state > 0) {
            state = oomkit_buffer_moved(call, item);
            return state < 0 ? -1 : one->made ? state != 1 : state != 0;
        }
        if (state < 0) {
            return -1;
        }
    }
    return 1; /* it is not marked: it had no value when the retry began */
}

/* 0, or -1 with SplitError or a warning made an error. */
static int
undone_refuse(oomkit_call *call, const PyObject *module,
              const oomkit_undone_buffer *one)
{
    const char *kind = Py_TYPE(module)->tp_name;
    const char *was = one->made ? "created" : "updated";
    OWNED PyObject *key = Py_NewRef(one->key);

    if (call->options->verify == OOMKIT_VERIFY_WARN) {
        oomkit_undone_buffers_free(call); /* of this call it is said once */
        return oomkit_warn(
            call->st->OomkitWarning, 1,
            "oomkit: %U is split (verify=\"warn\"), but buffer %U of a %s "
            "was %s in the attempt that ran out of memory, but not in its retry" SEE(
                "undone-buffers"),
            call->options->label, key, kind, was);
    }
    return oomkit_refuse_step(
        call,
        "buffer %U of a %s was %s in the attempt that ran out of memory, but not in "
        "its "
        "retry. It depends on a value that oomkit could not restore, or on the number "
        "of rows: keep that value in an attribute of the module and pass the module as "
        "model=..., run the step once on a small batch first, or, where the buffer "
        "makes no difference, pass verify=\"warn\"" SEE("undone-buffers"),
        key, kind, was);
}

int
oomkit_undone_buffers_compare(oomkit_call *call)
{
    Py_ssize_t i;

    for (i = 0; call->proof == NULL && i < call->entry.undone.count; i++) {
        const oomkit_undone_buffer *one = &call->entry.undone.items[i];
        OWNED PyObject *module = oomkit_reference_get(one->module);
        const int again = module == NULL ? 1 : undone_again(call, module, one);
        if (again <= 0) {
            return again < 0 ? -1 : undone_refuse(call, module, one);
        }
    }
    return 0;
}

void
oomkit_undone_buffers_free(oomkit_call *call)
{
    oomkit_undone_buffers *u = &call->entry.undone;

    while (u->count > 0) {
        oomkit_undone_buffer one = u->items[--u->count];
        Py_DECREF(one.module);
        Py_DECREF(one.key);
    }
    MEMORY_CLEAR(u->items);
    u->room = 0;
}
