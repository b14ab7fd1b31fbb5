/* Seeing every backward: our callable in place of torch.autograd._engine_run_backward.
 *
 * Tensor.backward, torch.autograd.backward (however it was imported),
 * torch.autograd.grad and checkpoint all end there. Outside a protected call, and for
 * nested backwards, it passes through. Inside one, the rules are told before each
 * outermost backward and after it (module/wiring.c): they mark gradients, apply the
 * weight of the micro-batch and park what it has made. */
#include "hook.h"
#include "../py/tensor.h"
#include "../result/result.h"
#include "../undo/undo.h"

#include <structmember.h>

typedef struct backward_object {
    PyObject_HEAD
    PyObject *original; /* owned: what stood there before us */
    vectorcallfunc vectorcall;
} backward_object;

#define backward_CAST(op) ((backward_object *)(op))

/* Nested backwards of one thread outside protected calls. Those of a call are counted
 * by it: one that is made inside a backward (by a hook, in a reentrant checkpoint) has
 * outermost backwards like any other. */
static _Thread_local int backward_nesting;
static _Thread_local uint64_t backward_runs; /* that write to .grad, of this thread */

uint64_t
oomkit_backward_runs(void)
{
    return backward_runs;
}

int
oomkit_backward_nesting(void)
{
    const oomkit_call *call = oomkit_call_current();
    return call != NULL ? call->backward.depth : backward_nesting;
}

int
oomkit_backward_outside(void)
{
    return backward_nesting;
}

/* The root gradients times the weight, as a new tuple. New reference or NULL. */
static PyObject *
backward_weighted(oomkit_call *call, PyObject *gradients, double weight)
{
    Py_ssize_t i;
    OWNED PyObject *factor = PyFloat_FromDouble(weight);
    OWNED PyObject *source = PySequence_Tuple(gradients), *scaled = NULL;

    if (factor == NULL || source == NULL) {
        return NULL;
    }
    scaled = PyTuple_New(PyTuple_GET_SIZE(source));
    for (i = 0; scaled != NULL && i < PyTuple_GET_SIZE(source); i++) {
        PyObject *gradient = PyTuple_GET_ITEM(source, i); /* borrowed */
        PyObject *product = /* owned, stolen by the tuple */
            gradient == Py_None
                ? Py_NewRef(Py_None)
                : PyObject_CallMethodOneArg(gradient, call->st->str_mul, factor);
        if (product == NULL) {
            return NULL;
        }
        PyTuple_SET_ITEM(scaled, i, product);
    }
    return STEAL(scaled);
}

/* Does this run of the engine write to .grad? autograd.grad does not. torch's own calls
 * name that last, by a name that is ours. */
static int
backward_accumulates(oomkit_state *st, PyObject *const *args, size_t nargsf,
                     PyObject *kwnames)
{
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    Py_ssize_t i = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);

    while (i-- > 0) {
        if (PyTuple_GET_ITEM(kwnames, i) == st->str_accumulate_grad ||
            PyUnicode_Compare(PyTuple_GET_ITEM(kwnames, i), st->str_accumulate_grad) ==
                0) {
            return args[n + i] == Py_True;
        }
    }
    return n > 6 ? args[6] == Py_True : 0;
}

/* The call whose backward the engine runs (borrowed), while nothing else runs in it: a
 * backward on a thread of the engine's own (a device's) is inside that one. */
static oomkit_call *engine_call;
static int engine_calls, engine_others;

/* The engine itself, with the phase that fault filters see, in this call or outside
 * every one (NULL). */
static PyObject *
backward_engine(backward_object *self, oomkit_state *st, oomkit_call *call,
                PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    PyObject *result; /* owned */
    int *nesting = call != NULL ? &call->backward.depth : &backward_nesting;
    int phase = oomkit_phase_set(st, OOMKIT_PHASE_BACKWARD);
    void *outer = oomkit_nested_enter(call); /* borrowed */

    if (backward_accumulates(st, args, nargsf, kwnames)) {
        backward_runs++;
        st->engine_runs++;
    }
    if (call != NULL && *nesting == 0) {
        engine_call = engine_calls++ == 0 ? call : NULL;
    }
    ++*nesting;
    result = PyObject_Vectorcall(self->original, args, nargsf, kwnames);
    --*nesting;
    if (call != NULL && *nesting == 0) {
        engine_calls--;
        engine_call = NULL;
    }
    oomkit_nested_leave(call, outer);
    oomkit_phase_set(st, phase);
    return result;
}

