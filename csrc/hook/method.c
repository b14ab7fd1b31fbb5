/* Interception of the participants' own methods, on the instance, while a call runs.
 *
 * optimizer.step, scheduler.step, scaler.step / update / unscale_ and
 * AveragedModel.update_parameters stand as attributes of our own in the instance
 * dictionaries from entry to exit. In every micro-batch but the last they do nothing;
 * in the last (or only) one they run, and what they move is known. A scheduler keeps
 * its wrapper of optimizer.step in the same place: it is saved and put back. Schedulers
 * of torch are left alone in the caller's own try (install.c). */
#include "hook.h"
#include "step_arguments.h"
#include "../ladder/ladder.h"
#include "../optim/optim.h"
#include "../optim/update_part.h"
#include "../optim/optimizer_extras.h"
#include "../optim/step_attributes.h"
#include "../py/modes.h"
#include "../ranks/agree.h"
#include "../sizes/sizes.h"
#include "../undo/parameters.h"
#include "../undo/undo.h"

#include <structmember.h>

PyObject *
oomkit_interceptor_original(interceptor_object *self, PyObject *const *args,
                            size_t nargsf, PyObject *kwnames)
{
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    Py_ssize_t total = n + (kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames));
    PyObject *small[8];
    PyObject **vector = small;
    OWNED PyObject *method = NULL;
    PyObject *result; /* owned */

    if (self->original != NULL) {
        return PyObject_Vectorcall(self->original, args, nargsf, kwnames);
    }
    method = PyObject_GetAttr((PyObject *)Py_TYPE(self->target), self->name);
    if (method == NULL) {
        return NULL;
    }
    if (total + 1 > 8) {
        vector = PyMem_Malloc((size_t)(total + 1) * sizeof(PyObject *));
        if (vector == NULL) {
            return PyErr_NoMemory();
        }
    }
    vector[0] = self->target;
    memcpy(vector + 1, args, (size_t)total * sizeof(PyObject *));
    result = PyObject_Vectorcall(method, vector, (size_t)n + 1, kwnames);
    if (vector != small) {
        PyMem_Free(vector);
    }
    return result;
}

/* torch's own optimizers change tensors in place, which bumps versions. Others may
 * write through `.data`, which does not: what they did cannot be seen. */
static int
interceptor_versions_tell(const interceptor_object *self)
{
    return oomkit_owner_is_torchs(self->call->st, self->call->parts, self->target);
}

/* 1 something moved, 0 nothing did (what was replaced is put back), -1 error. */
static int
interceptor_moved(interceptor_object *self, int index, PyObject *exception)
{
    oomkit_call *call = self->call;
    int moved = oomkit_optimizer_moved(call, index);

    if (moved == 0 && !interceptor_versions_tell(self)) {
        return 1;
    }
    if (moved == 0) {
        moved = oomkit_optimizer_is_foreach(call, index);
        if (moved == 1) {
            moved = !oomkit_optimizer_failed_in_init(call->st, exception);
        }
    }
    if (moved != 0) {
        return moved;
    }
    return oomkit_optimizer_undo(call, index);
}

/* Everything the optimizer did is put back from the copies. 0 or -1. */
static int
interceptor_restore(oomkit_call *call, int index)
{
    int result, mode = oomkit_grad_mode_off(call->st);
    if (mode < 0) {
        return -1;
    }
    result = oomkit_optimizer_restore_copy(call, index, oomkit_params_version_is);
    return oomkit_grad_mode_back(call->st, mode, result);
}

/* Does a hook of the program's run before step()? It may have changed gradients, and
 * would again. Keeps the exception in flight; 1 where that cannot be told. */
static int
interceptor_is_hooked(const interceptor_object *self)
{
    const oomkit_state *st = self->call->st;
    int is = 1;

    KEEPING_EXCEPTION {
        OWNED PyObject *hooked = PyObject_CallOneArg(st->has_step_hooks, self->target);
        is = hooked != Py_False;
        if (hooked == NULL) {
            oomkit_error_dismiss();
        }
    }
    return is;
}

