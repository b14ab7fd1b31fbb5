/* A call whose out-of-memory error never reaches Python: it is dropped here, with the
 * frames that hold the tensors, and told as plain values. A trial of a search cannot be
 * freed in an `except` block, where the exception is alive; and what is raised there
 * has it as its __context__. */
#include "outcome.h"
#include "../ladder/ladder.h"
#include "../loop/guard.h"
#include "../py/errors.h"

typedef struct trial_args {
    PyObject *func, *args, *kwargs; /* borrowed */
    PyObject *cleared;              /* borrowed: a type, or a tuple of them */
    PyObject *judge;                /* borrowed: callable or None */
    int keep;                       /* hand the error out, its frames cleared */
} trial_args;

/* Plain values of a failure. Everything owned. */
typedef struct trial_facts {
    PyObject *type, *message, *location, *report; /* NULL: not known */
    const char *class_name;                       /* static; NULL: it did not fail */
    uint64_t requested_bytes, allocated_bytes, reserved_bytes, usable_bytes;
} trial_facts;

static PyObject *
trial_bytes(uint64_t bytes)
{
    return bytes == OOMKIT_UNKNOWN ? Py_NewRef(Py_None)
                                   : PyLong_FromUnsignedLongLong(bytes);
}

static PyObject *
trial_or_none(PyObject *object)
{
    return Py_NewRef(object == NULL ? Py_None : object);
}

static void
facts_clear(trial_facts *facts)
{
    Py_CLEAR(facts->type);
    Py_CLEAR(facts->message);
    Py_CLEAR(facts->location);
    Py_CLEAR(facts->report);
}

/* The report of an oomkit.OutOfMemory: what its step tried. Never fails. */
static void
facts_take_report(oomkit_state *st, PyObject *exception, trial_facts *facts)
{
    OWNED PyObject *report = PyObject_GetAttr(exception, st->str_report);

    if (report == NULL) {
        oomkit_error_dismiss(); /* another's error: it has none */
    } else if (Py_IS_TYPE(report, (PyTypeObject *)st->report_type)) {
        facts->report = STEAL(report);
    }
}

/* What was allocated when the request failed: what the message says, where it says more
 * than is measured now, for the temporaries of the frames are gone already. */
static void
facts_take_allocated(trial_facts *facts)
{
    Py_ssize_t length;
    const char *text = NULL; /* borrowed from message */
    uint64_t said;

    if (facts->message != NULL) {
        text = PyUnicode_AsUTF8AndSize(facts->message, &length);
        if (text == NULL) {
            oomkit_error_dismiss(); /* the figure is a hint */
        }
    }
    if (text != NULL && oomkit_classify_allocated(text, (size_t)length, &said) &&
        (facts->allocated_bytes == OOMKIT_UNKNOWN || said > facts->allocated_bytes)) {
        facts->allocated_bytes = said;
    }
}

/* Before anything is freed. */
static void
facts_take(oomkit_state *st, oomkit_device device, PyObject *exception,
           trial_facts *facts)
{
    oomkit_exception_describe(st, exception, &facts->requested_bytes, &facts->message,
                              &facts->location);
    facts->class_name = oomkit_class_name(oomkit_exception_classify(st, exception));
    facts->type = PyUnicode_FromString(Py_TYPE(exception)->tp_name);
    if (facts->type == NULL) {
        oomkit_error_dismiss(); /* a name is a hint */
    }
    facts_take_report(st, exception, facts);
    oomkit_device_held(st, device, &facts->allocated_bytes, &facts->reserved_bytes);
    facts_take_allocated(facts);
    facts->usable_bytes = oomkit_device_usable(st, device);
}

/* Is the failure the function's own? The judge looks at the traceback. 1 or 0. */
static int
trial_judged(PyObject *judge, PyObject *exception)
{
    OWNED PyObject *answer = NULL;
    int result;

    if (judge == Py_None) {
        return 1;
    }
    answer = PyObject_CallOneArg(judge, exception);
    result = answer == NULL ? -1 : PyObject_IsTrue(answer);
    if (result < 0) {
        oomkit_error_unraised(judge); /* the failure counts, as nearly all do */
        return 1;
    }
    return result;
}

/* New reference or NULL. */
static PyObject *
trial_result(PyObject *value, const trial_facts *facts,
             const oomkit_peak_window *window)
{
    return Py_BuildValue(
        "(OzNNNNNNNNNNNN(ii))", value, facts->class_name, trial_or_none(facts->type),
        trial_or_none(facts->message), trial_or_none(facts->location),
        trial_or_none(facts->report), trial_bytes(facts->requested_bytes),
        trial_bytes(facts->allocated_bytes), trial_bytes(facts->reserved_bytes),
        trial_bytes(facts->usable_bytes), trial_bytes(window->baseline_bytes),
        trial_bytes(window->peak_allocated_bytes),
        trial_bytes(window->peak_reserved_bytes), trial_bytes(window->budget_bytes),
        window->device.type, window->device.index);
}

/* Is it out of memory, on a device that still works? What is left half updated is
 * thrown away with the trial. */
