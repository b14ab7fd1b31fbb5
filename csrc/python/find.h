/* The search for the batch, between find.c and roles.c. */
#ifndef OOMKIT_PYTHON_FIND_H
#define OOMKIT_PYTHON_FIND_H

#include "tree.h"

enum { OOMKIT_ROLE_OTHER = 0, OOMKIT_ROLE_STATIC, OOMKIT_ROLE_BATCH };

typedef struct oomkit_find {
    oomkit_state *st;
    const oomkit_options *options;
    const oomkit_batch_site *site;
    PyObject *names; /* borrowed from the caller, may be NULL */
    oomkit_batch *batch;
    uint8_t *roles;   /* owned: one per argument */
    Py_ssize_t first; /* node of the first batch argument */
    int per_sample;   /* the batch is lists of per-sample objects */
} oomkit_find;

#define EACH_ARGUMENT(f, argument, index)                                              \
    for (argument = 0, index = 0; argument < (f)->batch->total;                        \
         index = oomkit_node_end((f)->batch, index), argument++)

/* -1 always: SplitError, node `b` does not go with node `a` (-1: `b` alone is wrong).
 */
int
oomkit_find_disagree(const oomkit_find *f, Py_ssize_t a, Py_ssize_t b);

/* -1 always: SplitError, node `index` is of a type that cannot be split because `why`.
 */
int
oomkit_find_refuse(const oomkit_find *f, Py_ssize_t index, const char *why,
                   const char *advice);

/* SplitError when a name that `option` gives is no parameter. 0 or -1. */
int
oomkit_find_check_names(const oomkit_find *f, PyObject *given, const char *option);

/* Gives the roles that static= and batch= give. 0 or -1. */
int
oomkit_find_roles(oomkit_find *f);

#endif
