/* Optimizers: what one's step() has moved since its mark (optimizer_mark.c), undoing
 * half-made state, pre-images. Values that were put in place of others can be put back;
 * a tensor that changed in place cannot, without a pre-image. */
#include "optim.h"
#include "optimizer_extras.h"
#include "step_attributes.h"
#include "../py/tensor.h"

/* 1 when a parameter or a state tensor changed in place since the mark; 0; -1. */
int
oomkit_optimizer_moved(oomkit_call *call, int index)
{
    const oomkit_optimizer_mark *mark = &call->updating.marks[index];
    Py_ssize_t i;

    for (i = 0; i < mark->count; i++) {
        uint32_t version;
        if (mark->items[i].version == NULL) {
            continue;
        }
        if (oomkit_tensor_version(call->st, mark->items[i].value, &version) < 0) {
            return -1;
        }
        if (version != *mark->items[i].version) {
            return 1;
        }
    }
    return 0;
}

/* Has anything that an optimizer's step() does shown in this call? 1, 0 or -1. A new
 * state entry counts: it is undone with the rest, but not by doing nothing. */
int
oomkit_optimizers_any_moved(oomkit_call *call)
{
    int i;
    for (i = 0; i < call->updating.count; i++) {
        int moved = oomkit_optimizer_moved(call, i);
        if (moved != 0) {
            return moved;
        }
    }
    return 0;
}

int
oomkit_undo_new_keys(PyObject *dict, PyObject *const *known, Py_ssize_t count)
{
    Py_ssize_t i;
    OWNED PyObject *keys = PyDict_Keys(dict);

    for (i = 0; keys != NULL && i < PyList_GET_SIZE(keys); i++) {
        PyObject *key = PyList_GET_ITEM(keys, i); /* borrowed */
        Py_ssize_t j = 0;
        while (j < count && known[j] != key) { /* == of tensors is no truth value */
            j++;
        }
        if (j == count && PyDict_DelItem(dict, key) < 0) {
            return -1;
        }
    }
    return keys == NULL ? -1 : 0;
}

int
oomkit_undo_new_values(const oomkit_state_item *items, Py_ssize_t count)
{
    OWNED_MEMORY PyObject **known = PyMem_Calloc((size_t)count + 1, sizeof(*known));
    PyObject *dict = Py_NewRef(items->dict); /* finalisers of what goes may do much */
    Py_ssize_t i;
    int result;

    for (i = 0; known != NULL && i < count; i++) {
        known[i] = items[i].key; /* NULL: it was empty */
    }
    if (known == NULL) {
        PyErr_NoMemory();
    }
    result = known == NULL ? -1 : oomkit_undo_new_keys(dict, known, count);
    Py_DECREF(dict);
    return result;
}

