/* Optimizer state in host memory. A state tensor stays the object that it is; its
 * memory is exchanged (`tensor.data = ...`), which moves no version. Which ones are out
 * is a dict that Python keeps for each optimizer (oomkit/_ladder/state.py), so that a
 * step() outside every protected call finds them on the device again.
 *
 * Under a budget of the CPU the host is what is allocated outside it. */
#include "activations.h"
#include "ahead.h"
#include "ladder.h"
#include "update_room.h"
#include "../device/device.h"
#include "../optim/update_part.h"
#include "../py/tensor.h"
#include "../sizes/sizes.h"

#define SMALLEST 4096 /* bytes: what is smaller stays */
#define SETTLED 8     /* updates in a row with room for all of the state */
#define SPARE 8       /* and an eighth of it to spare */

PyObject *
oomkit_hosted_of(oomkit_state *st, PyObject *optimizer)
{
    PyObject *hosted; /* borrowed from the registry, which keeps it */

    if (st->hosted_any == 0) {
        return NULL;
    }
    hosted = PyObject_CallFunctionObjArgs(st->hosted_state, optimizer, Py_None, NULL);
    if (hosted == NULL) {
        return NULL;
    }
    Py_DECREF(hosted);
    if (hosted == Py_False) { /* nor of any other: nobody has to ask any more */
        st->hosted_any = 0;
    }
    return PyDict_Check(hosted) ? hosted : NULL;
}

PyObject *
oomkit_hosted_make(oomkit_call *call, PyObject *optimizer)
{
    char text[OOMKIT_DEVICE_TEXT];
    OWNED PyObject *device = NULL;
    PyObject *hosted; /* borrowed from the registry, which keeps it */

    oomkit_device_text(call->device, text);
    device = PyUnicode_FromString(text);
    hosted = device == NULL ? NULL
                            : PyObject_CallFunctionObjArgs(call->st->hosted_state,
                                                           optimizer, device, NULL);
    if (hosted == NULL) {
        return NULL;
    }
    call->st->hosted_any = 1;
    Py_DECREF(hosted);
    return hosted;
}

int
oomkit_hosted_tidy(oomkit_state *st, PyObject *optimizer)
{
    OWNED PyObject *done = PyObject_CallOneArg(st->hosted_tidy, optimizer);

    oomkit_host_unpin(st);
    return done == NULL ? -1 : 0;
}

/* 1 where the value of `tensor` is worth moving and on the call's device. */
static int
is_moved(oomkit_call *call, PyObject *tensor, oomkit_tensor_facts *facts)
{
    OWNED PyObject *alone = NULL;

    if (!oomkit_tensor_check(call->st, tensor)) {
        return 0;
    }
    if (oomkit_tensor_facts_get(call->st, tensor, 0, facts) < 0) {
        return -1;
    }
    if (!facts->is_strided || facts->bytes < SMALLEST || facts->requires_grad ||
        facts->device_type != call->device.type ||
        facts->device_type == OOMKIT_DEVICE_PRIVATE_USE || /* no .data of the host's */
        (facts->device_type != OOMKIT_DEVICE_CPU &&
         facts->device_index != call->device.index)) {
        return 0;
    }
    alone = PyObject_CallOneArg(call->st->owns_memory, tensor);
    return alone == NULL ? -1 : alone == Py_True;
}

/* Is one that `hosted` has there still? A program may have brought it back by itself
 * (`tensor.data = tensor.data.to(device)`). 1, 0 or -1. */
static int
is_there(oomkit_call *call, PyObject *hosted, PyObject *key, PyObject *tensor)
{
    const oomkit_state *st = call->st;
    const int there = PyDict_Contains(hosted, key);
    oomkit_tensor_facts facts;

    if (there <= 0) {
        return there;
    }
    if (oomkit_tensor_facts_get(call->st, tensor, 0, &facts) < 0) {
        return -1;
    }
    return facts.device_type == OOMKIT_DEVICE_CPU &&
           st->bridge->cpu_counted(tensor, st->impl_offset) != 1;
}

