/* Optimizers: what one's step() has moved, undoing half-made state, pre-images.
 *
 * Taken when step() begins: every parameter of its groups and every value of its state,
 * by identity and version. Values that were put in place of others can be put back; a
 * tensor that changed in place cannot, without a pre-image. */
#include "optim.h"
#include "optimizer_extras.h"
#include "step_attributes.h"
#include "../py/tensor.h"

/* Appends one value; `dict` and `key` are NULL for a parameter itself. */
static int
mark_value(oomkit_state *st, oomkit_optimizer_mark *mark, PyObject *dict, PyObject *key,
           PyObject *value)
{
    oomkit_state_item *item;

    if (ARRAY_GROW(mark->items, mark->count, mark->room) < 0) {
        return -1;
    }
    item = &mark->items[mark->count++];
    item->value = Py_NewRef(value);
    item->key = Py_XNewRef(key);
    item->dict = Py_XNewRef(dict);
    item->version = 0;
    item->is_tensor = (uint8_t)oomkit_tensor_check(st, value);
    return 0;
}

#define VERSIONS_AT_ONCE 64

/* The versions of all its tensors, by few calls of the bridge. 0 or -1. */
static int
mark_versions(oomkit_state *st, oomkit_optimizer_mark *mark)
{
    const void *tensors[VERSIONS_AT_ONCE]; /* borrowed from the items */
    uint32_t versions[VERSIONS_AT_ONCE];
    Py_ssize_t from, to, n, i;

    for (from = 0; from < mark->count; from = to) {
        for (to = from, n = 0; to < mark->count && n < VERSIONS_AT_ONCE; to++) {
            if (mark->items[to].is_tensor) {
                tensors[n++] = mark->items[to].value;
            }
        }
        if (st->bridge->versions(tensors, st->impl_offset, (size_t)n, versions, NULL) !=
            0) {
            return oomkit_bridge_failed("read a tensor");
        }
        for (i = from, n = 0; i < to; i++) {
            if (mark->items[i].is_tensor) {
                mark->items[i].version = versions[n++];
            }
        }
    }
    return 0;
}

