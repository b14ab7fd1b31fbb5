/* The device of a call, and a call inside the capture of a CUDA graph, which must be
 * the bare function: what is copied there becomes part of the graph, a copy to the host
 * ends the capture, and nothing has run yet that could be taken back. */
#include "engine.h"
#include "../call/call.h"
#include "../hook/hook.h"
#include "../py/tensor.h"

int
oomkit_captured_find(oomkit_call *call)
{
    oomkit_state *st = call->st;
    int captured;

    if (call->device.type == OOMKIT_DEVICE_MPS || /* captures nothing */
        !oomkit_device_ready(st, call->device)) { /* to ask would initialise it */
        return 0;
    }
    captured = oomkit_device_is_capturing(st, call->device);
    call->captured = captured == 1;
    return captured;
}

/* OutOfMemory in place of an error of memory that is in flight. */
static void
captured_failed(oomkit_call *call)
{
    oomkit_state *st = call->st;
    OWNED PyObject *exception = oomkit_exception_take();
    oomkit_class class_ = oomkit_exception_classify(st, exception);

    if ((class_ != OOMKIT_CLASS_CERTAIN && class_ != OOMKIT_CLASS_MASKED) ||
        oomkit_device_is_lost(st, call->device)) {
        oomkit_exception_give(STEAL(exception));
        return;
    }
    if (oomkit_recover_note(call, exception) < 0) {
        return;
    }
    oomkit_exception_discard(st, STEAL(exception));
    oomkit_give_up_for(
        call, PyUnicode_FromFormat(
                  "%U ran out of memory and is not retried: a CUDA graph is being "
                  "captured, and nothing of the step was undone; capture the step with "
                  "the micro-batch that fits, outside auto_batch" SEE("not-retried"),
                  call->options->label));
}

PyObject *
oomkit_captured_run(oomkit_call *call)
{
    PyObject *result = /* owned */
        PyObject_Vectorcall(call->given.func, call->given.args, call->given.nargsf,
                            call->given.kwnames);

    if (result != NULL && call->options->backward != NULL &&
        oomkit_backward_run(call, result) < 0) {
        Py_CLEAR(result);
    }
    if (result == NULL) {
        captured_failed(call);
    }
    KEEPING_EXCEPTION {
        oomkit_call_free(call);
    }
    return result;
}