int
oomkit_host_move_out(oomkit_call *call, PyObject *hosted, PyObject *tensor,
                     uint64_t *bytes)
{
    oomkit_tensor_facts facts;
    OWNED PyObject *key = PyLong_FromVoidPtr(tensor), *copy = NULL;
    int there = key == NULL ? -1 : is_there(call, hosted, key, tensor);
    int moves = there == 0 ? is_moved(call, tensor, &facts) : 0;

    if (there != 0 || moves <= 0 || !oomkit_host_share_take(call, facts.bytes)) {
        return there < 0 || moves < 0 ? -1 : 0;
    }
    copy = oomkit_host_copy_pinned(call->st, tensor);
    if (copy == NULL || PyDict_SetItem(hosted, key, tensor) < 0) {
        return -1;
    }
    if (PyObject_SetAttr(tensor, call->st->str_data, copy) < 0) {
        KEEPING_EXCEPTION {
            (void)PyDict_DelItem(hosted, key);
            oomkit_error_dismiss(); /* it is there: it has just been put there */
        }
        return -1;
    }
    *bytes += facts.bytes;
    return 0;
}

PyObject *
oomkit_device_copy(oomkit_call *call, PyObject *tensor)
{
    OWNED PyObject *made = oomkit_device_like(call->st, call->device, tensor);

    return made == NULL || oomkit_device_fill(call->st, call->device, made, tensor) < 0
               ? NULL
               : STEAL(made);
}

int
oomkit_host_move_in(oomkit_call *call, PyObject *hosted, PyObject *tensor,
                    const oomkit_ahead *ahead)
{
    OWNED PyObject *key = PyLong_FromVoidPtr(tensor), *copy = NULL;
    int there = key == NULL ? -1 : PyDict_Contains(hosted, key);

    if (there <= 0) {
        return there;
    }
    copy = ahead == NULL ? NULL : oomkit_ahead_take(ahead, key);
    if (copy == NULL && !PyErr_Occurred()) {
        copy = oomkit_device_copy(call, tensor);
    }
    if (copy == NULL || PyObject_SetAttr(tensor, call->st->str_data, copy) < 0) {
        return -1;
    }
    return PyDict_DelItem(hosted, key);
}

/* Every tensor of an optimizer's state goes out, of so many bytes with those of the
 * optimizers before it. It is known as one of those from the first on. 0 or -1. */
static int
each_state(oomkit_call *call, PyObject *optimizer, uint64_t most, uint64_t *bytes)
{
    OWNED PyObject *state = PyObject_GetAttr(optimizer, call->st->str_state);
    OWNED PyObject *all = NULL;
    PyObject *hosted = NULL; /* borrowed from the registry */
    oomkit_tensor_facts facts;
    Py_ssize_t i;

    if (state == NULL || !PyDict_Check(state)) {
        return state == NULL ? -1 : 0;
    }
    all = PyDict_Values(state);
    for (i = 0; all != NULL && i < PyList_GET_SIZE(all); i++) {
        PyObject *values = PyList_GET_ITEM(all, i), *key, *value; /* borrowed */
        Py_ssize_t at = 0;
        while (PyDict_Check(values) && PyDict_Next(values, &at, &key, &value)) {
            int moves = is_moved(call, value, &facts);
            if (moves > 0 && facts.bytes > most - *bytes) {
                continue; /* a smaller one may have room */
            }
            if (moves > 0 && hosted == NULL) {
                hosted = oomkit_hosted_make(call, optimizer);
            }
            if (moves < 0 || (moves > 0 && hosted == NULL) ||
                (moves > 0 && oomkit_host_move_out(call, hosted, value, bytes) < 0)) {
                return -1;
            }
        }
    }
    return all == NULL ? -1 : 0;
}

