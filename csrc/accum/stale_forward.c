/* A forward after an update, in the same micro-batch: where the update was held back it
 * would see the parameters from before it. Torch's global hook tells of every forward;
 * it is there from the first update of a micro-batch of a split call to the end of that
 * micro-batch, and at no other time (compiled modules guard on it). */
#include "accum.h"
#include "../hook/graph.h"
#include "../optim/updating.h"
#include "../py/errors.h"
#include "../undo/undo.h"

/* Never 0, and another one for each address: see oomkit_hash_mix(). */
static uint64_t
forward_address(const PyObject *param)
{
    return oomkit_hash_mix(0, (uint64_t)(uintptr_t)param);
}

/* 0 or -1. */
static int
forward_add(oomkit_call *call, const PyObject *param)
{
    return oomkit_hashes_keep(&call->cut->stale.params, forward_address(param)) < 0 ? -1
                                                                                    : 0;
}

/* Adds the parameters in the groups of an optimizer to the set of updated ones. */
static int
forward_add_groups(oomkit_call *call, PyObject *optimizer)
{
    OWNED PyObject *groups = PyObject_GetAttr(optimizer, call->st->str_param_groups);
    Py_ssize_t i, j;
    int result = groups == NULL ? -1 : 0;

    for (i = 0; result == 0 && PyList_Check(groups) && i < PyList_GET_SIZE(groups);
         i++) {
        PyObject *group = PyList_GET_ITEM(groups, i); /* borrowed */
        PyObject *params =                            /* borrowed from group */
            PyDict_Check(group) ? PyDict_GetItemWithError(group, call->st->str_params)
                                : NULL;
        for (j = 0; params != NULL && PyList_Check(params) && result == 0 &&
                    j < PyList_GET_SIZE(params);
             j++) {
            result = forward_add(call, PyList_GET_ITEM(params, j));
        }
    }
    return result == 0 && PyErr_Occurred() ? -1 : result;
}

/* Does a module hold one of the updated parameters, itself or in a child? `adding`:
 * puts them into the set instead. 1, 0 or -1. */
static int
forward_holds(oomkit_call *call, PyObject *module, int adding)
{
    PyObject *key, *value; /* borrowed from the dicts */
    OWNED PyObject *params = PyObject_GetAttr(module, call->st->str_parameters);
    OWNED PyObject *children =
        params ? PyObject_GetAttr(module, call->st->str_modules) : NULL;
    Py_ssize_t at = 0;
    int result = children == NULL ? -1 : 0;

    while (result == 0 && PyDict_Check(params) &&
           PyDict_Next(params, &at, &key, &value)) {
        result = adding ? forward_add(call, value)
                        : oomkit_hashes_have(&call->cut->stale.params,
                                             forward_address(value));
    }
    at = 0;
    while (result == 0 && PyDict_Check(children) &&
           PyDict_Next(children, &at, &key, &value)) {
        if (value == Py_None) {
            continue;
        }
        if (Py_EnterRecursiveCall(" while looking through the parts of a module")) {
            return -1;
        }
        Py_INCREF(value);
        result = forward_holds(call, value, adding);
        Py_DECREF(value);
        Py_LeaveRecursiveCall();
    }
    return result;
}

/* The hook of an earlier micro-batch, put where torch's function puts it: that one
 * takes some 40 us. 1; 0 where that cannot be, or another call has it there; -1. */
static int
forward_hook_again(oomkit_call *call)
{
    const oomkit_state *st = call->st;
    OWNED PyObject *hooks = NULL, *number = NULL;
    int there;

    if (st->forward_handle == NULL) {
        return 0;
    }
    hooks = PyObject_GetAttr(st->hooks_of_modules, st->str_global_forward_pre_hooks);
    number = hooks == NULL ? NULL : PyObject_GetAttr(st->forward_handle, st->str_id);
    if (number == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear(); /* another torch */
        return 0;
    }
    there = number == NULL        ? -1
            : PyDict_Check(hooks) ? PyDict_Contains(hooks, number)
                                  : 1;
    if (there != 0) {
        return there < 0 ? -1 : 0;
    }
    if (PyObject_SetItem(hooks, number, st->forward_begins) < 0) {
        return -1;
    }
    call->cut->stale.hook = Py_NewRef(st->forward_handle);
    return 1;
}

/* As remove() of its handle does, without any code of Python's: there may be no memory
 * for that. 0 or -1. */
static int
forward_hook_remove(oomkit_call *call)
{
    const oomkit_state *st = call->st;
    OWNED PyObject *hooks =
        PyObject_GetAttr(st->hooks_of_modules, st->str_global_forward_pre_hooks);
    OWNED PyObject *number =
        hooks == NULL ? NULL : PyObject_GetAttr(call->cut->stale.hook, st->str_id);

    if (number == NULL) {
        return -1;
    }
    if (PyObject_DelItem(hooks, number) == 0) {
        return 0;
    }
    if (!PyErr_ExceptionMatches(PyExc_KeyError)) {
        return -1;
    }
    PyErr_Clear(); /* somebody has emptied the table */
    return 0;
}

