/* verify=: is a micro-batch's loss what its own halves make of it? The function is run
 * on the largest slice that fitted and on the two halves of it, with backwards withheld
 * and updates held back, and everything is put back after each run. What is seen is
 * judged by oomkit._diagnose. */
#include "errors.h"
#include "gradients.h"
#include "plain_state.h"
#include "step.h"
#include "tree.h"

typedef struct verify {
    oomkit_call *call;
    struct oomkit_plain *plain; /* owned: the call's own marks, which the second half */
    oomkit_rng rng;             /* of a returned loss may need: owned likewise */
    oomkit_buffers buffers;     /* owned likewise */
    uint32_t *param_versions;   /* owned likewise */
    PyObject *switches;         /* owned likewise */
    oomkit_returned returned;
    PyObject **gradients; /* owned: parameters' gradients while it runs */
    uint8_t *moving;      /* owned: parts->moving as it was */
    int64_t start, length, half;
    int moved; /* random streams moved in the first run */
    int norm;  /* batch statistics are in use */
} verify;

int
oomkit_verify_wanted(const oomkit_call *call)
{
    const oomkit_options *options = call->options;

    if (call->step->losses.verified || !call->split || options->verify == 0 ||
        call->returned == OOMKIT_RETURNED_DEFERRED) {
        return 0;
    }
    if (options->verify == 1) {
        return 1;
    }
    return options->weight == NULL && options->rng != OOMKIT_RNG_NONE &&
           (options->backward != NULL || call->losses.counts_items ||
            call->returned == OOMKIT_RETURNED_STASH);
}

/* The largest slice and its halves: 1, or 0 when it is too small to be halved. */
static int
verify_choose(verify *v)
{
    const oomkit_call *call = v->call;
    int64_t i, multiple = call->options->multiple_of;

    for (i = 0; i < call->slice_count; i++) {
        if (call->slices[i].length > v->length) {
            v->start = call->slices[i].start;
            v->length = call->slices[i].length;
            v->call->slice_index = i;
        }
    }
    v->half = (v->length + 1) / 2;
    v->half = (v->half + multiple - 1) / multiple * multiple;
    return v->half < v->length;
}

/* Has the step changed a leaf of the batch in place? Then it cannot run again. */
static int
verify_batch_moved(const oomkit_call *call)
{
    Py_ssize_t i;

    for (i = 0; i < call->batch.count; i++) {
        int moved = oomkit_node_moved(call->st, &call->batch.nodes[i]);
        if (moved != 0) {
            return moved;
        }
    }
    return 0;
}

/* Gradients are taken out, so that nothing the function does to them counts. */
static int
verify_hide_gradients(verify *v)
{
    Py_ssize_t i;

    v->gradients = grads_array(v->call);
    if (v->gradients == NULL) {
        return -1;
    }
    for (i = 0; i < v->call->parts->param_count; i++) {
        v->gradients[i] = grads_get(v->call, i);
        if (v->gradients[i] == NULL ||
            (v->gradients[i] != Py_None && grads_set(v->call, i, Py_None) < 0)) {
            return -1;
        }
    }
    return 0;
}

static void
verify_show_gradients(verify *v)
{
    Py_ssize_t i;

    for (i = 0; v->gradients != NULL && i < v->call->parts->param_count; i++) {
        if (v->gradients[i] != NULL && grads_set(v->call, i, v->gradients[i]) < 0) {
            PyErr_WriteUnraisable(v->call->parts->params[i]);
        }
    }
    grads_array_free(v->call, &v->gradients);
}

