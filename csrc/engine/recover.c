/* Between the failure and the retry: classify, drop, drain, roll back, reclaim,
 * re-plan. */
#include "engine.h"
#include "refused_sizes.h"
#include "../batch/batch.h"
#include "../optim/optim.h"
#include "../plain/plain_state.h"
#include "../py/tensor.h"
#include "../ranks/agree.h"
#include "../result/result.h"
#include "../sizes/sizes.h"
#include "../undo/gradients.h"
#include "../ladder/ladder.h"
#include "../undo/undo.h"

int
oomkit_recover_note(oomkit_call *call, PyObject *exception)
{
    oomkit_attempt *attempt;

    if (ARRAY_GROW(call->tries.items, call->tries.count, call->tries.room) < 0) {
        return -1;
    }
    attempt = &call->tries.items[call->tries.count];
    memset(attempt, 0, sizeof(*attempt));
    oomkit_exception_describe(call->st, exception, &attempt->requested_bytes,
                              &attempt->message, &attempt->location);
    attempt->micro_batch_size = call->batch.kept_whole == OOMKIT_BATCH_UNCOUNTED ? -1
                                : call->cut->slices == NULL
                                    ? oomkit_batch_rows(&call->batch)
                                    : call->cut->slices[call->cut->at].length;
    attempt->accumulation_steps = call->cut->slices == NULL ? 1 : call->cut->count;
    attempt->rung =
        call->cut->plan.rung > 0 ? oomkit_rung_name((int)call->cut->plan.rung) : NULL;
    attempt->inner = oomkit_exception_inner(call->st, exception);
    attempt->phase =
        call->backward.failed || oomkit_exception_of_backward(call->st, exception)
            ? OOMKIT_PHASE_BACKWARD
        : oomkit_update_begun(call) ? OOMKIT_PHASE_OPTIMIZER
                                    : OOMKIT_PHASE_FORWARD;
    attempt->in_update = oomkit_update_unfinished(call) && !call->backward.failed;
    oomkit_holders_note(call, oomkit_grads_parked_ones(call), attempt);
    call->tries.requested = attempt->requested_bytes;
    call->tries.count++;
    call->tries.ooms++;
    call->tries.none_after = 1;
    call->st->seen_oom = 1;
    return 0;
}

/* The figures of the call are the CPU's: what was alive on the accelerator at entry is
 * not known, so that it is waited for and its garbage is looked for. 0 or -1. */
static int
reclaim_beside(oomkit_call *call)
{
    const oomkit_device device = oomkit_engine_device_of_failure(call);
    uint64_t left;

    return call->device.type != OOMKIT_DEVICE_CPU || device.type == OOMKIT_DEVICE_CPU
               ? 0
               : oomkit_device_reclaim(call->st, device, 0, (int)call->tries.ooms,
                                       &left);
}

int
oomkit_recover_reclaim(oomkit_call *call, uint64_t baseline_bytes)
{
    oomkit_state *st = call->st;
    uint64_t left;
    OWNED PyObject *done = PyObject_CallNoArgs(st->clear_autocast_cache);

    if (done == NULL) {
        return -1;
    }
    if (oomkit_device_reclaim(st, call->device, baseline_bytes, (int)call->tries.ooms,
                              &left) < 0 ||
        reclaim_beside(call) < 0) {
        if (call->tries.count > 0) {
            oomkit_reclaim_failed(call);
        }
        return -1;
    }
    oomkit_baseline_rolled_back(call, left);
    return 0;
}

/* Can finished parts be kept? Only while nothing but results came out of them. */
static int
recover_keeps_parts(const oomkit_call *call)
{
    return call->cut->slices != NULL && call->cut->at > 0 &&
           oomkit_attempt_only_results(call);
}

/* No batch was found, or a leaf of it has moved: 0 when it can be sliced, else -1. */
int
oomkit_recover_batch(oomkit_call *call)
{
    oomkit_step *step = call->step;
    int found;

    if (!call->batch.searched) {
        call->batch.provable = oomkit_proof_possible(call);
        found = oomkit_batch_find(call->st, call->options, step->batch_site,
                                  step->names, &call->batch);
        if (found < 0) {
            return -1;
        }
    }
    if (oomkit_batch_check(call->st, &call->batch, call->batch.names) < 0) {
        return -1;
    }
    if (call->batch.rows <= 0) {
        return oomkit_give_up_for(
            call, oomkit_batch_missing(
                      call->st, &call->batch,
                      PyUnicode_FromFormat(
                          "auto_batch found no batch to split in the arguments of %U: "
                          "pass it as an argument of the step (a tensor, or a tuple, "
                          "list or dict of tensors)",
                          call->options->label)));
    }
    return 0;
}

