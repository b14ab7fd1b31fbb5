/* Calls before this one whose gradients were in .grad when it began. Who keeps them
 * (the option _window of an adapter: oomkit/_trainers/window.py) runs them again where
 * a failure has left sums that cannot be taken apart. */
#include "engine.h"
#include "../hook/hook.h"
#include "../py/tensor.h"
#include "../sizes/sizes.h"
#include "../undo/gradients.h"
#include "../undo/undo.h"

#define CLEARED "the gradients of the earlier calls of this update are cleared"

static _Thread_local int running;

int
oomkit_earlier_are_running(void)
{
    return running > 0;
}

int
oomkit_earlier_was_whole(const oomkit_state *st)
{
    return st->forced_slices != NULL && PyTuple_GET_SIZE(st->forced_slices) == 0;
}

int
oomkit_earlier_note(const oomkit_call *call)
{
    OWNED PyObject *lengths = NULL, *done = NULL;
    const int64_t count =
        oomkit_call_is_cut(call) && call->split ? call->cut->count : 0;
    int64_t i;

    lengths = PyTuple_New((Py_ssize_t)count);
    for (i = 0; lengths != NULL && i < count; i++) {
        PyObject *length = PyLong_FromLongLong(call->cut->slices[i].length);
        if (length == NULL) {
            return -1;
        }
        PyTuple_SET_ITEM(lengths, i, length);
    }
    done = lengths == NULL
               ? NULL
               : PyObject_CallMethod(call->options->window, "ran", "(O)", lengths);
    return done == NULL ? -1 : 0;
}

/* They run: calls of their own, in which nothing of this one is to be seen. New
 * reference (True, False where some ran in smaller micro-batches, or a str that says
 * why not) or NULL. */
static PyObject *
earlier_run(oomkit_call *call)
{
    const int phase = oomkit_phase_set(call->st, OOMKIT_PHASE_FORWARD);
    oomkit_call *current = oomkit_call_current();
    PyObject *made; /* owned, returned */

    oomkit_intercept_remove(call);
    if (oomkit_compiler_on(call) < 0) {
        return NULL;
    }
    oomkit_call_set_current(NULL);
    running++;
    made = PyObject_CallMethod(call->options->window, "make", NULL);
    running--;
    oomkit_call_set_current(current);
    KEEPING_EXCEPTION {
        if (current == call &&
            (oomkit_compiler_off(call) < 0 || oomkit_intercept_install(call) < 0)) {
            Py_CLEAR(made);
        }
    }
    oomkit_phase_set(call->st, phase);
    return made;
}

/* On an error that tells more. */
static void
earlier_add_note(oomkit_call *call, PyObject *error)
{
    OWNED PyObject *done = PyObject_CallMethod(
        error, "add_note", "s", "oomkit: " CLEARED SEE("gradients-not-restored"));

    if (done == NULL) {
        oomkit_error_unraised(call->given.func); /* the error itself tells more */
    }
}

/* They have not run: 1 and *message says why, or -1. Steals `why`, NULL with an
 * exception. */
static int
earlier_failed(oomkit_call *call, PyObject *why, PyObject **message)
{
    OWNED PyObject *reason = why;

    if (reason == NULL) {
        PyObject *error = oomkit_exception_take(); /* owned, then given away */
        if (oomkit_exception_classify(call->st, error) == OOMKIT_CLASS_OTHER &&
            !PyErr_GivenExceptionMatches(error, call->st->OutOfMemory)) {
            earlier_add_note(call, error);
            oomkit_exception_give(error);
            return -1;
        }
        oomkit_exception_discard(call->st, error);
        reason = PyUnicode_FromString("memory ran out in them, too");
    }
    *message =
        reason == NULL
            ? NULL
            : PyUnicode_FromFormat(
                  "gradients cannot be restored: those of the earlier calls of this "
                  "update could not be made again (%U) and are cleared: call "
                  "zero_grad() and begin with the first of these calls, or pass "
                  "gradient_safety=\"copy\" to auto_batch",
                  reason);
    return *message == NULL ? -1 : 1;
}

/* 0; 1 with *message; -1. */
static int
earlier_make(oomkit_call *call, PyObject **message)
{
    OWNED PyObject *made = NULL;

    if (oomkit_recover_reclaim(call, oomkit_baseline_at_entry(call)) < 0) {
        return -1;
    }
    made = earlier_run(call);
    oomkit_grads_end_attempt(call); /* others than those that were marked */
    if (made != Py_True && made != Py_False) {
        return earlier_failed(call, STEAL(made), message);
    }
    return oomkit_say(
        call->st, "info", "sKO",
        made == Py_True
            ? "step=%d of %s: the gradients of earlier calls of this update were made "
              "again"
            : "step=%d of %s: the gradients of earlier calls of this update were made "
              "again, in smaller micro-batches than before: right, but not bit for bit",
        (unsigned long long)call->log.number, call->options->label);
}

int
oomkit_earlier_make(oomkit_call *call, int result, PyObject **message, PyObject *error)
{
    oomkit_grads_are_back(call);
    if (error != NULL) { /* it is raised: they stay away */
        earlier_add_note(call, error);
    } else if (result == 0) {
        return earlier_make(call, message);
    } else if (*message != NULL) {
        PyObject *longer = PyUnicode_FromFormat("%U; " CLEARED, *message); /* owned */
        if (longer == NULL) {
            return -1;
        }
        Py_SETREF(*message, longer);
    }
    return result;
}
