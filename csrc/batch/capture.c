/* The arguments of a call as nodes with what tells of rows. On the path of every
 * healthy call: no Python object is made here. */
#include "batch.h"
#include "../core/status.h"
#include "../py/tensor.h"
#include "../tree/kinds.h"

#include <stddef.h>
#include <string.h>

#define SIZES_FACTOR 0x9e3779b97f4a7c15u

typedef struct capture {
    oomkit_state *st;
    oomkit_batch *batch;
    int64_t dim; /* of the argument that is being taken apart */
    int customs; /* it has something that a registered splitter slices */
} capture;

/* The facts that a node needs: by the bridge alone where it answers, for the general
 * way also asks for is_leaf. 1 known, 0 not a tensor that can be split, -1 error. */
static int
capture_facts(capture *c, PyObject *tensor, oomkit_tensor_facts *facts)
{
    if (c->st->bridge->tensor_facts(tensor, c->st->impl_offset, c->dim, facts) ==
            OOMKIT_OK ||
        oomkit_attribute_facts(tensor, c->dim, facts) == 0) {
        return 1;
    }
    if (PyErr_ExceptionMatches(PyExc_MemoryError) ||
        !PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyErr_Clear(); /* a subclass that hides its shape: passed whole, as it is */
    return 0;
}

/* One more leaf with rows in the hash of all. */
static void
capture_size(oomkit_batch *batch, int64_t rows)
{
    batch->sizes = (batch->sizes ^ (uint64_t)rows) * SIZES_FACTOR;
}

static int
capture_tensor(capture *c, oomkit_node *node)
{
    oomkit_batch *batch = c->batch;
    oomkit_tensor_facts facts;
    int known = capture_facts(c, node->object, &facts);
    if (known <= 0) {
        return known;
    }
    node->kind = OOMKIT_NODE_TENSOR;
    node->rows = facts.size;
    node->shape_hash = facts.shape_hash;
    node->requires_grad = (uint8_t)(facts.requires_grad != 0);
    node->version = oomkit_tensor_mark(c->st, node->object, &facts);
    node->device_type = (int8_t)facts.device_type;
    node->device_index = (int8_t)facts.device_index;
    capture_size(batch, facts.size);
    if (batch->device_type < 0) {
        batch->device_type = facts.device_type;
        batch->device_index = facts.device_index;
    }
    return 0;
}

/* The rows of a PackedSequence, whose nodes these are, without Python code: the first
 * of its batch sizes. -1 where they cannot be read. */
static int64_t
packed_rows(const capture *c, Py_ssize_t at)
{
    const oomkit_bridge *bridge = c->st->bridge;
    const oomkit_node *sizes = &c->batch->nodes[at]; /* the second child, if any */
    oomkit_tensor_facts facts;
    OWNED_MEMORY int64_t *values = NULL;

    if (sizes->children < 2) {
        return -1;
    }
    sizes = &c->batch->nodes[oomkit_node_end(c->batch, at + 1)];
    if (sizes->kind != OOMKIT_NODE_TENSOR ||
        bridge->tensor_facts(sizes->object, c->st->impl_offset, 0, &facts) !=
            OOMKIT_OK ||
        facts.ndim != 1 || facts.size < 1 ||
        facts.bytes != (uint64_t)facts.size * sizeof(int64_t)) {
        return -1;
    }
    values = PyMem_Malloc((size_t)facts.bytes);
    return values != NULL && bridge->bytes_get(sizes->object, c->st->impl_offset,
                                               values, facts.bytes) == OOMKIT_OK
               ? values[0]
               : -1;
}

/* The leaf() of the rules. */
static int
capture_leaf(void *context, Py_ssize_t at, int kind)
{
    capture *c = context;
    oomkit_node *node = &c->batch->nodes[at];

    if ((kind & OOMKIT_KIND_CUSTOM) != 0) {
        node->flags |= OOMKIT_NODE_CUSTOM;
        c->customs = 1;
        return 0;
    }
    if (kind == OOMKIT_KIND_TENSOR) {
        return capture_tensor(c, node);
    }
    node->kind = OOMKIT_NODE_ARRAY;
    if (oomkit_array_mark(c->st, node, c->dim) < 0) {
        return -1;
    }
    capture_size(c->batch, node->rows);
    return 0;
}

/* What a registered splitter slices, of the argument at `at`: what is in it is marked,
 * but gives no rows. `sizes` is the hash before this argument. */
static void
capture_hide(capture *c, Py_ssize_t at, uint64_t sizes)
{
    oomkit_batch *batch = c->batch;

    batch->sizes = sizes;
    while (at < batch->count) {
        oomkit_node *node = &batch->nodes[at];
        Py_ssize_t end = at + 1;
        if ((node->flags & OOMKIT_NODE_CUSTOM) != 0) {
            int kind = oomkit_kind_of(c->st, Py_TYPE(node->object));
            node->rows = (kind & OOMKIT_KIND_PACKED) != 0 ? packed_rows(c, at) : -1;
            for (end = oomkit_node_end(batch, at++); at < end; at++) {
                batch->nodes[at].rows = -1;
            }
        }
        if (oomkit_node_is_cut(node)) {
            capture_size(batch, node->rows);
        }
        at = end;
    }
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

/* Is the list, in which the leaf that leads is, one of samples? By itself, or by
 * another one as long: see layout.c, which looks closer. */
static int
capture_is_samples(const oomkit_batch *batch, Py_ssize_t list)
{
    const int64_t rows = batch->nodes[batch->lead].rows;
    const Py_ssize_t length = batch->nodes[list].children;
    Py_ssize_t at = list + 1;

    while (at < list + 1 + length && at < batch->count &&
           batch->nodes[at].rows == rows) {
        at++; /* [x, y]: asked in each call, so without the functions below */
    }
    if (at < list + 1 + length && !oomkit_node_fits(batch, list, rows)) {
        return oomkit_node_holds_samples(batch, list);
    }
    for (at = 0; at < batch->count; at = oomkit_node_end(batch, at)) {
        if (at != list && batch->nodes[at].children == length &&
            oomkit_node_may_be_items(batch, list) &&
            oomkit_node_holds_samples(batch, at) &&
            !oomkit_node_fits(batch, at, rows)) {
            return 1;
        }
    }
    return 0;
}

int
oomkit_batch_capture(oomkit_state *st, const oomkit_options *options,
                     PyObject *const *args, Py_ssize_t positional, PyObject *kwnames,
                     Py_ssize_t skip, PyObject *names, oomkit_batch *batch)
{
    capture c = {st, batch, options->dim, 0};
    const oomkit_tree_rules rules = {.depth = OOMKIT_CAPTURE_DEPTH,
                                     .longest = OOMKIT_CAPTURE_CONTAINER,
                                     .leaf = capture_leaf,
                                     .context = &c};
    Py_ssize_t i, list = -1;

    batch->args = args;
    batch->positional = positional;
    batch->total = positional + (kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames));
    batch->kwnames = kwnames;
    batch->nodes = NULL;
    batch->count = batch->room = 0;
    batch->rows = -1;
    batch->device_type = -1;
    batch->device_index = -1;
    batch->names = names;
    batch->searched = batch->aliases = batch->kept_whole = 0;
    batch->sizes = 0;
    batch->lead = -1;
    batch->saved = NULL;
    batch->ambiguous = NULL;
    for (i = 0; i < batch->total; i++) {
        /* An argument that is left alone is a closed node: node i stays argument i. */
        PyObject *value = i < skip ? Py_None : args[i]; /* borrowed from the caller */
        Py_ssize_t at = batch->count;
        uint64_t sizes = batch->sizes;
        c.customs = 0;
        if ((options->dims != NULL && capture_dim(&c, options, i) < 0) ||
            oomkit_tree_flatten(st, &batch->tree, value, &rules) < 0) {
            oomkit_batch_release(batch);
            return -1;
        }
        if (c.customs) {
            capture_hide(&c, at, sizes);
        }
        if (capture_lead(batch, options, i, at) < 0) {
            oomkit_batch_release(batch);
            return -1;
        }
        if (batch->lead > at && list < 0 && c.customs == 0 &&
            (batch->nodes[at].kind == OOMKIT_NODE_LIST ||
             batch->nodes[at].kind == OOMKIT_NODE_TUPLE)) {
            list = at; /* it leads in there: a later argument's lies behind it */
        }
    }
    if (list >= 0 && capture_is_samples(batch, list)) {
        batch->lead = list;
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
               : oomkit_node_lead_rows(&batch->nodes[batch->lead]);
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
    memcpy(to, from, offsetof(oomkit_batch, tree));
    oomkit_tree_move(&to->tree, &from->tree);
    to->args = args;
    from->lead = -1;
    from->saved = NULL;
    from->ambiguous = NULL;
}

void
oomkit_batch_release(oomkit_batch *batch)
{
    batch->rows = batch->lead = -1;
    batch->searched = 0;
    oomkit_tree_clear(&batch->tree);
    Py_CLEAR(batch->saved);
    Py_CLEAR(batch->ambiguous);
}
