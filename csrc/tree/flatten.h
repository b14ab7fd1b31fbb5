/* Taking arguments apart, between flatten.c, objects.c, numpy_arrays.c and kinds.c. */
#ifndef OOMKIT_TREE_FLATTEN_H
#define OOMKIT_TREE_FLATTEN_H

#include "nodes.h"

#define OOMKIT_CAPTURE_DEPTH 32 /* deeper containers stay closed */
#define OOMKIT_CAPTURE_CONTAINER                                                       \
    4096 /* longer ones too: they would cost every call                                \
          */

typedef struct oomkit_capture {
    oomkit_state *st;
    oomkit_batch *batch;
    int64_t dim; /* of the argument that is being taken apart */
} oomkit_capture;

/* --- kinds.c --- */

enum { /* what the values of a type are, besides those that flatten.c knows itself */
       OOMKIT_KIND_CLOSED = 0,
       OOMKIT_KIND_TENSOR,
       OOMKIT_KIND_TUPLE,  /* named */
       OOMKIT_KIND_OBJECT, /* a subclass of dict, a UserDict, a data class, or a plain
                              object whose type has a splitter */
       OOMKIT_KIND_ARRAY,
       OOMKIT_KIND_MASK = 15,
       OOMKIT_KIND_MODEL = 32,  /* closed: a module, an optimizer, a scheduler */
       OOMKIT_KIND_PACKED = 64, /* a PackedSequence */
       OOMKIT_KIND_CUSTOM = 128 /* the type, or one that it comes from, has a splitter
                                 */
};

/* One of them, with bits. Runs no Python code and cannot fail. */
int
oomkit_kind_of(oomkit_state *st, PyTypeObject *type);

/* After a type was given a splitter. */
void
oomkit_kinds_forget(oomkit_state *st);

/* --- flatten.c --- */

/* Appends a node for the value, and those of what is in it. `key` (borrowed, may be
 * NULL) and `flags` are the node's. 0 or -1. */
int
oomkit_capture_value(oomkit_capture *c, PyObject *object, PyObject *key, int flags,
                     int depth);

/* --- objects.c --- */

/* The node at `at` becomes OOMKIT_NODE_OBJECT with its children; it stays closed when
 * nothing in the object could be data. 0 or -1. Runs no Python code. */
int
oomkit_capture_object(oomkit_capture *c, Py_ssize_t at, PyObject *object, int custom,
                      int depth);

/* --- numpy_arrays.c --- */

/* The node at `at` becomes OOMKIT_NODE_ARRAY. 0 or -1. */
int
oomkit_capture_array(oomkit_capture *c, Py_ssize_t at, PyObject *array);

#endif
