/* Taking the arguments of a call apart, and what a site learns from them. On the path
 * of every healthy call: no Python object is made here. */
#include "flatten.h"
#include "tree.h"
#include "../py/tensor.h"
#include "../core/status.h"

#include <stddef.h>
#include <string.h>

#define DEPTH_LIMIT OOMKIT_CAPTURE_DEPTH
#define CONTAINER_LIMIT OOMKIT_CAPTURE_CONTAINER
#define SIZES_FACTOR 0x9e3779b97f4a7c15u
#define NODE_LIMIT 65536 /* a list that holds itself ends here */

typedef oomkit_capture capture;

static int
capture_grow(oomkit_batch *batch)
{
    Py_ssize_t room = batch->room * 4;
    oomkit_node *inline_nodes = batch->inline_nodes;
    oomkit_node *grown =
        PyMem_Realloc(batch->nodes == inline_nodes ? NULL : batch->nodes,
                      (size_t)room * sizeof(oomkit_node));
    if (grown == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (batch->nodes == inline_nodes) {
        memcpy(grown, inline_nodes, (size_t)batch->count * sizeof(oomkit_node));
    }
    batch->nodes = grown;
    batch->room = room;
    return 0;
}

/* The facts that a node needs: by the bridge alone where it answers, for the general
 * way also asks for is_leaf. 1 known, 0 not a tensor that can be split, -1 error. */
static int
capture_facts(capture *c, PyObject *tensor, oomkit_tensor_facts *facts)
{
    const oomkit_bridge *bridge = c->st->bridge;
    if (bridge != NULL &&
        bridge->tensor_facts(tensor, c->st->impl_offset, c->dim, facts) == OOMKIT_OK) {
        return 1;
    }
    if (oomkit_tensor_facts_get(c->st, tensor, c->dim, facts) == 0) {
        return 1;
    }
    if (PyErr_ExceptionMatches(PyExc_MemoryError) ||
        !PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyErr_Clear(); /* a subclass that hides its shape: passed whole, as it is */
    return 0;
}

static int
capture_tensor(capture *c, Py_ssize_t at)
{
    oomkit_batch *batch = c->batch;
    oomkit_node *node = &batch->nodes[at];
    oomkit_tensor_facts facts;
    int known = capture_facts(c, node->object, &facts);
    if (known <= 0) {
        return known;
    }
    node = &batch->nodes[at];
    node->kind = OOMKIT_NODE_TENSOR;
    node->rows = facts.size;
    node->shape_hash = facts.shape_hash;
    node->requires_grad = (uint8_t)(facts.requires_grad != 0);
    node->version = oomkit_tensor_mark(c->st, node->object, &facts);
    node->device_type = (int8_t)facts.device_type;
    node->device_index = (int8_t)facts.device_index;
    batch->sizes = (batch->sizes ^ (uint64_t)facts.size) * SIZES_FACTOR;
    if (batch->device_type < 0) {
        batch->device_type = facts.device_type;
        batch->device_index = facts.device_index;
    }
    return 0;
}

static int
capture_dict(capture *c, Py_ssize_t at, PyObject *dict, int depth)
{
    PyObject *key, *value; /* borrowed from dict */
    Py_ssize_t position = 0, children = 0;

    c->batch->nodes[at].kind = OOMKIT_NODE_DICT;
    while (PyDict_Next(dict, &position, &key, &value)) {
        if (oomkit_capture_value(c, value, key, 0, depth + 1) < 0) {
            return -1;
        }
        children++;
        c->batch->nodes[at].children = children;
    }
    return 0;
}

static int
capture_list(capture *c, Py_ssize_t at, PyObject *list, int depth)
{
    Py_ssize_t i;

    c->batch->nodes[at].kind = OOMKIT_NODE_LIST;
    for (i = 0; i < PyList_GET_SIZE(list); i++) {
        if (oomkit_capture_value(c, PyList_GET_ITEM(list, i), NULL, 0, depth + 1) < 0) {
            return -1;
        }
        c->batch->nodes[at].children = i + 1;
    }
    return 0;
}

static int
capture_tuple(capture *c, Py_ssize_t at, PyObject *tuple, int depth)
{
    Py_ssize_t i;

    c->batch->nodes[at].kind = OOMKIT_NODE_TUPLE;
    for (i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        if (oomkit_capture_value(c, PyTuple_GET_ITEM(tuple, i), NULL, 0, depth + 1) <
            0) {
            return -1;
        }
        c->batch->nodes[at].children = i + 1;
    }
    return 0;
}

/* The rows of a PackedSequence, whose nodes these are, without Python code: the first
 * of its batch sizes. -1 where they cannot be read. */
static int64_t
packed_rows(const capture *c, Py_ssize_t at)
{
    const oomkit_bridge *bridge = c->st->bridge;
    Py_ssize_t sizes = oomkit_node_end(c->batch, at + 1);
    oomkit_tensor_facts facts;
    OWNED_MEMORY int64_t *values = NULL;

    if (bridge == NULL || c->batch->nodes[at].children < 2 ||
        c->batch->nodes[sizes].kind != OOMKIT_NODE_TENSOR ||
        bridge->tensor_facts(c->batch->nodes[sizes].object, c->st->impl_offset, 0,
                             &facts) != OOMKIT_OK ||
        facts.ndim != 1 || facts.size < 1 ||
        facts.bytes != (uint64_t)facts.size * sizeof(int64_t)) {
        return -1;
    }
    values = PyMem_Malloc((size_t)facts.bytes);
    return values != NULL &&
                   bridge->bytes_get(c->batch->nodes[sizes].object, c->st->impl_offset,
                                     values, facts.bytes) == OOMKIT_OK
               ? values[0]
               : -1;
}

/* What a registered splitter slices: what is in it is marked, but gives no rows. */
static void
capture_hide(capture *c, Py_ssize_t at, int kind)
{
    oomkit_batch *batch = c->batch;
    int64_t rows = (kind & OOMKIT_KIND_PACKED) != 0 ? packed_rows(c, at) : -1;
    Py_ssize_t i;

    for (i = at; i < batch->count; i++) {
        batch->nodes[i].rows = -1;
    }
    batch->nodes[at].rows = rows;
    batch->nodes[at].flags |= OOMKIT_NODE_CUSTOM;
}

/* Anything that is neither a plain tensor nor an exact container. */
static int
capture_other(capture *c, Py_ssize_t at, PyObject *object, int depth)
{
    PyTypeObject *type = Py_TYPE(object);
    uint64_t sizes = c->batch->sizes;
    int kind, result = 0;

    if (object == Py_None || type == &PyLong_Type || type == &PyFloat_Type ||
        type == &PyUnicode_Type || type == &PyBool_Type) {
        return 0;
    }
    kind = oomkit_kind_of(c->st, type);
    switch (kind & OOMKIT_KIND_MASK) {
    case OOMKIT_KIND_TENSOR:
        result = capture_tensor(c, at);
        break;
    case OOMKIT_KIND_TUPLE:
        result = depth < DEPTH_LIMIT && PyTuple_GET_SIZE(object) <= CONTAINER_LIMIT
                     ? capture_tuple(c, at, object, depth)
                     : 0;
        break;
    case OOMKIT_KIND_ARRAY:
        result = oomkit_capture_array(c, at, object);
        c->batch->sizes = (sizes ^ (uint64_t)c->batch->nodes[at].rows) * SIZES_FACTOR;
        break;
    case OOMKIT_KIND_OBJECT:
        result = depth < DEPTH_LIMIT
                     ? oomkit_capture_object(c, at, object,
                                             (kind & OOMKIT_KIND_CUSTOM) != 0, depth)
                     : 0;
        break;
    default:
        break;
    }
    if (result == 0 && (kind & OOMKIT_KIND_CUSTOM) != 0) {
        capture_hide(c, at, kind);
        c->batch->sizes = (sizes ^ (uint64_t)c->batch->nodes[at].rows) * SIZES_FACTOR;
    }
    return result;
}

int
oomkit_capture_value(capture *c, PyObject *object, PyObject *key, int flags, int depth)
{
    oomkit_batch *batch = c->batch;
    PyTypeObject *type = Py_TYPE(object);
    Py_ssize_t at = batch->count;
    int open = depth < DEPTH_LIMIT && at < NODE_LIMIT;

    if (at == batch->room && capture_grow(batch) < 0) {
        return -1;
    }
    batch->nodes[at] = (oomkit_node){.object = Py_NewRef(object),
                                     .key = Py_XNewRef(key),
                                     .rows = -1,
                                     .same = -1,
                                     .flags = (uint8_t)flags,
                                     .device_index = -1};
    batch->count = at + 1;
    if (type == (PyTypeObject *)c->st->Tensor) {
        return capture_tensor(c, at);
    }
    if (type == &PyDict_Type) {
        open = open && PyDict_GET_SIZE(object) <= CONTAINER_LIMIT;
        return open ? capture_dict(c, at, object, depth) : 0;
    }
    if (type == &PyTuple_Type) {
        open = open && PyTuple_GET_SIZE(object) <= CONTAINER_LIMIT;
        return open ? capture_tuple(c, at, object, depth) : 0;
    }
    if (type == &PyList_Type) {
        if (open && PyList_GET_SIZE(object) <= CONTAINER_LIMIT) {
            return capture_list(c, at, object, depth);
        }
        batch->nodes[at].shape_hash = (uint64_t)PyList_GET_SIZE(object);
        return 0;
    }
    return capture_other(c, at, object, open ? depth : DEPTH_LIMIT);
}

/* The dimension of one argument, where dim= names several. 0 or -1. */
static int
capture_dim(capture *c, const oomkit_options *options, Py_ssize_t argument)
{
    c->dim = oomkit_argument_dim(options, c->batch, argument);
    return c->dim == INT64_MIN ? -1 : 0;
}

/* May the argument be the batch, by the names that were given? 1, 0 or -1. */
static int
capture_is_candidate(const oomkit_batch *batch, const oomkit_options *options,
                     Py_ssize_t argument)
{
    OWNED PyObject *name = NULL;
    int named;

    if (options->batch == NULL && PyTuple_GET_SIZE(options->statics) == 0) {
        return 1;
    }
    name = oomkit_argument_name(batch, batch->names, argument);
    if (name == NULL) {
        return -1;
    }
    named = PySequence_Contains(
        options->batch != NULL ? options->batch : options->statics, name);
    return named < 0 || options->batch != NULL ? named : !named;
}

/* batch->lead: the first leaf with rows of the first such argument that has one; in it,
 * one of a single row (positions) only where there is no other. 0 or -1. */
static int
capture_lead(oomkit_batch *batch, const oomkit_options *options, Py_ssize_t argument,
             Py_ssize_t at)
{
    Py_ssize_t found = -1;
    int candidate;

    if (batch->lead >= 0) {
        return 0;
    }
    for (; at < batch->count; at++) {
        int64_t rows = batch->nodes[at].rows;
        if (rows > 1 || (rows >= 0 && found < 0)) {
            found = at;
        }
        if (rows > 1) {
            break;
        }
    }
    if (found < 0) {
        return 0;
    }
    candidate = capture_is_candidate(batch, options, argument);
    batch->lead = candidate > 0 ? found : -1;
    return candidate < 0 ? -1 : 0;
}

int
oomkit_batch_capture(oomkit_state *st, const oomkit_options *options,
                     PyObject *const *args, Py_ssize_t positional, PyObject *kwnames,
                     Py_ssize_t skip, PyObject *names, oomkit_batch *batch)
{
    capture c = {st, batch, options->dim};
    Py_ssize_t i;

    batch->args = args;
    batch->positional = positional;
    batch->total = positional + (kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames));
    batch->kwnames = kwnames;
    batch->nodes = batch->inline_nodes;
    batch->count = 0;
    batch->room = OOMKIT_BATCH_INLINE;
    batch->rows = -1;
    batch->device_type = -1;
    batch->device_index = -1;
    batch->names = names;
    batch->searched = batch->twins = 0;
    batch->sizes = 0;
    batch->lead = -1;
    batch->saved = NULL;
    batch->doubt = NULL;
    for (i = 0; i < batch->total; i++) {
        /* An argument that is left alone is a closed node: node i stays argument i. */
        PyObject *value = i < skip ? Py_None : args[i]; /* borrowed from the caller */
        Py_ssize_t at = batch->count;
        if ((options->dims != NULL && capture_dim(&c, options, i) < 0) ||
            oomkit_capture_value(&c, value, NULL, 0, 0) < 0 ||
            capture_lead(batch, options, i, at) < 0) {
            oomkit_batch_release(batch);
            return -1;
        }
    }
    if (batch->device_type < 0) {
        batch->device_type = 0;
    }
    return 0;
}

int64_t
oomkit_batch_rows(const oomkit_batch *batch)
{
    if (batch->rows >= 0 && batch->searched) {
        return batch->rows;
    }
    return batch->lead < 0 || batch->lead >= batch->count
               ? -1
               : batch->nodes[batch->lead].rows;
}

uint64_t
oomkit_batch_signature(const oomkit_batch *batch)
{
    uint64_t hash = 0x9e3779b97f4a7c15u;
    Py_ssize_t i;
    for (i = 0; i < batch->count; i++) {
        const oomkit_node *node = &batch->nodes[i];
        if (node->kind == OOMKIT_NODE_TENSOR || node->kind == OOMKIT_NODE_ARRAY) {
            hash = (hash ^ node->shape_hash) * 0xff51afd7ed558ccdu;
            hash ^= hash >> 32;
        }
    }
    return hash;
}

void
oomkit_batch_move(oomkit_batch *to, oomkit_batch *from, PyObject *const *args)
{
    memcpy(to, from, offsetof(oomkit_batch, inline_nodes));
    if (from->nodes == from->inline_nodes) { /* those in use alone */
        to->nodes = to->inline_nodes;
        memcpy(to->inline_nodes, from->inline_nodes,
               (size_t)from->count * sizeof(oomkit_node));
    }
    to->args = args;
    from->nodes = from->inline_nodes;
    from->count = from->room = 0;
    from->lead = -1;
    from->saved = NULL;
    from->doubt = NULL;
}

void
oomkit_batch_release(oomkit_batch *batch)
{
    Py_ssize_t i, count = batch->count;
    oomkit_node *nodes = batch->nodes;

    /* Emptied first: a finaliser below may come back here. */
    batch->count = 0;
    batch->rows = batch->lead = -1;
    batch->searched = 0;
    for (i = 0; i < count; i++) {
        Py_DECREF(nodes[i].object);
        Py_XDECREF(nodes[i].key);
    }
    if (nodes != batch->inline_nodes) {
        PyMem_Free(nodes);
    }
    batch->nodes = NULL;
    batch->room = 0;
    Py_CLEAR(batch->saved);
    Py_CLEAR(batch->doubt);
}
