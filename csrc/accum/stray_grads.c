/* Gradients that no backward of ours explains: set by hand, or by a backward that went
 * past us. While the batch is split they carry no weight and are not parked, so they
 * are looked for before every backward and update and at the end of a micro-batch. */
#include "accum.h"
#include "../call/call.h"
#include "../py/tensor.h"
#include "../undo/gradients.h"

/* A gradient of zeros is one that was cleared. 1 something is in it, 0, or -1. */
static int
stray_counts(oomkit_call *call, Py_ssize_t i)
{
    OWNED PyObject *gradient = grads_get(call, i), *any = NULL;

    if (gradient == NULL) {
        return -1;
    }
    EXEMPT (call->st) {
        any = PyObject_CallMethod(gradient, "any", NULL);
    }
    Py_CLEAR(gradient);
    if (any == NULL) {
        if (oomkit_exception_is_oom(call->st) || /* torch's is a RuntimeError, too */
            (!PyErr_ExceptionMatches(PyExc_RuntimeError) &&
             !PyErr_ExceptionMatches(PyExc_TypeError))) {
            return -1; /* a missing any() is NotImplementedError: one of those */
        }
        PyErr_Clear(); /* a layout without any(): taken as a value */
        return 1;
    }
    return PyObject_IsTrue(any);
}

/* Without marks of the attempt nothing else takes these back. 0 or -1. */
static int
stray_drop(oomkit_call *call, const uint8_t *states)
{
    Py_ssize_t i;
    for (i = 0; !oomkit_grads_marked(call) && i < call->parts->param_count; i++) {
        if (states[i] == OOMKIT_GRAD_NEW && grads_set(call, i, Py_None) < 0) {
            return -1;
        }
    }
    return 0;
}

/* The first gradient that has come or moved without a backward, where none may have. 1
 * and *which, 0, or -1. */
static int
stray_find(oomkit_call *call, const uint8_t *states, Py_ssize_t *which)
{
    Py_ssize_t i;
    int result = 0;

    for (i = 0; result == 0 && i < call->parts->param_count; i++) {
        if (states[i] == OOMKIT_GRAD_NEW || states[i] == OOMKIT_GRAD_MOVED ||
            states[i] == OOMKIT_GRAD_REPLACED) {
            *which = i;
            result = stray_counts(call, i);
        }
    }
    return result;
}

/* Asked where gradients are parked, or before any backward of this micro-batch. 0, or
 * -1 with SplitError. */
static int
stray_refuse(oomkit_call *call)
{
    Py_ssize_t which = 0;
    OWNED_MEMORY uint8_t *states = NULL;
    OWNED PyObject *name = NULL;
    int result;

    if ((!oomkit_grads_parked(call) && call->backward.done > 0) ||
        !oomkit_grads_micro_marked(call)) {
        return 0;
    }
    states = PyMem_Calloc((size_t)call->parts->param_count + 1, 1);
    if (states == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (oomkit_grads_since_micro(call, states) < 0) {
        return -1;
    }
    result = stray_find(call, states, &which);
    if (result <= 0) {
        return result;
    }
    if (stray_drop(call, states) < 0) {
        return -1;
    }
    name = oomkit_describe_tensor(call, call->parts->params[which]);
    if (name == NULL) {
        return -1;
    }
    return oomkit_refuse_split(
        call,
        "the gradient of %U was set in micro-batch %lld of %lld by hand, or by a "
        "backward that bypasses torch.autograd. Call backward() on the loss "
        "instead%s%s" SEE("gradient-set-by-hand"),
        name, (long long)(call->cut->at + 1), (long long)call->cut->count,
        call->backward.done > 0
            ? ", or guard the line with `if oomkit.current().is_last:`"
            : "",
        call->tries.ooms > 0 && !oomkit_grads_marked(call)
            ? ". Gradients may contain a part of this batch: call zero_grad() before "
              "you continue"
            : "");
}

static int
stray_micro_begins(oomkit_call *call)
{
    return call->split ? oomkit_grads_micro_begins(call) : 0;
}

static int
stray_backward(oomkit_call *call, oomkit_backward *backward)
{
    (void)backward;
    return stray_refuse(call);
}

static int
stray_update(oomkit_call *call, oomkit_update *update)
{
    return update->method->kind == OOMKIT_OWNER_SCHEDULER ? 0 : stray_refuse(call);
}

const oomkit_rule oomkit_stray_grads_rule = {.micro_begins = stray_micro_begins,
                                             .backward_begins = stray_backward,
                                             .update_begins = stray_update};

static int
stray_micro_ends(oomkit_call *call, PyObject *result)
{
    (void)result;
    return call->is_last ? 0 : stray_refuse(call);
}

const oomkit_rule oomkit_stray_grads_at_end_rule = {.micro_ends = stray_micro_ends};
