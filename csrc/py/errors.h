/* Exceptions: our own types, classification of others', and dropping one for good. */
#ifndef OOMKIT_PY_ERRORS_H
#define OOMKIT_PY_ERRORS_H

#include "state.h"
#include "../core/classify.h"

/* Makes the exception types of the state. Called by state_bind (OutOfMemory's base is
 * torch's type). 0 or -1. */
int
oomkit_errors_init(oomkit_state *st);

/* The class of an exception object, its wrappers (.inner_exception, __cause__ of
 * torch's compile-time wrappers, exception groups of one kind) looked through.
 * oomkit.OutOfMemory is NEVER, PartialUpdate and every other error of ours OTHER. Runs
 * no user code but attribute look-ups; keeps any exception in flight. */
oomkit_class
oomkit_exception_classify(oomkit_state *st, PyObject *exception);

/* Is the exception in flight one that a smaller micro-batch may help? It stays. */
int
oomkit_exception_is_oom(oomkit_state *st);

/* Is it a RuntimeError with one text for which accelerate would try a smaller size, and
 * none of ours? Runs no user code; keeps any exception in flight. */
int
oomkit_exception_restarts(oomkit_state *st, PyObject *exception);

/* Plain values out of an exception: request in bytes (OOMKIT_UNKNOWN), its message
 * (owned str or NULL) and "file:line in name" of the innermost frame that is neither
 * torch's nor ours, else of the innermost (owned str or NULL). Never fails, clears what
 * goes wrong inside. */
void
oomkit_exception_describe(oomkit_state *st, PyObject *exception, uint64_t *requested,
                          PyObject **message, PyObject **location);

/* The same of the innermost frame, where that is not the one above. New reference, or
 * NULL without an exception. */
PyObject *
oomkit_exception_inner(oomkit_state *st, PyObject *exception);
/* Was it raised while a backward ran, in torch's Python code or in the engine? 1 or 0;
 * never fails. */
int
oomkit_exception_of_backward(oomkit_state *st, PyObject *exception);

/* Drops an exception so that nothing it reached stays alive: frames of its traceback
 * cleared, traceback, cause, context and .inner_exception removed, recursively; stops
 * at `keep` (the exception that the caller was handling; borrowed, may be NULL). Steals
 * `exception`. Must be called without an exception in flight. Can run Python code
 * (finalisers). */
void
oomkit_exception_drop(oomkit_state *st, PyObject *exception, PyObject *keep);
/* The same down to the exception that is being handled now: the caller's. */
void
oomkit_exception_discard(oomkit_state *st, PyObject *exception);

/* The same without dropping: frames below are cleared but the exception stays raisable.
 * For guard, whose caller still owns it. Borrows `exception` and `keep`. */
void
oomkit_exception_clear_frames(oomkit_state *st, PyObject *exception, PyObject *keep);

/* Raises type(message) with attributes; message as in PyUnicode_FromFormat. NULL
 * always. */
PyObject *
oomkit_raise(PyObject *type, const char *format, ...);

/* Raises oomkit.OutOfMemory with .report and .committed set, __cause__ and __context__
 * None. `message` and `report` are borrowed. NULL always. */
PyObject *
oomkit_raise_out_of_memory(oomkit_state *st, PyObject *message, PyObject *report,
                           int committed);

/* logger.level(...) of oomkit's logger; the arguments as for PyObject_CallMethod(). 0
 * or -1. */
int
oomkit_say(oomkit_state *st, const char *level, const char *format, ...);

/* PyErr_WarnFormat(), which crashes where there is no memory for a frame's object. 0 or
 * -1. */
int
oomkit_warn(PyObject *category, Py_ssize_t level, const char *format, ...);

/* Steps from a frame (owned) to its caller's; to NULL from the outermost. 0, or -1 with
 * an exception: the object of a frame is made when it is asked for, and
 * PyFrame_GetBack() gives NULL for either. */
int
oomkit_frame_back(PyFrameObject **frame);

/* frames.c: "file:line" of the innermost frame that is neither torch's nor ours. New
 * reference, or NULL with an exception. */
PyObject *
oomkit_where(void);

/* Is it a frame of torch, of ours, or of a library between torch and the step? */
int
oomkit_frame_is_library(PyFrameObject *frame);
/* Is it a frame of torch's that runs a backward? 1 or 0; never fails. */
int
oomkit_frame_is_backward(PyFrameObject *frame);

/* Drops an error (if any) where a hint is asked for and nothing can be raised. An
 * interrupt is not lost, nor an exit that a handler of a signal asked for, which is the
 * main thread's: it arrives again, between two instructions of that thread. */
void
oomkit_error_dismiss(void);
/* The error in flight goes to sys.unraisablehook with `object`, because another one is
 * to be raised, or none can be. An interrupt arrives again, as above. */
void
oomkit_error_unraised(PyObject *object);
/* The same, but more of being out of memory says nothing beside the other error. */
void
oomkit_error_beside(oomkit_state *st, PyObject *object);

/* Says that there is no memory where a function of CPython's has failed without an
 * exception, as PyType_FromModuleAndSpec() of 3.11 does. */
void
oomkit_error_insure(void);

/* PyObject_Call(), which in 3.11 hands on what a function without keywords gives: NULL
 * without an exception, where CPython had no memory for a frame that it was to keep. */
PyObject *
oomkit_call_function(PyObject *function, PyObject *args, PyObject *kwargs);

/* Has it the attribute? 1, 0, or -1 with a want of memory or an interrupt, which
 * PyObject_HasAttr() takes for a no. Can run Python code. */
int
oomkit_has_attribute(PyObject *object, PyObject *name);

/* The same for a name that no string of the state has. */
int
oomkit_has_attribute_string(PyObject *object, const char *name);

/* An item of a small dictionary. Borrowed; NULL, never with an exception, where it is
 * not there. Needs no memory: PyDict_GetItemString() makes a string, and where it
 * cannot the item is not there, without a word. Runs no user code. */
PyObject *
oomkit_item(PyObject *dict, const char *name);

/* A module that is imported already. New reference; NULL, without an exception where it
 * is not. */
PyObject *
oomkit_imported(const char *name);

/* Calls module.name() where the module has been imported. 1, 0 or -1. */
int
oomkit_imported_says(const char *module_name, const char *name);

#endif
