/* What other people's exceptions are, what they say, and how to be rid of them. */
#include "errors.h"
#include "../records/ring.h"

#include <string.h>

#define LOOK_THROUGH                                                                   \
    16 /* wrappers inside wrappers: deeper ones are not out of memory */

/* --- looking through wrappers --- */

/* Is this an error of torch's compiler, which wraps what went wrong while compiling? */
static int
exception_is_wrapper(oomkit_state *st, PyObject *exception)
{
    OWNED PyObject *name =
        PyObject_GetAttr((PyObject *)Py_TYPE(exception), st->str_module);
    const char *text =
        name != NULL && PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : NULL;

    PyErr_Clear(); /* classification never fails: a type without a name wraps nothing */
    return text != NULL && (strncmp(text, "torch._dynamo", 13) == 0 ||
                            strncmp(text, "torch._inductor", 15) == 0);
}

/* What a wrapper wraps: `.inner_exception`, else `__cause__`. New reference; NULL
 * without an exception when it has neither. */
static PyObject *
exception_wrapped(oomkit_state *st, PyObject *exception)
{
    OWNED PyObject *inner = NULL;

    if (!exception_is_wrapper(st, exception)) {
        return NULL;
    }
    inner = PyObject_GetAttr(exception, st->str_inner_exception);
    if (inner == NULL) {
        oomkit_error_dismiss(); /* of a foreign attribute: there is none */
    } else if (PyExceptionInstance_Check(inner)) {
        return STEAL(inner);
    }
    return PyException_GetCause(exception);
}

/* The members of an exception group, or NULL. Borrowed from `exception`. */
static PyObject *
exception_members(PyObject *exception)
{
    PyObject *members; /* borrowed */

    if (!PyObject_TypeCheck(exception, (PyTypeObject *)PyExc_BaseExceptionGroup)) {
        return NULL;
    }
    members = ((PyBaseExceptionGroupObject *)exception)->excs;
    return members != NULL && PyTuple_Check(members) && PyTuple_GET_SIZE(members) > 0
               ? members
               : NULL;
}

/* The exception that decides what `exception` is: the innermost of its wrappers, the
 * first of its group. New reference. */
static PyObject *
exception_decisive(oomkit_state *st, PyObject *exception)
{
    PyObject *present = Py_NewRef(exception); /* owned */
    int depth;

    for (depth = 0; depth < LOOK_THROUGH; depth++) {
        PyObject *members = exception_members(present); /* borrowed */
        PyObject *next = members ? Py_NewRef(PyTuple_GET_ITEM(members, 0))
                                 : exception_wrapped(st, present); /* owned */
        if (next == NULL) {
            break;
        }
        Py_SETREF(present, next);
    }
    return present;
}

/* --- classification --- */

/* torch.distributed.DistBackendError, looked for only where it is imported already. */
static int
exception_is_distributed(PyObject *exception)
{
    PyObject *modules = PyImport_GetModuleDict(); /* borrowed from the interpreter */
    PyObject *module = NULL;                      /* borrowed from sys.modules */
    OWNED PyObject *type = NULL;

    if (Py_IS_TYPE(exception, (PyTypeObject *)PyExc_RuntimeError)) {
        return 0;
    }
    if (modules != NULL && PyDict_Check(modules)) {
        module = PyDict_GetItemString(modules, "torch.distributed");
    }
    if (module != NULL) {
        type = PyObject_GetAttrString(module, "DistBackendError");
    }
    PyErr_Clear(); /* a build without torch.distributed has no such error */
    return type != NULL && PyType_Check(type) &&
           PyObject_TypeCheck(exception, (PyTypeObject *)type);
}

static oomkit_exception_kind
exception_kind(oomkit_state *st, PyObject *exception)
{
    if (PyObject_TypeCheck(exception, (PyTypeObject *)st->TorchOutOfMemoryError)) {
        return OOMKIT_EXCEPTION_TORCH_OOM;
    }
    if (st->AcceleratorError != NULL &&
        PyObject_TypeCheck(exception, (PyTypeObject *)st->AcceleratorError)) {
        return OOMKIT_EXCEPTION_ACCELERATOR;
    }
    if (PyObject_TypeCheck(exception, (PyTypeObject *)PyExc_MemoryError)) {
        return OOMKIT_EXCEPTION_MEMORY;
    }
    if (PyObject_TypeCheck(exception, (PyTypeObject *)PyExc_RuntimeError)) {
        return exception_is_distributed(exception) ? OOMKIT_EXCEPTION_DISTRIBUTED
                                                   : OOMKIT_EXCEPTION_RUNTIME;
    }
    return exception_is_wrapper(st, exception) ? OOMKIT_EXCEPTION_RUNTIME
                                               : OOMKIT_EXCEPTION_OTHER;
}

/* The message as it was given, or as str() has it. New reference; NULL without an
 * exception when there is none to be had. str() may run code of the exception's class.
 */