/* The engine with the root gradients times the weight. New reference or NULL. */
static PyObject *
backward_by_weight(backward_object *self, oomkit_call *call, double weight,
                   PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Py_ssize_t i, n = PyVectorcall_NARGS(nargsf);
    Py_ssize_t total = n + (kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames));
    OWNED PyObject *scaled = NULL;
    PyObject *vector[12]; /* borrowed from the caller */

    if (n < 2 || total > 12) {
        call->refused.why =
            "torch's autograd engine was called in a way that oomkit does not know";
        return backward_engine(self, call->st, call, args, nargsf, kwnames);
    }
    scaled = backward_weighted(call, args[1], weight);
    if (scaled == NULL) {
        return NULL;
    }
    for (i = 0; i < total; i++) {
        vector[i] = args[i];
    }
    vector[1] = scaled;
    return backward_engine(self, call->st, call, vector, (size_t)n, kwnames);
}

/* An outermost backward of a protected call. */
static PyObject *
backward_protected(backward_object *self, oomkit_call *call, PyObject *const *args,
                   size_t nargsf, PyObject *kwnames)
{
    oomkit_backward backward = {
        .roots = PyVectorcall_NARGS(nargsf) > 0 ? args[0] : call->st->empty_tuple,
        .gradients = PyVectorcall_NARGS(nargsf) > 1 ? args[1] : Py_None,
        .weight = 1.0};
    PyObject *result; /* owned */

    if (backward_nesting > 0) { /* the call was made inside a backward */
        call->st->wiring->outside->nests(call->st);
    }
    call->training = 1;
    if (oomkit_tell_backward_begins(call, &backward) < 0) {
        oomkit_tell_backward_left(call);
        return NULL;
    }
    result =
        backward.weight == 0.0 ? Py_NewRef(Py_None)
        : backward.weight == 1.0
            ? backward_engine(self, call->st, call, args, nargsf, kwnames)
            : backward_by_weight(self, call, backward.weight, args, nargsf, kwnames);
    if (result == NULL) {
        call->backward.failed = call->backward.queued = 1;
        oomkit_tell_backward_fails(call, &backward);
        oomkit_tell_backward_left(call);
        return NULL;
    }
    call->backward.done++;
    call->backward.failed = 0; /* the step may have caught an earlier one's failure */
    if (oomkit_tell_backward_ends(call, &backward) < 0) {
        oomkit_tell_backward_left(call);
        Py_CLEAR(result);
    }
    return result;
}

/* The engine outside every protected call: it may be the second half of calls whose
 * losses were returned. */
static PyObject *
backward_outside(backward_object *self, oomkit_state *st, PyObject *const *args,
                 size_t nargsf, PyObject *kwnames)
{
    const oomkit_outside *outside = st->wiring->outside;

    if (st->chunks_out != NULL && backward_nesting == 0 &&
        backward_accumulates(st, args, nargsf, kwnames) &&
        st->wiring->part_runs_backward(st) < 0) {
        return NULL;
    }
    if (st->waiting != NULL) {
        int status = 0;
        if (backward_accumulates(st, args, nargsf, kwnames)) {
            if (outside->wanted(st)) {
                return outside->run(st, (PyObject *)self, args, nargsf, kwnames);
            }
            status = outside->engine(st, args, nargsf, kwnames);
        } else if (backward_nesting == 0 && PyVectorcall_NARGS(nargsf) > 0) {
            status = outside->engine_without_leaves(st, args[0]);
        }
        if (status != 0) {
            return NULL;
        }
    } else if (st->callers != NULL && backward_accumulates(st, args, nargsf, kwnames)) {
        outside->nests(st);
    }
    return backward_engine(self, st, NULL, args, nargsf, kwnames);
}

