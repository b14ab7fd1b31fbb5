/* Exception types of oomkit, and raising them. */
#include "errors.h"

#include <stdarg.h>

PyDoc_STRVAR(oomkit_error_doc, "Base class of the errors that oomkit raises itself.");

PyDoc_STRVAR(
    out_of_memory_doc,
    "Memory ran out, and no plan was left to try.\n"
    "\n"
    "Attributes\n"
    "----------\n"
    "report : OOMReport or None\n"
    "    What was tried, who holds the memory, and what to do.\n"
    "committed : bool\n"
    "    True when the update of the parameters had been applied before memory\n"
    "    ran out: the step stands, and its batch must not be repeated.");

PyDoc_STRVAR(
    partial_update_doc,
    "An optimizer changed some parameters and then failed; it cannot be undone.\n"
    "\n"
    "This is not an out-of-memory error: a retry would apply the update twice to\n"
    "the parameters that moved. Load a checkpoint, or use\n"
    "auto_batch(optimizer_safety=\"copy\").");

PyDoc_STRVAR(
    split_error_doc,
    "A step cannot be computed in micro-batches; the message names what to change.");

PyDoc_STRVAR(rank_error_doc,
             "Another rank of the process group has failed, or does not come; the "
             "message names it. ``rank`` is its number, or None.");

PyDoc_STRVAR(oomkit_warning_doc,
             "Something that oomkit cannot make exact, or that it cannot use.");

/* The attributes that every instance has until it gets its own. New reference or NULL.
 */
static PyObject *
out_of_memory_namespace(oomkit_state *st)
{
    PyObject *names = PyDict_New(); /* owned */
    if (names != NULL && (PyDict_SetItem(names, st->str_report, Py_None) < 0 ||
                          PyDict_SetItem(names, st->str_committed, Py_False) < 0)) {
        Py_CLEAR(names);
    }
    return names;
}

/* A type with OomkitError and another base. `names` is borrowed and may be NULL. New
 * reference or NULL. */
static PyObject *
error_type(oomkit_state *st, const char *name, const char *doc, PyObject *base,
           PyObject *names)
{
    OWNED PyObject *bases = PyTuple_Pack(2, st->OomkitError, base);

    return bases == NULL ? NULL : PyErr_NewExceptionWithDoc(name, doc, bases, names);
}

int
oomkit_errors_init(oomkit_state *st)
{
    OWNED PyObject *names = NULL;

    Py_XSETREF(st->OomkitError,
               PyErr_NewExceptionWithDoc("oomkit.OomkitError", oomkit_error_doc,
                                         PyExc_Exception, NULL));
    if (st->OomkitError == NULL) {
        return -1;
    }
    names = out_of_memory_namespace(st);
    if (names == NULL) {
        return -1;
    }
    Py_XSETREF(st->OutOfMemory, error_type(st, "oomkit.OutOfMemory", out_of_memory_doc,
                                           st->TorchOutOfMemoryError, names));
    if (st->OutOfMemory == NULL) {
        return -1;
    }
    Py_XSETREF(st->PartialUpdate,
               error_type(st, "oomkit.PartialUpdate", partial_update_doc,
                          PyExc_RuntimeError, NULL));
    if (st->PartialUpdate == NULL) {
        return -1;
    }
    Py_XSETREF(st->SplitError, error_type(st, "oomkit.SplitError", split_error_doc,
                                          PyExc_ValueError, NULL));
    if (st->SplitError == NULL) {
        return -1;
    }
    Py_SETREF(names, Py_BuildValue("{s:O}", "rank", Py_None));
    if (names == NULL) {
        return -1;
    }
    Py_XSETREF(st->RankError, error_type(st, "oomkit.RankError", rank_error_doc,
                                         PyExc_RuntimeError, names));
    if (st->RankError == NULL) {
        return -1;
    }
    Py_XSETREF(st->OomkitWarning,
               PyErr_NewExceptionWithDoc("oomkit.OomkitWarning", oomkit_warning_doc,
                                         PyExc_UserWarning, NULL));
    return st->OomkitWarning == NULL ? -1 : 0;
}

int
oomkit_say(oomkit_state *st, const char *level, const char *format, ...)
{
    va_list values;
    OWNED PyObject *method = PyObject_GetAttrString(st->log, level);
    OWNED PyObject *arguments = NULL, *done = NULL;

    va_start(values, format);
    arguments = method == NULL ? NULL : Py_VaBuildValue(format, values);
    va_end(values);
    if (arguments != NULL) {
        done = PyTuple_Check(arguments) ? PyObject_CallObject(method, arguments)
                                        : PyObject_CallOneArg(method, arguments);
    }
    return done == NULL ? -1 : 0;
}

PyObject *
oomkit_raise(PyObject *type, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    PyErr_FormatV(type, format, arguments);
    va_end(arguments);
    return NULL;
}

PyObject *
oomkit_raise_out_of_memory(oomkit_state *st, PyObject *message, PyObject *report,
                           int committed)
{
    OWNED PyObject *error = PyObject_CallOneArg(st->OutOfMemory, message);

    if (error != NULL && PyObject_SetAttr(error, st->str_report, report) == 0 &&
        PyObject_SetAttr(error, st->str_committed, committed ? Py_True : Py_False) ==
            0) {
        /* Not PyErr_SetObject: that would link the exception which the caller is
         * handling. */
        oomkit_exception_give(STEAL(error));
    }
    return NULL;
}

