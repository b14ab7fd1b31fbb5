/* The arguments of one micro-batch: containers made anew, their leaves sliced. */
#include "batch.h"
#include "../py/tensor.h"

typedef struct build {
    oomkit_state *st;
    const oomkit_options *options;
    const oomkit_batch *batch;
    int64_t start, length, dim;
    PyObject *numbers[3]; /* owned: dim, start, length for narrow() */
    int whole;            /* all rows: tensors are passed as they are */
    PyObject **made;      /* owned array of values borrowed from what is being built: by
                             node, for those that are the same again; or NULL */
} build;

static PyObject *
build_node(const build *b, Py_ssize_t *at, int sliced);

static PyObject *
build_narrow(const build *b, PyObject *tensor)
{
    PyObject *stack[4] = {tensor, b->numbers[0], b->numbers[1],
                          b->numbers[2]}; /* borrowed from the node and from build */
    oomkit_tensor_facts facts;

    if (oomkit_tensor_facts_get(b->st, tensor, b->dim, &facts) < 0) {
        return NULL;
    }
    /* A sparse tensor has no views. */
    return PyObject_VectorcallMethod(
        facts.is_strided ? b->st->str_narrow : b->st->str_narrow_copy, stack, 4, NULL);
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
    OWNED PyObject *dict = PyDict_New();
    Py_ssize_t i;

    for (i = 0; dict != NULL && i < children; i++) {
        PyObject *key = b->batch->nodes[*at].key; /* borrowed from the node */
        OWNED PyObject *value = build_node(b, at, sliced);
        if (value == NULL || PyDict_SetItem(dict, key, value) < 0) {
            return NULL;
        }
    }
    return STEAL(dict);
}

/* Children `from` .. `to` in a new list. */
static PyObject *
build_list(const build *b, Py_ssize_t *at, Py_ssize_t children, Py_ssize_t from,
           Py_ssize_t to, int sliced)
{
    OWNED PyObject *list = PyList_New(to - from);
    Py_ssize_t i;

    for (i = 0; list != NULL && i < children; i++) {
        PyObject *value; /* stolen by PyList_SET_ITEM() */
        if (i < from || i >= to) {
            *at = oomkit_node_end(b->batch, *at);
            continue;
        }
        value = build_node(b, at, sliced);
        if (value == NULL) {
            return NULL;
        }
        PyList_SET_ITEM(list, i - from, value);
    }
    return STEAL(list);
}

/* The children of an object, and the object anew. */
static PyObject *
build_object(const build *b, Py_ssize_t at, int sliced)
{
    Py_ssize_t children = b->batch->nodes[at].children, inner = at + 1, i;
    PyObject **values =
        PyMem_Calloc((size_t)children + 1, sizeof(PyObject *)); /* owned, of owned */
    PyObject *made = NULL;                                      /* owned */

    if (values == NULL) {
        return PyErr_NoMemory();
    }
    for (i = 0; i < children; i++) {
        values[i] = build_node(b, &inner, sliced);
        if (values[i] == NULL) {
            break;
        }
    }
    if (i == children) {
        made = oomkit_object_build(b->st, b->batch, at, values);
    }
    while (i > 0) {
        Py_DECREF(values[--i]);
    }
    PyMem_Free(values);
    return made;
}

/* A tensor, an array, or what is closed. */
static PyObject *
build_leaf(const build *b, const oomkit_node *node, int narrow, int items)
{
    if (narrow && node->kind == OOMKIT_NODE_TENSOR) {
        return build_narrow(b, node->object);
    }
    if (narrow) {
        return oomkit_array_slice(b->st, node->object, b->dim, b->numbers[1],
                                  b->start + b->length);
    }
    return items ? build_closed_items(b, node->object) : Py_NewRef(node->object);
}

