/* The surroundings of a call whose loss is returned: the caller's backward comes after
 * `with torch.autocast(...)` has ended, and a replay needs it again. */
#include "deferred.h"
#include "../call/call.h"
#include "../py/modes.h"
#include "../py/tensor.h"

/* Appends (type, dtype) when autocast is on for that device type. 0 or -1. */
static int
modes_autocast(oomkit_state *st, oomkit_modes *modes, PyObject *type)
{
    OWNED PyObject *on = PyObject_CallOneArg(st->is_autocast_enabled, type);
    OWNED PyObject *dtype = NULL, *pair = NULL;

    if (on != Py_True) {
        return on == NULL ? -1 : 0;
    }
    dtype = PyObject_CallOneArg(st->get_autocast_dtype, type);
    pair = dtype == NULL ? NULL : PyTuple_Pack(2, type, dtype);
    if (pair == NULL ||
        (modes->autocast == NULL && (modes->autocast = PyList_New(0)) == NULL)) {
        return -1;
    }
    return PyList_Append(modes->autocast, pair);
}

#define MODES_KEPT 4096 /* reported ones that are kept while losses wait */

/* Forgets what was reported. */
static int
modes_forget(oomkit_state *st)
{
    Py_ssize_t n = st->mode_log == NULL ? 0 : PyList_GET_SIZE(st->mode_log);

    st->flags_dropped += (uint64_t)n;
    return n == 0 ? 0 : PyList_SetSlice(st->mode_log, 0, n, NULL);
}

int
oomkit_mode_log(oomkit_state *st, PyObject *module)
{
    OWNED PyObject *flag = NULL, *ref = NULL, *pair = NULL;

    if (st->waiting == NULL) {
        return 0;
    }
    if (st->mode_log == NULL && (st->mode_log = PyList_New(0)) == NULL) {
        return -1;
    }
    if (PyList_GET_SIZE(st->mode_log) >= MODES_KEPT && modes_forget(st) < 0) {
        return -1;
    }
    flag = PyObject_GetAttr(module, st->str_training);
    ref = flag ? PyWeakref_NewRef(module, NULL) : NULL;
    pair = ref ? PyTuple_Pack(2, ref, flag) : NULL;
    return pair == NULL ? -1 : PyList_Append(st->mode_log, pair);
}

/* Where the log of changed modes stands for a loss that begins to wait. */
static int
modes_training(oomkit_state *st, uint64_t *at)
{
    if (st->waiting == NULL && modes_forget(st) < 0) {
        return -1;
    }
    *at = st->flags_dropped +
          (uint64_t)(st->mode_log == NULL ? 0 : PyList_GET_SIZE(st->mode_log));
    return 0;
}

/* Has a module that takes part another flag now than when the loss began to wait? The
 * first report since then has the old one. 1, 0 or -1. */
static int
modes_changed(oomkit_call *call, uint64_t at)
{
    oomkit_state *st = call->st;
    OWNED PyObject *seen = NULL;
    Py_ssize_t i, n = st->mode_log == NULL ? 0 : PyList_GET_SIZE(st->mode_log);

    if (at < st->flags_dropped) {
        return 1; /* it cannot be told any more */
    }
    seen = PySet_New(NULL);
    if (seen == NULL) {
        return -1;
    }
    for (i = (Py_ssize_t)(at - st->flags_dropped);
         i < n && i < PyList_GET_SIZE(st->mode_log); i++) {
        PyObject *pair = PyList_GET_ITEM(st->mode_log, i); /* borrowed */
        PyObject *ref = PyTuple_GET_ITEM(pair, 0);         /* borrowed */
        OWNED PyObject *module = oomkit_reference_get(ref);
        OWNED PyObject *now = NULL;
        int known = module == NULL ? 1 : PySet_Contains(seen, ref);
        if (known < 0) {
            return -1;
        }
        if (known || !oomkit_call_has_module(call, module)) {
            continue;
        }
        now = PySet_Add(seen, ref) < 0 ? NULL
                                       : PyObject_GetAttr(module, st->str_training);
        if (now == NULL || now != PyTuple_GET_ITEM(pair, 1)) {
            return now == NULL ? -1 : 1;
        }
    }
    return 0;
}

