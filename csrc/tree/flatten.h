/* Taking values apart, between flatten.c and objects.c. */
#ifndef OOMKIT_TREE_FLATTEN_H
#define OOMKIT_TREE_FLATTEN_H

#include "tree.h"

typedef struct oomkit_flattening {
    oomkit_state *st;
    oomkit_tree *tree;
    const oomkit_tree_rules *rules;
} oomkit_flattening;

/* --- flatten.c --- */

/* Appends a node for the value, and those of what is in it. `key` (borrowed, may be
 * NULL) and `flags` are the node's. 0 or -1. */
int
oomkit_flatten_value(const oomkit_flattening *f, PyObject *object, PyObject *key,
                     int flags, int depth);

/* --- objects.c --- */

/* The node at `at` becomes OOMKIT_NODE_OBJECT with its children; that of an argument
 * stays closed when nothing in the object could be data, unless its type has a splitter
 * (`custom`). 0 or -1. Runs no Python code. */
int
oomkit_flatten_object(const oomkit_flattening *f, Py_ssize_t at, PyObject *object,
                      int custom, int depth);

/* The object of an OOMKIT_NODE_OBJECT at `at`, made anew with these values of its
 * children, without its __new__ and __init__. An entry that is an attribute as well (of
 * a transformers ModelOutput) and has become None is left out, as such types leave it
 * out. New reference or NULL. */
PyObject *
oomkit_object_build(oomkit_state *st, const oomkit_tree *tree, Py_ssize_t at,
                    PyObject *const *values);

#endif
