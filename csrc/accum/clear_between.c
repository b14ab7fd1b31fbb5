/* zero_grad() between two backwards of a split call (adversarial examples by FGSM).
 *
 * What it clears is what the backwards before it have left in .grad: in the whole batch
 * nothing of them reaches an update. The first micro-batch shows where that is. There
 * the gradients are parked after each backward, and are dropped once another one
 * begins. In later micro-batches the sum so far stays parked until the clear has run;
 * what comes before accumulates in .grad, alone, and is cleared there for real.
 *
 * Only where a proof shows that this makes the whole: a program may have read the
 * gradients before it cleared them (sharpness-aware minimisation). */
#include "accum.h"
#include "../proof/proof.h"
#include "../py/frames.h"
#include "../undo/gradients.h"

int
oomkit_clear_note(oomkit_call *call, PyObject *target)
{
    if (call->backward.done == 0 || !call->split) {
        return 0;
    }
    if ((call->clear.where == NULL &&
         (call->clear.where = oomkit_course_where()) == NULL) ||
        (call->clear.targets == NULL &&
         (call->clear.targets = PyList_New(0)) == NULL)) {
        return -1;
    }
    return PyList_Append(call->clear.targets, target);
}

void
oomkit_clear_forget(oomkit_call *call)
{
    Py_CLEAR(call->clear.where);
    Py_CLEAR(call->clear.targets);
}

/* Adds the tensors of an optimizer, or of a module, to a set. 0 or -1. */
static int
clear_collect(const oomkit_state *st, PyObject *target, PyObject *set)
{
    PyObject *groups, *each; /* owned */
    Py_ssize_t i;
    int result = 0;

    if (!PyObject_TypeCheck(target, (PyTypeObject *)st->Optimizer)) {
        each = PyObject_CallMethod(target, "parameters", NULL);
        groups = each == NULL ? NULL : PyObject_CallMethod(set, "update", "O", each);
        Py_XDECREF(each);
        Py_XDECREF(groups);
        return groups == NULL ? -1 : 0;
    }
    groups = PyObject_GetAttr(target, st->str_param_groups);
    if (groups == NULL || !PyList_Check(groups)) {
        Py_XDECREF(groups);
        return PyErr_Occurred() ? -1 : 0; /* it covers nothing that we know of */
    }
    for (i = 0; result == 0 && i < PyList_GET_SIZE(groups); i++) {
        PyObject *params = PyObject_GetItem(PyList_GET_ITEM(groups, i), st->str_params);
        each = params == NULL ? NULL : PyObject_CallMethod(set, "update", "O", params);
        result = each == NULL ? -1 : 0;
        Py_XDECREF(params);
        Py_XDECREF(each);
    }
    Py_DECREF(groups);
    return result;
}

/* Does what was cleared hold each parameter whose gradient is parked? 1, 0 or -1. */
static int
clear_covers(const oomkit_call *call)
{
    PyObject *const *parked = call->grads.parked; /* borrowed, as the next one is */
    PyObject *const *entry = call->grads.entry;
    PyObject *set = PySet_New(NULL); /* owned */
    Py_ssize_t i;
    int result = set == NULL ? -1 : 1;

    for (i = 0; result == 1 && i < PyList_GET_SIZE(call->clear.targets); i++) {
        result =
            clear_collect(call->st, PyList_GET_ITEM(call->clear.targets, i), set) < 0
                ? -1
                : 1;
    }
    for (i = 0; result == 1 && i < call->parts->param_count; i++) {
        if ((parked != NULL && parked[i] != NULL) ||
            (entry != NULL && entry[i] != NULL && entry[i] != Py_None)) {
            result = PySet_Contains(set, call->parts->params[i]);
        }
    }
    Py_XDECREF(set);
    return result;
}

/* Has no parameter a gradient? 1, 0 or -1. */
static int
clear_is_clear(oomkit_call *call)
{
    Py_ssize_t i;
    int clear = 1;

    for (i = 0; clear == 1 && i < call->parts->param_count; i++) {
        PyObject *gradient = grads_get(call, i); /* owned */
        clear = gradient == NULL ? -1 : gradient == Py_None;
        Py_XDECREF(gradient);
    }
    return clear;
}

int
oomkit_clear_is_due(const oomkit_call *call)
{
    return call->cut.at > 0 && call->backward.done < call->clear.backwards;
}

int
oomkit_clear_between(oomkit_call *call)
{
    oomkit_grads *g = &call->grads;
    int done;

    if (oomkit_proof_of_whole(call)) {
        done = 1; /* nothing is parked: it has run */
    } else if (call->cut.at > 0) {
        if (call->backward.done > call->clear.backwards) {
            return 0;
        }
        done = call->backward.done < call->clear.backwards ? 1 : clear_is_clear(call);
    } else {
        if (call->is_last || g->stashing || g->aside != NULL ||
            call->clear.targets == NULL ||
            (g->at_entry && !g->apart && g->copies == NULL) ||
            !(call->cut.forced || oomkit_proof_known(call))) {
            return 0;
        }
        done = clear_covers(call);
        if (done == 1) {
            grads_array_free(call, &g->parked);
            g->is_parked = 0;
            g->dropped = g->apart;
            call->clear.backwards = call->backward.done;
        }
    }
    if (done == 1) {
        oomkit_clear_forget(call);
    }
    return done;
}
