/* Gradient recording off and as it was again, and how it was when a call began. */
#include "modes.h"

static int
grad_mode_put(oomkit_state *st, int enabled)
{
    PyObject *done = /* owned */
        PyObject_CallOneArg(st->set_grad_enabled, enabled ? Py_True : Py_False);

    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

int
oomkit_grad_mode_set(oomkit_state *st, int enabled)
{
    PyObject *was = PyObject_CallNoArgs(st->is_grad_enabled); /* owned */
    int result;

    if (was == NULL) {
        return -1;
    }
    result = was == Py_True;
    Py_DECREF(was);
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