/* The OOM in flight came out of an optimizer's step(). NULL without an exception asks
 * for one retry of the call (nothing had moved); otherwise NULL with the exception to
 * raise. */
static PyObject *
interceptor_after_oom(interceptor_object *self, int index, int may_retry)
{
    oomkit_call *call = self->call;
    oomkit_state *st = call->st;
    PyObject *exception = oomkit_exception_take(); /* owned, then stolen */
    PyObject *handled; /* owned: what the step is handling */
    int moved;

    if (oomkit_part_is_copied(call, index)) {
        if (interceptor_restore(call, index) < 0) {
            Py_XDECREF(exception);
            return NULL;
        }
        if (oomkit_extras_unknown(call, index) != NULL) {
            return oomkit_extras_raise(call, index, exception);
        }
        oomkit_exception_give(exception); /* all is as before: the call is replayed */
        return NULL;
    }
    moved = interceptor_moved(self, index, exception);
    if (moved < 0) {
        Py_XDECREF(exception);
        return NULL;
    }
    if (moved == 0 && !may_retry) {
        oomkit_exception_give(exception);
        return NULL;
    }
    handled = PyErr_GetHandledException();
    oomkit_exception_drop(st, exception, handled);
    Py_XDECREF(handled);
    if (moved == 1) {
        return oomkit_half_updated(
            call,
            "%s.step() ran out of memory after it had changed a parameter or its "
            "state: the update is half done and cannot be undone; restore a "
            "checkpoint, or pass optimizer_safety=\"parts\" or \"copy\" to "
            "auto_batch" SEE("partial-update"),
            Py_TYPE(self->target)->tp_name);
    }
    /* An error of it is in flight. */
    (void)oomkit_device_empty_cache(st, oomkit_engine_device_of_failure(call));
    return NULL;
}

/* A step() whose closure ran a backward is neither split nor retried. Steals `result`.
 */
static PyObject *
interceptor_computed(interceptor_object *self, int index, PyObject *result)
{
    oomkit_call *call = self->call;

    call->refused.why = OOMKIT_CLOSURE_REFUSAL;
    if (result != NULL) {
        oomkit_update_becomes_final(call);
        oomkit_update_worked(call, self->target);
    } else if (oomkit_exception_is_oom(call->st)) {
        PyObject *exception = oomkit_exception_take(); /* owned, given back */
        oomkit_update_broke_off(call, self->target);
        if (oomkit_part_is_copied(call, index) &&
            interceptor_restore(call, index) < 0) {
            Py_DECREF(exception);
            return NULL;
        }
        oomkit_exception_give(exception);
    }
    return result;
}

/* The step() itself. */
static PyObject *
interceptor_run(interceptor_object *self, int closure, PyObject *const *args,
                size_t nargsf, PyObject *kwnames)
{
    oomkit_call *call = self->call;
    int phase = oomkit_phase_set(call->st, OOMKIT_PHASE_OPTIMIZER);
    int outer = oomkit_update_closure(call, closure && call->split);
    PyObject *result; /* owned */

    result = oomkit_interceptor_original(self, args, nargsf, kwnames);
    oomkit_update_closure(call, outer);
    oomkit_phase_set(call->st, phase);
    call->refused.raised |= result == NULL && closure && call->split &&
                            PyErr_ExceptionMatches(call->st->SplitError);
    return result;
}

/* The same, and what it needed, where that was near to what there was. */
static PyObject *
interceptor_measured(interceptor_object *self, int measure, int closure,
                     PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    oomkit_call *call = self->call;
    oomkit_peak_window window;
    PyObject *result; /* owned */
    uint64_t left;

    if (!measure) {
        return interceptor_run(self, closure, args, nargsf, kwnames);
    }
    oomkit_device_begin(call->st, call->device, call->options->reset_peaks, &window);
    result = interceptor_run(self, closure, args, nargsf, kwnames);
    left = oomkit_device_allocated(call->st, call->device);
    oomkit_device_end(call->st, &window);
    if (result != NULL && window.peak_allocated_bytes != OOMKIT_UNKNOWN &&
        left != OOMKIT_UNKNOWN && window.peak_allocated_bytes > left) {
        oomkit_update_measured(call, self->target, window.peak_allocated_bytes - left);
    }
    return result;
}

