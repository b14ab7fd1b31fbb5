/* The next plan after a failure, and the line that says so. */
#include "call.h"
#include "errors.h"
#include "step.h"

/* Nothing smaller is allowed. NULL always, -1 for its callers. */
static int
replan_exhausted(oomkit_call *call, int64_t micro_batch)
{
    PyObject *reason; /* owned */

    if (call->batch.rows < call->options->min_micro_batch) {
        reason = PyUnicode_FromFormat(
            "%U ran out of memory and its batch of %lld rows is smaller than "
            "min_micro_batch=%lld",
            call->options->label, (long long)call->batch.rows,
            (long long)call->options->min_micro_batch);
    } else {
        reason = PyUnicode_FromFormat(
            "%U ran out of memory with a micro-batch of %lld of %lld rows, the "
            "smallest "
            "allowed; %s",
            call->options->label, (long long)micro_batch, (long long)call->batch.rows,
            call->grads.aside == NULL
                ? "the state is as if the step had not begun"
                : "some gradients that were there before the step hold this batch's "
                  "contribution: call zero_grad() before going on, and pass "
                  "gradient_safety=\"copy\" to auto_batch");
    }
    if (reason != NULL) {
        call->grads.aside_said = call->batch.rows >= call->options->min_micro_batch;
        oomkit_give_up(call, reason, 0);
        Py_DECREF(reason);
    }
    return -1;
}

/* The next plan into call->plan and its slices. 0, or -1 with oomkit.OutOfMemory. */
int
oomkit_replan(oomkit_call *call, int keep, int64_t failed_rows, int64_t failed_count)
{
    oomkit_plan_observations seen;
    oomkit_plan failed = call->plan;
    int64_t done = keep ? call->slices[call->slice_index].start : 0;
    int status;

    oomkit_signature_failed(call, failed_rows);
    oomkit_signature_observe(call, &seen);
    seen.batch = call->batch.rows - done;
    failed.batch = seen.batch;
    failed.multiple_of = call->options->multiple_of;
    failed.first = 0;
    failed.accumulation = (seen.batch + failed_rows - 1) / failed_rows;
    if (!keep && !call->forced && failed_count > failed.accumulation) {
        failed.accumulation = failed_count;
    }
    status = oomkit_plan_next(&seen, &failed, &call->plan, &call->reason);
    if (status == OOMKIT_EREFUSED) {
        return replan_exhausted(call, failed_rows);
    }
    if (status != OOMKIT_OK) {
        PyErr_SetString(PyExc_RuntimeError, "oomkit could not make a plan");
        return -1;
    }
    call->slice_count = keep ? call->slice_index : 0;
    call->slice_index = call->slice_count;
    return oomkit_attempt_slices(call);
}

/* One line for the change of plan, then the user's hook. 0 or -1. */
int
oomkit_replan_say(oomkit_call *call, int64_t old_rows, int64_t old_count)
{
    oomkit_state *st = call->st;
    PyObject *done; /* owned */
    int64_t rows = oomkit_plan_micro_batch(&call->plan);

    done = PyObject_CallMethod(
        st->log, "warning", "sKLLLLs",
        "oomkit: step=%d micro_batch=%d->%d accumulation=%d->%d reason=%s",
        (unsigned long long)call->number, (long long)old_rows, (long long)rows,
        (long long)old_count, (long long)call->slice_count,
        oomkit_plan_reason_name(call->reason));
    if (done == NULL) {
        return -1;
    }
    Py_DECREF(done);
    if (call->options->on_retry != NULL) {
        oomkit_record record;
        PyObject *object; /* owned */
        oomkit_call_record(call, &record);
        object = oomkit_record_new(st, &record, call->options->label);
        done = object ? PyObject_CallOneArg(call->options->on_retry, object) : NULL;
        Py_XDECREF(object);
        if (done == NULL) {
            return -1;
        }
        Py_DECREF(done);
    }
    return call->split ? oomkit_buffers_say_norm(call) : 0;
}

/* A call that is run again because another one failed: half its batch. 0 or -1. */
int
oomkit_recover_split(oomkit_call *call)
{
    if (oomkit_recover_batch(call) < 0) {
        return -1;
    }
    return oomkit_replan(call, 0, call->batch.rows, 1) < 0 ||
                   oomkit_replan_say(call, call->batch.rows, 1) < 0
               ? -1
               : 0;
}
