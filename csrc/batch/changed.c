/* Has the batch moved since capture? Before the step runs again. */
#include "batch.h"
#include "../device/device.h"
#include "../py/modes.h"
#include "../core/status.h"
#include "../py/tensor.h"
#include "../tree/kinds.h"

int
oomkit_node_moved(oomkit_state *st, const oomkit_node *node)
{
    oomkit_tensor_facts facts;

    if (node->kind == OOMKIT_NODE_ARRAY) {
        return oomkit_array_moved(st, node);
    }
    if (node->kind != OOMKIT_NODE_TENSOR) {
        return 0;
    }
    if (oomkit_tensor_facts_get(st, node->object, 0, &facts) < 0) {
        return -1;
    }
    return oomkit_tensor_mark(st, node->object, &facts) != node->version;
}

int
oomkit_batch_moved(oomkit_state *st, const oomkit_batch *batch)
{
    Py_ssize_t i;
    int moved = 0;

    for (i = 0; i < batch->count && moved == 0; i++) {
        moved = oomkit_node_moved(st, &batch->nodes[i]);
    }
    return moved;
}

static int
node_is_marked(const oomkit_node *node)
{
    return node->kind == OOMKIT_NODE_TENSOR || node->kind == OOMKIT_NODE_ARRAY;
}

/* Puts a saved value back. The detached view shares storage and version, and may be
 * written to where the tensor itself requires grad. */
static int
check_restore(oomkit_state *st, oomkit_node *node, PyObject *saved)
{
    oomkit_tensor_facts facts;
    OWNED PyObject *view = PyObject_CallMethodNoArgs(node->object, st->str_detach);

    if (view == NULL || oomkit_tensor_write(st, view, saved) < 0 ||
        oomkit_tensor_facts_get(st, node->object, 0, &facts) < 0) {
        return -1;
    }
    node->version = oomkit_tensor_mark(st, node->object, &facts);
    return 0;
}

/* images.requires_grad_() of the failed attempt: a leaf that did not require grad has
 * no gradient of its own from before. 0 or -1. */
static int
check_requires_grad(oomkit_state *st, const oomkit_node *node,
                    const oomkit_tensor_facts *facts)
{
    OWNED PyObject *graph = NULL;

    if (node->requires_grad || !facts->requires_grad) {
        return 0;
    }
    graph = PyObject_GetAttr(node->object, st->str_grad_fn);
    if (graph == NULL) {
        return -1;
    }
    if (graph != Py_None) {
        return 0;
    }
    return PyObject_SetAttr(node->object, st->str_requires_grad, Py_False) < 0 ||
                   PyObject_SetAttr(node->object, st->str_grad, Py_None) < 0
               ? -1
               : 0;
}

static int
check_refuse(oomkit_state *st, const oomkit_batch *batch, PyObject *names,
             Py_ssize_t index)
{
    OWNED PyObject *path = oomkit_node_path(batch, names, index);

    if (path != NULL) {
        PyErr_Format(st->SplitError,
                     "auto_batch cannot repeat the step, because it changed %U in "
                     "place; make a new tensor instead (x = x.div(255), not "
                     "x.div_(255)) or pass restore_batch=True" SEE("batch-changed"),
                     path);
    }
    return -1;
}

/* An array's saved values put back. 0 or -1. */
static int
check_restore_array(PyObject *array, PyObject *saved)
{
    return PyObject_SetItem(array, Py_Ellipsis, saved);
}

/* --- of a batch that is not cut: the very arguments are passed again --- */

/* May the contents of something that capture has not opened change unseen? 1, 0 or -1.
 */
static int
is_closed_container(const oomkit_node *node, PyObject *const *kinds)
{
    int i, is = 0;

    for (i = 0; i < 3 && is == 0 && node->kind == OOMKIT_NODE_OTHER; i++) {
        is = PyObject_IsInstance(node->object, kinds[i]);
    }
    return is;
}

int
oomkit_batch_keep_whole(oomkit_batch *batch)
{
    const int64_t rows = oomkit_batch_rows(batch);
    OWNED PyObject *abc = PyImport_ImportModule("collections.abc");
    OWNED PyObject *mapping =
        abc ? PyObject_GetAttrString(abc, "MutableMapping") : NULL;
    OWNED PyObject *sequence =
        mapping ? PyObject_GetAttrString(abc, "MutableSequence") : NULL;
    OWNED PyObject *set = sequence ? PyObject_GetAttrString(abc, "MutableSet") : NULL;
    PyObject *const kinds[] = {mapping, sequence, set};
    Py_ssize_t i;
    int closed = set == NULL ? -1 : 0;

    for (i = 0; i < batch->count && closed == 0; i++) {
        closed = is_closed_container(&batch->nodes[i], kinds);
        batch->nodes[i].split = OOMKIT_SPLIT_WHOLE;
    }
    if (closed != 0) { /* the batch stays what its search has made of it */
        return closed < 0 ? -1 : 0;
    }
    batch->rows = rows > 0 ? rows : 1;
    batch->kept_whole = rows > 0 ? OOMKIT_BATCH_COUNTED : OOMKIT_BATCH_UNCOUNTED;
    batch->searched = 1;
    return 1;
}