int
oomkit_host_all(oomkit_call *call, uint64_t most, uint64_t *bytes)
{
    *bytes = 0;
    if (call->device.type == OOMKIT_DEVICE_CUDA) {
        most /= 2; /* torch rounds pinned memory up to a power of two */
    }
    EACH_OWNER (owner, call->parts, OWNERS_OF(OOMKIT_OWNER_OPTIMIZER)) {
        OWNED PyObject *may =
            PyObject_CallOneArg(call->st->is_independent, owner.object);
        if (may == NULL ||
            (may == Py_True && each_state(call, owner.object, most, bytes) < 0)) {
            return -1;
        }
    }
    return 0;
}

/* --- back again --- */

/* Bytes of one dict; state that is no longer an optimizer's does not count. */
static uint64_t
hosted_bytes(oomkit_call *call, PyObject *hosted)
{
    PyObject *key, *tensor; /* borrowed */
    oomkit_tensor_facts facts;
    Py_ssize_t at = 0;
    uint64_t bytes = 0;

    while (PyDict_Next(hosted, &at, &key, &tensor)) {
        if (oomkit_tensor_facts_get(call->st, tensor, 0, &facts) < 0) {
            oomkit_error_dismiss(); /* an estimate goes without it */
            continue;
        }
        bytes += facts.bytes;
    }
    return bytes;
}

uint64_t
oomkit_host_bytes(oomkit_call *call)
{
    uint64_t bytes = 0;

    if (call->st->hosted_any == 0) {
        return 0;
    }
    EACH_OWNER (owner, call->parts, OWNERS_OF(OOMKIT_OWNER_OPTIMIZER)) {
        PyObject *hosted = oomkit_hosted_of(call->st, owner.object); /* borrowed */
        if (hosted != NULL) {
            bytes += hosted_bytes(call, hosted);
        } else if (PyErr_Occurred()) {
            oomkit_error_dismiss(); /* likewise */
        }
    }
    return bytes;
}

uint64_t
oomkit_host_left(oomkit_call *call)
{
    const uint64_t spare = oomkit_host_spare(call->st);
    const uint64_t taken = oomkit_host_share_of(call, oomkit_host_bytes(call)) / 2;

    return spare == OOMKIT_UNKNOWN ? spare : spare > taken ? spare - taken : 0;
}

int
oomkit_host_return(oomkit_call *call, PyObject *optimizer)
{
    OWNED PyObject *hosted = Py_XNewRef(oomkit_hosted_of(call->st, optimizer));
    OWNED PyObject *all = hosted == NULL ? NULL : PyDict_Values(hosted);
    Py_ssize_t i;

    if (all == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    for (i = 0; i < PyList_GET_SIZE(all); i++) {
        if (oomkit_host_move_in(call, hosted, PyList_GET_ITEM(all, i), NULL) < 0) {
            return -1;
        }
    }
    return oomkit_hosted_tidy(call->st, optimizer);
}

/* All of them back to the device; those that do not fit stay. 0 or -1. */
static int
host_none(oomkit_call *call)
{
    EACH_OWNER (owner, call->parts, OWNERS_OF(OOMKIT_OWNER_OPTIMIZER)) {
        if (oomkit_host_return(call, owner.object) < 0) {
            if (!oomkit_exception_is_oom(call->st)) {
                return -1;
            }
            oomkit_exception_discard(call->st, oomkit_exception_take());
            return 0; /* what is there stays there */
        }
    }
    return 0;
}

void
oomkit_host_room(oomkit_call *call, uint64_t needed, uint64_t left)
{
    const uint64_t budget = oomkit_update_budget(call);
    const uint64_t peak = oomkit_window_peak_now(call);
    const uint64_t bytes = oomkit_host_bytes(call);

    if (needed + bytes / SPARE > left || budget == OOMKIT_UNKNOWN ||
        peak == OOMKIT_UNKNOWN || peak + bytes + bytes / SPARE > budget) {
        call->step->room_for_state = 0;
    } else {
        call->step->room_for_state++;
    }
}

int
oomkit_host_settle(oomkit_call *call)
{
    if (call->step->room_for_state < SETTLED) {
        return 0;
    }
    call->step->room_for_state = 0;
    return host_none(call);
}
