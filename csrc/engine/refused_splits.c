/* A split that is refused: the whole batch once more, which needs no proof. With what
 * the failed attempt held gone it may fit; where it does not, the ladder is climbed
 * with it, as with the smallest micro-batches of others. Only where no rung is left the
 * refusal is the caller's. */
#include "engine.h"
#include "refused_sizes.h"
#include "../batch/batch.h"
#include "../ladder/ladder.h"
#include "../optim/updating.h"
#include "../plain/plain_state.h"
#include "../result/result.h"
#include "../sizes/sizes.h"
#include "../undo/undo.h"

/* --- may it be? --- */

static int
has_rungs(const oomkit_call *call)
{
    return oomkit_rung_allowed(call, OOMKIT_RUNG_STATE) ||
           oomkit_rung_allowed(call, OOMKIT_RUNG_ACTIVATIONS) ||
           oomkit_rung_allowed(call, OOMKIT_RUNG_RECOMPUTE);
}

/* May a call go on whole after this error? Not where the split was asked for. */
static int
may_be_whole(const oomkit_call *call)
{
    return !call->cut->forced && call->options->accumulation_steps <= 1 &&
           call->cut->unfit.refusal == NULL && !call->given.is_body &&
           !oomkit_ranks_agreed(call) && !call->st->refusals_end && has_rungs(call);
}

int
oomkit_split_is_refused(const oomkit_call *call, const PyObject *exception)
{
    const PyObject *args; /* borrowed */

    if (!call->refused.raised || call->refused.split_alone == NULL || !call->split ||
        !may_be_whole(call) ||
        !PyObject_TypeCheck((PyObject *)exception,
                            (PyTypeObject *)call->st->SplitError)) {
        return 0;
    }
    args = ((const PyBaseExceptionObject *)exception)->args;
    return args != NULL && PyTuple_GET_SIZE(args) > 0 &&
           PyTuple_GET_ITEM(args, 0) == call->refused.split_alone;
}

/* Has an argument a graph, through which backwards of micro-batches may have gone? 1, 0
 * or -1. */
static int
has_graph(oomkit_call *call)
{
    const Py_ssize_t which = oomkit_node_with_graph(call->st, &call->batch);

    return which < 0 ? -1 : which < call->batch.count;
}

/* Has something moved for good, or was it made and stays? 1, 0 or -1. */
static int
has_moved(oomkit_call *call)
{
    const int committed = oomkit_recover_committed(call);

    return committed < 0 ? -1
           : committed || call->refused.why != NULL || call->refused.hooked != NULL ||
                   call->tries.keeps_made || oomkit_tell_failure_remains(call) != NULL
               ? 1
               : has_graph(call);
}

/* --- the whole batch --- */

/* Everything is back: is it all, as far as can be told? `runs`: rows of a micro-batch
 * may be run to see. 1, 0 with *why (owned), or -1. */
static int
whole_may_begin(oomkit_call *call, int runs, PyObject **why)
{
    int repeats;

    if ((call->backward.queued && oomkit_backward_drain(call->st) < 0) ||
        oomkit_plain_say(call) < 0 || oomkit_begin_clear(call) < 0 ||
        oomkit_savepoint_take(call) < 0) {
        return -1;
    }
    if (call->tries.keeps_made) {
        *why =
            PyUnicode_FromString("it has made a module. Make it before the first call "
                                 "of the step");
        return *why == NULL ? -1 : 0;
    }
    repeats = call->st->wiring->step_repeats(call, runs, why);
    return repeats == OOMKIT_REPEATS_UNKNOWN ? 0 : repeats;
}

/* What it says without the report below; of the step's own error where it came from.
 * New reference or NULL. */
static PyObject *
refusal_line(oomkit_call *call, PyObject *refusal)
{
    OWNED PyObject *text = PyErr_GivenExceptionMatches(refusal, call->st->OomkitError)
                               ? PyObject_Str(refusal)
                               : oomkit_unfit_describe(call, refusal);
    Py_ssize_t end;

    if (text == NULL) {
        return NULL;
    }
    end = PyUnicode_FindChar(text, '\n', 0, PyUnicode_GET_LENGTH(text), 1);
    return end < 0 ? (end == -2 ? NULL : STEAL(text))
                   : PyUnicode_Substring(text, 0, end);
}

/* Once for each step. 0 or -1. */
static int
whole_said(oomkit_call *call)
{
    OWNED PyObject *line = NULL;

    if (!oomkit_say_once(call->step, OOMKIT_SAID_WHOLE_ONLY)) {
        return 0;
    }
    line = refusal_line(call, call->cut->unfit.refusal);
    return line == NULL
               ? -1
               : oomkit_say(
                     call->st, "warning", "sOO",
                     "%s runs with whole batches from now on, and with what they "
                     "need in host memory where it does not fit: %s",
                     call->options->label, line);
}

