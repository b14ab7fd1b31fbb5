/* A micro-batch whose result still needs backward: the caller will run it on what the
 * call returns, so the gradient that will reach the loss is not known yet.
 *
 * A scalar loss: the backward runs now, with the gradient that is likely; the
 * caller's backward scales what it gave by what really came. A loss with a row per
 * sample: only its values are kept, and the call is run again when the gradient is
 * there. */
#include "deferred.h"
#include "../accum/accum.h"
#include "../call/call.h"
#include "../call/step.h"
#include "../py/tensor.h"
#include "../result/result.h"
#include "../undo/gradients.h"

static int
returned_differs(oomkit_call *call)
{
    return oomkit_refuse_split(
        call,
        "its micro-batches return different kinds of results (a loss that needs "
        "backward() in one, none or one of another shape in micro-batch %lld of "
        "%lld)" SEE("micro-batches-differ"),
        (long long)(call->cut->at + 1), (long long)call->cut->count);
}

static int
returned_shape(oomkit_call *call, PyObject *loss)
{
    OWNED PyObject *shape = PyObject_GetAttr(loss, call->st->str_shape);

    if (shape == NULL) {
        return -1;
    }
    oomkit_refuse(
        call,
        "auto_batch cannot split a step that returns a loss of shape %S for %lld rows: "
        "return a scalar, or one row per sample" SEE("loss-shape"),
        shape, (long long)call->cut->slices[call->cut->at].length);
    return oomkit_split_alone(call);
}

/* tensor.numel(), or -1 with an exception. */
static Py_ssize_t
returned_numel(oomkit_state *st, PyObject *tensor)
{
    OWNED PyObject *number = PyObject_CallMethodNoArgs(tensor, st->str_numel);

    return number == NULL ? -1 : PyLong_AsSsize_t(number);
}

/* Nothing tells: the attempt is begun again with more rows in its first micro-batch.
 * Where that has been done, or must not be, -1 with SplitError. -1 always. */
static int
returned_single_ask(oomkit_call *call, PyObject *loss)
{
    OWNED PyObject *shape = NULL;

    if (!call->tries.widened && !call->cut->forced) {
        call->tries.restart = OOMKIT_RESTART_WIDER;
        oomkit_raise(
            call->st->SplitError,
            "auto_batch starts the step again, with more than one row in the first "
            "micro-batch. Do not catch this error in the step" SEE("let-errors-pass"));
        return -1;
    }
    shape = PyObject_GetAttr(loss, call->st->str_shape);
    if (shape == NULL) {
        return -1;
    }
    return oomkit_refuse(
        call,
        "auto_batch cannot tell whether the loss of shape %S that a micro-batch of one "
        "row returned is the loss of the batch, or one value per sample; return a "
        "scalar (loss.reshape(())), or pass min_micro_batch=2" SEE("loss-shape"),
        shape);
}

/* One element of one row: a row, or a loss of shape [1]? What is known of the whole
 * batch's tells. 1 it is a scalar, 0, or -1. */
static int
returned_single_is_scalar(oomkit_call *call, PyObject *loss)
{
    Py_ssize_t elements;

    if (call->deferred.replayed != NULL) {
        elements = returned_numel(call->st, call->deferred.replayed->gradient);
        return elements < 0 ? -1 : elements == 1 && call->batch.rows > 1;
    }
    if (call->cut->at > 0) {
        return call->deferred.returned == OOMKIT_RETURNED_EAGER;
    }
    return call->step->single_loss == 0 ? returned_single_ask(call, loss)
                                        : call->step->single_loss == 2;
}

/* Is the loss a scalar (1), or has it a row per sample (0)? -1 with SplitError. */
static int
returned_is_scalar(oomkit_call *call, PyObject *loss, const oomkit_tensor_facts *facts)
{
    Py_ssize_t elements;
    int scalar;

    if (facts->ndim == 0) {
        return 1;
    }
    elements = returned_numel(call->st, loss);
    if (elements < 0) {
        return -1;
    }
    if (elements == 1 && call->cut->slices[call->cut->at].length == 1) {
        return returned_single_is_scalar(call, loss);
    }
    scalar = facts->size != call->cut->slices[call->cut->at].length;
    if (scalar && elements != 1) {
        return returned_shape(call, loss);
    }
    if (call->cut->slices[call->cut->at].length > 1) {
        call->step->single_loss = 1 + scalar;
    }
    return scalar;
}

