/* Containers made anew of other values. */
#include "flatten.h"
#include "kinds.h"

int
oomkit_node_is_open(const oomkit_node *node)
{
    return node->kind == OOMKIT_NODE_TUPLE || node->kind == OOMKIT_NODE_LIST ||
           node->kind == OOMKIT_NODE_DICT || node->kind == OOMKIT_NODE_OBJECT;
}

static PyObject *
build_dict(const oomkit_tree *tree, Py_ssize_t at, PyObject *values)
{
    OWNED PyObject *dict = PyDict_New();
    Py_ssize_t child = at + 1, i;

    for (i = 0; dict != NULL && i < PyList_GET_SIZE(values); i++) {
        if (PyDict_SetItem(dict, tree->nodes[child].key, PyList_GET_ITEM(values, i)) <
            0) {
            return NULL;
        }
        child = oomkit_tree_end(tree, child);
    }
    return STEAL(dict);
}

/* A named tuple as its _make() makes it, without its __new__. */
PyObject *
oomkit_output_tuple(oomkit_state *st, PyObject *like, PyObject *list)
{
    OWNED PyObject *values = list, *tuple = NULL, *args = NULL;

    if (!PyTuple_CheckExact(like) && !oomkit_type_is_named_tuple(st, Py_TYPE(like))) {
        return PyObject_CallOneArg((PyObject *)Py_TYPE(like), values);
    }
    tuple = PyList_AsTuple(values);
    if (tuple == NULL || PyTuple_CheckExact(like)) {
        return STEAL(tuple);
    }
    args = PyTuple_Pack(1, tuple);
    return args == NULL ? NULL : PyTuple_Type.tp_new(Py_TYPE(like), args, NULL);
}

PyObject *
oomkit_tree_build_part(oomkit_state *st, const oomkit_tree *tree, Py_ssize_t at,
                       Py_ssize_t from, Py_ssize_t to, oomkit_tree_maker maker,
                       void *context)
{
    const oomkit_node *node = &tree->nodes[at];
    OWNED PyObject *values = PyList_New(to - from);
    Py_ssize_t child = at + 1, i;

    if (values == NULL) {
        return NULL;
    }
    PyObject_GC_UnTrack(values); /* gc.get_objects() must not show it with holes */
    for (i = 0; i < to; i++) {
        PyObject *value = NULL; /* stolen by PyList_SET_ITEM() */
        if (i >= from) {
            value = maker(context, child, i);
            if (value == NULL) {
                return NULL;
            }
            PyList_SET_ITEM(values, i - from, value);
        }
        child =
            tree->nodes[child].children == 0 ? child + 1 : oomkit_tree_end(tree, child);
    }
    PyObject_GC_Track(values);
    if (node->kind == OOMKIT_NODE_LIST) {
        return STEAL(values);
    }
    if (node->kind == OOMKIT_NODE_TUPLE) {
        return oomkit_output_tuple(st, node->object, STEAL(values));
    }
    return node->kind == OOMKIT_NODE_DICT
               ? build_dict(tree, at, values)
               : oomkit_object_build(st, tree, at, PySequence_Fast_ITEMS(values));
}

PyObject *
oomkit_tree_build(oomkit_state *st, const oomkit_tree *tree, Py_ssize_t at,
                  oomkit_tree_maker maker, void *context)
{
    return oomkit_tree_build_part(st, tree, at, 0, tree->nodes[at].children, maker,
                                  context);
}
