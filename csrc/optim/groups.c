/* The groups of an optimizer at entry: which there were, their learning rates and other
 * plain values, and what was in their lists (of parameters, or of anything that the
 * step keeps there). Put back after a failure. */
#include "optim.h"
#include "../py/tensor.h"

/* What is noted at entry is a tuple, for a memo keeps one object of each owner. */
enum {
    AT_ENTRY_LIST = 0, /* optimizer.param_groups itself */
    AT_ENTRY_GROUPS,   /* tuple: what was in it */
    AT_ENTRY_COPIES,   /* list: copies of these */
    AT_ENTRY_LISTS,    /* tuple: the lists among all their values */
    AT_ENTRY_CONTENTS, /* tuple: a tuple for each, of what was in it */
    AT_ENTRY_SIZE
};

/* Seen in the values of one group. */
typedef struct group_values {
    oomkit_state *st;
    PyObject *lists; /* borrowed: a list that gets the lists; NULL: nobody asks */
    int tensors;     /* there are some */
} group_values;

static int
visit_value(PyObject *value, void *argument)
{
    group_values *seen = argument;

    if (oomkit_tensor_check(seen->st, value)) {
        seen->tensors = 1;
    } else if (PyList_Check(value) && seen->lists != NULL) {
        return PyList_Append(seen->lists, value);
    }
    return 0;
}

/* Copies of an optimizer's param_groups: learning rates and other plain values; tensors
 * among them (lr=torch.tensor(...)) by value, the parameters by reference. *plain goes
 * where there are any. */
static PyObject *
group_copy(oomkit_state *st, PyObject *group, PyObject *lists, int *plain)
{
    group_values seen = {st, lists, 0};
    PyObject *key, *value; /* borrowed */
    OWNED PyObject *copy = PyDict_Copy(group);
    Py_ssize_t at = 0;

    /* Asked as the collector asks: a fifth of PyDict_Next(). */
    if (copy == NULL || Py_TYPE(copy)->tp_traverse(copy, visit_value, &seen) < 0) {
        return NULL;
    }
    if (!seen.tensors) {
        return STEAL(copy);
    }
    *plain = 0;
    while (PyDict_Next(group, &at, &key, &value)) {
        OWNED PyObject *clone = NULL;
        if (!oomkit_tensor_check(st, value)) {
            continue;
        }
        clone = oomkit_host_copy(st, value);
        if (clone == NULL || PyDict_SetItem(copy, key, clone) < 0) {
            return NULL;
        }
    }
    return STEAL(copy);
}

static PyObject *
groups_copy(oomkit_state *st, PyObject *groups, PyObject *lists, int *plain)
{
    OWNED PyObject *copies = PyList_New(0);
    Py_ssize_t i;

    for (i = 0; copies != NULL && PyList_Check(groups) && i < PyList_GET_SIZE(groups);
         i++) {
        PyObject *group = PyList_GET_ITEM(groups, i); /* borrowed */
        OWNED PyObject *copy =
            PyDict_Check(group) ? group_copy(st, group, lists, plain) : PyDict_New();
        if (copy == NULL || PyList_Append(copies, copy) < 0) {
            return NULL;
        }
    }
    return STEAL(copies);
}

PyObject *
oomkit_groups_copy(oomkit_state *st, PyObject *groups)
{
    int plain = 1; /* nobody else's */

    return groups_copy(st, groups, NULL, &plain);
}

PyObject *
oomkit_hyperparams_copy(oomkit_state *st, PyObject *optimizer)
{
    OWNED PyObject *groups = PyObject_GetAttr(optimizer, st->str_param_groups);

    return groups == NULL ? NULL : oomkit_groups_copy(st, groups);
}

PyObject *
oomkit_hyperparams_copies(PyObject *entry)
{
    return PyTuple_GET_ITEM(entry, AT_ENTRY_COPIES);
}

/* Is this what was in it, by identity? */
static int
list_holds(PyObject *list, PyObject *content)
{
    const Py_ssize_t size = PyList_GET_SIZE(list);

    return size == PyTuple_GET_SIZE(content) &&
           (size == 0 ||
            memcmp(PySequence_Fast_ITEMS(list), PySequence_Fast_ITEMS(content),
                   (size_t)size * sizeof(PyObject *)) == 0);
}

/* --- at entry --- */

