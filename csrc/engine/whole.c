/* The protected call: marks, the function, and what was measured. The healthy path is
 * this file; everything after a failure is in recover.c. */
#include "engine.h"
#include "../accum/weights.h"
#include "../batch/batch.h"
#include "../hook/hook.h"
#include "../ladder/ladder.h"
#include "../optim/optim.h"
#include "../plain/plain.h"
#include "../plain/plain_state.h"
#include "../ranks/agree.h"
#include "../py/tensor.h"
#include "../result/result.h"
#include "../sizes/sizes.h"
#include "../undo/gradients.h"
#include "../undo/undo.h"

#include <stddef.h>

/* The participants of this call: those of the site while they are right. 0 or -1. */
static int
engine_participants(oomkit_call *call)
{
    oomkit_step *step = call->step;
    Py_ssize_t total = call->batch.total;

    if (step->parts != NULL && step->parts->busy > 0) {
        /* Another thread's call is at work with the site's list and the copies of
         * buffers in it: this one gets a list of its own. */
        call->parts =
            oomkit_participants_find(call->st, call->options, step->func,
                                     call->given.args, call->batch.positional, total);
        if (call->parts != NULL) {
            call->parts->busy++;
        }
        return call->parts == NULL || oomkit_participants_inherit(call->st, call->parts,
                                                                  step->parts) < 0
                   ? -1
                   : 0;
    }
    if (step->parts == NULL ||
        !oomkit_participants_valid(call->st, step->parts, call->given.args, total)) {
        oomkit_participants *found, *old;
        if (PyErr_Occurred()) {
            return -1;
        }
        found =
            oomkit_participants_find(call->st, call->options, step->func,
                                     call->given.args, call->batch.positional, total);
        if (found == NULL) {
            return -1;
        }
        old = step->parts;
        if (oomkit_participants_inherit(call->st, found, old) < 0) {
            oomkit_participants_release(found);
            return -1;
        }
        step->parts = found;
        oomkit_participants_release(old);
        if (oomkit_plain_find(call, 0) < 0) {
            return -1;
        }
    } else if (step->plain.looked == 1 && oomkit_plain_find(call, 1) < 0) {
        return -1;
    }
    return oomkit_call_take_part(call, step->parts);
}

/* Who takes part was found among gathered parameters: found again. 0 or -1. */
static int
engine_participants_again(oomkit_call *call)
{
    oomkit_participants *before = call->parts;

    before->dead = 1;
    before->busy--;
    call->parts = NULL;
    oomkit_participants_release(before);
    return engine_participants(call);
}

/* A split that was planned and must not be. 0, or -1 with SplitError. */
static int
engine_refuse(oomkit_call *call)
{
    const char *refusal;

    if (oomkit_refusal(call, &refusal) < 0) {
        return -1;
    }
    if (refusal != NULL) {
        oomkit_raise(call->st->SplitError,
                     "auto_batch cannot split %U: %s" SEE("not-retried"),
                     call->options->label, refusal);
        return -1;
    }
    return 0;
}

/* The batch of a call that is split only for what others have met: not where it cannot
 * be, for this one may do with what it has. 1, 0 or -1. */
static int
plan_of_others(oomkit_call *call)
{
    int found = oomkit_batch_find(call->st, call->options, call->step->batch_site,
                                  call->step->names, &call->batch);

    if (call->step->whole_only && !oomkit_ranks_agreed(call) &&
        (found == 0 || (found < 0 && PyErr_ExceptionMatches(call->st->SplitError)))) {
        PyErr_Clear(); /* as it is, on the rung that earlier calls have come to */
        return oomkit_batch_keep_whole(&call->batch);
    }
    if (found < 0 && !oomkit_ranks_agreed(call) &&
        PyErr_ExceptionMatches(call->st->SplitError)) {
        PyErr_Clear(); /* said again if it must be */
        return 0;
    }
    if (found > 0) {
        const int inside = oomkit_refusal_transform(call->st);
        found = inside < 0 ? -1 : !inside;
    }
    return found;
}

/* A plan that may split from the start: asked for, remembered, or forced by a test. 0
 * whole, 1 call->cut->slices is set, -1 with an exception. */
