/* A set of addresses that are only ever compared: which of thousands of nodes is a
 * parameter? Filled once, for one walk. */
#ifndef OOMKIT_PYTHON_ADDRESSES_H
#define OOMKIT_PYTHON_ADDRESSES_H

#include "state.h"

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

#endif
