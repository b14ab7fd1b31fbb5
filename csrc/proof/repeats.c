/* Does the step do the same when it runs again? Asked before the whole batch runs once
 * more, after a failure or a refused split: what could not be put back would be in its
 * result, and no comparison with parts of it is left to show that. */
#include "proof.h"
#include "../accum/accum.h"
#include "../call/call.h"
#include "../call/step.h"
#include "../engine/refused_sizes.h"
#include "../hook/hook.h"
#include "../plain/plain.h"
#include "../ranks/agree.h"
#include "../sizes/sizes.h"
#include "../undo/undo.h"

/* --- what the code shows --- */

/* Nothing puts back what was taken out of an iterator. 1, or 0 with *why (owned); -1.
 */
static int
keeps_iterators(oomkit_call *call, PyObject **why)
{
    OWNED PyObject *positional = NULL, *named = NULL, *name = NULL;

    if (oomkit_effects_arguments(call, &positional, &named) == 0) {
        EXEMPT (call->st) {
            name = PyObject_CallFunctionObjArgs(
                call->st->step_iterates, call->given.func, positional, named, NULL);
        }
    }
    if (name == NULL || name == Py_None) {
        return name == NULL ? -1 : 1;
    }
    *why = PyUnicode_FromFormat(
        "its code takes from %U, and what was taken is gone. "
        "Take from it outside of the step, and pass what it gives as an argument",
        name);
    return *why == NULL ? -1 : 0;
}

/* --- what two runs show --- */

/* The rows, and the same rows again in the place of the parts. Between the two only
 * what a failed attempt would put back goes back. *text (owned) as in
 * oomkit_proof_compare(). 0 or -1. */
static int
repeats_compare(oomkit_proof *p, PyObject **text)
{
    const oomkit_slice whole = {p->start, p->length};
    OWNED PyObject *held = NULL;

    p->unsplit = 1;
    if (oomkit_intercept_schedulers(p->call) < 0 || oomkit_proof_aside(p) < 0 ||
        oomkit_proof_judge(p) < 0) {
        return -1;
    }
    held = PyObject_CallMethod(p->judge, "repeats", NULL);
    return held == NULL || oomkit_proof_whole(p) < 0
               ? -1
               : oomkit_proof_compare_with(p, &whole, 1, text);
}

/* Nothing but floats in the result differ: a time that was taken. 1, 0 or -1. */
static int
repeats_but_for_results(const oomkit_proof *p)
{
    OWNED PyObject *results = PyObject_GetAttrString(p->judge, "volatile");

    return results == NULL ? -1 : results == Py_True;
}

/* What an error says: oomkit's without the help that the text around it has, the step's
 * own with what may be its cause. New str or NULL. */
static PyObject *
repeats_error(PyObject *exception)
{
    OWNED PyObject *text = PyObject_Str(exception);
    OWNED PyObject *help = PyUnicode_FromString(" (help: ");
    Py_ssize_t end = -2;

    if (text != NULL && help != NULL) {
        end = PyUnicode_Find(text, help, 0, PyUnicode_GET_LENGTH(text), 1);
    }
    return end == -2 ? NULL
           : end >= 0
               ? PyUnicode_Substring(text, 0, end)
               : PyUnicode_FromFormat("%s: %U, in a run whose updates are held back",
                                      Py_TYPE(exception)->tp_name, text);
}

/* An error has ended it. Of the step's own, or another refusal: it was not shown. As
 * oomkit_proof_repeats(). */
static int
repeats_unknown(oomkit_call *call, PyObject **why)
{
    PyObject *exception; /* owned, then discarded */
    OWNED PyObject *text = NULL;

    if (!PyErr_ExceptionMatches(PyExc_Exception) ||
        PyErr_ExceptionMatches(PyExc_MemoryError) ||
        oomkit_exception_is_oom(call->st)) {
        return -1;
    }
    exception = oomkit_exception_take();
    text = repeats_error(exception);
    *why = text == NULL ? NULL
                        : PyUnicode_FromFormat("it could not be shown that it does the "
                                               "same when it runs again (%U)",
                                               text);
    oomkit_exception_discard(call->st, exception);
    return *why == NULL ? -1 : OOMKIT_REPEATS_UNKNOWN;
}

/* Runs so many rows. *again: leaves were found, which are known to the next runs. As
 * oomkit_proof_repeats(). */
