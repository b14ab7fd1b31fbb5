/* Sets of addresses: open addressing, at most half full. Lists of pairs. Arrays. */
#include "state.h"

int
oomkit_array_grow(void *items, Py_ssize_t *room, size_t size)
{
    Py_ssize_t wanted = *room == 0 ? 8 : *room * 2;
    void *old, *grown;

    memcpy(&old, items, sizeof(old)); /* a pointer of any type */
    grown = PyMem_Realloc(old, (size_t)wanted * size);
    if (grown == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(items, &grown, sizeof(grown));
    *room = wanted;
    return 0;
}

/* Where the search for an address begins: objects lie at multiples of 16. */
static size_t
addresses_home(const oomkit_addresses *set, const PyObject *object)
{
    uint64_t hash = (uint64_t)(uintptr_t)object * 0x9e3779b97f4a7c15u;
    return (size_t)(hash >> 32) & set->mask;
}

/* The place of an address, or the free one where it belongs. */
static size_t
addresses_place(const oomkit_addresses *set, const PyObject *object)
{
    size_t at = addresses_home(set, object);

    while (set->slots[at] != NULL && set->slots[at] != object) {
        at = (at + 1) & set->mask;
    }
    return at;
}

int
oomkit_addresses_fill(oomkit_addresses *set, PyObject *const *objects, Py_ssize_t count)
{
    size_t room = 8;
    Py_ssize_t i;

    while (room < (size_t)count * 2) {
        room *= 2;
    }
    set->slots = PyMem_Calloc(room, sizeof(*set->slots));
    if (set->slots == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    set->mask = room - 1;
    for (i = 0; i < count; i++) {
        set->slots[addresses_place(set, objects[i])] = objects[i];
    }
    return 0;
}

int
oomkit_addresses_have(const oomkit_addresses *set, const PyObject *object)
{
    return set->slots[addresses_place(set, object)] != NULL;
}

void
oomkit_addresses_free(oomkit_addresses *set)
{
    PyMem_Free(set->slots);
    set->slots = NULL;
}

PyObject *
oomkit_pairs_find(PyObject *list, const PyObject *object)
{
    Py_ssize_t i;
    for (i = 0; list != NULL && i < PyList_GET_SIZE(list); i++) {
        PyObject *pair = PyList_GET_ITEM(list, i); /* borrowed */
        if (PyTuple_GET_ITEM(pair, 0) == object) {
            return PyTuple_GET_ITEM(pair, 1);
        }
    }
    return NULL;
}

/* Appends (object, saved). Steals `saved`, which may be NULL with an exception. */
int
oomkit_pairs_add(PyObject **list, PyObject *object, PyObject *saved)
{
    OWNED PyObject *kept = saved, *pair = NULL;

    if (kept == NULL || (*list == NULL && (*list = PyList_New(0)) == NULL)) {
        return -1;
    }
    pair = PyTuple_Pack(2, object, kept);
    return pair == NULL ? -1 : PyList_Append(*list, pair);
}