/* loss.backward(gradient=..., inputs=...). Both may be NULL. 0 or -1. */
static int
returned_backward(oomkit_call *call, PyObject *loss, PyObject *gradient)
{
    oomkit_state *st = call->st;
    OWNED PyObject *names = NULL, *method = NULL, *done = NULL;
    PyObject *stack[2]; /* borrowed */
    Py_ssize_t n = 0;

    if (gradient != NULL && call->deferred.inputs != NULL) {
        names = PyTuple_Pack(2, st->str_gradient, st->str_inputs);
    } else {
        names = gradient != NULL ? PyTuple_Pack(1, st->str_gradient) : PyTuple_New(0);
    }
    if (gradient != NULL) {
        stack[n++] = gradient;
    }
    if (n == 1 && call->deferred.inputs != NULL) {
        stack[n++] = call->deferred.inputs;
    }
    method = names ? PyObject_GetAttr(loss, st->str_backward) : NULL;
    done = method ? PyObject_Vectorcall(method, stack, 0, names) : NULL;
    return done == NULL ? -1 : 0;
}

/* The gradient that reached the whole loss, as this micro-batch's loss has to get it.
 * New reference or NULL. */
static PyObject *
returned_gradient(oomkit_call *call, PyObject *loss, int scalar)
{
    oomkit_state *st = call->st;
    PyObject *whole = call->deferred.replayed->gradient; /* borrowed */
    const oomkit_slice *slice = &call->cut->slices[call->cut->at];
    oomkit_tensor_facts facts;

    if (oomkit_tensor_facts_get(st, whole, call->options->dim, &facts) < 0) {
        return NULL;
    }
    if (scalar) {
        OWNED PyObject *shape = PyObject_GetAttr(loss, st->str_shape);
        return shape == NULL ? NULL
                             : PyObject_CallMethodOneArg(whole, st->str_reshape, shape);
    }
    if (facts.ndim < 1 || facts.size != call->batch.rows) {
        returned_shape(call, loss);
        return NULL;
    }
    call->deferred.rowwise = 1;
    return PyObject_CallMethod(whole, "narrow", "LLL", (long long)call->options->dim,
                               (long long)slice->start, (long long)slice->length);
}

static int
returned_replay(oomkit_call *call, PyObject *loss, int scalar)
{
    OWNED PyObject *gradient = NULL, *own = NULL;

    if ((scalar
             ? oomkit_losses_replay(call, loss)
             : oomkit_losses_rows(call, loss, &call->deferred.replayed->value)) < 0) {
        return -1;
    }
    if (call->cut->count == 1 && !scalar &&
        call->proof == NULL) { /* the whole batch again */
        gradient = Py_NewRef(call->deferred.replayed->gradient);
    } else {
        gradient = returned_gradient(call, loss, scalar);
    }
    if (gradient !=
        NULL) { /* a backward that changes it must not change the noted one */
        own = PyObject_CallMethodNoArgs(gradient, call->st->str_clone);
    }
    return own == NULL ? -1 : returned_backward(call, loss, own);
}

/* The backward of a scalar loss, before the caller's. 0 or -1. */
static int
returned_eager(oomkit_call *call, PyObject *loss)
{
    OWNED PyObject *shape = NULL, *gradient = NULL;

    oomkit_grads_begin_eager(call);
    if (call->cut->at == 0) {
        int half = call->step->half ? 1 : oomkit_graph_has_half(call->st, loss);
        if (half < 0 || oomkit_eager_assume(call, &call->deferred.assumed) < 0) {
            return -1;
        }
        call->step->half = half;
    }
    if (call->deferred.assumed == 1.0) {
        return returned_backward(call, loss, NULL);
    }
    shape = PyObject_GetAttr(loss, call->st->str_shape);
    if (shape != NULL) {
        gradient =
            PyObject_CallMethod(loss, "new_full", "Od", shape, call->deferred.assumed);
    }
    return gradient == NULL ? -1 : returned_backward(call, loss, gradient);
}

