/* Learning rates and other plain values of optimizers, and where schedulers are: the
 * same for every micro-batch of a split call. */
#include "optim.h"
#include "../call/call.h"
#include "../py/tensor.h"

/* Are two values of a group equal? What cannot be compared counts as changed. */
static int
value_same(oomkit_state *st, PyObject *now, PyObject *was)
{
    int same;

    if (now == was) {
        return 1;
    }
    if (oomkit_tensor_check(st, now) && oomkit_tensor_check(st, was)) {
        OWNED PyObject *here = oomkit_host_copy(st, now); /* where its copy lies */
        OWNED PyObject *equal =
            here == NULL
                ? NULL
                : PyObject_CallFunctionObjArgs(st->torch_equal, here, was, NULL);
        same = equal == Py_True;
    } else if (PyFloat_Check(now) && PyFloat_Check(was)) {
        double a = PyFloat_AS_DOUBLE(now), b = PyFloat_AS_DOUBLE(was);
        same = a == b || (a != a && b != b);
    } else {
        same = PyObject_RichCompareBool(now, was, Py_EQ) == 1;
    }
    if (PyErr_Occurred()) {
        oomkit_error_dismiss(); /* as the contract says */
        return 0;
    }
    return same;
}

/* A plain value of a group that differs from its copy: 1 and *name (borrowed), 0, -1.
 */
static int
group_changed(oomkit_state *st, PyObject *group, PyObject *copy, PyObject **name)
{
    PyObject *key, *was; /* borrowed */
    Py_ssize_t at = 0;

    while (PyDict_Next(copy, &at, &key, &was)) {
        PyObject *now = PyDict_GetItemWithError(group, key); /* borrowed */
        if (now == NULL && PyErr_Occurred()) {
            return -1;
        }
        if (now == NULL || !value_same(st, now, was)) {
            *name = key;
            return 1;
        }
    }
    return 0;
}

/* At an optimizer's held-back step of the first micro-batch: the values that it would
 * have used. A line that sets a value (`lr = schedule(step)`) leaves the same in each
 * micro-batch, one that changes it does not. */
int
oomkit_hyperparams_note(oomkit_call *call, PyObject *optimizer)
{
    if (oomkit_memo_find(call->entry.owners.groups_after, optimizer) != NULL) {
        return 0;
    }
    return oomkit_memo_add(&call->entry.owners.groups_after, optimizer,
                           oomkit_hyperparams_copy(call->st, optimizer));
}

/* Has a value changed since then? 1 with *name (borrowed), 0, -1. */
int
oomkit_hyperparams_changed(oomkit_call *call, PyObject *optimizer, PyObject **name)
{
    PyObject *copies =
        oomkit_memo_find(call->entry.owners.groups_after, optimizer); /* borrowed */
    OWNED PyObject *groups = NULL;
    Py_ssize_t g;
    int changed = 0;

    if (copies == NULL) {
        copies = oomkit_memo_find(call->entry.owners.groups_end, optimizer);
    }
    if (copies == NULL) {
        return 0;
    }
    groups = PyObject_GetAttr(optimizer, call->st->str_param_groups);
    if (groups == NULL) {
        return -1;
    }
    for (g = 0; PyList_Check(groups) && g < PyList_GET_SIZE(groups) &&
                g < PyList_GET_SIZE(copies) && changed == 0;
         g++) {
        changed = group_changed(call->st, PyList_GET_ITEM(groups, g),
                                PyList_GET_ITEM(copies, g), name);
    }
    return changed;
}

static int
refuse_moved(oomkit_call *call, PyObject *optimizer, PyObject *name)
{
    return oomkit_refuse_split(
        call,
        "%R in the param_groups of %s was changed in micro-batch %lld of %lld; set it "
        "outside the step, or behind the update "
        "under "
        "`if oomkit.current().is_last:`" SEE("step-arguments"),
        name, Py_TYPE(optimizer)->tp_name, (long long)(call->cut->at + 1),
        (long long)call->cut->count);
}

/* At the end of a micro-batch: an optimizer that it did not step (the caller does) has
 * the same values after each of them, as long as nothing has moved for good. Those of
 * the first one are kept, of all. 0, or -1 with SplitError. */
static int
groups_end(oomkit_call *call)
{
    int result = 0, committed = call->is_last ? oomkit_update_committed(call) : 0;

    if (committed != 0) {
        return committed < 0 ? -1 : 0;
    }
    EACH_MEMO (mark, call->entry.owners.user) {
        if (!PyObject_TypeCheck(mark.object, (PyTypeObject *)call->st->Optimizer)) {
            continue;
        }
        if (call->cut->at == 0) {
            result = oomkit_memo_add(&call->entry.owners.groups_end, mark.object,
                                     oomkit_hyperparams_copy(call->st, mark.object));
        } else if (oomkit_memo_find(call->entry.owners.groups_after, mark.object) ==
                   NULL) {
            result = oomkit_hyperparams_refuse_moved(call, mark.object);
        }
        if (result < 0) {
            return -1;
        }
    }
    return 0;
}