/* The call that this backward without one is a part of, for it runs on a thread that is
 * the engine's own. Borrowed, or NULL. */
static oomkit_call *
backward_of_thread(oomkit_state *st, PyObject *const *args, size_t nargsf,
                   PyObject *kwnames)
{
    return engine_call != NULL && engine_others == 0 && backward_nesting == 0 &&
                   PyVectorcall_NARGS(nargsf) > 0 &&
                   backward_accumulates(st, args, nargsf, kwnames) &&
                   oomkit_nested_in_engine(st)
               ? engine_call
               : NULL;
}

/* A backward of a protected call inside another one (a reentrant checkpoint, a custom
 * Function's), or one that accumulates nothing. */
static PyObject *
backward_inner(backward_object *self, oomkit_call *call, PyObject *const *args,
               size_t nargsf, PyObject *kwnames)
{
    oomkit_state *st = call->st;
    const int nested = backward_accumulates(st, args, nargsf, kwnames) &&
                       PyVectorcall_NARGS(nargsf) > 0;
    oomkit_backward backward = {.weight = 1.0};
    PyObject *result; /* owned */

    if (nested && oomkit_nested_any() && oomkit_nested_refuse(st, call) < 0) {
        return NULL;
    }
    backward.roots = nested ? args[0] : NULL;
    if (nested && oomkit_tell_backward_nests(call, &backward) < 0) {
        return NULL;
    }
    result = backward_engine(self, st, call, args, nargsf, kwnames);
    if (result == NULL && nested) {
        oomkit_tell_backward_fails(call, &backward);
    }
    if (result == NULL && call->backward.depth == 0) {
        call->backward.queued = 1; /* its unexecuted graph must be drained */
    }
    return result;
}

static PyObject *
backward_call(PyObject *op, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    backward_object *self = backward_CAST(op);
    oomkit_state *st = oomkit_state_of_type(Py_TYPE(op));
    oomkit_call *call = oomkit_call_current();
    oomkit_backward backward = {.weight = 1.0};
    PyObject *result; /* owned */

    if (call == NULL) {
        if (oomkit_nested_any() && backward_accumulates(st, args, nargsf, kwnames) &&
            oomkit_nested_refuse(st, NULL) < 0) {
            return NULL;
        }
        call = backward_of_thread(st, args, nargsf, kwnames);
        backward.roots = call != NULL ? args[0] : NULL;
        if (call != NULL && oomkit_tell_backward_nests(call, &backward) < 0) {
            return NULL;
        }
        engine_others += call == NULL;
        Py_INCREF(op);
        result = backward_outside(self, st, args, nargsf, kwnames);
        Py_DECREF(op);
        engine_others -= call == NULL;
        if (result == NULL && call != NULL) {
            oomkit_tell_backward_fails(call, &backward);
        }
        return result;
    }
    if (call->backward.depth > 0 || !backward_accumulates(st, args, nargsf, kwnames)) {
        return backward_inner(self, call, args, nargsf, kwnames);
    }
    Py_INCREF(op); /* the step may put something else in our place */
    result = call->backward.instead != NULL
                 ? call->backward.instead(call, self->original, args, nargsf, kwnames)
                 : backward_protected(self, call, args, nargsf, kwnames);
    Py_DECREF(op);
    return result;
}

/* torch.autograd.backward: only the second half of a call is protected here, because
 * the gradient of the root is made before the engine is called. */
static PyObject *
backward_outer(PyObject *op, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    backward_object *self = backward_CAST(op);
    oomkit_state *st = oomkit_state_of_type(Py_TYPE(op));
    PyObject *result; /* owned */

    if (st->waiting == NULL || oomkit_call_current() ||
        !st->wiring->outside->wanted(st)) {
        return PyObject_Vectorcall(self->original, args, nargsf, kwnames);
    }
    Py_INCREF(op);
    result = st->wiring->outside->run(st, self->original, args, nargsf, kwnames);
    Py_DECREF(op);
    return result;
}

static int
backward_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(backward_CAST(op)->original);
    return 0;
}

static int
backward_clear(PyObject *op)
{
    Py_CLEAR(backward_CAST(op)->original);
    return 0;
}

