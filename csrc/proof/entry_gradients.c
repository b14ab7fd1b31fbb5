/* The gradients that were there before a proof: each run begins with them, as the step
 * would find them, and they come back with their values. The tensors themselves are
 * held weakly, so that a step that drops them has their memory. */
#include "proof.h"
#include "../py/modes.h"
#include "../py/tensor.h"
#include "../undo/gradients.h"

struct oomkit_proof_gradient {
    PyObject *ref;   /* owned: weak reference to the tensor, NULL without a gradient */
    PyObject *value; /* owned: host copy */
    uint32_t version;
};

/* Notes which tensor the gradient is now. 0 or -1. */
static int
gradient_note(oomkit_proof *p, Py_ssize_t i, PyObject *gradient)
{
    oomkit_proof_gradient *item = &p->gradients[i];
    PyObject *ref = PyWeakref_NewRef(gradient, NULL); /* owned */

    if (ref == NULL ||
        oomkit_tensor_version(p->call->st, gradient, &item->version) < 0) {
        Py_XDECREF(ref);
        return -1;
    }
    Py_XSETREF(item->ref, ref);
    return 0;
}

int
oomkit_proof_gradients_take(oomkit_proof *p)
{
    oomkit_call *call = p->call;
    Py_ssize_t i, n = call->parts->param_count;

    p->gradients = PyMem_Calloc((size_t)n + 1, sizeof(*p->gradients));
    if (p->gradients == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    p->gradient_count = n;
    for (i = 0; i < n; i++) {
        PyObject *gradient = grads_get(call, i); /* owned */
        int result = gradient == NULL ? -1 : 0;
        if (result == 0 && gradient != Py_None) {
            p->gradients[i].value = oomkit_host_copy(call->st, gradient);
            result = p->gradients[i].value == NULL ? -1 : gradient_note(p, i, gradient);
        }
        Py_XDECREF(gradient);
        if (result < 0) {
            return -1;
        }
    }
    return 0;
}

/* A tensor of its own with the value of the copy, where the step has dropped the one
 * that was there. 0 or -1. */
static int
gradient_anew(oomkit_proof *p, Py_ssize_t i)
{
    oomkit_state *st = p->call->st;
    PyObject *value = p->gradients[i].value; /* borrowed */
    PyObject *device = PyObject_GetAttr(p->call->parts->params[i], st->str_device);
    PyObject *fresh = device ? PyObject_CallMethod(value, "to", "O", device) : NULL;
    int result = -1; /* device, fresh: owned */

    if (fresh == value) { /* on the CPU: the copy itself must stay as it is */
        Py_SETREF(fresh, PyObject_CallMethodNoArgs(value, st->str_clone));
    }
    if (fresh != NULL && grads_set(p->call, i, fresh) == 0) {
        result = gradient_note(p, i, fresh);
    }
    Py_XDECREF(device);
    Py_XDECREF(fresh);
    return result;
}

/* The tensor that was there, with its value. 0 or -1. */
static int
gradient_same(oomkit_proof *p, Py_ssize_t i, PyObject *target)
{
    oomkit_proof_gradient *item = &p->gradients[i];
    uint32_t version;
    PyObject *done; /* owned */

    if (oomkit_tensor_version(p->call->st, target, &version) < 0 ||
        grads_set(p->call, i, target) < 0) {
        return -1;
    }
    if (version == item->version) {
        return 0;
    }
    done = PyObject_CallMethodOneArg(target, p->call->st->str_copy, item->value);
    Py_XDECREF(done);
    return done == NULL ? -1 : gradient_note(p, i, target);
}

static int
gradient_back(oomkit_proof *p, Py_ssize_t i)
{
    oomkit_proof_gradient *item = &p->gradients[i];
    PyObject *target; /* owned */
    int result;

    if (item->value == NULL) {
        PyObject *now = grads_get(p->call, i); /* owned */
        result = now == NULL ? -1 : now == Py_None ? 0 : grads_set(p->call, i, Py_None);
        Py_XDECREF(now);
        return result;
    }
    target = oomkit_reference_get(item->ref);
    if (target == NULL) {
        return gradient_anew(p, i);
    }
    result = gradient_same(p, i, target);
    Py_DECREF(target);
    return result;
}

int
oomkit_proof_gradients_back(oomkit_proof *p)
{
    oomkit_state *st = p->call->st;
    Py_ssize_t i;
    int result = 0, mode = oomkit_grad_mode_off(st);

    if (mode < 0) {
        return -1;
    }
    oomkit_exempt_enter(st);
    for (i = 0; result == 0 && i < p->gradient_count; i++) {
        result = gradient_back(p, i);
    }
    oomkit_exempt_leave(st);
    return oomkit_grad_mode_back(st, mode, result);
}

PyObject *
oomkit_proof_gradients_values(const oomkit_proof *p)
{
    PyObject *list = PyList_New(p->gradient_count); /* owned */
    Py_ssize_t i;

    for (i = 0; list != NULL && i < p->gradient_count; i++) {
        PyObject *value = p->gradients[i].value; /* borrowed */
        PyList_SET_ITEM(list, i, Py_NewRef(value == NULL ? Py_None : value));
    }
    return list;
}

void
oomkit_proof_gradients_free(oomkit_proof *p)
{
    oomkit_proof_gradient *gradients = p->gradients;
    Py_ssize_t i;

    p->gradients = NULL;
    for (i = 0; gradients != NULL && i < p->gradient_count; i++) {
        Py_XDECREF(gradients[i].ref);
        Py_XDECREF(gradients[i].value);
    }
    PyMem_Free(gradients);
}
