/* Words for people: names of tensors, and the report of what was tried. */
#include "call.h"
#include "step.h"
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

/* Bytes of one row of the batch's tensors. */
static double
row_bytes(oomkit_call *call)
{
    oomkit_tensor_facts facts;
    double bytes = 0.0;
    Py_ssize_t i;

    for (i = 0; i < call->batch.count; i++) {
        const oomkit_node *node = &call->batch.nodes[i];
        if (node->kind != OOMKIT_NODE_TENSOR) {
            continue;
        }
        if (oomkit_tensor_facts_get(call->st, node->object, call->options->dim,
                                    &facts) < 0) {
            oomkit_error_dismiss(); /* it does not count */
        } else if (facts.size > 0) {
            bytes += (double)facts.bytes / (double)facts.size;
        }
    }
    return bytes;
}

/* Everything that advice goes by, in plain values but for parameters and optimizers.
 * New reference or NULL. */
static PyObject *
describe_facts(oomkit_call *call, PyObject *attempts, const oomkit_attempt *last,
               PyObject *holders, const char *device)
{
    OWNED PyObject *params = PyList_New(0), *optimizers = PyList_New(0);
    OWNED PyObject *ends = oomkit_attempts_tuple(last, 1);
    OWNED PyObject *records =
        oomkit_history_records(call->st, call->step->history, call->options->label);
    Py_ssize_t i;

    if (params == NULL || optimizers == NULL || records == NULL || ends == NULL) {
        return NULL;
    }
    for (i = 0; i < call->parts->param_count; i++) {
        if (PyList_Append(params, call->parts->params[i]) < 0) {
            return NULL;
        }
    }
    EACH_OWNER (optimizer, call->parts, OWNERS_OF(OOMKIT_OWNER_OPTIMIZER)) {
        if (PyList_Append(optimizers, optimizer.object) < 0) {
            return NULL;
        }
    }
    return Py_BuildValue(
        "{sO sO sO sO ss sO sO sO sL sd si sO}", "label", call->options->label,
        "attempts", attempts, "last", PyTuple_GET_ITEM(ends, 0), "holders", holders,
        "device", device, "parameters", params, "optimizers", optimizers, "records",
        records, "rows", (long long)call->batch.rows, "row_bytes", row_bytes(call),
        "ladder", (int)call->options->ladder, "function",
        call->given.func == NULL ? Py_None : call->given.func);
}

/* The OOMReport of the call so far. New reference or NULL. */
PyObject *
oomkit_describe_report(oomkit_call *call)
{
    OWNED PyObject *holders = NULL, *attempts = NULL, *facts = NULL, *advice = NULL;
    oomkit_attempt now = {.requested_bytes = OOMKIT_UNKNOWN, .phase = -1};
    oomkit_attempt *last = &now;
    char device[OOMKIT_DEVICE_TEXT];

    if (call->tries.count > 0) {
        last = &call->tries.items[call->tries.count - 1];
    } else { /* refused before anything has failed */
        oomkit_holders_note(call, NULL, last);
    }
    oomkit_device_text(call->device, device);
    holders = oomkit_holders(call, last);
    attempts = holders == NULL
                   ? NULL
                   : oomkit_attempts_tuple(call->tries.items, call->tries.count);
    facts =
        attempts == NULL ? NULL : describe_facts(call, attempts, last, holders, device);
    advice = facts == NULL ? NULL : PyObject_CallOneArg(call->st->advise, facts);
    if (facts != NULL && advice == NULL && !PyErr_ExceptionMatches(PyExc_MemoryError)) {
        oomkit_error_dismiss(); /* the report tells more than what goes wrong there */
        advice = PyTuple_New(0);
    }
    return advice == NULL ? NULL
                          : oomkit_report_new(call->st, call->options->label, device,
                                              call->tries.items, call->tries.count,
                                              last, holders, advice);
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