/* Room for as many as the last time. 0 or -1. */
static int
mark_reserve(const oomkit_call *call, oomkit_optimizer_mark *mark)
{
    const oomkit_update_need *need =
        oomkit_update_need_of(call->parts, mark->optimizer);

    if (need == NULL || need->marked == 0) {
        return 0;
    }
    mark->items = PyMem_Malloc((size_t)need->marked * sizeof(*mark->items));
    if (mark->items == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    mark->room = need->marked;
    return 0;
}

/* An attribute that an optimizer has itself, or by a property. New reference or NULL.
 */
static PyObject *
mark_attribute(const oomkit_optimizer_mark *mark, PyObject *name)
{
    PyObject *own = oomkit_own_attribute(mark->optimizer, name); /* owned, returned */

    return own != NULL || PyErr_Occurred() ? own
                                           : PyObject_GetAttr(mark->optimizer, name);
}

static int
mark_groups(oomkit_state *st, oomkit_optimizer_mark *mark)
{
    Py_ssize_t i, j;
    OWNED PyObject *groups = mark_attribute(mark, st->str_param_groups);

    mark->groups = groups == NULL ? NULL : PyList_New(0);
    for (i = 0;
         mark->groups != NULL && PyList_Check(groups) && i < PyList_GET_SIZE(groups);
         i++) {
        PyObject *group = PyList_GET_ITEM(groups, i); /* borrowed */
        PyObject *params;                             /* borrowed */
        OWNED PyObject *copy = NULL;
        if (!PyDict_Check(group)) {
            continue;
        }
        copy = PyDict_Copy(group);
        if (copy == NULL || PyList_Append(mark->groups, copy) < 0) {
            return -1;
        }
        params = PyDict_GetItemWithError(group, st->str_params);
        for (j = 0; params && PyList_Check(params) && j < PyList_GET_SIZE(params);
             j++) {
            if (mark_value(st, mark, NULL, NULL, PyList_GET_ITEM(params, j)) < 0) {
                return -1;
            }
        }
    }
    return mark->groups == NULL || PyErr_Occurred() ? -1 : 0;
}

static int
mark_state(oomkit_state *st, oomkit_optimizer_mark *mark)
{
    PyObject *param, *values, *key, *value; /* borrowed from the dicts */
    Py_ssize_t at = 0, inner;

    mark->state = mark_attribute(mark, st->str_state);
    if (mark->state == NULL || !PyDict_Check(mark->state)) {
        return mark->state == NULL ? -1 : 0;
    }
    mark->params_seen = PyDict_Keys(mark->state);
    if (mark->params_seen == NULL) {
        return -1;
    }
    while (PyDict_Next(mark->state, &at, &param, &values)) {
        inner = 0;
        if (PyDict_Check(values) && PyDict_GET_SIZE(values) == 0 &&
            mark_value(st, mark, values, NULL, Py_None) < 0) {
            return -1; /* remembers the empty dict, so that what fills it is undone */
        }
        while (PyDict_Check(values) && PyDict_Next(values, &inner, &key, &value)) {
            if (mark_value(st, mark, values, key, value) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

static void
mark_clear(oomkit_optimizer_mark *mark)
{
    Py_ssize_t i, count = mark->count;

    mark->count = 0;
    for (i = 0; i < count; i++) {
        Py_CLEAR(mark->items[i].key);
        Py_CLEAR(mark->items[i].value);
        Py_CLEAR(mark->items[i].dict);
        if (mark->copies != NULL) {
            Py_CLEAR(mark->copies[i]);
        }
    }
    PyMem_Free(mark->items);
    PyMem_Free(mark->copies);
    mark->items = NULL;
    mark->copies = NULL;
    mark->room = 0;
    Py_CLEAR(mark->groups);
    Py_CLEAR(mark->beside);
    Py_CLEAR(mark->state);
    Py_CLEAR(mark->params_seen);
    Py_CLEAR(mark->attributes);
    Py_CLEAR(mark->optimizer);
}

static int
mark_find(const oomkit_call *call, const PyObject *optimizer)
{
    int i;
    for (i = 0; i < call->updating.count; i++) {
        if (call->updating.marks[i].optimizer == optimizer) {
            return i;
        }
    }
    return -1;
}

/* Marks an optimizer at the beginning of its step(); *index is its number in this call.
 * An earlier step() of the same call that moved something makes the call committed. */
int
oomkit_optimizer_mark_take(oomkit_call *call, PyObject *optimizer, int *index)
{
    oomkit_optimizer_mark
        fresh; /* whole before it counts: half of one undoes too much */
    oomkit_optimizer_mark old;
    oomkit_update_need *need;
    int at = mark_find(call, optimizer);

    if (at >= 0) {
        int moved;
        if (call->options->optimizer_copy && call->updating.marks[at].copies != NULL) {
            *index =
                at; /* the pre-image of the first step() is the one to go back to */
            return 0;
        }
        moved = oomkit_optimizer_moved(call, at);
        if (moved < 0) {
            return -1;
        }
        call->updating.committed |= moved;
    }
    memset(&fresh, 0, sizeof(fresh));
    fresh.optimizer = Py_NewRef(optimizer);
    fresh.attributes = oomkit_own_attributes(optimizer);
    if (fresh.attributes == NULL || mark_reserve(call, &fresh) < 0 ||
        mark_groups(call->st, &fresh) < 0 || mark_state(call->st, &fresh) < 0 ||
        mark_versions(call->st, &fresh) < 0 ||
        oomkit_attributes_note(call, optimizer, fresh.attributes) < 0) {
        mark_clear(&fresh);
        return -1;
    }
    need = oomkit_update_need_of(call->parts, optimizer);
    if (need != NULL) {
        need->marked = fresh.count;
    }
    memset(&old, 0, sizeof(old));
    at =
        mark_find(call, optimizer); /* again: what was asked may have run other steps */
    if (at < 0 && ARRAY_GROW(call->updating.marks, call->updating.count,
                             call->updating.room) < 0) {
        mark_clear(&fresh);
        return -1;
    }
    if (at < 0) {
        at = call->updating.count++;
    } else {
        old = call->updating.marks[at];
    }
    call->updating.marks[at] = fresh;
    mark_clear(&old);
    *index = at;
    return 0;
}

/* 1 when a parameter or a state tensor changed in place since the mark; 0; -1. */
int
oomkit_optimizer_moved(oomkit_call *call, int index)
{
    const oomkit_optimizer_mark *mark = &call->updating.marks[index];
    Py_ssize_t i;

    for (i = 0; i < mark->count; i++) {
        uint32_t version;
        if (!mark->items[i].is_tensor) {
            continue;
        }
        if (oomkit_tensor_version(call->st, mark->items[i].value, &version) < 0) {
            return -1;
        }
        if (version != mark->items[i].version) {
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

/* Removes from a dict every key that is not among `known` (a list). */
int
oomkit_undo_new_keys(PyObject *dict, PyObject *known)
{
    Py_ssize_t i;
    OWNED PyObject *keys = PyDict_Keys(dict);

    for (i = 0; keys != NULL && i < PyList_GET_SIZE(keys); i++) {
        PyObject *key = PyList_GET_ITEM(keys, i); /* borrowed */
        Py_ssize_t j, n = PyList_GET_SIZE(known);
        for (j = 0; j < n; j++) { /* by identity: == of tensors is no truth value */
            if (PyList_GET_ITEM(known, j) == key) {
                break;
            }
        }
        if (j == n && PyDict_DelItem(dict, key) < 0) {
            return -1;
        }
    }
    return keys == NULL ? -1 : 0;
}

/* State values that were put in place of others are put back, new ones removed. */
static int
undo_values(oomkit_optimizer_mark *mark)
{
    Py_ssize_t i = 0;

    while (i < mark->count) {
        PyObject *dict = mark->items[i].dict; /* borrowed from the item */
        OWNED PyObject *known = NULL;
        if (dict == NULL) {
            i++;
            continue;
        }
        known = PyList_New(0);
        if (known == NULL) {
            return -1;
        }
        for (; i < mark->count && mark->items[i].dict == dict; i++) {
            const oomkit_state_item *item = &mark->items[i];
            if (item->key == NULL) {
                continue; /* it was empty */
            }
            if (PyList_Append(known, item->key) < 0 ||
                (PyDict_GetItemWithError(dict, item->key) != item->value &&
                 (PyErr_Occurred() ||
                  PyDict_SetItem(dict, item->key, item->value) < 0))) {
                return -1;
            }
        }
        if (oomkit_undo_new_keys(dict, known) < 0) {
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
        oomkit_undo_new_keys(mark->state, mark->params_seen) < 0) {
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
    if (oomkit_beside_take(call, mark) < 0) {
        return -1;
    }
    copies = PyMem_Calloc((size_t)mark->count + 1, sizeof(PyObject *));
    if (copies == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (i = 0; i < mark->count; i++) {
        if (mark->items[i].is_tensor) {
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
        if (!mark->items[i].is_tensor || mark->copies[i] == NULL) {
            continue; /* of an update in parts that never came to it */
        }
        done = PyObject_CallMethodOneArg(mark->items[i].value, call->st->str_copy,
                                         mark->copies[i]);
        if (done == NULL ||
            oomkit_tensor_version(call->st, mark->items[i].value, &version) < 0) {
            return -1;
        }
        mark->items[i].version = version;
        if (mark->items[i].dict == NULL) {
            told(call, mark->items[i].value, version);
        }
    }
    return oomkit_beside_restore(call, mark) < 0 ? -1
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

void
oomkit_optimizers_release(oomkit_call *call)
{
    int i, count = call->updating.count;

    call->updating.count = 0;
    for (i = 0; i < count; i++) {
        mark_clear(&call->updating.marks[i]);
    }
    MEMORY_CLEAR(call->updating.marks);
    call->updating.room = 0;
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
