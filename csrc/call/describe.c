/* Words for people: names of tensors, who holds the memory, what to do next. */
#include "call.h"
#include "../py/tensor.h"

/* "fc.weight" when a module of the call has it by that name. New reference; NULL
 * without an exception when none has; NULL with one on failure. */
static PyObject *
name_in_module(PyObject *module, PyObject *tensor)
{
    PyObject *named, *list = NULL, *found = NULL; /* owned */
    Py_ssize_t i;

    named = PyObject_CallMethod(module, "named_parameters", NULL);
    if (named == NULL) {
        return NULL;
    }
    list = PySequence_List(named);
    Py_DECREF(named);
    for (i = 0; list != NULL && i < PyList_GET_SIZE(list); i++) {
        PyObject *pair = PyList_GET_ITEM(list, i); /* borrowed */
        if (PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) == 2 &&
            PyTuple_GET_ITEM(pair, 1) == tensor) {
            found = Py_NewRef(PyTuple_GET_ITEM(pair, 0));
            break;
        }
    }
    Py_XDECREF(list);
    return found;
}

PyObject *
oomkit_describe_tensor(oomkit_call *call, PyObject *tensor)
{
    PyObject *roots = call->parts->roots; /* borrowed */
    PyObject *shape, *text;               /* owned */
    Py_ssize_t i;

    for (i = 0; roots != NULL && i < PyList_GET_SIZE(roots); i++) {
        PyObject *module = oomkit_reference_get(PyList_GET_ITEM(roots, i)); /* owned */
        PyObject *name;                                                     /* owned */
        if (module == NULL ||
            !PyObject_TypeCheck(module, (PyTypeObject *)call->st->Module)) {
            Py_XDECREF(module);
            continue;
        }
        name = name_in_module(module, tensor);
        text = name == NULL ? NULL
                            : PyUnicode_FromFormat("parameter '%U' of %s", name,
                                                   Py_TYPE(module)->tp_name);
        Py_XDECREF(name);
        Py_DECREF(module);
        if (text != NULL || PyErr_Occurred()) {
            return text;
        }
    }
    shape = PyObject_GetAttr(tensor, call->st->str_shape);
    text =
        shape == NULL ? NULL : PyUnicode_FromFormat("a parameter of shape %S", shape);
    Py_XDECREF(shape);
    return text;
}

static uint64_t
tensor_bytes(oomkit_state *st, PyObject *object)
{
    oomkit_tensor_facts facts;
    if (!oomkit_tensor_check(st, object)) {
        return 0;
    }
    if (oomkit_tensor_facts_get(st, object, 0, &facts) < 0) {
        oomkit_error_dismiss(); /* a report that lacks one tensor is better */
        return 0;
    }
    return facts.bytes;
}

static uint64_t
optimizer_bytes(oomkit_call *call)
{
    oomkit_state *st = call->st;
    uint64_t bytes = 0;
    Py_ssize_t i;

    for (i = 0; i < call->parts->owner_count; i++) {
        PyObject *optimizer, *state;            /* owned */
        PyObject *param, *values, *key, *value; /* borrowed */
        Py_ssize_t at = 0, in;
        if (call->parts->owners[i].kind != OOMKIT_OWNER_OPTIMIZER) {
            continue;
        }
        optimizer = oomkit_reference_get(call->parts->owners[i].ref);
        state = optimizer ? PyObject_GetAttr(optimizer, st->str_state) : NULL;
        while (state && PyDict_Check(state) &&
               PyDict_Next(state, &at, &param, &values)) {
            in = 0;
            while (PyDict_Check(values) && PyDict_Next(values, &in, &key, &value)) {
                bytes += tensor_bytes(st, value);
            }
        }
        if (state == NULL && PyErr_Occurred()) {
            oomkit_error_dismiss(); /* as above */
        }
        Py_XDECREF(state);
        Py_XDECREF(optimizer);
    }
    return bytes;
}

static int
holders_set(PyObject *holders, const char *kind, uint64_t bytes)
{
    int result;
    PyObject *number = PyLong_FromUnsignedLongLong(bytes); /* owned */
    if (number == NULL) {
        return -1;
    }
    result = PyDict_SetItemString(holders, kind, number);
    Py_DECREF(number);
    return result;
}

/* Bytes by kind. `allocated` is what the device reports. New reference or NULL. */
static PyObject *
describe_holders(oomkit_call *call, uint64_t allocated, uint64_t *optimizer)
{
    oomkit_state *st = call->st;
    PyObject *holders = PyDict_New(); /* owned */
    uint64_t params = 0, gradients = 0, known;
    Py_ssize_t i;

    if (holders == NULL) {
        return NULL;
    }
    for (i = 0; i < call->parts->param_count; i++) {
        PyObject *gradient = /* owned */
            PyObject_GetAttr(call->parts->params[i], st->str_grad);
        params += tensor_bytes(st, call->parts->params[i]);
        if (gradient == NULL) {
            Py_DECREF(holders);
            return NULL;
        }
        gradients += tensor_bytes(st, gradient);
        Py_DECREF(gradient);
    }
    *optimizer = optimizer_bytes(call);
    known = params + gradients + *optimizer;
    if (holders_set(holders, "parameters", params) < 0 ||
        holders_set(holders, "gradients", gradients) < 0 ||
        holders_set(holders, "optimizer state", *optimizer) < 0 ||
        (allocated != OOMKIT_UNKNOWN &&
         holders_set(holders, "everything else",
                     allocated > known ? allocated - known : 0) < 0)) {
        Py_CLEAR(holders);
    }
    return holders;
}

/* The OOMReport of the call so far. New reference or NULL. */
PyObject *
oomkit_describe_report(oomkit_call *call)
{
    uint64_t allocated = oomkit_device_allocated(call->st, call->device);
    uint64_t optimizer = 0;
    PyObject *holders, *advice = NULL, *report = NULL; /* owned */
    char device[OOMKIT_DEVICE_TEXT];

    oomkit_device_text(call->device, device);
    holders = describe_holders(call, allocated, &optimizer);
    if (holders != NULL) {
        advice = Py_BuildValue(
            "(sss)",
            "make each sample smaller: a shorter sequence or a lower resolution",
            "wrap the model's blocks in torch.utils.checkpoint, or run them under "
            "autocast in bfloat16",
            optimizer > 0
                ? "use an optimizer with less state, or keep its state and the "
                  "gradients in a lower precision"
                : "free what else is on the device: other models, cached "
                  "batches, stored outputs");
    }
    if (advice != NULL) {
        report = oomkit_report_new(call->st, call->options->label, device,
                                   call->tries.items, call->tries.count, allocated,
                                   oomkit_device_budget(call->st, call->device),
                                   holders, advice);
    }
    Py_XDECREF(holders);
    Py_XDECREF(advice);
    return report;
}

/* Raises oomkit.OutOfMemory with the report of the call. NULL always. */
PyObject *
oomkit_give_up(oomkit_call *call, PyObject *reason, int committed)
{
    PyObject *report = oomkit_describe_report(call); /* owned */
    PyObject *text = NULL, *message = NULL;          /* owned */

    call->log.outcome = committed ? 3 : 1;
    if (report != NULL) {
        text = PyObject_GetAttrString(report, "text");
    }
    if (text != NULL) {
        message = PyUnicode_FromFormat("%U\n%U", reason, text);
    }
    if (message != NULL) {
        oomkit_raise_out_of_memory(call->st, message, report, committed);
    }
    Py_XDECREF(message);
    Py_XDECREF(text);
    Py_XDECREF(report);
    return NULL;
}
