/* What is said when no argument is a batch: the ones that come nearest. */
#include "batch.h"
#include "../py/errors.h"
#include "../py/tensor.h"

/* Can one take elements out of it: an iterator, a loader? Containers and tensors are
 * none of these. */
static int
is_source(const oomkit_state *st, const oomkit_node *node)
{
    PyTypeObject *type = Py_TYPE(node->object);

    if (node->kind != OOMKIT_NODE_OTHER || PyUnicode_Check(node->object) ||
        oomkit_tensor_check(st, node->object) ||
        PyType_IsSubtype(type, (PyTypeObject *)st->Module)) {
        return 0;
    }
    return PyIter_Check(node->object) ||
           ((type->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0 && type->tp_iter != NULL);
}

/* Is it a mapping of a type of its own, such as a TensorDict? 1, 0 or -1. */
static int
is_mapping(const oomkit_state *st, PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);

    if (type->tp_as_mapping == NULL || type->tp_as_mapping->mp_subscript == NULL) {
        return 0;
    }
    return oomkit_has_attribute((PyObject *)type, st->str_keys);
}

/* "; argument 'batch' is a 'TensorDict', ...". New str or NULL. */
static PyObject *
hint_text(PyObject *name, PyObject *object, int source, int mapping)
{
    const char *type = Py_TYPE(object)->tp_name;
    int rows = source && !PyIter_Check(object) && PySequence_Check(object);

    if (mapping) {
        return PyUnicode_FromFormat(
            "; argument '%U' is a '%.200s', a mapping whose rows oomkit does not know: "
            "tell how it is split with oomkit.register_splitter(type, split=...)",
            name, type);
    }
    if (source) {
        return PyUnicode_FromFormat(
            rows ? "; argument '%U' is a '%.200s': take the batch out of it before the "
                   "call; if it is the batch, tell how it is split with "
                   "oomkit.register_splitter(type, split=...)"
                 : "; argument '%U' is a '%.200s': take the batch out of it before the "
                   "call",
            name, type);
    }
    return PyUnicode_FromFormat(
        "; argument '%U' is a '%.200s' that holds tensors: tell how it is split with "
        "oomkit.register_splitter(type, split=...)",
        name, type);
}

/* What argument number `argument` may be. New str; NULL, without an exception when
 * there is nothing to say. */
static PyObject *
missing_hint(oomkit_state *st, const oomkit_batch *batch, Py_ssize_t argument,
             Py_ssize_t index)
{
    const oomkit_node *node = &batch->nodes[index];
    OWNED PyObject *name = NULL;
    int source = is_source(st, node), holds = 0, mapping = 0;

    if (source) {
        mapping = is_mapping(st, node->object);
    } else if (node->kind == OOMKIT_NODE_OTHER) {
        holds = oomkit_object_holds_tensor(st, node->object, 0, -1, 1);
    }
    if (holds < 0 || mapping < 0 || (!source && holds == 0)) {
        return NULL;
    }
    name = oomkit_argument_name(batch, batch->names, argument);
    return name == NULL ? NULL : hint_text(name, node->object, source, mapping);
}

PyObject *
oomkit_batch_missing(oomkit_state *st, const oomkit_batch *batch, PyObject *text)
{
    Py_ssize_t argument, index = 0;

    for (argument = 0; text != NULL && argument < batch->total; argument++) {
        OWNED PyObject *hint = missing_hint(st, batch, argument, index);
        if (hint != NULL) {
            Py_SETREF(text, PyUnicode_Concat(text, hint));
        } else if (PyErr_Occurred()) {
            Py_CLEAR(text);
        }
        index = oomkit_node_end(batch, index);
    }
    if (text != NULL) {
        Py_SETREF(text, PyUnicode_FromFormat("%U" SEE("batch-not-found"), text));
    }
    return text;
}

int
oomkit_batch_refuse(oomkit_state *st, const oomkit_batch *batch, PyObject *text)
{
    OWNED PyObject *whole = oomkit_batch_missing(st, batch, text);

    if (whole != NULL) {
        oomkit_raise(st->SplitError, "%U", whole);
    }
    return -1;
}
