/* The next plan after a failure, and the line that says so. */
#include "engine.h"
#include "refused_sizes.h"
#include "../ladder/ladder.h"
#include "../optim/updating.h"
#include "../result/result.h"
#include "../sizes/sizes.h"
#include "../undo/gradients.h"
#include "../undo/undo.h"

int64_t
oomkit_replan_smallest(const oomkit_call *call)
{
    int64_t least = 0;
    Py_ssize_t i;

    for (i = 0; i < call->tries.count; i++) {
        int64_t rows = call->tries.items[i].micro_batch_size;
        least = rows > 0 && (least == 0 || rows < least) ? rows : least;
    }
    return least;
}

/* Did the last attempt fail in an optimizer's step()? */
static int
failed_in_update(const oomkit_call *call)
{
    return call->tries.count > 0 && call->tries.items[call->tries.count - 1].in_update;
}

/* The last request is the same with any micro-batch. New reference or NULL. */
static PyObject *
no_room_text(oomkit_call *call, int64_t least)
{
    const oomkit_attempt *last = &call->tries.items[call->tries.count - 1];
    char requested[32];

    return PyUnicode_FromFormat(
        "%U ran out of memory with a micro-batch of %lld of %lld rows, and smaller "
        "ones do not help: the %s wanted in its %s are the same for any size, and "
        "parameters, gradients and state leave no room for them; %s" SEE(
            "out-of-memory"),
        call->options->label, (long long)(least > 0 ? least : call->batch.rows),
        (long long)call->batch.rows,
        oomkit_format_bytes(last->requested_bytes, requested),
        last->phase == OOMKIT_PHASE_BACKWARD ? "backward" : "forward",
        oomkit_state_as_before(call));
}

/* What the caller is told of the state that is left. */
static const char *
state_left(const oomkit_call *call)
{
    return oomkit_grads_any_aside(call)
               ? "some gradients from before the step contain a part of this batch: "
                 "call zero_grad() before you continue, and pass "
                 "gradient_safety=\"copy\" to auto_batch"
               : oomkit_state_as_before(call);
}

int
oomkit_replan_exhausted(oomkit_call *call)
{
    const int64_t least = oomkit_replan_smallest(call);
    PyObject *reason; /* owned */

    if (oomkit_split_refusal_stands(
            call,
            PyUnicode_FromFormat("ran out of memory again, with what the ladder puts "
                                 "in host memory there; %s",
                                 state_left(call)))) {
        oomkit_grads_aside_said(call, 1);
        return -1;
    }
    if (call->batch.rows < call->options->min_micro_batch) {
        reason = PyUnicode_FromFormat(
            "%U ran out of memory and its batch of %lld rows is smaller than "
            "min_micro_batch=%lld" SEE("min-micro-batch"),
            call->options->label, (long long)call->batch.rows,
            (long long)call->options->min_micro_batch);
    } else if (call->tries.no_room) {
        reason = no_room_text(call, least);
    } else if (failed_in_update(call)) {
        reason = PyUnicode_FromFormat(
            "%U ran out of memory in an optimizer's step() with a micro-batch of %lld "
            "of %lld rows, and smaller ones do not help there: nothing was updated; "
            "use an optimizer with less state, or a larger budget; %s" SEE(
                "out-of-memory"),
            call->options->label, (long long)(least > 0 ? least : call->batch.rows),
            (long long)call->batch.rows, oomkit_state_as_before(call));
    } else {
        reason = PyUnicode_FromFormat(
            "%U ran out of memory with a micro-batch of %lld of %lld rows, the "
            "smallest allowed; %s" SEE("out-of-memory"),
            call->options->label, (long long)(least > 0 ? least : call->batch.rows),
            (long long)call->batch.rows, state_left(call));
    }
    reason = oomkit_unfit_explain(call, reason);
    if (reason != NULL) {
        oomkit_grads_aside_said(call,
                                call->batch.rows >= call->options->min_micro_batch);
    }
    return oomkit_give_up_for(call, reason);
}

/* The plan that failed, once more. 1 or -1. */
static int
replan_as_it_was(oomkit_call *call, oomkit_keep keep, int64_t failed_count)
{
    call->cut->reason = OOMKIT_REASON_FLUSHED;
    if (keep) {
        return 1;
    }
    if (call->cut->slices == NULL) {
        call->cut->plan = (oomkit_plan){.batch = call->batch.rows,
                                        .accumulation = failed_count,
                                        .multiple_of = oomkit_unfit_multiple(call)};
        call->cut->count = 0;
        if (oomkit_cut_planned(call) < 0) {
            return -1;
        }
    }
    call->cut->at = 0;
    memset(&call->cut->measured, 0, sizeof(call->cut->measured));
    return 1;
}

