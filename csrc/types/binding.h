/* What the callables of auto_batch and of guard share: each stands for a callable of
 * the user's, and has to bind, copy and pickle as that one does. */
#ifndef OOMKIT_PY_BINDING_H
#define OOMKIT_PY_BINDING_H

#include "../py/state.h"

/* Makes the callable that stands for `func`. New reference or NULL. */
typedef PyObject *(*oomkit_wrap)(oomkit_state *st, PyObject *func, void *how);

/* A class method, a static method or a partialmethod: the same kind of object, around
 * what `wrap` makes of the function in it, so that the order of the decorators does not
 * matter. New reference; NULL with an exception; NULL without one where `given` is
 * something else. */
PyObject *
oomkit_wrap_descriptor(oomkit_state *st, PyObject *given, oomkit_wrap wrap, void *how);

/* Does the callable bind to an instance when a class has it? Functions do; bound
 * methods, partials, modules and most objects with __call__ do not. */
int
oomkit_wrap_binds(PyObject *func);

/* functools.update_wrapper, with the function's dictionary only where `func` is one: a
 * copy of an object's attributes would be out of date with its next assignment. 0 or
 * -1. */
int
oomkit_wrap_update(oomkit_state *st, PyObject *op, PyObject *func);

/* The attribute of `op`, else that of `func` (which may be NULL). What a bound method
 * has, and `func` need not lead to `op` by, is not passed on: __self__ and __func__
 * would be taken for a way to rebuild `op`, and lose the protection. New reference or
 * NULL. */
PyObject *
oomkit_wrap_getattr(oomkit_state *st, PyObject *op, PyObject *func, PyObject *name);

/* Is `op` what its own module and qualified name lead to? 1, 0 or -1. */
int
oomkit_wrap_is_named(oomkit_state *st, PyObject *op);

/* copy.deepcopy(func, memo). Functions come back as themselves. Where `op`, which
 * stands for it, was copied on the way (an object that holds itself), *known is that
 * copy (new reference), else NULL. New reference or NULL. */
PyObject *
oomkit_wrap_deepcopy(oomkit_state *st, PyObject *op, PyObject *func, PyObject *memo,
                     PyObject **known);

#endif
