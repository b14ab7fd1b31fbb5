/* Copies ahead of their use. Their memory is the update's stream's: it is got there, so
 * that the copies wait for what that stream was given before, and it goes back there,
 * so that whoever drops a copy has that stream wait for it first. */
#include "ahead.h"
#include "../device/device.h"
#include "../py/errors.h"
#include "../py/tensor.h"

int
oomkit_ahead_begin(oomkit_call *call, oomkit_ahead *ahead)
{
    oomkit_state *st = call->st;
    char text[OOMKIT_DEVICE_TEXT];

    if (call->device.type != OOMKIT_DEVICE_CUDA || st->stream_type == NULL ||
        st->stream_now == NULL) {
        return 0;
    }
    oomkit_device_text(call->device, text);
    ahead->stream = PyObject_CallFunction(st->stream_type, "s", text);
    if (ahead->stream == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) {
            return -1;
        }
        PyErr_Clear(); /* matched: torch has no streams of this device */
    }
    return 0;
}

/* The stream of the update. New reference or NULL. */
static PyObject *
stream_now(oomkit_call *call)
{
    return PyObject_CallFunction(call->st->stream_now, "i", call->device.index);
}

/* one.wait_stream(other). 0 or -1. */
static int
stream_waits(PyObject *one, PyObject *other)
{
    OWNED PyObject *done =
        one == NULL ? NULL : PyObject_CallMethod(one, "wait_stream", "O", other);

    return done == NULL ? -1 : 0;
}

/* Memory for all of them, in *copies (owned: dict). 0 or -1. */
static int
copies_make(oomkit_call *call, oomkit_ahead *ahead, PyObject *tensors)
{
    Py_ssize_t i;

    ahead->copies = PyDict_New();
    for (i = 0; ahead->copies != NULL && i < PyList_GET_SIZE(tensors); i++) {
        PyObject *tensor = PyList_GET_ITEM(tensors, i); /* borrowed */
        OWNED PyObject *key = PyLong_FromVoidPtr(tensor);
        OWNED PyObject *copy =
            key == NULL ? NULL : oomkit_device_like(call->st, call->device, tensor);
        if (copy == NULL || PyDict_SetItem(ahead->copies, key, copy) < 0) {
            return -1;
        }
    }
    return ahead->copies == NULL ? -1 : 0;
}

/* On the stream beside. 0 or -1. */
static int
copies_fill(oomkit_call *call, oomkit_ahead *ahead, PyObject *tensors)
{
    oomkit_state *st = call->st;
    OWNED PyObject *entered = PyObject_CallMethodNoArgs(ahead->stream, st->str_enter);
    OWNED PyObject *left = NULL;
    Py_ssize_t i;
    int result = entered == NULL ? -1 : 0;

    for (i = 0; result == 0 && i < PyList_GET_SIZE(tensors); i++) {
        PyObject *tensor = PyList_GET_ITEM(tensors, i); /* borrowed */
        OWNED PyObject *key = PyLong_FromVoidPtr(tensor);
        PyObject *copy = /* borrowed from the dict */
            key == NULL ? NULL : PyDict_GetItemWithError(ahead->copies, key);
        ahead->on_its_way = 1;
        result = copy == NULL ? -1 : oomkit_device_fill(st, call->device, copy, tensor);
    }
    if (entered != NULL) {
        KEEPING_EXCEPTION {
            left = PyObject_CallMethodObjArgs(ahead->stream, st->str_exit, Py_None,
                                              Py_None, Py_None, NULL);
            if (left == NULL) {
                oomkit_error_unraised(ahead->stream);
            }
        }
    }
    return left == NULL ? -1 : result;
}

int
oomkit_ahead_fetch(oomkit_call *call, oomkit_ahead *ahead, PyObject *tensors)
{
    OWNED PyObject *now = NULL;

    oomkit_ahead_drop(call, ahead);
    if (copies_make(call, ahead, tensors) == 0) {
        now = stream_now(call);
        if (now != NULL && stream_waits(ahead->stream, now) == 0 &&
            copies_fill(call, ahead, tensors) == 0) {
            return 0;
        }
    }
    oomkit_ahead_drop(call, ahead);
    if (!oomkit_exception_is_oom(call->st)) {
        return -1;
    }
    oomkit_exception_discard(call->st, oomkit_exception_take());
    return 0;
}

int
oomkit_ahead_wait(oomkit_call *call, oomkit_ahead *ahead)
{
    OWNED PyObject *now = NULL;

    if (!ahead->on_its_way) {
        return 0;
    }
    now = stream_now(call);
    if (stream_waits(now, ahead->stream) < 0) {
        return -1;
    }
    ahead->on_its_way = 0;
    return 0;
}

PyObject *
oomkit_ahead_take(const oomkit_ahead *ahead, PyObject *key)
{
    PyObject *copy = /* borrowed from the dict */
        ahead->copies == NULL ? NULL : PyDict_GetItemWithError(ahead->copies, key);

    if (copy == NULL) {
        return NULL;
    }
    Py_INCREF(copy);
    if (PyDict_DelItem(ahead->copies, key) < 0) {
        Py_CLEAR(copy);
    }
    return copy;
}

void
oomkit_ahead_drop(oomkit_call *call, oomkit_ahead *ahead)
{
    if (ahead->on_its_way) {
        KEEPING_EXCEPTION {
            if (oomkit_ahead_wait(call, ahead) < 0) {
                OWNED PyObject *done = NULL;
                oomkit_error_dismiss(); /* then the host waits instead; that fails where
                                           the context is lost, and nothing is copied */
                done = PyObject_CallMethod(ahead->stream, "synchronize", NULL);
                if (done == NULL) {
                    oomkit_error_dismiss(); /* as said */
                }
                ahead->on_its_way = 0;
            }
        }
    }
    Py_CLEAR(ahead->copies);
}

void
oomkit_ahead_end(oomkit_call *call, oomkit_ahead *ahead)
{
    oomkit_ahead_drop(call, ahead);
    Py_CLEAR(ahead->stream);
}