/* The same where the memory was there, but in pieces: the cache has just been emptied.
 * 1, 0 or -1. */
static int
replan_same(oomkit_call *call, oomkit_keep keep, int64_t failed_count)
{
    const oomkit_attempt *attempt; /* borrowed from the call */
    uint64_t budget = oomkit_device_budget(call->st, call->device);

    if (keep == OOMKIT_KEEP_RESULTS || call->tries.count == 0) {
        return 0;
    }
    attempt = &call->tries.items[call->tries.count - 1];
    if (!oomkit_plan_fragmented(attempt->reserved_bytes, attempt->allocated_bytes,
                                budget, call->tries.flushed)) {
        return 0;
    }
    call->tries.flushed = 1;
    return replan_as_it_was(call, keep, failed_count);
}

/* --- in an update --- */

/* Of an update a smaller micro-batch changes only what the step still holds of it (its
 * logits, for instance). Has the last one freed so much that another may be enough? It
 * frees half of what is left of that at best, so as much again in all. */
static int
smaller_helps_update(const oomkit_call *call)
{
    const oomkit_attempt *last = &call->tries.items[call->tries.count - 1];
    const oomkit_attempt *before = last - 1;
    const uint64_t budget = oomkit_device_budget(call->st, call->device);
    uint64_t missing = last->requested_bytes;

    if (call->tries.count < 2 || !before->in_update ||
        before->micro_batch_size <= last->micro_batch_size) {
        return 1; /* not tried so far */
    }
    if (missing == OOMKIT_UNKNOWN || last->allocated_bytes == OOMKIT_UNKNOWN ||
        before->allocated_bytes == OOMKIT_UNKNOWN) {
        return 1;
    }
    if (budget != OOMKIT_UNKNOWN && budget > last->allocated_bytes) {
        const uint64_t left = budget - last->allocated_bytes;
        missing = missing > left ? missing - left : 1;
    }
    return before->allocated_bytes > last->allocated_bytes &&
           before->allocated_bytes - last->allocated_bytes >= missing;
}

/* An update in smaller parts, or as it was: an accident may have been all. Then what a
 * smaller micro-batch frees. 0 planned; 1 to be made smaller, 2 nothing smaller helps;
 * -1. */
static int
replan_update(oomkit_call *call, oomkit_keep keep, int64_t failed_count)
{
    if (!failed_in_update(call)) {
        return 1;
    }
    if (call->tries.update_smaller || !call->tries.update_again) {
        call->tries.update_again |= !call->tries.update_smaller;
        call->tries.update_smaller = 0;
        return replan_as_it_was(call, keep, failed_count) < 0 ? -1 : 0;
    }
    return smaller_helps_update(call) ? 1 : 2;
}

/* One line for a change of plan. 0 or -1. */
int
oomkit_plan_say(oomkit_call *call, const char *level, int64_t old_rows,
                int64_t old_count)
{
    const uint32_t rung = call->cut->plan.rung;

    return oomkit_say(
        call->st, level, "sOKLLLLsss",
        "%s step=%d micro_batch=%d->%d accumulation=%d->%d%s%s reason=%s",
        call->options->label, (unsigned long long)call->log.number, (long long)old_rows,
        (long long)oomkit_plan_micro_batch(&call->cut->plan), (long long)old_count,
        (long long)(call->cut->count > 0 ? call->cut->count
                                         : oomkit_plan_count(&call->cut->plan)),
        rung > 0 ? " rung=" : "", rung > 0 ? oomkit_rung_name((int)rung) : "",
        oomkit_plan_reason_name(call->cut->reason));
}

/* The same after a failure, then the user's hook. 0 or -1. */
int
oomkit_replan_say(oomkit_call *call, int64_t old_rows, int64_t old_count)
{
    (void)oomkit_say_once(call->step, OOMKIT_SAID_FALL);
    if (oomkit_plan_say(call, "warning", old_rows, old_count) < 0) {
        return -1;
    }
    if (call->options->on_retry != NULL) {
        OWNED PyObject *object = NULL, *done = NULL;
        oomkit_record record;
        oomkit_call_record(call, &record);
        object = oomkit_record_new(call->st, &record, NULL, call->options->label);
        done = object ? PyObject_CallOneArg(call->options->on_retry, object) : NULL;
        if (done == NULL) {
            return -1;
        }
    }
    return call->split ? oomkit_buffers_say_norm(call) : 0;
}

