/* Leaves that the search did not find and that take part are taken in before a split
 * attempt is begun again. Nothing but the forward of its first micro-batch has run. */
#include "accum.h"
#include "../hook/hook.h"
#include "../undo/gradients.h"
#include "../undo/undo.h"

/* Those that outlived the attempt. New list or NULL. */
static PyObject *
restart_alive(oomkit_call *call)
{
    OWNED PyObject *alive = PyList_New(0);
    PyObject *refs = call->unknown.leaves; /* borrowed from call */
    Py_ssize_t i;

    for (i = 0; alive != NULL && refs != NULL && i < PyList_GET_SIZE(refs); i++) {
        OWNED PyObject *leaf = oomkit_reference_get(PyList_GET_ITEM(refs, i));
        if (leaf != NULL && PyList_Append(alive, leaf) < 0) {
            return NULL;
        }
    }
    return STEAL(alive);
}

/* What is sized by the number of parameters follows it. Keeps an exception in flight.
 * 0 or -1. */
static int
restart_grow(oomkit_call *call, Py_ssize_t params, Py_ssize_t roots)
{
    PyObject *exception = PyErr_Occurred() ? oomkit_exception_take() : NULL; /* owned */
    int result;

    oomkit_params_unmark(call);
    result = oomkit_participants_hold(call->parts);
    if (oomkit_grads_grow(call, params) < 0 ||
        (result == 0 && oomkit_intercept_zero_grad(call, roots) < 0)) {
        result = -1;
    }
    if (exception != NULL && PyErr_Occurred()) {
        Py_DECREF(exception);
    } else if (exception != NULL) {
        oomkit_exception_give(exception);
        result = -1;
    }
    return result;
}

int
oomkit_restart_with_buffer(oomkit_call *call, PyObject *buffer)
{
    oomkit_participants *parts = call->parts;
    Py_ssize_t params = parts->param_count, roots = PyList_GET_SIZE(parts->roots);
    OWNED PyObject *ref = NULL;
    int result;

    /* Gradients that are kept by number would go to others, and other calls have arrays
     * of as many parameters: then the graph shows it. */
    if (oomkit_unknown_known(call, buffer) || oomkit_call_is_replay(call) ||
        parts->refs > 2 || oomkit_grads_by_number(call)) {
        return 0;
    }
    if (parts->adopted == NULL && (parts->adopted = PyList_New(0)) == NULL) {
        return -1;
    }
    ref = PyWeakref_NewRef(buffer, NULL);
    result = ref == NULL ? -1 : PyList_Append(parts->adopted, ref);
    oomkit_participants_let_go(parts);
    return result < 0 || restart_grow(call, params, roots) < 0 ||
                   oomkit_params_mark(call) < 0
               ? -1
               : 0;
}

/* Takes in what a module has, and what is an argument. 1 something, 0, or -1. */
static int
restart_by_modules(oomkit_call *call)
{
    OWNED PyObject *alive = restart_alive(call), *all = NULL;
    Py_ssize_t i;
    int taken = 0;

    if (alive == NULL) {
        return -1;
    }
    if (PyList_GET_SIZE(alive) > 0 && (all = oomkit_modules_alive(call->st)) == NULL) {
        return -1;
    }
    for (i = 0; i < PyList_GET_SIZE(alive); i++) {
        int result = oomkit_unknown_adopt(call, PyList_GET_ITEM(alive, i), all);
        if (result < 0) {
            return -1;
        }
        taken |= result > 0;
    }
    return taken;
}

/* Takes in what else is kept, once garbage is gone. 1 something, 0, or -1. */
static int
restart_weakly(oomkit_call *call)
{
    OWNED PyObject *done = PyObject_CallNoArgs(call->st->gc_collect);
    OWNED PyObject *alive = done ? restart_alive(call) : NULL;
    Py_ssize_t i;
    int taken = 0, result = alive == NULL ? -1 : 0;

    for (i = 0; result >= 0 && i < PyList_GET_SIZE(alive); i++) {
        PyObject *leaf = PyList_GET_ITEM(alive, i); /* borrowed */
        result = oomkit_unknown_known(call, leaf)
                     ? 0
                     : oomkit_unknown_kept(call, leaf, alive);
        if (result > 0) {
            result = oomkit_unknown_adopt(call, leaf, NULL);
            taken |= result > 0;
        }
    }
    return result < 0 ? -1 : taken;
}