static PyObject *
exception_text(PyObject *exception)
{
    PyObject *args = ((PyBaseExceptionObject *)exception)->args; /* borrowed */
    PyObject *text;                                              /* owned */

    if (args != NULL && PyTuple_Check(args) && PyTuple_GET_SIZE(args) == 1 &&
        PyUnicode_Check(PyTuple_GET_ITEM(args, 0))) {
        return Py_NewRef(PyTuple_GET_ITEM(args, 0));
    }
    text = PyObject_Str(exception);
    if (text == NULL) {
        oomkit_error_dismiss(); /* of a foreign __str__: there is no text then */
    }
    return text;
}

/* UTF-8 of `text` (which may be NULL), or NULL. Lives as long as `text`. */
static const char *
text_utf8(PyObject *text, size_t *length)
{
    Py_ssize_t size = 0;
    const char *utf8 = text == NULL ? NULL : PyUnicode_AsUTF8AndSize(text, &size);

    if (utf8 == NULL) {
        PyErr_Clear(); /* lone surrogates, or no memory: as good as no text */
        size = 0;
    }
    *length = (size_t)size;
    return utf8;
}

static void
facts_error_code(oomkit_state *st, PyObject *exception, oomkit_exception_facts *facts)
{
    OWNED PyObject *code = PyObject_GetAttr(exception, st->str_error_code);

    if (code != NULL && PyLong_Check(code)) {
        facts->error_code = PyLong_AsLong(code);
        facts->has_error_code = !PyErr_Occurred();
    }
    PyErr_Clear(); /* one made by hand has no code, or a senseless one */
}

/* One exception that wraps nothing. */
static oomkit_class
classify_one(oomkit_state *st, PyObject *exception)
{
    oomkit_exception_facts facts;
    OWNED PyObject *text = NULL;

    memset(&facts, 0, sizeof(facts));
    facts.kind = exception_kind(st, exception);
    if (facts.kind == OOMKIT_EXCEPTION_OTHER) {
        return OOMKIT_CLASS_OTHER;
    }
    if (facts.kind == OOMKIT_EXCEPTION_ACCELERATOR) {
        facts_error_code(st, exception, &facts);
    }
    text = exception_text(exception);
    facts.text = text_utf8(text, &facts.length);
    return oomkit_classify(&facts);
}

/* The worse of two, where OTHER wins: a group is OOM only when all of it is. */
static oomkit_class
class_worse(oomkit_class one, oomkit_class two)
{
    static const int severity[] = {
        [OOMKIT_CLASS_CERTAIN] = 0, [OOMKIT_CLASS_MASKED] = 1, [OOMKIT_CLASS_NEVER] = 2,
        [OOMKIT_CLASS_STICKY] = 3,  [OOMKIT_CLASS_OTHER] = 4,
    };
    return severity[one] >= severity[two] ? one : two;
}

static oomkit_class
classify_at(oomkit_state *st, PyObject *exception, int depth)
{
    PyObject *members = exception_members(exception); /* borrowed */
    OWNED PyObject *inner = NULL;
    oomkit_class class_ = OOMKIT_CLASS_CERTAIN;
    Py_ssize_t i;

    if (depth >= LOOK_THROUGH) {
        return OOMKIT_CLASS_OTHER;
    }
    if (PyObject_TypeCheck(exception, (PyTypeObject *)st->OomkitError)) {
        return PyObject_TypeCheck(exception, (PyTypeObject *)st->OutOfMemory)
                   ? OOMKIT_CLASS_NEVER
                   : OOMKIT_CLASS_OTHER;
    }
    if (members != NULL) {
        for (i = 0; i < PyTuple_GET_SIZE(members); i++) {
            class_ = class_worse(
                class_, classify_at(st, PyTuple_GET_ITEM(members, i), depth + 1));
        }
        return class_;
    }
    inner = exception_wrapped(st, exception);
    return inner == NULL ? classify_one(st, exception)
                         : classify_at(st, inner, depth + 1);
}

oomkit_class
oomkit_exception_classify(oomkit_state *st, PyObject *exception)
{
    oomkit_class class_ = OOMKIT_CLASS_OTHER;

    KEEPING_EXCEPTION {
        class_ = classify_at(st, exception, 0);
    }
    return class_;
}

int
oomkit_exception_is_oom(oomkit_state *st)
{
    PyObject *exception = oomkit_exception_take(); /* owned, given back */
    oomkit_class class_ = oomkit_exception_classify(st, exception);

    oomkit_exception_give(exception);
    return class_ == OOMKIT_CLASS_CERTAIN || class_ == OOMKIT_CLASS_MASKED;
}

int
oomkit_exception_restarts(oomkit_state *st, PyObject *exception)
{
    PyObject *args = ((PyBaseExceptionObject *)exception)->args; /* borrowed */
    const char *utf8 = NULL;
    size_t length = 0;

    if (!PyObject_TypeCheck(exception, (PyTypeObject *)PyExc_RuntimeError) ||
        PyObject_TypeCheck(exception, (PyTypeObject *)st->OomkitError) ||
        args == NULL || !PyTuple_Check(args) || PyTuple_GET_SIZE(args) != 1 ||
        !PyUnicode_Check(PyTuple_GET_ITEM(args, 0))) {
        return 0;
    }
    KEEPING_EXCEPTION {
        utf8 = text_utf8(PyTuple_GET_ITEM(args, 0), &length);
    }
    return utf8 != NULL && oomkit_classify_restarts(utf8, length);
}

