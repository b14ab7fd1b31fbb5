/* What gradients.c and gradients_back.c share: arrays of one object per parameter. */
#ifndef OOMKIT_UNDO_GRADIENTS_H
#define OOMKIT_UNDO_GRADIENTS_H

#include "../call/call_types.h"

static inline PyObject **
grads_array(oomkit_call *call)
{
    PyObject **array =
        PyMem_Calloc((size_t)call->parts->param_count + 1, sizeof(PyObject *));
    if (array == NULL) {
        PyErr_NoMemory();
    }
    return array;
}

static inline void
grads_array_free(oomkit_call *call, PyObject ***array)
{
    PyObject **items = *array;
    Py_ssize_t i;
    if (items == NULL) {
        return;
    }
    *array = NULL;
    for (i = 0; i < call->parts->param_count; i++) {
        Py_XDECREF(items[i]);
    }
    PyMem_Free(items);
}

/* The gradient of parameter i, None included. New reference or NULL. */
static inline PyObject *
grads_get(oomkit_call *call, Py_ssize_t i)
{
    return PyObject_GetAttr(call->parts->params[i], call->st->str_grad);
}

static inline int
grads_set(oomkit_call *call, Py_ssize_t i, PyObject *gradient)
{
    return PyObject_SetAttr(call->parts->params[i], call->st->str_grad, gradient);
}

/* gradients.c: marks every gradient, in an array that is made where *marks is NULL. 0,
 * or -1 with an exception, and *marks is NULL again. */
int
oomkit_grads_marks_take(oomkit_call *call, oomkit_grad_mark **marks);

/* Lets go of the array and of what is marked in it; *marks may be NULL. */
void
oomkit_grads_marks_drop(oomkit_call *call, oomkit_grad_mark **marks);

/* states[i] and, unless `steps` is NULL, steps[i] of every parameter against the marks;
 * how many are not as they were. -1 with an exception. */
Py_ssize_t
oomkit_grads_marks_compare(oomkit_call *call, const oomkit_grad_mark *marks,
                           uint8_t *states, uint32_t *steps);

#endif
