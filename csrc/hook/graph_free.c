/* Freeing what the graph of a failed backward has saved, as a finished one does. */
#include "graph.h"
#include "hook.h"

/* torch refused, as it does of what is not there. 0, or -1 when it is another exception
 * (an interrupt), which stays. */
static int
refused_by_torch(void)
{
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError) &&
        !PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return -1;
    }
    PyErr_Clear();
    return 0;
}

/* Takes what one SavedTensor holds out of it: torch packs the tensor with our hook,
 * which keeps nothing, and drops its own reference. Where it is freed already, or
 * packed by somebody's hooks, it is not ours to drop. 0 or -1. */
static int
saved_drop(oomkit_state *st, PyObject *saved)
{
    OWNED PyObject *done = PyObject_CallMethod(saved, "register_hooks", "OO",
                                               st->saved_pack, st->saved_unpack);
    return done == NULL ? refused_by_torch() : 0;
}

/* One attribute of a node. 0 or -1. */
static int
attribute_drop(oomkit_state *st, PyObject *node, PyObject *name)
{
    OWNED PyObject *saved = PyObject_GetAttr(node, name);
    Py_ssize_t k;
    int result = 0;

    if (saved == NULL) {
        return refused_by_torch(); /* freed already: the node has been executed */
    }
    if (PyTuple_Check(saved) || PyList_Check(saved)) {
        for (k = 0; result == 0 && k < PySequence_Fast_GET_SIZE(saved); k++) {
            result = saved_drop(st, PySequence_Fast_GET_ITEM(saved, k));
        }
    } else if (saved != Py_None) {
        result = saved_drop(st, saved);
    }
    return result;
}

static int
free_visit(oomkit_state *st, PyObject *node, const oomkit_node_type *Py_UNUSED(type),
           void *Py_UNUSED(context))
{
    OWNED PyObject *names = PyObject_Dir((PyObject *)Py_TYPE(node));
    Py_ssize_t i;

    if (names == NULL) {
        return -1;
    }
    for (i = 0; i < PyList_GET_SIZE(names); i++) {
        PyObject *name = PyList_GET_ITEM(names, i); /* borrowed */
        const char *text = PyUnicode_AsUTF8(name);
        if (text == NULL || (strncmp(text, "_raw_saved_", 11) == 0 &&
                             attribute_drop(st, node, name) < 0)) {
            return -1;
        }
    }
    return 1;
}

int
oomkit_graph_free(oomkit_state *st, PyObject *roots)
{
    int leaves = 0;
    return oomkit_graph_walk(st, roots, free_visit, NULL, &leaves);
}
