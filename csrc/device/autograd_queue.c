/* What a failed CPU backward leaves behind on its thread. */
#include "device.h"
#include "../py/errors.h"
#include "../py/modes.h"

/* A graph that is kept: a sum saves no tensor, so that nobody's hooks on saved tensors,
 * which may be in force when it is made, are in it. 0 or -1. */
static int
drain_prepare(oomkit_state *st)
{
    OWNED PyObject *leaf = NULL, *root = NULL, *one = NULL; /* the state's in the end */
    OWNED PyObject *where = NULL; /* the host, whatever the default device is */
    int mode, result = -1;

    if (st->drain_root != NULL) {
        return 0;
    }
    mode = oomkit_grad_mode_set(st, 1);
    if (mode < 0) {
        return -1;
    }
    where = Py_BuildValue("{ss}", "device", "cpu");
    one = where == NULL ? NULL : PyTuple_Pack(1, st->empty_tuple); /* the shape */
    leaf = one == NULL ? NULL : PyObject_Call(st->torch_ones, one, where);
    Py_CLEAR(one);
    if (leaf != NULL && PyObject_SetAttr(leaf, st->str_requires_grad, Py_True) == 0) {
        one = PyObject_CallMethodNoArgs(leaf, st->str_detach);
        root = one ? PyObject_CallMethodOneArg(leaf, st->str_add, one) : NULL;
        result = root == NULL ? -1 : 0;
    }
    if (oomkit_grad_mode_back(st, mode, result) < 0) {
        return -1;
    }
    Py_XSETREF(st->drain_leaf, STEAL(leaf));
    Py_XSETREF(st->drain_one, STEAL(one));
    Py_XSETREF(st->drain_root, STEAL(root));
    return 0;
}

/* What torch.autograd.grad() would end in, which takes longer to get there. */
static int
drain_once(oomkit_state *st)
{
    OWNED PyObject *result = NULL;

    if (drain_prepare(st) < 0) {
        return -1;
    }
    result = PyObject_CallFunction(st->run_backward, "(O)(O)OO(O)OO", st->drain_root,
                                   st->drain_one, Py_True /* keep the graph */,
                                   Py_False, st->drain_leaf, Py_False,
                                   Py_False /* nothing into .grad */);
    return result == NULL ? -1 : 0;
}

/* A failed backward leaves its unexecuted CPU part queued on this thread until the
 * next backward here: run a trivial one. A graph on a device has such a part, too,
 * wherever it comes from the host or goes there. Where even the few bytes for that are
 * refused the graph stays a little longer. 0 or -1. */
int
oomkit_backward_drain(oomkit_state *st)
{
    PyObject *guard; /* owned */
    int result = 0;

    if (oomkit_inference_begin(st, 0, &guard) < 0) {
        return -1;
    }
    EXEMPT (st) {
        result = drain_once(st);
        if (result < 0 && oomkit_exception_is_oom(st)) {
            PyErr_Clear(); /* accounted for: memory is all it could have given back */
            result = drain_once(st);
            if (result < 0 && oomkit_exception_is_oom(st)) {
                PyErr_Clear(); /* as above */
                result = 0;
            }
        }
    }
    return oomkit_inference_end(st, guard, result);
}