static int
modes_functions(oomkit_state *st, Py_ssize_t *count)
{
    OWNED PyObject *number = NULL;

    *count = 0;
    if (st->function_modes == NULL) {
        return 0;
    }
    number = PyObject_CallNoArgs(st->function_modes);
    if (number == NULL) {
        return -1;
    }
    *count = PyLong_AsSsize_t(number);

    return *count == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Is autocast on for some device type? One call without arguments instead of one for
 * each type. 1 (also where that cannot be asked), 0 or -1. */
static int
modes_any_autocast(const oomkit_state *st)
{
    OWNED PyObject *on = NULL;

    if (st->is_any_autocast == NULL) {
        return 1;
    }
    on = PyObject_CallNoArgs(st->is_any_autocast);

    return on == NULL ? -1 : on != Py_False;
}

/* Autocast of the call's device, where it is one that torch has it for. 0 or -1. */
static int
modes_autocast_device(oomkit_call *call, oomkit_modes *modes)
{
    const int type = call->device.type;
    OWNED PyObject *name = NULL;

    if (type != OOMKIT_DEVICE_CUDA && type != OOMKIT_DEVICE_XPU &&
        type != OOMKIT_DEVICE_MPS) {
        return 0;
    }
    name = type == OOMKIT_DEVICE_CUDA
               ? Py_NewRef(call->st->str_cuda_name)
               : PyUnicode_InternFromString(oomkit_device_type_name(type));
    return name == NULL ? -1 : modes_autocast(call->st, modes, name);
}

int
oomkit_modes_note(oomkit_call *call, oomkit_modes *modes)
{
    oomkit_state *st = call->st;
    int any = modes_any_autocast(st);

    if (any < 0 || (any && modes_autocast(st, modes, st->str_cpu_name) < 0) ||
        (any && modes_autocast_device(call, modes) < 0)) {
        return -1;
    }
    return modes_functions(st, &modes->functions) < 0 ||
                   modes_training(st, &modes->at) < 0
               ? -1
               : 0;
}

int
oomkit_modes_differ(oomkit_call *call, const oomkit_modes *modes, const char **why)
{
    Py_ssize_t functions;
    int switched;

    *why = NULL;
    switched = modes_changed(call, modes->at);
    if (switched < 0 || modes_functions(call->st, &functions) < 0) {
        return -1;
    }
    if (functions != modes->functions) {
        *why =
            "the call was made under a torch function mode (`with torch.device(...)` "
            "or the like) that has ended: run backward() inside it";
    } else if (switched) {
        *why = "a model was switched between train() and eval() after the call and "
               "before its backward(): do it after backward()";
    }
    return 0;
}

int
oomkit_modes_enter(oomkit_state *st, const oomkit_modes *modes,
                   oomkit_modes_stack *stack)
{
    PyObject *pairs = modes->autocast ? modes->autocast : st->empty_tuple;

    stack->autocast = NULL;
    stack->grad = oomkit_grad_mode_set(st, 1);
    if (stack->grad < 0) {
        return -1;
    }
    stack->autocast = PyObject_CallOneArg(st->modes_then, pairs);
    return stack->autocast == NULL ? oomkit_grad_mode_back(st, stack->grad, -1) : 0;
}

int
oomkit_modes_leave(oomkit_state *st, oomkit_modes_stack *stack)
{
    int tries, result = -1;
    PyObject *first = NULL; /* owned */

    /* ExitStack.close() goes on with what it has not come to. */
    for (tries = 0; tries < 2 && result < 0; tries++) {
        OWNED PyObject *done =
            PyObject_CallMethodNoArgs(stack->autocast, st->str_close);
        result = done == NULL ? -1 : 0;
        if (result < 0) {
            OWNED PyObject *again = oomkit_exception_take();
            if (first == NULL) { /* it tells more than a second one */
                first = STEAL(again);
            }
        }
    }
    Py_CLEAR(stack->autocast);
    if (first != NULL) {
        oomkit_exception_give(first); /* one that was left in part may be what is on */
    }
    return oomkit_grad_mode_back(st, stack->grad, first == NULL ? 0 : -1);
}

void
oomkit_modes_clear(oomkit_modes *modes)
{
    Py_CLEAR(modes->autocast);
}
