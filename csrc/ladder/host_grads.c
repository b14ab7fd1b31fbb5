/* Gradients that accumulate on the host: while a call runs a backward, each gradient
 * leaves the device as soon as autograd has accumulated it, and is added to
 * the sum that is on the host. So a backward needs room for those that it is just
 * making, not for what earlier micro-batches have left beside them.
 *
 * The sums are those of a plain accumulation, bit for bit: torch's hook for a gradient
 * that has accumulated runs each time that there is one, so that additions come in the
 * same order, and an addition is rounded alike on every device. The last micro-batch's
 * backward ends with all of them on the device, where the step looks for them. */
#include "activations.h"
#include "ladder.h"
#include "../device/device.h"
#include "../optim/update_part.h"
#include "../py/modes.h"
#include "../py/tensor.h"
#include "../sizes/sizes.h"
#include "../undo/gradients.h"

#define SMALLEST 4096 /* bytes: what is smaller stays */

static const char *const capsule_name = "oomkit.host_grads";
static const char *const capsule_ended = "oomkit.host_grads that have ended";

static int
is_wanted(oomkit_call *call)
{
    return call->cut->plan.rung >= OOMKIT_RUNG_GRADIENTS &&
           oomkit_rung_allowed(call, OOMKIT_RUNG_GRADIENTS) &&
           !oomkit_ranks_agreed(call);
}

int
oomkit_host_grads_possible(oomkit_call *call)
{
    const uint64_t left = oomkit_host_left(call);
    const uint64_t bytes = call->step->gradient_bytes;

    if (bytes == 0 || call->batch.rows < 2 || oomkit_ranks_agreed(call)) {
        return 0;
    }
    return oomkit_host_share_of(call, bytes) < left;
}

/* --- one gradient --- */

/* The number of a parameter. Gradients come about in the order of the last one, so that
 * the search begins there. -1 without an exception where it is none. */
static Py_ssize_t
number_of(const oomkit_call *call, PyObject *param, PyObject *capsule)
{
    const Py_ssize_t n = call->parts->param_count;
    const Py_ssize_t from = (Py_ssize_t)(intptr_t)PyCapsule_GetContext(capsule);
    Py_ssize_t i, at;

    for (i = 0; i < n; i++) {
        at = (from + n - i) % n;
        if (call->parts->params[at] == param) {
            return PyCapsule_SetContext(capsule, (void *)(intptr_t)at) < 0 ? -1 : at;
        }
    }
    return -1;
}

/* May it go? 1, 0 or -1. */
static int
may_go(oomkit_call *call, PyObject *grad)
{
    oomkit_tensor_facts facts;

    if (oomkit_tensor_facts_get(call->st, grad, 0, &facts) < 0) {
        return -1;
    }
    return facts.is_strided && !facts.requires_grad && facts.bytes >= SMALLEST &&
           facts.device_type == call->device.type &&
           (facts.device_type == OOMKIT_DEVICE_CPU ||
            facts.device_index == call->device.index);
}

/* It is of another kind now (with a graph, sparse): the sum goes on where it is. */
static int
grad_stays(oomkit_call *call, Py_ssize_t i, PyObject *grad)
{
    PyObject *sum = oomkit_grads_hosted_of(call, i); /* borrowed */
    OWNED PyObject *before = NULL, *both = NULL;

    if (sum == NULL) {
        return 0;
    }
    before = oomkit_device_copy(call, sum);
    both = before == NULL ? NULL : PyNumber_Add(before, grad);
    if (both == NULL || grads_set(call, i, both) < 0) {
        return -1;
    }
    oomkit_grads_host(call, i, NULL);
    return 0;
}

/* It leaves the device; what has accumulated on the host grows by it. 0 or -1. */
static int
grad_goes(oomkit_call *call, Py_ssize_t i, PyObject *grad)
{
    oomkit_state *st = call->st;
    PyObject *sum = oomkit_grads_hosted_of(call, i); /* borrowed */
    OWNED PyObject *done = NULL, *there = NULL;

    there = sum != NULL && call->device.type == OOMKIT_DEVICE_CPU
                ? Py_NewRef(grad)
                : oomkit_host_copy_pinned(st, grad);
    if (there == NULL) {
        return -1;
    }
    if (sum == NULL) {
        oomkit_grads_host(call, i, STEAL(there));
    } else {
        EXEMPT (st) {
            done = PyObject_CallMethod(sum, "add_", "O", there);
        }
        if (done == NULL) {
            return -1;
        }
    }
    return grads_set(call, i, Py_None);
}

/* torch's hook of a parameter whose gradient has accumulated. */
static PyObject *
grad_accumulated(PyObject *capsule, PyObject *param)
{
    oomkit_call *call = PyCapsule_GetPointer(capsule, capsule_name); /* borrowed */
    OWNED PyObject *grad = NULL;
    Py_ssize_t at = call == NULL ? -1 : number_of(call, param, capsule);
    int goes;

    if (at < 0 || oomkit_grads_are_callers(call)) {
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    }
    grad = grads_get(call, at);
    if (grad == NULL || grad == Py_None) {
        return STEAL(grad);
    }
    goes = may_go(call, grad);
    if (goes < 0 ||
        (goes ? grad_goes(call, at, grad) : grad_stays(call, at, grad)) < 0) {
        return NULL;
    }
    return Py_NewRef(Py_None);
}

