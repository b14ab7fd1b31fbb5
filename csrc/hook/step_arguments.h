/* What an optimizer's step() is given while the batch is split: a closure, a loss. */
#ifndef OOMKIT_HOOK_STEP_ARGUMENTS_H
#define OOMKIT_HOOK_STEP_ARGUMENTS_H

#include "method.h"

#define OOMKIT_CLOSURE_REFUSAL                                                         \
    "an optimizer step with a closure (LBFGS) runs the model inside step(): "          \
    "decorate the closure's forward and backward instead"

/* Notes the arguments in each micro-batch, held back or not. 0, or -1 with SplitError.
 */
int
oomkit_given_note(interceptor_object *self, PyObject *const *args,
                  Py_ssize_t positional, PyObject *kwnames);

/* The arguments for the one real call: numbers are those of the whole batch, and a
 * closure is refused that returns a loss. New tuple of the values, positional ones
 * first, or NULL with an exception. */
PyObject *
oomkit_given_settle(interceptor_object *self, PyObject *const *args,
                    Py_ssize_t positional, PyObject *kwnames);
/* The arguments where a closure computes the gradients of ranks that agree: they vote
 * when it has returned. The same. */
PyObject *
oomkit_given_agreed(interceptor_object *self, PyObject *const *args,
                    Py_ssize_t positional, PyObject *kwnames);

#endif
