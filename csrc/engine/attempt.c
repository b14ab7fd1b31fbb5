/* One attempt: the function called once per micro-batch of the present plan. */
#include "engine.h"
#include "../batch/batch.h"
#include "../hook/hook.h"
#include "../ladder/activations.h"
#include "../optim/optim.h"
#include "../plain/plain_state.h"
#include "../py/tensor.h"
#include "../ranks/agree.h"
#include "../result/result.h"
#include "../sizes/sizes.h"
#include "../undo/parameters.h"
#include "../undo/undo.h"

static void
vector_clear(PyObject **vector, Py_ssize_t count)
{
    while (count-- > 0) {
        Py_CLEAR(vector[count]);
    }
}

/* A result that cannot be joined is refused before the update where it shows in the
 * first micro-batch: the next batch, fetched inside the step. 0, or -1. */
static int
attempt_of_whole(oomkit_call *call, PyObject *result)
{
    PyObject *place = oomkit_result_of_whole(/* owned */
                                             call->st, &call->step->results, result,
                                             call->batch.rows, call->options->dim);
    if (place == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    oomkit_refuse(
        call,
        "auto_batch cannot join the results of %lld micro-batches: %U has %lld rows "
        "for a micro-batch of %lld; if it is the next batch, fetched inside the step, "
        "fetch it outside; else return it in another way or give join=..." SEE(
            "join-results"),
        (long long)call->cut->count, place, (long long)call->batch.rows,
        (long long)call->cut->slices[0].length);
    Py_DECREF(place);
    return oomkit_split_alone(call);
}

/* What must hold at the end of a micro-batch. 0 or -1. */
static int
attempt_micro_end(oomkit_call *call, PyObject *result)
{
    const oomkit_slice *slice = &call->cut->slices[call->cut->at];

    if (call->options->backward != NULL && !oomkit_call_is_replay(call)) {
        if (oomkit_backward_run(call, result) < 0) {
            return -1;
        }
    } else if (oomkit_tell_micro_returns(call, result) < 0) {
        return -1;
    }
    if (oomkit_tell_micro_ends(call, result) < 0) {
        return -1;
    }
    if (!call->split || oomkit_call_is_replay(call) ||
        (call->proof != NULL && call->cut->count == 1)) {
        return 0;
    }
    if (call->cut->at == 0 && call->options->join == NULL && call->training &&
        attempt_of_whole(call, result) < 0) {
        return -1;
    }
    return oomkit_join_add(call->st, call->options, &call->cut->join, result,
                           slice->length, call->cut->weights[call->cut->at]);
}

int
oomkit_attempt_only_results(const oomkit_call *call)
{
    return !call->training && !call->parts_moved && !oomkit_update_begun(call) &&
           call->cut->sequence[0].count == 0 && !oomkit_scaler_marked(call) &&
           !oomkit_update_is_final(call) && call->options->weight == NULL &&
           !oomkit_loss_is_returned(call) && !oomkit_call_is_replay(call);
}

PyObject *
oomkit_attempt_function(oomkit_call *call, PyObject *const *vector)
{
    PyObject *result = NULL; /* owned */
    int entered = 0;

    call->tries.by_step = 0;
    if (oomkit_activations_enter(call, &entered) < 0 || oomkit_compiler_on(call) < 0) {
        oomkit_activations_leave(call, entered);
        return NULL;
    }
    call->running = 1;
    result = PyObject_Vectorcall(call->given.func, vector,
                                 (size_t)call->batch.positional, call->given.kwnames);
    call->running = 0;
    oomkit_activations_leave(call, entered);
    call->tries.by_step = result == NULL;
    if (oomkit_compiler_off(call) < 0) {
        Py_CLEAR(result);
    }
    return result;
}

/* Runs one slice; *whole gets the result (owned) when it is the only one. 0 or -1. */
static int
attempt_slice(oomkit_call *call, PyObject **vector, PyObject **whole)
{
    const oomkit_slice *slice = &call->cut->slices[call->cut->at];
    PyObject *result; /* owned */
    int status;

    if (call->cut->at > 0 && oomkit_attempt_only_results(call) &&
        oomkit_savepoint_compare(call) < 0) {
        return -1;
    }
    if ((call->split || oomkit_call_is_replay(call)) &&
        (oomkit_flags_restore(call) < 0 || oomkit_owners_again(call) < 0)) {
        return -1;
    }
    if (oomkit_tell_micro_begins(call) < 0) {
        return -1;
    }
    call->is_last = call->cut->at == call->cut->count - 1;
    call->backward.done = 0;
    oomkit_accelerate_micro_begins(call);
    if (oomkit_batch_build(call->st, call->options, &call->batch, slice->start,
                           slice->length, vector) < 0) {
        return -1;
    }
    result = oomkit_attempt_function(call, vector);
    oomkit_tell_micro_left(call);
    /* Slices of the batch go before anything else: they may be copies. */
    vector_clear(vector, call->batch.total);
    if (result == NULL || call->tries.restart) {
        Py_XDECREF(result); /* the step caught what was to end it */
        return -1;
    }
    if (call->split && call->refused.raised) {
        Py_DECREF(result);
        oomkit_raise(
            call->st->SplitError,
            "auto_batch cannot split this step: the step caught the error of oomkit "
            "that says why. Do not catch oomkit's errors in the step" SEE(
                "let-errors-pass"));
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

/* The same, measured. */
static int
attempt_micro(oomkit_call *call, PyObject **vector, PyObject **whole)
{
    int status;

    oomkit_phase_micro_begin(call);
    status = attempt_slice(call, vector, whole);
    oomkit_phase_micro_end(call, status == 0);
    return status;
}

/* The leaves that gradients are wanted of: parameters, and tensors of the batch. New
 * list or NULL. */
static PyObject *
join_sources(oomkit_call *call)
{
    Py_ssize_t i, n = call->parts->param_count;
    PyObject *sources = PyList_New(0); /* owned */

    for (i = 0; sources != NULL && i < n + call->batch.count; i++) {
        oomkit_tensor_facts facts;
        PyObject *tensor; /* borrowed from the participants or the batch */
        if (i >= n && call->batch.nodes[i - n].kind != OOMKIT_NODE_TENSOR) {
            continue;
        }
        tensor = i < n ? call->parts->params[i] : call->batch.nodes[i - n].object;
        if (oomkit_tensor_facts_get(call->st, tensor, 0, &facts) < 0 ||
            (facts.requires_grad && PyList_Append(sources, tensor) < 0)) {
            Py_CLEAR(sources);
        }
    }
    return sources;
}

/* The result of the whole batch. New reference or NULL. */
PyObject *
oomkit_attempt_join(oomkit_call *call)
{
    oomkit_join *join = &call->cut->join;
    oomkit_memo *updated OOMKIT_AT_END(oomkit_memo_drop) = NULL;
    PyObject *result; /* owned */

    call->tries.joining = oomkit_attempt_only_results(call);
    if (call->tries.joining && oomkit_plain_begin_part(call) < 0) {
        return NULL;
    }
    oomkit_join_is_of(
        join, (oomkit_join_of){
                  /* Without a graph a call that trains looks like an evaluation. */
                  .evaluation = call->tries.joining && !oomkit_call_is_verified(call),
                  .parked = call->training && !oomkit_loss_is_returned(call),
                  .one_loss = oomkit_loss_is_eager(call),
                  .rows_sure = oomkit_batch_rows_sure(&call->batch),
                  .proving = call->proof != NULL});
    if (oomkit_join_wants_sources(join) && call->options->join == NULL) {
        PyObject *sources = join_sources(call); /* owned, then by join */
        oomkit_join_sources(join, sources);
        if (sources == NULL) {
            return NULL;
        }
    }
    if (oomkit_tell_before_join(call) < 0 || oomkit_updated(call, &updated) < 0) {
        return NULL;
    }
    oomkit_join_updated(join, oomkit_memo_hold(updated));
    result = oomkit_join_finish(call->st, call->options, join);
    if (result == NULL && PyErr_ExceptionMatches(call->st->SplitError)) {
        call->refused.raised = 1; /* no size of micro-batch would change that */
        (void)oomkit_split_alone(call);
    }
    call->tries.joining &= result == NULL;
    return result;
}

int
oomkit_attempt_marks(oomkit_call *call)
{
    return oomkit_params_sample(call) < 0 || oomkit_param_slots_note(call) < 0 ||
                   oomkit_owners_epochs_note(call) < 0 ||
                   oomkit_param_copies_take(call) < 0
               ? -1
               : 0;
}

int
oomkit_attempt_slices_run(oomkit_call *call, PyObject **result)
{
    PyObject **vector;
    int status = 0;

    /* of an attempt before */
    call->tries.by_step = call->tries.run_failed = call->tries.parked = 0;
    if ((call->split || call->proof != NULL) &&
        (oomkit_intercept_split(call) < 0 || oomkit_attempt_marks(call) < 0)) {
        return -1;
    }
    if (oomkit_tell_attempt_begins(call) < 0) {
        return -1;
    }
    vector = PyMem_Calloc((size_t)call->batch.total + 1, sizeof(PyObject *));
    if (vector == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (; status == 0 && call->cut->at < call->cut->count; call->cut->at++) {
        status = call->cut->at > 0 ? oomkit_refuse_graphs(call) : 0;
        status = status < 0 ? -1 : attempt_micro(call, vector, result);
        if (status < 0) {
            vector_clear(vector, call->batch.total);
            break; /* the one that failed is the one that slice_index says */
        }
    }
    PyMem_Free(vector);
    return status;
}

/* Runs the slices from `slice_index` on. New reference, or NULL with an exception. */
PyObject *
oomkit_attempt_run(oomkit_call *call)
{
    PyObject *result = NULL; /* owned */

    if (call->tries.joining) { /* all parts are there: see recover_join() */
        return oomkit_attempt_join(call);
    }
    if (oomkit_intercept_schedulers(call) < 0 ||
        (call->tries.ooms > 0 && oomkit_forwards_watch(call) < 0) ||
        oomkit_tell_before_attempt(call) < 0 ||
        oomkit_attempt_slices_run(call, &result) < 0) {
        return NULL;
    }
    call->cut->at = call->cut->count - 1;
    if (oomkit_ranks_returned(call) < 0) {
        Py_CLEAR(result);
        return NULL;
    }
    if (oomkit_call_is_replay(call)) {
        Py_XSETREF(result, Py_NewRef(Py_None)); /* the caller has the results already */
    } else if (call->split) {
        result = oomkit_attempt_join(call);
    }
    return result;
}