static int
repeats_of(oomkit_call *call, oomkit_slice rows, int *again, PyObject **why)
{
    oomkit_proof p = {
        .call = call, .start = rows.start, .length = rows.length, .fits = rows.length};
    OWNED PyObject *text = NULL;
    int phase = oomkit_phase_set(call->st, OOMKIT_PHASE_FORWARD), result;

    p.on_host = call->tries.ooms > 0;
    result = repeats_compare(&p, &text);
    result = result < 0 ? -1 : text == NULL ? 1 : repeats_but_for_results(&p);
    if (result == 0) {
        *why = PyUnicode_FromFormat(
            "it does not do the same when it runs again: %U. Something that it changes "
            "is not put back, neither after a failure nor after these runs. Change it "
            "outside of the step, or in attributes and items that the step's own code "
            "stores to",
            text);
        result = *why == NULL ? -1 : 0;
    } else if (result < 0) {
        result = repeats_unknown(call, why);
    }
    *again = call->tries.restart == OOMKIT_RESTART_UNKNOWN;
    call->tries.restart = 0; /* its marks are those of whom it has found */
    oomkit_proof_loud(&p);
    if (p.around != NULL && oomkit_proof_ask(&p, p.around, "put_back") < 0) {
        result = -1; /* where the second run has failed, the first is put back here */
    }
    if (oomkit_proof_back(&p) < 0) {
        result = -1;
    }
    if (result < 0) {
        Py_CLEAR(*why);
    }
    call->refused.raised = 0;
    oomkit_proof_clear(&p);
    oomkit_phase_set(call->st, phase);
    return result;
}

/* Leaves that a run has found: those that outlive it take part from now on. 0 or -1. */
static int
repeats_take_in(oomkit_call *call)
{
    call->tries.restarts++;
    oomkit_savepoint_end_attempt(call);
    return oomkit_tell_before_restart(call, OOMKIT_RESTART_UNKNOWN) < 0
               ? -1
               : oomkit_savepoint_take(call);
}

/* All rows of the batch; where there is no memory for that, and the split was refused
 * whose micro-batches are smaller, those of one of them. As oomkit_proof_repeats(). */
static int
repeats_runs(oomkit_call *call, PyObject **why)
{
    oomkit_slice rows = {0, call->batch.rows};
    oomkit_proof smaller = {.call = call};
    int result = -1, again = 1, i;

    (void)oomkit_proof_rows_largest(&smaller);
    for (i = 0; again && i <= OOMKIT_RESTARTS; i++) {
        Py_CLEAR(*why);
        result = repeats_of(call, rows, &again, why);
        again = again && result == OOMKIT_REPEATS_UNKNOWN; /* no error is in flight */
        if (again && repeats_take_in(call) < 0) {
            return -1;
        }
        if (result < 0 && smaller.length < rows.length && smaller.length > 0 &&
            oomkit_exception_is_oom(call->st)) {
            oomkit_exception_discard(call->st, oomkit_exception_take());
            rows = (oomkit_slice){smaller.start, smaller.length};
            again = 1;
        }
    }
    return result;
}

int
oomkit_proof_repeats(oomkit_call *call, int runs, PyObject **why)
{
    int result = keeps_iterators(call, why);

    if (result > 0 && runs && !call->tries.repeats && call->options->verify != 0 &&
        !call->st->proves_nothing) {
        result = repeats_runs(call, why);
        call->tries.repeats = result == 1;
    }
    return result;
}

/* --- after a failure --- */

/* Is it the whole batch that runs again, with updates that it may make wrong? */
static int
repeats_wanted(const oomkit_call *call)
{
    return !call->split && !call->given.is_body && !oomkit_call_is_replay(call) &&
           !oomkit_ranks_agreed(call) && !call->tries.joining && call->proof == NULL;
}

/* Do whole calls of this step end without a backward, and does its code write to no
 * parameter? Nothing of theirs is verified. */
static int
only_evaluates(const oomkit_call *call)
{
    return !call->training && call->step->whole.seen &&
           call->step->whole.without_backward && oomkit_writes_shown(call) == NULL;
}

int
oomkit_repeats_before_retry(oomkit_call *call)
{
    OWNED PyObject *why = NULL;
    int repeats;

    if (!repeats_wanted(call)) {
        return 0;
    }
    repeats = oomkit_proof_repeats(call, !only_evaluates(call), &why);
    if (repeats == 1 || repeats < 0) {
        return repeats == 1 ? 0 : -1;
    }
    return oomkit_split_refusal_stands(
               call, PyUnicode_FromFormat("was not run instead: %U", why))
               ? -1
               : oomkit_give_up_for(
                     call, PyUnicode_FromFormat("%U ran out of memory and is not "
                                                "retried: %U" SEE("not-retried"),
                                                call->options->label, why));
}