/* An update in parts; Py_NotImplemented (new reference) where it cannot be cut: it may
 * well fail half done, so that there are copies to put back then. */
static PyObject *
interceptor_parts(interceptor_object *self, int index, PyObject *const *args,
                  size_t nargsf, PyObject *kwnames)
{
    oomkit_call *call = self->call;
    int phase = oomkit_phase_set(call->st, OOMKIT_PHASE_OPTIMIZER);
    PyObject *result = /* owned */
        oomkit_update_in_parts(call, self->target, index, self->original, args, nargsf,
                               kwnames);

    oomkit_phase_set(call->st, phase);
    if (result == NULL) {
        oomkit_update_broke_off(call, self->target);
    } else if (result == Py_NotImplemented) {
        if (oomkit_optimizer_copy(call, index) < 0) {
            Py_CLEAR(result);
        }
    } else {
        oomkit_update_worked(call, self->target);
        if (!interceptor_versions_tell(self)) {
            oomkit_update_becomes_final(call);
        }
    }
    return result;
}

/* The vote of the ranks before an update of which `fits` is known. Where one of theirs
 * is tight all go in parts, and it is known anew. 0 or -1. */
static int
interceptor_commit(interceptor_object *self, int index, int closure, int *fits)
{
    oomkit_call *call = self->call;
    const int tight =
        call->options->optimizer_copy || *fits == 0 || *fits == 3 ? OOMKIT_UPDATE_TIGHT
        : oomkit_update_is_near(call, self->target, *fits)        ? OOMKIT_UPDATE_NEAR
                                                                  : OOMKIT_UPDATE_ROOMY;
    const int copies = call->options->optimizer_copy;

    if (oomkit_ranks_commit(call, tight) < 0) {
        return -1;
    }
    if (call->options->optimizer_copy != copies && !closure) {
        *fits = oomkit_update_fits(call, self->target, index);
    }
    return *fits < 0 ? -1 : 0;
}

/* Is there room for it? *fits as oomkit_update_fits(); what may be wanted back is
 * copied, unless each part does that. Ranks vote, or later where a closure computes
 * the gradients. 0 or -1. */
static int
interceptor_room(interceptor_object *self, int index, int closure, int computes,
                 int *fits)
{
    oomkit_call *call = self->call;

    *fits = closure ? oomkit_update_fits_whole(call, self->target, index, computes)
                    : oomkit_update_fits(call, self->target, index);
    if (*fits < 0 || (!computes && oomkit_ranks_will_commit(call) &&
                      interceptor_commit(self, index, closure, fits) < 0)) {
        return -1;
    }
    if (*fits == 3 && oomkit_optimizer_copy(call, index) < 0) {
        return -1;
    }
    return call->options->optimizer_copy &&
                   ((*fits != 0 && oomkit_optimizer_copy(call, index) < 0) ||
                    oomkit_param_copies_rest(call) < 0)
               ? -1
               : 0;
}

/* It has failed and nothing has moved, but other ranks may have made it: 1 where it can
 * be made in parts at once; 0 or -1. */
static int
interceptor_goes_on(interceptor_object *self, int index, int closure)
{
    const int kept = closure ? 0 : oomkit_ranks_committed(self->call);
    int fits = 1;

    if (kept > 0) {
        fits = oomkit_update_fits(self->call, self->target, index);
    }
    return kept < 0 || fits < 0 ? -1 : fits == 0;
}

/* A step() whose closure computes the gradients. New reference or NULL. */
static PyObject *
interceptor_computes(interceptor_object *self, int index, PyObject *const *args,
                     size_t nargsf, PyObject *kwnames)
{
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    OWNED PyObject *given = NULL;

    if (oomkit_ranks_will_commit(self->call)) {
        given = oomkit_given_agreed(self, args, n, kwnames);
        if (given == NULL) {
            return NULL;
        }
        args = ((PyTupleObject *)given)->ob_item;
    }
    return interceptor_computed(
        self, index, oomkit_interceptor_original(self, args, (size_t)n, kwnames));
}

