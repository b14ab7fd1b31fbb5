/* An intercepted call while the batch is split: checked, noted, and held back in every
 * micro-batch but the last. */
#include "accum.h"
#include "../call/call.h"
#include "../hook/hook.h"
#include "../hook/step_arguments.h"
#include "../optim/optim.h"

/* What a split call cannot hold back rightly. 0, or -1 with SplitError. */
static int
hold_refuse(interceptor_object *self, PyObject *const *args, size_t nargsf,
            PyObject *kwnames)
{
    oomkit_call *call = self->call;

    if (self->kind == OOMKIT_OWNER_OPTIMIZER && call->backward.done == 0 &&
        oomkit_interceptor_has_closure(args, nargsf, kwnames)) {
        /* It computes the gradients. After a backward it may do nothing of the kind. */
        return oomkit_refuse(
            call,
            "auto_batch cannot split a step that passes a closure to %s.step(), "
            "because step() runs the model several times. Decorate the closure's "
            "forward and backward instead of the step" SEE("optimizer-closure"),
            Py_TYPE(self->target)->tp_name);
    }
    if (oomkit_backward_nesting() > 0) {
        return oomkit_refuse_split(
            call,
            "a hook calls %s.%U() inside backward(), before the gradients of the whole "
            "batch are there. Call it in the step, after backward()" SEE(
                "step-in-hook"),
            Py_TYPE(self->target)->tp_name, self->name);
    }
    return 0;
}

/* Held back in every micro-batch but the last. */
static int
hold_update(oomkit_call *call, oomkit_update *update)
{
    interceptor_object *self = update->method;
    const Py_ssize_t n = PyVectorcall_NARGS(update->nargsf);
    const oomkit_held_arguments given = {.target = self->target,
                                         .args = update->args,
                                         .positional = n,
                                         .kwnames = update->kwnames};

    update->held = !call->is_last;
    if (hold_refuse(self, update->args, update->nargsf, update->kwnames) < 0 ||
        (self->kind == OOMKIT_OWNER_SCHEDULER &&
         oomkit_tell_arguments_given(call, &given) < 0) ||
        (self->kind == OOMKIT_OWNER_OPTIMIZER &&
         oomkit_given_note(self, update->args, n, update->kwnames) < 0)) {
        return -1;
    }
    if (update->optimizer == NULL || oomkit_update_is_final(call)) {
        return 0;
    }
    return call->cut->at == 0
               ? oomkit_hyperparams_note(call, update->optimizer)
               : oomkit_hyperparams_refuse_moved(call, update->optimizer);
}

const oomkit_rule oomkit_held_update_rule = {.update_begins = hold_update};
