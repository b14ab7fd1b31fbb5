/* A mean over nothing: a loop of the step's own over slices of its batch, which in a
 * micro-batch are empty, or labels all of which are ignored. Its loss is NaN and its
 * gradient 0, so that nothing would show but a gradient that is too small. A loss that
 * is NaN for what its rows hold has gradients that are, too. */
#include "accum.h"
#include "../call/call.h"
#include "../call/step.h"
#include "../py/modes.h"
#include "../py/tensor.h"
#include "../undo/gradients.h"

#include <math.h>

void
oomkit_nothing_begin(oomkit_call *call, PyObject *root)
{
    oomkit_tensor_facts facts;

    call->cut->losses.is_nan = 0;
    if (root == NULL || oomkit_loss_is_rowwise(call) || oomkit_call_is_replay(call)) {
        return;
    }
    if (oomkit_tensor_facts_get(call->st, root, 0, &facts) < 0) {
        oomkit_error_dismiss(); /* a loss that cannot be read is not judged */
        return;
    }
    /* Reading one on a device waits for it: in a site's first split call alone. */
    if (facts.device_type == 0 || !call->step->losses.compared) {
        call->cut->losses.is_nan = oomkit_loss_is_nan(call->st, root, &facts);
    }
}

/* Is the gradient finite? By its sum, which is not where an element is not. 1 (also
 * where there is none), 0 or -1. */
static int
gradient_is_finite(oomkit_state *st, PyObject *gradient)
{
    OWNED PyObject *sum = NULL, *number = NULL;

    if (gradient == Py_None) {
        return 1;
    }
    EXEMPT (st) {
        sum = PyObject_CallMethod(gradient, "sum", NULL);
        number = sum == NULL ? NULL : PyObject_CallMethodNoArgs(sum, st->str_item);
    }
    if (number == NULL) {
        oomkit_error_dismiss(); /* one that cannot be read (meta) says nothing */
        return 0;
    }
    return !PyFloat_Check(number) || isfinite(PyFloat_AS_DOUBLE(number));
}

static int
nothing_end(oomkit_call *call)
{
    Py_ssize_t i;
    int finite = 1, mode;

    if (!call->cut->losses.is_nan) {
        return 0;
    }
    call->cut->losses.is_nan = 0;
    mode = oomkit_grad_mode_off(call->st);
    for (i = 0; mode >= 0 && i < call->parts->param_count && finite == 1; i++) {
        PyObject *hosted = oomkit_grads_hosted_of(call, i); /* borrowed */
        OWNED PyObject *gradient =
            hosted == NULL ? grads_get(call, i) : Py_NewRef(hosted);
        finite = gradient == NULL ? -1 : gradient_is_finite(call->st, gradient);
    }
    if (mode < 0 || oomkit_grad_mode_back(call->st, mode, finite) != 1) {
        return PyErr_Occurred() ? -1 : 0;
    }
    return oomkit_refuse_split(
        call,
        "the loss of micro-batch %lld of %lld (%lld rows) is nan although its "
        "gradients are finite, as for a mean over no elements. Either the step cuts "
        "its batch into a fixed number of parts and one is empty (use `range(0, "
        "len(x), n)`, or leave accumulation to auto_batch), or every label is ignored "
        "(pass weight=)" SEE("empty-micro-batch"),
        (long long)(call->cut->at + 1), (long long)call->cut->count,
        (long long)call->cut->slices[call->cut->at].length);
}

/* A weight of 0 runs nothing: a mean over nothing is NaN, which times 0 would still be
 * NaN. */
static int
nothing_backward_ends(oomkit_call *call, const oomkit_backward *backward)
{
    if (backward->weight == 0.0) {
        call->cut->losses.is_nan = 0;
    }
    return nothing_end(call);
}

const oomkit_rule oomkit_empty_mean_rule = {.backward_ends = nothing_backward_ends};
