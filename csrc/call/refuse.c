/* What no size of micro-batch would change: an error that ends the call. */
#include "call.h"

/* SplitError; the attempt is not retried. `alone`: it is the split alone that is
 * refused. */
static void
refuse(oomkit_call *call, PyObject *text, int alone)
{
    if (text != NULL) {
        PyErr_SetObject(call->st->SplitError, text);
    }
    if (alone) {
        Py_XSETREF(call->refused.split_alone, Py_XNewRef(text));
    }
    call->refused.raised = 1;
}

/* The same of the step. */
static void
refuse_step(oomkit_call *call, const char *format, va_list values, int alone)
{
    OWNED PyObject *why = PyUnicode_FromFormatV(format, values);
    OWNED PyObject *text =
        why == NULL
            ? NULL
            : PyUnicode_FromFormat("auto_batch cannot split this step: %U", why);

    refuse(call, text, alone);
}

int
oomkit_refuse(oomkit_call *call, const char *format, ...)
{
    va_list values;
    OWNED PyObject *text = NULL;

    va_start(values, format);
    text = PyUnicode_FromFormatV(format, values);
    va_end(values);
    refuse(call, text, 0);
    return -1;
}

PyObject *
oomkit_half_updated(oomkit_call *call, const char *format, ...)
{
    va_list values;

    va_start(values, format);
    PyErr_FormatV(call->st->PartialUpdate, format, values);
    va_end(values);
    call->refused.raised = 1;
    return NULL;
}

int
oomkit_split_alone(oomkit_call *call)
{
    PyObject *exception = PyErr_Occurred() ? oomkit_exception_take() : NULL;
    PyObject *args; /* borrowed */

    if (exception == NULL) {
        return -1;
    }
    args = ((PyBaseExceptionObject *)exception)->args;
    if (args != NULL && PyTuple_GET_SIZE(args) > 0) {
        Py_XSETREF(call->refused.split_alone, Py_NewRef(PyTuple_GET_ITEM(args, 0)));
    }
    oomkit_exception_give(exception); /* owned */
    return -1;
}

int
oomkit_refuse_split(oomkit_call *call, const char *format, ...)
{
    va_list values;

    va_start(values, format);
    refuse_step(call, format, values, 1);
    va_end(values);
    return -1;
}

int
oomkit_refuse_step(oomkit_call *call, const char *format, ...)
{
    va_list values;

    va_start(values, format);
    refuse_step(call, format, values, 0);
    va_end(values);
    return -1;
}
