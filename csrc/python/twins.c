/* One object at two places of the arguments is one object in every micro-batch. */
#include "tree.h"

/* Are two subtrees of the same object, one after the other, built in the same way? */
static int
built_alike(const oomkit_batch *batch, Py_ssize_t a, Py_ssize_t b)
{
    Py_ssize_t end = oomkit_node_end(batch, a);

    if (end - a != oomkit_node_end(batch, b) - b) {
        return 0;
    }
    for (; a < end; a++, b++) {
        if (batch->nodes[a].split != batch->nodes[b].split ||
            batch->nodes[a].object != batch->nodes[b].object) {
            return 0;
        }
    }
    return 1;
}

/* Is it made anew in a micro-batch? */
static int
is_made(const oomkit_node *node)
{
    return node->split != OOMKIT_SPLIT_WHOLE || node->children > 0;
}

int
oomkit_node_twins(oomkit_batch *batch)
{
    PyObject *places = PyDict_New(); /* owned: address of an object -> its first node */
    Py_ssize_t i;
    int result = places == NULL ? -1 : 0;

    for (i = 0; result == 0 && i < batch->count; i++) {
        oomkit_node *node = &batch->nodes[i];
        PyObject *address, *place; /* owned; borrowed from places, then owned */
        if (!is_made(node)) {
            continue;
        }
        address = PyLong_FromVoidPtr(node->object);
        place = address == NULL ? NULL : PyDict_GetItemWithError(places, address);
        if (place != NULL) {
            Py_ssize_t first = PyLong_AsSsize_t(place);
            if (built_alike(batch, first, i)) {
                node->same = (int32_t)first;
                batch->twins = 1;
            }
        } else if (!PyErr_Occurred()) {
            place = PyLong_FromSsize_t(i);
            if (place != NULL) {
                result = PyDict_SetItem(places, address, place);
                Py_DECREF(place);
            }
        }
        Py_XDECREF(address);
        result = PyErr_Occurred() ? -1 : result;
    }
    Py_XDECREF(places);
    return result;
}
