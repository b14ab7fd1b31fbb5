/* optimizer_safety="copy": what an optimizer of somebody's own keeps beside the tensors
 * of its state is noted before an update by Python code of the package (`keepsake`),
 * and put back. Kept as (object, text): what cannot be put back, or None. */
#include "optimizer_extras.h"
#include "updating.h"
#include "../call/call.h"

/* Addresses of the tensors that have copies already. New set or NULL. */
static PyObject *
extras_handled(const oomkit_optimizer_mark *mark)
{
    OWNED PyObject *handled = PySet_New(NULL);
    Py_ssize_t i;

    for (i = 0; handled != NULL && i < mark->count; i++) {
        OWNED PyObject *address = NULL;
        if (mark->items[i].version == NULL) {
            continue;
        }
        address = PyLong_FromVoidPtr(mark->items[i].value);
        if (address == NULL || PySet_Add(handled, address) < 0) {
            return NULL;
        }
    }
    return STEAL(handled);
}

int
oomkit_extras_take(oomkit_call *call, oomkit_optimizer_mark *mark)
{
    OWNED PyObject *unknown = NULL, *kept = NULL, *handled = NULL;

    if (mark->beside != NULL || call->st->keepsake == NULL) {
        return 0;
    }
    handled = extras_handled(mark);
    if (handled == NULL || oomkit_compiler_off(call) < 0) {
        return -1;
    }
    EXEMPT (call->st) {
        kept = PyObject_CallFunctionObjArgs(
            call->st->keepsake, mark->optimizer, handled,
            call->options->rng == OOMKIT_RNG_NONE ? Py_False : Py_True, NULL);
    }
    if (oomkit_compiler_on(call) < 0 || kept == NULL) {
        return -1;
    }
    unknown =
        kept == Py_None ? Py_NewRef(Py_None) : PyObject_GetAttrString(kept, "unknown");
    mark->beside = unknown == NULL ? NULL : PyTuple_Pack(2, kept, unknown);
    return mark->beside == NULL ? -1 : 0;
}

int
oomkit_extras_restore(oomkit_call *call, const oomkit_optimizer_mark *mark)
{
    PyObject *kept, *done = NULL; /* owned */
    int on = call->compiler == NULL;

    if (mark->beside == NULL || PyTuple_GET_ITEM(mark->beside, 0) == Py_None) {
        return 0;
    }
    if (oomkit_compiler_off(call) < 0) {
        return -1;
    }
    kept = Py_NewRef(PyTuple_GET_ITEM(mark->beside, 0));
    EXEMPT (call->st) {
        done = PyObject_CallMethodNoArgs(kept, call->st->str_restore);
    }
    Py_DECREF(kept);
    Py_XDECREF(done);
    return (on && oomkit_compiler_on(call) < 0) || done == NULL ? -1 : 0;
}

PyObject *
oomkit_extras_unknown(const oomkit_call *call, int index)
{
    PyObject *beside = call->updating.marks[index].beside; /* borrowed */
    PyObject *unknown =                                    /* borrowed */
        beside == NULL ? Py_None : PyTuple_GET_ITEM(beside, 1);
    return unknown == Py_None ? NULL : unknown;
}

PyObject *
oomkit_extras_any_unknown(const oomkit_call *call)
{
    int i;
    for (i = 0; i < call->updating.count; i++) {
        if (oomkit_extras_unknown(call, i) != NULL) {
            return oomkit_extras_unknown(call, i);
        }
    }
    return NULL;
}

int
oomkit_extras_refuse(oomkit_call *call, PyObject **message)
{
    oomkit_params_found_stuck(call, 1);
    *message = PyUnicode_FromFormat(
        "an optimizer's step() may have changed its %U, which "
        "optimizer_safety=\"copy\" cannot copy; keep it in a tensor, list or dict",
        oomkit_extras_any_unknown(call));
    return *message == NULL ? -1 : 1;
}

PyObject *
oomkit_extras_raise(oomkit_call *call, int index, PyObject *exception)
{
    oomkit_exception_discard(call->st, exception);
    return oomkit_half_updated(
        call,
        "%s.step() ran out of memory, and optimizer_safety=\"copy\" cannot copy its "
        "%U, which may have changed: the update is not repeated, and everything else "
        "is as before the step; keep it in a tensor, list or dict, or restore a "
        "checkpoint" SEE("partial-update"),
        Py_TYPE(call->updating.marks[index].optimizer)->tp_name,
        oomkit_extras_unknown(call, index));
}