/* optimizer.step() for real: marked, predicted, and retried once if nothing moved. A
 * closure without a backward before it computes the gradients. */
static PyObject *
interceptor_step(interceptor_object *self, PyObject *const *args, size_t nargsf,
                 PyObject *kwnames)
{
    oomkit_call *call = self->call;
    PyObject *result; /* owned */
    int closure = oomkit_interceptor_has_closure(args, nargsf, kwnames);
    int computes = closure && call->backward.done == 0, index, attempt, fits, goes_on;
    uint64_t runs = closure ? oomkit_backward_runs() : 0;

    call->refused.why = computes ? OOMKIT_CLOSURE_REFUSAL : call->refused.why;
    if (oomkit_optimizer_mark_take(call, self->target, &index) < 0 ||
        interceptor_room(self, index, closure, computes, &fits) < 0) {
        return NULL;
    }
    if (computes) {
        return interceptor_computes(self, index, args, nargsf, kwnames);
    }
    oomkit_phase_optimizer(call);
    for (attempt = 0;; attempt++) {
        if (fits == 0) {
            result = interceptor_parts(self, index, args, nargsf, kwnames);
            if (result != Py_NotImplemented) {
                return result;
            }
            Py_DECREF(result);
        }
        result = interceptor_measured(self, fits >= 2, closure, args, nargsf, kwnames);
        if (closure && oomkit_backward_runs() != runs) {
            return interceptor_computed(self, index, result);
        }
        if (result != NULL) {
            oomkit_update_worked(call, self->target);
            if (!call->options->optimizer_copy && oomkit_part_is_copied(call, index)) {
                oomkit_part_forget(call, index);
            }
        }
        if (result != NULL && !interceptor_versions_tell(self)) {
            oomkit_update_becomes_final(call);
        }
        if (result != NULL || oomkit_update_failed_shared(call, self->target) ||
            !oomkit_exception_is_oom(call->st)) {
            return result;
        }
        call->tries.ooms++;
        oomkit_update_failed(call, self->target);
        result = interceptor_after_oom(
            self, index, attempt == 0 && !closure && !interceptor_is_hooked(self));
        if (PyErr_Occurred()) {
            oomkit_update_broke_off(call, self->target);
            return NULL;
        }
        goes_on = interceptor_goes_on(self, index, closure);
        if (goes_on < 0) {
            return NULL;
        }
        fits = goes_on ? 0 : fits;
        oomkit_window_update_again(call);
    }
}

/* The same, with the arguments of the whole batch. */
static PyObject *
interceptor_optimizer(interceptor_object *self, PyObject *const *args, size_t nargsf,
                      PyObject *kwnames)
{
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    OWNED PyObject *given = NULL;

    if (!self->call->split || oomkit_update_is_nested(self->call) ||
        (n == 0 && kwnames == NULL)) {
        return interceptor_step(self, args, nargsf, kwnames);
    }
    given = oomkit_given_settle(self, args, n, kwnames);
    if (given == NULL) {
        return NULL;
    }
    return interceptor_step(self, ((PyTupleObject *)given)->ob_item, (size_t)n,
                            kwnames);
}

/* What is not an optimizer: a scheduler or update() moves on for good when it returns.
 */
static PyObject *
interceptor_other(interceptor_object *self, PyObject *const *args, size_t nargsf,
                  PyObject *kwnames)
{
    oomkit_call *call = self->call;
    PyObject *stepped = /* borrowed */
        self->kind == OOMKIT_OWNER_SCHEDULER
            ? self->target
            : oomkit_interceptor_optimizer(self, args, nargsf, kwnames);
    const oomkit_update update = {self, stepped, args, nargsf, kwnames, 0};
    PyObject *result; /* owned */

    if ((self->kind == OOMKIT_OWNER_SCALER &&
         oomkit_scaler_mark(call, self->target) < 0) ||
        (stepped != NULL && oomkit_attributes_mark(call, stepped) < 0)) {
        return NULL;
    }
    if (call->options->optimizer_copy && (oomkit_owner_copy(call, self->target) < 0 ||
                                          oomkit_param_copies_rest(call) < 0)) {
        return NULL;
    }
    if (oomkit_tell_update_runs(call, &update) < 0) {
        return NULL;
    }
    result = oomkit_interceptor_original(self, args, nargsf, kwnames);
    if (result != NULL &&
        (self->kind == OOMKIT_OWNER_SCHEDULER || self->kind == OOMKIT_OWNER_AVERAGED ||
         self->name == call->st->str_update)) {
        oomkit_update_becomes_final(call);
    }
    return result;
}

