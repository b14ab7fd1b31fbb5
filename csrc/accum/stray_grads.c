/* Gradients that no backward of ours explains: set by hand, or by a backward that went
 * past us. While the batch is split they carry no weight and are not parked, so they
 * are looked for before every backward and update and at the end of a micro-batch. And
 * gradients that a backward leaves in another attribute than .grad. */
#include "accum.h"
#include "../call/call.h"
#include "../members/members.h"
#include "../py/tensor.h"
#include "../undo/gradients.h"

/* A gradient of zeros is one that was cleared. 1 something is in it, 0, or -1. */
static int
stray_counts(oomkit_call *call, Py_ssize_t i)
{
    OWNED PyObject *gradient = grads_get(call, i), *any = NULL;

    if (gradient == NULL) {
        return -1;
    }
    EXEMPT (call->st) {
        any = PyObject_CallMethod(gradient, "any", NULL);
    }
    Py_CLEAR(gradient);
    if (any == NULL) {
        if (oomkit_exception_is_oom(call->st) || /* torch's is a RuntimeError, too */
            (!PyErr_ExceptionMatches(PyExc_RuntimeError) &&
             !PyErr_ExceptionMatches(PyExc_TypeError))) {
            return -1; /* a missing any() is NotImplementedError: one of those */
        }
        PyErr_Clear(); /* a layout without any(): taken as a value */
        return 1;
    }
    return PyObject_IsTrue(any);
}

/* Without marks of the attempt nothing else takes these back. 0 or -1. */
static int
stray_drop(oomkit_call *call, const uint8_t *states)
{
    Py_ssize_t i;
    for (i = 0; !oomkit_grads_marked(call) && i < call->parts->param_count; i++) {
        if (states[i] == OOMKIT_GRAD_NEW && grads_set(call, i, Py_None) < 0) {
            return -1;
        }
    }
    return 0;
}

/* The first gradient that has come or moved without a backward, where none may have. 1
 * and *which, 0, or -1. */
static int
stray_find(oomkit_call *call, const uint8_t *states, Py_ssize_t *which)
{
    Py_ssize_t i;
    int result = 0;

    for (i = 0; result == 0 && i < call->parts->param_count; i++) {
        if (states[i] == OOMKIT_GRAD_NEW || states[i] == OOMKIT_GRAD_MOVED ||
            states[i] == OOMKIT_GRAD_REPLACED) {
            *which = i;
            result = stray_counts(call, i);
        }
    }
    return result;
}

/* Asked where gradients are parked, or before any backward of this micro-batch. 0, or
 * -1 with SplitError. */
