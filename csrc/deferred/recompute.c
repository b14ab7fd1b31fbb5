/* What a failed backward has added to gradients that were there, computed again and
 * taken off: where the call is to be run again with other random numbers, or normalises
 * by its rows, and no copies were taken.
 *
 * The call runs once more over the whole batch, from the streams and buffers of its
 * entry, and its backward goes to the leaves that had been reached: it needs no more
 * memory than the failed one had when it came there, but for those gradients. Its loss
 * must be the failed one's: a step that reads something else by now would take another
 * contribution off than was added. */
#include "deferred.h"
#include "../accum/weights.h"
#include "../engine/engine.h"
#include "../hook/hook.h"
#include "../py/modes.h"
#include "../py/tensor.h"
#include "../sizes/sizes.h"
#include "../undo/gradients.h"
#include "../undo/undo.h"

#include <math.h>

#define SAME 1e-5 /* of one program, twice on one device */
#define SAME_HALF 4e-3

static void
recompute_note(oomkit_call *call, PyObject *roots)
{
    PyObject *root = oomkit_losses_root(call->st, roots); /* borrowed from roots */
    oomkit_loss *loss = &call->whole_loss;

    if (root == NULL || !oomkit_grads_at_entry(call) || oomkit_grads_copied(call) ||
        oomkit_loss_known(loss)) {
        return;
    }
    KEEPING_EXCEPTION {
        oomkit_loss_take(call->st, root, loss);
    }
}

/* The loss of the failed backward; it may not be known. */
static const oomkit_loss *
recompute_loss(const oomkit_call *call)
{
    return call->deferred.replayed != NULL ? &call->deferred.replayed->value
                                           : &call->whole_loss;
}

/* Ends the function, which may catch it. -1 always. */
static int
recompute_end(oomkit_call *call)
{
    call->tries.restart = OOMKIT_RESTART_OWED;
    oomkit_raise(call->st->SplitError,
                 "auto_batch starts the step again from its beginning. Do not catch "
                 "this error in the step" SEE("let-errors-pass"));
    return -1;
}

/* Before that backward. 0 or -1. */
static int
recompute_begin(oomkit_call *call, PyObject *roots)
{
    oomkit_state *st = call->st;
    PyObject *root = oomkit_losses_root(st, roots); /* borrowed from roots */
    const oomkit_loss *before = recompute_loss(call);
    oomkit_loss now = {0};
    oomkit_tensor_facts facts;
    double value, wanted;

    if (root == NULL || call->tries.restart != 0) {
        return recompute_end(call);
    }
    if (oomkit_tensor_facts_get(st, root, 0, &facts) < 0) {
        return -1;
    }
    oomkit_loss_take(st, root, &now);
    value = oomkit_loss_value(st, &now, facts.dtype);
    wanted = oomkit_loss_value(st, before, facts.dtype);
    oomkit_loss_drop(&now);
    if (!(fabs(value - wanted) <=
          (oomkit_loss_is_half(&now) || facts.bytes == 2 ? SAME_HALF : SAME) *
              fabs(wanted))) {
        return recompute_end(call); /* nor where either is not known: NaN */
    }
    return 0;
}

/* Those that the failed one had reached. New tuple or NULL. */
static PyObject *
recompute_leaves(oomkit_call *call)
{
    OWNED PyObject *leaves = PyList_New(0);
    Py_ssize_t i;

    for (i = 0; leaves != NULL && i < call->parts->param_count; i++) {
        if (oomkit_grads_aside_of(call, i) != NULL &&
            PyList_Append(leaves, call->parts->params[i]) < 0) {
            return NULL;
        }
    }
    return leaves == NULL ? NULL : PyList_AsTuple(leaves);
}

