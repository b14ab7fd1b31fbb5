/* An error that a step raises only because it is split: BatchNorm with one row, a
 * pairing that needs an even number, edges of a graph that lead out of the slice. Where
 * another size may help it is tried, once each, and what worked is a bound of the site;
 * else the error is the cause of a SplitError. Everything has gone back by then. */
#include "engine.h"
#include "refused_sizes.h"
#include "../optim/updating.h"
#include "../ranks/agree.h"
#include "../result/result.h"
#include "../sizes/sizes.h"
#include "../undo/undo.h"

/* --- is it the split's? --- */

/* Types of errors that sizes lead to. A class of a program's own that is none of them
 * (to end a training, to prune a trial) is no error of sizes. */
static int
unfit_type(const oomkit_state *st, PyObject *exception)
{
    PyObject *const types[] = {PyExc_RuntimeError, PyExc_ValueError,
                               PyExc_LookupError,  PyExc_AssertionError,
                               PyExc_TypeError,    PyExc_ZeroDivisionError};
    /* An operation that a device or a layout lacks is lacking at any size. */
    PyObject *const never[] = {PyExc_NotImplementedError, PyExc_RecursionError,
                               PyExc_UnicodeError, st->OomkitError,
                               st->AcceleratorError};
    size_t i;

    for (i = 0; i < sizeof(never) / sizeof(*never); i++) {
        if (never[i] != NULL &&
            PyObject_TypeCheck(exception, (PyTypeObject *)never[i])) {
            return 0;
        }
    }
    for (i = 0; i < sizeof(types) / sizeof(*types); i++) {
        if (PyObject_TypeCheck(exception, (PyTypeObject *)types[i])) {
            return 1;
        }
    }
    return 0;
}

/* Did the first attempt of this call have the whole batch? */
static int
unfit_began_whole(const oomkit_call *call)
{
    return call->tries.count > 0 && call->tries.items[0].accumulation_steps == 1;
}

/* Was it the planner that split this call? Slices that were asked for may be of a step
 * that works on no batch at all. */
static int
unfit_is_planned(const oomkit_call *call)
{
    return !call->cut->forced &&
           (call->options->accumulation_steps <= 1 || call->step->whole.seen ||
            oomkit_call_is_replay(call) || unfit_began_whole(call));
}

/* Does the error come of the split? Only out of a forward: after a backward it may come
 * of parked gradients, or of what was computed. 1, 0, or -1 with an exception. */
static int
unfit_is_splits(oomkit_call *call, PyObject *exception)
{
    int committed, lost;

    if (!call->split || call->refused.raised || !call->tries.by_step ||
        ((PyBaseExceptionObject *)exception)->traceback == NULL || /* wrong arguments */
        !unfit_type(call->st, exception) || !unfit_is_planned(call) ||
        call->backward.done > 0 || call->backward.failed ||
        oomkit_updates_made(call) > 0 || oomkit_update_of_unknown_runs(call) ||
        oomkit_update_unfinished(call) || oomkit_tell_failure_remains(call) != NULL) {
        return 0;
    }
    lost = oomkit_ranks_lost(call, exception);
    if (lost != 0) {
        return lost < 0 ? -1 : 0;
    }
    committed = oomkit_recover_committed(call);
    return committed < 0 ? -1 : !committed && call->refused.why == NULL;
}

/* No size would help. It may come of gradients that are set aside all the same (`.grad`
 * is None there), or of a graph that the micro-batch before has freed: the whole batch
 * tells. What that raises as well is the step's own. */
static int
unfit_may_be_whole(const oomkit_call *call, PyObject *exception)
{
    return call->split && !call->refused.raised && call->tries.by_step &&
           ((PyBaseExceptionObject *)exception)->traceback != NULL &&
           (unfit_type(call->st, exception) ||
            PyObject_TypeCheck(exception, (PyTypeObject *)PyExc_AttributeError)) &&
           unfit_is_planned(call);
}

/* --- bounds --- */

