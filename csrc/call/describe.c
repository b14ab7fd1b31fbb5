/* Words for people: names of tensors, who holds the memory, what to do next. */
#include "call.h"
#include "../py/tensor.h"

/* "fc.weight" when a module of the call has it by that name. New reference; NULL
 * without an exception when none has; NULL with one on failure. */
static PyObject *
name_in_module(PyObject *module, PyObject *tensor)
{
    OWNED PyObject *named = PyObject_CallMethod(module, "named_parameters", NULL);
    OWNED PyObject *list = named == NULL ? NULL : PySequence_List(named);
    Py_ssize_t i;

    for (i = 0; list != NULL && i < PyList_GET_SIZE(list); i++) {
        PyObject *pair = PyList_GET_ITEM(list, i); /* borrowed */
        if (PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) == 2 &&
            PyTuple_GET_ITEM(pair, 1) == tensor) {
            return Py_NewRef(PyTuple_GET_ITEM(pair, 0));
        }
    }
    return NULL;
}

PyObject *
oomkit_describe_tensor(oomkit_call *call, PyObject *tensor)
{
    PyObject *roots = call->parts->roots; /* borrowed */
    OWNED PyObject *shape = NULL;
    Py_ssize_t i;

    for (i = 0; roots != NULL && i < PyList_GET_SIZE(roots); i++) {
        OWNED PyObject *module = oomkit_reference_get(PyList_GET_ITEM(roots, i));
        OWNED PyObject *name = NULL;
        if (module == NULL ||
            !PyObject_TypeCheck(module, (PyTypeObject *)call->st->Module)) {
            continue;
        }
        name = name_in_module(module, tensor);
        if (name != NULL) {
            return PyUnicode_FromFormat("parameter '%U' of %s", name,
                                        Py_TYPE(module)->tp_name);
        }
        if (PyErr_Occurred()) {
            return NULL;
        }
    }
    shape = PyObject_GetAttr(tensor, call->st->str_shape);
    return shape == NULL ? NULL
                         : PyUnicode_FromFormat("a parameter of shape %S", shape);
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

    EACH_OWNER (optimizer, call->parts, OWNERS_OF(OOMKIT_OWNER_OPTIMIZER)) {
        OWNED PyObject *state = PyObject_GetAttr(optimizer.object, st->str_state);
        PyObject *param, *values, *key, *value; /* borrowed */
        Py_ssize_t at = 0, in;
        while (state && PyDict_Check(state) &&
               PyDict_Next(state, &at, &param, &values)) {
            in = 0;
            while (PyDict_Check(values) && PyDict_Next(values, &in, &key, &value)) {
                bytes += tensor_bytes(st, value);
            }
        }
        if (state == NULL) {
            oomkit_error_dismiss(); /* as above */
        }
    }
    return bytes;
}

static int
holders_set(PyObject *holders, const char *kind, uint64_t bytes)
{
    OWNED PyObject *number = PyLong_FromUnsignedLongLong(bytes);
    return number == NULL ? -1 : PyDict_SetItemString(holders, kind, number);
}

/* Bytes by kind. `allocated` is what the device reports. New reference or NULL. */
static PyObject *
describe_holders(oomkit_call *call, uint64_t allocated, uint64_t *optimizer)
{
    oomkit_state *st = call->st;
    OWNED PyObject *holders = PyDict_New();
    uint64_t params = 0, gradients = 0, known;
    Py_ssize_t i;

    if (holders == NULL) {
        return NULL;
    }
    for (i = 0; i < call->parts->param_count; i++) {
        OWNED PyObject *gradient =
            PyObject_GetAttr(call->parts->params[i], st->str_grad);
        if (gradient == NULL) {
            return NULL;
        }
        params += tensor_bytes(st, call->parts->params[i]);
        gradients += tensor_bytes(st, gradient);
    }
    *optimizer = optimizer_bytes(call);
    known = params + gradients + *optimizer;
    if (holders_set(holders, "parameters", params) < 0 ||
        holders_set(holders, "gradients", gradients) < 0 ||
        holders_set(holders, "optimizer state", *optimizer) < 0 ||
        (allocated != OOMKIT_UNKNOWN &&
         holders_set(holders, "everything else",
                     allocated > known ? allocated - known : 0) < 0)) {
        return NULL;
    }
    return STEAL(holders);
}

/* The OOMReport of the call so far. New reference or NULL. */
PyObject *
oomkit_describe_report(oomkit_call *call)
{
    uint64_t allocated = oomkit_device_allocated(call->st, call->device);
    uint64_t optimizer = 0;
    OWNED PyObject *holders = NULL, *advice = NULL;
    char device[OOMKIT_DEVICE_TEXT];

    oomkit_device_text(call->device, device);
    holders = describe_holders(call, allocated, &optimizer);
    if (holders == NULL) {
        return NULL;
    }
    advice = Py_BuildValue(
        "(sss)", "make each sample smaller: a shorter sequence or a lower resolution",
        "wrap the model's blocks in torch.utils.checkpoint, or run them under "
        "autocast in bfloat16",
        optimizer > 0 ? "use an optimizer with less state, or keep its state and the "
                        "gradients in a lower precision"
                      : "free what else is on the device: other models, cached "
                        "batches, stored outputs");
    return advice == NULL
               ? NULL
               : oomkit_report_new(call->st, call->options->label, device,
                                   call->tries.items, call->tries.count, allocated,
                                   oomkit_device_budget(call->st, call->device),
                                   holders, advice);
}

/* Raises oomkit.OutOfMemory with the report of the call. NULL always. */
PyObject *
oomkit_give_up(oomkit_call *call, PyObject *reason, int committed)
{
    OWNED PyObject *report = oomkit_describe_report(call);
    OWNED PyObject *text = NULL, *message = NULL;

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
    return NULL;
}

int
oomkit_give_up_for(oomkit_call *call, PyObject *reason)
{
    if (reason != NULL) {
        oomkit_give_up(call, reason, 0);
        Py_DECREF(reason);
    }
    return -1;
}
