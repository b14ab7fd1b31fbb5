/* References to objects, kept together: sets of addresses, lists of pairs. */
#ifndef OOMKIT_PY_REFS_H
#define OOMKIT_PY_REFS_H

#include "state.h"

/* A set of addresses that are only ever compared: which of thousands of nodes is a
 * parameter? Filled once, for one walk. */
typedef struct oomkit_addresses {
    const PyObject **slots; /* borrowed addresses; a power of two of places, or NULL */
    size_t mask;            /* one less than that */
} oomkit_addresses;

/* Fills an empty (zeroed) set. 0, or -1 with MemoryError. */
int
oomkit_addresses_fill(oomkit_addresses *set, PyObject *const *objects,
                      Py_ssize_t count);

int
oomkit_addresses_have(const oomkit_addresses *set, const PyObject *object);

void
oomkit_addresses_free(oomkit_addresses *set);

/* Lists of (object, what was saved of it), kept by a call and restored on failure.
 * Appends to a list that is made when needed. Steals `saved`, which may be NULL with an
 * exception. 0 or -1. */
int
oomkit_pairs_add(PyObject **list, PyObject *object, PyObject *saved);
/* What was saved of it, borrowed; NULL when it is not there. `list` may be NULL. */
PyObject *
oomkit_pairs_find(PyObject *list, const PyObject *object);

#endif
