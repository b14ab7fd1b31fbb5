/* What a failed backward leaves behind on its thread. */
#include "call.h"

/* A failed CPU backward leaves its unexecuted graph queued on this thread until the
 * next backward here: run a trivial one. 0 or -1. */
int
oomkit_backward_drain(oomkit_state *st)
{
    PyObject *root = NULL, *result = NULL, *one = NULL; /* owned */
    int mode;

    oomkit_exempt_enter(st);
    mode = oomkit_grad_mode_set(st, 1);
    if (st->drain_leaf == NULL) {
        PyObject *empty = PyTuple_New(0); /* owned */
        st->drain_leaf =
            empty == NULL ? NULL : PyObject_CallOneArg(st->torch_ones, empty);
        Py_XDECREF(empty);
        if (st->drain_leaf == NULL ||
            PyObject_SetAttr(st->drain_leaf, st->str_requires_grad, Py_True) < 0) {
            Py_CLEAR(st->drain_leaf);
            goto done;
        }
    }
    one = PyFloat_FromDouble(1.0);
    root = one ? PyObject_CallMethodOneArg(st->drain_leaf, st->str_mul, one) : NULL;
    if (root != NULL) {
        result = PyObject_CallMethod(st->autograd_module, "grad", "OO", root,
                                     st->drain_leaf);
    }
done:
    if (mode >= 0 && oomkit_grad_mode_set(st, mode) < 0) {
        Py_CLEAR(result);
    }
    oomkit_exempt_leave(st);
    Py_XDECREF(one);
    Py_XDECREF(root);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}