/* Can this be taken off: is it there, dense and finite? 1, 0 or -1. */
static int
recompute_fits(oomkit_call *call, PyObject *gradient)
{
    oomkit_tensor_facts facts;
    OWNED PyObject *sum = NULL, *number = NULL;
    int fits;

    if (gradient == Py_None) {
        return 0;
    }
    if (oomkit_tensor_facts_get(call->st, gradient, 0, &facts) < 0) {
        return -1;
    }
    if (!facts.is_strided) {
        return 0;
    }
    /* the largest magnitude: what is not finite anywhere shows in it */
    sum = PyObject_CallMethod(gradient, "norm", "d", INFINITY);
    number = sum == NULL ? NULL : PyObject_CallMethodNoArgs(sum, call->st->str_item);
    fits = number == NULL ? -1 : isfinite(PyFloat_AsDouble(number)) != 0;
    return fits < 0 || PyErr_Occurred() ? -1 : fits;
}

/* Takes the contributions off: all of them or, where one does not fit, none. 1 done, 0
 * not, -1. */
static int
recompute_subtract(oomkit_call *call)
{
    Py_ssize_t i, n = call->parts->param_count;
    int result = 1, pass;

    for (pass = 0; pass < 2; pass++) {
        for (i = 0; result == 1 && i < n; i++) {
            PyObject *aside = oomkit_grads_aside_of(call, i); /* borrowed */
            OWNED PyObject *gradient = NULL, *done = NULL;
            if (aside == NULL) {
                continue;
            }
            gradient = grads_get(call, i);
            if (gradient == NULL) {
                return -1;
            }
            if (pass == 0) {
                result = recompute_fits(call, gradient);
            } else {
                oomkit_grads_owe(call, OOMKIT_OWED_PARTLY);
                done = PyObject_CallMethod(aside, "sub_", "O", gradient);
                result = done == NULL || grads_set(call, i, Py_None) < 0 ? -1 : 1;
            }
        }
    }
    return result;
}

/* After it. -1 always. */
static int
recompute_take(oomkit_call *call)
{
    int mode = oomkit_grad_mode_off(call->st), result = -1;

    if (mode < 0) {
        return -1;
    }
    EXEMPT (call->st) {
        result = recompute_subtract(call);
    }
    if (oomkit_grad_mode_back(call->st, mode, result < 0 ? -1 : 0) < 0) {
        return -1;
    }
    if (result == 1) {
        oomkit_grads_owe(call, OOMKIT_OWED_DONE);
    }
    return recompute_end(call);
}

static PyObject *
recompute_backward(oomkit_call *call, PyObject *engine, PyObject *const *args,
                   size_t nargsf, PyObject *kwnames)
{
    Py_ssize_t i, n = PyVectorcall_NARGS(nargsf);
    Py_ssize_t total = n + (kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames));
    PyObject *vector[12];      /* borrowed */
    PyObject *leaves, *result; /* owned */
    void *outer;               /* borrowed */
    int phase;

    if (n < 5 || total > 12) { /* a form that is not known */
        recompute_end(call);
        return NULL;
    }
    if (recompute_begin(call, args[0]) < 0 || oomkit_grads_mark(call) < 0 ||
        (leaves = recompute_leaves(call)) == NULL) {
        return NULL;
    }
    for (i = 0; i < total; i++) {
        vector[i] = args[i];
    }
    vector[4] = leaves;
    call->training = 1;
    phase = oomkit_phase_set(call->st, OOMKIT_PHASE_BACKWARD);
    outer = oomkit_nested_enter(call);
    call->st->engine_runs++;
    call->backward.depth++;
    result = PyObject_Vectorcall(engine, vector, nargsf, kwnames);
    call->backward.depth--;
    oomkit_nested_leave(call, outer);
    oomkit_phase_set(call->st, phase);
    Py_DECREF(leaves);
    if (result == NULL) {
        call->backward.queued = 1;
    } else {
        Py_DECREF(result);
        recompute_take(call);
    }
    return NULL;
}