/* What was kept of these groups, with the values that they have now, borrowed; NULL. */
static PyObject *
values_kept(const oomkit_owner *owner, PyObject *groups)
{
    PyObject *entry = owner == NULL ? NULL : owner->kept.groups; /* borrowed */
    Py_ssize_t i;

    if (entry == NULL || groups != PyTuple_GET_ITEM(entry, AT_ENTRY_LIST) ||
        !list_holds(groups, PyTuple_GET_ITEM(entry, AT_ENTRY_GROUPS))) {
        return NULL;
    }
    for (i = 0; i < PyList_GET_SIZE(groups); i++) {
        const oomkit_seen_dict *seen = &owner->kept.seen[i];
        PyObject *group = PyList_GET_ITEM(groups, i); /* borrowed */
        if (group != seen->dict || !PyDict_Check(group) ||
            oomkit_dict_tag(group) != seen->tag) {
            return NULL;
        }
    }
    return entry;
}

/* And does it tell what is in their lists? New reference; NULL, never with an
 * exception. */
static PyObject *
entry_kept(const oomkit_owner *owner, PyObject *groups)
{
    PyObject *entry = values_kept(owner, groups); /* borrowed, as the next ones */
    PyObject *lists, *contents;
    Py_ssize_t i;

    if (entry == NULL) {
        return NULL;
    }
    lists = PyTuple_GET_ITEM(entry, AT_ENTRY_LISTS);
    contents = PyTuple_GET_ITEM(entry, AT_ENTRY_CONTENTS);
    for (i = 0; i < PyTuple_GET_SIZE(lists); i++) {
        if (!list_holds(PyTuple_GET_ITEM(lists, i), PyTuple_GET_ITEM(contents, i))) {
            return NULL;
        }
    }
    return Py_NewRef(entry);
}

PyObject *
oomkit_hyperparams_kept(const oomkit_owner *owner, PyObject *groups)
{
    PyObject *entry = values_kept(owner, groups); /* borrowed */

    return entry == NULL ? NULL : Py_NewRef(oomkit_hyperparams_copies(entry));
}

/* Keeps what was noted of groups without tensors until one has changed: most never do,
 * or where a scheduler sets a rate. What could not be kept is noted again. */
static void
entry_keep(oomkit_owner *owner, PyObject *entry)
{
    PyObject *groups = PyTuple_GET_ITEM(entry, AT_ENTRY_GROUPS); /* borrowed */
    const Py_ssize_t count = PyTuple_GET_SIZE(groups);
    oomkit_seen_dict *seen = PyMem_Realloc(
        owner->kept.seen, (size_t)(count > 0 ? count : 1) * sizeof(*seen));
    Py_ssize_t i;

    if (seen == NULL) {
        return;
    }
    owner->kept.seen = seen;
    for (i = 0; i < count; i++) {
        PyObject *group = PyTuple_GET_ITEM(groups, i); /* borrowed */
        const uint64_t tag = PyDict_Check(group) ? oomkit_dict_tag(group) : 0;
        if (tag == 0) {
            return;
        }
        seen[i] = (oomkit_seen_dict){group, tag};
    }
    owner->kept.groups = Py_NewRef(entry);
}

/* What is in each of the lists: the same tuples as `before` (NULL: there are none),
 * where nothing in them has changed. New tuple or NULL. */
static PyObject *
lists_contents(PyObject *lists, PyObject *before)
{
    PyObject *were = /* borrowed, as the next one */
        before == NULL ? NULL : PyTuple_GET_ITEM(before, AT_ENTRY_LISTS);
    PyObject *had = before == NULL ? NULL : PyTuple_GET_ITEM(before, AT_ENTRY_CONTENTS);
    OWNED PyObject *contents = PyTuple_New(PyTuple_GET_SIZE(lists));
    Py_ssize_t i;

    for (i = 0; contents != NULL && i < PyTuple_GET_SIZE(lists); i++) {
        PyObject *list = PyTuple_GET_ITEM(lists, i); /* borrowed */
        PyObject *content;                           /* owned, then by the tuple */
        if (were != NULL && i < PyTuple_GET_SIZE(were) &&
            list == PyTuple_GET_ITEM(were, i) &&
            list_holds(list, PyTuple_GET_ITEM(had, i))) {
            content = Py_NewRef(PyTuple_GET_ITEM(had, i));
        } else {
            content = PyList_AsTuple(list);
        }
        if (content == NULL) {
            return NULL;
        }
        PyTuple_SET_ITEM(contents, i, content);
    }
    return STEAL(contents);
}