/* The next bound to try after an error with `rows` rows. 1, or 0 when none is left. */
static int
unfit_next(oomkit_call *call, int64_t rows)
{
    if (rows == 1 && oomkit_unfit_least(call) < 2) {
        oomkit_unfit_bound(call, 2, 0);
        return 1;
    }
    if (rows % 2 != 0 && call->batch.rows % 2 == 0 &&
        oomkit_unfit_multiple(call) % 2 != 0) {
        oomkit_unfit_bound(call, 0, 1);
        return 1;
    }
    return 0;
}

void
oomkit_unfit_learn(oomkit_call *call)
{
    if (call->cut->unfit.count > 0) {
        oomkit_unfit_bound_site(call);
    }
}

/* --- what is said --- */

PyObject *
oomkit_unfit_describe(oomkit_call *call, PyObject *exception)
{
    OWNED PyObject *message = NULL, *location = NULL, *dot = NULL;
    uint64_t requested;

    oomkit_exception_describe(call->st, exception, &requested, &message, &location);
    dot = PyUnicode_FromString("no message");
    return dot == NULL
               ? NULL
               : PyUnicode_FromFormat("%s: %U%s%V", Py_TYPE(exception)->tp_name,
                                      message == NULL ? dot : message,
                                      location == NULL ? "" : " at ", location, "");
}

/* "1, 2" of the sizes that it was raised with. New str or NULL. */
static PyObject *
unfit_sizes(const oomkit_call *call)
{
    PyObject *text = PyUnicode_FromString(""); /* owned */
    int i;

    for (i = 0; text != NULL && i < call->cut->unfit.count; i++) {
        Py_SETREF(text, PyUnicode_FromFormat("%U%s%lld", text, i == 0 ? "" : ", ",
                                             (long long)call->cut->unfit.rows[i]));
    }
    return text;
}

PyObject *
oomkit_unfit_explain(const oomkit_call *call, PyObject *reason)
{
    if (reason == NULL || call->step->whole_only ||
        oomkit_unfit_least(call) <= call->options->min_micro_batch) {
        return reason;
    }
    if (call->cut->unfit.said == NULL) {
        Py_SETREF(reason, PyUnicode_FromFormat(
                              "%U; with fewer rows an earlier call has raised an error",
                              reason));
        return reason;
    }
    Py_SETREF(reason, PyUnicode_FromFormat("%U; with fewer rows it raised %U", reason,
                                           call->cut->unfit.said));
    return reason;
}

/* SplitError with `exception` (stolen) as its cause, frames of which are empty: it is
 * raised, or the whole batch runs again. 0 or -1. */
static int
unfit_raise(oomkit_call *call, PyObject *exception)
{
    OWNED PyObject *said = oomkit_unfit_describe(call, exception);
    OWNED PyObject *sizes = unfit_sizes(call);
    OWNED PyObject *handled = PyErr_GetHandledException(); /* the caller's */
    PyObject *error;                                       /* owned, given back */

    oomkit_exception_clear_frames(call->st, exception, handled);
    call->refused.raised = 1;
    call->log.outcome = 2;
    if (said != NULL && sizes != NULL) {
        oomkit_raise(
            call->st->SplitError,
            "auto_batch cannot split %U: in micro-batches of %U rows it raised %U%s; "
            "the state is as before the step. If the step needs more rows at a time, "
            "pass min_micro_batch= to auto_batch, for a multiple of some number "
            "multiple_of=; pass an argument without one element per sample whole, with "
            "static=" SEE("micro-batch-error"),
            call->options->label, sizes, said,
            unfit_began_whole(call)
                ? ", where the whole batch had run out of memory instead"
            : call->step->whole.seen ? ", as no call with a whole batch has"
                                     : "");
    }
    error = oomkit_exception_take();
    oomkit_pass_tensors(call, error);
    PyException_SetCause(error, exception);
    oomkit_exception_give(error);
    (void)oomkit_split_alone(call);
    error = oomkit_exception_take();
    if (oomkit_split_is_refused(call, error)) {
        return oomkit_split_refused(call, error, 0);
    }
    oomkit_exception_give(error);
    return -1;
}

