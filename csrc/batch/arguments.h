/* The arguments of a call as a tree of nodes, and what is known of them as a batch. */
#ifndef OOMKIT_BATCH_ARGUMENTS_H
#define OOMKIT_BATCH_ARGUMENTS_H

#include "../tree/nodes.h"

#define OOMKIT_BATCH_COUNTED 1   /* ... and has the rows that a whole call would note */
#define OOMKIT_BATCH_UNCOUNTED 2 /* ... and counts as one row */

/* The arguments of one call, taken apart before the function can change them. A batch
 * that is all zero is empty and may be released. */
typedef struct oomkit_batch {
    PyObject *const *args; /* borrowed from the caller: vectorcall layout */
    Py_ssize_t positional; /* number of positional arguments */
    Py_ssize_t total;      /* positional + keyword arguments */
    PyObject *kwnames;     /* borrowed, may be NULL */
    PyObject *names;       /* borrowed from the step: parameter names, may be NULL */
    int64_t rows;          /* B, or -1 before oomkit_batch_find has found it */
    int device_type, device_index; /* of the first tensor; CPU when there is none */
    int searched;
    int kept_whole; /* it is not cut: OOMKIT_BATCH_* */
    int empty; /* set by oomkit_batch_find when it refuses a batch for having no rows */
    Py_ssize_t lead; /* node of the leaf that the record takes the rows from, or -1 */
    int views;       /* all rows are a view, too, and not the object itself */
    int aliases;     /* some node has `same` */
    PyObject *dealt; /* borrowed, or NULL: gives each slice other rows of the batch
                        (csrc/proof/dealt_rows.c) */
    uint64_t sizes;  /* hash of the rows of all leaves */
    PyObject *saved; /* owned: restore_batch=True: list of host copies, or NULL */
    int provable;    /* a reading in doubt may be tried: a proof comes before its use */
    PyObject *ambiguous; /* owned str: why it is, for where that proof fails, or NULL */
    union { /* argument after argument; the tree's members by their own names */
        oomkit_tree tree;
        struct {
            oomkit_node *nodes;
            Py_ssize_t count, room;
        };
    };
} oomkit_batch;

/* What a site has learned about its arguments; zeroed at start, freed by clear. Written
 * by oomkit_batch_learn: for each argument position and name, the B and the leading
 * size seen, so that a tensor whose size stays while B changes is passed whole. */
typedef struct oomkit_batch_site oomkit_batch_site;

#endif
