/* An optimizer that is given the loss (Polyak's step) gets that of the whole batch: the
 * mean with the weights of the micro-batches, or their sum. What is of one micro-batch
 * alone, and cannot be put together, is refused before the update. A closure is called
 * in the last micro-batch only: one that runs the model is refused (held_update.c,
 * stale_forward.c, backward.c), and so is one that returns a loss, which would be a
 * part's. */
#include "hook.h"
#include "step_arguments.h"
#include "../call/call.h"
#include "../optim/optim.h"
#include "../py/errors.h"
#include "../py/tensor.h"
#include "../ranks/agree.h"

/* SplitError with the line. -1 always. */
static int
given_refuse(interceptor_object *self, PyObject *argument, const char *why)
{
    OWNED PyObject *where = oomkit_where();

    if (where == NULL) {
        return -1;
    }
    return oomkit_refuse_split(
        self->call,
        "%s.step() at %U is given an argument of type %s, %s; compute it outside the "
        "decorated step" SEE("step-arguments"),
        Py_TYPE(self->target)->tp_name, where, Py_TYPE(argument)->tp_name, why);
}

/* One argument that is no number. 0, or -1 with SplitError. */
static int
given_check(interceptor_object *self, PyObject *argument)
{
    oomkit_state *st = self->call->st;
    int has_parts = PyList_Check(argument) || PyTuple_Check(argument) ||
                    PyDict_Check(argument) || oomkit_tensor_check(st, argument) ||
                    PyObject_CheckBuffer(argument);

    if (!has_parts || PyBytes_Check(argument)) {
        return 0;
    }
    return given_refuse(self, argument,
                        "which belongs to one micro-batch, and the value for the whole "
                        "batch is not known");
}

int
oomkit_given_note(interceptor_object *self, PyObject *const *args,
                  Py_ssize_t positional, PyObject *kwnames)
{
    oomkit_call *call = self->call;
    const oomkit_held_arguments given = {.target = self->target,
                                         .args = args,
                                         .positional = positional,
                                         .kwnames = kwnames};
    Py_ssize_t i, n = positional + (kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames));

    for (i = 0; i < n; i++) {
        double value;
        int number = oomkit_number_of(call->st, args[i], &value);
        if (number < 0 || (number == 0 && given_check(self, args[i]) < 0)) {
            return -1;
        }
        if (number == 1 && PyLong_Check(args[i]) && !PyBool_Check(args[i]) &&
            value == (double)call->cut->slices[call->cut->at].length) {
            return given_refuse(self, args[i],
                                "which is the number of rows of the micro-batch, not "
                                "of the batch");
        }
    }
    return n == 0 ? 0 : oomkit_tell_arguments_given(call, &given);
}

/* The closure, so that what it returns is looked at. New reference or NULL. */
static PyObject *
given_closure(interceptor_object *self, PyObject *closure)
{
    return PyObject_CallFunction(self->call->st->silent_closure, "Os", closure,
                                 Py_TYPE(self->target)->tp_name);
}

PyObject *
oomkit_given_settle(interceptor_object *self, PyObject *const *args,
                    Py_ssize_t positional, PyObject *kwnames)
{
    Py_ssize_t i, n = positional + (kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames));
    oomkit_held_arguments given = {self->target, args, positional, kwnames, NULL, 0};
    OWNED PyObject *mean = NULL, *result = NULL;
    const int settled = oomkit_tell_arguments_settle(self->call, &given);

    mean = given.instead;
    if (settled < 0) {
        return NULL;
    }
    result = PyTuple_New(n);
    for (i = 0; result != NULL && i < n; i++) {
        PyObject *value = mean != NULL && i == given.at
                              ? Py_NewRef(mean) /* owned, stolen */
                          : oomkit_interceptor_is_closure(args, positional, kwnames, i)
                              ? given_closure(self, args[i])
                              : Py_NewRef(args[i]);
        if (value == NULL) {
            return NULL;
        }
        PyTuple_SET_ITEM(result, i, value);
    }
    return STEAL(result);
}

int
oomkit_interceptor_is_closure(PyObject *const *args, Py_ssize_t positional,
                              PyObject *kwnames, Py_ssize_t i)
{
    if (i < positional) {
        return i == 0 && PyCallable_Check(args[0]);
    }
    return args[i] != Py_None &&
           PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(kwnames, i - positional),
                                            "closure") == 0;
}

PyObject *
oomkit_given_agreed(interceptor_object *self, PyObject *const *args,
                    Py_ssize_t positional, PyObject *kwnames)
{
    Py_ssize_t i, n = positional + (kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames));
    OWNED PyObject *result = PyTuple_New(n);

    for (i = 0; result != NULL && i < n; i++) {
        PyObject *value = /* owned, stolen */
            oomkit_interceptor_is_closure(args, positional, kwnames, i)
                ? oomkit_ranks_closure(self->call, args[i])
                : Py_NewRef(args[i]);
        if (value == NULL) {
            return NULL;
        }
        PyTuple_SET_ITEM(result, i, value);
    }
    return STEAL(result);
}

/* Is step() handed a closure, by position or by name? */
int
oomkit_interceptor_has_closure(PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Py_ssize_t i, n = PyVectorcall_NARGS(nargsf);
    Py_ssize_t total = n + (kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames));

    for (i = 0; i < total; i++) {
        if (oomkit_interceptor_is_closure(args, n, kwnames, i)) {
            return 1;
        }
    }
    return 0;
}

PyObject *
oomkit_interceptor_optimizer(interceptor_object *self, PyObject *const *args,
                             size_t nargsf, PyObject *kwnames)
{
    PyTypeObject *type = (PyTypeObject *)self->call->st->Optimizer;
    Py_ssize_t i, n = PyVectorcall_NARGS(nargsf);
    Py_ssize_t total = n + (kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames));

    if (self->kind == OOMKIT_OWNER_OPTIMIZER) {
        return self->target;
    }
    if (self->kind != OOMKIT_OWNER_SCALER || self->name != self->call->st->str_step) {
        return NULL;
    }
    for (i = 0; i < total; i++) {
        if (PyObject_TypeCheck(args[i], type)) {
            return args[i];
        }
    }
    return NULL;
}
