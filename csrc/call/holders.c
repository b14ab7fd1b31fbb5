/* Who holds the memory: at a failure, before anything of the attempt is dropped, and of
 * what was there before the step. */
#include "call.h"
#include "step.h"
#include "../py/tensor.h"

/* What this process has of a tensor: of a sharded one (DTensor) its own shard. Owned,
 * or NULL without an exception. */
static PyObject *
held_local(oomkit_state *st, PyObject *object)
{
    PyObject *local; /* owned, returned */

    if (!oomkit_tensor_check(st, object)) {
        return NULL;
    }
    if (Py_IS_TYPE(object, (PyTypeObject *)st->Tensor)) {
        return Py_NewRef(object);
    }
    local = PyObject_GetAttrString(object, "_local_tensor");
    if (local != NULL && oomkit_tensor_check(st, local)) {
        return local;
    }
    Py_XDECREF(local);
    oomkit_error_dismiss(); /* all but those have none */
    return Py_NewRef(object);
}

/* Adds the bytes of a tensor that lies on the device. */
static void
held_add(oomkit_state *st, oomkit_device device, PyObject *object, uint64_t *bytes,
         uint64_t *outside)
{
    OWNED PyObject *local = held_local(st, object);
    oomkit_tensor_facts facts;

    if (local == NULL) {
        return;
    }
    object = local;
    if (oomkit_tensor_facts_get(st, object, 0, &facts) < 0) {
        oomkit_error_dismiss(); /* a report that lacks one tensor is better */
        return;
    }
    if (facts.device_type != device.type || (facts.device_type != OOMKIT_DEVICE_CPU &&
                                             facts.device_index != device.index)) {
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
                held_add(call->st, call->device, value, &bytes, outside);
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
        held_add(call->st, call->device, param, &held->params, &held->outside);
        if (gradient != NULL) {
            held_add(call->st, call->device, gradient, &held->gradients,
                     &held->outside);
        }
        if (parked != NULL && parked[i] != NULL && parked[i] != gradient) {
            held_add(call->st, call->device, parked[i], &held->gradients,
                     &held->outside);
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
oomkit_holders_of_run(oomkit_call *call, PyObject *const *parked)
{
    call->tries.of_run = (oomkit_holding){0};
    held_params(call, parked, &call->tries.of_run);
    call->tries.run_failed = call->cut->at > 0 ? 2 : 1;
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
    if (call->tries.run_failed) {
        attempt->held = call->tries.of_run;
        attempt->accumulated = call->tries.run_failed > 1;
        call->tries.run_failed = 0;
    } else {
        held_params(call, parked, &attempt->held);
        attempt->accumulated = call->cut->at > 0;
    }
    attempt->held.state = attempt->phase == OOMKIT_PHASE_OPTIMIZER
                              ? held_state(call, &attempt->held.outside)
                              : OOMKIT_UNKNOWN; /* as it was before, and will be */
}

/* Tensors of the batch. */
static uint64_t
held_batch(oomkit_call *call)
{
    uint64_t bytes = 0, outside = 0;
    Py_ssize_t i;

    for (i = 0; i < call->batch.count; i++) {
        if (call->batch.nodes[i].kind == OOMKIT_NODE_TENSOR) {
            held_add(call->st, call->device, call->batch.nodes[i].object, &bytes,
                     &outside);
        }
    }
    return bytes;
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
holders_rest(oomkit_call *call, PyObject *holders, uint64_t allocated, uint64_t known,
             uint64_t state)
{
    const uint64_t now = oomkit_device_allocated(call->st, call->device);
    oomkit_holding left = {0};
    uint64_t others, mine, batch;

    if (allocated == OOMKIT_UNKNOWN) {
        return 0;
    }
    held_params(call, NULL, &left);
    mine = left.params + left.gradients + state;
    others = now != OOMKIT_UNKNOWN && now > mine ? now - mine : 0;
    mine = known + others;
    batch = held_batch(call);
    batch = batch < others ? batch : others;
    return holders_set(holders, "the batch", batch) < 0 ||
                   holders_set(holders, "activations and temporaries",
                               allocated > mine ? allocated - mine : 0) < 0 ||
                   holders_set(holders, "everything else", others - batch) < 0
               ? -1
               : 0;
}

PyObject *
oomkit_holders(oomkit_call *call, oomkit_attempt *last)
{
    OWNED PyObject *holders = PyDict_New();
    const int is_known = last->held.state != OOMKIT_UNKNOWN;
    uint64_t outside = 0, state;

    if (holders == NULL) {
        return NULL;
    }
    state = held_state(call, &outside);
    if (!is_known) {
        last->held.state = state;
        last->held.outside += outside;
    }
    if (holders_set(holders, "parameters", last->held.params) < 0 ||
        holders_set(holders, "gradients", last->held.gradients) < 0 ||
        holders_set(holders, "optimizer state", last->held.state) < 0 ||
        holders_rest(call, holders, last->allocated_bytes,
                     last->held.params + last->held.gradients + last->held.state,
                     state) < 0) {
        return NULL;
    }
    return STEAL(holders);
}

static int
was_tried_whole(const oomkit_call *call)
{
    Py_ssize_t i;

    for (i = 0; i < call->tries.count; i++) {
        if (call->tries.items[i].accumulation_steps == 1) {
            return 1;
        }
    }
    return 0;
}

/* Did the last two attempts, the smaller micro-batch last, fail in one phase with one
 * request? */
static int
is_same_failure(const oomkit_call *call)
{
    const oomkit_attempt *last, *before;

    if (call->tries.count < 2) {
        return 0;
    }
    last = &call->tries.items[call->tries.count - 1];
    before = last - 1;
    return last->phase != OOMKIT_PHASE_OPTIMIZER &&
           last->budget_bytes != OOMKIT_UNKNOWN &&
           last->allocated_bytes != OOMKIT_UNKNOWN &&
           before->allocated_bytes != OOMKIT_UNKNOWN &&
           last->requested_bytes != OOMKIT_UNKNOWN && before->phase == last->phase &&
           before->requested_bytes == last->requested_bytes &&
           before->micro_batch_size > last->micro_batch_size;
}

int
oomkit_holders_leave_no_room(oomkit_call *call, int grads_may_go)
{
    const oomkit_attempt *last;
    oomkit_holding left = {0};
    uint64_t now, grown, movable, wanted;

    if (!is_same_failure(call)) {
        return 0;
    }
    last = &call->tries.items[call->tries.count - 1];
    if (last->accumulated && !was_tried_whole(call)) {
        return 0; /* the whole batch meets no gradients that accumulated */
    }
    now = oomkit_device_allocated(call->st, call->device);
    held_params(call, NULL, &left);
    movable = held_state(call, &left.outside); /* to the host */
    grown = last->held.gradients > left.gradients
                ? last->held.gradients - left.gradients
                : 0;
    wanted = !grads_may_go                   ? grown + last->requested_bytes
             : grown > last->requested_bytes ? grown
                                             : last->requested_bytes;
    return now != OOMKIT_UNKNOWN && now + wanted > last->budget_bytes + movable;
}

int
oomkit_holders_request_too_large(oomkit_call *call)
{
    const oomkit_attempt *last = &call->tries.items[call->tries.count - 1];
    const uint64_t now = oomkit_device_allocated(call->st, call->device);
    oomkit_holding left = {0};
    uint64_t movable;

    if (last->phase == OOMKIT_PHASE_OPTIMIZER || now == OOMKIT_UNKNOWN ||
        last->budget_bytes == OOMKIT_UNKNOWN ||
        last->requested_bytes == OOMKIT_UNKNOWN) {
        return 0;
    }
    held_params(call, NULL, &left);
    movable = held_state(call, &left.outside) + left.gradients;
    return now + last->requested_bytes > last->budget_bytes + movable;
}

int
oomkit_holders_skip_sizes(const oomkit_call *call)
{
    const oomkit_attempt *last, *before;
    double row, none; /* bytes of a row, and with no rows at all */

    if (!is_same_failure(call)) {
        return 0;
    }
    last = &call->tries.items[call->tries.count - 1];
    before = last - 1;
    row = ((double)before->allocated_bytes - (double)last->allocated_bytes) /
          (double)(before->micro_batch_size - last->micro_batch_size);
    none = (double)last->allocated_bytes - row * (double)last->micro_batch_size;
    return none + (double)last->requested_bytes > (double)last->budget_bytes;
}

uint64_t
oomkit_holders_outside(const struct oomkit_step *step)
{
    const oomkit_device cpu = {OOMKIT_DEVICE_CPU, -1};
    uint64_t counted = 0, outside = 0;
    Py_ssize_t i;

    for (i = 0; step->parts != NULL && i < step->parts->param_count; i++) {
        OWNED PyObject *param = Py_XNewRef(step->parts->params[i]);
        if (param != NULL) {
            held_add(step->st, cpu, param, &counted, &outside);
        }
    }
    return outside;
}