/* A scheduler's call. Its arguments are those of the whole batch, once it is the one
 * real call of a split call. */
static PyObject *
interceptor_scheduler(interceptor_object *self, PyObject *const *args, size_t nargsf,
                      PyObject *kwnames)
{
    oomkit_call *call = self->call;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    Py_ssize_t total = n + (kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames));
    oomkit_held_arguments given = {self->target, args, n, kwnames, NULL, 0};
    PyObject *result; /* owned */
    PyObject **vector;

    if (call->split && !oomkit_update_is_nested(call) &&
        oomkit_tell_arguments_settle(call, &given) < 0) {
        Py_XDECREF(given.instead);
        return NULL;
    }
    if (given.instead == NULL) {
        return interceptor_other(self, args, nargsf, kwnames);
    }
    vector = PyMem_Malloc((size_t)total * sizeof(PyObject *));
    if (vector == NULL) {
        Py_DECREF(given.instead);
        return PyErr_NoMemory();
    }
    memcpy(vector, args, (size_t)total * sizeof(PyObject *));
    vector[given.at] = given.instead;
    result = interceptor_other(self, vector, (size_t)n, kwnames);
    Py_DECREF(given.instead);
    PyMem_Free(vector);
    return result;
}

/* Does it move something itself? A scaler's step() has the optimizer do it, or does
 * not. */
static int
interceptor_updates(const interceptor_object *self)
{
    return self->kind != OOMKIT_OWNER_SCALER ||
           self->name == self->call->st->str_update;
}

/* It is made now, once, with what belongs to it. New reference or NULL. */
static PyObject *
interceptor_real(interceptor_object *self, PyObject *const *args, size_t nargsf,
                 PyObject *kwnames)
{
    oomkit_call *call = self->call;
    PyObject *result; /* owned */

    oomkit_update_enter(call);
    result = self->kind == OOMKIT_OWNER_OPTIMIZER
                 ? interceptor_optimizer(self, args, nargsf, kwnames)
             : self->kind == OOMKIT_OWNER_SCHEDULER
                 ? interceptor_scheduler(self, args, nargsf, kwnames)
                 : interceptor_other(self, args, nargsf, kwnames);
    if (oomkit_update_leave(call, result == NULL)) {
        if (result == NULL) {
            oomkit_attributes_undo(call);
        }
        oomkit_update_settled(call);
        if (result != NULL && oomkit_ranks_will_settle(call) &&
            !oomkit_updates_are_left(call) && oomkit_ranks_settle(call) < 0) {
            Py_CLEAR(result);
        }
    }
    return result;
}