/* build_node() without what is built already, and without splitters. */
static PyObject *
build_plain(const build *b, Py_ssize_t *at, int sliced)
{
    Py_ssize_t here = (*at)++;
    const oomkit_node *node = &b->batch->nodes[here];
    int items = sliced && !b->whole && node->split == OOMKIT_SPLIT_ITEMS;
    int narrow = sliced && !b->whole && node->split == OOMKIT_SPLIT_NARROW;
    Py_ssize_t from = items ? (Py_ssize_t)b->start : 0;
    Py_ssize_t to = items ? (Py_ssize_t)(b->start + b->length) : node->children;
    PyObject *list; /* owned */

    switch (node->kind) {
    case OOMKIT_NODE_DICT:
        return build_dict(b, at, node->children, sliced);
    case OOMKIT_NODE_OBJECT:
        *at = oomkit_node_end(b->batch, here);
        return build_object(b, here, sliced);
    case OOMKIT_NODE_LIST:
    case OOMKIT_NODE_TUPLE:
        list = build_list(b, at, node->children, from, to, sliced && !items);
        if (list == NULL || node->kind == OOMKIT_NODE_LIST) {
            return list;
        }
        return oomkit_tuple_like(node->object, list);
    default:
        return build_leaf(b, node, narrow, items);
    }
}

/* One node with all that is below it; *at moves behind it. `sliced` is 0 inside an
 * element of a list of samples, and for the value that split= gets. What is the same
 * object at two places is one object again. New reference or NULL. */
static PyObject *
build_node(const build *b, Py_ssize_t *at, int sliced)
{
    Py_ssize_t here = *at;
    const oomkit_node *node = &b->batch->nodes[here];
    PyObject *made; /* owned */

    if (sliced && b->made != NULL && node->same >= 0 && b->made[node->same] != NULL) {
        *at = oomkit_node_end(b->batch, here);
        return Py_NewRef(b->made[node->same]);
    }
    made = build_plain(b, at, sliced);
    if (made != NULL && sliced && !b->whole && node->split == OOMKIT_SPLIT_CUSTOM) {
        Py_SETREF(made, oomkit_splitter_cut(b->st, made, b->start, b->length));
    }
    if (sliced && b->made != NULL) {
        b->made[here] = made;
    }
    return made;
}

PyObject *
oomkit_node_whole(oomkit_state *st, const oomkit_batch *batch, Py_ssize_t index)
{
    build b = {.st = st, .batch = batch, .whole = 1};
    return build_node(&b, &index, 0);
}

/* An argument that split= slices. */
static PyObject *
build_called(const build *b, Py_ssize_t at)
{
    OWNED PyObject *value = build_node(b, &at, 0);
    PyObject *stack[3] = {value, b->numbers[1], b->numbers[2]}; /* borrowed */

    if (value == NULL || b->whole) {
        return STEAL(value);
    }
    return PyObject_Vectorcall(b->options->split, stack, 3, NULL);
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

/* The dimension of the argument's samples, as a number too. 0 or -1. */
static int
build_dim(build *b, Py_ssize_t argument)
{
    b->dim = oomkit_argument_dim(b->options, b->batch, argument);
    if (b->dim == INT64_MIN) {
        return -1;
    }
    Py_XSETREF(b->numbers[0], PyLong_FromLongLong(b->dim));
    return b->numbers[0] == NULL ? -1 : 0;
}

int
oomkit_batch_build(oomkit_state *st, const oomkit_options *options,
                   const oomkit_batch *batch, int64_t start, int64_t length,
                   PyObject **vector)
{
    build b = {
        .st = st,
        .options = options,
        .batch = batch,
        .start = start,
        .length = length,
        .numbers = {NULL, PyLong_FromLongLong(start), PyLong_FromLongLong(length)},
        .whole = start == 0 && length == batch->rows && !batch->views,
        .made = batch->twins ? PyMem_Calloc((size_t)batch->count, sizeof(PyObject *))
                             : NULL};
    Py_ssize_t argument = 0, at = 0;
    int result = -1;

    if (b.numbers[1] == NULL || b.numbers[2] == NULL) {
        goto done;
    }
    if (batch->twins && b.made == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (; argument < batch->total; argument++) {
        vector[argument] =
            build_dim(&b, argument) < 0 ? NULL : build_argument(&b, argument, at);
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
    PyMem_Free(b.made);
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
