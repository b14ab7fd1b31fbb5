/* The surroundings of a call whose loss is returned: the caller's backward comes after
 * `with torch.autocast(...)` has ended, and a replay needs it again. */
#include "pending.h"

/* Appends (type, dtype) when autocast is on for that device type. 0 or -1. */
static int
modes_autocast(oomkit_state *st, oomkit_modes *modes, PyObject *type)
{
    PyObject *on = PyObject_CallOneArg(st->is_autocast_enabled, type); /* owned */
    PyObject *dtype;                                                   /* owned */

    if (on == NULL) {
        return -1;
    }
    Py_DECREF(on);
    if (on != Py_True) {
        return 0;
    }
    dtype = PyObject_CallOneArg(st->get_autocast_dtype, type);
    return dtype == NULL ? -1 : oomkit_pairs_add(&modes->autocast, type, dtype);
}

/* Are the modules that take part in training mode? One bit of each root, mixed. */
static int
modes_training(oomkit_call *call, uint64_t *hash)
{
    PyObject *roots = call->parts->roots; /* borrowed */
    Py_ssize_t i;

    *hash = 1;
    for (i = 0; roots != NULL && i < PyList_GET_SIZE(roots); i++) {
        PyObject *root = oomkit_reference_get(PyList_GET_ITEM(roots, i)); /* owned */
        PyObject *flag;                                                   /* owned */
        if (root == NULL ||
            !PyObject_TypeCheck(root, (PyTypeObject *)call->st->Module)) {
            Py_XDECREF(root);
            continue;
        }
        flag = PyObject_GetAttr(root, call->st->str_training);
        Py_DECREF(root);
        if (flag == NULL) {
            return -1;
        }
        *hash = *hash * 31 + (flag == Py_True);
        Py_DECREF(flag);
    }
    return 0;
}

static int
modes_functions(oomkit_state *st, Py_ssize_t *count)
{
    PyObject *number; /* owned */

    *count = 0;
    if (st->function_modes == NULL) {
        return 0;
    }
    number = PyObject_CallNoArgs(st->function_modes);
    if (number == NULL) {
        return -1;
    }
    *count = PyLong_AsSsize_t(number);
    Py_DECREF(number);
    return *count == -1 && PyErr_Occurred() ? -1 : 0;
}

int
oomkit_modes_note(oomkit_call *call, oomkit_modes *modes)
{
    oomkit_state *st = call->st;

    if (modes_autocast(st, modes, st->str_cpu_name) < 0 ||
        (call->device.type == OOMKIT_DEVICE_CUDA &&
         modes_autocast(st, modes, st->str_cuda_name) < 0)) {
        return -1;
    }
    return modes_functions(st, &modes->functions) < 0 ||
                   modes_training(call, &modes->training) < 0
               ? -1
               : 0;
}

int
oomkit_modes_differ(oomkit_call *call, const oomkit_modes *modes, const char **why)
{
    Py_ssize_t functions;
    uint64_t training;

    *why = NULL;
    if (modes_functions(call->st, &functions) < 0 ||
        modes_training(call, &training) < 0) {
        return -1;
    }
    if (functions != modes->functions) {
        *why =
            "the call was made under a torch function mode (`with torch.device(...)` "
            "or the like) that has ended: run backward() inside it";
    } else if (training != modes->training) {
        *why = "a model was switched between train() and eval() after the call and "
               "before its backward(): do it after backward()";
    }
    return 0;
}

int
oomkit_modes_enter(oomkit_state *st, const oomkit_modes *modes, PyObject **stack)
{
    PyObject *pairs = modes->autocast ? modes->autocast : st->empty_tuple;

    *stack = PyObject_CallOneArg(st->modes_then, pairs);
    return *stack == NULL ? -1 : 0;
}

int
oomkit_modes_leave(PyObject *stack)
{
    PyObject *done = PyObject_CallMethod(stack, "close", NULL); /* owned */
    Py_DECREF(stack);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

void
oomkit_modes_clear(oomkit_modes *modes)
{
    Py_CLEAR(modes->autocast);
}