/* State values that were put in place of others are put back, new ones removed. */
static int
undo_values(const oomkit_optimizer_mark *mark)
{
    Py_ssize_t i = 0, first;

    while (i < mark->count) {
        PyObject *dict = mark->items[i].dict; /* borrowed from the item */
        if (dict == NULL) {
            i++;
            continue;
        }
        for (first = i; i < mark->count && mark->items[i].dict == dict; i++) {
            const oomkit_state_item *item = &mark->items[i];
            if (item->key != NULL && /* else it was empty */
                PyDict_GetItemWithError(dict, item->key) != item->value &&
                (PyErr_Occurred() ||
                 PyDict_SetItem(dict, item->key, item->value) < 0)) {
                return -1;
            }
        }
        if (oomkit_undo_new_values(&mark->items[first], i - first) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
undo_groups(oomkit_state *st, oomkit_optimizer_mark *mark)
{
    Py_ssize_t i, kept = 0;
    OWNED PyObject *groups = PyObject_GetAttr(mark->optimizer, st->str_param_groups);

    if (groups == NULL) {
        return -1;
    }
    for (i = 0; PyList_Check(groups) && i < PyList_GET_SIZE(groups); i++) {
        PyObject *group = PyList_GET_ITEM(groups, i); /* borrowed */
        if (PyDict_Check(group) && kept < PyList_GET_SIZE(mark->groups) &&
            PyDict_Update(group, PyList_GET_ITEM(mark->groups, kept++)) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Takes back what step() did that is no in-place change: half-made state, counters. */
int
oomkit_optimizer_undo(oomkit_call *call, int index)
{
    oomkit_optimizer_mark *mark = &call->updating.marks[index];
    PyObject *optimizer = Py_NewRef(mark->optimizer);   /* owned: finalisers of what */
    PyObject *attributes = Py_NewRef(mark->attributes); /* goes may step others */
    int result = oomkit_attributes_put(call->st, optimizer, attributes);

    Py_DECREF(optimizer);
    Py_DECREF(attributes);
    if (result < 0) {
        return -1;
    }
    mark = &call->updating.marks[index];
    if (PyDict_Check(mark->state) &&
        oomkit_undo_new_keys(mark->state, mark->known, mark->known_count) < 0) {
        return -1;
    }
    return undo_values(mark) < 0 || undo_groups(call->st, mark) < 0 ? -1 : 0;
}

/* optimizer_safety="copy": host copies of parameters and state tensors. Once per call.
 */
int
oomkit_optimizer_copy(oomkit_call *call, int index)
{
    oomkit_optimizer_mark *mark = &call->updating.marks[index];
    PyObject **copies;
    Py_ssize_t i;

    if (mark->copies != NULL) {
        return 0;
    }
    if (oomkit_extras_take(call, mark) < 0) {
        return -1;
    }
    copies = PyMem_Calloc((size_t)mark->count + 1, sizeof(PyObject *));
    if (copies == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (i = 0; i < mark->count; i++) {
        if (mark->items[i].version != NULL) {
            mark->items[i].was_out = 0;
            copies[i] = oomkit_host_copy(call->st, mark->items[i].value);
            if (copies[i] == NULL) { /* half of them would be taken for all */
                while (i-- > 0) {
                    Py_XDECREF(copies[i]);
                }
                PyMem_Free(copies);
                return -1;
            }
        }
    }
    mark->copies = copies;
    return 0;
}

/* Puts every tensor back from its copy, moved or not (a kernel that failed half-way may
 * have written without bumping a version), then undoes the rest. Gradient recording
 * must be off. */
int
oomkit_optimizer_restore_copy(oomkit_call *call, int index, oomkit_param_is_back told)
{
    oomkit_optimizer_mark *mark = &call->updating.marks[index];
    Py_ssize_t i;

    for (i = 0; mark->copies != NULL && i < mark->count; i++) {
        uint32_t version;
        OWNED PyObject *done = NULL;
        if (mark->items[i].version == NULL || mark->copies[i] == NULL) {
            continue; /* of an update in parts that never came to it */
        }
        done = PyObject_CallMethodOneArg(mark->items[i].value, call->st->str_copy,
                                         mark->copies[i]);
        if (done == NULL ||
            oomkit_tensor_version(call->st, mark->items[i].value, &version) < 0) {
            return -1;
        }
        *mark->items[i].version = version;
        if (mark->items[i].dict == NULL) {
            told(call, mark->items[i].value, version);
        }
    }
    return oomkit_extras_restore(call, mark) < 0 ? -1
                                                 : oomkit_optimizer_undo(call, index);
}

int
oomkit_optimizers_restore_copies(oomkit_call *call, oomkit_param_is_back told)
{
    int i;

    for (i = 0; i < call->updating.count; i++) {
        if (oomkit_optimizer_restore_copy(call, i, told) < 0) {
            return -1;
        }
    }
    call->updating.committed = 0;
    return 0;
}

int
oomkit_optimizers_undo(oomkit_call *call)
{
    int i;

    for (i = 0; i < call->updating.count; i++) {
        if (oomkit_optimizer_undo(call, i) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Can the versions of this optimizer's tensors be believed after a failure? A foreach
 * operation bumps them only when it has gone through its whole list. 1, 0 or -1. */
int
oomkit_optimizer_is_foreach(oomkit_call *call, int index)
{
    const oomkit_optimizer_mark *mark = &call->updating.marks[index];
    Py_ssize_t i;

    for (i = 0; i < PyList_GET_SIZE(mark->groups); i++) {
        PyObject *group = PyList_GET_ITEM(mark->groups, i); /* borrowed */
        PyObject *foreach = oomkit_item(group, "foreach");  /* borrowed */
        if (foreach == Py_True) {
            return 1;
        }
        if (foreach == Py_None && call->device.type != OOMKIT_DEVICE_CPU) {
            return 1; /* torch's default on accelerators */
        }
    }
    return 0;
}

/* Did the failure happen while the state was being made, before any update? Asked of a
 * foreach optimizer, whose versions tell nothing. Every class of torch.optim makes its
 * state in `_init_group`, so the innermost frame of a harmless failure is that one. */
int
oomkit_optimizer_failed_in_init(oomkit_state *st, PyObject *exception)
{
    uint64_t requested;
    OWNED PyObject *message = NULL, *location = NULL;

    oomkit_exception_describe(st, exception, &requested, &message, &location);
    return location != NULL && PyUnicode_Tailmatch(location, st->str_in_init_group, 0,
                                                   PY_SSIZE_T_MAX, 1) == 1;
}