int
oomkit_warn(PyObject *category, Py_ssize_t level, const char *format, ...)
{
    va_list values;
    OWNED PyObject *frame = (PyObject *)PyThreadState_GetFrame(PyThreadState_Get());
    /* CPython finds these two, as long as they are held */
    OWNED PyObject *back =
        frame == NULL ? NULL : (PyObject *)PyFrame_GetBack((PyFrameObject *)frame);
    OWNED PyObject *text = NULL;

    if ((frame == NULL && PyEval_GetGlobals() != NULL) || PyErr_Occurred()) {
        PyErr_NoMemory(); /* there is a frame, but its object could not be made */
        return -1;
    }
    if (back == NULL && level > 1) {
        level = 1; /* the outermost frame, or no memory for another one's object */
    }
    va_start(values, format);
    text = PyUnicode_FromFormatV(format, values);
    va_end(values);
    return text == NULL ? -1 : PyErr_WarnFormat(category, level, "%U", text);
}

int
oomkit_frame_back(PyFrameObject **frame)
{
    Py_SETREF(*frame, PyFrame_GetBack(*frame));
    return *frame == NULL && PyErr_Occurred() ? -1 : 0;
}

/* Is this the main thread? Pending calls are its alone. 1, or 0 also where it cannot be
 * told. */
static int
error_is_main(void)
{
    OWNED PyObject *threading = PyImport_ImportModule("threading");
    OWNED PyObject *main =
        threading == NULL ? NULL : PyObject_CallMethod(threading, "main_thread", NULL);
    OWNED PyObject *number =
        main == NULL ? NULL : PyObject_GetAttrString(main, "ident");
    unsigned long ident = number == NULL ? 0 : PyLong_AsUnsignedLong(number);

    PyErr_Clear(); /* accounted for: another exception is about to be dropped or kept */
    return ident != 0 && ident == PyThread_get_thread_ident();
}

/* A pending call: raises what was put off. Steals it. */
static int
error_again(void *exception)
{
    oomkit_exception_give(exception);
    return -1;
}

void
oomkit_error_unraised(PyObject *object)
{
    int arrives = !PyErr_ExceptionMatches(PyExc_Exception) &&
                  !PyErr_ExceptionMatches(PyExc_GeneratorExit);

    if (arrives) {
        PyObject *exception = oomkit_exception_take(); /* owned, given back */
        arrives = error_is_main();
        oomkit_exception_give(exception);
    }
    if (arrives) {
        oomkit_error_dismiss();
    } else {
        PyErr_WriteUnraisable(object);
    }
}

void
oomkit_error_beside(oomkit_state *st, PyObject *object)
{
    if (oomkit_exception_is_oom(st)) {
        oomkit_error_dismiss();
    } else {
        oomkit_error_unraised(object);
    }
}

void
oomkit_error_dismiss(void)
{
    PyObject *exception; /* owned, or the pending call's */

    if (PyErr_Occurred() == NULL) {
        return;
    }
    if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
        PyErr_Clear(); /* raised again by its signal */
        PyErr_SetInterrupt();
        return;
    }
    if (PyErr_ExceptionMatches(PyExc_Exception) ||
        PyErr_ExceptionMatches(PyExc_GeneratorExit)) {
        PyErr_Clear(); /* accounted for: only hints are asked for here */
        return;
    }
    exception = oomkit_exception_take();
    if (!error_is_main() || Py_AddPendingCall(error_again, exception) < 0) {
        Py_DECREF(exception); /* another thread's, or 32 of them wait already */
    }
}

void
oomkit_error_insure(void)
{
    if (!PyErr_Occurred()) {
        PyErr_NoMemory();
    }
}

PyObject *
oomkit_call_function(PyObject *function, PyObject *args, PyObject *kwargs)
{
    PyObject *result = PyObject_Call(function, args, kwargs); /* owned, returned */

    if (result == NULL) {
        oomkit_error_insure();
    }
    return result;
}

int
oomkit_has_attribute(PyObject *object, PyObject *name)
{
    OWNED PyObject *value = PyObject_GetAttr(object, name);

    if (value != NULL) {
        return 1;
    }
    if (PyErr_ExceptionMatches(PyExc_MemoryError) ||
        !PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyErr_Clear(); /* a __getattr__ of the user's may say "no" in its own words */
    return 0;
}

int
oomkit_has_attribute_string(PyObject *object, const char *name)
{
    OWNED PyObject *string = PyUnicode_FromString(name);

    return string == NULL ? -1 : oomkit_has_attribute(object, string);
}

PyObject *
oomkit_item(PyObject *dict, const char *name)
{
    PyObject *key, *value; /* borrowed from dict */
    Py_ssize_t at = 0;

    while (PyDict_Check(dict) && PyDict_Next(dict, &at, &key, &value)) {
        if (PyUnicode_Check(key) && PyUnicode_CompareWithASCIIString(key, name) == 0) {
            return value;
        }
    }
    return NULL;
}

PyObject *
oomkit_imported(const char *name)
{
    OWNED PyObject *key = PyUnicode_FromString(name);

    return key == NULL ? NULL : PyImport_GetModule(key);
}

int
oomkit_imported_says(const char *module_name, const char *name)
{
    OWNED PyObject *module = oomkit_imported(module_name);
    OWNED PyObject *answer = NULL;
    int has;

    if (module == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    has = oomkit_has_attribute_string(module, name);
    if (has <= 0) {
        return has;
    }
    answer = PyObject_CallMethod(module, name, NULL);
    return answer == NULL ? -1 : PyObject_IsTrue(answer);
}
