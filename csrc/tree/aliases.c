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

/* Is the dimension of the samples the same for both nodes? 1, 0 or -1. */
static int
sliced_alike(const oomkit_options *options, const oomkit_batch *batch, Py_ssize_t a,
             Py_ssize_t b)
{
    int64_t one = 0, two = 0;
    Py_ssize_t argument, at = 0;

    for (argument = 0; options->dims != NULL && at <= b; argument++) {
        int64_t dim = oomkit_argument_dim(options, batch, argument);
        if (dim == INT64_MIN) {
            return -1;
        }
        one = at <= a ? dim : one;
        two = dim;
        at = oomkit_node_end(batch, at);
    }
    return one == two;
}

/* Is it made anew in a micro-batch? */
static int
is_made(const oomkit_node *node)
{
    return node->split != OOMKIT_SPLIT_WHOLE || node->children > 0;
}

int
oomkit_node_twins(const oomkit_options *options, oomkit_batch *batch)
{
    OWNED PyObject *places = PyDict_New(); /* address of an object -> its first node */
    Py_ssize_t i;

    for (i = 0; places != NULL && i < batch->count; i++) {
        oomkit_node *node = &batch->nodes[i];
        OWNED PyObject *address = NULL, *here = NULL;
        PyObject *place; /* borrowed from places */
        Py_ssize_t first;
        int alike;
        if (!is_made(node)) {
            continue;
        }
        address = PyLong_FromVoidPtr(node->object);
        place = address == NULL ? NULL : PyDict_GetItemWithError(places, address);
        if (place == NULL) {
            here = PyErr_Occurred() ? NULL : PyLong_FromSsize_t(i);
            if (here == NULL || PyDict_SetItem(places, address, here) < 0) {
                return -1;
            }
            continue;
        }
        first = PyLong_AsSsize_t(place);
        alike =
            built_alike(batch, first, i) ? sliced_alike(options, batch, first, i) : 0;
        if (alike < 0) {
            return -1;
        }
        if (alike) {
            node->same = (int32_t)first;
            batch->twins = 1;
        }
    }
    return places == NULL ? -1 : 0;
}
