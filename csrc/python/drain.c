/* What a failed CPU backward leaves behind on its thread. */
#include "call.h"
#include "errors.h"

static int
drain_once(oomkit_state *st)
{
    PyObject *root = NULL, *result = NULL, *one = NULL; /* owned */
    int mode;

    mode = oomkit_grad_mode_set(st, 1);
    if (mode < 0) {
        return -1;
    }
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
    Py_XDECREF(one);
    Py_XDECREF(root);
    Py_XDECREF(result);
    return oomkit_grad_mode_back(st, mode, result == NULL ? -1 : 0);
}

/* A failed backward leaves its unexecuted CPU part queued on this thread until the
 * next backward here: run a trivial one. A graph on a device has such a part, too,
 * wherever it comes from the host or goes there. Where even the few bytes for that are
 * refused the graph stays a little longer. 0 or -1. */
int
oomkit_backward_drain(oomkit_state *st)
{
    PyObject *guard; /* owned */
    int result;

    if (oomkit_inference_begin(st, 0, &guard) < 0) {
        return -1;
    }
    oomkit_exempt_enter(st);
    result = drain_once(st);
    if (result < 0 && oomkit_exception_is_oom(st)) {
        PyErr_Clear(); /* accounted for: memory is all that it could have given back */
        result = drain_once(st);
        if (result < 0 && oomkit_exception_is_oom(st)) {
            PyErr_Clear(); /* as above */
            result = 0;
        }
    }
    oomkit_exempt_leave(st);
    return oomkit_inference_end(st, guard, result);
}