/* No memory for a size that it works on: oomkit.OutOfMemory with `exception` (stolen)
 * as its cause. -1 always. */
static int
unfit_exhausted(oomkit_call *call, PyObject *exception)
{
    OWNED PyObject *handled = PyErr_GetHandledException(); /* the caller's */
    PyObject *error;                                       /* owned, given back */

    oomkit_exception_clear_frames(call->st, exception, handled);
    oomkit_replan_exhausted(call);
    error = oomkit_exception_take();
    PyException_SetCause(error, exception);
    oomkit_exception_give(error);
    return -1;
}

/* --- the next attempt --- */

/* Does the plan keep to the bounds? A rest that multiple_of= leaves may not. */
static int
unfit_plan_keeps(const oomkit_call *call)
{
    int64_t start, length, count = oomkit_plan_count(&call->cut->plan);

    return oomkit_plan_slice(&call->cut->plan, count - 1, &start, &length) ==
               OOMKIT_OK &&
           length >= oomkit_unfit_least(call);
}

/* A plan within the new bounds. 1, 0 when memory allows none, or -1. */
static int
unfit_plan(oomkit_call *call)
{
    const oomkit_knowledge *known; /* borrowed from the step */
    int64_t failed = oomkit_replan_smallest(call);

    if (oomkit_cut_choose(call, &known) < 0) {
        return -1;
    }
    call->cut->reason = OOMKIT_REASON_ERROR;
    return failed == 0 || oomkit_plan_micro_batch(&call->cut->plan) < failed;
}

int
oomkit_unfit_undo(oomkit_call *call, PyObject *exception)
{
    OWNED PyObject *message = NULL;

    if (oomkit_modes_entry_back(call) == 0 && oomkit_take_back(call, &message) == 0) {
        return 0;
    }
    if (PyErr_Occurred()) {
        oomkit_error_unraised(
            call->given.func); /* the step's own error is the one to see */
    }
    return oomkit_recover_pass(call, exception); /* which tries again, and says it */
}

int
oomkit_unfit(oomkit_call *call, PyObject *exception)
{
    int64_t rows = call->cut->slices == NULL || call->cut->at >= call->cut->count
                       ? 0
                       : call->cut->slices[call->cut->at].length;
    int is_splits = rows == 0 ? 0 : unfit_is_splits(call, exception), planned;

    if (is_splits < 0) {
        oomkit_error_unraised(
            call->given.func); /* the step's own error is the one to see */
    }
    if (is_splits <= 0) {
        return is_splits == 0 && unfit_may_be_whole(call, exception)
                   ? oomkit_split_refused(call, exception, 1)
                   : oomkit_recover_pass(call, exception);
    }
    if (oomkit_unfit_undo(call, exception) < 0) {
        return -1;
    }
    call->cut->unfit.rows[call->cut->unfit.count++] = rows;
    if (call->cut->unfit.count == OOMKIT_UNFIT || !unfit_next(call, rows)) {
        return unfit_raise(call, exception);
    }
    Py_XSETREF(call->cut->unfit.said, oomkit_unfit_describe(call, exception));
    planned = call->cut->unfit.said == NULL ? -1 : unfit_plan(call);
    if (planned == 0) {
        return unfit_exhausted(call, exception);
    }
    if (planned > 0 && !unfit_plan_keeps(call)) {
        return unfit_raise(call, exception);
    }
    if (planned < 0) {
        KEEPING_EXCEPTION {
            oomkit_exception_discard(call->st, exception);
        }
        return oomkit_own_failed(call, "another size of micro-batch was planned");
    }
    oomkit_exception_discard(call->st, exception);
    oomkit_phase_set(call->st, OOMKIT_PHASE_RECOVERY);
    return oomkit_begin_again(call) < 0
               ? oomkit_own_failed(call, "another size of micro-batch was tried")
               : 0;
}
