/* Before an optimizer's first step: its state is about to be allocated, and most
 * failures there come after something has moved. What certainly does not fit is said
 * before. */
#include "sizes.h"
#include "../call/call.h"
#include "../py/tensor.h"

/* 1 when the optimizer has no state yet, 0, or -1. */
static int
update_is_first(oomkit_state *st, PyObject *optimizer)
{
    OWNED PyObject *state = PyObject_GetAttr(optimizer, st->str_state);
    if (state == NULL) {
        return -1;
    }
    return PyDict_Check(state) && PyDict_GET_SIZE(state) == 0;
}

/* Will its first step() make any? SGD without momentum has none after any number of
 * steps, and an accelerator's driver must not be asked in each. 1, 0 or -1. */
static int
update_makes_state(oomkit_state *st, PyObject *optimizer)
{
    OWNED PyObject *answer = PyObject_CallOneArg(st->keeps_state, optimizer);
    return answer == NULL ? -1 : PyObject_IsTrue(answer);
}

/* Bytes still to be had, or OOMKIT_UNKNOWN. */
static int
bytes_left(oomkit_call *call, uint64_t *left)
{
    oomkit_memory_stats stats;
    uint64_t budget;

    if (oomkit_device_figures(call->st, call->device, &stats, &budget) < 0) {
        return -1;
    }
    *left = OOMKIT_UNKNOWN;
    if (budget != OOMKIT_UNKNOWN && stats.allocated != OOMKIT_UNKNOWN) {
        *left = budget > stats.allocated ? budget - stats.allocated : 0;
    } else if (stats.free != OOMKIT_UNKNOWN && stats.reserved != OOMKIT_UNKNOWN) {
        *left = stats.free + (stats.reserved - stats.allocated);
    }
    return 0;
}

/* 0, or -1 with oomkit.OutOfMemory when the state certainly does not fit. May switch
 * the optimizer to fused=True, which needs no temporaries (oomkit.optim decides and
 * says). */
int
oomkit_predict_update(oomkit_call *call, PyObject *optimizer)
{
    uint64_t left;
    OWNED PyObject *answer = NULL; /* None, or the reason why it cannot fit */
    int first = update_is_first(call->st, optimizer);

    if (first > 0 && call->device.type != OOMKIT_DEVICE_CPU) {
        first = update_makes_state(call->st, optimizer);
    }
    if (first <= 0) {
        return first;
    }
    if (bytes_left(call, &left) < 0) {
        return -1;
    }
    if (left == OOMKIT_UNKNOWN) {
        return 0;
    }
    answer = PyObject_CallFunction(call->st->predict_update, "OK", optimizer,
                                   (unsigned long long)left);
    if (answer == NULL) {
        return -1;
    }
    if (answer != Py_None) {
        call->refused.raised = 1;
        oomkit_give_up(call, answer, 0);
        return -1;
    }
    return 0;
}
