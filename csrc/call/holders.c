/* Who holds the memory: at a failure, before anything of the attempt is dropped, and of
 * what was there before the step. */
#include "call.h"
#include "../py/tensor.h"

/* Adds the bytes of a tensor that lies on the device of the call. */
static void
held_add(oomkit_call *call, PyObject *object, uint64_t *bytes, uint64_t *outside)
{
    oomkit_state *st = call->st;
    oomkit_tensor_facts facts;

    if (!oomkit_tensor_check(st, object)) {
        return;
    }
    if (oomkit_tensor_facts_get(st, object, 0, &facts) < 0) {
        oomkit_error_dismiss(); /* a report that lacks one tensor is better */
        return;
    }
    if (facts.device_type != call->device.type ||
        (facts.device_type != OOMKIT_DEVICE_CPU &&
         facts.device_index != call->device.index)) {
        return;
    }
    if (facts.device_type == OOMKIT_DEVICE_CPU &&
        st->bridge->cpu_counted(object, st->impl_offset) == 0) {
        *outside += facts.bytes;
    } else {
        *bytes += facts.bytes;
    }
}

/* Bytes of the state of all optimizers. */
static uint64_t
held_state(oomkit_call *call, uint64_t *outside)
{
    oomkit_state *st = call->st;
    uint64_t bytes = 0;

    EACH_OWNER (optimizer, call->parts, OWNERS_OF(OOMKIT_OWNER_OPTIMIZER)) {
        OWNED PyObject *state = PyObject_GetAttr(optimizer.object, st->str_state);
        PyObject *param, *values, *key, *value; /* borrowed */
        Py_ssize_t at = 0, in;
        while (state && PyDict_Check(state) &&
               PyDict_Next(state, &at, &param, &values)) {
            in = 0;
            while (PyDict_Check(values) && PyDict_Next(values, &in, &key, &value)) {
                held_add(call, value, &bytes, outside);
            }
        }
        if (state == NULL) {
            oomkit_error_dismiss(); /* as above */
        }
    }
    return bytes;
}

/* Parameters and their gradients, those that are out of sight included. */
static void
held_params(oomkit_call *call, PyObject *const *parked, oomkit_holding *held)
{
    Py_ssize_t i;

    for (i = 0; i < call->parts->param_count; i++) {
        PyObject *param = call->parts->params[i]; /* borrowed */
        OWNED PyObject *gradient = PyObject_GetAttr(param, call->st->str_grad);
        if (gradient == NULL) {
            oomkit_error_dismiss(); /* as above */
        }
        held_add(call, param, &held->params, &held->outside);
        if (gradient != NULL) {
            held_add(call, gradient, &held->gradients, &held->outside);
        }
        if (parked != NULL && parked[i] != NULL && parked[i] != gradient) {
            held_add(call, parked[i], &held->gradients, &held->outside);
        }
    }
}

/* What the message says was allocated, where that is more than is now: temporaries of
 * the frames are gone already. */
static void
figures_said(oomkit_attempt *attempt)
{
    Py_ssize_t length = 0;
    const char *text = attempt->message == NULL
                           ? NULL
                           : PyUnicode_AsUTF8AndSize(attempt->message, &length);
    uint64_t said;

    if (text == NULL) {
        oomkit_error_dismiss(); /* the figure is a hint */
    } else if (oomkit_classify_allocated(text, (size_t)length, &said) &&
               (attempt->allocated_bytes == OOMKIT_UNKNOWN ||
                said > attempt->allocated_bytes)) {
        attempt->allocated_bytes = said;
    }
}

void
oomkit_holders_note(oomkit_call *call, PyObject *const *parked, oomkit_attempt *attempt)
{
    oomkit_memory_stats stats;
    uint64_t held;

    oomkit_device_held(call->st, call->device, &attempt->allocated_bytes,
                       &attempt->reserved_bytes);
    if (oomkit_device_figures(call->st, call->device, &stats, &attempt->budget_bytes) <
        0) {
        oomkit_error_dismiss(); /* a figure less */
        stats.free = attempt->budget_bytes = OOMKIT_UNKNOWN;
    }
    figures_said(attempt);
    held = attempt->reserved_bytes == OOMKIT_UNKNOWN ? attempt->allocated_bytes
                                                     : attempt->reserved_bytes;
    attempt->free_bytes =
        attempt->budget_bytes == OOMKIT_UNKNOWN || held == OOMKIT_UNKNOWN ? stats.free
        : held < attempt->budget_bytes ? attempt->budget_bytes - held
                                       : 0;
    held_params(call, parked, &attempt->held);
    attempt->held.state = attempt->phase == OOMKIT_PHASE_OPTIMIZER
                              ? held_state(call, &attempt->held.outside)
                              : OOMKIT_UNKNOWN; /* as it was before, and will be */
}

static int
holders_set(PyObject *holders, const char *kind, uint64_t bytes)
{
    OWNED PyObject *number = PyLong_FromUnsignedLongLong(bytes);
    return number == NULL ? -1 : PyDict_SetItemString(holders, kind, number);
}

/* The rest of what was allocated: of the attempt, and of others before it. What is
 * there now, after everything of the attempt is gone, tells them apart. 0 or -1. */
static int
holders_rest(oomkit_call *call, PyObject *holders, uint64_t allocated, uint64_t known)
{
    const uint64_t now = oomkit_device_allocated(call->st, call->device);
    oomkit_holding left = {0};
    uint64_t others, mine;

    if (allocated == OOMKIT_UNKNOWN) {
        return 0;
    }
    held_params(call, NULL, &left);
    mine = left.params + left.gradients + held_state(call, &left.outside);
    others = now != OOMKIT_UNKNOWN && now > mine ? now - mine : 0;
    mine = known + others;
    return holders_set(holders, "activations and temporaries",
                       allocated > mine ? allocated - mine : 0) < 0 ||
                   holders_set(holders, "everything else", others) < 0
               ? -1
               : 0;
}

PyObject *
oomkit_holders(oomkit_call *call)
{
    OWNED PyObject *holders = PyDict_New();
    oomkit_attempt *last =
        call->tries.count == 0 ? NULL : &call->tries.items[call->tries.count - 1];

    if (holders == NULL || last == NULL) {
        return STEAL(holders);
    }
    if (last->held.state == OOMKIT_UNKNOWN) {
        last->held.state = held_state(call, &last->held.outside);
    }
    if (holders_set(holders, "parameters", last->held.params) < 0 ||
        holders_set(holders, "gradients", last->held.gradients) < 0 ||
        holders_set(holders, "optimizer state", last->held.state) < 0 ||
        holders_rest(call, holders, last->allocated_bytes,
                     last->held.params + last->held.gradients + last->held.state) < 0) {
        return NULL;
    }
    return STEAL(holders);
}
