/* Methods of a loop over chunks() that oomkit.map uses; see chunks_type.c. */
#ifndef OOMKIT_LOOP_PARTS_JOIN_H
#define OOMKIT_LOOP_PARTS_JOIN_H

#include "../py/state.h"

PyObject *
oomkit_chunks_keep(PyObject *op, PyObject *const *args, Py_ssize_t nargs);
PyObject *
oomkit_chunks_join(PyObject *op, PyObject *ignored);
PyObject *
oomkit_chunks_results(PyObject *op, PyObject *ignored);
PyObject *
oomkit_chunks_join_items(PyObject *op, PyObject *const *args, Py_ssize_t nargs);

extern PyMethodDef oomkit_chunks_join_methods[];

#endif
