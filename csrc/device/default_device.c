/* What there is to know of a device without its figures: is it in use, which one does a
 * measurement without tensors mean, what is it called, is its work being captured. */
#include "torch_calls.h"
#include "../py/errors.h"
#include "../py/tensor.h"
#include "../core/status.h"

#include <stdio.h>

int
oomkit_device_by_bridge(const oomkit_state *st, int type)
{
    return oomkit_has_bridge(st) &&
           (type != OOMKIT_DEVICE_MPS ||
            st->bridge->device_initialized(type) != OOMKIT_EUNSUPPORTED);
}

int
oomkit_cuda_in_use(oomkit_state *st)
{
    int in_use = 0;

    KEEPING_EXCEPTION {
        OWNED PyObject *all =
            PyObject_GetAttr(st->cuda_module, st->str_default_generators);
        OWNED PyObject *answer = NULL;

        if (all != NULL && PyTuple_Check(all) && PyTuple_GET_SIZE(all) > 0) {
            answer = PyObject_CallMethod(st->cuda_module, "is_initialized", NULL);
        }
        in_use = answer != NULL && PyObject_IsTrue(answer) == 1;
        oomkit_error_dismiss(); /* what cannot be asked is not in use */
    }
    return in_use;
}

/* The same of any type that the bridge knows. */
static int
bridge_ready(oomkit_state *st, int type)
{
    const int status = st->bridge->device_initialized(type);

    return status == 1 ||
           (status == 0 && type == OOMKIT_DEVICE_CUDA && oomkit_cuda_in_use(st));
}

int
oomkit_device_ready(oomkit_state *st, oomkit_device device)
{
    int ready = 0;

    if (device.type == OOMKIT_DEVICE_CPU) {
        return 1;
    }
    if (oomkit_device_by_bridge(st, device.type)) {
        return bridge_ready(st, device.type);
    }
    KEEPING_EXCEPTION {
        ready = oomkit_torch_ready(st, device);
    }
    return ready;
}

int
oomkit_device_expandable(oomkit_state *st, oomkit_device device)
{
    int on = 0;

    if (oomkit_device_by_bridge(st, device.type)) {
        return st->bridge->device_expandable(device.type) == 1;
    }
    KEEPING_EXCEPTION {
        on = oomkit_torch_ready(st, device) && oomkit_torch_expandable(st, device.type);
    }
    return on;
}

/* The type of the accelerator that is in use, else the CPU's. */
static int
type_in_use(oomkit_state *st)
{
    static const int types[] = {OOMKIT_DEVICE_CUDA, OOMKIT_DEVICE_XPU,
                                OOMKIT_DEVICE_MPS, OOMKIT_DEVICE_PRIVATE_USE};
    size_t i;

    if (!oomkit_has_bridge(st)) {
        return oomkit_torch_type_in_use(st);
    }
    for (i = 0; i < sizeof(types) / sizeof(*types); i++) {
        if (bridge_ready(st, types[i])) {
            return types[i];
        }
    }
    return OOMKIT_DEVICE_CPU;
}

int
oomkit_device_type_beside(oomkit_state *st)
{
    if (oomkit_has_bridge(st)) {
        return type_in_use(st);
    }
    return oomkit_cuda_in_use(st) ? OOMKIT_DEVICE_CUDA : OOMKIT_DEVICE_CPU;
}

oomkit_device
oomkit_device_default(oomkit_state *st)
{
    static const char current[] = "current_device";
    oomkit_device device = {OOMKIT_DEVICE_CPU, -1};

    KEEPING_EXCEPTION {
        OWNED PyObject *module = NULL, *index = NULL;

        device.type = type_in_use(st);
        if (device.type == OOMKIT_DEVICE_CPU) {
            return device;
        }
        device.index = 0; /* the best guess, and that of types with one device */
        module = oomkit_torch_module(st, device.type);
        if (module != NULL && PyObject_HasAttrString(module, current)) {
            index = PyObject_CallMethod(module, current, NULL);
        }
        if (index != NULL && PyLong_Check(index)) {
            device.index = (int)PyLong_AsLong(index);
        }
        oomkit_error_dismiss();
    }
    return device;
}

void
oomkit_device_text(oomkit_device device, char text[OOMKIT_DEVICE_TEXT])
{
    OWNED PyObject *name = NULL;
    const char *utf8 = NULL;

    if (device.type == OOMKIT_DEVICE_CPU) {
        strcpy(text, "cpu");
        return;
    }
    name = oomkit_torch_type_name(device.type);
    utf8 = name == NULL ? NULL : PyUnicode_AsUTF8(name);
    snprintf(text, OOMKIT_DEVICE_TEXT, "%.40s:%d", utf8 == NULL ? "accelerator" : utf8,
             device.index);
    oomkit_error_dismiss(); /* a text without the name will do */
}

int
oomkit_device_is_capturing(oomkit_state *st, oomkit_device device)
{
    OWNED PyObject *module = NULL, *answer = NULL;
    int captured = 0;

    if (device.type == OOMKIT_DEVICE_CUDA) {
        answer = PyObject_CallMethodNoArgs(st->cuda_module, st->str_is_capturing);
        return answer == NULL ? -1 : PyObject_IsTrue(answer);
    }
    /* torch.cuda's own function raises in a build for another device. */
    module = oomkit_torch_module(st, device.type);
    if (module != NULL) {
        captured = oomkit_has_attribute(module, st->str_is_capturing);
    }
    if (captured > 0) {
        answer = PyObject_CallMethodNoArgs(module, st->str_is_capturing);
        captured = answer == NULL ? -1 : PyObject_IsTrue(answer);
    }
    return captured < 0 ? oomkit_no_captures() : captured;
}

void
oomkit_exempt_enter(oomkit_state *st)
{
    st->bridge->exempt_enter();
}

void
oomkit_exempt_leave(oomkit_state *st)
{
    st->bridge->exempt_leave();
}

int
oomkit_phase_set(oomkit_state *st, int phase)
{
    if (st->meters != NULL) {
        oomkit_meters_switch(st, phase);
    }
    return st->bridge->set_phase(phase);
}

int
oomkit_is_capturing(void)
{
    int state = oomkit_imported_says("torch.cuda",
                                     "is_initialized"); /* the other would do it */

    if (state > 0) {
        state = oomkit_imported_says("torch.cuda", "is_current_stream_capturing");
    }
    if (state == 0) {
        state = oomkit_imported_says("torch.xpu", "is_initialized");
        if (state > 0) {
            state = oomkit_imported_says("torch.xpu", "is_current_stream_capturing");
            state = state < 0 ? oomkit_no_captures() : state;
        }
    }
    return state;
}

int
oomkit_no_captures(void)
{
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        return -1;
    }
    PyErr_Clear(); /* matched: what stands in for a function that a build has not */
    return 0;
}
