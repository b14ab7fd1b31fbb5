/* Whether a graph leads to known leaves alone, told by the bridge: torch makes an
 * object of Python for each node that is looked at from there. */
#include "errors.h"
#include "graph.h"
#include "tensor.h"

int
oomkit_graph_known(const oomkit_state *st, PyObject *roots, PyObject *const *known,
                   Py_ssize_t count, int bare)
{
    Py_ssize_t i;

    if (!st->graph_read || !PyTuple_Check(roots)) {
        return 0;
    }
    for (i = 0; i < PyTuple_GET_SIZE(roots); i++) {
        if (!oomkit_tensor_check(st, PyTuple_GET_ITEM(roots, i))) {
            return 0; /* a GradientEdge */
        }
    }
    return st->bridge->graph_known(
        (const void *const *)((PyTupleObject *)roots)->ob_item,
        (size_t)PyTuple_GET_SIZE(roots), (const void *const *)known, (size_t)count,
        st->impl_offset, bare);
}

/* Of (two[0] * two[1]) * two[0]: are both leaves seen, and each one missed, and whether
 * one has a gradient? 1 or 0; may leave an exception. */
static int
graphs_agree(oomkit_state *st, PyObject *const *two)
{
    PyObject *product = PyObject_CallMethodOneArg(two[0], st->str_mul, two[1]);
    PyObject *root = /* all three owned */
        product ? PyObject_CallMethodOneArg(product, st->str_mul, two[0]) : NULL;
    PyObject *roots = root ? PyTuple_Pack(1, root) : NULL;
    int agree = roots != NULL && oomkit_graph_known(st, roots, two, 2, 0) == 1 &&
                oomkit_graph_known(st, roots, two, 1, 0) == 0 &&
                oomkit_graph_known(st, roots, two + 1, 1, 0) == 0 &&
                oomkit_graph_known(st, roots, two, 1, 1) == 1 &&
                PyObject_SetAttr(two[1], st->str_grad, two[0]) == 0 &&
                oomkit_graph_known(st, roots, two, 1, 1) == 0 &&
                PyObject_SetAttr(two[1], st->str_grad, Py_None) == 0;

    Py_XDECREF(product);
    Py_XDECREF(root);
    Py_XDECREF(roots);
    return agree;
}

/* A leaf on the CPU, whatever the default device is. New reference or NULL. */
static PyObject *
leaf_make(oomkit_state *st)
{
    PyObject *size = Py_BuildValue("(i)", 1); /* owned */
    PyObject *kwargs, *leaf;                  /* owned; the second returned */

    kwargs = Py_BuildValue("{sssO}", "device", "cpu", "requires_grad", Py_True);
    leaf = size == NULL || kwargs == NULL ? NULL
                                          : PyObject_Call(st->torch_ones, size, kwargs);
    Py_XDECREF(size);
    Py_XDECREF(kwargs);
    return leaf;
}

int
oomkit_graph_calibrate(oomkit_state *st)
{
    PyObject *two[2] = {NULL, NULL}; /* owned */
    int mode;

    st->bridge->exempt_enter();
    mode = oomkit_grad_mode_set(st, 1);
    two[0] = mode < 0 ? NULL : leaf_make(st);
    two[1] = two[0] == NULL ? NULL : leaf_make(st);
    st->graph_read = 1; /* for the question itself */
    st->graph_read = two[1] != NULL && graphs_agree(st, two);
    Py_XDECREF(two[0]);
    Py_XDECREF(two[1]);
    if (mode >= 0) {
        oomkit_grad_mode_back(st, mode, 0);
    }
    st->bridge->exempt_leave();
    /* What else went wrong means "ask Python's nodes". */
    return oomkit_state_passes();
}