static void
backward_dealloc(PyObject *op)
{
    PyTypeObject *tp = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    backward_clear(op);
    tp->tp_free(op);
    Py_DECREF(tp);
}

static PyMemberDef backward_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(backward_object, vectorcall),
     READONLY, NULL},
    {"__wrapped__", T_OBJECT_EX, offsetof(backward_object, original), READONLY,
     "torch's own function."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot backward_slots[] = {
    {Py_tp_dealloc, backward_dealloc}, {Py_tp_traverse, backward_traverse},
    {Py_tp_clear, backward_clear},     {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, backward_members}, {0, NULL},
};

PyType_Spec oomkit_backward_spec = {
    .name = "oomkit._C._Backward",
    .basicsize = sizeof(backward_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = backward_slots,
};

/* Puts a callable of ours in front of torch.autograd's `original`. 0 or -1. */
static int
backward_put(oomkit_state *st, PyObject *name, PyObject *original, vectorcallfunc call,
             PyObject **kept)
{
    PyTypeObject *type = (PyTypeObject *)st->backward_type;
    backward_object *self = backward_CAST(type->tp_alloc(type, 0)); /* owned */

    if (self == NULL) {
        return -1;
    }
    self->vectorcall = call;
    self->original = Py_NewRef(original);
    if (PyObject_SetAttr(st->autograd_module, name, (PyObject *)self) < 0) {
        Py_DECREF(self);
        return -1;
    }
    Py_XSETREF(*kept, (PyObject *)self);
    return 0;
}

/* Puts our callables into torch.autograd, once. 0 or -1. */
int
oomkit_backward_install(oomkit_state *st)
{
    if (st->backward_patched) {
        return 0;
    }
    if (oomkit_watch_structure(st) < 0 ||
        backward_put(st, st->str_engine_run_backward, st->run_backward, backward_call,
                     &st->backward_hook) < 0 ||
        backward_put(st, st->str_backward, st->torch_backward, backward_outer,
                     &st->outer_hook) < 0 ||
        /* Where it is defined too, for code that takes it from there. */
        PyObject_SetAttr(st->graph_module, st->str_engine_run_backward,
                         st->backward_hook) < 0) {
        return -1;
    }
    st->backward_patched = 1;
    return 0;
}

/* backward=True or a callable: the loss of a result is run backward inside the call. */
int
oomkit_backward_run(oomkit_call *call, PyObject *result)
{
    oomkit_state *st = call->st;
    PyObject *how = call->options->backward; /* borrowed from options */
    OWNED PyObject *done = NULL, *loss = oomkit_result_loss(st, result);
    oomkit_tensor_facts facts;

    if (loss == NULL) {
        if (!PyErr_Occurred()) {
            oomkit_raise(
                st->SplitError,
                "auto_batch(backward=...) expected the step to return a loss (a "
                "tensor, a tuple with one, a mapping with 'loss'), got %s" SEE(
                    "backward-option"),
                Py_TYPE(result)->tp_name);
        }
        return -1;
    }
    if (oomkit_tensor_facts_get(st, loss, 0, &facts) < 0) {
        return -1;
    }
    if (facts.ndim != 0 && facts.bytes != 0 &&
        PyObject_Size(loss) != 1) { /* one element is what backward() itself accepts */
        OWNED PyObject *shape = PyObject_GetAttr(loss, st->str_shape);
        if (shape != NULL) {
            oomkit_raise(
                st->SplitError,
                "auto_batch(backward=...) expected a scalar loss, got a tensor of "
                "shape %S; return loss.mean() or loss.sum()" SEE("backward-option"),
                shape);
        }
        return -1;
    }
    if (!facts.requires_grad) {
        oomkit_raise(st->SplitError,
                     "auto_batch(backward=...) expected a loss that requires grad, got "
                     "one without: was it detached, or computed under no_grad()?" SEE(
                         "backward-option"));
        return -1;
    }
    done = how == Py_True ? PyObject_CallMethodNoArgs(loss, st->str_backward)
                          : PyObject_CallOneArg(how, loss);
    return done == NULL ? -1 : 0;
}
