/* An intercepted call while the batch is split: checked, noted, and held back in every
 * micro-batch but the last. */
#include "errors.h"
#include "given.h"
#include "proof.h"

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

/* What a split call cannot hold back rightly. 0, or -1 with SplitError. */
static int
hold_refuse(interceptor_object *self, PyObject *const *args, size_t nargsf,
            PyObject *kwnames)
{
    oomkit_call *call = self->call;

    if (self->kind == OOMKIT_OWNER_OPTIMIZER && call->backwards == 0 &&
        oomkit_interceptor_has_closure(args, nargsf, kwnames)) {
        /* It computes the gradients. After a backward it may do nothing of the kind. */
        call->raised = 1;
        oomkit_raise(call->st->SplitError,
                     "auto_batch cannot split a step that hands a closure to "
                     "%s.step(): decorate the closure's forward and backward "
                     "instead of the step around it",
                     Py_TYPE(self->target)->tp_name);
        return -1;
    }
    if (oomkit_backward_nesting() > 0) {
        call->raised = 1;
        oomkit_raise(call->st->SplitError,
                     "auto_batch cannot split this step: %s.%U() is called by a hook "
                     "inside backward(): call it after backward(), in the step",
                     Py_TYPE(self->target)->tp_name, self->name);
        return -1;
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

/* 1 the call is held back; 0 it is to run (the last micro-batch); -1 with SplitError.
 */
int
oomkit_interceptor_hold(interceptor_object *self, PyObject *const *args, size_t nargsf,
                        PyObject *kwnames)
{
    oomkit_call *call = self->call;
    PyObject *optimizer =
        oomkit_interceptor_optimizer(self, args, nargsf, kwnames); /* borrowed */

    if (hold_refuse(self, args, nargsf, kwnames) < 0 ||
        (self->kind != OOMKIT_OWNER_SCHEDULER &&
         oomkit_grads_refuse_unexpected(call) < 0) ||
        oomkit_course_note(call, self->target, self->name) < 0 ||
        (self->kind == OOMKIT_OWNER_SCHEDULER &&
         oomkit_metrics_note(call, self->target, args, PyVectorcall_NARGS(nargsf),
                             kwnames) < 0) ||
        (self->kind == OOMKIT_OWNER_OPTIMIZER &&
         oomkit_given_note(self, args, PyVectorcall_NARGS(nargsf), kwnames) < 0)) {
        return -1;
    }
    if (optimizer != NULL && !call->committed &&
        (call->slice_index == 0 ? oomkit_owners_groups_note(call, optimizer)
                                : oomkit_tx_groups_moved(call, optimizer)) < 0) {
        return -1;
    }
    if (oomkit_forward_watch(call, self->target, self->kind, optimizer) < 0) {
        return -1;
    }
    return !call->is_last ? 1
           : call->proof == NULL
               ? 0
               : oomkit_proof_update(self, optimizer, args, nargsf, kwnames);
}

/* Did the failure happen while the state was being made, before any update? Asked of a
 * foreach optimizer, whose versions tell nothing. Every class of torch.optim makes its
 * state in `_init_group`, so the innermost frame of a harmless failure is that one. */
int
oomkit_optimizer_failed_in_init(oomkit_state *st, PyObject *exception)
{
    uint64_t requested;
    PyObject *message = NULL, *location = NULL; /* owned */
    int result;

    oomkit_exception_describe(st, exception, &requested, &message, &location);
    result = location == NULL ? 0
                              : PyUnicode_Tailmatch(location, st->str_in_init_group, 0,
                                                    PY_SSIZE_T_MAX, 1) == 1;
    Py_XDECREF(message);
    Py_XDECREF(location);
    return result;
}
