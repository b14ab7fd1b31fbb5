/* Rolling a call back so that it is rolled back: an error that comes between (a refused
 * allocation, an interrupt, an exception out of code of the user's that runs here) does
 * not leave it half done. Everything in oomkit_savepoint_restore can be done again. */
#include "gradients.h"
#include "undo.h"
#include "../optim/updating.h"
#include "../plain/plain_state.h"
#include "../py/modes.h"
#include "../ranks/agree.h"

/* Gradients are marked at the first backward: a zero_grad() before it is not undone. */
#define AS_BEFORE "the state is as before the step"
#define CLEARED ", except for gradients that the step itself cleared"
/* What the step did before it returned the loss has been seen by its caller. */
#define AS_RETURNED "the state is as before the backward()"

#define TRIES 3

typedef struct take_back {
    oomkit_call *call;
    PyObject **message; /* see oomkit_savepoint_restore */
} take_back;

/* One try, outside the budget: what is put back was there before. */
static int
take_back_once(void *argument)
{
    oomkit_call *call = ((take_back *)argument)->call;
    PyObject **message = ((take_back *)argument)->message;
    PyObject *guard; /* owned */
    int result = -1;

    Py_CLEAR(*message);
    if (oomkit_inference_begin(call->st, 0, &guard) < 0) {
        return -1;
    }
    EXEMPT (call->st) {
        int mode = oomkit_grad_mode_off(call->st);
        if (mode >= 0) {
            result = oomkit_ranks_back(call) < 0
                         ? -1
                         : oomkit_savepoint_restore(call, message);
            result = oomkit_grad_mode_back(call->st, mode, result);
        }
    }
    return oomkit_inference_end(call->st, guard, result);
}

/* The exception to raise of two: what is not out-of-memory, else the first. Steals
 * both; either may be NULL. New reference. */
static PyObject *
worse_of(oomkit_state *st, PyObject *first, PyObject *second)
{
    PyObject *worse = first;

    if (first == NULL ||
        (oomkit_exception_classify(st, first) != OOMKIT_CLASS_OTHER &&
         oomkit_exception_classify(st, second) == OOMKIT_CLASS_OTHER)) {
        worse = second;
    }
    Py_XDECREF(worse == first ? second : first);
    return worse;
}

static int
is_oom(oomkit_state *st, PyObject *exception)
{
    oomkit_class class_ = oomkit_exception_classify(st, exception);
    return class_ == OOMKIT_CLASS_CERTAIN || class_ == OOMKIT_CLASS_MASKED;
}

/* Adds a note to an exception that passes. Steals `note`, which may be NULL. */
static void
add_note(PyObject *exception, PyObject *note)
{
    OWNED PyObject *done =
        note == NULL ? NULL : PyObject_CallMethod(exception, "add_note", "O", note);

    if (done == NULL) {
        oomkit_error_unraised(exception); /* the exception itself tells more */
    }
    Py_XDECREF(note);
}

/* No try has come to its end, which *message tells whoever raises something else.
 * Steals `exception`; -1 always. */
static int
take_back_failed(oomkit_call *call, PyObject *exception, PyObject **message)
{
    Py_XSETREF(*message, PyUnicode_FromString("parameters, gradients and buffers "
                                              "may contain a part of this batch"));
    if (*message == NULL) {
        oomkit_error_dismiss(); /* the error below has these words */
    }
    if (is_oom(call->st, exception)) {
        OWNED PyObject *text = NULL, *location = NULL;
        uint64_t requested;
        oomkit_exception_describe(call->st, exception, &requested, &text, &location);
        oomkit_exception_drop(call->st, exception, NULL);
        call->log.outcome = 2;
        oomkit_raise(call->st->PartialUpdate,
                     "%U ran out of memory, and again each time it was undone (%V): "
                     "parameters, gradients and buffers may contain a part of this "
                     "batch; restore a checkpoint" SEE("state-not-restored"),
                     call->options->label, text, "no message");
        return -1;
    }
    add_note(exception,
             PyUnicode_FromFormat(
                 "oomkit: raised while %U was being undone, each time: parameters, "
                 "gradients and buffers may contain a part of this batch; restore a "
                 "checkpoint" SEE("state-not-restored"),
                 call->options->label));
    oomkit_exception_give(exception);
    return -1;
}

int
oomkit_insist(oomkit_state *st, int (*once)(void *), void *argument, PyObject **error)
{
    int result = -1, tries;

    *error = NULL;
    for (tries = 0; result < 0 && tries < TRIES; tries++) {
        result = once(argument);
        if (result < 0) {
            *error = worse_of(st, *error, oomkit_exception_take());
        }
    }
    if (result >= 0 && *error != NULL && is_oom(st, *error)) {
        oomkit_exception_drop(st, *error, NULL);
        *error = NULL;
    }
    return result;
}