static int
trial_is_oom(oomkit_state *st, PyObject *exception)
{
    oomkit_class class_ = oomkit_exception_classify(st, exception);
    int is_oom = class_ == OOMKIT_CLASS_CERTAIN || class_ == OOMKIT_CLASS_MASKED ||
                 class_ == OOMKIT_CLASS_NEVER ||
                 PyObject_TypeCheck(exception, (PyTypeObject *)st->PartialUpdate);

    return is_oom && !oomkit_device_is_lost(st, oomkit_device_default(st));
}

/* With the exception of the call in flight. What to hand out in its place, a new
 * reference, with *facts filled; or NULL with the exception in flight again. */
static PyObject *
trial_failed(oomkit_state *st, const trial_args *call, oomkit_device device,
             trial_facts *facts)
{
    PyObject *exception = oomkit_exception_take(); /* owned, dropped or given back */
    OWNED PyObject *handled = PyErr_GetHandledException(); /* the caller's */
    PyObject *value = NULL;                                /* owned */

    if (trial_is_oom(st, exception) && trial_judged(call->judge, exception)) {
        facts_take(st, device, exception, facts);
        if (call->keep) {
            oomkit_exception_clear_frames(st, exception, handled);
            value = exception;
        } else {
            oomkit_exception_drop(st, exception, handled);
            value = Py_NewRef(Py_None);
        }
        if (oomkit_guard_drain(st, device) < 0) {
            oomkit_error_unraised(call->func);
        }
    } else if (PyErr_GivenExceptionMatches(exception, call->cleared)) {
        /* Who catches it keeps it, and it would keep the tensors. */
        oomkit_exception_clear_frames(st, exception, handled);
        facts->class_name = "cleared";
        value = exception;
    } else {
        oomkit_exception_give(exception);
    }
    return value;
}

static PyObject *
trial_call(oomkit_state *st, const trial_args *call)
{
    trial_facts facts = {.requested_bytes = OOMKIT_UNKNOWN,
                         .allocated_bytes = OOMKIT_UNKNOWN,
                         .reserved_bytes = OOMKIT_UNKNOWN,
                         .usable_bytes = OOMKIT_UNKNOWN};
    oomkit_device device = oomkit_device_default(st);
    oomkit_peak_window window;
    OWNED PyObject *value = NULL;
    PyObject *result; /* owned */

    oomkit_device_prepare(st, device);
    oomkit_device_begin(st, device, 1, &window);
    value = oomkit_call_function(call->func, call->args, call->kwargs);
    if (value == NULL) {
        value = trial_failed(st, call, device, &facts);
    }
    oomkit_device_end(st, &window);
    result = value == NULL ? NULL : trial_result(value, &facts, &window);
    facts_clear(&facts);
    return result;
}

PyDoc_STRVAR(trial_doc,
             "_trial($module, func, args, kwargs, cleared, judge, keep, /)\n"
             "--\n"
             "\n"
             "Call func; drop an out-of-memory error and tell it as plain values.\n"
             "\n"
             "(value, class, type, message, location, report, requested, allocated,\n"
             "reserved, usable, baseline, peak_allocated, peak_reserved, budget,\n"
             "device). class is None when nothing was raised. With `keep` the error\n"
             "is the value, its frames cleared; so is one of the types `cleared`,\n"
             "with the class \"cleared\". All others pass, and those of which\n"
             "judge(exc) is false. The device's cache is the caller's to empty.");

static PyObject *
method_trial(PyObject *module, PyObject *args)
{
    oomkit_state *st = oomkit_state_of_module(module);
    trial_args call;

    if (!PyArg_ParseTuple(args, "OO!O!OOp:_trial", &call.func, &PyTuple_Type,
                          &call.args, &PyDict_Type, &call.kwargs, &call.cleared,
                          &call.judge, &call.keep)) {
        return NULL;
    }
    if (!st->bound) {
        PyErr_SetString(PyExc_RuntimeError,
                        "_trial() needs `import oomkit` first" SEE("internal-error"));
        return NULL;
    }
    return trial_call(st, &call);
}

PyDoc_STRVAR(ladder_mask_doc,
             "_ladder_mask($module, ladder, /)\n"
             "--\n\n"
             "The rungs of ``ladder=`` as bits; ValueError for what names none.\n");

static PyObject *
method_ladder_mask(PyObject *module, PyObject *given)
{
    unsigned mask;

    (void)module;
    return oomkit_ladder_parse(given, &mask) < 0 ? NULL : PyLong_FromUnsignedLong(mask);
}

PyDoc_STRVAR(
    ladder_scope_doc,
    "_ladder_scope($module, mask, /)\n"
    "--\n\n"
    "What steps on this thread that give no ladder= may climb, -1 for all; returns\n"
    "what it was before.\n");

static PyObject *
method_ladder_scope(PyObject *module, PyObject *given)
{
    const long mask = PyLong_AsLong(given);

    (void)module;
    if (mask == -1 && PyErr_Occurred()) {
        return NULL;
    }
    return PyLong_FromLong(oomkit_ladder_scope((int)mask));
}

PyMethodDef oomkit_trial_methods[] = {
    {"_trial", method_trial, METH_VARARGS, trial_doc},
    {"_ladder_mask", method_ladder_mask, METH_O, ladder_mask_doc},
    {"_ladder_scope", method_ladder_scope, METH_O, ladder_scope_doc},
    {NULL, NULL, 0, NULL},
};