/* Of a call that is committed: has a scheduler stepped and nothing else moved? Counts
 * as no where that cannot be told. */
static int
recover_scheduled(oomkit_call *call)
{
    Py_ssize_t ignored;
    int moved;

    if (call->refused.why != NULL || call->refused.hooked != NULL ||
        oomkit_update_of_unknown_runs(call) || oomkit_update_by_unknown(call) ||
        !oomkit_only_scheduled(call)) {
        return 0;
    }
    moved = oomkit_params_moved(call, &ignored);
    if (moved < 0) {
        oomkit_error_dismiss(); /* counts as moved */
    }
    return moved == 0;
}

/* The failure struck between two updates, in one that cannot be undone, or behind a
 * scheduler. */
static void
recover_partial(oomkit_call *call)
{
    const int scheduled = recover_scheduled(call);
    const char *where =
        oomkit_update_of_unknown_runs(call)
            ? "inside the step() of an optimizer that was not found in its arguments, "
              "self, closure or globals; pass optimizer=... to auto_batch"
        : call->refused.hooked != NULL
            ? "in a backward() after a post-accumulate-grad hook had changed a "
              "parameter (do in the step, after backward(), what the hook does)"
        : oomkit_update_unfinished(call) && oomkit_updates_made(call) == 0
            ? "inside an optimizer's step() that had changed a parameter or its state"
        : oomkit_update_unfinished(call)
            ? "in one optimizer's step() after another's was applied"
        : call->backward.failed ? "in a backward() after an optimizer had stepped"
        : oomkit_update_by_unknown(call) && call->step->updates < 0
            ? "after the step() of an optimizer that was not found in its arguments, "
              "self, closure or globals, so that others may be due; pass optimizer=... "
              "to auto_batch"
            : "between the updates of two optimizers";

    call->log.outcome = 2;
    if (scheduled) {
        oomkit_raise(call->st->PartialUpdate,
                     "%U ran out of memory after a scheduler had stepped and before "
                     "the update: the scheduler's step() cannot be undone; call it "
                     "after optimizer.step(), restore a checkpoint, or pass "
                     "optimizer_safety=\"copy\" to auto_batch" SEE("partial-update"),
                     call->options->label);
        return;
    }
    oomkit_raise(
        call->st->PartialUpdate,
        "%U ran out of memory %s: the update is half done and cannot be undone; "
        "restore a checkpoint, or pass optimizer_safety=\"%s\" to auto_batch" SEE(
            "partial-update"),
        call->options->label, where,
        oomkit_update_unfinished(call) && oomkit_updates_made(call) == 0
            ? "parts\" or \"copy"
            : "copy");
}

int
oomkit_recover_committed(oomkit_call *call)
{
    const int kept = oomkit_ranks_committed(call);
    int committed = kept < 0 ? -1 : oomkit_update_committed(call);

    if (kept > 0 && call->refused.why == NULL) {
        call->refused.why = "all ranks had come to the update, and the others may have "
                            "made it; restore a checkpoint on all of them, or pass "
                            "optimizer_safety=\"parts\" to auto_batch";
    }
    return committed < 0 ||
                   (call->refused.why == NULL &&
                    oomkit_refusal(call, &call->refused.why) < 0) ||
                   oomkit_tell_failure_is_judged(call, &committed) < 0
               ? -1
               : committed;
}

/* Something of our own ran out of memory (its error is in flight): what can be taken
 * back is. Steals `exception`, the step's. -1 always. */
static int
recover_cannot(oomkit_call *call, PyObject *exception, const char *doing)
{
    Py_DECREF(exception);
    if (oomkit_update_committed(call) == 0) {
        oomkit_recover_undo(call);
    }
    return oomkit_own_failed(call, doing);
}

/* An update has said that there is no room for it and that nothing was updated
 * (oomkit.OutOfMemory). Behind another update that is so once that one is taken back;
 * where it cannot be, the call is half done. Steals `exception`; -1 always. */
