/* Taking in a leaf that was found in the graph of a backward. What leads to it decides
 * how it is held: where a module has it the module becomes a participant, with all that
 * it has; else the leaf is held weakly between calls, so that oomkit keeps nothing
 * alive. */
#include "accum.h"
#include "../call/call.h"

/* The adopted leaves that are alive join the parameters. 0 or -1. */
int
oomkit_participants_hold(oomkit_participants *parts)
{
    Py_ssize_t i, n = parts->adopted == NULL ? 0 : PyList_GET_SIZE(parts->adopted);
    void *grown;

    if (parts->adopted_count > 0 || n == 0) {
        return 0; /* they are there: another call of this thread's site is at work */
    }
    if (parts->param_room < parts->param_count + n) {
        grown = PyMem_Realloc(parts->params,
                              (size_t)(parts->param_count + n) * sizeof(PyObject *));
        if (grown == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        parts->params = grown;
        parts->param_room = parts->param_count + n;
    }
    for (i = n; i-- > 0;) {
        PyObject *leaf = /* owned, then by parts */
            oomkit_reference_get(PyList_GET_ITEM(parts->adopted, i));
        if (leaf != NULL) {
            parts->params[parts->param_count++] = leaf;
            parts->adopted_count++;
        } else if (PyList_SetSlice(parts->adopted, i, i + 1, NULL) < 0) {
            return -1;
        }
    }
    return 0;
}

/* What the list has already, as the search keeps it. New set or NULL. */
static PyObject *
adopt_seen(const oomkit_participants *parts)
{
    OWNED PyObject *seen = PySet_New(NULL);
    Py_ssize_t i, n = parts->roots == NULL ? 0 : PyList_GET_SIZE(parts->roots);

    for (i = 0; seen != NULL && i < parts->param_count + n + parts->owner_count; i++) {
        OWNED PyObject *object = NULL, *address = NULL;
        if (i < parts->param_count) {
            object = Py_NewRef(parts->params[i]);
        } else if (i < parts->param_count + n) {
            object = oomkit_reference_get(
                PyList_GET_ITEM(parts->roots, i - parts->param_count));
        } else {
            object =
                oomkit_reference_get(parts->owners[i - parts->param_count - n].ref);
        }
        if (object == NULL) {
            continue;
        }
        address = PyLong_FromVoidPtr(object);
        if (address == NULL || PySet_Add(seen, address) < 0) {
            return NULL;
        }
    }
    return STEAL(seen);
}

/* Buffers of a module in training mode may have moved in the attempt that has just been
 * given up, and nobody has marked them. 1, 0 or -1. */
static int
adopt_may_have_moved(oomkit_call *call, Py_ssize_t from)
{
    Py_ssize_t i;
    int result = 0;

    for (i = from; result == 0 && i < call->parts->buffered_count; i++) {
        OWNED PyObject *module = oomkit_reference_get(call->parts->buffered[i].ref);
        OWNED PyObject *training = NULL;
        if (module == NULL) {
            continue;
        }
        training = PyObject_GetAttr(module, call->st->str_training);
        result = training == NULL ? -1 : PyObject_IsTrue(training);
    }
    return result;
}

static int
adopt_refuse(oomkit_call *call, PyObject *leaf, const char *why)
{
    OWNED PyObject *name = oomkit_describe_tensor(call, leaf);

    if (name == NULL) {
        return -1;
    }
    return oomkit_refuse_step(
        call,
        "%U contributes to the loss, but was not found in the arguments, self, closure "
        "or globals of the step, and %s; pass model=... and optimizer=... to "
        "auto_batch (a tensor of your own as participants=...)" SEE(
            "parameters-not-found"),
        name, why);
}

/* What came with the module, from number `from` on, was not met by itself: has one of
 * them a gradient that may hold a part of this batch? 0, or -1 with an exception. */
static int
adopt_refuse_siblings(oomkit_call *call, Py_ssize_t from)
{
    Py_ssize_t i;

    for (i = from; call->tries.may_hold && i < call->parts->param_count; i++) {
        PyObject *param = call->parts->params[i];                         /* borrowed */
        PyObject *gradient = PyObject_GetAttr(param, call->st->str_grad); /* owned */
        int has = gradient != Py_None;
        if (gradient == NULL) {
            return -1;
        }
        Py_DECREF(gradient);
        if (has) {
            return adopt_refuse(call, param,
                                "has a gradient that may contain a part of this batch "
                                "already: call zero_grad() before you continue");
        }
    }
    return 0;
}

/* Modules that lead to the leaf become participants. 1, 0 there is none, -1. */
static int
adopt_by_modules(oomkit_call *call, PyObject *leaf, PyObject *all)
{
    oomkit_participants *parts = call->parts;
    Py_ssize_t i, buffered = parts->buffered_count, from = 0;
    OWNED PyObject *reached = PySet_New(NULL), *address = PyLong_FromVoidPtr(leaf);
    PyObject *modules = /* owned */
        reached == NULL || address == NULL || PySet_Add(reached, address) < 0
            ? NULL
            : oomkit_modules_of(call->st, reached, all);
    int result = modules == NULL ? -1 : PyList_GET_SIZE(modules) > 0;
    const char *why;

    if (result == 1) {
        oomkit_participants_let_go(parts); /* they stay the last ones */
        from = parts->param_count;
        parts->seen = adopt_seen(parts);
        result = parts->seen == NULL ? -1 : 1;
    }
    for (i = result == 1 ? PyList_GET_SIZE(modules) : 0; i-- > 0 && result == 1;) {
        result =
            oomkit_participants_add(call->st, parts, PyList_GET_ITEM(modules, i), 0) < 0
                ? -1
                : 1;
    }
    Py_XDECREF(modules);
    Py_CLEAR(parts->seen);
    if (result != 1) {
        return result;
    }
    if (adopt_refuse_siblings(call, from) < 0) {
        return -1;
    }
    if (oomkit_refusal(call, &why) < 0) {
        return -1;
    }
    if (why != NULL) {
        return adopt_refuse(call, leaf, why);
    }
    switch (adopt_may_have_moved(call, buffered)) {
    case 0:
        return 1;
    case 1:
        return adopt_refuse(call, leaf,
                            "its module is in training mode and has buffers, which may "
                            "have been updated already");
    default:
        return -1;
    }
}

/* A participant by now, or one that joins them in the next attempt? */
int
oomkit_unknown_known(const oomkit_call *call, const PyObject *leaf)
{
    const oomkit_participants *parts = call->parts;
    Py_ssize_t i;

    for (i = 0; i < parts->param_count; i++) {
        if (parts->params[i] == leaf) {
            return 1;
        }
    }
    for (i = 0; parts->adopted != NULL && i < PyList_GET_SIZE(parts->adopted); i++) {
        if (PyWeakref_GET_OBJECT(PyList_GET_ITEM(parts->adopted, i)) == leaf) {
            return 1;
        }
    }
    return 0;
}

/* Is it, or is it in, an argument of this call? */
static int
adopt_is_argument(const oomkit_call *call, const PyObject *leaf)
{
    Py_ssize_t i;
    int found = 0;

    for (i = 0; i < call->batch.total && !found; i++) {
        found = call->given.args[i] == leaf;
    }
    for (i = 0; i < call->batch.count && !found; i++) {
        found = call->batch.nodes[i].object == leaf;
    }
    return found;
}

/* Is it kept by an object that the collector sees, other than `ours`? What only the
 * graph of a kept loss keeps is nobody's. 1, 0 or -1. */
int
oomkit_unknown_kept(oomkit_call *call, PyObject *leaf, PyObject *ours)
{
    OWNED PyObject *referrers = NULL;
    Py_ssize_t i;

    if (adopt_is_argument(call, leaf)) {
        return 1;
    }
    referrers = PyObject_CallOneArg(call->st->gc_get_referrers, leaf);
    if (referrers == NULL) {
        return -1;
    }
    for (i = 0; i < PyList_GET_SIZE(referrers); i++) {
        if (PyList_GET_ITEM(referrers, i) != ours) {
            return 1;
        }
    }
    return 0;
}

/* Makes an unknown leaf of the graph a participant, between two attempts. `all` is what
 * oomkit_modules_alive() gave; NULL: no module has it. 1; 0 nobody is known to have it,
 * or it is one by now; -1 with an exception. */
int
oomkit_unknown_adopt(oomkit_call *call, PyObject *leaf, PyObject *all)
{
    oomkit_participants *parts = call->parts;
    PyObject *gradient; /* owned */
    OWNED PyObject *ref = NULL;
    int has;

    if (oomkit_unknown_known(call, leaf)) {
        return 0;
    }
    gradient = PyObject_GetAttr(leaf, call->st->str_grad);
    has = gradient != Py_None;
    if (gradient == NULL) {
        return -1;
    }
    Py_DECREF(gradient);
    if (has && call->tries.may_hold) {
        return adopt_refuse(call, leaf,
                            "has a gradient that may contain a part of this batch "
                            "already: call zero_grad() before you continue");
    }
    if (all != NULL && !adopt_is_argument(call, leaf)) {
        return adopt_by_modules(call, leaf, all);
    }
    if (parts->adopted == NULL && (parts->adopted = PyList_New(0)) == NULL) {
        return -1;
    }
    ref = PyWeakref_NewRef(leaf, NULL);
    return ref == NULL || PyList_Append(parts->adopted, ref) < 0 ? -1 : 1;
}
