/* Objects with named parts that a step returns: taken apart, and made anew as their own
 * type without their __init__. */
#ifndef OOMKIT_TREE_NAMED_PARTS_H
#define OOMKIT_TREE_NAMED_PARTS_H

#include "../py/state.h"

/* The parts of one object. Both are new dictionaries, so they may be changed. */
typedef struct oomkit_parts {
    PyObject *entries;    /* owned: of a mapping, in its order; NULL for a data class */
    PyObject *attributes; /* owned: fields and other attributes that are no entries */
} oomkit_parts;

/* A subclass of dict, a UserDict, an instance of a data class, a SimpleNamespace? Runs
 * no Python code. */
int
oomkit_output_check(const oomkit_state *st, PyObject *object);

/* Takes such an object apart. 0 or -1. */
int
oomkit_output_open(oomkit_state *st, PyObject *object, oomkit_parts *parts);

/* A new object of the type of `like` with these parts; neither __new__ nor __init__ of
 * the type runs. An entry that is None where `like` has one that is an attribute as
 * well (a transformers ModelOutput) is left out, as such types leave it out. New
 * reference or NULL. */
PyObject *
oomkit_output_like(oomkit_state *st, PyObject *like, const oomkit_parts *parts);

void
oomkit_parts_clear(oomkit_parts *parts);

#endif