static int
engine_plan(oomkit_call *call)
{
    oomkit_step *step = call->step;
    const oomkit_knowledge *known; /* borrowed from the step */
    int asked =
        call->options->accumulation_steps > 1 || call->st->forced_slices != NULL;
    int found;

    if (step->recall && oomkit_recall(call) < 0) {
        return -1;
    }
    if (!asked && !step->seen_oom) { /* nothing was recalled */
        return 0;
    }
    call->batch.provable = oomkit_proof_possible(call);
    found = asked ? oomkit_batch_find(call->st, call->options, step->batch_site,
                                      step->names, &call->batch)
                  : plan_of_others(call);
    if (found <= 0) {
        if (found == 0 && asked) {
            return oomkit_batch_refuse(
                call->st, &call->batch,
                PyUnicode_FromFormat("auto_batch(accumulation_steps=...) found no "
                                     "batch to split in the arguments of %U: pass it "
                                     "as an argument of the step",
                                     call->options->label));
        }
        return found;
    }
    if (call->st->forced_slices != NULL) {
        return oomkit_cut_forced(call) < 0 ? -1 : 1;
    }
    if (asked && call->batch.rows < call->options->min_micro_batch) {
        oomkit_raise(
            call->st->SplitError,
            "auto_batch cannot split a batch of %lld rows: min_micro_batch is %lld" SEE(
                "min-micro-batch"),
            (long long)call->batch.rows, (long long)call->options->min_micro_batch);
        return -1;
    }
    if (oomkit_cut_choose(call, &known) < 0) {
        return -1;
    }
    if (oomkit_plan_count(&call->cut->plan) <= 1) {
        if (oomkit_has_said(call->step, OOMKIT_SAID_FALL) &&
            oomkit_cut_say(call, known) < 0) {
            return -1;
        }
        return call->cut->plan.rung < OOMKIT_RUNG_ACTIVATIONS ? 0
               : oomkit_cut_begin(call, known) < 0            ? -1
                                                              : 1;
    }
    return engine_refuse(call) < 0 || oomkit_cut_begin(call, known) < 0 ||
                   oomkit_buffers_say_norm(call) < 0
               ? -1
               : 1;
}

/* While a function that torch.compile() has made
 * runs, every Python frame below it is compiled, those of the registration of our hooks
 * too; with fullgraph=True that is an error. 0 or -1. */
int
oomkit_engine_install(oomkit_state *st)
{
    PyObject *before = NULL, *after; /* owned: what compiles frames, None for nothing */
    int result;

    if (st->set_eval_frame != NULL) {
        before = PyObject_CallOneArg(st->set_eval_frame, Py_None);
        if (before == NULL) {
            return -1;
        }
    }
    result = oomkit_backward_install(st);
    if (before != NULL && result == 0) {
        after = PyObject_CallOneArg(st->set_eval_frame, before);
        result = after == NULL ? -1 : 0;
        Py_XDECREF(after);
    }
    Py_XDECREF(before);
    return result;
}

/* Everything before the function runs. 1 when the plan splits, 0 whole, -1 error. */
static int
engine_begin(oomkit_call *call)
{
    oomkit_state *st = call->st;
    int split = 0, moved;

    if (oomkit_batch_capture(st, call->options, call->given.args,
                             PyVectorcall_NARGS(call->given.nargsf),
                             call->given.kwnames, call->step->skip, call->step->names,
                             &call->batch) < 0 ||
        engine_participants(call) < 0) {
        return -1;
    }
    oomkit_engine_device(call);
    if (call->device.type != OOMKIT_DEVICE_CPU && oomkit_captured_find(call) != 0) {
        return call->captured ? 0 : -1;
    }
    oomkit_device_prepare(st, call->device);
    oomkit_window_begin(call);
    moved = oomkit_ranks_enter(call);
    if (moved != 0 && (moved < 0 || engine_participants_again(call) < 0)) {
        return -1;
    }
    if (oomkit_ranks_agreed(call)) { /* what was reduced is no rank's own any more */
        if (oomkit_tell_group_begins(call) < 0) {
            return -1;
        }
        oomkit_grads_force_copies(call);
        oomkit_grads_allow_no_aside(call);
    }
    if (st->flush_pending && oomkit_device_flush_pending(st, call->device) < 0) {
        return -1;
    }
    if (!st->backward_patched && oomkit_engine_install(st) < 0) {
        return -1;
    }
    if (call->parts->writes == NULL && oomkit_writes_look(call) < 0) {
        return -1;
    }
    if (call->step->updates_apart != OOMKIT_APART_NO &&
        oomkit_careful_begin(call) < 0) {
        return -1;
    }
    if ((call->options->restore_batch && oomkit_batch_save(st, &call->batch) < 0) ||
        oomkit_savepoint_take(call) < 0) {
        return -1;
    }
    if ((call->step->seen_oom || call->options->accumulation_steps > 1 ||
         st->forced_slices != NULL) &&
        !oomkit_earlier_was_whole(st)) {
        oomkit_call_cut(call);
        split = engine_plan(call);
        if (split < 0) {
            return -1;
        }
    }
    return oomkit_intercept_install(call) < 0 ||
                   (oomkit_forwards_wanted(call) && oomkit_forwards_watch(call) < 0)
               ? -1
               : split;
}

