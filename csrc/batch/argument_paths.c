/* Walking the nodes of the arguments, and naming them for messages. */
#include "batch.h"

int
oomkit_node_is_cut(const oomkit_node *node)
{
    return node->kind == OOMKIT_NODE_TENSOR || node->kind == OOMKIT_NODE_ARRAY ||
           (node->flags & OOMKIT_NODE_CUSTOM) != 0;
}

int
oomkit_node_holds_tensor(const oomkit_batch *batch, Py_ssize_t index)
{
    Py_ssize_t end = oomkit_node_end(batch, index);
    for (; index < end; index++) {
        if (oomkit_node_is_cut(&batch->nodes[index])) {
            return 1;
        }
    }
    return 0;
}

int
oomkit_node_is_split(const oomkit_batch *batch, Py_ssize_t index)
{
    Py_ssize_t end = oomkit_node_end(batch, index);
    for (; index < end; index++) {
        if (batch->nodes[index].split != OOMKIT_SPLIT_WHOLE) {
            return 1;
        }
    }
    return 0;
}

PyObject *
oomkit_argument_name(const oomkit_batch *batch, PyObject *names, Py_ssize_t argument)
{
    Py_ssize_t i;

    if (argument >= batch->positional) {
        return Py_NewRef(
            PyTuple_GET_ITEM(batch->kwnames, argument - batch->positional));
    }
    for (i = 0; names != NULL && i <= argument && i < PyTuple_GET_SIZE(names); i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i); /* borrowed from names */
        int starred = PyUnicode_Check(name) && PyUnicode_GET_LENGTH(name) > 0 &&
                      PyUnicode_READ_CHAR(name, 0) == '*';
        if (i == argument || starred) {
            return starred ? PyUnicode_FromString("*args") : Py_NewRef(name);
        }
    }
    return PyUnicode_FromString("*args");
}

/* text + "[key]" of the child, or ".name". Steals `text`; new reference or NULL. */
static PyObject *
path_extend(PyObject *text, const oomkit_node *child, Py_ssize_t number)
{
    PyObject *longer; /* owned */
    if (child->key == NULL) {
        longer = PyUnicode_FromFormat("%U[%zd]", text, number);
    } else if ((child->flags & OOMKIT_NODE_ATTRIBUTE) != 0 &&
               PyUnicode_Check(child->key)) {
        longer = PyUnicode_FromFormat("%U.%U", text, child->key);
    } else {
        longer = PyUnicode_FromFormat("%U[%R]", text, child->key);
    }
    Py_DECREF(text);
    return longer;
}

/* The dictionary inside a mapping of the user's: `batch['x']`, not `batch.data['x']`.
 */
static int
path_is_hidden(const oomkit_batch *batch, Py_ssize_t parent, Py_ssize_t child)
{
    PyObject *key = batch->nodes[child].key; /* borrowed from the node */
    return (batch->nodes[child].flags & OOMKIT_NODE_ATTRIBUTE) != 0 &&
           batch->nodes[child].kind == OOMKIT_NODE_DICT && PyUnicode_Check(key) &&
           PyUnicode_CompareWithASCIIString(key, "data") == 0 &&
           PyMapping_Check(batch->nodes[parent].object);
}

PyObject *
oomkit_node_path(const oomkit_batch *batch, PyObject *names, Py_ssize_t index)
{
    Py_ssize_t at = 0, end, number = 0;
    PyObject *text; /* owned, stolen by path_extend() */

    while ((end = oomkit_node_end(batch, at)) <= index) {
        at = end;
        number++;
    }
    text = oomkit_argument_name(batch, names, number);
    while (text != NULL && at != index) {
        Py_ssize_t parent = at++; /* the first child */
        for (number = 0; (end = oomkit_node_end(batch, at)) <= index; number++) {
            at = end;
        }
        if (!path_is_hidden(batch, parent, at)) {
            text = path_extend(text, &batch->nodes[at], number);
        }
    }
    return text;
}

Py_ssize_t
oomkit_node_with_graph(oomkit_state *st, const oomkit_batch *batch)
{
    Py_ssize_t i;

    for (i = 0; i < batch->count; i++) {
        OWNED PyObject *node = NULL;
        if (batch->nodes[i].kind != OOMKIT_NODE_TENSOR) {
            continue;
        }
        node = PyObject_GetAttr(batch->nodes[i].object, st->str_grad_fn);
        if (node != Py_None) {
            return node == NULL ? -1 : i;
        }
    }
    return batch->count;
}
