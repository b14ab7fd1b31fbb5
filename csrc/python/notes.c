/* What is added to an error that is passed on. */
#include "call.h"

static int
note_add(PyObject *exception, PyObject *note)
{
    PyObject *done; /* owned */
    if (note == NULL) {
        return -1;
    }
    done = PyObject_CallMethod(exception, "add_note", "O", note);
    Py_DECREF(note);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* What the reader of somebody else's error (or of our refusal) should know. 0 or -1. */
int
oomkit_note_error(oomkit_call *call, PyObject *exception)
{
    const oomkit_slice *slice;
    int result = 0;

    if (call->slices == NULL ||
        !PyObject_TypeCheck(exception, (PyTypeObject *)PyExc_Exception)) {
        return 0;
    }
    slice =
        &call->slices[call->slice_index < call->slice_count ? call->slice_index : 0];
    if (oomkit_tx_committed(call) == 1) {
        result = note_add(
            exception, PyUnicode_FromString("oomkit: the update of this batch had been "
                                            "applied: it stands, do not repeat it"));
    }
    if (result == 0 && call->grads.aside != NULL) {
        result = note_add(exception,
                          PyUnicode_FromString(
                              "oomkit: some gradients that were there before the step "
                              "hold this batch's contribution: call zero_grad()"));
    }
    if (result == 0 && call->split && !call->raised) {
        result = note_add(
            exception,
            PyUnicode_FromFormat(
                "oomkit: raised in micro-batch %lld of %lld (%lld rows) after %u "
                "out-of-memory errors; if the step cannot work on that size, see "
                "min_micro_batch= and multiple_of= of auto_batch",
                (long long)(call->slice_index + 1), (long long)call->slice_count,
                (long long)slice->length, (unsigned)call->ooms));
    }
    return result;
}