/* A row per sample: its backward comes later, but who takes part in it is asked now. */
static int
returned_defer(oomkit_call *call, PyObject *loss)
{
    return call->cut->at == 0 ? oomkit_unknown_meet(call, loss, 0) : 0;
}

/* The loss of this micro-batch's result, when it needs backward: 1 and *loss (owned);
 * 0; -1. */
static int
returned_loss(oomkit_call *call, PyObject *result, PyObject **loss,
              oomkit_tensor_facts *facts)
{
    oomkit_state *st = call->st;

    *loss = result == Py_None ? NULL : oomkit_result_loss(st, result);
    if (*loss == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    if (oomkit_tensor_facts_get(st, *loss, call->options->dim, facts) < 0) {
        Py_CLEAR(*loss);
        return -1;
    }
    if (!facts->requires_grad) {
        Py_CLEAR(*loss);
        return 0;
    }
    return 1;
}

static int
returned_micro(oomkit_call *call, PyObject *result)
{
    OWNED PyObject *loss = NULL;
    oomkit_tensor_facts facts;
    oomkit_returned kind;
    int scalar, state;

    if (call->backward.done > 0) { /* it is a whole step, or a part with its backward */
        return call->deferred.returned != OOMKIT_RETURNED_NOTHING ||
                       call->deferred.replayed != NULL
                   ? returned_differs(call)
                   : 0;
    }
    state = returned_loss(call, result, &loss, &facts);
    if (state <= 0) {
        return state < 0 ? -1
               : call->deferred.returned != OOMKIT_RETURNED_NOTHING ||
                       call->deferred.replayed != NULL
                   ? returned_differs(call)
                   : 0;
    }
    scalar = returned_is_scalar(call, loss, &facts);
    if (scalar < 0) {
        return -1;
    }
    if (call->deferred.replayed != NULL) {
        return returned_replay(call, loss, scalar);
    }
    if (call->cut->at > 0 &&
        oomkit_loss_place(call->st, result) != oomkit_join_loss_at(&call->cut->join)) {
        return PyErr_Occurred() ? -1 : returned_differs(call);
    }
    kind = scalar ? OOMKIT_RETURNED_EAGER : OOMKIT_RETURNED_DEFERRED;
    if (call->cut->at > 0 && call->deferred.returned != kind) {
        return returned_differs(call);
    }
    call->deferred.returned = kind;
    state = oomkit_hooks_loss(call, loss);
    if (state != 0) {
        return state;
    }
    return scalar ? returned_eager(call, loss) : returned_defer(call, loss);
}

static int
returned_inside(oomkit_call *call, PyObject *roots)
{
    int failed = 0;
    const oomkit_deferred *p = oomkit_graph_waiting(call->st, roots, &failed);

    if (p != NULL) {
        return oomkit_refuse_step(
            call,
            "it runs backward() through a loss that another decorated call (%U) "
            "returned, once for each micro-batch; call that backward() outside, or "
            "make one decorated step of both" SEE("returned-loss"),
            p->retired ? call->options->label : p->step->options.label);
    }
    return failed ? -1 : 0;
}

/* --- what happens in a call --- */

static int
deferred_backward(oomkit_call *call, oomkit_backward *backward)
{
    if (!call->split || call->cut->at > 0) {
        return 0;
    }
    return (call->st->waiting != NULL && returned_inside(call, backward->roots) < 0) ||
                   (!oomkit_has_said(call->step, OOMKIT_SAID_HALF) &&
                    oomkit_eager_say_half(call, backward->roots) < 0)
               ? -1
               : 0;
}

static int
deferred_micro_returns(oomkit_call *call, PyObject *result)
{
    return call->split || call->deferred.replayed != NULL ? returned_micro(call, result)
                                                          : 0;
}

static int
deferred_call_returns(oomkit_call *call, PyObject *result)
{
    return call->deferred.returned != OOMKIT_RETURNED_NOTHING
               ? oomkit_deferred_attach(call, result)
               : oomkit_deferred_offer(call, result);
}

const oomkit_rule oomkit_deferred_rule = {.backward_begins = deferred_backward,
                                          .micro_returns = deferred_micro_returns,
                                          .call_returns = deferred_call_returns};