/* What these groups are now; *plain goes where there are tensors among their values.
 * New reference or NULL. */
static PyObject *
entry_make(oomkit_state *st, PyObject *groups, PyObject *before, int *plain)
{
    OWNED PyObject *found = PyList_New(0), *copies = NULL, *lists = NULL;
    OWNED PyObject *contents = NULL, *items = NULL;

    copies = found == NULL ? NULL : groups_copy(st, groups, found, plain);
    lists = copies == NULL ? NULL : PyList_AsTuple(found);
    contents = lists == NULL ? NULL : lists_contents(lists, before);
    if (contents == NULL) {
        return NULL;
    }
    items = PyList_Check(groups) ? PyList_AsTuple(groups) : PyTuple_New(0);
    return items == NULL
               ? NULL
               : PyTuple_Pack(AT_ENTRY_SIZE, groups, items, copies, lists, contents);
}

PyObject *
oomkit_hyperparams_mark(const oomkit_call *call, PyObject *optimizer)
{
    OWNED PyObject *groups =
        oomkit_optimizer_attribute(optimizer, call->st->str_param_groups);
    oomkit_owner *owner = /* borrowed */
        oomkit_optimizer_among(call->parts, optimizer);
    OWNED PyObject *before = NULL;
    PyObject *entry; /* owned, returned */
    int plain = 1;

    if (groups == NULL) {
        return NULL;
    }
    entry = entry_kept(owner, groups);
    if (entry != NULL) {
        return entry;
    }
    if (owner != NULL) {
        before = owner->kept.groups;
        owner->kept.groups = NULL;
    }
    entry = entry_make(call->st, groups, before, &plain);
    if (entry != NULL && plain && owner != NULL && PyList_Check(groups) &&
        owner->kept.groups == NULL) {
        entry_keep(owner, entry);
    }
    return entry;
}

/* --- back --- */

/* Puts the values back; a tensor keeps its identity. */
static int
values_restore(oomkit_state *st, PyObject *group, PyObject *copy)
{
    PyObject *key, *was; /* borrowed */
    Py_ssize_t at = 0;

    while (PyDict_Next(copy, &at, &key, &was)) {
        PyObject *now = PyDict_GetItemWithError(group, key); /* borrowed */
        if (now == NULL && PyErr_Occurred()) {
            return -1;
        }
        if (now != NULL && oomkit_tensor_check(st, now) &&
            oomkit_tensor_check(st, was)) {
            OWNED PyObject *done = PyObject_CallMethodOneArg(now, st->str_copy, was);
            if (done == NULL) {
                return -1;
            }
        } else if (now != was && PyDict_SetItem(group, key, was) < 0) {
            return -1;
        }
    }
    return 0;
}

/* The copy of a group that stands at `at` now: of itself, or of the one that had the
 * same list of parameters (load_state_dict() makes new dictionaries). Borrowed; NULL,
 * perhaps with an exception: it was not there. */
static PyObject *
copy_of(const oomkit_state *st, PyObject *entry, PyObject *group, Py_ssize_t at)
{
    PyObject *groups = PyTuple_GET_ITEM(entry, AT_ENTRY_GROUPS); /* borrowed, as all */
    PyObject *copies = oomkit_hyperparams_copies(entry), *params;
    const Py_ssize_t count = Py_MIN(PyTuple_GET_SIZE(groups), PyList_GET_SIZE(copies));
    Py_ssize_t i;

    if (at < count && group == PyTuple_GET_ITEM(groups, at)) {
        return PyList_GET_ITEM(copies, at);
    }
    for (i = 0; i < count; i++) {
        if (group == PyTuple_GET_ITEM(groups, i)) {
            return PyList_GET_ITEM(copies, i);
        }
    }
    params = PyDict_GetItemWithError(group, st->str_params);
    for (i = 0; params != NULL && i < count; i++) {
        PyObject *copy = PyList_GET_ITEM(copies, i);
        PyObject *had = PyDict_GetItemWithError(copy, st->str_params);
        if (had == params || (had == NULL && PyErr_Occurred())) {
            return had == params ? copy : NULL;
        }
    }
    return NULL;
}