static PyMethodDef grad_method = {"oomkit_host_grads", grad_accumulated, METH_O, NULL};

/* --- a backward --- */

/* From here on nothing is moved: the hooks are those of a dict that is empty then.
 * Keeps an exception. */
static void
hooks_remove(oomkit_call *call)
{
    PyObject *hook; /* borrowed from the dict */
    Py_ssize_t i, at = 0;

    if (call->cut->host_grads == NULL) {
        return;
    }
    KEEPING_EXCEPTION {
        while (PyDict_Next(call->cut->host_grads, &at, NULL, &hook)) {
            /* Who keeps the hook does not find the call by it. */
            if (PyCFunction_Check(hook) &&
                PyCapsule_SetName(PyCFunction_GET_SELF(hook), capsule_ended) < 0) {
                oomkit_error_dismiss();
            }
        }
        PyDict_Clear(call->cut->host_grads);
        for (i = 0; i < call->parts->param_count; i++) {
            PyObject *name = call->st->str_post_accumulate_hooks; /* of state */
            OWNED PyObject *ours = PyObject_GetAttr(call->parts->params[i], name);
            if (ours == NULL ||
                (ours == call->cut->host_grads &&
                 PyObject_SetAttr(call->parts->params[i], name, Py_None) < 0)) {
                oomkit_error_dismiss(); /* it is left with a dict without hooks */
            }
        }
    }
    Py_CLEAR(call->cut->host_grads);
}

/* Those of an earlier backward of the same micro-batch go first. 0 or -1. */
static int
earlier_go(oomkit_call *call)
{
    Py_ssize_t i;

    if (!oomkit_grads_marked(call) || oomkit_grads_are_callers(call)) {
        return 0;
    }
    for (i = 0; i < call->parts->param_count; i++) {
        OWNED PyObject *grad = grads_get(call, i);
        int goes = grad == NULL ? -1 : grad == Py_None ? 0 : may_go(call, grad);
        if (goes < 0 || (goes > 0 && grad_goes(call, i, grad) < 0)) {
            return -1;
        }
    }
    return 0;
}

/* A parameter with such hooks of the user's keeps its gradient. 0 or -1. */
static int
hook_add(oomkit_call *call, PyObject *param)
{
    PyObject *name = call->st->str_post_accumulate_hooks; /* borrowed from state */
    OWNED PyObject *theirs = PyObject_GetAttr(param, name);

    if (theirs == NULL) {
        return -1;
    }
    return PyDict_Check(theirs) && PyDict_GET_SIZE(theirs) > 0
               ? 0
               : PyObject_SetAttr(param, name, call->cut->host_grads);
}

static int
host_backward_begins(oomkit_call *call, oomkit_backward *backward)
{
    OWNED PyObject *capsule = NULL, *hook = NULL, *key = NULL;
    Py_ssize_t i;

    (void)backward;
    if (!is_wanted(call)) {
        return 0;
    }
    capsule = PyCapsule_New(call, capsule_name, NULL);
    hook = capsule == NULL ? NULL : PyCFunction_New(&grad_method, capsule);
    key = PyLong_FromLong(0);
    call->cut->host_grads = hook == NULL || key == NULL ? NULL : PyDict_New();
    if (call->cut->host_grads == NULL || oomkit_grads_host_begin(call) < 0 ||
        PyDict_SetItem(call->cut->host_grads, key, hook) < 0 || earlier_go(call) < 0) {
        hooks_remove(call);
        return -1;
    }
    for (i = 0; i < call->parts->param_count; i++) {
        if (hook_add(call, call->parts->params[i]) < 0) {
            hooks_remove(call);
            return -1;
        }
    }
    return 0;
}

/* The last backward: the step is about to look at them. 0 or -1. */
static int
host_backward_ends(oomkit_call *call, const oomkit_backward *backward)
{
    Py_ssize_t i;

    (void)backward;
    if (call->cut->host_grads == NULL) {
        return 0;
    }
    hooks_remove(call);
    if (call->is_last) { /* what comes now has the same size with any rows */
        oomkit_phase_optimizer(call);
    }
    for (i = 0; call->is_last && i < call->parts->param_count; i++) {
        PyObject *sum = oomkit_grads_hosted_of(call, i); /* borrowed */
        OWNED PyObject *grad = sum == NULL ? NULL : oomkit_device_copy(call, sum);
        if (sum == NULL) {
            continue;
        }
        if (grad == NULL || grads_set(call, i, grad) < 0) {
            return -1;
        }
        oomkit_grads_host(call, i, NULL);
    }
    return 0;
}

const oomkit_rule oomkit_host_grads_rule = {.backward_begins = host_backward_begins,
                                            .backward_ends = host_backward_ends,
                                            .backward_left = hooks_remove};
