/* Facts of tensors, and the search for the TensorImpl pointer that the bridge starts
 * from. */
#include "tensor.h"
#include "errors.h"
#include "../core/status.h"

#include <string.h>

int
oomkit_tensor_facts_get(oomkit_state *st, PyObject *tensor, int64_t dim,
                        oomkit_tensor_facts *facts)
{
    return st->bridge->tensor_facts(tensor, st->impl_offset, dim, facts) == OOMKIT_OK
               ? 0
               : oomkit_attribute_facts(tensor, dim, facts);
}

int
oomkit_tensor_wants_grad(oomkit_state *st, PyObject *tensor)
{
    const void *const holder = tensor;
    oomkit_tensor_facts facts;
    uint8_t wants;

    if (Py_IS_TYPE(tensor, (PyTypeObject *)st->Tensor) &&
        st->bridge->versions(&holder, st->impl_offset, 1, NULL, &wants, NULL) ==
            OOMKIT_OK) {
        return wants;
    }
    return oomkit_tensor_facts_get(st, tensor, 0, &facts) < 0 ? -1
                                                              : facts.requires_grad;
}

/* --- calibration --- */

#define SAMPLES 4

/* torch.ones(size, device="cpu", requires_grad=...), whatever the default device is.
 * New reference or NULL. */
static PyObject *
sample_make(oomkit_state *st, int size, int requires_grad)
{
    OWNED PyObject *args = Py_BuildValue("(i)", size);
    OWNED PyObject *kwargs = Py_BuildValue("{sssO}", "device", "cpu", "requires_grad",
                                           requires_grad ? Py_True : Py_False);

    return args == NULL || kwargs == NULL ? NULL
                                          : PyObject_Call(st->torch_ones, args, kwargs);
}

/* `_cdata`: the TensorImpl as torch says it. NULL with an exception. */
static void *
sample_impl(oomkit_state *st, PyObject *tensor)
{
    OWNED PyObject *number = PyObject_GetAttr(tensor, st->str_cdata);

    return number == NULL ? NULL : PyLong_AsVoidPtr(number);
}

/* The one place in a tensor's object where all samples have their own TensorImpl; -1
 * without an exception when there is none, or with one. */
static ptrdiff_t
offset_find(oomkit_state *st, PyObject *const *samples)
{
    void *impls[SAMPLES], *word;
    const ptrdiff_t size = ((PyTypeObject *)st->Tensor)->tp_basicsize;
    const ptrdiff_t step = (ptrdiff_t)sizeof(void *);
    int i;

    for (i = 0; i < SAMPLES; i++) {
        impls[i] = sample_impl(st, samples[i]);
        if (impls[i] == NULL) {
            return -1;
        }
    }
    for (ptrdiff_t at = (ptrdiff_t)sizeof(PyObject); at + step <= size; at += step) {
        for (i = 0; i < SAMPLES; i++) {
            memcpy(&word, (const char *)samples[i] + at, sizeof word);
            if (word != impls[i]) {
                break;
            }
        }
        if (i == SAMPLES) {
            return at;
        }
    }
    return -1;
}

/* One comparison of a gradient with a mark: what the bridge finds, or -1. */
static int
gradient_state(const oomkit_bridge *bridge, PyObject *tensor, ptrdiff_t offset,
               const oomkit_grad_mark *mark)
{
    const void *holder = tensor;
    uint8_t state = 0;
    size_t moved = 0;

    if (bridge->grads_compare(&holder, offset, 1, mark, &state, NULL, &moved) !=
        OOMKIT_OK) {
        return -1;
    }
    return moved == (size_t)(state != OOMKIT_GRAD_SAME) ? state : -1;
}

/* Does the bridge see the gradient of `tensor` as torch does: there, changed in place,
 * gone? `gradient` is any tensor of its shape. 1 or 0; may leave an exception. */
static int
gradients_agree(oomkit_state *st, PyObject *tensor, PyObject *gradient,
                ptrdiff_t offset)
{
    const oomkit_bridge *bridge = st->bridge;
    const void *holder = tensor;
    oomkit_grad_mark mark = {NULL, 0};
    OWNED PyObject *same = NULL;
    int agrees;

    if (bridge->grads_mark(&holder, offset, 1, &mark) != OOMKIT_OK ||
        mark.grad != NULL || PyObject_SetAttr(tensor, st->str_grad, gradient) < 0 ||
        gradient_state(bridge, tensor, offset, &mark) != OOMKIT_GRAD_NEW ||
        bridge->grads_mark(&holder, offset, 1, &mark) != OOMKIT_OK) {
        return 0;
    }
    agrees = mark.grad == sample_impl(st, gradient) &&
             gradient_state(bridge, tensor, offset, &mark) == OOMKIT_GRAD_SAME;
    same = PyObject_CallMethod(gradient, "zero_", NULL);
    agrees = agrees && same != NULL &&
             gradient_state(bridge, tensor, offset, &mark) == OOMKIT_GRAD_MOVED &&
             PyObject_SetAttr(tensor, st->str_grad, Py_None) == 0 &&
             gradient_state(bridge, tensor, offset, &mark) == OOMKIT_GRAD_GONE;
    bridge->grads_release(&mark, 1);
    return agrees;
}

/* 1 when the bridge's facts of the tensor are those of its attributes, else 0; may
 * leave an exception. */