/* The next attempt: its plan, after `refusal` (stolen). 0 or -1. */
static int
whole_planned(oomkit_call *call, PyObject *refusal)
{
    call->cut->unfit.refusal = refusal; /* owned by the call from here on */
    call->cut->unfit.count = 0;         /* no bound is to be learned */
    call->log.outcome = 0;
    call->tries.again = 1; /* this is the attempt of the whole batch again */
    oomkit_unfit_bound(call, call->batch.rows, 0);
    call->cut->reason = OOMKIT_REASON_REFUSED;
    call->cut->plan = (oomkit_plan){.batch = call->batch.rows,
                                    .accumulation = 1,
                                    .multiple_of = 1,
                                    .rung = call->cut->plan.rung};
    return whole_said(call);
}

/* A note says what became of the whole batch: `text`, stolen, which may be NULL. Keeps
 * no exception in flight. */
static void
refusal_explain(const oomkit_call *call, PyObject *refusal, PyObject *text)
{
    OWNED PyObject *done =
        text == NULL
            ? NULL
            : PyObject_CallMethod(
                  refusal, "add_note", "N",
                  PyUnicode_FromFormat(
                      "oomkit: the whole batch %U" SEE("whole-batches"), text));

    if (done == NULL) {
        oomkit_error_unraised(call->given.func); /* the refusal is the one to see */
    }
    Py_XDECREF(text);
}

int
oomkit_split_refused(oomkit_call *call, PyObject *exception, int runs)
{
    OWNED PyObject *handled = PyErr_GetHandledException(); /* the caller's */
    OWNED PyObject *why = NULL;
    const int own = PyErr_GivenExceptionMatches(exception, call->st->OomkitError);
    const int64_t at = call->cut->at;
    int may = may_be_whole(call) && has_moved(call) == 0;

    if (PyErr_Occurred()) {
        oomkit_error_unraised(call->given.func); /* the refusal is the one to see */
    }
    if (!may) {
        return oomkit_recover_pass(call, exception);
    }
    call->refused.going_whole = 1;
    may = oomkit_unfit_undo(call, exception);
    call->refused.going_whole = 0;
    if (may < 0) {
        return -1;
    }
    oomkit_exception_clear_frames(call->st, exception, handled);
    oomkit_phase_set(call->st, OOMKIT_PHASE_RECOVERY);
    call->refused.raised = 0;
    may = whole_may_begin(call, runs, &why);
    if (may < 0 && oomkit_exception_is_oom(call->st)) {
        oomkit_exception_discard(call->st, oomkit_exception_take());
        why =
            PyUnicode_FromString("there was no memory to see whether the step does the "
                                 "same when it runs again");
        may = why == NULL ? -1 : 0;
    }
    if (may == 0) { /* the refusal stands */
        if (own) {  /* what the step raises needs no explanation */
            refusal_explain(call, exception,
                            PyUnicode_FromFormat("was not run instead: %U", why));
        }
        call->refused.raised = own;
        call->cut->at = at; /* where it was raised */
        return oomkit_recover_pass(call, exception);
    }
    if (may < 0) {
        KEEPING_EXCEPTION {
            oomkit_exception_discard(call->st, exception);
        }
        return oomkit_own_failed(call, "the whole batch was to run again");
    }
    call->step->whole_only = 1;
    return whole_planned(call, exception) < 0 || oomkit_begin_again(call) < 0
               ? oomkit_own_failed(call, "the whole batch was tried again")
               : 0;
}

/* What was caught, in place of what is in flight. -1 always. */
static int
refusal_instead(oomkit_call *call, PyObject *refusal)
{
    PyObject *error = oomkit_exception_take(); /* owned, then discarded */

    refusal_explain(call, refusal,
                    PyUnicode_FromFormat("was not run instead: %S", error));
    oomkit_exception_discard(call->st, error);
    oomkit_exception_give(refusal);
    return -1;
}

int
oomkit_split_impossible(oomkit_call *call)
{
    PyObject *refusal = oomkit_exception_take(); /* owned, given back or kept */
    int may = may_be_whole(call) && call->cut->slices == NULL &&
              !call->tries.keeps_made &&
              (PyErr_GivenExceptionMatches(refusal, call->st->SplitError) ||
               PyErr_GivenExceptionMatches(refusal, call->st->OutOfMemory));

    may = may ? oomkit_batch_keep_whole(&call->batch) : 0;
    if (may == 0) {
        oomkit_exception_give(refusal);
        return -1;
    }
    if (may < 0 || oomkit_batch_check(call->st, &call->batch, call->batch.names) < 0) {
        return refusal_instead(call, refusal);
    }
    call->step->whole_only = 1;
    return whole_planned(call, refusal) < 0 || oomkit_cut_planned(call) < 0
               ? -1
               : oomkit_replan_say(call, call->batch.rows, 1);
}

/* --- where no rung is left --- */

int
oomkit_split_refusal_stands(oomkit_call *call, PyObject *text)
{
    PyObject *refusal = call->cut->unfit.refusal; /* owned, given back */

    if (refusal == NULL) {
        Py_XDECREF(text);
        return 0;
    }
    call->cut->unfit.refusal = NULL;
    refusal_explain(call, refusal, text);
    call->refused.raised = 1;
    call->log.outcome = 2;
    call->step->whole_only = 0; /* the next call begins anew */
    oomkit_exception_give(refusal);
    return 1;
}
