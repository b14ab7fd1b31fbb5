/* Taking the arguments of a call apart, and what a site learns from them. On the path
 * of every healthy call: no Python object is made here. */
#include "tensor.h"
#include "tree.h"

#include "../core/status.h"

#include <string.h>

#define DEPTH_LIMIT 32       /* deeper containers stay closed */
#define CONTAINER_LIMIT 4096 /* longer ones too: opening them would cost every call */
#define NODE_LIMIT 65536     /* a list that holds itself ends here */

typedef struct capture {
    oomkit_state *st;
    oomkit_batch *batch;
    int64_t dim;
} capture;

static int
capture_grow(oomkit_batch *batch)
{
    Py_ssize_t room = batch->room * 2;
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
    if (batch->device_type < 0) {
        batch->device_type = facts.device_type;
        batch->device_index = facts.device_index;
    }
    return 0;
}

static int
capture_value(capture *c, PyObject *object, PyObject *key, int depth);

static int
capture_dict(capture *c, Py_ssize_t at, PyObject *dict, int depth)
{
    PyObject *key, *value; /* borrowed from dict */
    Py_ssize_t position = 0, children = 0;

    c->batch->nodes[at].kind = OOMKIT_NODE_DICT;
    while (PyDict_Next(dict, &position, &key, &value)) {
        if (capture_value(c, value, key, depth + 1) < 0) {
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
        if (capture_value(c, PyList_GET_ITEM(list, i), NULL, depth + 1) < 0) {
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
        if (capture_value(c, PyTuple_GET_ITEM(tuple, i), NULL, depth + 1) < 0) {
            return -1;
        }
        c->batch->nodes[at].children = i + 1;
    }
    return 0;
}

/* Anything that is neither a plain tensor nor an exact container. */
static int
capture_other(capture *c, Py_ssize_t at, PyObject *object, int depth)
{
    PyTypeObject *type = Py_TYPE(object);

    if (object == Py_None || type == &PyLong_Type || type == &PyFloat_Type ||
        type == &PyUnicode_Type || type == &PyBool_Type) {
        return 0;
    }
    if (PyTuple_Check(object)) {
        int opens = type != (PyTypeObject *)c->st->Size && depth < DEPTH_LIMIT &&
                    PyTuple_GET_SIZE(object) <= CONTAINER_LIMIT &&
                    oomkit_type_is_named_tuple(c->st, type);
        return opens ? capture_tuple(c, at, object, depth) : 0;
    }
    if (oomkit_tensor_check(c->st, object) &&
        !PyType_IsSubtype(type, (PyTypeObject *)c->st->Parameter)) {
        return capture_tensor(c, at);
    }
    return 0;
}

static int
capture_value(capture *c, PyObject *object, PyObject *key, int depth)
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

int
oomkit_batch_capture(oomkit_state *st, const oomkit_options *options,
                     PyObject *const *args, Py_ssize_t positional, PyObject *kwnames,
                     Py_ssize_t skip, oomkit_batch *batch)
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
    batch->searched = 0;
    batch->saved = NULL;
    for (i = 0; i < batch->total; i++) {
        /* An argument that is left alone is a closed node: node i stays argument i. */
        PyObject *value = i < skip ? Py_None : args[i]; /* borrowed from the caller */
        if (capture_value(&c, value, NULL, 0) < 0) {
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
    Py_ssize_t i;
    if (batch->rows >= 0 && batch->searched) {
        return batch->rows;
    }
    for (i = 0; i < batch->count; i++) {
        if (batch->nodes[i].rows >= 0) {
            return batch->nodes[i].rows;
        }
    }
    return -1;
}

uint64_t
oomkit_batch_signature(const oomkit_batch *batch)
{
    uint64_t hash = 0x9e3779b97f4a7c15u;
    Py_ssize_t i;
    for (i = 0; i < batch->count; i++) {
        const oomkit_node *node = &batch->nodes[i];
        if (node->kind == OOMKIT_NODE_TENSOR) {
            hash = (hash ^ node->shape_hash) * 0xff51afd7ed558ccdu;
            hash ^= hash >> 32;
        }
    }
    return hash;
}

void
oomkit_batch_move(oomkit_batch *to, oomkit_batch *from, PyObject *const *args)
{
    *to = *from;
    if (from->nodes == from->inline_nodes) {
        to->nodes = to->inline_nodes;
    }
    to->args = args;
    from->nodes = from->inline_nodes;
    from->count = from->room = 0;
    from->saved = NULL;
}

void
oomkit_batch_release(oomkit_batch *batch)
{
    Py_ssize_t i, count = batch->count;
    oomkit_node *nodes = batch->nodes;

    /* Emptied first: a finaliser below may come back here. */
    batch->count = 0;
    batch->rows = -1;
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
}

/* --- what a site learns --- */

const oomkit_seen *
oomkit_site_seen(const oomkit_batch_site *site, Py_ssize_t position, PyObject *keyword)
{
    Py_ssize_t i;
    if (site == NULL) {
        return NULL;
    }
    for (i = 0; i < site->count; i++) {
        const oomkit_seen *seen = &site->seen[i];
        if (keyword == NULL ? seen->position == position
                            : seen->keyword != NULL &&
                                  PyUnicode_Compare(seen->keyword, keyword) == 0) {
            return seen;
        }
    }
    return NULL;
}

/* The entry of an argument, made when there is none; NULL when memory is short. */
static oomkit_seen *
site_entry(oomkit_batch_site *site, Py_ssize_t position, PyObject *keyword)
{
    const oomkit_seen *known = oomkit_site_seen(site, position, keyword);
    oomkit_seen *seen;

    if (known != NULL) {
        return &site->seen[known - site->seen];
    }
    if (site->count == site->room) {
        Py_ssize_t room = site->room == 0 ? 4 : site->room * 2;
        seen = PyMem_Realloc(site->seen, (size_t)room * sizeof(*seen));
        if (seen == NULL) {
            return NULL;
        }
        site->seen = seen;
        site->room = room;
    }
    seen = &site->seen[site->count++];
    *seen = (oomkit_seen){.keyword = Py_XNewRef(keyword),
                          .position = keyword == NULL ? position : -1,
                          .size = -1,
                          .length = -1};
    return seen;
}

static void
site_note(oomkit_batch_site *site, const oomkit_batch *batch, int64_t rows,
          Py_ssize_t argument, Py_ssize_t index)
{
    const oomkit_node *root = &batch->nodes[index];
    Py_ssize_t i, end = oomkit_node_end(batch, index);
    int keyword = argument >= batch->positional;
    int64_t size = -1, length = -1;
    oomkit_seen *seen = site_entry(
        site, argument,
        keyword ? PyTuple_GET_ITEM(batch->kwnames, argument - batch->positional)
                : NULL);

    if (seen == NULL) {
        return;
    }
    for (i = index; i < end && size < 0; i++) {
        size = batch->nodes[i].rows;
    }
    if (root->kind == OOMKIT_NODE_LIST || root->kind == OOMKIT_NODE_TUPLE) {
        length = root->children;
    }
    if (site->rows >= 0) {
        seen->size_stays |= size >= 0 && size == seen->size;
        seen->length_stays |= length >= 0 && length == seen->length;
        seen->length_moves |= length == rows && seen->length == site->rows;
    }
    seen->size = size;
    seen->length = length;
}

void
oomkit_batch_learn(oomkit_batch_site **site, const oomkit_batch *batch)
{
    int64_t rows = oomkit_batch_rows(batch);
    Py_ssize_t argument, index = 0;

    /* Only a change of the rows shows anything, and only a second argument matters. */
    if (rows < 0 || batch->total < 2 || (*site != NULL && (*site)->rows == rows)) {
        return;
    }
    if (*site == NULL) {
        *site = PyMem_Calloc(1, sizeof(**site));
        if (*site == NULL) {
            return;
        }
        (*site)->rows = -1;
    }
    for (argument = 0; argument < batch->total; argument++) {
        site_note(*site, batch, rows, argument, index);
        index = oomkit_node_end(batch, index);
    }
    (*site)->rows = rows;
}

void
oomkit_batch_site_clear(oomkit_batch_site **site)
{
    oomkit_batch_site *old = *site;
    Py_ssize_t i;

    if (old == NULL) {
        return;
    }
    *site = NULL;
    for (i = 0; i < old->count; i++) {
        Py_XDECREF(old->seen[i].keyword);
    }
    PyMem_Free(old->seen);
    PyMem_Free(old);
}
