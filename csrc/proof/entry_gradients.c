/* The gradients that were there before a proof: each run begins with them, as the step
 * would find them, and they come back with their values. The tensors themselves are
 * held weakly, so that a step that drops them has their memory; but for parts of a flat
 * tensor, which keeps it all, and to which the program may write. */
#include "proof.h"
#include "../py/modes.h"
#include "../py/tensor.h"
#include "../undo/gradients.h"

struct oomkit_proof_gradient {
    PyObject *ref; /* owned: weak reference to the tensor, NULL without a gradient */
    PyObject
        *part; /* owned: the tensor itself where it is a part of another, or NULL */
    PyObject *value; /* owned: host copy */
    uint32_t version;
};

/* Does it lie in memory that others have, too? 1, 0 or -1. */
static int
gradient_is_part(const oomkit_call *call, PyObject *gradient)
{
    const oomkit_bridge *bridge = call->st->bridge;
    OWNED PyObject *base = PyObject_GetAttr(gradient, call->st->str_base);
    oomkit_storage_facts facts;

    if (base != Py_None) {
        return base == NULL ? -1 : 1;
    }
    return oomkit_has_bridge(call->st) && bridge->storage_facts != NULL &&
           bridge->storage_facts(gradient, call->st->impl_offset, &facts) ==
               OOMKIT_OK &&
           facts.bytes > facts.end - facts.begin;
}

/* Notes which tensor the gradient is now. 0 or -1. */
static int
gradient_note(oomkit_proof *p, Py_ssize_t i, PyObject *gradient)
{
    oomkit_proof_gradient *item = &p->gradients[i];
    OWNED PyObject *ref = PyWeakref_NewRef(gradient, NULL);
    const int is_part = ref == NULL ? -1 : gradient_is_part(p->call, gradient);

    if (is_part < 0 ||
        oomkit_tensor_version(p->call->st, gradient, &item->version) < 0) {
        return -1;
    }
    Py_XSETREF(item->ref, STEAL(ref));
    Py_XSETREF(item->part, is_part ? Py_NewRef(gradient) : NULL);
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
        OWNED PyObject *gradient = grads_get(call, i);
        if (gradient == NULL) {
            return -1;
        }
        if (gradient == Py_None) {
            continue;
        }
        p->gradients[i].value = oomkit_host_copy(call->st, gradient);
        if (p->gradients[i].value == NULL || gradient_note(p, i, gradient) < 0) {
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
    OWNED PyObject *device =
        PyObject_GetAttr(p->call->parts->params[i], st->str_device);
    OWNED PyObject *fresh =
        device ? PyObject_CallMethod(value, "to", "O", device) : NULL;

    if (fresh == value) { /* on the CPU: the copy itself must stay as it is */
        Py_SETREF(fresh, PyObject_CallMethodNoArgs(value, st->str_clone));
    }
    if (fresh == NULL || grads_set(p->call, i, fresh) < 0) {
        return -1;
    }
    return gradient_note(p, i, fresh);
}

/* The tensor that was there, with its value. 0 or -1. */
static int
gradient_same(oomkit_proof *p, Py_ssize_t i, PyObject *target)
{
    oomkit_proof_gradient *item = &p->gradients[i];
    uint32_t version;
    OWNED PyObject *done = NULL;

    if (oomkit_tensor_version(p->call->st, target, &version) < 0 ||
        grads_set(p->call, i, target) < 0) {
        return -1;
    }
    if (version == item->version &&
        !oomkit_ranks_sharded(p->call)) { /* torch adds to the part inside of it */
        return 0;
    }
    done = PyObject_CallMethodOneArg(target, p->call->st->str_copy, item->value);
    return done == NULL ? -1 : gradient_note(p, i, target);
}

static int
gradient_back(oomkit_proof *p, Py_ssize_t i)
{
    oomkit_proof_gradient *item = &p->gradients[i];
    OWNED PyObject *target = NULL;

    if (item->value == NULL) {
        OWNED PyObject *now = grads_get(p->call, i);
        return now == NULL ? -1 : now == Py_None ? 0 : grads_set(p->call, i, Py_None);
    }
    target = oomkit_reference_get(item->ref);
    return target == NULL ? gradient_anew(p, i) : gradient_same(p, i, target);
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
    EXEMPT (st) {
        for (i = 0; result == 0 && i < p->gradient_count; i++) {
            result = gradient_back(p, i);
        }
    }
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
        Py_XDECREF(gradients[i].part);
        Py_XDECREF(gradients[i].value);
    }
    PyMem_Free(gradients);
}