/* Is one of them alive and no participant? 1, 0 or -1. */
static int
restart_remains(oomkit_call *call)
{
    OWNED PyObject *alive = restart_alive(call);
    Py_ssize_t i;

    if (alive == NULL) {
        return -1;
    }
    for (i = 0; i < PyList_GET_SIZE(alive); i++) {
        if (!oomkit_unknown_known(call, PyList_GET_ITEM(alive, i))) {
            return 1;
        }
    }
    return 0;
}

/* Takes in what is alive. 0 or -1. */
static int
restart_take_in(oomkit_call *call)
{
    oomkit_participants *parts = call->parts;
    Py_ssize_t params = parts->param_count, roots = PyList_GET_SIZE(parts->roots);
    Py_ssize_t tail = parts->adopted_count;
    int weakly = 0, taken = restart_by_modules(call), shifted;

    if (taken >= 0) {
        weakly = restart_remains(call);
        weakly = weakly > 0 ? restart_weakly(call) : weakly;
    }
    oomkit_unknown_forget(call);
    if (taken == 0 && weakly == 0) {
        parts->leaves_die = 1;
        call->tries.restarts = OOMKIT_RESTARTS; /* another one would find as little */
        return 0;
    }
    shifted =
        tail > 0 && PyList_GET_SIZE(parts->roots) > roots && oomkit_grads_outlive(call);
    oomkit_participants_let_go(parts);
    if (restart_grow(call, params, roots) < 0 || taken < 0 || weakly < 0) {
        return -1;
    }
    if (shifted) { /* gradients kept by number would go to others */
        oomkit_raise(call->st->SplitError,
                     "auto_batch cannot split this step: it found modules that "
                     "contribute to the loss only after the first micro-batch had "
                     "begun; pass model=... to auto_batch" SEE("parameters-not-found"));
        return -1;
    }
    return 0;
}

void
oomkit_unknown_forget(oomkit_call *call)
{
    Py_CLEAR(call->unknown.leaves);
}

int
oomkit_unknown_take_in(oomkit_call *call, int why)
{
    return why == OOMKIT_RESTART_UNKNOWN ? restart_take_in(call) : 0;
}

/* At the end of the first micro-batch: unknown leaves must have been made in it and be
 * gone. 0, or -1 with SplitError. */
int
oomkit_unknown_check(oomkit_call *call, PyObject *result)
{
    OWNED PyObject *leaves = STEAL(call->unknown.of_step);
    Py_ssize_t i;

    for (i = 0; i < PyList_GET_SIZE(leaves); i++) {
        PyObject *pair = PyList_GET_ITEM(leaves, i); /* borrowed */
        OWNED PyObject *leaf = oomkit_reference_get(PyTuple_GET_ITEM(pair, 0));
        OWNED PyObject *name = NULL;
        int had = PyLong_AsLong(PyTuple_GET_ITEM(pair, 1)) != 0;
        int kept = leaf == NULL ? 0 : oomkit_unknown_kept(call, leaf, result);
        if (kept == 0) {
            continue;
        }
        if (kept < 0) {
            return -1;
        }
        name = oomkit_describe_tensor(call, leaf);
        call->parts->leaves_die = 0;
        if ((!had && PyObject_SetAttr(leaf, call->st->str_grad, Py_None) < 0) ||
            name == NULL) {
            return -1;
        }
        return oomkit_refuse_step(
            call,
            "%U contributes to the loss, is created again in each micro-batch, and is "
            "kept afterwards%s. Create it before the decorated step, or do not keep "
            "it" SEE("parameters-not-found"),
            name, had ? ", with a changed .grad" : "");
    }
    return 0;
}