#define CALLERS_BYTES 32 /* four numbers in double precision */

/* The caller of a returned loss may divide it before its backward(), outside the call:
 * under a budget of the CPU there is room for a few numbers, or the step is out of
 * memory here, where that can be helped. On a device torch's blocks of 512 bytes have
 * it. 0 or -1. */
static int
engine_room(oomkit_call *call, PyObject *result)
{
    const uint64_t limit = call->device.type == OOMKIT_DEVICE_CPU
                               ? oomkit_device_budget(call->st, call->device)
                               : OOMKIT_UNKNOWN;
    OWNED PyObject *loss = NULL, *room = NULL;
    oomkit_tensor_facts facts;
    int wanted;

    if (limit == OOMKIT_UNKNOWN ||
        oomkit_device_allocated(call->st, call->device) + CALLERS_BYTES <= limit) {
        return 0;
    }
    wanted = oomkit_result_wants_backward(call->st, result, &loss, &facts);
    if (wanted > 0) {
        room = PyObject_CallMethod(loss, "new_empty", "(i)", CALLERS_BYTES / 8);
        wanted = room == NULL ? -1 : 0;
    }
    return wanted;
}

/* The whole batch in one go: the caller's very arguments. */
static PyObject *
engine_whole(oomkit_call *call)
{
    PyObject *result = /* owned */
        PyObject_Vectorcall(call->given.func, call->given.args, call->given.nargsf,
                            call->given.kwnames);

    call->is_last = 1;
    if (result != NULL && call->options->backward != NULL &&
        oomkit_backward_run(call, result) < 0) {
        Py_CLEAR(result);
    }
    if (result != NULL && oomkit_ranks_whole_returns(call, result) < 0) {
        Py_CLEAR(result);
    }
    if (result != NULL && (call->tries.restart || oomkit_ranks_returned(call) < 0)) {
        Py_CLEAR(result); /* the step may have caught what was to end it */
    }
    if (result != NULL && !call->training && oomkit_batch_rows(&call->batch) > 1 &&
        engine_room(call, result) < 0) {
        Py_CLEAR(result);
    }
    if (result == NULL) {
        oomkit_ranks_note_stop(call);
    }
    return result;
}

/* An error leaves the call where other ranks take their updates back: so is this one's.
 * Keeps it in flight. */
static void
engine_takes_back(oomkit_call *call)
{
    PyObject *exception = oomkit_exception_take(); /* owned, given back */
    int takes = oomkit_ranks_takes_back(call, exception);

    if (takes < 0) {
        oomkit_error_unraised(call->given.func); /* the error itself tells more */
    }
    oomkit_exception_give(exception);
    if (takes > 0) {
        oomkit_recover_undo(call);
    }
}

static void
engine_learn(oomkit_call *call, PyObject *result, int needs_backward)
{
    oomkit_step *step = call->step;
    int64_t largest = oomkit_cut_largest(call, call->cut->count);

    oomkit_buffers_learn(call);
    if (call->st->hosted_any && oomkit_host_settle(call) < 0) {
        oomkit_error_dismiss(); /* it stays where it is */
    }
    step->seen_oom |= call->tries.ooms > 0;
    if (call->cut->slices == NULL) {
        step->updates = oomkit_updates_made(call);
        oomkit_batch_learn(&step->batch_site, &call->batch);
        largest = oomkit_batch_rows(&call->batch);
        oomkit_result_learn(call->st, &step->results, result, largest,
                            call->options->dim);
        oomkit_tell_whole_call_ends(call, largest);
        step->whole.seen = 1;
        step->whole.without_backward |= !call->training;
        step->whole.without_update |= !oomkit_update_begun(call);
    }
    if ((call->shape.known || step->seen_oom) && largest > 0 && !needs_backward &&
        !oomkit_earlier_runs(call->options)) {
        oomkit_call_cut(call);
        if (call->cut->slices == NULL) {
            oomkit_phase_whole(call);
        }
        oomkit_signature_forward_only(call, !call->training &&
                                                !oomkit_loss_is_returned(call));
        if (call->log.rung > 0 || call->st->hosted_any) {
            oomkit_updates_known(call, &call->cut->measured.update);
        }
        oomkit_signature_succeeded(call, largest, oomkit_window_peak(call));
    }
    if (step->updates_apart == OOMKIT_APART_UNKNOWN ||
        oomkit_updates_were_apart(call)) {
        oomkit_careful_learn(call, largest);
    }
}

