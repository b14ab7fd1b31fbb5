/* Running a call again at its caller's backward: forward and backward of its
 * micro-batches with the gradient that reached the loss.
 *
 * The replay starts from the streams and buffers that the call began with. If nobody
 * has used them since, they stay where the replay leaves them, as after a call that was
 * split from the start; otherwise they go on from where the caller's program had them.
 * What the call did to the user's own participants counts once. */
#include "deferred.h"
#include "../accum/weights.h"
#include "../batch/batch.h"
#include "../call/step.h"
#include "../engine/engine.h"
#include "../hook/hook.h"
#include "../optim/optim.h"
#include "../plain/plain_state.h"
#include "../py/modes.h"
#include "../py/tensor.h"
#include "../sizes/call_window.h"
#include "../undo/undo.h"

/* Streams, buffers and the user's objects when the second half failed. */
typedef struct replay_now {
    oomkit_savepoint at;
    int finished;      /* the replay has */
    oomkit_call *call; /* borrowed */
} replay_now;

/* --- preparing --- */

/* Why not, as static text: see oomkit_replay_prepare. */
static int
prepare_check(oomkit_call *call, const oomkit_deferred *p, const char **why)
{
    Py_ssize_t which = oomkit_node_with_graph(call->st, &call->batch);
    int moved = which < 0 ? -1 : which < call->batch.count;

    if (moved != 0) {
        *why =
            "an argument of the call was computed with gradients from something else "
            "(it has a graph of its own), which each micro-batch would run backward "
            "through again: compute it inside the decorated step, or detach() it";
        return moved;
    }
    moved = oomkit_params_moved(call, &which);
    if (moved != 0) {
        *why =
            "parameters were changed between the call and its backward(): update them "
            "after backward()";
        return moved;
    }
    if (oomkit_modes_differ(call, &p->modes, why) < 0) {
        return -1;
    }
    if (*why != NULL) {
        return 1;
    }
    *why =
        "parameters were frozen or unfrozen (requires_grad) after the call and before "
        "its backward(): do it after backward()";
    return oomkit_flags_frozen_since(call->st, call->parts, &call->entry);
}

int
oomkit_replay_prepare(oomkit_call *call, oomkit_deferred *p, const char **why)
{
    int refused;

    if (oomkit_deferred_strong(p)) {
        *why =
            "the object whose method was decorated, or an argument that its loss was "
            "stored in, is gone: keep it until backward() has run";
        return 1;
    }
    p->spent = 1;
    call->given.args = p->args;
    call->given.kwnames = p->kwnames;
    call->given.nargsf = p->nargsf;
    oomkit_batch_move(&call->batch, &p->batch, p->args);
    oomkit_savepoint_move(&call->entry, &p->entry);
    if (oomkit_savepoint_find_again(call) < 0) {
        return -1;
    }
    refused = prepare_check(call, p, why);
    if (refused != 0 && oomkit_flags_keep(call) < 0) {
        return -1;
    }
    return refused;
}

/* --- now --- */

static int
now_restore_once(void *argument)
{
    const replay_now *now = argument;
    oomkit_state *st = now->call->st;
    int result = -1, mode = oomkit_grad_mode_off(st);

    if (mode < 0) {
        return -1;
    }
    EXEMPT (st) {
        result = oomkit_savepoint_back(now->call, &now->at, now->finished);
    }
    return oomkit_grad_mode_back(st, mode, result);
}

/* Streams, buffers and the user's objects as they were when the backward failed, as far
 * as they are not the replay's to move. 0 or -1. */
static int
now_restore(oomkit_call *call, replay_now *now, int finished)
{
    PyObject *error; /* owned */
    int result;

    now->call = call;
    now->finished = finished;
    result = oomkit_insist(call->st, now_restore_once, now, &error);
    if (error != NULL) {
        oomkit_exception_give(error);
        result = -1;
    }
    return result;
}

/* --- running --- */

