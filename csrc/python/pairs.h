/* Lists of (object, what was saved of it): kept by a call, restored on failure. */
#ifndef OOMKIT_PYTHON_PAIRS_H
#define OOMKIT_PYTHON_PAIRS_H

#include "state.h"

/* Appends (object, saved) to a list made when needed. Steals `saved`, which may be NULL
 * with an exception. */
int
oomkit_pairs_add(PyObject **list, PyObject *object, PyObject *saved);
/* What was saved of it, borrowed; NULL when it is not there. `list` may be NULL. */
PyObject *
oomkit_pairs_find(PyObject *list, const PyObject *object);

#endif
