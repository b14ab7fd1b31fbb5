/* Splitters of types, beside what tree.h has of them. */
#ifndef OOMKIT_TREE_SPLITTERS_H
#define OOMKIT_TREE_SPLITTERS_H

#include "../py/state.h"

/* The results of one type joined by its join=. `values` and `rows` are lists. New
 * reference or NULL; an error of the user's function has a note. */
PyObject *
oomkit_splitter_join(oomkit_state *st, PyObject *values, PyObject *rows);

/* Was a join= registered for the type of the value? */
int
oomkit_splitter_joins(const oomkit_state *st, PyObject *value);

/* register_splitter(type, /, *, split, size=None, join=None) */
PyObject *
oomkit_register_splitter(PyObject *module, PyObject *args, PyObject *kwargs);

#define OOMKIT_REGISTER_SPLITTER_DOC                                                   \
    "register_splitter(type, /, *, split, size=None, join=None)\n--\n\n"               \
    "How values of a type of your own, and of types that come from it, are split.\n\n" \
    "Parameters\n----------\n"                                                         \
    "split : callable(value, start, length)\n"                                         \
    "    The rows start to start + length of a batch, of the same type.\n"             \
    "size : callable(value), optional\n"                                               \
    "    The number of rows of a batch; len(value) by default.\n"                      \
    "join : callable(results, rows), optional\n"                                       \
    "    Joins what micro-batches return of this type; rows has the number of rows\n"  \
    "    of each."

#endif
