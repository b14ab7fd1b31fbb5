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

/* One block of memory. */
typedef struct oomkit_layout {
    oomkit_seen_dict state; /* tag 0: it cannot be used again */
    Py_ssize_t count, known_count, group_count, dict_count, held_count, tensor_count;
    Py_ssize_t room, known_room, group_room;
    oomkit_state_item *items;
    PyObject **known;
    oomkit_marked_group *groups;
    oomkit_seen_dict *dicts; /* those of the parameters' state */
    PyObject **held;         /* all these objects, the parameters of the groups first:
                                the mark that uses it has a reference to each */
    const void **tensors;    /* those among the values, and */
    uint32_t *versions;      /* theirs */
} oomkit_layout;

/* --- where everything lies --- */

/* Does each parameter of a group stand where it stood? *held moves on. An address may
 * be that of another object by now. */
static int
group_holds(oomkit_state *st, const oomkit_marked_group *was, PyObject *group,
            PyObject *const **held)
{
    Py_ssize_t i;

    if (group != was->group.dict || !PyDict_Check(group) ||
        oomkit_dict_tag(group) != was->group.tag ||
        PyList_GET_SIZE((PyObject *)was->params) != was->count) {
        return 0;
    }
    for (i = 0; i < was->count; i++) {
        PyObject *param = PyList_GET_ITEM((PyObject *)was->params, i); /* borrowed */
        if (param != *(*held)++ || !oomkit_tensor_check(st, param)) {
            return 0;
        }
    }
    return 1;
}

static int
layout_holds(oomkit_state *st, const oomkit_layout *layout, PyObject *groups,
             PyObject *state)
{
    PyObject *const *held; /* borrowed addresses */
    Py_ssize_t i;

    if (layout == NULL || layout->state.tag == 0 || state != layout->state.dict ||
        !PyDict_Check(state) || oomkit_dict_tag(state) != layout->state.tag ||
        !PyList_Check(groups) || PyList_GET_SIZE(groups) != layout->group_count) {
        return 0;
    }
    held = layout->held;
    for (i = 0; i < layout->group_count; i++) {
        if (!group_holds(st, &layout->groups[i], PyList_GET_ITEM(groups, i), &held)) {
            return 0;
        }
    }
    for (i = 0; i < layout->dict_count; i++) { /* alive: state is as it was */
        const oomkit_seen_dict *seen = &layout->dicts[i];
        if (oomkit_dict_tag((PyObject *)seen->dict) != seen->tag) {
            return 0;
        }
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
    const size_t room = (size_t)needed->room, known = (size_t)needed->known_room,
                 groups = (size_t)needed->group_room,
                 held = 2 * (room + known); /* values, keys; state and its keys */
    oomkit_layout *made = PyMem_Malloc(
        sizeof(*made) + room * sizeof(*made->items) + groups * sizeof(*made->groups) +
        known * sizeof(*made->dicts) + (known + held + room) * sizeof(void *) +
        room * sizeof(*made->versions));

    if (made == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    *made = *needed;
    made->items = (oomkit_state_item *)(made + 1);
    made->groups = (oomkit_marked_group *)(made->items + room);
    made->dicts = (oomkit_seen_dict *)(made->groups + groups);
    made->known = (PyObject **)(made->dicts + known);
    made->held = made->known + known;
    made->tensors = (const void **)(made->held + held);
    made->versions = (uint32_t *)(made->tensors + room);
    return made;
}

/* Appends one value; `dict` and `key` are NULL for a parameter itself. 0; -1: there are
 * more than were counted. */
static int
layout_add(oomkit_state *st, oomkit_layout *layout, PyObject *dict, PyObject *key,
           PyObject *value)
{
    oomkit_state_item *item = &layout->items[layout->count];

    if (layout->count == layout->room) {
        return -1;
    }
    layout->count++;
    *item = (oomkit_state_item){.value = value, .key = key, .dict = dict};
    layout->held[layout->held_count++] = value;
    if (oomkit_tensor_check(st, value)) {
        item->version = &layout->versions[layout->tensor_count];
        layout->tensors[layout->tensor_count++] = value;
    } else if (dict == NULL) {
        layout->state.tag = 0; /* a parameter that is none */
    }
    return 0;
}

/* The state of one parameter. The next one has the same keys as a rule: *like is where
 * the values of the one before begin. 0 or -1. */
static int
layout_add_dict(oomkit_state *st, oomkit_layout *layout, PyObject *values,
                Py_ssize_t *like)
{
    const Py_ssize_t first = layout->count;
    PyObject *key, *value; /* borrowed */
    Py_ssize_t at = 0;

    layout->dicts[layout->dict_count++] =
        (oomkit_seen_dict){values, oomkit_dict_tag(values)};
    layout->held[layout->held_count++] = values;
    if (PyDict_GET_SIZE(values) ==
        0) { /* so that what fills the empty dict is undone */
        return layout_add(st, layout, values, NULL, Py_None);
    }
    for (; PyDict_Next(values, &at, &key, &value); ++*like) {
        if (layout_add(st, layout, values, key, value) < 0) {
            return -1;
        }
        if (*like >= first || layout->items[*like].key != key) {
            layout->held[layout->held_count++] = key;
        }
    }
    *like = first;
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
    PyObject *param, *values; /* borrowed */
    Py_ssize_t i, at = 0, params, like;

    layout->state =
        (oomkit_seen_dict){state, PyDict_Check(state) ? oomkit_dict_tag(state) : 0};
    for (i = 0; PyList_Check(groups) && i < PyList_GET_SIZE(groups); i++) {
        if (layout_add_group(st, layout, PyList_GET_ITEM(groups, i)) < 0) {
            return -1;
        }
    }
    params = like = layout->count;
    for (i = 0; PyDict_Check(state) && PyDict_Next(state, &at, &param, &values); i++) {
        if (i == layout->known_room) {
            return -1;
        }
        layout->known[layout->known_count++] = param;
        if (i >= params || layout->held[i] != param) { /* else it is held as such */
            layout->held[layout->held_count++] = param;
        }
        if (PyDict_Check(values) && layout_add_dict(st, layout, values, &like) < 0) {
            return -1;
        }
    }
    return 0;
}

static void
layout_hold(const oomkit_layout *layout)
{
    Py_ssize_t i;

    for (i = 0; i < layout->held_count; i++) {
        Py_INCREF(layout->held[i]);
    }
}

/* The references go, the addresses stay. */
static void
layout_let_go(const oomkit_layout *layout)
{
    Py_ssize_t i;

    for (i = 0; i < layout->held_count; i++) {
        Py_DECREF(layout->held[i]);
    }
}

/* --- the mark --- */

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
    return st->bridge->versions(layout->tensors, st->impl_offset,
                                (size_t)layout->tensor_count, layout->versions, NULL,
                                NULL) == OOMKIT_OK
               ? 0
               : oomkit_bridge_failed("read a tensor");
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
    if (at < 0 && ARRAY_GROW_FIRST(call->updating.marks, call->updating.count,
                                   call->updating.room, call->updating.first) < 0) {
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
    ARRAY_FREE_FIRST(call->updating.marks, call->updating.room, call->updating.first);
}
