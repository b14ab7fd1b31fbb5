/* The mark of an optimizer, taken when its step() begins: every parameter of its groups
 * and every value of its state, by identity and version.
 *
 * Where they lie rarely changes from call to call. So the memory of a mark outlives it,
 * as addresses without references, and is used again when the dictionaries say that
 * they hold the same as then (oomkit_dict_tag()): an address among them is that of an
 * object that is alive. */
#include "optim.h"
#include "step_attributes.h"
#include "../py/tensor.h"

typedef struct oomkit_marked_group {
    oomkit_seen_dict group;
    const PyObject *params; /* borrowed address: its list of parameters */
    Py_ssize_t count;
} oomkit_marked_group;

/* One block of memory. The references that it has belong to the mark that uses it. */
typedef struct oomkit_layout {
    oomkit_seen_dict state; /* tag 0: it cannot be used again */
    Py_ssize_t count, known_count, group_count;
    Py_ssize_t room, known_room, group_room;
    oomkit_state_item *items;
    PyObject **known;
    oomkit_marked_group *groups;
} oomkit_layout;

/* --- where everything lies --- */

/* Does each parameter of a group stand where it stood? *item moves on. */
static int
group_holds(oomkit_state *st, const oomkit_marked_group *was, PyObject *group,
            const oomkit_state_item **item)
{
    Py_ssize_t i;

    if (group != was->group.dict || !PyDict_Check(group) ||
        oomkit_dict_tag(group) != was->group.tag ||
        PyList_GET_SIZE((PyObject *)was->params) != was->count) {
        return 0;
    }
    for (i = 0; i < was->count; i++, (*item)++) {
        PyObject *param = PyList_GET_ITEM((PyObject *)was->params, i); /* borrowed */
        if (param != (*item)->value ||
            oomkit_tensor_check(st, param) != (*item)->is_tensor) {
            return 0;
        }
    }
    return 1;
}

static int
layout_holds(oomkit_state *st, const oomkit_layout *layout, PyObject *groups,
             PyObject *state)
{
    const oomkit_state_item *item, *end;
    const PyObject *dict = NULL; /* borrowed from the item */
    Py_ssize_t i;

    if (layout == NULL || layout->state.tag == 0 || state != layout->state.dict ||
        !PyDict_Check(state) || oomkit_dict_tag(state) != layout->state.tag ||
        !PyList_Check(groups) || PyList_GET_SIZE(groups) != layout->group_count) {
        return 0;
    }
    item = layout->items;
    end = item + layout->count;
    for (i = 0; i < layout->group_count; i++) {
        if (!group_holds(st, &layout->groups[i], PyList_GET_ITEM(groups, i), &item)) {
            return 0;
        }
    }
    for (; item < end; item++) { /* alive: they are in state, which is as it was */
        if (item->dict != dict && oomkit_dict_tag(item->dict) != item->tag) {
            return 0;
        }
        dict = item->dict;
    }
    return 1;
}

/* How much there is. */
static void
layout_count(oomkit_state *st, PyObject *groups, PyObject *state, oomkit_layout *needed)
{
    PyObject *values; /* borrowed */
    Py_ssize_t i, at = 0;

    memset(needed, 0, sizeof(*needed));
    needed->group_room = PyList_Check(groups) ? PyList_GET_SIZE(groups) : 0;
    for (i = 0; i < needed->group_room && i < PyList_GET_SIZE(groups); i++) {
        PyObject *group = PyList_GET_ITEM(groups, i); /* borrowed */
        PyObject *params =                            /* borrowed */
            PyDict_Check(group) ? PyDict_GetItemWithError(group, st->str_params) : NULL;
        needed->room +=
            params != NULL && PyList_Check(params) ? PyList_GET_SIZE(params) : 0;
    }
    needed->known_room = PyDict_Check(state) ? PyDict_GET_SIZE(state) : 0;
    while (PyDict_Check(state) && PyDict_Next(state, &at, NULL, &values)) {
        Py_ssize_t size = PyDict_Check(values) ? PyDict_GET_SIZE(values) : 0;
        needed->room += size > 0 ? size : 1;
    }
}

