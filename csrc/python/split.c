/* The arguments of a repeat or of one micro-batch: has the batch moved since capture,
 * and the rebuilt and sliced values. */
#include "call.h"
#include "tensor.h"
#include "tree.h"

/* --- has it moved --- */

/* Puts a saved value back. The detached view shares storage and version, and may be
 * written to where the tensor itself requires grad. */
static int
check_restore(oomkit_state *st, oomkit_node *node, PyObject *saved)
{
    oomkit_tensor_facts facts;
    PyObject *view; /* owned */
    int written;

    view = PyObject_CallMethodNoArgs(node->object, st->str_detach);
    if (view == NULL) {
        return -1;
    }
    written = oomkit_tensor_write(st, view, saved);
    Py_DECREF(view);
    if (written < 0) {
        return -1;
    }
    if (oomkit_tensor_facts_get(st, node->object, 0, &facts) < 0) {
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
    PyObject *graph; /* owned */
    int result = 0;

    if (node->requires_grad || !facts->requires_grad) {
        return 0;
    }
    graph = PyObject_GetAttr(node->object, st->str_grad_fn);
    if (graph == NULL) {
        return -1;
    }
    if (graph == Py_None) {
        result = PyObject_SetAttr(node->object, st->str_requires_grad, Py_False) < 0 ||
                         PyObject_SetAttr(node->object, st->str_grad, Py_None) < 0
                     ? -1
                     : 0;
    }
    Py_DECREF(graph);
    return result;
}

static int
check_refuse(oomkit_state *st, const oomkit_batch *batch, PyObject *names,
             Py_ssize_t index)
{
    PyObject *path = oomkit_node_path(batch, names, index); /* owned */
    if (path == NULL) {
        return -1;
    }
    PyErr_Format(
        st->SplitError,
        "auto_batch cannot repeat the step: it changed %U in place; make a new "
        "tensor instead (x = x.div(255), not x.div_(255)) or give "
        "restore_batch=True",
        path);
    Py_DECREF(path);
    return -1;
}

int
oomkit_batch_check(oomkit_state *st, oomkit_batch *batch, PyObject *names)
{
    Py_ssize_t i, number = 0;

    for (i = 0; i < batch->count; i++) {
        oomkit_node *node = &batch->nodes[i];
        oomkit_tensor_facts facts;
        if (node->kind != OOMKIT_NODE_TENSOR) {
            continue;
        }
        if (oomkit_tensor_facts_get(st, node->object, 0, &facts) < 0) {
            return -1;
        }
        if (check_requires_grad(st, node, &facts) < 0) {
            return -1;
        }
        if (oomkit_tensor_mark(st, node->object, &facts) != node->version) {
            if (batch->saved == NULL) {
                return check_refuse(st, batch, names, i);
            }
            if (check_restore(st, node, PyList_GET_ITEM(batch->saved, number)) < 0) {
                return -1;
            }
        }
        number++;
    }
    return 0;
}

int
oomkit_batch_save(oomkit_state *st, oomkit_batch *batch)
{
    PyObject *saved, *copy; /* owned */
    Py_ssize_t i;
    int failed;

    if (batch->saved != NULL) {
        return 0;
    }
    saved = PyList_New(0);
    for (i = 0; saved != NULL && i < batch->count; i++) {
        if (batch->nodes[i].kind != OOMKIT_NODE_TENSOR) {
            continue;
        }
        copy = oomkit_host_copy(st, batch->nodes[i].object);
        failed = copy == NULL || PyList_Append(saved, copy) < 0;
        Py_XDECREF(copy);
        if (failed) {
            Py_CLEAR(saved);
        }
    }
    batch->saved = saved; /* stolen by batch */
    return saved == NULL ? -1 : 0;
}

/* --- building --- */

typedef struct build {
    oomkit_state *st;
    const oomkit_options *options;
    const oomkit_batch *batch;
    int64_t start, length;
    PyObject *numbers[3]; /* owned: dim, start, length for narrow() */
    int whole;            /* all rows: tensors are passed as they are */
} build;

static PyObject *
build_node(const build *b, Py_ssize_t *at, int sliced);

static PyObject *
build_narrow(const build *b, PyObject *tensor)
{
    PyObject *stack[4] = {tensor, b->numbers[0], b->numbers[1],
                          b->numbers[2]}; /* borrowed from the node and from build */
    return PyObject_VectorcallMethod(b->st->str_narrow, stack, 4, NULL);
}

/* A list of the wanted rows out of one that capture did not open. */
static PyObject *
build_closed_items(const build *b, PyObject *list)
{
    if (PyList_GET_SIZE(list) != b->batch->rows) {
        PyErr_Format(
            b->st->SplitError,
            "auto_batch cannot repeat the step: it changed the length of a list "
            "argument from %lld to %zd; make a new list instead",
            (long long)b->batch->rows, PyList_GET_SIZE(list));
        return NULL;
    }
    return PyList_GetSlice(list, (Py_ssize_t)b->start,
                           (Py_ssize_t)(b->start + b->length));
}

static PyObject *
build_dict(const build *b, Py_ssize_t *at, Py_ssize_t children, int sliced)
{
    PyObject *dict = PyDict_New(); /* owned */
    Py_ssize_t i;

    for (i = 0; dict != NULL && i < children; i++) {
        PyObject *key = b->batch->nodes[*at].key;    /* borrowed from the node */
        PyObject *value = build_node(b, at, sliced); /* owned */
        if (value == NULL || PyDict_SetItem(dict, key, value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(value);
    }
    return dict;
}

/* Children `from` .. `to` in a new list. */
static PyObject *
build_list(const build *b, Py_ssize_t *at, Py_ssize_t children, Py_ssize_t from,
           Py_ssize_t to, int sliced)
{
    PyObject *list = PyList_New(to - from); /* owned */
    Py_ssize_t i;

    for (i = 0; list != NULL && i < children; i++) {
        PyObject *value; /* stolen by PyList_SET_ITEM() */
        if (i < from || i >= to) {
            *at = oomkit_node_end(b->batch, *at);
            continue;
        }
        value = build_node(b, at, sliced);
        if (value == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i - from, value);
    }
    return list;
}

/* A tuple of the type of `like` (tuple or a named tuple) from a list, which is stolen.
 * As a named tuple's _make does, without its __new__. */
PyObject *
oomkit_tuple_like(PyObject *like, PyObject *list)
{
    PyObject *tuple, *args, *made; /* owned */

    tuple = PyList_AsTuple(list);
    Py_DECREF(list);
    if (tuple == NULL || Py_IS_TYPE(like, &PyTuple_Type)) {
        return tuple;
    }
    args = PyTuple_Pack(1, tuple);
    Py_DECREF(tuple);
    if (args == NULL) {
        return NULL;
    }
    made = PyTuple_Type.tp_new(Py_TYPE(like), args, NULL);
    Py_DECREF(args);
    return made;
}

/* One node with all that is below it; *at moves behind it. `sliced` is 0 inside an
 * element of a list of samples, and for the value that split= gets. New reference or
 * NULL. */
static PyObject *
build_node(const build *b, Py_ssize_t *at, int sliced)
{
    const oomkit_node *node = &b->batch->nodes[(*at)++];
    int items = sliced && !b->whole && node->split == OOMKIT_SPLIT_ITEMS;
    Py_ssize_t from = items ? (Py_ssize_t)b->start : 0;
    Py_ssize_t to = items ? (Py_ssize_t)(b->start + b->length) : node->children;
    PyObject *list; /* owned */

    switch (node->kind) {
    case OOMKIT_NODE_TENSOR:
        if (sliced && !b->whole && node->split == OOMKIT_SPLIT_NARROW) {
            return build_narrow(b, node->object);
        }
        return Py_NewRef(node->object);
    case OOMKIT_NODE_DICT:
        return build_dict(b, at, node->children, sliced);
    case OOMKIT_NODE_LIST:
    case OOMKIT_NODE_TUPLE:
        list = build_list(b, at, node->children, from, to, sliced && !items);
        if (list == NULL || node->kind == OOMKIT_NODE_LIST) {
            return list;
        }
        return oomkit_tuple_like(node->object, list);
    default:
        return items ? build_closed_items(b, node->object) : Py_NewRef(node->object);
    }
}

/* An argument that split= slices. */
static PyObject *
build_called(const build *b, Py_ssize_t at)
{
    PyObject *value = build_node(b, &at, 0); /* owned */
    PyObject *stack[3], *part;               /* owned: part */

    if (value == NULL || b->whole) {
        return value;
    }
    stack[0] = value;
    stack[1] = b->numbers[1];
    stack[2] = b->numbers[2];
    part = PyObject_Vectorcall(b->options->split, stack, 3, NULL);
    Py_DECREF(value);
    return part;
}

static PyObject *
build_argument(const build *b, Py_ssize_t argument, Py_ssize_t at)
{
    if (!oomkit_node_is_split(b->batch, at)) {
        /* The very object: the step may collect into it. */
        return Py_NewRef(b->batch->args[argument]);
    }
    return b->batch->nodes[at].split == OOMKIT_SPLIT_CALL ? build_called(b, at)
                                                          : build_node(b, &at, 1);
}

int
oomkit_batch_build(oomkit_state *st, const oomkit_options *options,
                   const oomkit_batch *batch, int64_t start, int64_t length,
                   PyObject **vector)
{
    build b = {st,
               options,
               batch,
               start,
               length,
               {PyLong_FromLongLong(options->dim), PyLong_FromLongLong(start),
                PyLong_FromLongLong(length)},
               start == 0 && length == batch->rows};
    Py_ssize_t argument = 0, at = 0;
    int result = -1;

    if (b.numbers[0] == NULL || b.numbers[1] == NULL || b.numbers[2] == NULL) {
        goto done;
    }
    for (; argument < batch->total; argument++) {
        vector[argument] = build_argument(&b, argument, at);
        if (vector[argument] == NULL) {
            goto done;
        }
        at = oomkit_node_end(batch, at);
    }
    result = 0;
done:
    while (result < 0 && argument > 0) {
        argument--;
        Py_CLEAR(vector[argument]);
    }
    Py_XDECREF(b.numbers[0]);
    Py_XDECREF(b.numbers[1]);
    Py_XDECREF(b.numbers[2]);
    return result;
}

PyObject *
oomkit_batch_argument(const oomkit_batch *batch, PyObject *const *vector)
{
    Py_ssize_t argument, at, count = 0;
    PyObject *found = NULL; /* borrowed from vector */
    PyObject *tuple;        /* owned */

    for (argument = 0, at = 0; argument < batch->total; argument++) {
        if (oomkit_node_is_split(batch, at)) {
            found = vector[argument];
            count++;
        }
        at = oomkit_node_end(batch, at);
    }
    if (count == 1) {
        return Py_NewRef(found);
    }
    tuple = PyTuple_New(count);
    count = 0;
    for (argument = 0, at = 0; tuple != NULL && argument < batch->total; argument++) {
        if (oomkit_node_is_split(batch, at)) {
            PyTuple_SET_ITEM(tuple, count++, Py_NewRef(vector[argument]));
        }
        at = oomkit_node_end(batch, at);
    }
    return tuple;
}