/* Without a failure: from the entry's state, in the slices it was split into, or (of a
 * call that was whole) in halves. 0 or -1. */
static int
replay_start(oomkit_call *call, oomkit_deferred *p)
{
    if (oomkit_recover_roll_back(call) < 0) {
        return -1;
    }
    oomkit_savepoint_end_attempt(call);
    if (p->slices == NULL) {
        return oomkit_recover_split(call) < 0 ? -1 : oomkit_savepoint_take(call);
    }
    call->cut->slices = p->slices;
    call->cut->count = call->cut->room = p->slice_count;
    p->slices = NULL;
    call->split = call->cut->count > 1;
    return oomkit_recover_batch(call) < 0 ? -1 : oomkit_savepoint_take(call);
}

/* The micro-batches have run. If that raises (a warning that is an error), everything
 * goes back. 0 or -1. */
static int
replay_compare(oomkit_call *call, const oomkit_deferred *p, int drawn)
{
    int noise = call->cut->count == 1 ? 0 /* the same numbers, the same rows */
                : drawn               ? 1
                                      : oomkit_buffers_norm(call, 0);
    PyObject *error; /* owned, given back */

    if (noise >= 0 && oomkit_losses_replayed(call, &p->value, noise) == 0) {
        return 0;
    }
    error = oomkit_exception_take();
    if (oomkit_recover_roll_back(call) < 0) {
        oomkit_error_unraised(call->given.func); /* the first one tells more */
    }
    oomkit_exception_give(error);
    return -1;
}

/* Steals `exception`, the failure to start from, or NULL; `drawn`: the call drew random
 * numbers. 0 or -1. */
static int
replay_inside(oomkit_call *call, oomkit_deferred *p, PyObject *exception, int drawn)
{
    OWNED PyObject *result = NULL;

    if (oomkit_intercept_install(call) < 0) {
        Py_XDECREF(exception);
        return -1;
    }
    oomkit_call_set_current(call);
    call->log.phase_before = oomkit_phase_set(call->st, OOMKIT_PHASE_FORWARD);
    if (oomkit_compiler_off(call) < 0) {
        Py_CLEAR(exception);
    } else if (exception != NULL) {
        oomkit_exception_give(exception);
        result = oomkit_recover(call, 1);
    } else {
        result = replay_start(call, p) < 0 ? NULL : oomkit_recover(call, 0);
    }
    if (result != NULL && p->kind == OOMKIT_RETURNED_WHOLE &&
        replay_compare(call, p, drawn) < 0) {
        Py_CLEAR(result);
    }
    if (oomkit_compiler_on(call) < 0) {
        Py_CLEAR(result);
    }
    oomkit_phase_set(call->st, call->log.phase_before);
    oomkit_call_set_current(NULL);
    return result == NULL ? -1 : 0;
}

/* One more error at the end of a replay: the first one tells more. */
static void
replay_error(const oomkit_call *call, PyObject **error)
{
    if (*error != NULL) {
        oomkit_error_unraised(call->given.func);
    } else {
        *error = oomkit_exception_take();
    }
}

/* The surroundings as they were, and what is not the replay's to move. One that has
 * finished and cannot be left has not run: its gradients go back, and all else with
 * them. 0, or -1 with an exception, `error` (taken; NULL if it finished) or one of its
 * own. */
static int
replay_leave(oomkit_call *call, replay_now *now, oomkit_modes_stack *stack,
             PyObject *error)
{
    if (oomkit_modes_leave(call->st, stack) < 0) {
        replay_error(call, &error);
    }
    if (now_restore(call, now, error == NULL) < 0) {
        int finished = error == NULL;
        replay_error(call, &error);
        if (finished && now_restore(call, now, 0) < 0) {
            replay_error(call, &error);
        }
    }
    if (error == NULL) {
        return 0;
    }
    oomkit_exception_give(error);
    return -1;
}

