/* Freeing what the graph of a failed backward has saved, as a finished one does. */
#include "graph.h"

/* Takes what one SavedTensor holds out of it: torch packs the tensor with our hook,
 * which keeps nothing, and drops its own reference. */
static void
saved_drop(oomkit_state *st, PyObject *saved)
{
    PyObject *done = PyObject_CallMethod(/* owned */
                                         saved, "register_hooks", "OO", st->saved_pack,
                                         st->saved_unpack);
    if (done == NULL) {
        PyErr_Clear(); /* freed already, or packed by somebody's hooks: not ours */
    }
    Py_XDECREF(done);
}

static int
free_visit(oomkit_state *st, PyObject *node, void *Py_UNUSED(context))
{
    PyObject *names = PyObject_Dir((PyObject *)Py_TYPE(node)); /* owned */
    Py_ssize_t i, k;

    for (i = 0; names != NULL && i < PyList_GET_SIZE(names); i++) {
        PyObject *name = PyList_GET_ITEM(names, i); /* borrowed */
        PyObject *saved;                            /* owned */
        const char *text = PyUnicode_AsUTF8(name);
        if (text == NULL) {
            Py_DECREF(names);
            return -1;
        }
        if (strncmp(text, "_raw_saved_", 11) != 0) {
            continue;
        }
        saved = PyObject_GetAttr(node, name);
        if (saved == NULL) {
            PyErr_Clear(); /* freed already: the node has been executed */
        } else if (PyTuple_Check(saved) || PyList_Check(saved)) {
            for (k = 0; k < PySequence_Fast_GET_SIZE(saved); k++) {
                saved_drop(st, PySequence_Fast_GET_ITEM(saved, k));
            }
        } else if (saved != Py_None) {
            saved_drop(st, saved);
        }
        Py_XDECREF(saved);
    }
    Py_XDECREF(names);
    return names == NULL ? -1 : 1;
}

int
oomkit_graph_free(oomkit_state *st, PyObject *roots)
{
    int leaves = 0;
    return oomkit_graph_walk(st, roots, free_visit, NULL, &leaves);
}
