/* The gradients of a loss that was split before its backward: computed with the
 * gradient that is likely to come, scaled by what really came. */
#include "deferred.h"
#include "../call/step.h"
#include "../py/half_made.h"
#include "../py/modes.h"
#include "../py/tensor.h"
#include "../undo/undo.h"

#include <math.h>

enum { DTYPE_HALF = 5 }; /* c10::ScalarType */

/* A Python number or 0-d tensor as a double. -1 with an exception. */
static int
number_of(oomkit_state *st, PyObject *object, double *value)
{
    int tensor = oomkit_has_attribute(object, st->str_item);
    OWNED PyObject *number = NULL;

    if (tensor < 0) {
        return -1;
    }
    number =
        tensor ? PyObject_CallMethodNoArgs(object, st->str_item) : Py_NewRef(object);
    if (number == NULL) {
        return -1;
    }
    *value = PyFloat_AsDouble(number);
    return *value == -1.0 && PyErr_Occurred() ? -1 : 0;
}

/* The present scale of the GradScaler that takes part; 1 without one. 0 or -1. */
static int
scale_now(oomkit_state *st, const oomkit_participants *parts, double *scale)
{
    *scale = 1.0;
    EACH_OWNER (scaler, parts, OWNERS_OF(OOMKIT_OWNER_SCALER)) {
        OWNED PyObject *answer = PyObject_CallMethod(scaler.object, "get_scale", NULL);
        return answer == NULL ? -1 : number_of(st, answer, scale);
    }
    return 0;
}

/* A gradient seen before is kept relative to the scale of its time. */
static int
factor_from_last(oomkit_call *call, double *factor)
{
    oomkit_step *step = call->step;
    double scale, value;

    *factor = 1.0;
    if (step->last_gradient == NULL) {
        return 0;
    }
    if (number_of(call->st, step->last_gradient, &value) < 0 ||
        scale_now(call->st, call->parts, &scale) < 0) {
        return -1;
    }
    value /= scale;
    if (isfinite(value) && value != 0.0) {
        *factor = value;
    }
    return 0;
}

int
oomkit_eager_assume(oomkit_call *call, double *gradient)
{
    oomkit_step *step = call->step;
    double scale;

    if (step->last_factor == 0.0 && factor_from_last(call, &step->last_factor) < 0) {
        return -1;
    }
    if (scale_now(call->st, call->parts, &scale) < 0) {
        return -1;
    }
    *gradient = scale * step->last_factor;
    if (!isfinite(*gradient) || *gradient == 0.0) {
        *gradient = 1.0;
    }
    return 0;
}

int
oomkit_eager_say_half(oomkit_call *call, PyObject *roots)
{
    oomkit_state *st = call->st;
    Py_ssize_t i = 0;
    int half;

    (void)oomkit_say_once(call->step, OOMKIT_SAID_HALF);
    while (i < call->parts->owner_count &&
           call->parts->owners[i].kind != OOMKIT_OWNER_SCALER) {
        i++;
    }
    half = i < call->parts->owner_count ? oomkit_graph_has_half(st, roots) : 0;
    if (half <= 0) {
        return half;
    }
    return oomkit_say(
        st, "warning", "sO",
        "%s computes in fp16 and has a GradScaler: a sum over the whole batch "
        "overflows fp16 where those of its micro-batches do not, so that the scaler "
        "may "
        "skip an update and move its scale in another step than it would over the "
        "whole batch",
        call->options->label);
}