int
oomkit_replay_run(oomkit_call *call, oomkit_deferred *p, PyObject *inputs,
                  PyObject *exception)
{
    oomkit_state *st = call->st;
    replay_now now;
    oomkit_modes_stack stack;
    /* Asked of the very marks of the call: set_state() writes anew what torch never
     * sets of a generator's bytes. */
    int result, drawn = oomkit_rng_drawn(call, &p->after);

    memset(&now, 0, sizeof(now));
    if (drawn < 0 || oomkit_savepoint_now(call, &p->after, &now.at) < 0 ||
        oomkit_modes_enter(st, &p->modes, &stack) < 0) {
        Py_XDECREF(exception);
        oomkit_savepoint_free(&now.at);
        return -1;
    }
    if (oomkit_modes_entry(call) < 0) {
        oomkit_error_dismiss(); /* what a failure leaves behind is left again below */
    }
    call->deferred.replayed = p;
    call->deferred.inputs = inputs;
    result = replay_inside(call, p, exception, drawn);
    result =
        replay_leave(call, &now, &stack, result < 0 ? oomkit_exception_take() : NULL);
    oomkit_savepoint_free(&now.at);
    return result;
}

/* --- ending --- */

/* The record of the call, with what its second half added. */
static void
replay_record(oomkit_call *call, const oomkit_deferred *p)
{
    oomkit_record record, now;

    if (oomkit_history_read(call->step->history, p->record, &record) != OOMKIT_OK) {
        return; /* overwritten by newer ones */
    }
    oomkit_call_record(call, &now);
    if (record.peak_allocated_bytes == OOMKIT_UNKNOWN ||
        (now.peak_allocated_bytes != OOMKIT_UNKNOWN &&
         now.peak_allocated_bytes > record.peak_allocated_bytes)) {
        record.peak_allocated_bytes = now.peak_allocated_bytes;
    }
    if (record.peak_reserved_bytes == OOMKIT_UNKNOWN ||
        (now.peak_reserved_bytes != OOMKIT_UNKNOWN &&
         now.peak_reserved_bytes > record.peak_reserved_bytes)) {
        record.peak_reserved_bytes = now.peak_reserved_bytes;
    }
    record.time_ns += now.time_ns;
    if (call->tries.ooms > 0) {
        record.batch_size = now.batch_size; /* a guess until the batch was found */
        record.micro_batch_size = now.micro_batch_size;
        record.accumulation_steps = now.accumulation_steps;
        record.requested_bytes = now.requested_bytes;
        record.attempts += now.attempts - 1; /* the call itself was one */
        record.ooms += call->tries.ooms;
        record.lost_ns += call->tries.lost_ns;
        record.reason = now.reason;
    }
    if (call->log.outcome != 0) {
        record.outcome = call->log.outcome;
    }
    oomkit_history_amend(call->step->history, p->record, &record);
    oomkit_history_phases_add(call->step->history, p->record,
                              oomkit_phases_of_call(call));
    if (call->tries.ooms > 0) {
        oomkit_sinks_tell(call->st, &record,
                          oomkit_history_phases(call->step->history, p->record),
                          call->options->label, call->options->sinks);
    }
}

void
oomkit_replay_end(oomkit_call *call, const oomkit_deferred *p, int finished)
{
    /* owned; NULL, too, where second_end() has it, and has told it */
    PyObject *exception = finished ? NULL : oomkit_exception_take();

    oomkit_call_leave(call, finished, exception);
    if (p != NULL) {
        replay_record(call, p);
    }
    if (p != NULL && finished && call->options->window != NULL &&
        call->cut->slices != NULL && oomkit_earlier_note(call) < 0) {
        oomkit_error_unraised(call->given.func); /* the gradients are there */
    }
    call->step->seen_oom |= call->tries.ooms > 0;
    oomkit_call_free(call);
    Py_CLEAR(call->step);
    if (exception != NULL) {
        oomkit_exception_give(exception);
    }
}
