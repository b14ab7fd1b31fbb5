/* Taking a value apart. On the path of every healthy call: no Python object is made
 * here. */
#include "flatten.h"
#include "kinds.h"

#include <string.h>

#define NODE_LIMIT 65536 /* a list that holds itself ends here */

typedef oomkit_flattening flattening;

Py_ssize_t
oomkit_tree_end(const oomkit_tree *tree, Py_ssize_t index)
{
    Py_ssize_t pending = 1;
    while (pending > 0) {
        pending += tree->nodes[index++].children - 1;
    }
    return index;
}

/* Room for one more node; the first ones lie in the tree itself. 0 or -1. */
static int
tree_grow(oomkit_tree *tree)
{
    oomkit_node *inline_nodes = tree->inline_nodes, *grown;
    int first = tree->nodes == inline_nodes;

    if (tree->nodes == NULL) {
        tree->nodes = inline_nodes;
        tree->room = OOMKIT_TREE_INLINE;
        return 0;
    }
    grown = PyMem_Realloc(first ? NULL : tree->nodes,
                          (size_t)tree->room * 4 * sizeof(oomkit_node));
    if (grown == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (first) {
        memcpy(grown, inline_nodes, (size_t)tree->count * sizeof(oomkit_node));
    }
    tree->nodes = grown;
    tree->room *= 4;
    return 0;
}

static int
flatten_dict(const flattening *f, Py_ssize_t at, PyObject *dict, int depth)
{
    PyObject *key, *value; /* borrowed from dict */
    Py_ssize_t position = 0, children = 0;

    f->tree->nodes[at].kind = OOMKIT_NODE_DICT;
    while (PyDict_Next(dict, &position, &key, &value)) {
        if (oomkit_flatten_value(f, value, key, 0, depth + 1) < 0) {
            return -1;
        }
        children++;
    }
    f->tree->nodes[at].children = children;
    return 0;
}

/* A list or tuple. */
static int
flatten_items(const flattening *f, Py_ssize_t at, PyObject *sequence, int depth)
{
    int is_list = PyList_Check(sequence);
    Py_ssize_t i;

    f->tree->nodes[at].kind = is_list ? OOMKIT_NODE_LIST : OOMKIT_NODE_TUPLE;
    for (i = 0; i < PySequence_Fast_GET_SIZE(sequence); i++) {
        PyObject *item = is_list ? PyList_GET_ITEM(sequence, i)
                                 : PyTuple_GET_ITEM(sequence, i); /* borrowed */
        if (oomkit_flatten_value(f, item, NULL, 0, depth + 1) < 0) {
            return -1;
        }
    }
    f->tree->nodes[at].children = i;
    return 0;
}

static int
flatten_leaf(const flattening *f, Py_ssize_t at, int kind)
{
    return f->rules->leaf == NULL ? 0 : f->rules->leaf(f->rules->context, at, kind);
}

/* An argument that is neither a plain tensor nor an exact container. */
static int
flatten_argument(const flattening *f, Py_ssize_t at, PyObject *object, int depth)
{
    int kind = oomkit_kind_of(f->st, Py_TYPE(object)), result = 0;
    int custom = (kind & OOMKIT_KIND_CUSTOM) != 0, open = depth < f->rules->depth;

    switch (kind & OOMKIT_KIND_MASK) {
    case OOMKIT_KIND_TENSOR:
        result = flatten_leaf(f, at, OOMKIT_KIND_TENSOR);
        break;
    case OOMKIT_KIND_ARRAY:
        result = flatten_leaf(f, at, OOMKIT_KIND_ARRAY);
        break;
    case OOMKIT_KIND_TUPLE:
        if (open && PyTuple_GET_SIZE(object) <= f->rules->longest) {
            result = flatten_items(f, at, object, depth);
        }
        break;
    case OOMKIT_KIND_OBJECT:
        result = open ? oomkit_flatten_object(f, at, object, custom, depth) : 0;
        break;
    default:
        break;
    }
    return result == 0 && custom ? flatten_leaf(f, at, kind) : result;
}

/* The same of a result. */
static int
flatten_output(const flattening *f, Py_ssize_t at, PyObject *object, int depth)
{
    int is_tuple;

    if (depth >= f->rules->depth) {
        return 0;
    }
    is_tuple = oomkit_output_is_tuple(f->st, object);
    if (is_tuple != 0) {
        return is_tuple < 0 ? -1 : flatten_items(f, at, object, depth);
    }
    return oomkit_output_type(f->st, Py_TYPE(object))
               ? oomkit_flatten_object(f, at, object, 0, depth)
               : 0;
}

int
oomkit_flatten_value(const flattening *f, PyObject *object, PyObject *key, int flags,
                     int depth)
{
    oomkit_tree *tree = f->tree;
    PyTypeObject *type = Py_TYPE(object);
    Py_ssize_t at = tree->count;
    int open = depth < f->rules->depth && at < NODE_LIMIT;

    if (at == tree->room && tree_grow(tree) < 0) {
        return -1;
    }
    tree->nodes[at] = (oomkit_node){.object = Py_NewRef(object),
                                    .key = Py_XNewRef(key),
                                    .rows = -1,
                                    .same = -1,
                                    .flags = (uint8_t)flags,
                                    .device_index = -1};
    tree->count = at + 1;
    if (type == (PyTypeObject *)f->st->Tensor) {
        return flatten_leaf(f, at, OOMKIT_KIND_TENSOR);
    }
    if (type == &PyDict_Type) {
        open = open && PyDict_GET_SIZE(object) <= f->rules->longest;
        return open ? flatten_dict(f, at, object, depth) : 0;
    }
    if (type == &PyTuple_Type) {
        open = open && PyTuple_GET_SIZE(object) <= f->rules->longest;
        return open ? flatten_items(f, at, object, depth) : 0;
    }
    if (type == &PyList_Type) {
        if (open && PyList_GET_SIZE(object) <= f->rules->longest) {
            return flatten_items(f, at, object, depth);
        }
        tree->nodes[at].shape_hash = (uint64_t)PyList_GET_SIZE(object);
        return 0;
    }
    if (oomkit_value_is_plain(object)) {
        return 0;
    }
    depth = open ? depth : f->rules->depth;
    return f->rules->outputs ? flatten_output(f, at, object, depth)
                             : flatten_argument(f, at, object, depth);
}

int
oomkit_tree_flatten(oomkit_state *st, oomkit_tree *tree, PyObject *value,
                    const oomkit_tree_rules *rules)
{
    flattening f = {st, tree, rules};
    return oomkit_flatten_value(&f, value, NULL, 0, 0);
}

int
oomkit_tree_open(oomkit_state *st, oomkit_tree *tree, PyObject *value)
{
    static const oomkit_tree_rules one_level = {
        .depth = 1, .longest = PY_SSIZE_T_MAX, .outputs = 1};
    int result;

    tree->nodes = NULL;
    tree->count = tree->room = 0;
    result = oomkit_tree_flatten(st, tree, value, &one_level);
    if (result < 0) {
        oomkit_tree_clear(tree);
    }
    return result;
}

void
oomkit_tree_move(oomkit_tree *to, oomkit_tree *from)
{
    to->nodes = from->nodes;
    to->count = from->count;
    to->room = from->room;
    if (from->nodes == from->inline_nodes) { /* those in use alone */
        to->nodes = to->inline_nodes;
        memcpy(to->inline_nodes, from->inline_nodes,
               (size_t)from->count * sizeof(oomkit_node));
    }
    from->nodes = NULL;
    from->count = from->room = 0;
}

void
oomkit_tree_clear(oomkit_tree *tree)
{
    Py_ssize_t i, count = tree->count;
    oomkit_node *nodes = tree->nodes;

    /* Emptied first: a finaliser below may come back here. */
    tree->nodes = NULL;
    tree->count = tree->room = 0;
    for (i = 0; i < count; i++) {
        Py_DECREF(nodes[i].object);
        Py_XDECREF(nodes[i].key);
    }
    if (nodes != tree->inline_nodes) {
        PyMem_Free(nodes);
    }
}