/* A result that needs backward: its second half will be the caller's. 0, or -1: then
 * the caller gets no result, and everything is as if the step had not begun. */
static int
engine_returned(oomkit_call *call, PyObject *result, int needs_backward)
{
    int status = oomkit_loss_is_returned(call) || needs_backward
                     ? oomkit_tell_call_returns(call, result)
                     : 0;

    if (status < 0) {
        if (oomkit_update_committed(call) == 0) {
            oomkit_recover_undo(call);
        }
        return oomkit_own_failed(call, "what its backward() will need was being kept");
    }
    return 0;
}

/* Closes the call; `result` (borrowed) is what it returns, NULL when it raises: then it
 * keeps the exception in flight. 0 or -1. */
static int
engine_end(oomkit_call *call, PyObject *result)
{
    int finished = result != NULL, status = 0;
    int needs_backward = finished && !call->split && !call->training &&
                         call->options->backward == NULL && result != Py_None;
    PyObject *exception =
        finished ? NULL : oomkit_exception_take(); /* owned, given back */

    oomkit_ranks_leave(call, exception);
    oomkit_call_leave(call, finished, exception);
    oomkit_call_recorded(call);
    if (needs_backward) {
        needs_backward = oomkit_result_wants_backward(call->st, result, NULL, NULL);
        status = needs_backward < 0 ? -1 : 0;
    }
    if (finished) {
        engine_learn(call, result, needs_backward);
    }
    if (finished && status == 0 && call->options->window != NULL) {
        status = oomkit_earlier_note(call);
    }
    if (finished && status == 0) {
        status = engine_returned(call, result, needs_backward);
    }
    if (status < 0) {
        exception = oomkit_exception_take();
    }
    oomkit_call_free(call);
    if (exception != NULL) {
        oomkit_exception_give(exception);
    }
    return status;
}

/* Where the whole batch has failed, or does not go in one. New reference or NULL. */
static PyObject *
engine_recover(oomkit_call *call, int split)
{
    PyObject *result; /* owned */

    call->step->seen_oom |= split == 0 && !call->tries.restart;
    result = oomkit_compiler_off(call) < 0 ? NULL : oomkit_recover(call, split == 0);
    if (result == NULL) {
        engine_takes_back(call);
    }
    return result;
}

/* The number of a call that begins; objects of one method count together. */
static uint64_t
engine_count(oomkit_step *step)
{
    if (oomkit_earlier_runs(&step->options)) {
        return step->calls; /* it has been counted */
    }
    step->calls++;
    return step->parent == NULL ? step->calls : ++step->parent->calls;
}

PyObject *
oomkit_engine_call(PyObject *op, PyObject *const *args, size_t nargsf,
                   PyObject *kwnames)
{
    oomkit_step *step = step_CAST(op);
    oomkit_call **current = oomkit_call_current_place();
    oomkit_call call;
    oomkit_cut cut;
    PyObject *result = NULL; /* owned */
    int split;

    if (*current != NULL) { /* the outermost one answers for all */
        return PyObject_Vectorcall(step->func, args, nargsf, kwnames);
    }
    if (step->skip && PyVectorcall_NARGS(nargsf) > 0) {
        step = oomkit_step_for(step, args[0]);
        if (step == NULL) {
            return NULL;
        }
        op = (PyObject *)step;
    }
    oomkit_call_init(&call, &cut, step, &step->options);
    call.given = (oomkit_given){step->func, args, nargsf, kwnames, &step->plain, 0};
    call.log.number = engine_count(step);
    Py_INCREF(op); /* the step may be redefined while it runs */
    split = engine_begin(&call);
    if (call.captured) {
        result = oomkit_captured_run(&call);
        Py_DECREF(op);
        return result;
    }
    if (split >= 0) {
        *current = &call;
        call.log.phase_before = oomkit_phase_set(call.st, OOMKIT_PHASE_FORWARD);
        if (split == 0) {
            result = engine_whole(&call);
        }
        if (result == NULL) {
            result = engine_recover(&call, split);
        }
        oomkit_phase_set(call.st, call.log.phase_before);
        oomkit_ranks_note_updated(&call, !oomkit_update_has_raised(&call) &&
                                             !oomkit_updates_are_left(&call));
        *current = NULL;
    } else if (call.parts == NULL) {
        oomkit_batch_release(&call.batch);
        Py_DECREF(op);
        return NULL;
    }
    if (split < 0) {
        oomkit_own_failed(&call, "it was being prepared");
    }
    if (engine_end(&call, result) < 0) {
        Py_CLEAR(result);
    }
    if (oomkit_compiler_on(&call) < 0) {
        Py_CLEAR(result);
    }
    Py_DECREF(op);
    return result;
}