/* Would scaling lose anything? fp16 under- and overflows where fp32 does not. */
static int
eager_is_coarse(const oomkit_deferred *p)
{
    Py_ssize_t i;

    if (p->step->half) {
        return 1;
    }
    for (i = 0; p->modes.autocast != NULL && i < PyList_GET_SIZE(p->modes.autocast);
         i++) {
        PyObject *pair = PyList_GET_ITEM(p->modes.autocast, i); /* borrowed */
        if (PyTuple_GET_ITEM(pair, 1) == p->st->float16) {
            return 1;
        }
    }
    for (i = 0; p->eager != NULL && i < p->eager_count; i++) {
        oomkit_tensor_facts facts;
        if (p->eager[i] == NULL) {
            continue;
        }
        if (oomkit_tensor_facts_get(p->st, p->eager[i], 0, &facts) < 0) {
            return -1;
        }
        if (facts.dtype == DTYPE_HALF) {
            return 1;
        }
    }
    return 0;
}

/* .grad of one parameter plus ratio times its eager gradient. 0 or -1. */
static int
deposit_one(oomkit_deferred *p, Py_ssize_t i, PyObject *ratio, int keep)
{
    oomkit_state *st = p->st;
    PyObject *param = p->parts->params[i]; /* borrowed */
    OWNED PyObject *gradient = PyObject_GetAttr(param, st->str_grad);
    OWNED PyObject *value = Py_NewRef(p->eager[i]);
    OWNED PyObject *sum = NULL;

    if (gradient == NULL) {
        return -1;
    }
    if (ratio != NULL) {
        Py_SETREF(value, PyObject_CallMethodOneArg(value,
                                                   keep || gradient != Py_None
                                                       ? st->str_mul
                                                       : st->str_mul_in_place,
                                                   ratio));
    } else if (gradient == Py_None && keep) {
        Py_SETREF(value, PyObject_CallMethodNoArgs(value, st->str_clone));
    }
    if (value == NULL) {
        return -1;
    }
    if (gradient == Py_None) {
        return PyObject_SetAttr(param, st->str_grad, value);
    }
    /* += as autograd accumulates: in place where the kinds allow it */
    sum = oomkit_half_made_refuse(st, gradient) < 0
              ? NULL
              : PyNumber_InPlaceAdd(gradient, value);
    return sum == NULL ? -1 : PyObject_SetAttr(param, st->str_grad, sum);
}

static int
deposit_all(oomkit_deferred *p, PyObject *ratio, int keep)
{
    int mode = oomkit_grad_mode_off(p->st), result = 0;
    Py_ssize_t i;

    if (mode < 0) {
        return -1;
    }
    EXEMPT (p->st) { /* what is added is there already */
        for (i = 0; p->eager != NULL && i < p->eager_count && result == 0; i++) {
            if (p->eager[i] != NULL) {
                result = deposit_one(p, i, ratio, keep);
                if (!keep) {
                    Py_CLEAR(p->eager[i]);
                }
            }
        }
    }
    return oomkit_grad_mode_back(p->st, mode, result);
}

int
oomkit_eager_deposit(oomkit_deferred *p, int keep)
{
    OWNED PyObject *ratio = NULL;
    double value, scale, factor;
    int coarse;
    int frozen = oomkit_flags_frozen_since(p->st, p->parts, &p->entry);

    if (frozen != 0) {
        return frozen; /* to be run again, which is refused with that reason */
    }
    if (number_of(p->st, p->gradient, &value) < 0 ||
        scale_now(p->st, p->parts, &scale) < 0) {
        return -1;
    }
    factor = value / scale;
    if (isfinite(factor) && factor != 0.0) {
        p->step->last_factor = factor;
    }
    if (value != p->assumed) {
        coarse = eager_is_coarse(p);
        if (coarse != 0) {
            return coarse;
        }
        ratio = PyFloat_FromDouble(value / p->assumed);
        if (ratio == NULL) {
            return -1;
        }
    }
    return deposit_all(p, ratio, keep);
}

void
oomkit_eager_free(oomkit_deferred *p)
{
    PyObject **eager = p->eager;
    Py_ssize_t i;

    p->eager = NULL;
    for (i = 0; eager != NULL && i < p->eager_count; i++) {
        Py_XDECREF(eager[i]);
    }
    PyMem_Free(eager);
}
