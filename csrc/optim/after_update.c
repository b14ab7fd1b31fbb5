/* Figures that the one real update of a split call has changed: learning rates, the
 * epoch of a scheduler, the scale of a scaler. A step that returns one gives what it
 * was in all micro-batches but the last, and what it is in the last: neither mean nor
 * sum.
 */
#include "optim.h"
#include "step_attributes.h"
#include "../call/call.h"
#include "../call/step.h"
#include "../py/errors.h"
#include "../py/tensor.h"

static int
updated_is_number(const PyObject *value)
{
    return value != NULL && (PyFloat_CheckExact(value) || PyLong_CheckExact(value));
}

/* Adds `was` and `now` when they are numbers that differ. 0 or -1. */
static int
updated_add(oomkit_memo **found, PyObject *was, PyObject *now)
{
    int differ;

    if (!updated_is_number(was) || !updated_is_number(now)) {
        return 0;
    }
    differ = PyObject_RichCompareBool(was, now, Py_NE);
    return differ <= 0 ? differ : oomkit_memo_add(found, was, Py_NewRef(now));
}

/* The values of an optimizer's groups beside `copies`, those at entry. 0 or -1. */
static int
updated_groups(oomkit_call *call, PyObject *optimizer, PyObject *copies,
               oomkit_memo **found)
{
    OWNED PyObject *groups = PyObject_GetAttr(optimizer, call->st->str_param_groups);
    Py_ssize_t g;

    if (groups == NULL) {
        return -1;
    }
    for (g = 0; PyList_Check(groups) && g < PyList_GET_SIZE(groups) &&
                g < PyList_GET_SIZE(copies);
         g++) {
        PyObject *group = PyList_GET_ITEM(groups, g);            /* borrowed */
        PyObject *key, *was, *copy = PyList_GET_ITEM(copies, g); /* borrowed */
        Py_ssize_t at = 0;
        while (PyDict_Check(group) && PyDict_Next(copy, &at, &key, &was)) {
            PyObject *now = PyDict_GetItemWithError(group, key); /* borrowed */
            if ((now == NULL && PyErr_Occurred()) || updated_add(found, was, now) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

/* One number of an object beside what it was (borrowed). 0 or -1. */
static int
updated_number(oomkit_call *call, PyObject *object, const char *name, PyObject *was,
               oomkit_memo **found)
{
    OWNED PyObject *before = Py_NewRef(was);
    OWNED PyObject *now = PyObject_GetAttrString(object, name);

    if (now != NULL && oomkit_tensor_check(call->st, now)) {
        Py_SETREF(now, PyObject_CallMethodNoArgs(now, call->st->str_item));
        Py_SETREF(before,
                  now ? PyObject_CallMethodNoArgs(before, call->st->str_item) : NULL);
    }
    return now == NULL || before == NULL ? -1 : updated_add(found, before, now);
}

int
oomkit_updated(oomkit_call *call, oomkit_memo **found)
{
    const oomkit_owner_marks *marks = &call->entry.owners;

    oomkit_memo_drop(found);
    EACH_MEMO (mark, marks->user) {
        if (PyObject_TypeCheck(mark.object, (PyTypeObject *)call->st->Optimizer) &&
            updated_groups(call, mark.object, oomkit_hyperparams_copies(mark.saved),
                           found) < 0) {
            return -1;
        }
    }
    EACH_MEMO (mark, marks->epochs) {
        PyObject *epoch = PyTuple_GET_ITEM(mark.saved, 0); /* borrowed, */
        PyObject *in_it = PyTuple_GET_ITEM(mark.saved, 1); /* as this is */
        if ((epoch != Py_None &&
             updated_number(call, mark.object, "last_epoch", epoch, found) < 0) ||
            (in_it != Py_None &&
             updated_number(call, mark.object, "T_cur", in_it, found) < 0)) {
            return -1;
        }
    }
    EACH_MEMO (mark, marks->scales) {
        if (updated_number(call, mark.object, "_scale", mark.saved, found) < 0) {
            return -1;
        }
    }
    return 0;
}

int
oomkit_scale_note(oomkit_call *call, PyObject *scaler)
{
    OWNED PyObject *scale = PyObject_GetAttrString(scaler, "_scale");
    PyObject *copy = NULL; /* owned, then stolen */

    if (scale == NULL || scale == Py_None) {
        return scale == NULL ? -1 : 0;
    }
    EXEMPT (call->st) {
        copy = PyObject_CallMethodNoArgs(scale, call->st->str_clone);
    }
    return oomkit_memo_add(&call->entry.owners.scales, scaler, copy);
}

/* Then a step that asks (`if scaler.get_scale() >= before: scheduler.step()`) rightly
 * leaves calls out. */
int
oomkit_scale_fell(const oomkit_call *call)
{
    EACH_MEMO (mark, call->entry.owners.scales) {
        OWNED PyObject *now = PyObject_GetAttrString(mark.object, "_scale");
        OWNED PyObject *less =
            now ? PyObject_RichCompare(now, mark.saved, Py_LT) : NULL;
        int skipped = less == NULL ? -1 : PyObject_IsTrue(less);
        if (skipped != 0) {
            return skipped;
        }
    }
    return 0;
}

/* Is the point of no return behind us? 1, 0 or -1. Keeps an exception in flight: torch
 * is asked by attribute where there is no bridge, and that fails while one is set. */
int
oomkit_update_committed(oomkit_call *call)
{
    PyObject *exception; /* owned, given back */
    int result = 0;

    if (call->updating.committed) {
        return 1;
    }
    exception = PyErr_Occurred() ? oomkit_exception_take() : NULL;
    if (!call->options->optimizer_copy) { /* else each is intercepted */
        result = oomkit_scheduler_is_final(call);
        call->updating.committed = result == 1; /* the mark may be taken anew */
    }
    if (result == 0) {
        result = oomkit_optimizers_any_moved(call);
    }
    if (exception != NULL) {
        if (result < 0) {
            oomkit_error_unraised(
                call->given.func); /* the step's own error says more */
        }
        oomkit_exception_give(exception);
    }
    return result;
}

int
oomkit_only_scheduled(oomkit_call *call)
{
    int moved;

    if (oomkit_updates_made(call) > 0 || oomkit_update_unfinished(call)) {
        return 0;
    }
    moved = oomkit_optimizers_any_moved(call);
    if (moved < 0) {
        oomkit_error_dismiss(); /* counts as moved */
    }
    return moved == 0;
}

int
oomkit_update_failed_shared(oomkit_call *call, PyObject *optimizer)
{
    if (!oomkit_update_is_shared(call) || !oomkit_exception_is_oom(call->st)) {
        return 0;
    }
    oomkit_update_broke_off(call, optimizer);
    oomkit_exception_discard(call->st, oomkit_exception_take());
    oomkit_half_updated(
        call,
        "%s.step() ran out of memory after it had begun a collective of all "
        "ranks, so that the update is half done and cannot be undone: restore a "
        "checkpoint on all ranks" SEE("partial-update"),
        Py_TYPE(optimizer)->tp_name);
    return 1;
}

int
oomkit_updates_are_left(const oomkit_call *call)
{
    const oomkit_participants *parts = call->parts;
    int expected = call->step->updates;
    Py_ssize_t i;

    if (expected < 0) {
        if (oomkit_update_by_unknown(call)) {
            return 1;
        }
        expected = 0;
        for (i = 0; i < parts->owner_count; i++) {
            expected += parts->owners[i].kind == OOMKIT_OWNER_OPTIMIZER;
        }
    }
    return oomkit_updates_made(call) < expected;
}