int
oomkit_take_back(oomkit_call *call, PyObject **message)
{
    take_back it = {call, message};
    PyObject *error; /* owned */
    int result = oomkit_grads_can_be_remade(call);

    if (result < 0) {
        oomkit_error_unraised(call->given.func); /* going back is what matters */
    }
    oomkit_grads_allow_going(call, result > 0);
    result = oomkit_insist(call->st, take_back_once, &it, &error);
    oomkit_grads_allow_going(call, 0);
    if (result < 0) {
        return take_back_failed(call, error, message);
    }
    if (oomkit_grads_gone(call)) {
        result = call->st->wiring->gradients_are_gone(call, result, message, error);
    }
    if (error == NULL) {
        return result;
    }
    if (result == 1) {
        add_note(error,
                 PyUnicode_FromFormat("oomkit: not everything could be undone: %U" SEE(
                                          "state-not-restored"),
                                      *message));
    }
    oomkit_exception_give(error);
    return -1;
}

/* Everything back as at entry (or at the start of the failed part). 0, or -1 with an
 * exception: an error, or oomkit.OutOfMemory that says what cannot be taken back. */
int
oomkit_recover_roll_back(oomkit_call *call)
{
    OWNED PyObject *message = NULL;
    int result = oomkit_take_back(call, &message);

    if (result == 1) {
        call->log.outcome = 1;
        if (oomkit_params_stay(call)) {
            oomkit_raise(call->st->PartialUpdate,
                         "%U ran out of memory and cannot be undone: %U" SEE(
                             "state-not-restored"),
                         call->options->label, message);
        } else {
            oomkit_give_up(call, message, 0);
        }
        result = -1;
    }
    if (result == 0 && call->backward.queued) {
        result = oomkit_backward_drain(call->st);
    }
    if (result == 0) {
        result = oomkit_plain_say(call);
    }
    return result;
}

void
oomkit_recover_undo(oomkit_call *call)
{
    PyObject *exception = oomkit_exception_take(); /* owned, given back */
    OWNED PyObject *message = NULL;

    if (oomkit_take_back(call, &message) < 0) {
        oomkit_error_unraised(
            call->given.func); /* the step's own error is the one to see */
    }
    if (message != NULL) {
        add_note(exception,
                 PyUnicode_FromFormat("oomkit: not everything could be undone: %U" SEE(
                                          "state-not-restored"),
                                      message));
    }
    oomkit_exception_give(exception);
}

/* Gives `notes` (NULL: there are none) to the exception in flight. They may say what
 * could not be taken back. */
static void
notes_keep(PyObject *notes)
{
    PyObject *exception = oomkit_exception_take(); /* owned, given back */

    if (notes != NULL && PyObject_SetAttrString(exception, "__notes__", notes) < 0) {
        oomkit_error_unraised(exception);
    }
    oomkit_exception_give(exception);
}

/* Raises oomkit.OutOfMemory in place of an out-of-memory error in flight, with its
 * notes; `format` takes the label, `doing`, the message and the place. */
static int
own_failed(oomkit_call *call, const char *format, const char *doing)
{
    PyObject *exception, *handled; /* owned */
    OWNED PyObject *reason = NULL, *message = NULL, *location = NULL, *notes = NULL;
    uint64_t requested;

    if (!oomkit_exception_is_oom(call->st)) {
        return -1;
    }
    exception = oomkit_exception_take();
    notes = PyObject_GetAttrString(exception, "__notes__");
    oomkit_error_dismiss(); /* it has none */
    handled = PyErr_GetHandledException();
    oomkit_exception_describe(call->st, exception, &requested, &message, &location);
    oomkit_exception_drop(call->st, exception, handled);
    Py_XDECREF(handled);
    reason =
        PyUnicode_FromFormat(format, call->options->label, doing, message, "no message",
                             location == NULL ? "" : "; at ", location, "");
    if (reason != NULL) {
        oomkit_give_up(call, reason, 0);
    }
    notes_keep(notes);
    return -1;
}

const char *
oomkit_state_as_before(const oomkit_call *call)
{
    return oomkit_call_is_replay(call)                           ? AS_RETURNED
           : call->parts != NULL && call->parts->param_count > 0 ? AS_BEFORE CLEARED
                                                                 : AS_BEFORE;
}

int
oomkit_own_failed(oomkit_call *call, const char *doing)
{
    if (oomkit_exception_is_oom(call->st) &&
        oomkit_device_is_lost(call->st, oomkit_engine_device_of_failure(call))) {
        return -1; /* no want of memory, and nothing works any more */
    }
    return own_failed(
        call,
        oomkit_call_is_replay(call)
            ? "%U is not run, because memory ran out while %s (%V%s%V); " AS_RETURNED
        : call->parts != NULL && call->parts->param_count > 0
            ? "%U is not run, because memory ran out while %s (%V%s%V); " AS_BEFORE
                  CLEARED
            : "%U is not run, because memory ran out while %s (%V%s%V); " AS_BEFORE,
        doing);
}

void
oomkit_reclaim_failed(oomkit_call *call)
{
    const oomkit_attempt *attempt = &call->tries.items[call->tries.count - 1];
    PyObject *exception; /* owned, given back */

    if (oomkit_exception_is_oom(call->st)) {
        return; /* oomkit_own_failed has the words for it */
    }
    exception = oomkit_exception_take();
    if (PyObject_TypeCheck(exception, (PyTypeObject *)PyExc_Exception)) {
        add_note(exception,
                 PyUnicode_FromFormat(
                     "oomkit: raised while the memory of %U was being "
                     "freed, which had run out of it (%V)" SEE("state-not-restored"),
                     call->options->label, attempt->message, "no message"));
    }
    oomkit_exception_give(exception);
}