static int
recover_refused(oomkit_call *call, PyObject *exception)
{
    const int committed = oomkit_recover_committed(call);
    PyObject *partial; /* owned, given back */

    if (committed < 0) {
        return recover_cannot(call, exception, "it was being judged what to undo");
    }
    if (committed && !call->options->optimizer_copy) {
        oomkit_exception_clear_frames(call->st, exception, NULL);
        recover_partial(call);
        partial = oomkit_exception_take();
        PyException_SetCause(partial, exception); /* steals it */
        oomkit_exception_give(partial);
        return -1;
    }
    if (committed) {
        oomkit_exception_give(exception);
        oomkit_recover_undo(call);
        exception = oomkit_exception_take();
    }
    return oomkit_recover_pass(call, exception);
}

/* May this OOM be retried? 0 yes; -1 with the exception to raise. Steals `exception`
 * when it answers -1. */
static int
recover_judge(oomkit_call *call, oomkit_class class_, PyObject *exception)
{
    OWNED PyObject *reason = NULL;
    int committed;

    if (class_ == OOMKIT_CLASS_NEVER && call->refused.raised) {
        return recover_refused(call, exception);
    }
    if (!oomkit_oom_is_retried(class_, call->tries.ooms)) {
        return oomkit_recover_pass(call, exception);
    }
    committed = oomkit_recover_committed(call);
    if (committed < 0) {
        return recover_cannot(call, exception,
                              "it was being judged whether to retry it");
    }
    if ((!committed || call->options->optimizer_copy) && call->refused.why == NULL) {
        return 0;
    }
    oomkit_exception_discard(call->st, exception);
    if (committed &&
        (recover_scheduled(call) || oomkit_update_of_unknown_runs(call) ||
         oomkit_update_unfinished(call) || call->backward.failed ||
         (oomkit_updates_made(call) > 0 && oomkit_updates_are_left(call)))) {
        recover_partial(call);
        return -1;
    }
    reason =
        committed ? PyUnicode_FromFormat(
                        "%U ran out of memory after its update was applied: the update "
                        "stands, do not repeat this batch" SEE("update-applied"),
                        call->options->label)
        : call->refused.hooked != NULL
            ? PyUnicode_FromFormat(
                  "%U ran out of memory and is not retried: %U %s" SEE("not-retried"),
                  call->options->label, call->refused.hooked, call->refused.why)
            : PyUnicode_FromFormat(
                  "%U ran out of memory and is not retried: %s" SEE("not-retried"),
                  call->options->label, call->refused.why);
    if ((committed || oomkit_recover_roll_back(call) == 0) && reason != NULL) {
        oomkit_give_up(call, reason, committed);
    }
    return -1;
}

/* What is left of the failed attempt must not be met by another. -1 always. */
static int
recover_remains(oomkit_call *call, const char *why)
{
    OWNED PyObject *reason = PyUnicode_FromFormat(
        "%U ran out of memory and is not retried: %s" SEE("not-retried"),
        call->options->label, why);

    if (oomkit_recover_roll_back(call) == 0 && reason != NULL) {
        oomkit_give_up(call, reason, 0);
    }
    return -1;
}

/* All parts of an evaluation are there, but not the memory to put them together: no
 * micro-batch changes that. What the failure held is free now, so once more. 0 or -1.
 */
static int
recover_join(oomkit_call *call)
{
    oomkit_plain_keep(call, call->tries.join_failures == 0);
    if (oomkit_recover_roll_back(call) < 0) {
        return -1;
    }
    oomkit_savepoint_end_attempt(call);
    if (oomkit_recover_reclaim(call, oomkit_baseline_at_entry(call)) < 0) {
        return -1;
    }
    if (call->tries.join_failures++ == 0) {
        return oomkit_savepoint_take(call);
    }
    return oomkit_give_up_for(
        call, PyUnicode_FromFormat(
                  "%U ran out of memory when it joined the results of its %lld "
                  "micro-batches, which needs twice their size; return less for each "
                  "row, or use oomkit.map(..., to=\"cpu\"), which moves each part's "
                  "result off the device" SEE("results-too-large"),
                  call->options->label, (long long)call->cut->count));
}

