/* One attempt: the function called once per micro-batch of the present plan. */
#include "call.h"
#include "errors.h"
#include "step.h"
#include "tensor.h"

/* Makes room for `count` slices. */
static int
slices_room(oomkit_call *call, int64_t count)
{
    void *grown;
    if (count <= call->slice_room) {
        return 0;
    }
    grown = PyMem_Realloc(call->slices, (size_t)count * sizeof(*call->slices));
    if (grown == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    call->slices = grown;
    call->slice_room = count;
    return 0;
}

/* The plan as a list of slices, appended after the `slice_count` first ones, which an
 * evaluation keeps. `plan.batch` is the number of rows still to do. 0 or -1. */
int
oomkit_attempt_slices(oomkit_call *call)
{
    int64_t kept = call->slice_count, count = oomkit_plan_count(&call->plan), i;
    int64_t offset =
        kept == 0 ? 0 : call->slices[kept - 1].start + call->slices[kept - 1].length;

    if (slices_room(call, kept + count) < 0) {
        return -1;
    }
    for (i = 0; i < count; i++) {
        oomkit_slice *slice = &call->slices[kept + i];
        if (oomkit_plan_slice(&call->plan, i, &slice->start, &slice->length) !=
            OOMKIT_OK) {
            PyErr_SetString(PyExc_RuntimeError, "oomkit made a plan without slices");
            return -1;
        }
        slice->start += offset;
    }
    call->slice_count = kept + count;
    call->split = call->slice_count > 1;
    return 0;
}

static void
vector_clear(PyObject **vector, Py_ssize_t count)
{
    while (count-- > 0) {
        Py_CLEAR(vector[count]);
    }
}

/* weight= of one slice's arguments. -1 with an exception. */
static double
weight_ask(oomkit_call *call, PyObject *const *vector)
{
    PyObject *argument, *answer = NULL, *number = NULL; /* owned */
    double value = -1.0;

    argument = oomkit_batch_argument(&call->batch, vector);
    if (argument != NULL) {
        answer = PyObject_CallOneArg(call->options->weight, argument);
        Py_DECREF(argument);
    }
    if (answer != NULL) {
        number = PyNumber_Float(answer); /* a 0-d tensor too */
        Py_DECREF(answer);
    }
    if (number == NULL) {
        return -1.0;
    }
    value = PyFloat_AS_DOUBLE(number);
    Py_DECREF(number);
    if (!(value >= 0.0)) {
        oomkit_raise(call->st->SplitError,
                     "auto_batch(weight=...) must return a number >= 0 for each "
                     "micro-batch, got %s",
                     value != value ? "nan" : "a negative number");
        return -1.0;
    }
    return value;
}

static int
weights_measured(oomkit_call *call)
{
    double total = 0.0;
    int64_t i;
    Py_ssize_t n = call->batch.total;
    PyObject **vector = PyMem_Calloc((size_t)n + 1, sizeof(PyObject *));

    if (vector == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (i = 0; i < call->slice_count; i++) {
        double value = -1.0;
        if (oomkit_batch_build(call->st, call->options, &call->batch,
                               call->slices[i].start, call->slices[i].length,
                               vector) == 0) {
            value = weight_ask(call, vector);
        }
        vector_clear(vector, n);
        if (value < 0.0) {
            PyMem_Free(vector);
            return -1;
        }
        call->weights[i] = value;
        total += value;
    }
    PyMem_Free(vector);
    for (i = 0; i < call->slice_count; i++) {
        call->weights[i] =
            total > 0.0 ? call->weights[i] / total : 1.0 / (double)call->slice_count;
    }
    return 0;
}

/* The share of the loss that each slice carries: n_i/N for a mean, 1 for a sum. */
static int
attempt_weights(oomkit_call *call)
{
    int64_t i;
    void *grown = PyMem_Realloc(call->weights,
                                (size_t)call->slice_count * sizeof(*call->weights));
    if (grown == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    call->weights = grown;
    if (call->options->weight != NULL) {
        return weights_measured(call);
    }
    for (i = 0; i < call->slice_count; i++) {
        call->weights[i] =
            call->options->reduction == OOMKIT_REDUCTION_SUM
                ? 1.0
                : (double)call->slices[i].length / (double)call->batch.rows;
    }
    return 0;
}

/* What must hold at the end of a micro-batch. 0 or -1. */
static int
attempt_micro_end(oomkit_call *call, PyObject *result)
{
    const oomkit_slice *slice = &call->slices[call->slice_index];

    if (call->options->backward != NULL && call->replayed == NULL) {
        if (oomkit_backward_run(call, result) < 0) {
            return -1;
        }
    } else if ((call->split || call->replayed != NULL) &&
               oomkit_returned_micro(call, result) < 0) {
        return -1;
    }
    if (call->split && oomkit_course_finish(call) < 0) {
        return -1;
    }
    if (call->step_leaves != NULL && oomkit_strangers_check(call, result) < 0) {
        return -1;
    }
    if (!call->is_last && oomkit_tx_micro_end(call) < 0) {
        return -1;
    }
    if (!call->split || call->replayed != NULL) {
        return 0;
    }
    if (call->training && oomkit_buffers_say_moving(call) < 0) {
        return -1;
    }
    return oomkit_join_add(call->st, &call->join, result, slice->length,
                           call->weights[call->slice_index]);
}

int
oomkit_attempt_only_results(const oomkit_call *call)
{
    return !call->training && call->optimizer_count == 0 &&
           call->course[0].count == 0 && call->scaler_marks == NULL &&
           !call->committed && call->options->weight == NULL &&
           call->returned == OOMKIT_RETURNED_NOTHING && call->replayed == NULL;
}

/* Runs one slice; *whole gets the result (owned) when it is the only one. 0 or -1. */
static int
attempt_micro(oomkit_call *call, PyObject **vector, PyObject **whole)
{
    const oomkit_slice *slice = &call->slices[call->slice_index];
    PyObject *result; /* owned */
    int status;

    if (call->slice_index > 0 && oomkit_attempt_only_results(call) &&
        oomkit_tx_begin_micro(call) < 0) {
        return -1;
    }
    if (call->split && oomkit_grads_begin_micro(call) < 0) {
        return -1;
    }
    call->is_last = call->slice_index == call->slice_count - 1;
    call->backwards = call->syncs = 0;
    if (oomkit_batch_build(call->st, call->options, &call->batch, slice->start,
                           slice->length, vector) < 0) {
        return -1;
    }
    call->running = 1;
    result = PyObject_Vectorcall(call->func, vector, (size_t)call->batch.positional,
                                 call->kwnames);
    call->running = 0;
    oomkit_forward_release(call);
    /* Slices of the batch go before anything else: they may be copies. */
    vector_clear(vector, call->batch.total);
    if (result == NULL || call->restart) {
        Py_XDECREF(result); /* the step caught what was to end it */
        return -1;
    }
    if (call->split && call->raised) {
        Py_DECREF(result);
        oomkit_raise(call->st->SplitError,
                     "auto_batch cannot split this step: it raised an error that says "
                     "why, which the step caught; let oomkit's errors pass");
        return -1;
    }
    status = attempt_micro_end(call, result);
    if (status == 0 && !call->split) {
        *whole = result; /* the caller's very objects, not a join of one */
        return 0;
    }
    Py_DECREF(result);
    return status;
}

/* Runs the slices from `slice_index` on. New reference, or NULL with an exception. */
PyObject *
oomkit_attempt_run(oomkit_call *call)
{
    PyObject *result = NULL; /* owned */
    PyObject **vector;

    if (attempt_weights(call) < 0 ||
        (call->split &&
         (oomkit_intercept_split(call) < 0 || oomkit_tx_sample(call) < 0 ||
          oomkit_owners_epochs_note(call) < 0))) {
        return NULL;
    }
    vector = PyMem_Calloc((size_t)call->batch.total + 1, sizeof(PyObject *));
    if (vector == NULL) {
        return PyErr_NoMemory();
    }
    for (; call->slice_index < call->slice_count; call->slice_index++) {
        if (attempt_micro(call, vector, &result) < 0) {
            vector_clear(vector, call->batch.total);
            goto done;
        }
    }
    call->slice_index = call->slice_count - 1;
    if (call->replayed != NULL) {
        Py_XSETREF(result, Py_NewRef(Py_None)); /* the caller has the results already */
    } else if (call->split) {
        call->join.parked = call->training && call->returned == OOMKIT_RETURNED_NOTHING;
        result = oomkit_join_finish(call->st, call->options, &call->join);
    }
done:
    PyMem_Free(vector);
    return result;
}
