/* From the table of a site to the places in this call, and marks that outlive it. */
#include "marks.h"
#include "../py/tensor.h"

/* What one of the call's arguments is. New reference, or NULL without an exception. */
static PyObject *
argument_of(const oomkit_call *call, const oomkit_plain_node *node)
{
    Py_ssize_t n = PyVectorcall_NARGS(call->given.nargsf), i;

    if (node->kind == OOMKIT_PLAIN_ARGUMENT) {
        i = PyLong_AsSsize_t(node->key);
        return i >= 0 && i < n ? Py_NewRef(call->given.args[i]) : NULL;
    }
    for (i = 0;
         call->given.kwnames != NULL && i < PyTuple_GET_SIZE(call->given.kwnames);
         i++) {
        PyObject *name = PyTuple_GET_ITEM(call->given.kwnames, i); /* borrowed */
        if (name == node->key || PyUnicode_Compare(name, node->key) == 0) {
            return Py_NewRef(call->given.args[n + i]);
        }
    }
    return NULL;
}

/* Where a node lies (*at, owned) and what is there (*value, owned, or NULL). 0 or -1.
 */
static int
node_read(const oomkit_call *call, const oomkit_plain_node *node, PyObject *parent,
          oomkit_at *at, PyObject **value)
{
    memset(at, 0, sizeof(*at));
    *value = NULL;
    switch (node->kind) {
    case OOMKIT_PLAIN_OBJECT:
        *value = oomkit_reference_get(node->key);
        return 0;
    case OOMKIT_PLAIN_CELL:
        *at = (oomkit_at){Py_NewRef(node->key), NULL, OOMKIT_AT_CELL};
        return oomkit_at_read(at, value);
    case OOMKIT_PLAIN_SWITCH:
        *at = (oomkit_at){Py_NewRef(node->key), NULL, OOMKIT_AT_SWITCH};
        return oomkit_at_read(at, value);
    case OOMKIT_PLAIN_ATTRIBUTE:
    case OOMKIT_PLAIN_ITEM:
        if (parent == NULL) {
            return 0;
        }
        if ((node->kind == OOMKIT_PLAIN_ATTRIBUTE
                 ? oomkit_at_attribute(call->st, parent, node->key, at)
                 : oomkit_at_item(parent, node->key, at)) < 0) {
            return -1;
        }
        return oomkit_at_read(at, value);
    default:
        *value = argument_of(call, node);
        return 0;
    }
}

#define NEAR 32

int
oomkit_plain_walk(oomkit_call *call, const oomkit_plain_site *site,
                  int (*visit)(void *argument, Py_ssize_t node, oomkit_at *at,
                               PyObject *value),
                  void *argument)
{
    PyObject *near[NEAR];     /* owned, or NULL */
    PyObject **values = near; /* of the nodes so far */
    Py_ssize_t i, reached = 0;
    int result = 0;

    if (site->count > NEAR) {
        values = PyMem_Malloc((size_t)site->count * sizeof(*values));
        if (values == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    for (i = 0; result == 0 && i < site->count; i++) {
        const oomkit_plain_node *node = &site->nodes[i];
        oomkit_at at;
        result = node_read(call, node, node->parent < 0 ? NULL : values[node->parent],
                           &at, &values[i]);
        reached = i + 1;
        if (result == 0) {
            result = visit(argument, i, &at, values[i]);
        }
        oomkit_at_clear(&at);
    }
    for (i = 0; i < reached; i++) {
        Py_XDECREF(values[i]);
    }
    if (values != near) {
        PyMem_Free(values);
    }
    return result;
}

/* --- marks that wait for the caller's backward --- */

/* Can nothing lead from it to a loss? */
static int
is_leaf(const oomkit_state *st, const oomkit_held *held)
{
    return held->kind != OOMKIT_HELD_STRONG || oomkit_is_plain(held->value) ||
           oomkit_tensor_check(st, held->value);
}

/* The collector does not see who owns them (a node of a graph): nothing that leads to a
 * loss may be held, for it would hold itself. */
static void
slim(const oomkit_state *st, oomkit_plain_mark *mark)
{
    oomkit_content *content = &mark->content;
    Py_ssize_t i;
    int keep = mark->inside ? content->kind == OOMKIT_CONTENT_TENSOR : 1;

    oomkit_at_clear(&mark->at); /* looked for again */
    if (mark->bound && !is_leaf(st, &mark->old)) {
        mark->bound = 0;
        oomkit_held_clear(&mark->old);
    }
    for (i = 0; keep && content->items != NULL && i < content->count; i++) {
        keep = is_leaf(st, &content->items[i]) &&
               (content->keys == NULL || oomkit_is_plain(content->keys[i]));
    }
    if (!keep) {
        oomkit_content_clear(content);
    } else if (!is_leaf(st, &content->target)) {
        Py_CLEAR(content->target.value);
        content->target.kind = OOMKIT_HELD_ADDRESS;
    }
}

int
oomkit_plain_slim(const oomkit_state *st, oomkit_savepoint *savepoint)
{
    oomkit_plain *plain = savepoint->plain;
    Py_ssize_t i;

    for (i = 0; plain != NULL && i < plain->entry.count; i++) {
        slim(st, &plain->entry.items[i]);
    }
    return 0;
}

static int
find_again(void *argument, Py_ssize_t node, oomkit_at *at, PyObject *Py_UNUSED(value))
{
    oomkit_plain_marks *marks = argument;
    Py_ssize_t i;

    for (i = 0; i < marks->count && at->kind != OOMKIT_AT_NOTHING; i++) {
        oomkit_plain_mark *mark = &marks->items[i];
        if (mark->node == node && !mark->inside && mark->at.kind == OOMKIT_AT_NOTHING) {
            mark->at = *at;
            memset(at, 0, sizeof(*at));
        }
    }
    return 0;
}

int
oomkit_plain_find_again(oomkit_call *call)
{
    oomkit_plain *plain = call->entry.plain;

    return plain == NULL || !plain->entry.taken
               ? 0
               : oomkit_plain_walk(call, plain->site, find_again, &plain->entry);
}

/* --- what could not be put back --- */

/* Those of `lost` (owned set; taken) that were not named yet, as one str; they are now.
 * New reference; NULL, perhaps without an exception. */
static PyObject *
lost_names(oomkit_plain_site *site, PyObject *lost)
{
    OWNED PyObject *names = PyNumber_Subtract(lost, site->said);
    OWNED PyObject *comma = NULL, *text = NULL, *done = NULL;

    Py_DECREF(lost);
    if (names == NULL || PySet_GET_SIZE(names) == 0) {
        return NULL;
    }
    Py_SETREF(names, PySequence_List(names));
    comma = names == NULL ? NULL : PyUnicode_FromString(", ");
    if (comma == NULL || PyList_Sort(names) < 0) {
        return NULL;
    }
    text = PyUnicode_Join(comma, names);
    done = PyObject_CallMethod(site->said, "update", "O", names);
    return done == NULL ? NULL : STEAL(text);
}

int
oomkit_plain_say(oomkit_call *call)
{
    OWNED PyObject *text = NULL;

    if (call->entry.plain == NULL || call->entry.plain->lost == NULL) {
        return 0;
    }
    text = lost_names(call->entry.plain->site, STEAL(call->entry.plain->lost));
    if (text == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    return oomkit_warn(
        call->st->OomkitWarning, 1,
        "oomkit: an attempt of %U ran out of memory, and its change of %U could not be "
        "undone, because it is too large to copy before every call; it may contain a "
        "part of this batch. Warned once; later calls copy it" SEE(
            "state-not-restored"),
        call->options->label, text);
}
