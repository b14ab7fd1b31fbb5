/* Gradients since a micro-batch began: which have come or moved, by whatever way. */
#include "gradients.h"
#include "undo.h"
#include "../py/tensor.h"

int
oomkit_grads_micro_begins(oomkit_call *call)
{
    oomkit_grads *g = &call->grads;
    const oomkit_bridge *bridge = call->st->bridge;
    size_t n = (size_t)call->parts->param_count, i;

    oomkit_grads_end_micro(call);
    if (bridge != NULL) {
        g->began = PyMem_Calloc(n + 1, sizeof(*g->began));
        if (g->began == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        if (bridge->grads_mark((const void *const *)call->parts->params,
                               call->st->impl_offset, n, g->began) != OOMKIT_OK) {
            PyMem_Free(g->began);
            g->began = NULL;
            PyErr_SetString(PyExc_RuntimeError,
                            "oomkit could not mark the gradients of the parameters");
            return -1;
        }
        return 0;
    }
    g->began_versions = PyMem_Calloc(n + 1, sizeof(*g->began_versions));
    if (g->began_versions == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (i = 0; i < n; i++) {
        uint32_t version = 0;
        OWNED PyObject *gradient = grads_get(call, (Py_ssize_t)i);
        int result = gradient == NULL ? -1
                     : gradient == Py_None
                         ? 0
                         : oomkit_tensor_version(call->st, gradient, &version);
        g->began_versions[i] = gradient == Py_None ? 0 : version + 1;
        if (result < 0) {
            return -1;
        }
    }
    return 0;
}

int
oomkit_grads_since_micro(oomkit_call *call, uint8_t *states)
{
    oomkit_grads *g = &call->grads;
    Py_ssize_t i, n = call->parts->param_count;
    size_t moved;

    if (g->began != NULL) {
        if (call->st->bridge->grads_compare((const void *const *)call->parts->params,
                                            call->st->impl_offset, (size_t)n, g->began,
                                            states, NULL, &moved) == OOMKIT_OK) {
            return 0;
        }
        PyErr_SetString(PyExc_RuntimeError,
                        "oomkit could not compare the gradients of the parameters");
        return -1;
    }
    for (i = 0; g->began_versions != NULL && i < n; i++) {
        uint32_t version = 0, was = g->began_versions[i];
        OWNED PyObject *gradient = grads_get(call, i);
        int result = gradient == NULL ? -1
                     : gradient == Py_None
                         ? 0
                         : oomkit_tensor_version(call->st, gradient, &version);
        states[i] = gradient == Py_None  ? OOMKIT_GRAD_GONE
                    : was == 0           ? OOMKIT_GRAD_NEW
                    : was == version + 1 ? OOMKIT_GRAD_SAME
                                         : OOMKIT_GRAD_MOVED;
        if (result < 0) {
            return -1;
        }
    }
    return 0;
}

/* Forgets what was marked when a micro-batch began. */
void
oomkit_grads_end_micro(oomkit_call *call)
{
    oomkit_grads *g = &call->grads;

    if (g->began != NULL) {
        call->st->bridge->grads_release(g->began, (size_t)call->parts->param_count);
        MEMORY_CLEAR(g->began);
    }
    MEMORY_CLEAR(g->began_versions);
}