PyObject *
oomkit_interceptor_call(PyObject *op, PyObject *const *args, size_t nargsf,
                        PyObject *kwnames)
{
    interceptor_object *self = interceptor_CAST(op);
    oomkit_call *call = self->call;
    oomkit_update update = {.method = NULL}; /* outermost, of a split call */
    PyObject *result;                        /* owned */

    if (self->kind == OOMKIT_OWNER_USER) { /* zero_grad */
        return oomkit_interceptor_clears(self, args, nargsf, kwnames);
    }
    if (self->is_state_dict) {
        return oomkit_interceptor_state_dict(self, args, nargsf, kwnames);
    }
    if (call == NULL || call != oomkit_call_current()) {
        return oomkit_interceptor_original(self, args, nargsf, kwnames);
    }
    if (oomkit_call_is_verified(call)) {
        Py_RETURN_NONE;
    }
    if (self->kind == OOMKIT_OWNER_ACCELERATOR) {
        int counts = call->split ? oomkit_accelerator_counts(self) : 1;
        return counts < 0    ? NULL
               : counts == 0 ? Py_NewRef(Py_None)
                             : oomkit_interceptor_original(self, args, nargsf, kwnames);
    }
    if (call->is_last && call->backward.done > 0 && !oomkit_update_runs(call) &&
        (oomkit_undone_buffers_check(call) < 0 || oomkit_hooks_check(call) < 0)) {
        return NULL;
    }
    if ((call->split || call->proof != NULL) && !oomkit_update_runs(call)) {
        update = (oomkit_update){
            self,    oomkit_interceptor_optimizer(self, args, nargsf, kwnames),
            args,    nargsf,
            kwnames, 0};
        if (oomkit_tell_update_begins(call, &update) < 0) {
            return NULL;
        }
        if (update.held) {
            Py_RETURN_NONE;
        }
    }
    if (interceptor_updates(self) && self->kind != OOMKIT_OWNER_OPTIMIZER &&
        (oomkit_ranks_commit(call, OOMKIT_UPDATE_ROOMY) < 0 ||
         (!oomkit_update_runs(call) && oomkit_ranks_settle(call) < 0))) {
        return NULL;
    }
    Py_INCREF(op); /* the method may take us out of the instance */
    result = interceptor_real(self, args, nargsf, kwnames);
    if (result != NULL && update.method != NULL &&
        oomkit_tell_update_ends(call, &update) < 0) {
        Py_CLEAR(result);
    }
    Py_DECREF(op);
    return result;
}

/* Attributes are those of what stood there before: schedulers ask for some. */
static PyObject *
interceptor_getattro(PyObject *op, PyObject *name)
{
    interceptor_object *self = interceptor_CAST(op);
    OWNED PyObject *method = NULL;
    int own = PyUnicode_CompareWithASCIIString(name, "__deepcopy__") == 0 ||
              PyUnicode_CompareWithASCIIString(name, "__reduce_ex__") == 0;

    if (self->original != NULL && !own) {
        return PyObject_GetAttr(self->original, name);
    }
    if (self->target == NULL || own) {
        return PyObject_GenericGetAttr(op, name);
    }
    method = PyObject_GetAttr((PyObject *)Py_TYPE(self->target), self->name);
    if (method != NULL && PyFunction_Check(method)) {
        Py_SETREF(method, PyMethod_New(method, self->target));
    }
    return method == NULL ? NULL : PyObject_GetAttr(method, name);
}

static int
interceptor_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(interceptor_CAST(op)->target);
    Py_VISIT(interceptor_CAST(op)->original);
    return 0;
}

int
oomkit_interceptor_clear(PyObject *op)
{
    Py_CLEAR(interceptor_CAST(op)->target);
    Py_CLEAR(interceptor_CAST(op)->original);
    return 0;
}

static void
interceptor_dealloc(PyObject *op)
{
    PyTypeObject *tp = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    if (interceptor_CAST(op)->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    oomkit_interceptor_clear(op);
    Py_CLEAR(interceptor_CAST(op)->name);
    tp->tp_free(op);
    Py_DECREF(tp);
}

static PyMethodDef interceptor_methods[] = {
    {"__deepcopy__", oomkit_interceptor_deepcopy, METH_O,
     "__deepcopy__(memo)\n--\n\nThe plain method of the copy."},
    {"__reduce_ex__", oomkit_interceptor_reduce, METH_O,
     "__reduce_ex__(protocol)\n--\n\nThe plain method."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef interceptor_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(interceptor_object, vectorcall),
     READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(interceptor_object, weakrefs), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot interceptor_slots[] = {
    {Py_tp_dealloc, interceptor_dealloc},    {Py_tp_traverse, interceptor_traverse},
    {Py_tp_clear, oomkit_interceptor_clear}, {Py_tp_getattro, interceptor_getattro},
    {Py_tp_call, PyVectorcall_Call},         {Py_tp_methods, interceptor_methods},
    {Py_tp_members, interceptor_members},    {0, NULL},
};

PyType_Spec oomkit_interceptor_spec = {
    .name = "oomkit._C._Interceptor",
    .basicsize = sizeof(interceptor_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = interceptor_slots,
};