/* The leaf() of the rules: what it is tells nothing here. */
static int
contents_leaf(void *Py_UNUSED(context), Py_ssize_t Py_UNUSED(at), int Py_UNUSED(kind))
{
    return 0;
}

/* Is this node the same value at the same place? 1, 0 or -1. */
static int
contents_same(const oomkit_node *was, const oomkit_node *now)
{
    if (was->object != now->object || was->children != now->children ||
        (was->key == NULL) != (now->key == NULL)) {
        return 0;
    }
    return was->key == NULL || was->key == now->key
               ? 1
               : PyObject_RichCompareBool(was->key, now->key, Py_EQ);
}

/* Which node is not what it was at capture? Containers hold the very objects. Its
 * number, batch->count for none, or -1. */
static Py_ssize_t
contents_moved(oomkit_state *st, const oomkit_batch *batch)
{
    const oomkit_tree_rules rules = {.depth = OOMKIT_CAPTURE_DEPTH,
                                     .longest = OOMKIT_CAPTURE_CONTAINER,
                                     .leaf = contents_leaf};
    oomkit_tree now = {0};
    Py_ssize_t at = 0, i;
    int same = 1;

    for (i = 0; i < batch->total && same >= 0; i++) {
        const int left_alone = batch->nodes[at].object == Py_None;
        same = oomkit_tree_flatten(st, &now, left_alone ? Py_None : batch->args[i],
                                   &rules) < 0
                   ? -1
                   : 1;
        at = oomkit_node_end(batch, at);
    }
    for (i = 0; i < batch->count && same > 0; i++) {
        same = i < now.count ? contents_same(&batch->nodes[i], &now.nodes[i]) : 0;
        i -= same <= 0;
    }
    oomkit_tree_clear(&now);
    return same < 0 ? -1 : i;
}

/* 0 or -1. */
static int
check_contents(oomkit_state *st, const oomkit_batch *batch, PyObject *names)
{
    const Py_ssize_t which = contents_moved(st, batch);
    OWNED PyObject *path = NULL;

    if (which < 0 || which == batch->count) {
        return which < 0 ? -1 : 0;
    }
    path = oomkit_node_path(batch, names, which);
    if (path != NULL) {
        PyErr_Format(
            st->SplitError,
            "auto_batch cannot repeat the step, because it changed %U, which is "
            "passed again as it is; make a new container in the step instead "
            "(batch = dict(batch))" SEE("batch-changed"),
            path);
    }
    return -1;
}

int
oomkit_batch_check(oomkit_state *st, oomkit_batch *batch, PyObject *names)
{
    Py_ssize_t i, number = 0;

    for (i = 0; i < batch->count; i++) {
        oomkit_node *node = &batch->nodes[i];
        oomkit_tensor_facts facts;
        PyObject *saved; /* borrowed from batch->saved */
        int moved;
        if (!node_is_marked(node)) {
            continue;
        }
        if (node->kind == OOMKIT_NODE_TENSOR &&
            (oomkit_tensor_facts_get(st, node->object, 0, &facts) < 0 ||
             check_requires_grad(st, node, &facts) < 0)) {
            return -1;
        }
        moved = oomkit_node_moved(st, node);
        if (moved < 0) {
            return -1;
        }
        if (moved) {
            if (batch->saved == NULL) {
                return check_refuse(st, batch, names, i);
            }
            saved = PyList_GET_ITEM(batch->saved, number);
            if ((node->kind == OOMKIT_NODE_ARRAY
                     ? check_restore_array(node->object, saved)
                     : check_restore(st, node, saved)) < 0) {
                return -1;
            }
        }
        number++;
    }
    return batch->kept_whole ? check_contents(st, batch, names) : 0;
}

/* A copy of a tensor on the host, of an array where it is. New reference or NULL. */
static PyObject *
save_copy(oomkit_state *st, const oomkit_node *node)
{
    return node->kind == OOMKIT_NODE_ARRAY
               ? PyObject_CallMethod(node->object, "copy", NULL)
               : oomkit_host_copy(st, node->object);
}

int
oomkit_batch_save(oomkit_state *st, oomkit_batch *batch)
{
    OWNED PyObject *saved = NULL;
    Py_ssize_t i;

    if (batch->saved != NULL) {
        return 0;
    }
    saved = PyList_New(0);
    for (i = 0; saved != NULL && i < batch->count; i++) {
        OWNED PyObject *copy = NULL;
        if (!node_is_marked(&batch->nodes[i])) {
            continue;
        }
        copy = save_copy(st, &batch->nodes[i]);
        if (copy == NULL || PyList_Append(saved, copy) < 0) {
            return -1;
        }
    }
    batch->saved = STEAL(saved);
    return batch->saved == NULL ? -1 : 0;
}