/* From a plan to that with the smallest micro-batches that are allowed: those between
 * would fail in the same place. */
static void
replan_smallest(const oomkit_knowledge *known, oomkit_plan_request request,
                oomkit_plan *plan)
{
    const uint32_t rung = plan->rung;
    oomkit_plan next;
    oomkit_plan_reason reason;

    request.may_be_whole = 0;
    while (oomkit_plan_next(known, &request, plan, &next, &reason) == OOMKIT_OK &&
           oomkit_plan_micro_batch(&next) < oomkit_plan_micro_batch(plan)) {
        *plan = next;
    }
    plan->rung = rung;
}

/* The next plan into call->cut->plan and its slices. 0, 1 where nothing smaller is
 * allowed, or -1. */
static int
replan_next(oomkit_call *call, oomkit_keep keep, int64_t failed_rows,
            int64_t failed_count)
{
    oomkit_plan_request request;
    const oomkit_knowledge *known; /* borrowed from the step */
    oomkit_plan failed = call->cut->plan;
    int64_t done = keep ? call->cut->slices[call->cut->at].start : 0;
    int status = replan_same(call, keep, failed_count);

    if (status != 0) {
        return status < 0 ? -1 : 0;
    }
    /* Of a loop's site it is known from here on; of a step's when its call ends. */
    call->step->seen_oom |= keep == OOMKIT_KEEP_HANDED;
    oomkit_signature_failed(call, failed_rows);
    oomkit_signature_request(call, &request, &known);
    request.batch = call->batch.rows - done;
    if (call->cut->slices ==
        NULL) { /* not planned so far: a caller's backward failed */
        failed.rung = known->rung;
    }
    failed.batch = request.batch;
    failed.multiple_of = request.multiple_of;
    failed.first = 0;
    failed.accumulation = (request.batch + failed_rows - 1) / failed_rows;
    if (!keep && !call->cut->forced && failed_count > failed.accumulation) {
        failed.accumulation = failed_count;
    }
    /* Once per call: rooms that change could bring it back for ever. Where parts are
     * kept nothing accumulates. */
    request.may_be_whole = !keep && !call->tries.whole_tried &&
                           call->step->gradient_bytes > 0 &&
                           failed.rung < OOMKIT_RUNG_NONE_BESIDE;
    status = oomkit_plan_next(known, &request, &failed, &call->cut->plan,
                              &call->cut->reason);
    call->cut->plan.rung = failed.rung;
    call->tries.whole_tried |= status == OOMKIT_OK && failed_count > 1 &&
                               oomkit_plan_count(&call->cut->plan) == 1;
    if (status == OOMKIT_EREFUSED) {
        return 1;
    }
    if (status != OOMKIT_OK) {
        PyErr_SetString(PyExc_RuntimeError,
                        "oomkit could not make a plan" SEE("internal-error"));
        return -1;
    }
    if (!keep && oomkit_holders_skip_sizes(call)) {
        replan_smallest(known, request, &call->cut->plan);
    }
    call->cut->count = keep ? call->cut->at : 0;
    call->cut->at = call->cut->count;
    return oomkit_cut_planned(call);
}

/* Nothing smaller is allowed: once more what has worked in an earlier call, then the
 * next rung of the ladder, with the smallest micro-batches that there were. 0, 1 where
 * there is none, or -1. */