int
oomkit_hyperparams_again(oomkit_state *st, PyObject *optimizer, PyObject *entry)
{
    OWNED PyObject *groups = PyObject_GetAttr(optimizer, st->str_param_groups);
    Py_ssize_t i;

    if (groups == NULL) {
        return -1;
    }
    for (i = 0; PyList_Check(groups) && i < PyList_GET_SIZE(groups); i++) {
        OWNED PyObject *group = Py_NewRef(PyList_GET_ITEM(groups, i));
        PyObject *copy = /* borrowed */
            PyDict_Check(group) ? copy_of(st, entry, group, i) : NULL;
        if (copy == NULL ? PyErr_Occurred() != NULL
                         : values_restore(st, group, copy) < 0) {
            return -1;
        }
    }
    return 0;
}

/* The list has what was in it. 0 or -1. */
static int
list_restore(PyObject *list, PyObject *content)
{
    return list_holds(list, content)
               ? 0
               : PyList_SetSlice(list, 0, PY_SSIZE_T_MAX, content);
}

/* Takes out what the attempt has added. 0 or -1. */
static int
group_remove_new(PyObject *group, PyObject *copy)
{
    OWNED PyObject *keys = NULL;
    Py_ssize_t i;

    if (PyDict_GET_SIZE(group) == PyDict_GET_SIZE(copy)) {
        return 0; /* all of the copy's are there */
    }
    keys = PyDict_Keys(group);
    for (i = 0; keys != NULL && i < PyList_GET_SIZE(keys); i++) {
        PyObject *key = PyList_GET_ITEM(keys, i); /* borrowed */
        int was = PyDict_Contains(copy, key);
        if (was < 0 || (was == 0 && PyDict_DelItem(group, key) < 0)) {
            return -1;
        }
    }
    return keys == NULL ? -1 : 0;
}

/* The optimizer has its list again, where it is an attribute of its own, with the
 * groups that were in it. 0 or -1. */
static int
groups_restore(const oomkit_state *st, PyObject *optimizer, PyObject *entry)
{
    PyObject *list = PyTuple_GET_ITEM(entry, AT_ENTRY_LIST); /* borrowed */
    OWNED PyObject *own = oomkit_own_attribute(optimizer, st->str_param_groups);

    if ((own == NULL && PyErr_Occurred()) ||
        (own != NULL && own != list &&
         oomkit_own_attribute_set(optimizer, st->str_param_groups, list) < 0)) {
        return -1;
    }
    return PyList_Check(list)
               ? list_restore(list, PyTuple_GET_ITEM(entry, AT_ENTRY_GROUPS))
               : 0;
}

int
oomkit_groups_grew(const oomkit_state *st, PyObject *object, PyObject *entry)
{
    return PyObject_TypeCheck(object, (PyTypeObject *)st->Optimizer) &&
           PyList_Check(PyTuple_GET_ITEM(entry, AT_ENTRY_LIST)) &&
           PyList_GET_SIZE(PyTuple_GET_ITEM(entry, AT_ENTRY_LIST)) >
               PyTuple_GET_SIZE(PyTuple_GET_ITEM(entry, AT_ENTRY_GROUPS));
}

int
oomkit_hyperparams_restore(oomkit_state *st, PyObject *optimizer, PyObject *entry)
{
    PyObject *groups = PyTuple_GET_ITEM(entry, AT_ENTRY_GROUPS); /* borrowed, as all */
    PyObject *copies = oomkit_hyperparams_copies(entry);
    PyObject *lists = PyTuple_GET_ITEM(entry, AT_ENTRY_LISTS);
    PyObject *contents = PyTuple_GET_ITEM(entry, AT_ENTRY_CONTENTS);
    Py_ssize_t i;

    if (groups_restore(st, optimizer, entry) < 0 ||
        oomkit_hyperparams_again(st, optimizer, entry) < 0) {
        return -1;
    }
    for (i = 0; i < PyTuple_GET_SIZE(groups) && i < PyList_GET_SIZE(copies); i++) {
        if (PyDict_Check(PyTuple_GET_ITEM(groups, i)) &&
            group_remove_new(PyTuple_GET_ITEM(groups, i), PyList_GET_ITEM(copies, i)) <
                0) {
            return -1;
        }
    }
    for (i = 0; i < PyTuple_GET_SIZE(lists); i++) {
        if (list_restore(PyTuple_GET_ITEM(lists, i), PyTuple_GET_ITEM(contents, i)) <
            0) {
            return -1;
        }
    }
    return 0;
}
