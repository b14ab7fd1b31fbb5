/* Calling something that may run out of memory, and letting go of all that it held: for
 * find_executable_batch_size, which starts a whole function anew, and for cleanup. In C
 * because a handler in Python would keep the exception, hence its frames, alive. */
#include "release_methods.h"
#include "../device/device.h"
#include "../py/errors.h"
#include "../py/tensor.h"

/* Can nothing be freed and run again on the device that is in use? Its context may be
 * lost, or a graph be captured. */
static int
attempt_is_stuck(oomkit_state *st)
{
    oomkit_device device = oomkit_device_default(st);
    int capturing;

    if (device.type == OOMKIT_DEVICE_CPU) {
        return 0;
    }
    capturing = oomkit_is_capturing();
    if (capturing < 0) {
        oomkit_error_dismiss(); /* the function's own error is the one to see */
    }
    return capturing != 0 || oomkit_device_is_lost(st, device);
}

/* May the function work with a smaller batch? An OutOfMemory of ours may come of a step
 * that could not be split. */
static int
attempt_may_shrink(oomkit_state *st, PyObject *exception)
{
    oomkit_class class_ = oomkit_exception_classify(st, exception);

    if (class_ != OOMKIT_CLASS_OTHER && attempt_is_stuck(st)) {
        return 0;
    }
    if (class_ == OOMKIT_CLASS_CERTAIN || class_ == OOMKIT_CLASS_MASKED) {
        return 1;
    }
    if (class_ == OOMKIT_CLASS_NEVER) {
        return PyObject_TypeCheck(exception, (PyTypeObject *)st->OutOfMemory);
    }
    return class_ == OOMKIT_CLASS_OTHER && oomkit_exception_restarts(st, exception);
}

/* The autocast cache, cycles where bytes are still alive, the allocator's cache. 0 or
 * -1. */
static int
attempt_reclaim(oomkit_state *st, oomkit_device device, uint64_t before)
{
    OWNED PyObject *done = PyObject_CallNoArgs(st->clear_autocast_cache);
    uint64_t now;

    if (done == NULL) {
        return -1;
    }
    now = oomkit_device_allocated(st, device);
    if (now != OOMKIT_UNKNOWN && before != OOMKIT_UNKNOWN && now > before) {
        OWNED PyObject *collected = PyObject_CallNoArgs(st->gc_collect);
        if (collected == NULL) {
            return -1;
        }
    }
    return oomkit_device_empty_cache(st, device);
}

static int
attempt_drain(oomkit_state *st)
{
    OWNED PyObject *inference = PyObject_CallNoArgs(st->is_inference_mode);

    if (inference == NULL) {
        return -1;
    }
    /* Nothing runs backward there. */
    return inference == Py_True ? 0 : oomkit_backward_drain(st);
}

/* What went wrong in a few words, without the exception. Steals it. New reference or
 * NULL. */
static PyObject *
attempt_failed(oomkit_state *st, PyObject *exception, oomkit_device device,
               uint64_t before)
{
    OWNED PyObject *handled = PyErr_GetHandledException();
    OWNED PyObject *message = NULL, *location = NULL, *text = NULL;
    uint64_t requested;

    oomkit_exception_describe(st, exception, &requested, &message, &location);
    text = message != NULL && location != NULL
               ? PyUnicode_FromFormat("%U (%U)", message, location)
               : Py_NewRef(message != NULL ? message : Py_None);
    oomkit_exception_drop(st, exception, handled);
    if (text == NULL || attempt_drain(st) < 0 ||
        attempt_reclaim(st, device, before) < 0) {
        return NULL;
    }
    return PyTuple_Pack(2, Py_False, text);
}

static PyObject *
method_attempt(PyObject *module, PyObject *args)
{
    oomkit_state *st = oomkit_state_of_module(module);
    PyObject *function, *arguments, *keywords; /* borrowed from args */
    OWNED PyObject *result = NULL;
    PyObject *exception; /* owned */
    oomkit_device device;
    uint64_t before;

    if (!PyArg_ParseTuple(args, "OO!O!:_attempt", &function, &PyTuple_Type, &arguments,
                          &PyDict_Type, &keywords)) {
        return NULL;
    }
    device = oomkit_device_default(st);
    oomkit_device_prepare(st, device);
    before = oomkit_device_allocated(st, device);
    result = oomkit_call_function(function, arguments, keywords);
    if (result != NULL) {
        return PyTuple_Pack(2, Py_True, result);
    }
    exception = oomkit_exception_take();
    if (!attempt_may_shrink(st, exception)) {
        oomkit_exception_give(exception);
        return NULL;
    }
    /* A device that the function was the first to use is known only now. */
    if (device.type == OOMKIT_DEVICE_CPU) {
        device = oomkit_device_default(st);
        before = device.type == OOMKIT_DEVICE_CPU ? before : 0;
    }
    return attempt_failed(st, exception, device, before);
}

static PyObject *
method_let_go(PyObject *module, PyObject *exception)
{
    OWNED PyObject *handled = PyErr_GetHandledException();

    if (!PyExceptionInstance_Check(exception)) {
        PyErr_Format(PyExc_TypeError,
                     "_let_go() expected an exception, got '%s'" SEE("internal-error"),
                     Py_TYPE(exception)->tp_name);
        return NULL;
    }
    oomkit_exception_drop(oomkit_state_of_module(module), Py_NewRef(exception),
                          handled);
    Py_RETURN_NONE;
}

static PyObject *
method_drain(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    if (attempt_drain(oomkit_state_of_module(module)) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyMethodDef oomkit_release_methods[] = {
    {"_attempt", method_attempt, METH_VARARGS,
     "_attempt(function, args, kwargs, /)\n--\n\n"
     "(True, result); (False, text) where memory ran out and all was let go."},
    {"_let_go", method_let_go, METH_O,
     "_let_go(exc, /)\n--\n\nClear the frames of an exception and all that it links "
     "to."},
    {"_drain", method_drain, METH_NOARGS,
     "_drain()\n--\n\nFree what a failed backward left queued on this thread."},
    {NULL, NULL, 0, NULL},
};