/* Every buffer counts as moving, so that all are copied and can be put back. */
static int
verify_copy_buffers(verify *v)
{
    oomkit_participants *parts = v->call->parts;

    if (parts->moving_count == 0) {
        return 0;
    }
    v->moving = PyMem_Malloc((size_t)parts->moving_count);
    if (v->moving == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(v->moving, parts->moving, (size_t)parts->moving_count);
    memset(parts->moving, 1, (size_t)parts->moving_count);
    return 0;
}

static void
verify_forget_buffers(verify *v)
{
    oomkit_participants *parts = v->call->parts;
    Py_ssize_t i;

    for (i = 0; v->moving != NULL && i < parts->moving_count; i++) {
        parts->moving[i] = v->moving[i];
        if (!parts->moving[i]) {
            Py_CLEAR(parts->copies[i]);
        }
    }
    PyMem_Free(v->moving);
}

/* One run of the function on rows start .. start + length; what it shows goes to the
 * verification. 0 or -1. */
static int
verify_call(verify *v, int64_t start, int64_t length)
{
    oomkit_call *call = v->call;
    Py_ssize_t i;
    PyObject *result = NULL, *loss = NULL, *done = NULL; /* owned */
    PyObject **vector = PyMem_Calloc((size_t)call->batch.total + 1, sizeof(PyObject *));

    if (vector == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (oomkit_batch_build(call->st, call->options, &call->batch, start, length,
                           vector) == 0 &&
        oomkit_compiler_on(call) == 0) {
        call->running = 1;
        result = PyObject_Vectorcall(call->func, vector, (size_t)call->batch.positional,
                                     call->kwnames);
        call->running = 0;
        if (oomkit_compiler_off(call) < 0) {
            Py_CLEAR(result);
        }
    }
    for (i = 0; i < call->batch.total; i++) {
        Py_CLEAR(vector[i]);
    }
    PyMem_Free(vector);
    if (result != NULL &&
        (call->options->backward == NULL || oomkit_backward_run(call, result) == 0)) {
        loss = oomkit_result_loss(call->st, result);
        done =
            PyErr_Occurred()
                ? NULL
                : PyObject_CallMethod(call->losses.verification, "finish", "OOL",
                                      result, loss ? loss : Py_None, (long long)length);
    }
    Py_XDECREF(loss);
    Py_XDECREF(result);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Everything as before the run. Keeps the exception in flight; 0, or -1 when something
 * cannot be put back, which is said. */
static int
verify_put_back(verify *v)
{
    oomkit_call *call = v->call;
    PyObject *exception =
        PyErr_Occurred() ? oomkit_exception_take() : NULL; /* owned, given back */
    PyObject *message = NULL;                              /* owned */
    int result = oomkit_take_back(call, &message);

    if (result == 1) {
        PyObject *done = /* owned */
            PyObject_CallMethod(call->st->log, "warning", "sOO",
                                "oomkit: the verification of %s left a change: %s",
                                call->options->label, message);
        Py_XDECREF(done);
    }
    Py_XDECREF(message);
    if (PyErr_Occurred()) {
        PyErr_WriteUnraisable(call->func);
    }
    if (exception != NULL) {
        oomkit_exception_give(exception);
    } else if (result != 0) {
        PyErr_SetString(PyExc_RuntimeError, "its state could not be put back");
    }
    return result == 0 ? 0 : -1;
}

/* A run with its marks. 0 or -1. */
static int
verify_run(verify *v, int64_t start, int64_t length)
{
    oomkit_call *call = v->call;
    int result;

    oomkit_tx_end_attempt(call);
    if (oomkit_tx_begin(call) < 0) {
        oomkit_tx_end_attempt(call);
        return -1;
    }
    call->is_last = 0;
    Py_CLEAR(call->cleared);
    result = verify_call(v, start, length);
    if (result == 0 && length == v->length) {
        v->moved = oomkit_rng_moved(call);
        result = v->moved < 0 ? -1 : 0;
    }
    if (call->queued) {
        PyObject *exception = oomkit_exception_take(); /* owned, given back */
        if (oomkit_backward_drain(call->st) < 0) {
            PyErr_WriteUnraisable(call->func);
        }
        if (exception != NULL) {
            oomkit_exception_give(exception);
        }
    }
    if (verify_put_back(v) < 0) {
        result = -1;
    }
    oomkit_tx_end_attempt(call);
    return result;
}

/* What a part weighs: its rows, or the numbers of weight=. New list or NULL. */
static PyObject *
verify_weights(verify *v, int64_t start, int64_t length)
{
    Py_ssize_t groups = 0, i;
    PyObject *list; /* owned */
    double *values;

    if (v->call->options->weight == NULL) {
        return Py_BuildValue("[d]", (double)length);
    }
    values = oomkit_weights_ask(v->call, start, length, &groups);
    if (values == NULL) {
        return NULL;
    }
    groups = groups > 0 ? groups : 1;
    list = PyList_New(0);
    for (i = 0; list != NULL && i < groups; i++) {
        PyObject *value = PyFloat_FromDouble(values[i]); /* owned */
        if (value == NULL || PyList_Append(list, value) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(value);
    }
    PyMem_Free(values);
    return list;
}

/* The three runs, and what they tell: (equal, text) or None. New reference or NULL. */
static PyObject *
verify_runs(verify *v)
{
    oomkit_call *call = v->call;
    int64_t middle = v->start + v->half, rest = v->length - v->half;
    PyObject *one, *two = NULL, *verdict = NULL; /* owned */

    if (oomkit_intercept_install(call) < 0 || verify_run(v, v->start, v->length) < 0 ||
        verify_run(v, v->start, v->half) < 0 || verify_run(v, middle, rest) < 0) {
        return NULL;
    }
    one = verify_weights(v, v->start, v->half);
    two = one ? verify_weights(v, middle, rest) : NULL;
    if (two != NULL) {
        verdict = PyObject_CallMethod(
            call->losses.verification, "judge", "OOOOOO", call->options->label, one,
            two, call->losses.is_sum ? Py_True : Py_False,
            v->moved ? Py_True : Py_False, v->norm ? Py_True : Py_False);
    }
    Py_XDECREF(one);
    Py_XDECREF(two);
    return verdict;
}

/* The verification could not be made: a debug line. Errors that ask the program to end
 * pass. Steals `exception`. 0 or -1. */
static int
verify_abandon(oomkit_call *call, PyObject *exception)
{
    PyObject *handled, *message = NULL, *location = NULL, *done; /* owned */
    uint64_t requested;

    if (!PyObject_TypeCheck(exception, (PyTypeObject *)PyExc_Exception)) {
        oomkit_exception_give(exception);
        return -1;
    }
    oomkit_exception_describe(call->st, exception, &requested, &message, &location);
    handled = PyErr_GetHandledException();
    oomkit_exception_drop(call->st, exception, handled);
    Py_XDECREF(handled);
    done = PyObject_CallMethod(call->st->log, "debug", "sOO",
                               "oomkit: %s was not verified: %s", call->options->label,
                               message ? message : Py_None);
    Py_XDECREF(message);
    Py_XDECREF(location);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Steals `verdict`. 0 or -1. */
static int
verify_say(oomkit_call *call, PyObject *verdict)
{
    PyObject *equal, *text, *done; /* borrowed from verdict; owned */
    int result = 0;

    if (verdict == Py_None) {
        Py_DECREF(verdict);
        return 0; /* there was nothing to compare */
    }
    if (PyArg_ParseTuple(verdict, "OU", &equal, &text)) {
        if (equal == Py_True || (equal == Py_None && call->options->verify != 1)) {
            done = PyObject_CallMethod(call->st->log, "info", "sO", "oomkit: %s", text);
            result = done == NULL ? -1 : 0;
            Py_XDECREF(done);
        } else {
            result = oomkit_warn(call->st->OomkitWarning, 1, "oomkit: %U", text);
        }
    } else {
        result = -1;
    }
    Py_DECREF(verdict);
    return result;
}

/* The marks of the finished call are set aside, and brought back. */
static void
verify_set_aside(verify *v)
{
    oomkit_call *call = v->call;

    v->returned = call->returned;
    v->plain = oomkit_plain_take(call);
    v->rng = call->rng;
    v->buffers = call->buffers;
    v->param_versions = call->param_versions;
    v->switches = call->switches;
    call->switches = NULL; /* the runs begin as the call ended */
    memset(&call->rng, 0, sizeof(call->rng));
    memset(&call->buffers, 0, sizeof(call->buffers));
    call->param_versions = NULL;
    call->grads.stashing = 0; /* the stash is no business of the runs */
}

static void
verify_bring_back(verify *v)
{
    oomkit_call *call = v->call;

    call->returned = v->returned;
    oomkit_rng_release(call);
    oomkit_buffers_release(call);
    PyMem_Free(call->param_versions);
    oomkit_plain_put(call, v->plain);
    call->rng = v->rng;
    call->buffers = v->buffers;
    call->param_versions = v->param_versions;
    Py_XSETREF(call->switches, v->switches);
}

int
oomkit_verify(oomkit_call *call)
{
    verify v = {.call = call};
    PyObject *verdict = NULL, *exception; /* owned */
    int moved, phase;

    if (!oomkit_verify_wanted(call) || !verify_choose(&v)) {
        return 0;
    }
    call->step->losses.verified = 1;
    moved = verify_batch_moved(call);
    if (moved != 0) {
        return moved < 0 ? -1 : 0;
    }
    call->losses.verification = PyObject_CallNoArgs(call->st->verification);
    if (call->losses.verification == NULL) {
        return -1;
    }
    v.norm = oomkit_buffers_norm_training(call);
    verify_set_aside(&v);
    oomkit_call_set_current(call);
    phase = oomkit_phase_set(call->st, OOMKIT_PHASE_RECOVERY);
    if (v.norm >= 0 && verify_copy_buffers(&v) == 0 && verify_hide_gradients(&v) == 0) {
        verdict = verify_runs(&v);
    }
    exception = verdict == NULL ? oomkit_exception_take() : NULL;
    verify_forget_buffers(&v);
    verify_show_gradients(&v);
    oomkit_intercept_remove(call);
    oomkit_phase_set(call->st, phase);
    oomkit_call_set_current(NULL);
    verify_bring_back(&v);
    Py_CLEAR(call->losses.verification);
    moved =
        verdict == NULL ? verify_abandon(call, exception) : verify_say(call, verdict);
    return moved < 0 ? -1 : 1;
}

PyObject *
oomkit_verify_backward(oomkit_call *call, PyObject *roots)
{
    PyObject *done = /* owned */
        PyObject_CallMethod(call->losses.verification, "root", "O", roots);
    if (done == NULL) {
        return NULL;
    }
    Py_DECREF(done);
    call->training = 1;
    call->backwards++;
    Py_RETURN_NONE;
}