/* Notes the values that a real update has left. What fails here does not fail an update
 * that has been made: nothing is compared then. */
static int
hyperparams_update_ends(oomkit_call *call, const oomkit_update *update)
{
    oomkit_memo **made = &call->entry.owners.groups_made;
    OWNED PyObject *copies = update->optimizer == NULL
                                 ? NULL
                                 : oomkit_hyperparams_copy(call->st, update->optimizer);
    const Py_ssize_t at =
        copies == NULL ? -1 : oomkit_memo_at(*made, update->optimizer);

    if (at >= 0) {
        Py_SETREF((*made)->items[at].saved, STEAL(copies));
    } else if (copies != NULL) {
        (void)oomkit_memo_add(made, update->optimizer, STEAL(copies));
    }
    if (PyErr_Occurred()) {
        oomkit_memo_drop(made);
        oomkit_error_dismiss(); /* accounted for: nothing is compared then */
    }
    return 0;
}

typedef struct late_groups {
    PyObject *before; /* borrowed: copies at step() in the first micro-batch, */
    PyObject *end;    /* at the end of it, */
    PyObject *made;   /* and behind the real update */
} late_groups;

/* Is a value of group number `g` neither what the update has left of it, nor what the
 * first micro-batch had? One that the update moves is its optimizer's own. */
static int
value_is_late(oomkit_call *call, const late_groups *late, Py_ssize_t g, PyObject *key,
              PyObject *now)
{
    PyObject *before = PyDict_GetItemWithError(PyList_GET_ITEM(late->before, g), key);
    PyObject *end = PyDict_GetItemWithError(PyList_GET_ITEM(late->end, g), key);
    PyObject *made = PyDict_GetItemWithError(PyList_GET_ITEM(late->made, g), key);

    return before != NULL && end != NULL && made != NULL &&
           value_same(call->st, made, before) && !value_same(call->st, now, made) &&
           !value_same(call->st, now, end);
}

/* The name of a value that the last micro-batch alone has set behind the update. New
 * reference, or NULL, perhaps with an exception. */
static PyObject *
groups_set_late(oomkit_call *call, PyObject *groups, const late_groups *late)
{
    OWNED PyObject *now = oomkit_groups_copy(call->st, groups);
    Py_ssize_t g;

    for (g = 0;
         now != NULL && g < PyList_GET_SIZE(now) && g < PyList_GET_SIZE(late->before) &&
         g < PyList_GET_SIZE(late->end) && g < PyList_GET_SIZE(late->made);
         g++) {
        PyObject *key, *value; /* borrowed from now */
        Py_ssize_t at = 0;
        while (PyDict_Next(PyList_GET_ITEM(now, g), &at, &key, &value)) {
            if (value_is_late(call, late, g, key, value)) {
                return Py_NewRef(key);
            }
        }
    }
    return NULL;
}

/* A learning rate that changes in every micro-batch: asked at each step() after the
 * first micro-batch's, held back or not. 0, or -1 with SplitError. */
int
oomkit_hyperparams_refuse_moved(oomkit_call *call, PyObject *optimizer)
{
    PyObject *name = NULL; /* borrowed */
    int changed = oomkit_hyperparams_changed(call, optimizer, &name);

    return changed <= 0 ? changed : refuse_moved(call, optimizer, name);
}

/* At the end of the last micro-batch: the update has been made, which the error is told
 * to say. 0, or -1 with SplitError. */
static int
groups_refuse_late(oomkit_call *call)
{
    const oomkit_owner_marks *marks = &call->entry.owners;
    PyObject *scheduler; /* borrowed */

    /* What has moved a scheduler or a scale in this micro-batch alone, a step may go
     * by. */
    if (oomkit_owners_epochs_moved(call, &scheduler) != 0 || oomkit_scale_fell(call)) {
        oomkit_error_dismiss();
        return 0;
    }
    EACH_MEMO (mark, marks->groups_made) {
        const late_groups late = {oomkit_memo_find(marks->groups_after, mark.object),
                                  oomkit_memo_find(marks->groups_end, mark.object),
                                  mark.saved};
        OWNED PyObject *groups =
            PyObject_GetAttr(mark.object, call->st->str_param_groups);
        OWNED PyObject *name = NULL;
        if (groups != NULL && late.before != NULL && late.end != NULL) {
            name = groups_set_late(call, groups, &late);
        }
        if (PyErr_Occurred()) {
            oomkit_error_dismiss(); /* no reason to fail an update that was made */
        }
        if (name != NULL) {
            return refuse_moved(call, mark.object, name);
        }
    }
    return 0;
}

static int
hyperparams_micro_ends(oomkit_call *call, PyObject *result)
{
    (void)result;
    if (!call->split || groups_end(call) < 0) {
        return call->split ? -1 : 0;
    }
    return call->is_last && !call->sequence_waived && call->proof == NULL
               ? groups_refuse_late(call)
               : 0;
}

const oomkit_rule oomkit_hyperparams_rule = {.update_ends = hyperparams_update_ends,
                                             .micro_ends = hyperparams_micro_ends};
