/* Are the participants of an earlier call still the right ones? */
#include "members.h"
#include "../py/tensor.h"

/* The object that a source leads to now; borrowed, only to be compared. An error of a
 * look-up (no memory) reads as "another object": the search that follows will meet it.
 */
static void *
source_now(const oomkit_source *source, PyObject *const *args, Py_ssize_t total)
{
    PyObject *owner, *value; /* borrowed; the attribute is owned, and dropped */

    if (source->argument >= 0) {
        if (source->argument >= total) {
            return NULL;
        }
        value = args[source->argument];
        if (source->item < 0) {
            return value;
        }
        if ((!PyList_CheckExact(value) && !PyTuple_CheckExact(value)) ||
            source->item >= PySequence_Fast_GET_SIZE(value)) {
            return NULL;
        }
        return PySequence_Fast_GET_ITEM(value, source->item);
    }
    if (source->key == NULL) {
        return PyCell_GET(source->container);
    }
    if (PyDict_CheckExact(source->container)) {
        return PyDict_GetItemWithError(source->container, source->key);
    }
    owner = PyWeakref_GET_OBJECT(source->container);
    value = owner == Py_None ? NULL : oomkit_own_attribute(owner, source->key);
    Py_XDECREF(value);
    return value;
}

/* Is an argument of a kind that the search has not judged yet? */
static int
argument_is_new(oomkit_state *st, const oomkit_participants *parts, PyObject *value,
                Py_ssize_t position)
{
    int t;

    if (oomkit_is_plain(value) || PyDict_CheckExact(value) ||
        PyList_CheckExact(value) || PyTuple_CheckExact(value) ||
        oomkit_tensor_check(st, value)) {
        return 0;
    }
    for (t = 0; t < parts->plain_count; t++) {
        if (parts->plain_types[t] == Py_TYPE(value)) {
            return 0;
        }
    }
    for (t = 0; t < parts->source_count; t++) {
        if (parts->sources[t].argument == position &&
            parts->sources[t].object == value) {
            return 0;
        }
    }
    return parts->plain_count < OOMKIT_ARGUMENT_TYPES;
}

int
oomkit_participants_valid(oomkit_state *st, const oomkit_participants *parts,
                          PyObject *const *args, Py_ssize_t total)
{
    Py_ssize_t i;

    if (parts->dead || parts->generation != st->structure_generation) {
        return 0;
    }
    for (i = 0; i < parts->source_count; i++) {
        if (source_now(&parts->sources[i], args, total) != parts->sources[i].object) {
            return 0;
        }
    }
    for (i = 0; i < total; i++) {
        if (argument_is_new(st, parts, args[i], i)) {
            return 0;
        }
    }
    return 1;
}