/* The failure is known and dropped: everything back, and the next attempt. 0 or -1. */
static int
recover_go_on(oomkit_call *call)
{
    uint64_t baseline; /* with the results of finished parts */
    const oomkit_keep keep =
        recover_keeps_parts(call) ? OOMKIT_KEEP_RESULTS : OOMKIT_KEEP_NOTHING;
    int result;

    if (call->tries.joining) {
        return recover_join(call);
    }
    oomkit_grads_allow_owing(call,
                             call->options->gradient_safety == OOMKIT_SAFETY_AUTO);
    oomkit_plain_keep(call, keep);
    result = oomkit_recover_roll_back(call);
    oomkit_grads_allow_owing(call, 0);
    if (result == 0 && call->tries.keeps_made && call->tries.groups_went) {
        return recover_remains(call, "it has made a module and a group of an optimizer "
                                     "for it, and the group alone went back: make both "
                                     "before the first call of the step");
    }
    if (result == 0) {
        result = oomkit_join_truncate(&call->cut->join,
                                      keep ? (Py_ssize_t)call->cut->at : 0);
    }
    call->tries.may_hold |= call->training && !call->split;
    oomkit_savepoint_end_attempt(call);
    baseline = keep ? call->cut->micro.baseline_bytes : oomkit_baseline_at_entry(call);
    if (result == 0) {
        result = oomkit_replan_failed(call, keep, baseline);
    }
    if (result > 0) {
        return oomkit_replan_exhausted(call);
    }
    if (result < 0) {
        return -1;
    }
    oomkit_window_anew(call);
    return oomkit_savepoint_take(call);
}

/* Ends the attempt that failed with the exception in flight. 0: call->cut->slices is
 * the next attempt; -1 with the exception to raise. */
static int
recover_from_failure(oomkit_call *call)
{
    oomkit_state *st = call->st;
    PyObject *exception = oomkit_exception_take(); /* owned, then stolen */
    oomkit_class class_ = oomkit_exception_classify(st, exception);
    const char *why;

    if (class_ == OOMKIT_CLASS_OTHER) {
        /* An optimizer's step() that ran out of memory half-way is said where it was.
         */
        if (PyErr_GivenExceptionMatches(exception, st->PartialUpdate) &&
            oomkit_modes_entry_back(call) < 0) {
            oomkit_error_unraised(call->given.func); /* the update tells more */
        }
        return oomkit_split_is_refused(call, exception)
                   ? oomkit_split_refused(call, exception, 1)
                   : oomkit_unfit(call, exception);
    }
    if (oomkit_device_is_lost(st, oomkit_engine_device_of_failure(call))) {
        class_ = OOMKIT_CLASS_STICKY;
    }
    if (oomkit_modes_entry_back(call) < 0 || oomkit_recover_note(call, exception) < 0) {
        return recover_cannot(call, exception, "an attempt that had failed was noted");
    }
    if (recover_judge(call, class_, exception) < 0) {
        return -1;
    }
    oomkit_exception_discard(st, exception);
    oomkit_phase_set(st, OOMKIT_PHASE_RECOVERY);
    why = oomkit_tell_failure_remains(call);
    if (why != NULL) {
        return recover_remains(call, why);
    }
    if (recover_go_on(call) < 0) {
        oomkit_plain_give_up(call);
        return oomkit_own_failed(call, "it was being taken back after running out of "
                                       "memory");
    }
    return 0;
}

/* From a failure (the exception is in flight), or from a plan that splits from the
 * start, to the result. New reference, or NULL with an exception. */
PyObject *
oomkit_recover(oomkit_call *call, int failed)
{
    PyObject *result; /* owned */

    oomkit_call_cut(call);
    if (call->tries.restart) {
        failed = oomkit_restart(call);
    }
    for (;;) {
        if (failed < 0) {
            return NULL;
        }
        if (failed) {
            if (recover_from_failure(call) < 0) {
                return NULL;
            }
            if (oomkit_tell_before_retry(call) < 0) {
                if (!oomkit_exception_is_oom(call->st)) {
                    return NULL;
                }
                continue; /* the attempt would have met it */
            }
            oomkit_call_lost(call);
            oomkit_phase_set(call->st, OOMKIT_PHASE_FORWARD);
        }
        result = oomkit_attempt_run(call);
        failed = result == NULL;
        if (failed) {
            oomkit_ranks_note_stop(call);
        }
        if (call->tries.restart) {
            Py_CLEAR(result);
            failed = oomkit_restart(call);
        } else if (result != NULL) {
            oomkit_unfit_learn(call);
            return result;
        }
    }
}