/* It cannot be: the gradients keep what they hold, which the error says. -1 always. */
static int
recompute_give_up(oomkit_call *call)
{
    OWNED PyObject *name = NULL, *reason = NULL;
    Py_ssize_t i = 0;

    while (oomkit_grads_aside_of(call, i) == NULL) { /* one of them at least is there */
        i++;
    }
    name = oomkit_describe_tensor(call, call->parts->params[i]);
    reason =
        name == NULL
            ? NULL
            : PyUnicode_FromFormat(
                  "gradients cannot be restored: %U: its gradient from before the step "
                  "was changed, no copy exists, and what was added could not be "
                  "recomputed; pass gradient_safety=\"copy\" to auto_batch, and call "
                  "zero_grad() before you continue" SEE("gradients-not-restored"),
                  name);
    if (reason != NULL) {
        oomkit_grads_aside_said(call, 1);
        call->log.outcome = 1;
        oomkit_give_up(call, reason, 0);
    }
    return -1;
}

/* The very tensors are back where they were, as they were up to rounding. 0 or -1. */
static int
recompute_put_back(oomkit_call *call)
{
    if (oomkit_grads_aside_back(call) < 0) {
        return -1;
    }
    return oomkit_say(
        call->st, "info", "sKO",
        "step=%d of %s subtracted what the failed attempt had added to gradients from "
        "before the step: they are restored up to rounding, not bit for bit",
        (unsigned long long)call->log.number, call->options->label);
}

/* One attempt over the whole batch, which ends after its first backward. 0; 1 where it
 * ran out of memory; or -1 with an exception that is to be raised: an interrupt. */
static int
recompute_attempt(oomkit_call *call)
{
    OWNED PyObject *result = NULL;
    int is_oom;

    oomkit_grads_owe(call, OOMKIT_OWED_NOW);
    call->backward.instead = recompute_backward;
    result = oomkit_attempt_run(call);
    call->tries.restart = 0;
    if (result != NULL) { /* it has run to its end without a backward */
        return 0;
    }
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    is_oom = oomkit_exception_is_oom(call->st);
    oomkit_exception_discard(call->st, oomkit_exception_take());
    return is_oom;
}

/* An attempt, and everything back but what it took off. 1 taken off, 0 not, 2 not for
 * want of memory, or -1. */
static int
recompute_once(oomkit_call *call)
{
    const oomkit_slice whole = {0, call->batch.rows};
    oomkit_cut_own next; /* the next attempt */
    int result, done, is_oom;

    oomkit_cut_aside(call, &next);
    result = oomkit_cut_given(call, &whole, 1) < 0 ? -1 : recompute_attempt(call);
    done = oomkit_grads_owed(call) == OOMKIT_OWED_DONE;
    is_oom = result == 1 && oomkit_grads_owed(call) != OOMKIT_OWED_PARTLY;
    if (result >= 0) {
        result = oomkit_recover_roll_back(call);
        oomkit_savepoint_end_attempt(call);
    }
    oomkit_grads_owe(call, OOMKIT_OWED_NOTHING);
    call->backward.instead = NULL;
    oomkit_cut_back(call, &next);
    if (result < 0 ||
        oomkit_recover_reclaim(call, oomkit_baseline_at_entry(call)) < 0) {
        return -1;
    }
    return done ? 1 : is_oom ? 2 : 0;
}

static int
recompute(oomkit_call *call)
{
    int done = recompute_once(call);

    if (done == 2) { /* once more: what another program has taken may be there again */
        done = oomkit_savepoint_take(call) < 0 ? -1 : recompute_once(call);
    }
    if (done < 0) {
        return -1;
    }
    if (done != 1) {
        return recompute_give_up(call);
    }
    return recompute_put_back(call) < 0 ? -1 : oomkit_savepoint_take(call);
}

static void
recompute_backward_fails(oomkit_call *call, const oomkit_backward *backward)
{
    if (!call->split || call->cut->at > 0) {
        recompute_note(call, backward->roots);
    }
}

static int
recompute_before_retry(oomkit_call *call)
{
    return oomkit_grads_owed(call) == OOMKIT_OWED_LATER ? recompute(call) : 0;
}

const oomkit_rule oomkit_recompute_rule = {.backward_fails = recompute_backward_fails,
                                           .before_retry = recompute_before_retry};
