/* Tensors that torch has left half made: between half_made.c, gradients.c,
 * gradients_back.c and eager.c. */
#ifndef OOMKIT_PY_HALF_MADE_H
#define OOMKIT_PY_HALF_MADE_H

#include "state.h"

typedef struct oomkit_half_made {
    int whole;          /* its storages have what its sizes say */
    int was_empty;      /* it is not whole, and it had no values before that */
    int sparse;         /* it is not strided */
    int may_have_grown; /* COO: so many entries that torch coalesces after adding: where
                           that fails the sum stands, and no version tells of it */
    int64_t count;      /* COO: entries */
} oomkit_half_made;

/* Looks at sizes and storages alone. 0 or -1. */
int
oomkit_half_made_look(oomkit_state *st, PyObject *tensor, oomkit_half_made *found);

/* The same; one that was empty is made so again, in place. 1 it is whole, 0 it is not,
 * -1. */
int
oomkit_half_made_mend(oomkit_state *st, PyObject *tensor, oomkit_half_made *found);

/* Before a tensor is read: the same. 0, or -1 with RuntimeError. */
int
oomkit_half_made_refuse(oomkit_state *st, PyObject *tensor);

#endif