static int
replan_climb(oomkit_call *call, oomkit_keep keep)
{
    const int64_t rows = call->batch.rows;
    int64_t least = oomkit_replan_smallest(call);
    int climbed;

    if (keep != OOMKIT_KEEP_NOTHING) {
        return 1;
    }
    if (!call->tries.again && !failed_in_update(call) &&
        oomkit_ladder_has_worked(call)) {
        call->tries.again = 1; /* an accident, or the room of another moment */
        climbed = (int)call->cut->plan.rung;
        call->cut->reason = OOMKIT_REASON_FLUSHED;
    } else if (call->tries.count > 0 && oomkit_holders_request_too_large(call)) {
        return 1;
    } else {
        call->cut->reason = OOMKIT_REASON_CLIMBED;
        climbed = oomkit_ladder_climb(call, failed_in_update(call) ? OOMKIT_RUNG_STATE
                                                                   : OOMKIT_RUNGS - 1);
        climbed = climbed == 0 ? -2 : climbed;
    }
    if (climbed < 0) {
        return climbed == -2 ? 1 : -1;
    }
    least = least <= 0 || oomkit_unfit_least(call) >= rows ? rows : least;
    call->cut->plan = (oomkit_plan){.batch = rows,
                                    .accumulation = (rows + least - 1) / least,
                                    .multiple_of = oomkit_unfit_multiple(call),
                                    .rung = (uint32_t)climbed};
    call->cut->count = call->cut->at = 0;
    call->tries.whole_tried = 0;
    return oomkit_cut_planned(call);
}

/* What keeps its batch from being cut is the error now. 1 or -1. */
static int
replan_uncut(oomkit_call *call)
{
    call->batch.searched = call->batch.kept_whole = 0;
    call->batch.rows = -1;
    return oomkit_recover_batch(call) < 0 ? -1 : 1;
}

int
oomkit_replan(oomkit_call *call, oomkit_keep keep, int64_t failed_rows,
              int64_t failed_count)
{
    int status;

    if (keep == OOMKIT_KEEP_NOTHING && call->tries.count > 0 &&
        oomkit_holders_leave_no_room(call, oomkit_host_grads_are_next(call))) {
        call->tries.no_room = 1;
        return 1;
    }
    status = replan_update(call, keep, failed_count);
    if (status == 1) {
        status = replan_next(call, keep, failed_rows, failed_count);
    }
    if (status > 0) {
        status = replan_climb(call, keep);
    }
    if (status > 0 && call->step->whole_only && call->cut->unfit.refusal == NULL) {
        /* Its split was refused in an earlier call: perhaps it is not in this one. */
        call->step->whole_only = 0;
        status = call->batch.kept_whole
                     ? replan_uncut(call)
                     : replan_next(call, keep, failed_rows, failed_count);
    }
    if (status > 0 && failed_in_update(call)) { /* no size was too large */
        oomkit_signature_forget(call);
    }
    return status == 0 ? oomkit_replan_say(call, failed_rows, failed_count) : status;
}

int
oomkit_replan_failed(oomkit_call *call, oomkit_keep keep, uint64_t baseline_bytes)
{
    int64_t rows, count = call->cut->slices == NULL ? 1 : call->cut->count;

    if (oomkit_recover_reclaim(call, baseline_bytes) < 0) {
        return -1;
    }
    if (oomkit_recover_batch(call) < 0) {
        return keep ? -1 : oomkit_split_impossible(call);
    }
    rows = call->cut->slices == NULL
               ? call->batch.rows
               : call->cut->slices[keep ? call->cut->at : 0].length;
    if (call->batch.kept_whole != OOMKIT_BATCH_UNCOUNTED) {
        call->tries.items[call->tries.count - 1].micro_batch_size = rows;
    }
    return oomkit_replan(call, keep, rows, count);
}

/* --- another plan, for another reason --- */

int
oomkit_begin_clear(oomkit_call *call)
{
    if (oomkit_join_truncate(&call->cut->join, 0) < 0) {
        return -1;
    }
    oomkit_savepoint_end_attempt(call);
    call->cut->at = 0;
    memset(&call->cut->measured, 0, sizeof(call->cut->measured));
    return oomkit_recover_reclaim(call, oomkit_baseline_at_entry(call)) < 0
               ? -1
               : oomkit_recover_batch(call);
}

int
oomkit_begin_again(oomkit_call *call)
{
    const int64_t rows = call->cut->slices[0].length, count = call->cut->count;

    if (oomkit_begin_clear(call) < 0) {
        return -1;
    }
    call->cut->count = 0;
    if (oomkit_cut_planned(call) < 0 || oomkit_replan_say(call, rows, count) < 0) {
        return -1;
    }
    oomkit_window_anew(call);
    return oomkit_savepoint_take(call);
}

int
oomkit_recover_split(oomkit_call *call)
{
    int status = oomkit_recover_batch(call) < 0
                     ? -1
                     : oomkit_replan(call, OOMKIT_KEEP_NOTHING, call->batch.rows, 1);

    return status > 0 ? oomkit_replan_exhausted(call) : status;
}
