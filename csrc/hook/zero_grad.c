/* zero_grad() of an optimizer, or of a module that has one of its own, in a split call.
 *
 * It is noted where it comes after a backward: that cannot be cut (backward.c). And
 * torch's own, of an optimizer that has no gradient at all, changes nothing; a step
 * calls it in every micro-batch, where the sum so far is kept elsewhere. The first one
 * in a call runs, for torch completes an unpickled optimizer there, and a profile shows
 * it; the later ones are left out while that holds: most of what one costs is the
 * profiler's mark, some 30 us. */
#include "method.h"
#include "../py/errors.h"
#include "../py/tensor.h"
#include "../undo/undo.h"

enum { CLEARING_CHUNK = 64 };

/* Has none of these plain tensors a gradient? 1, 0 or -1. */
static int
clearing_is_none(const oomkit_state *st, PyObject *const *params, Py_ssize_t count)
{
    oomkit_grad_mark marks[CLEARING_CHUNK];
    Py_ssize_t i;
    int none = 1;

    if (st->bridge->grads_mark((const void *const *)params, st->impl_offset,
                               (size_t)count, marks) != OOMKIT_OK) {
        return oomkit_bridge_failed("look at the gradients of an optimizer");
    }
    for (i = 0; i < count; i++) {
        none &= marks[i].grad == NULL;
    }
    st->bridge->grads_release(marks, (size_t)count);
    return none;
}

/* The same of a list, whose tensors may be of a class of somebody's own: 0 then. What
 * stands in for gradients of earlier calls is cleared. */
static int
clearing_list_has_nothing(oomkit_call *call, PyObject *params)
{
    const oomkit_state *st = call->st;
    Py_ssize_t i, count = PyList_GET_SIZE(params);
    PyObject *const *items = ((PyListObject *)params)->ob_item; /* borrowed */
    int nothing = 1;

    for (i = 0; i < count; i++) {
        if (!Py_IS_TYPE(items[i], (PyTypeObject *)st->Parameter) &&
            !Py_IS_TYPE(items[i], (PyTypeObject *)st->Tensor)) {
            return 0;
        }
    }
    if (oomkit_tell_gradients_cleared(call, params) < 0) {
        return -1;
    }
    for (i = 0; i < count && nothing == 1; i += CLEARING_CHUNK) {
        Py_ssize_t rest = count - i;
        nothing = clearing_is_none(st, items + i,
                                   rest < CLEARING_CHUNK ? rest : CLEARING_CHUNK);
    }
    return nothing;
}

/* Is .grad torch's own? What somebody has put in its place knows of gradients that the
 * tensors do not. 1, 0 or -1. */
static int
clearing_sees_gradients(const oomkit_state *st)
{
    OWNED PyObject *ours = PyObject_GetAttr(st->Parameter, st->str_grad);
    OWNED PyObject *plain = ours ? PyObject_GetAttr(st->Tensor, st->str_grad) : NULL;

    return plain == NULL ? -1 : ours == plain && Py_IS_TYPE(plain, &PyGetSetDescr_Type);
}

/* Is every gradient of this optimizer None? Only lists, dictionaries and tensors that
 * answer for themselves are asked: 0 too where one may be somebody's own. -1 error. */
static int
clearing_has_nothing(oomkit_call *call, PyObject *optimizer)
{
    const oomkit_state *st = call->st;
    OWNED PyObject *groups = PyObject_GetAttr(optimizer, st->str_param_groups);
    Py_ssize_t g;
    int nothing = groups == NULL              ? -1
                  : PyList_CheckExact(groups) ? clearing_sees_gradients(st)
                                              : 0;

    for (g = 0; nothing == 1 && g < PyList_GET_SIZE(groups); g++) {
        PyObject *group = PyList_GET_ITEM(groups, g); /* borrowed */
        PyObject *params = NULL;                      /* borrowed */
        if (PyDict_CheckExact(group)) {
            params = PyDict_GetItemWithError(group, st->str_params);
        }
        nothing = PyErr_Occurred() ? -1
                  : params != NULL && PyList_CheckExact(params)
                      ? clearing_list_has_nothing(call, params)
                      : 0;
    }
    return nothing;
}

/* Would torch's own zero_grad() run, and with no argument but the one it has? What
 * that one says matters to gradients alone. 1, 0 or -1. */
static int
clearing_is_plain(const interceptor_object *self, size_t nargsf, PyObject *kwnames)
{
    const oomkit_state *st = self->call->st;
    Py_ssize_t named = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    OWNED PyObject *method = NULL;

    if (self->original != NULL || PyVectorcall_NARGS(nargsf) + named > 1 ||
        (named == 1 && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(kwnames, 0),
                                                        "set_to_none") != 0)) {
        return 0;
    }
    method = PyObject_GetAttr((PyObject *)Py_TYPE(self->target), self->name);
    return method == NULL ? -1 : method == st->plain_zero_grad;
}

PyObject *
oomkit_interceptor_clears(interceptor_object *self, PyObject *const *args,
                          size_t nargsf, PyObject *kwnames)
{
    oomkit_call *call = self->call;
    PyObject *result; /* owned */
    int plain;

    if (call == NULL || call != oomkit_call_current()) {
        return oomkit_interceptor_original(self, args, nargsf, kwnames);
    }
    if (call->backward.done > 0 && call->backward.cleared == NULL &&
        (call->backward.cleared = oomkit_where()) == NULL) {
        return NULL;
    }
    plain = self->has_cleared ? clearing_is_plain(self, nargsf, kwnames) : 0;
    if (plain == 1) {
        plain = clearing_has_nothing(call, self->target);
    }
    if (plain != 0) {
        return plain < 0 ? NULL : Py_NewRef(Py_None);
    }
    Py_INCREF(self); /* the method may take us out of the instance */
    result = oomkit_interceptor_original(self, args, nargsf, kwnames);
    self->has_cleared = result != NULL;
    Py_DECREF(self);
    return result;
}
