/* Which parameter stands at which name of which module, while split: one that the step
 * replaces is no longer the one that the optimizer and the marks know. */
#include "../ranks/agree.h"
#include "undo.h"

struct oomkit_param_slot {
    PyObject *dict;  /* owned: a module's _parameters */
    PyObject *key;   /* owned */
    PyObject *value; /* owned */
};

void
oomkit_param_slots_release(oomkit_call *call)
{
    Py_ssize_t count = call->entry.slots.count;
    oomkit_param_slot *slots = call->entry.slots.items;

    call->entry.slots.items =
        NULL; /* first: a finaliser that runs here must see no half of it */
    call->entry.slots.count = call->entry.slots.room = 0;
    while (count-- > 0) {
        Py_CLEAR(slots[count].value);
        Py_CLEAR(slots[count].key);
        Py_CLEAR(slots[count].dict);
    }
    MEMORY_CLEAR(slots);
}

static int
slots_add(oomkit_call *call, PyObject *dict, PyObject *key, PyObject *value)
{
    oomkit_param_slots *slots = &call->entry.slots;
    oomkit_param_slot *slot;

    if (ARRAY_GROW(slots->items, slots->count, slots->room) < 0) {
        return -1;
    }
    slot = &slots->items[slots->count++];
    slot->dict = Py_NewRef(dict);
    slot->key = Py_NewRef(key);
    slot->value = Py_NewRef(value);
    return 0;
}

/* Before a split attempt. 0 or -1. */
int
oomkit_param_slots_note(oomkit_call *call)
{
    PyObject *roots = call->parts->roots; /* borrowed */
    PyObject *key, *value;                /* borrowed from the dict */
    Py_ssize_t i;

    oomkit_param_slots_release(call);
    for (i = 0; roots != NULL && i < PyList_GET_SIZE(roots); i++) {
        OWNED PyObject *root = oomkit_reference_get(PyList_GET_ITEM(roots, i));
        OWNED PyObject *dict = NULL;
        Py_ssize_t at = 0;
        if (root == NULL) {
            continue;
        }
        dict = PyObject_GetAttr(root, call->st->str_parameters);
        if (dict == NULL) {
            return -1;
        }
        while (PyDict_Check(dict) && PyDict_Next(dict, &at, &key, &value)) {
            if (slots_add(call, dict, key, value) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

/* At the end of a micro-batch: 1 and *key (borrowed) of a parameter that was replaced
 * or taken out, 0, -1. One that was gathered from the ranks stands for this rank's part
 * of it, as torch leaves it after a forward without a backward. */
int
oomkit_param_slots_changed(oomkit_call *call, PyObject **key)
{
    Py_ssize_t i;
    for (i = 0; i < call->entry.slots.count; i++) {
        const oomkit_param_slot *slot = &call->entry.slots.items[i];
        PyObject *now = PyDict_GetItemWithError(slot->dict, slot->key); /* borrowed */
        if (now == NULL && PyErr_Occurred()) {
            return -1;
        }
        if (now != slot->value) {
            const int gathered = now == NULL ? 0 : oomkit_ranks_made(call, now);
            if (gathered > 0) {
                continue;
            }
            *key = slot->key;
            return gathered < 0 ? -1 : 1;
        }
    }
    return 0;
}

/* Every parameter back at its name. 0 or -1. */
int
oomkit_param_slots_restore(oomkit_call *call)
{
    Py_ssize_t i;
    for (i = 0; i < call->entry.slots.count; i++) {
        oomkit_param_slot *slot = &call->entry.slots.items[i];
        PyObject *now = PyDict_GetItemWithError(slot->dict, slot->key); /* borrowed */
        if (now != slot->value &&
            (PyErr_Occurred() ||
             PyDict_SetItem(slot->dict, slot->key, slot->value) < 0)) {
            return -1;
        }
    }
    return 0;
}
