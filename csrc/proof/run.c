/* One run of a proof: begin, the micro-batches of the cut, what was seen, everything
 * back. Between the runs the call's own attempt has not begun. */
#include "proof.h"
#include "../accum/accum.h"
#include "../batch/batch.h"
#include "../call/step.h"
#include "../device/device.h"
#include "../ladder/activations.h"
#include "../plain/alike.h"
#include "../py/tensor.h"
#include "../result/result.h"
#include "../undo/gradients.h"
#include "../undo/undo.h"

/* Every buffer counts as moving, so that all are copied and can be put back. 0 or -1.
 */
static int
aside_buffers(oomkit_proof *p)
{
    oomkit_participants *parts = p->call->parts;

    if (parts->moving_count == 0) {
        return 0;
    }
    p->moving = PyMem_Malloc((size_t)parts->moving_count);
    if (p->moving == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    p->moving_count = parts->moving_count;
    memcpy(p->moving, parts->moving, (size_t)parts->moving_count);
    memset(parts->moving, OOMKIT_BUFFER_MOVES, (size_t)parts->moving_count);
    return 0;
}

/* A step may change its batch in place: each micro-batch its own rows, once. 0 or -1.
 */
static int
aside_batch(oomkit_proof *p)
{
    p->saved = p->call->batch.saved == NULL;
    return oomkit_batch_save(p->call->st, &p->call->batch);
}

int
oomkit_proof_aside(oomkit_proof *p)
{
    oomkit_call *call = p->call;

    oomkit_savepoint_end_attempt(call);
    p->own_options = call->options;
    p->options = *call->options;
    if (p->options.rng == OOMKIT_RNG_NONE) {
        p->options.rng = OOMKIT_RNG_TORCH; /* the proof must draw nothing from it */
    }
    call->options = &p->options;
    p->grads = call->grads;
    memset(&call->grads, 0, sizeof(call->grads));
    oomkit_cut_aside(call, &p->cut);
    p->flags = oomkit_flags_take(call);
    oomkit_join_aside(&call->cut->join, &p->join);
    call->batch.views = 1; /* a leaf that the step makes of it is another one then */
    call->proof = p;
    oomkit_weights_on_trial(call, &p->rule);
    return oomkit_proof_gradients_take(p) < 0 || aside_buffers(p) < 0 ||
                   aside_batch(p) < 0
               ? -1
               : 0;
}

static void
back_buffers(oomkit_proof *p)
{
    oomkit_participants *parts = p->call->parts;
    Py_ssize_t i;

    for (i = 0; p->moving != NULL && i < p->moving_count; i++) {
        parts->moving[i] = p->moving[i];
        if (parts->moving[i] == OOMKIT_BUFFER_RESTS) {
            Py_CLEAR(parts->copies[i]);
        }
    }
    parts->buffers_serial += p->moving != NULL; /* copies of calls that wait are gone */
    PyMem_Free(p->moving);
    p->moving = NULL;
}

int
oomkit_proof_back(oomkit_proof *p)
{
    oomkit_call *call = p->call;
    PyObject *exception =
        PyErr_Occurred() ? oomkit_exception_take() : NULL; /* owned, given back */
    int result = 0;

    call->proof = NULL;
    oomkit_weights_on_trial(call, NULL);
    call->batch.views = 0;
    if (p->saved) {
        Py_CLEAR(call->batch.saved);
    }
    oomkit_join_back(&call->cut->join, &p->join);
    oomkit_proof_gradients_free(p);
    back_buffers(p);
    call->grads = p->grads;
    oomkit_cut_back(call, &p->cut);
    call->options = p->own_options;
    oomkit_flags_put(call, p->flags);
    if (call->tries.restart == 0) { /* else there are other participants to be marked */
        result = oomkit_savepoint_take(call);
    }
    if (exception != NULL) {
        if (result < 0) {
            oomkit_error_beside(call->st, call->given.func);
        }
        oomkit_exception_give(exception);
    }
    return result;
}

/* Without code of Python: where there is no
 * memory for any, values of keys that are there can still be set. */
void
oomkit_proof_loud(oomkit_proof *p)
{
    Py_ssize_t i = p->quieted == NULL ? 0 : PyList_GET_SIZE(p->quieted);

    while (i-- > 0) {
        PyObject *item = PyList_GET_ITEM(p->quieted, i); /* borrowed */
        PyObject *own = PyTuple_GET_ITEM(item, 0);       /* borrowed */
        PyObject *name = PyTuple_GET_ITEM(item, 1);      /* borrowed */
        if ((PyTuple_GET_SIZE(item) > 2
                 ? PyDict_SetItem(own, name, PyTuple_GET_ITEM(item, 2))
                 : PyDict_DelItem(own, name)) == 0) {
            continue;
        }
        if (PyErr_ExceptionMatches(PyExc_KeyError)) {
            PyErr_Clear(); /* it was not set, or somebody has taken it out */
        } else {
            oomkit_error_unraised(p->call->given.func);
        }
    }
    Py_CLEAR(p->quieted);
}

int
oomkit_proof_ask(const oomkit_proof *p, PyObject *object, const char *method)
{
    PyObject *exception =
        PyErr_Occurred() ? oomkit_exception_take() : NULL; /* owned, given back */
    OWNED PyObject *done = NULL;

    EXEMPT (p->call->st) {
        done = PyObject_CallMethod(object, method, NULL);
    }
    if (exception != NULL) {
        if (done == NULL) {
            oomkit_error_unraised(p->call->given.func);
        }
        oomkit_exception_give(exception);
    }
    return done == NULL ? -1 : 0;
}

/* Gradients, and tensors that nothing has marked. */
static int
put_back_written(void *argument)
{
    oomkit_proof *p = argument;

    return oomkit_proof_ask(p, p->around, "put_back") < 0
               ? -1
               : oomkit_proof_gradients_back(p);
}

/* Everything else; `failed`: an error of theirs is in flight, and is the
 * one to see. As oomkit_take_back(). */
static int
put_back_rest(oomkit_call *call, PyObject **message, int failed)
{
    PyObject *exception = failed ? oomkit_exception_take() : NULL; /* owned */
    int result = oomkit_take_back(call, message);

    if (exception == NULL) {
        return result;
    }
    if (result < 0) {
        oomkit_error_unraised(call->given.func);
    }
    oomkit_exception_give(exception);
    return *message != NULL ? 1 : -1;
}

int
oomkit_proof_put_back(oomkit_proof *p)
{
    oomkit_call *call = p->call;
    PyObject *exception =
        PyErr_Occurred() ? oomkit_exception_take() : NULL; /* owned, given back */
    OWNED PyObject *message = NULL;
    int raised = call->refused.raised, queued = call->backward.queued;
    PyObject *error; /* owned, given back */
    int result;

    if (exception != NULL && oomkit_modes_entry_back(call) < 0) {
        oomkit_error_unraised(call->given.func); /* the first one tells more */
    }
    if (exception != NULL) {
        oomkit_holders_of_run(call, oomkit_grads_parked_ones(call));
        call->tries.parked = oomkit_grads_parked(call);
    }
    oomkit_grads_end_attempt(call);
    oomkit_grads_release(call);
    memset(&call->grads, 0, sizeof(call->grads));
    result = oomkit_insist(call->st, put_back_written, p, &error);
    if (error != NULL) {
        oomkit_exception_give(error);
    }
    result = put_back_rest(call, &message, result < 0 || error != NULL);
    /* Every flag is as at entry. The next run may begin with others: modules that were
     * put into eval mode for it stay there. */
    Py_XDECREF(oomkit_flags_take(call));
    if (result == 1 && PyErr_Occurred()) {
        oomkit_error_unraised(call->given.func); /* what stays changed is told */
    }
    if (result == 1) {
        oomkit_raise(call->st->PartialUpdate,
                     "auto_batch ran %U once more to verify its split, and could not "
                     "undo what that run changed: %U. Pass verify=False to auto_batch, "
                     "or restore a checkpoint" SEE("state-not-restored"),
                     call->options->label, message);
        result = -1;
    }
    if (result == 0) {
        EXEMPT (call->st) {
            result = oomkit_batch_check(call->st, &call->batch, call->step->names);
        }
    }
    if (result == 0 && queued) {
        result = oomkit_backward_drain(call->st);
    }
    oomkit_savepoint_end_attempt(call);
    call->refused.raised = raised; /* of an error that is to pass */
    if (exception == NULL) {
        return result;
    }
    if (result < 0) {
        Py_DECREF(exception); /* what cannot be put back matters more */
        return -1;
    }
    oomkit_exception_give(exception);
    return 0;
}

/* The bytes of torch's CPU generator do not tell: a checkpoint that puts its state back
 * writes some that are never set. */
int
oomkit_proof_drew(oomkit_proof *p)
{
    int moved = oomkit_rng_moved(p->call);
    OWNED PyObject *drew = NULL;

    if (moved <= 0) {
        return moved;
    }
    moved = oomkit_rng_moved_beside(p->call);
    if (moved != 0) {
        return moved;
    }
    EXEMPT (p->call->st) {
        drew = PyObject_CallMethod(p->draws, "drew", NULL);
    }
    return drew == NULL ? -1 : drew == Py_True;
}

/* Is what the graphs of this run keep to be in host memory? Parts fit as they are. */
static int
run_leaves_device(const oomkit_proof *p, int64_t count)
{
    return p->on_host == OOMKIT_ALL_ON_HOST || (p->on_host && count == 1);
}

/* What the graphs of this run keep goes to host memory from now on. 0 or -1. */
static int
run_on_host(oomkit_proof *p, int64_t count)
{
    if (!run_leaves_device(p, count) || p->call->device.type == OOMKIT_DEVICE_CPU ||
        oomkit_activations_offload(p->call, 1)) {
        return 0; /* of the CPU: run_is_uncounted() */
    }
    p->around_host =
        oomkit_proof_ask(p, p->around, "on_host") == 0; /* else nothing to end */
    return p->around_host ? 0 : -1;
}

/* The end of that. An exception in flight stays. 0 or -1. */
static int
run_on_device(oomkit_proof *p)
{
    const int around = p->around_host;

    p->around_host = 0;
    (void)oomkit_activations_offload(p->call, 0);
    return around ? oomkit_proof_ask(p, p->around, "on_device") : 0;
}

/* Is the graph of a whole run kept beside what a budget of the CPU counts? Nothing is
 * outside the host's memory; each of the rows alone fits in the budget, and the host
 * has room for all of it twice. */
static int
run_is_uncounted(const oomkit_proof *p, int64_t count)
{
    const oomkit_call *call = p->call;
    uint64_t budget, spare;

    if (!run_leaves_device(p, count) || call->device.type != OOMKIT_DEVICE_CPU) {
        return 0;
    }
    budget = oomkit_device_budget(call->st, call->device);
    spare = oomkit_host_spare(call->st);
    return budget != OOMKIT_UNKNOWN && spare != OOMKIT_UNKNOWN && budget <= spare / 2;
}

static int
draws_enter(oomkit_proof *p)
{
    OWNED PyObject *streams = NULL, *done = NULL;

    if (p->numbers != OOMKIT_NUMBERS_SAME) {
        return 0;
    }
    streams = oomkit_rng_streams(p->call);
    EXEMPT (p->call->st) {
        done = streams == NULL ? NULL
                               : PyObject_CallMethod(p->draws, "enter", "O", streams);
    }
    return done == NULL ? -1 : 0;
}

static int
draws_leave(oomkit_proof *p)
{
    return p->numbers == OOMKIT_NUMBERS_SAME ? oomkit_proof_ask(p, p->draws, "leave")
                                             : 0;
}

/* Both may be dispatch modes, which end in turn. */
int
oomkit_proof_run_enter(oomkit_proof *p)
{
    if (draws_enter(p) < 0) {
        return -1;
    }
    if (oomkit_proof_ask(p, p->around, "enter") < 0) {
        (void)oomkit_proof_run_leave(p); /* the first error is raised */
        return -1;
    }
    return 0;
}

int
oomkit_proof_coarsely(oomkit_proof *p)
{
    return oomkit_proof_ask(p, p->judge, "coarsely");
}

int
oomkit_proof_run_leave(oomkit_proof *p)
{
    const int result = oomkit_proof_ask(p, p->around, "leave");

    return draws_leave(p) < 0 ? -1 : result;
}

/* 0 or -1. */
static int
slices_run(oomkit_proof *p, int64_t count)
{
    const int apart = run_is_uncounted(p, count);
    PyObject *result = NULL; /* owned */
    int status;

    if (apart) {
        oomkit_exempt_enter(p->call->st);
    }
    status = oomkit_attempt_slices_run(p->call, &result);
    Py_XDECREF(result);
    if (apart) {
        oomkit_exempt_leave(p->call->st);
    }
    return status;
}

/* All random streams move on, so that the run has other numbers. 0 or -1. */
static int
run_draw(oomkit_proof *p)
{
    OWNED PyObject *streams = oomkit_rng_streams(p->call);
    OWNED PyObject *done =
        streams == NULL
            ? NULL
            : PyObject_CallMethod(p->draws, "shift", "Oi", streams, p->draw);

    return done == NULL ? -1 : 0;
}

/* Micro-batches that may have other rows. 0 or -1. */
static int
run_dealt(oomkit_proof *p)
{
    OWNED PyObject *streams = NULL, *done = NULL;

    if (p->dealt == NULL) {
        return 0;
    }
    streams = oomkit_rng_streams(p->call);
    EXEMPT (p->call->st) {
        done = streams == NULL ? NULL
                               : PyObject_CallMethod(p->dealt, "begin", "O", streams);
    }
    return done == NULL ? -1 : 0;
}

/* What parts that draw random numbers leave alike in tensors and parameters may have
 * them in: parts of a proof are given what the whole draws. 0 or -1. */
static int
run_random(oomkit_proof *p, int64_t count)
{
    if (count == 1) {
        p->drew = oomkit_proof_drew(p);
        return p->drew < 0 ? -1 : 0;
    }
    if (!p->drew) {
        return 0;
    }
    Py_CLEAR(p->call->step->averaged);
    return oomkit_plain_is_random(p->call);
}

int
oomkit_proof_run(oomkit_proof *p, const char *name, const oomkit_slice *cut,
                 int64_t count, int *moved)
{
    oomkit_call *call = p->call;
    OWNED PyObject *marks = oomkit_proof_marks(call);
    OWNED PyObject *slices = oomkit_proof_slices(cut, count);
    PyObject *done = /* owned */
        marks == NULL || slices == NULL
            ? NULL
            : PyObject_CallMethod(p->judge, "start", "sOO", name, slices, marks);
    int status;

    Py_XDECREF(done);
    if (done == NULL || oomkit_cut_given(call, cut, count) < 0) {
        return -1;
    }
    call->split = !p->unsplit; /* one slice, too: held and weighed as the others */
    call->tries.by_step = 0;   /* of an attempt before */
    status = oomkit_savepoint_take(call);
    if (status == 0 && p->draw) {
        status = run_draw(p);
    }
    if (status == 0) {
        status = run_dealt(p);
    }
    if (status == 0) {
        status = run_on_host(p, count);
    }
    if (status == 0 && (status = oomkit_proof_run_enter(p)) == 0) {
        status = slices_run(p, count);
        if (oomkit_proof_run_leave(p) < 0) {
            status = -1;
        }
        if (p->dealt != NULL && oomkit_proof_ask(p, p->dealt, "leave") < 0) {
            status = -1;
        }
    }
    if (run_on_device(p) < 0) {
        status = -1;
    }
    if (status == 0) {
        call->cut->at = count - 1;
        status = oomkit_proof_finish(p);
    }
    if (status == 0 && count > 1 && p->dealt == NULL && !oomkit_call_is_replay(call)) {
        status = oomkit_proof_joined(call);
    }
    if (oomkit_join_empty(&call->cut->join) < 0) {
        status = -1;
    }
    if (status == 0 && p->sequence == 0) {
        p->sequence = oomkit_proof_sequence(call);
    }
    status = status == 0 ? run_random(p, count) : status;
    if (status == 0 && moved != NULL) {
        *moved = oomkit_proof_drew(p);
        status = *moved < 0 ? -1 : 0;
    }
    return oomkit_proof_put_back(p) < 0 ? -1 : status;
}