static int
stray_refuse(oomkit_call *call)
{
    Py_ssize_t which = 0;
    OWNED_MEMORY uint8_t *states = NULL;
    OWNED PyObject *name = NULL;
    int result;

    if ((!oomkit_grads_parked(call) && call->backward.done > 0) ||
        !oomkit_grads_micro_marked(call)) {
        return 0;
    }
    states = PyMem_Calloc((size_t)call->parts->param_count + 1, 1);
    if (states == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (oomkit_grads_since_micro(call, states) < 0) {
        return -1;
    }
    result = stray_find(call, states, &which);
    if (result <= 0) {
        return result;
    }
    if (stray_drop(call, states) < 0) {
        return -1;
    }
    name = oomkit_describe_tensor(call, call->parts->params[which]);
    if (name == NULL) {
        return -1;
    }
    return oomkit_refuse_step(
        call,
        "the gradient of %U was set in micro-batch %lld of %lld by hand, or by a "
        "backward that bypasses torch.autograd. Call backward() on the loss "
        "instead%s%s" SEE("gradient-set-by-hand"),
        name, (long long)(call->cut->at + 1), (long long)call->cut->count,
        call->backward.done > 0
            ? ", or guard the line with `if oomkit.current().is_last:`"
            : "",
        call->tries.ooms > 0 && !oomkit_grads_marked(call)
            ? ". Gradients may contain a part of this batch: call zero_grad() before "
              "you continue"
            : "");
}

/* --- beside .grad --- */

/* Is this what gradients of a parameter are: as many values, or those for each row? Of
 * a list the last one. 1 with *found (owned), 0 or -1. */
static int
beside_is_gradient(oomkit_state *st, PyObject *value, PyObject *param, PyObject **found)
{
    OWNED PyObject *shape = NULL, *of_row = NULL, *wanted = NULL;
    int same;

    if (PyList_CheckExact(value) && PyList_GET_SIZE(value) > 0) {
        value = PyList_GET_ITEM(value, PyList_GET_SIZE(value) - 1);
    }
    if (!oomkit_tensor_check(st, value)) {
        return 0;
    }
    value = *found = Py_NewRef(value); /* what is read below may run code */
    shape = PyObject_GetAttr(value, st->str_shape);
    wanted = shape == NULL ? NULL : PyObject_GetAttr(param, st->str_shape);
    of_row = wanted == NULL ? NULL : PySequence_GetSlice(shape, 1, PY_SSIZE_T_MAX);
    if (of_row == NULL) {
        return -1;
    }
    same = PyObject_RichCompareBool(shape, wanted, Py_EQ);
    return same == 0 ? PyObject_RichCompareBool(of_row, wanted, Py_EQ) : same;
}

/* One attribute of a parameter: its version is noted before a backward of the first
 * micro-batch, `told` being NULL; behind it *told (owned) says which one has come or
 * moved. 1 then, 0 or -1. */
static int
beside_attribute(oomkit_call *call, PyObject *param, PyObject *name, PyObject *value,
                 PyObject **told)
{
    OWNED PyObject *found = NULL, *of = NULL;
    PyObject *noted; /* borrowed */
    uint32_t version;
    int is = beside_is_gradient(call->st, value, param, &found);

    if (is <= 0 || oomkit_tensor_version(call->st, found, &version) < 0) {
        return is <= 0 ? is : -1;
    }
    if (told == NULL) {
        return oomkit_memo_add(&call->cut->beside.noted, found,
                               PyLong_FromUnsignedLong(version));
    }
    noted = oomkit_memo_find(call->cut->beside.noted, found);
    if (noted != NULL && PyLong_AsUnsignedLong(noted) == version) {
        return 0;
    }
    of = oomkit_describe_tensor(call, param);
    *told = of == NULL ? NULL : PyUnicode_FromFormat("%R of %U", name, of);
    return *told == NULL ? -1 : 1;
}

/* Of all parameters, and of those alone that have attributes. */
static int
beside_all(oomkit_call *call, PyObject **told)
{
    Py_ssize_t i, j;
    int result = 0;

    for (i = 0; result == 0 && i < call->parts->param_count; i++) {
        OWNED PyObject *param = Py_NewRef(call->parts->params[i]);
        OWNED PyObject *pairs = oomkit_own_attributes(param);
        if (pairs == NULL) {
            return PyErr_Occurred() ? -1 : 0;
        }
        for (j = 0; result == 0 && j + 1 < PyTuple_GET_SIZE(pairs); j += 2) {
            result = beside_attribute(call, param, PyTuple_GET_ITEM(pairs, j),
                                      PyTuple_GET_ITEM(pairs, j + 1), told);
        }
    }
    return result;
}

static void
beside_forget(oomkit_call *call)
{
    oomkit_memo_drop(&call->cut->beside.noted);
}

static int
stray_micro_begins(oomkit_call *call)
{
    return call->split ? oomkit_grads_micro_begins(call) : 0;
}

/* Per-sample gradients, or sums of a library's own. 0, or -1 with SplitError. */
static int
stray_backward_ends(oomkit_call *call, const oomkit_backward *backward)
{
    OWNED PyObject *told = NULL;

    (void)backward;
    if (call->cut->at > 0 || beside_all(call, &told) == 0) {
        return 0;
    }
    return told == NULL ? -1
                        : oomkit_refuse_step(
                              call,
                              "its backward has left %U, for the rows of one "
                              "micro-batch; oomkit adds up .grad alone, so an update "
                              "that is made of anything else would be wrong. Split "
                              "the batch as its library does (BatchMemoryManager of "
                              "Opacus)" SEE("gradients-beside-grad"),
                              told);
}

static int
stray_backward(oomkit_call *call, oomkit_backward *backward)
{
    (void)backward;
    if (stray_refuse(call) < 0) {
        return -1;
    }
    beside_forget(call);
    return call->cut->at > 0 ? 0 : beside_all(call, NULL); /* what a forward caches */
}

static int
stray_update(oomkit_call *call, oomkit_update *update)
{
    return update->method->kind == OOMKIT_OWNER_SCHEDULER ? 0 : stray_refuse(call);
}

const oomkit_rule oomkit_stray_grads_rule = {.micro_begins = stray_micro_begins,
                                             .backward_begins = stray_backward,
                                             .backward_ends = stray_backward_ends,
                                             .update_begins = stray_update,
                                             .attempt_ends = beside_forget};

static int
stray_micro_ends(oomkit_call *call, PyObject *result)
{
    (void)result;
    return call->is_last ? 0 : stray_refuse(call);
}

const oomkit_rule oomkit_stray_grads_at_end_rule = {.micro_ends = stray_micro_ends};