/* Memory for so much. NULL with MemoryError. */
static oomkit_layout *
layout_make(const oomkit_layout *needed)
{
    const size_t items = (size_t)needed->room * sizeof(oomkit_state_item),
                 groups = (size_t)needed->group_room * sizeof(oomkit_marked_group),
                 known = (size_t)needed->known_room * sizeof(PyObject *);
    oomkit_layout *made = PyMem_Malloc(sizeof(*made) + items + groups + known);

    if (made == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    *made = *needed;
    made->items = (oomkit_state_item *)(made + 1);
    made->groups = (oomkit_marked_group *)(made->items + needed->room);
    made->known = (PyObject **)(made->groups + needed->group_room);
    return made;
}

/* Appends one value; `dict` and `key` are NULL for a parameter itself. 0; -1: there are
 * more than were counted. */
static int
layout_add(oomkit_state *st, oomkit_layout *layout, PyObject *dict, PyObject *key,
           PyObject *value)
{
    if (layout->count == layout->room) {
        return -1;
    }
    layout->items[layout->count++] = (oomkit_state_item){
        .value = value,
        .key = key,
        .dict = dict,
        .tag = dict == NULL ? 0 : oomkit_dict_tag(dict),
        .is_tensor = (uint8_t)oomkit_tensor_check(st, value),
    };
    return 0;
}

static int
layout_add_group(oomkit_state *st, oomkit_layout *layout, PyObject *group)
{
    PyObject *params = /* borrowed */
        PyDict_Check(group) ? PyDict_GetItemWithError(group, st->str_params) : NULL;
    Py_ssize_t i;

    if (params == NULL || !PyList_Check(params)) {
        layout->state.tag = 0;
        return PyErr_Occurred() || layout->group_count == layout->group_room ? -1 : 0;
    }
    if (layout->group_count == layout->group_room) {
        return -1;
    }
    layout->groups[layout->group_count++] = (oomkit_marked_group){
        {group, oomkit_dict_tag(group)}, params, PyList_GET_SIZE(params)};
    for (i = 0; i < PyList_GET_SIZE(params); i++) {
        if (layout_add(st, layout, NULL, NULL, PyList_GET_ITEM(params, i)) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Addresses of everything, into memory that was made for it. 0, or -1, with an
 * exception where a look-up in a group has raised one: else things are no more as they
 * were counted, for it has run code. */
static int
layout_fill(oomkit_state *st, oomkit_layout *layout, PyObject *groups, PyObject *state)
{
    PyObject *param, *values, *key, *value; /* borrowed */
    Py_ssize_t i, at = 0, inner;

    layout->state =
        (oomkit_seen_dict){state, PyDict_Check(state) ? oomkit_dict_tag(state) : 0};
    for (i = 0; PyList_Check(groups) && i < PyList_GET_SIZE(groups); i++) {
        if (layout_add_group(st, layout, PyList_GET_ITEM(groups, i)) < 0) {
            return -1;
        }
    }
    while (PyDict_Check(state) && PyDict_Next(state, &at, &param, &values)) {
        if (layout->known_count == layout->known_room) {
            return -1;
        }
        layout->known[layout->known_count++] = param;
        inner = 0;
        if (PyDict_Check(values) && PyDict_GET_SIZE(values) == 0 &&
            layout_add(st, layout, values, NULL, Py_None) < 0) {
            return -1; /* so that what fills the empty dict is undone */
        }
        while (PyDict_Check(values) && PyDict_Next(values, &inner, &key, &value)) {
            if (layout_add(st, layout, values, key, value) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

static void
layout_hold(const oomkit_layout *layout)
{
    Py_ssize_t i;

    for (i = 0; i < layout->count; i++) {
        Py_INCREF(layout->items[i].value);
        Py_XINCREF(layout->items[i].key);
        Py_XINCREF(layout->items[i].dict);
    }
    for (i = 0; i < layout->known_count; i++) {
        Py_INCREF(layout->known[i]);
    }
}

/* The references go, the addresses stay. */
static void
layout_let_go(const oomkit_layout *layout)
{
    Py_ssize_t i;

    for (i = 0; i < layout->count; i++) {
        Py_XDECREF(layout->items[i].key);
        Py_DECREF(layout->items[i].value);
        Py_XDECREF(layout->items[i].dict);
    }
    for (i = 0; i < layout->known_count; i++) {
        Py_DECREF(layout->known[i]);
    }
}

/* --- the mark --- */

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
        if (st->bridge->versions(tensors, st->impl_offset, (size_t)n, versions, NULL,
                                 NULL) != 0) {
            return oomkit_bridge_failed("read a tensor");
        }
        for (i = from, n = 0; i < to; i++) {
            if (mark->items[i].is_tensor) {
                mark->items[i].version = versions[n++];
                mark->items[i].was_out = 0;
            }
        }
    }
    return 0;
}

PyObject *
oomkit_optimizer_attribute(PyObject *optimizer, PyObject *name)
{
    PyObject *own = oomkit_own_attribute(optimizer, name); /* owned, returned */

    return own != NULL || PyErr_Occurred() ? own : PyObject_GetAttr(optimizer, name);
}

/* Shallow copies of the groups. New reference or NULL. */
static PyObject *
mark_groups(const oomkit_owner *owner, PyObject *groups)
{
    PyObject *kept = oomkit_hyperparams_kept(owner, groups); /* owned, returned */
    OWNED PyObject *copies = NULL;
    Py_ssize_t i;

    if (kept != NULL) {
        return kept;
    }
    copies = PyList_New(0);
    for (i = 0; copies != NULL && PyList_Check(groups) && i < PyList_GET_SIZE(groups);
         i++) {
        PyObject *group = PyList_GET_ITEM(groups, i); /* borrowed */
        OWNED PyObject *copy = NULL;
        if (!PyDict_Check(group)) {
            continue;
        }
        copy = PyDict_Copy(group);
        if (copy == NULL || PyList_Append(copies, copy) < 0) {
            return NULL;
        }
    }
    return STEAL(copies);
}

/* A layout of now: the kept one, which serves one mark at a time, or a new one. NULL
 * with an exception. */
static oomkit_layout *
layout_now(oomkit_state *st, oomkit_owner *owner, PyObject *groups, PyObject *state)
{
    oomkit_layout *layout = owner == NULL ? NULL : owner->kept.layout, needed;

    if (layout != NULL) {
        owner->kept.layout = NULL;
    }
    while (!layout_holds(st, layout, groups, state)) {
        PyMem_Free(layout);
        layout_count(st, groups, state, &needed);
        layout = PyErr_Occurred() ? NULL : layout_make(&needed);
        if (layout == NULL || layout_fill(st, layout, groups, state) == 0) {
            return layout;
        }
        if (PyErr_Occurred()) {
            PyMem_Free(layout);
            return NULL;
        }
        layout->state.tag = 0; /* things have moved: once more */
    }
    return layout;
}

/* Holds all values of a mark that has its state. 0 or -1. */
static int
mark_layout(oomkit_state *st, oomkit_owner *owner, oomkit_optimizer_mark *mark,
            PyObject *groups)
{
    oomkit_layout *layout = layout_now(st, owner, groups, mark->state);

    if (layout == NULL) {
        return -1;
    }
    layout_hold(layout);
    mark->layout = layout;
    mark->items = layout->items;
    mark->count = layout->count;
    mark->known = layout->known;
    mark->known_count = layout->known_count;
    return mark_versions(st, mark);
}

static void
mark_clear(const oomkit_call *call, oomkit_optimizer_mark *mark)
{
    oomkit_layout *layout = mark->layout;
    PyObject **copies = mark->copies;
    oomkit_owner *owner; /* borrowed */
    Py_ssize_t i, count = mark->count;

    mark->count = mark->known_count = 0;
    mark->items = NULL;
    mark->known = NULL;
    mark->layout = NULL;
    mark->copies = NULL;
    for (i = 0; copies != NULL && i < count; i++) {
        Py_CLEAR(copies[i]);
    }
    PyMem_Free(copies);
    if (layout != NULL) {
        layout_let_go(layout);
        owner = oomkit_optimizer_among(call->parts, mark->optimizer);
        if (owner != NULL && owner->kept.layout == NULL) {
            owner->kept.layout = layout;
        } else {
            PyMem_Free(layout);
        }
    }
    Py_CLEAR(mark->groups);
    Py_CLEAR(mark->beside);
    Py_CLEAR(mark->state);
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

/* Everything of an optimizer as it is now. 0, or -1 and the mark is as good as empty.
 */
static int
mark_fill(oomkit_call *call, PyObject *optimizer, oomkit_optimizer_mark *mark)
{
    oomkit_state *st = call->st;
    oomkit_owner *owner = oomkit_optimizer_among(call->parts, optimizer); /* borrowed */
    OWNED PyObject *groups = NULL;

    memset(mark, 0, sizeof(*mark));
    mark->optimizer = Py_NewRef(optimizer);
    mark->attributes =
        oomkit_own_taken(optimizer, (PyTypeObject *)st->interceptor_type);
    groups = mark->attributes == NULL
                 ? NULL
                 : oomkit_optimizer_attribute(optimizer, st->str_param_groups);
    mark->groups = groups == NULL ? NULL : mark_groups(owner, groups);
    mark->state = mark->groups == NULL
                      ? NULL
                      : oomkit_optimizer_attribute(optimizer, st->str_state);
    if (mark->state != NULL && mark_layout(st, owner, mark, groups) == 0 &&
        oomkit_attributes_note(call, optimizer, mark->attributes) == 0) {
        return 0;
    }
    mark_clear(call, mark);
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
    if (mark_fill(call, optimizer, &fresh) < 0) {
        return -1;
    }
    at =
        mark_find(call, optimizer); /* again: what was asked may have run other steps */
    if (at < 0 && ARRAY_GROW(call->updating.marks, call->updating.count,
                             call->updating.room) < 0) {
        mark_clear(call, &fresh);
        return -1;
    }
    if (at < 0) {
        at = call->updating.count++;
        call->updating.marks[at] = fresh;
    } else {
        old = call->updating.marks[at];
        call->updating.marks[at] = fresh;
        mark_clear(call, &old);
    }
    *index = at;
    return 0;
}

void
oomkit_optimizers_release(oomkit_call *call)
{
    int i, count = call->updating.count;

    call->updating.count = 0;
    for (i = 0; i < count; i++) {
        mark_clear(call, &call->updating.marks[i]);
    }
    MEMORY_CLEAR(call->updating.marks);
    call->updating.room = 0;
}