static int
forward_hook_install(oomkit_call *call)
{
    oomkit_state *st = call->st;
    PyObject *module = PyType_GetModule((PyTypeObject *)st->step_type); /* borrowed */
    const int again = forward_hook_again(call);
    OWNED PyObject *hook =
        again == 0 ? oomkit_hook_new(st, module, "_forward_begins") : NULL;

    if (hook != NULL) {
        call->cut->stale.hook = PyObject_CallOneArg(st->forward_pre_hook, hook);
        st->own_hooks += call->cut->stale.hook != NULL;
    }
    if (hook != NULL && call->cut->stale.hook != NULL && st->forward_handle == NULL) {
        st->forward_handle = Py_NewRef(call->cut->stale.hook);
        st->forward_begins = Py_NewRef(hook);
    }
    return call->cut->stale.hook == NULL ? -1 : 0;
}

/* Where the intercepted call is that was noted last: it is this one. New reference, or
 * NULL with an exception. */
static PyObject *
forward_updated_where(const oomkit_call *call)
{
    const oomkit_sequence *sequence = &call->cut->sequence[call->cut->at > 0];

    if (call->sequence_waived || sequence->count == 0 ||
        sequence->count >= OOMKIT_SEQUENCE) {
        return oomkit_where();
    }
    return Py_NewRef(sequence->events[sequence->count - 1].where);
}

/* At an intercepted call of a split call, which has been noted: from here to the end of
 * the micro-batch a forward of what it updates is refused. `optimizer` (borrowed) is
 * the one that it updates, or NULL. 0 or -1. */
static int
forward_watch(oomkit_call *call, PyObject *target, oomkit_owner_kind kind,
              PyObject *optimizer)
{
    int result;

    if (kind != OOMKIT_OWNER_AVERAGED &&
        (optimizer == NULL ||
         !PyObject_TypeCheck(optimizer, (PyTypeObject *)call->st->Optimizer))) {
        return 0;
    }
    call->cut->stale.watched = 1;
    result = kind == OOMKIT_OWNER_AVERAGED ? forward_holds(call, target, 1)
                                           : forward_add_groups(call, optimizer);
    if (result < 0 ||
        (call->cut->stale.where == NULL &&
         (call->cut->stale.where = forward_updated_where(call)) == NULL) ||
        (call->cut->stale.hook == NULL && forward_hook_install(call) < 0)) {
        return -1;
    }
    return 0;
}

/* Torch is about to call a module. 0, or -1 with SplitError. */
int
oomkit_forward_begins(PyObject *module)
{
    oomkit_call *call = oomkit_call_current();
    OWNED PyObject *where = NULL;
    int holds;

    if (call == NULL || !call->cut->stale.watched || oomkit_update_runs_alone(call) ||
        (call->is_last && call->sequence_waived)) {
        return 0; /* not ours; inside an update; or after the real one, as decided */
    }
    holds = forward_holds(call, module, 0);
    if (holds <= 0) {
        return holds;
    }
    where = oomkit_where();
    if (where == NULL) {
        return -1;
    }
    return oomkit_refuse_split(
        call,
        "%s is called at %U after its update at %U, but a split step makes its update "
        "only after the last micro-batch. Call it after the decorated step, or make "
        "two decorated steps" SEE("forward-after-update"),
        Py_TYPE(module)->tp_name, where, call->cut->stale.where);
}

/* At the end of a micro-batch. Keeps the exception in flight. */
static void
forward_release(oomkit_call *call)
{
    PyObject *exception; /* owned */

    Py_CLEAR(call->backward.cleared);
    if (!call->cut->stale.watched) {
        return;
    }
    exception = PyErr_Occurred() ? oomkit_exception_take() : NULL;
    if (call->cut->stale.hook != NULL) {
        if (forward_hook_remove(call) < 0) {
            oomkit_error_unraised(call->cut->stale.hook);
        }
    }
    Py_CLEAR(call->cut->stale.hook);
    oomkit_hashes_clear(&call->cut->stale.params);
    call->cut->stale.watched = 0;
    Py_CLEAR(call->cut->stale.where);
    if (exception != NULL) {
        oomkit_exception_give(exception);
    }
}

static int
forward_update(oomkit_call *call, oomkit_update *update)
{
    return forward_watch(call, update->method->target, update->method->kind,
                         update->optimizer);
}

const oomkit_rule oomkit_stale_forward_rule = {.update_begins = forward_update,
                                               .micro_left = forward_release};
