/* Writes to parameters that the code of a step shows, read once by Python code of the
 * package (`parameter_writes`). A write through `.data` leaves no trace: of these steps
 * copies are taken at entry, from the first call on. */
#include "plain.h"
#include "../call/call.h"
#include "../optim/updating.h"

int
oomkit_writes_look(oomkit_call *call)
{
    OWNED PyObject *positional = NULL, *named = NULL;
    PyObject *found = NULL; /* owned, then by the participants */
    oomkit_state *st = call->st;

    if (call->parts->writes != NULL || st->parameter_writes == NULL) {
        return 0;
    }
    if (call->parts->param_count == 0 || call->given.func == NULL) {
        call->parts->writes = Py_NewRef(Py_None);
        return 0;
    }
    if (oomkit_compiler_off(call) == 0 &&
        oomkit_effects_arguments(call, &positional, &named) == 0) {
        PyObject *roots = /* borrowed */
            call->parts->roots == NULL ? Py_None : call->parts->roots;
        found = PyObject_CallFunctionObjArgs(st->parameter_writes, call->given.func,
                                             positional, named, roots, NULL);
    }
    if (oomkit_compiler_on(call) < 0) {
        Py_CLEAR(found);
    }
    Py_XSETREF(call->parts->writes, found);
    return found == NULL ? -1 : 0;
}

PyObject *
oomkit_writes_shown(const oomkit_call *call)
{
    PyObject *writes = call->parts->writes; /* borrowed */
    return writes == NULL || !PyTuple_Check(writes) ? NULL
                                                    : PyTuple_GET_ITEM(writes, 0);
}

int
oomkit_writes_hidden(const oomkit_call *call)
{
    return oomkit_writes_shown(call) != NULL &&
           PyTuple_GET_ITEM(call->parts->writes, 1) == Py_True;
}

int
oomkit_param_copies_refuse(oomkit_call *call, PyObject **message, Py_ssize_t first,
                           Py_ssize_t count)
{
    OWNED PyObject *name = oomkit_describe_tensor(call, call->parts->params[first]);

    if (name != NULL && count > 1) {
        Py_SETREF(name, PyUnicode_FromFormat("%U (and %zd more)", name, count - 1));
    }
    if (name == NULL) {
        return -1;
    }
    *message =
        oomkit_params_may_stay(call)
            ? PyUnicode_FromFormat(
                  "%U may have been changed by the step, which writes to parameters "
                  "(%U); they are too large for copies to tell; pass "
                  "optimizer_safety=\"copy\" to auto_batch, or change parameters after "
                  "the decorated step",
                  name, oomkit_writes_shown(call))
        : call->parts->some_lazy
            ? PyUnicode_FromFormat(
                  "%U was changed by the step, perhaps by a lazy module (LazyLinear, "
                  "say) that got its shape in this call, and stays changed; run the "
                  "model once on a few rows before the first decorated step",
                  name)
            : PyUnicode_FromFormat(
                  "%U was changed by the step outside an optimizer that auto_batch "
                  "knows, and stays changed; pass it as optimizer=..., or change "
                  "parameters after the decorated step",
                  name);
    return *message == NULL ? -1 : 1;
}
