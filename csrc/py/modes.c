/* Torch's modes: gradient recording and inference. */
#include "modes.h"
#include "tensor.h"

/* --- gradient recording --- */

static int
grad_mode_put(oomkit_state *st, int enabled)
{
    OWNED PyObject *done =
        PyObject_CallOneArg(st->set_grad_enabled, enabled ? Py_True : Py_False);

    return done == NULL ? -1 : 0;
}

int
oomkit_grad_mode_set(oomkit_state *st, int enabled)
{
    OWNED PyObject *was = PyObject_CallNoArgs(st->is_grad_enabled);
    int result;

    if (was == NULL) {
        return -1;
    }
    result = was == Py_True;
    return result == enabled || grad_mode_put(st, enabled) == 0 ? result : -1;
}

int
oomkit_grad_mode_off(oomkit_state *st)
{
    return oomkit_grad_mode_set(st, 0);
}

int
oomkit_grad_mode_back(oomkit_state *st, int mode, int result)
{
    PyObject *first = PyErr_Occurred() ? oomkit_exception_take() : NULL; /* owned */
    int tries;

    for (tries = 0; tries < 2 && oomkit_grad_mode_set(st, mode) < 0; tries++) {
        PyObject *again = oomkit_exception_take(); /* owned */
        result = -1;
        if (first == NULL) {
            first = again;
        } else {
            Py_DECREF(again); /* the first one tells more */
        }
    }
    if (first != NULL) {
        oomkit_exception_give(first);
    }
    return result;
}

/* Inference mode: what oomkit copies must be normal tensors, or the next call outside
 * could not write to them; and what was made in inference mode can be written to in
 * inference mode alone. */

/* Enters inference mode, or leaves it, until oomkit_inference_end(). *guard is owned,
 * or NULL where the mode is the wanted one already. 0 or -1. */
int
oomkit_inference_begin(oomkit_state *st, int enabled, PyObject **guard)
{
    OWNED PyObject *now = PyObject_CallNoArgs(st->is_inference_mode);
    OWNED PyObject *done = NULL;

    *guard = NULL;
    if (now == NULL) {
        return -1;
    }
    if ((now == Py_True) == (enabled != 0) || st->inference_guard == NULL) {
        return 0;
    }
    *guard = PyObject_CallOneArg(st->inference_guard, enabled ? Py_True : Py_False);
    done = *guard ? PyObject_CallMethodNoArgs(*guard, st->str_enter) : NULL;
    if (done == NULL) {
        Py_CLEAR(*guard);
        return -1;
    }
    return 0;
}

/* Takes the guard. Keeps the exception in flight. 0 or -1. */
int
oomkit_inference_end(const oomkit_state *st, PyObject *guard, int result)
{
    PyObject *const nothing[] = {guard, Py_None, Py_None, Py_None};
    PyObject *type, *value, *traceback, *done; /* owned */

    if (guard == NULL) {
        return result;
    }
    PyErr_Fetch(&type, &value, &traceback);
    done = PyObject_VectorcallMethod(st->str_exit, nothing, 4, NULL);
    Py_DECREF(guard);
    if (done == NULL) {
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        return -1;
    }
    Py_DECREF(done);
    PyErr_Restore(type, value, traceback);
    return result;
}

/* tensor.copy_(value), whether or not it is an inference tensor. 0 or -1. */
int
oomkit_tensor_write(oomkit_state *st, PyObject *tensor, PyObject *value)
{
    oomkit_tensor_facts facts;
    PyObject *guard = NULL, *done; /* owned */

    if (oomkit_tensor_facts_get(st, tensor, 0, &facts) < 0 ||
        (!facts.has_version && oomkit_inference_begin(st, 1, &guard) < 0)) {
        return -1;
    }
    done = PyObject_CallMethodOneArg(tensor, st->str_copy, value);
    Py_XDECREF(done);
    return oomkit_inference_end(st, guard, done == NULL ? -1 : 0);
}