static int
facts_agree(oomkit_state *st, PyObject *tensor, ptrdiff_t offset)
{
    const void *holder = tensor;
    oomkit_tensor_facts ours, theirs;
    uint32_t version = UINT32_MAX;

    if (st->bridge->tensor_facts(tensor, offset, 0, &ours) != OOMKIT_OK ||
        st->bridge->versions(&holder, offset, 1, &version, NULL, NULL) != OOMKIT_OK ||
        oomkit_attribute_facts(tensor, 0, &theirs) < 0) {
        return 0;
    }
    return ours.ndim == theirs.ndim && ours.size == theirs.size &&
           ours.bytes == theirs.bytes && ours.version == theirs.version &&
           ours.version == version && ours.dtype == theirs.dtype &&
           ours.device_type == theirs.device_type &&
           ours.device_index == theirs.device_index &&
           ours.requires_grad == theirs.requires_grad &&
           ours.is_strided == theirs.is_strided;
}

/* 0 and st->impl_offset set, or -1; may leave an exception. */
static int
calibrate(oomkit_state *st, PyObject *const *samples)
{
    ptrdiff_t offset = offset_find(st, samples);

    if (offset < 0) {
        return -1;
    }
    for (int i = 0; i < SAMPLES; i++) {
        if (!facts_agree(st, samples[i], offset)) {
            return -1;
        }
    }
    if (!gradients_agree(st, samples[2], samples[1], offset) ||
        !facts_agree(st, samples[1], offset)) {
        return -1;
    }
    st->impl_offset = offset;
    return 0;
}

int
oomkit_tensor_calibrate(oomkit_state *st)
{
    PyObject *samples[SAMPLES] = {NULL}; /* owned */
    int fits = 0;

    st->bridge->exempt_enter();
    samples[0] = sample_make(st, 1, 0);
    samples[1] = sample_make(st, 3, 0);
    samples[2] = sample_make(st, 3, 1);
    if (samples[0] != NULL && samples[1] != NULL && samples[2] != NULL) {
        samples[3] = PyObject_CallOneArg(st->Parameter, samples[0]);
    }
    if (samples[3] != NULL) {
        fits = calibrate(st, samples) == 0;
    }
    for (int i = 0; i < SAMPLES; i++) {
        Py_XDECREF(samples[i]);
    }
    st->bridge->exempt_leave();
    return oomkit_state_passes() < 0 ? -1 : fits;
}

/* Of exactly these classes there is nothing to ask. */
static int
is_usual(const oomkit_state *st, PyObject *tensor)
{
    return Py_IS_TYPE(tensor, (PyTypeObject *)st->Tensor) ||
           PyObject_TypeCheck(tensor, (PyTypeObject *)st->Parameter);
}

/* An attribute that not all have. New reference, or NULL without an exception. */
static PyObject *
attribute_if_any(PyObject *tensor, const char *name)
{
    PyObject *found = PyObject_GetAttrString(tensor, name);

    if (found == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear(); /* torch takes the same for no */
    } else if (found == NULL) {
        oomkit_error_unraised(tensor); /* who asks has no way to fail */
    }
    return found;
}

int
oomkit_tensor_is_parameter(const oomkit_state *st, PyObject *tensor)
{
    OWNED PyObject *says = NULL;

    if (is_usual(st, tensor)) {
        return !Py_IS_TYPE(tensor, (PyTypeObject *)st->Tensor);
    }
    says = attribute_if_any(tensor, "_is_param");
    return says == Py_True;
}

PyObject *
oomkit_tensor_local(const oomkit_state *st, PyObject *tensor)
{
    PyObject *local = NULL; /* owned, returned */

    if (!is_usual(st, tensor)) {
        local = attribute_if_any(tensor, "_local_tensor");
        if (local != NULL && !oomkit_tensor_check(st, local)) {
            Py_CLEAR(local);
        }
    }
    return local != NULL ? local : Py_NewRef(tensor);
}

uint64_t
oomkit_tensor_sample(const oomkit_state *st, PyObject *tensor)
{
    OWNED PyObject *local = oomkit_tensor_local(st, tensor);

    return st->bridge->sample(local, st->impl_offset);
}

int
oomkit_number_of(oomkit_state *st, PyObject *argument, double *value)
{
    OWNED PyObject *item = NULL, *number = NULL;

    if (oomkit_tensor_check(st, argument)) {
        Py_ssize_t n; /* what float() accepts has one element */
        OWNED PyObject *numel = PyObject_CallMethod(argument, "numel", NULL);
        if (numel == NULL) {
            return -1;
        }
        n = PyLong_AsSsize_t(numel);
        if (n != 1) {
            return n == -1 && PyErr_Occurred() ? -1 : 0;
        }
        item = PyObject_CallMethod(argument, "item", NULL);
        if (item == NULL) { /* torch warns of float() where a gradient is wanted */
            return -1;
        }
    } else if (argument == Py_None || PyUnicode_Check(argument) ||
               Py_TYPE(argument)->tp_as_number == NULL ||
               (Py_TYPE(argument)->tp_as_number->nb_float == NULL &&
                Py_TYPE(argument)->tp_as_number->nb_index == NULL)) {
        return 0;
    }
    number = PyNumber_Float(item != NULL ? item : argument);
    if (number == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError) &&
            !PyErr_ExceptionMatches(PyExc_ValueError) &&
            !PyErr_ExceptionMatches(PyExc_OverflowError)) {
            return -1;
        }
        PyErr_Clear(); /* an array, an int without a float: the scheduler's to judge */
        return 0;
    }
    *value = PyFloat_AS_DOUBLE(number);
    return 1;
}
