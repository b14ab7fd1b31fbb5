/* Buffers that a forward changes (spectral norm, codebooks, counters): in a split step
 * they change once per micro-batch, which is said once per site. */
#include "call.h"
#include "tensor.h"

/* What tells whether buffer `i` is as it was: which tensor, and how far it has moved.
 */
static int
moving_mark(oomkit_call *call, Py_ssize_t i, uint64_t *mark)
{
    const oomkit_buffer *item = &call->buffers.items[i];
    oomkit_tensor_facts facts;
    PyObject *value; /* borrowed from the dict */
    int result = 0;
    PyObject *dict = PyObject_GetAttr(item->module, call->st->str_buffers); /* owned */

    if (dict == NULL) {
        return -1;
    }
    value = PyDict_GetItemWithError(dict, item->key);
    *mark = (uint64_t)(uintptr_t)value;
    if (value == NULL || !oomkit_tensor_check(call->st, value)) {
        result = PyErr_Occurred() ? -1 : 0;
    } else if (oomkit_tensor_facts_get(call->st, value, 0, &facts) < 0) {
        result = -1;
    } else {
        *mark ^= (uint64_t)facts.version << 32;
        if (call->st->bridge != NULL) { /* batch_norm bumps no version */
            *mark ^= call->st->bridge->sample(value, call->st->impl_offset);
        }
    }
    Py_DECREF(dict);
    return result;
}

static int
moving_say(oomkit_call *call, Py_ssize_t i)
{
    const oomkit_buffer *item = &call->buffers.items[i];
    int norm = PyObject_IsInstance(item->module, call->st->BatchNorm);

    if (norm != 0) {
        return norm < 0 ? -1 : 0; /* it has a warning of its own */
    }
    call->parts->moving_said = 1;
    return PyErr_WarnFormat(
        call->st->OomkitWarning, 2,
        "oomkit: the batch is split and the forward of %s changes its buffer '%U', "
        "which "
        "happens once per micro-batch and not once per batch: the result differs from "
        "the whole batch's where the buffer enters it; put the module in eval mode, or "
        "change the buffer outside the step, where this matters",
        Py_TYPE(item->module)->tp_name, item->key);
}

/* At the end of the first two micro-batches: the first marks, the second compares. 0 or
 * -1. */
int
oomkit_buffers_say_moving(oomkit_call *call)
{
    Py_ssize_t i, n = call->buffers.count;
    int result = 0;

    if (n == 0 || call->parts->moving_said || call->slice_index > 1 ||
        (call->slice_index == 1) != (call->moving_marks != NULL)) {
        return 0;
    }
    if (call->slice_index == 0 &&
        (call->moving_marks = PyMem_Calloc((size_t)n, sizeof(uint64_t))) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (i = 0; result == 0 && i < n && !call->parts->moving_said; i++) {
        uint64_t mark;
        result = moving_mark(call, i, &mark);
        if (result == 0 && call->slice_index == 0) {
            call->moving_marks[i] = mark;
        } else if (result == 0 && mark != call->moving_marks[i]) {
            result = moving_say(call, i);
        }
    }
    if (call->slice_index == 1) {
        PyMem_Free(call->moving_marks);
        call->moving_marks = NULL;
    }
    return result;
}