/* --- description --- */

/* The innermost entry of a traceback, and the innermost of the user's: both owned, the
 * same where there is no other. 0; -1 where there is none. */
static int
traceback_ends(PyObject *exception, PyObject **innermost, PyObject **users)
{
    OWNED PyObject *entry = PyException_GetTraceback(exception);

    *innermost = *users = NULL;
    while (entry != NULL && PyTraceBack_Check(entry)) { /* None: it was taken away */
        PyTracebackObject *traceback = (PyTracebackObject *)entry;
        Py_XSETREF(*innermost, Py_NewRef(entry));
        if (!oomkit_frame_is_library(traceback->tb_frame)) {
            Py_XSETREF(*users, Py_NewRef(entry));
        }
        Py_SETREF(entry, Py_XNewRef((PyObject *)traceback->tb_next));
    }
    if (*users == NULL) {
        *users = Py_XNewRef(*innermost);
    }
    return *innermost == NULL ? -1 : 0;
}

/* "file:line in name". New reference or NULL. */
static PyObject *
traceback_place(oomkit_state *st, PyObject *entry)
{
    OWNED PyObject *line = PyObject_GetAttr(entry, st->str_tb_lineno);
    PyObject *location; /* owned, returned */
    PyCodeObject *code; /* owned */

    if (line == NULL) {
        return NULL;
    }
    code = PyFrame_GetCode(((PyTracebackObject *)entry)->tb_frame);
    location =
        PyUnicode_FromFormat("%U:%S in %U", code->co_filename, line, code->co_qualname);
    Py_DECREF(code);
    return location;
}

/* The place of the user's innermost frame, or (`inner`) of the innermost where that is
 * another. New reference; NULL, perhaps with an exception, when there is none. */
static PyObject *
exception_location(oomkit_state *st, PyObject *exception, int inner)
{
    OWNED PyObject *innermost = NULL, *users = NULL;

    if (traceback_ends(exception, &innermost, &users) < 0 ||
        (inner && innermost == users)) {
        return NULL;
    }
    return traceback_place(st, inner ? innermost : users);
}

/* The first line of a message. New reference; NULL, perhaps with an exception. */
static PyObject *
text_first_line(PyObject *text)
{
    Py_ssize_t length, end;

    if (text == NULL) {
        return NULL;
    }
    length = PyUnicode_GET_LENGTH(text);
    end = PyUnicode_FindChar(text, '\n', 0, length, 1);
    return end < 0 ? Py_NewRef(text) : PyUnicode_Substring(text, 0, end);
}

void
oomkit_exception_describe(oomkit_state *st, PyObject *exception, uint64_t *requested,
                          PyObject **message, PyObject **location)
{
    KEEPING_EXCEPTION {
        OWNED PyObject *decisive = exception_decisive(st, exception);
        OWNED PyObject *text = exception_text(decisive);
        size_t length;
        const char *utf8 = text_utf8(text, &length);

        if (utf8 == NULL || !oomkit_classify_requested(utf8, length, requested)) {
            *requested = OOMKIT_UNKNOWN;
        }
        *message = text_first_line(text);
        PyErr_Clear(); /* a report lacks what memory could not be had for */
        *location = exception_location(st, decisive, 0);
        if (*location == NULL && decisive != exception) {
            PyErr_Clear(); /* as above */
            *location = exception_location(st, exception, 0);
        }
        PyErr_Clear(); /* as above */
    }
}

PyObject *
oomkit_exception_inner(oomkit_state *st, PyObject *exception)
{
    PyObject *place = NULL; /* owned, returned */

    KEEPING_EXCEPTION {
        OWNED PyObject *decisive = exception_decisive(st, exception);
        OWNED PyObject *outer = exception_location(st, decisive, 0);
        place = exception_location(st, outer == NULL ? exception : decisive, 1);
        PyErr_Clear(); /* a report lacks what memory could not be had for */
    }
    return place;
}

/* Does the traceback of one exception lead through a backward? 1 or 0. */
static int
traceback_in_backward(PyObject *exception)
{
    OWNED PyObject *entry =
        exception == NULL ? NULL : PyException_GetTraceback(exception);
    int found = 0;

    while (!found && entry != NULL && PyTraceBack_Check(entry)) {
        PyTracebackObject *traceback = (PyTracebackObject *)entry;
        found = oomkit_frame_is_backward(traceback->tb_frame);
        Py_SETREF(entry, Py_XNewRef((PyObject *)traceback->tb_next));
    }
    return found;
}

int
oomkit_exception_of_backward(oomkit_state *st, PyObject *exception)
{
    int found = 0;

    KEEPING_EXCEPTION {
        OWNED PyObject *decisive = exception_decisive(st, exception);
        found = traceback_in_backward(exception) || traceback_in_backward(decisive);
        PyErr_Clear(); /* the phase is for people */
    }
    return found;
}
