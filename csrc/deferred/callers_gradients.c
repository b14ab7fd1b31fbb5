/* The caller's backward failed before or while something was run again: gradients as
 * they were before it. */
#include "callers_backward.h"
#include "../hook/graph.h"
#include "../py/modes.h"
#include "../undo/gradients.h"
#include "../undo/undo.h"

typedef struct gradients_back {
    const oomkit_callers *callers;
    PyObject *message; /* owned: why they cannot go back, or NULL */
} gradients_back;

static int
gradients_back_once(void *argument)
{
    gradients_back *it = argument;
    const oomkit_callers *s = it->callers;
    int i, result = 0, mode = oomkit_grad_mode_off(s->st);

    if (mode < 0) {
        return -1;
    }
    EXEMPT (s->st) {
        for (i = 0; i < s->call_count && result >= 0; i++) {
            OWNED PyObject *more = NULL; /* of this one: the others go back, too */
            if (s->calls[i]->deferred.elsewhere) {
                continue;
            }
            oomkit_grads_allow_no_aside(s->calls[i]);
            result = oomkit_savepoint_gradients(s->calls[i], &more);
            if (it->message == NULL) {
                it->message = STEAL(more);
            }
        }
    }
    return oomkit_grad_mode_back(s->st, mode, result);
}

void
oomkit_callers_gradients_back(oomkit_callers *s)
{
    /* An error of ours that a replay raised has said itself what stays changed. */
    int said = PyErr_ExceptionMatches(s->st->OomkitError);
    gradients_back it = {.callers = s};
    OWNED PyObject *message = NULL;
    int result = -1;

    KEEPING_EXCEPTION {
        PyObject *error; /* owned, then dropped: the first one tells more */
        result = oomkit_insist(s->st, gradients_back_once, &it, &error);
        if (error != NULL) {
            oomkit_exception_give(error);
            oomkit_error_beside(s->st, NULL);
        }
        if (result < 0) {
            Py_XSETREF(it.message,
                       PyUnicode_FromString("gradients could not be put back; call "
                                            "zero_grad() before you continue"));
            said = 0;
            oomkit_error_dismiss(); /* of memory for these words */
        }
    }
    message = it.message;
    if (message != NULL && !said) {
        oomkit_callers_say_changed(message);
    }
}

void
oomkit_callers_unseen(oomkit_callers *s, PyObject *exception)
{
    int deep = oomkit_graph_too_deep(s->st);

    if (PyErr_Occurred()) {
        Py_DECREF(exception);
        return;
    }
    if (deep) {
        OWNED PyObject *done =
            PyObject_CallMethod(exception, "add_note", "s",
                                "oomkit: not retried: " OOMKIT_TOO_DEEP
                                "; the gradients are as before it" SEE("deep-graph"));
        if (done == NULL) {
            oomkit_error_unraised(exception); /* the exception itself tells more */
        }
    }
    oomkit_exception_give(exception);
    if (deep) {
        oomkit_callers_take_back(s);
    }
}
