/* An intercepted call while the batch is split: checked, noted, and held back in every
 * micro-batch but the last. */
#include "accum.h"
#include "../hook/hook.h"
#include "../hook/step_arguments.h"
#include "../optim/optim.h"
#include "../proof/proof.h"
#include "../undo/undo.h"

/* What a split call cannot hold back rightly. 0, or -1 with SplitError. */
static int
hold_refuse(interceptor_object *self, PyObject *const *args, size_t nargsf,
            PyObject *kwnames)
{
    oomkit_call *call = self->call;

    if (self->kind == OOMKIT_OWNER_OPTIMIZER && call->backward.done == 0 &&
        oomkit_interceptor_has_closure(args, nargsf, kwnames)) {
        /* It computes the gradients. After a backward it may do nothing of the kind. */
        call->refused.raised = 1;
        oomkit_raise(call->st->SplitError,
                     "auto_batch cannot split a step that hands a closure to "
                     "%s.step(): decorate the closure's forward and backward "
                     "instead of the step around it",
                     Py_TYPE(self->target)->tp_name);
        return -1;
    }
    if (oomkit_backward_nesting() > 0) {
        call->refused.raised = 1;
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
    if (optimizer != NULL && !call->updating.committed &&
        (call->cut->at == 0 ? oomkit_owners_groups_note(call, optimizer)
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
