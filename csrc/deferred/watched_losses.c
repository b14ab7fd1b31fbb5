/* Before the engine runs: the waiting losses that it will pass are asked to tell what
 * reaches them. */
#include "deferred.h"
#include "../hook/graph.h"
#include "../py/tensor.h"

#define NEAR 16    /* nodes between a root and its losses whose bytes are few ... */
#define EACH 4     /* ... and as many more for each of them (a running sum) */
#define WATCHED 96 /* nodes in which oomkit_graph_watch looks for waiting losses */

/* A waiting loss that a backward will pass: its node is to tell the gradient. */
static int
watch_hook(oomkit_deferred *p, PyObject *node)
{
    OWNED PyObject *handle = NULL;

    if (p->kind != OOMKIT_RETURNED_WHOLE || p->hooked) {
        return 0; /* a node of ours tells it anyway */
    }
    handle =
        PyObject_CallMethodOneArg(node, p->st->str_register_prehook, (PyObject *)p);
    p->hooked = handle != NULL;
    p->st->own_hooks += handle != NULL;
    return p->hooked ? 0 : -1;
}

/* The root is a waiting loss itself: its gradient is among the arguments. 1 done, 0 it
 * is not so, -1. */
static int
watch_root(oomkit_state *st, PyObject *root, PyObject *gradients)
{
    OWNED PyObject *node = PyObject_GetAttr(root, st->str_grad_fn);
    OWNED PyObject *number = NULL, *hooks = NULL;
    Py_ssize_t output;
    oomkit_deferred *p;
    int failed = 0;

    if (node == NULL || node == Py_None) {
        return node == NULL ? -1 : 0;
    }
    p = oomkit_node_deferred(st, node, &failed);
    if (p == NULL) {
        return failed ? -1 : 0;
    }
    if (oomkit_callers_claim(p) < 0) {
        return -1;
    }
    if (p->kind != OOMKIT_RETURNED_WHOLE) {
        return 1;
    }
    number = PyObject_GetAttr(root, st->str_output_nr);
    hooks = number ? PyObject_GetAttr(root, st->str_backward_hooks) : NULL;
    if (hooks == NULL || (output = PyLong_AsSsize_t(number)) == -1) {
        return -1;
    }
    if (hooks != Py_None || output != p->output || p->callers == NULL ||
        !PyTuple_Check(gradients) || PyTuple_GET_SIZE(gradients) != 1) {
        return 0;
    }
    if (oomkit_deferred_gradient(p, PyTuple_GET_ITEM(gradients, 0)) < 0) {
        return -1;
    }
    p->fired = 1;
    return 1;
}

/* Breadth first, so that a loss beside a large other term is found soon. */
static int
watch_walk(oomkit_state *st, PyObject *work, int *losses, int *far)
{
    OWNED PyObject *seen = PySet_New(NULL);
    Py_ssize_t at;
    int result = seen == NULL ? -1 : 0, failed = 0;

    for (at = 0;
         result == 0 && at < PyList_GET_SIZE(work) && at < WATCHED + EACH * *losses;
         at++) {
        PyObject *node = PyList_GET_ITEM(work, at); /* borrowed */
        oomkit_deferred *p;
        int known = PySet_Contains(seen, node);
        if (known != 0 || PySet_Add(seen, node) < 0) {
            result = known == 1 ? 0 : -1;
            continue;
        }
        p = oomkit_node_deferred(st, node, &failed);
        if (p != NULL) {
            ++*losses;
            *far |= !p->small;
            result = oomkit_callers_claim(p) < 0 ? -1 : watch_hook(p, node);
            continue;
        }
        *far |= oomkit_node_is_leaf(st, node);
        result = failed ? -1 : oomkit_node_follow(st, node, work);
    }
    *far |= at > NEAR + EACH * *losses || at < PyList_GET_SIZE(work);

    return result;
}

int
oomkit_graph_watch(oomkit_state *st, PyObject *const *args, PyObject **nodes)
{
    OWNED PyObject *work = NULL;
    int losses = 0, far = 0;

    if (PyTuple_Check(args[0]) && PyTuple_GET_SIZE(args[0]) == 1 &&
        oomkit_tensor_check(st, PyTuple_GET_ITEM(args[0], 0))) {
        int result = watch_root(st, PyTuple_GET_ITEM(args[0], 0), args[1]);
        if (result != 0) {
            return result < 0 ? -1 : 0;
        }
    }
    work = PyList_New(0);
    if (work == NULL || oomkit_roots_nodes(st, args[0], work, &far) < 0 ||
        watch_walk(st, work, &losses, &far) < 0) {
        return -1;
    }
    if (far) {
        return 0;
    }
    if (losses > 1) {
        *nodes = STEAL(work);
    }
    return losses;
}
