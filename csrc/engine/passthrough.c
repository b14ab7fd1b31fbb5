/* Errors that are not ours to recover from: they pass, with their own traceback and a
 * note of what the reader should know. */
#include "engine.h"
#include "../call/step.h"
#include "../optim/optim.h"
#include "../sizes/sizes.h"
#include "../batch/batch.h"
#include "../undo/gradients.h"
#include "../undo/undo.h"

static int
pass_add_note(PyObject *exception, PyObject *note)
{
    OWNED PyObject *done = NULL;

    if (note == NULL) {
        return -1;
    }
    done = PyObject_CallMethod(exception, "add_note", "O", note);
    Py_DECREF(note);
    return done == NULL ? -1 : 0;
}

/* A place in the arguments and its shape: `target of shape [8]`. None for a 0-d
 * tensor and one without a shape.
 * New reference or NULL. */
static PyObject *
pass_describe(oomkit_call *call, Py_ssize_t index)
{
    OWNED PyObject *shape = NULL, *path = NULL;

    shape = PyObject_GetAttr(call->batch.nodes[index].object, call->st->str_shape);
    if (shape == NULL && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear(); /* a nested tensor has none */
        return Py_NewRef(Py_None);
    }
    if (shape != NULL) {
        Py_SETREF(shape, PySequence_List(shape));
    }
    if (shape == NULL) {
        return NULL;
    }
    if (PyList_GET_SIZE(shape) == 0) {
        return Py_NewRef(Py_None);
    }
    path = oomkit_node_path(&call->batch, call->step->names, index);
    return path == NULL ? NULL : PyUnicode_FromFormat("%U of shape %R", path, shape);
}

/* Tensors that every micro-batch got whole, or (`beside`) those that were split
 * although they are in another argument than the first that was: an error about sizes
 * comes of them. New str, NULL with an exception, or None when there is none. */
static PyObject *
pass_tensors(oomkit_call *call, int beside)
{
    const oomkit_batch *batch = &call->batch;
    OWNED PyObject *list = PyList_New(0), *comma = NULL;
    Py_ssize_t i, first = 0; /* the end of the first that was */

    if (list == NULL) {
        return NULL;
    }
    while (beside && first < batch->count && !oomkit_node_is_split(batch, first)) {
        first = oomkit_node_end(batch, first);
    }
    if (beside && first < batch->count) {
        first = oomkit_node_end(batch, first);
    }
    for (i = first; i < batch->count; i++) {
        const oomkit_node *node = &batch->nodes[i];
        OWNED PyObject *text = NULL;
        if (node->kind != OOMKIT_NODE_TENSOR || (node->split != 0) != beside ||
            node->rows == 0 || node->rows == 1) {
            continue;
        }
        text = pass_describe(call, i);
        if (text == NULL || (text != Py_None && PyList_Append(list, text) < 0)) {
            return NULL;
        }
    }
    if (PyList_GET_SIZE(list) == 0) {
        return Py_NewRef(Py_None);
    }
    comma = PyUnicode_FromString(", ");
    return comma == NULL ? NULL : PyUnicode_Join(comma, list);
}

/* A note with the tensors in it, when there are any. 0 or -1. */
static int
pass_note_tensors(oomkit_call *call, PyObject *exception, int beside)
{
    OWNED PyObject *tensors = pass_tensors(call, beside);

    if (tensors == NULL || tensors == Py_None) {
        return tensors == NULL ? -1 : 0;
    }
    return pass_add_note(
        exception,
        beside
            ? PyUnicode_FromFormat(
                  "oomkit: split with the batch, because its size is the same: %U; "
                  "what is not one element per sample is passed whole with static=" SEE(
                      "argument-not-split"),
                  tensors)
            : PyUnicode_FromFormat(
                  "oomkit: passed whole to every micro-batch, because its size is "
                  "not that of the batch: %U; see batch= and dim= of auto_batch" SEE(
                      "argument-not-split"),
                  tensors));
}

/* "Trying to backward through the graph a second time", maybe: torch frees a graph with
 * the first backward through it. 0 or -1. */
static int
pass_note_graph(oomkit_call *call, PyObject *exception)
{
    Py_ssize_t at = oomkit_node_with_graph(call->st, &call->batch);
    OWNED PyObject *path = NULL;

    if (at < 0 || at == call->batch.count) {
        return at < 0 ? -1 : 0;
    }
    path = oomkit_node_path(&call->batch, call->step->names, at);
    return path == NULL
               ? -1
               : pass_add_note(
                     exception,
                     PyUnicode_FromFormat(
                         "oomkit: %U was computed with gradients before the call, and "
                         "each micro-batch runs backward through its graph again: "
                         "compute it inside the decorated step, or detach() it" SEE(
                             "argument-not-split"),
                         path));
}

void
oomkit_pass_tensors(oomkit_call *call, PyObject *exception)
{
    if (pass_note_graph(call, exception) < 0 ||
        pass_note_tensors(call, exception, 0) < 0 ||
        (call->options->batch == NULL && pass_note_tensors(call, exception, 1) < 0)) {
        oomkit_error_unraised(call->given.func);
    }
}

/* What the error of a micro-batch may come of. 0 or -1. */
static int
pass_note_split(oomkit_call *call, PyObject *exception, int parked)
{
    int result = 0;

    if (parked) {
        result = pass_add_note(
            exception,
            PyUnicode_FromString(
                "oomkit: between backward() and the end of every micro-batch but the "
                "last, gradients are set aside (.grad is None there); if that causes "
                "the error, guard the line with `if oomkit.current().is_last:`" SEE(
                    "micro-batch-error")));
    }
    if (result == 0) {
        oomkit_pass_tensors(call, exception);
    }
    return result;
}

/* The call has failed for good: gradients that are set aside go back as they are, and
 * `exception` (borrowed, not in flight) says what they hold. Keeps no exception. */
void
oomkit_pass_abandon(oomkit_call *call, PyObject *exception)
{
    if (oomkit_grads_abandon(call) &&
        pass_add_note(exception,
                      PyUnicode_FromString(
                          "oomkit: some gradients from before the step contain a part "
                          "of this batch: call zero_grad() before you continue" SEE(
                              "gradients-not-restored"))) < 0) {
        oomkit_error_unraised(call->given.func);
    }
}

/* An interrupt takes the step back with it, unless the update has begun. 0 or -1. */
static int
pass_note_interrupted(oomkit_call *call, PyObject *exception)
{
    if (oomkit_update_committed(call) != 1) {
        return 0;
    }
    return pass_add_note(
        exception,
        PyUnicode_FromString(
            "oomkit: the update of this batch had begun and stands as far as it came: "
            "do "
            "not repeat the batch; where it was interrupted inside an optimizer's "
            "step(), restore a checkpoint" SEE("update-applied")));
}

/* What the reader of somebody else's error (or of our refusal) should know; `parked`:
 * gradients were out of sight when it was raised. 0 or -1. */
static int
pass_note(oomkit_call *call, PyObject *exception, int parked)
{
    const oomkit_slice *slice;
    int result = 0;

    if (!PyObject_TypeCheck(exception, (PyTypeObject *)PyExc_Exception)) {
        return pass_note_interrupted(call, exception);
    }
    if (call->cut->slices == NULL && call->tries.ooms == 0) {
        return 0;
    }
    if (oomkit_update_committed(call) ==
            1 && /* but for what says itself how far it came */
        !PyObject_TypeCheck(exception, (PyTypeObject *)call->st->PartialUpdate)) {
        result = pass_add_note(
            exception, PyUnicode_FromString("oomkit: the update of this batch had been "
                                            "applied: it stands, do not repeat it" SEE(
                                                "update-applied")));
    }
    if (result == 0 && call->cut->unfit.refusal != NULL && !call->split) {
        result = pass_add_note(
            exception, PyUnicode_FromFormat(
                           "oomkit: raised with the whole batch, which ran once "
                           "more because its split was refused or failed (%S)" SEE(
                               "whole-batches"),
                           call->cut->unfit.refusal));
    }
    if (call->cut->slices == NULL) {
        return result;
    }
    slice = &call->cut->slices[call->cut->at < call->cut->count ? call->cut->at : 0];
    if (result == 0 && call->split && !call->refused.raised) {
        result = pass_add_note(
            exception,
            PyUnicode_FromFormat(
                "oomkit: raised in micro-batch %lld of %lld (%lld rows) after %u "
                "out-of-memory errors; if the step cannot work on that size, see "
                "min_micro_batch= and multiple_of= of auto_batch" SEE(
                    "micro-batch-error"),
                (long long)(call->cut->at + 1), (long long)call->cut->count,
                (long long)slice->length, (unsigned)call->tries.ooms));
    }
    if (result == 0 && call->split && !call->refused.raised) {
        result = pass_note_split(call, exception, parked);
    }
    return result;
}

int
oomkit_recover_pass(oomkit_call *call, PyObject *exception)
{
    int parked = oomkit_grads_parked(call) || call->tries.parked;
    int interrupted = PyObject_TypeCheck(exception, /* and the step begins anew */
                                         (PyTypeObject *)PyExc_KeyboardInterrupt);

    call->log.outcome = 2;
    if (interrupted) {
        oomkit_grads_allow_no_remaking(call); /* who interrupts does not wait for it */
    }
    oomkit_exception_give(exception);
    if ((call->split || call->tries.ooms > 0 || interrupted) &&
        oomkit_update_committed(call) == 0) {
        oomkit_recover_undo(call);
    }
    exception = oomkit_exception_take();
    if (pass_note(call, exception, parked) < 0) {
        oomkit_error_unraised(call->given.func);
    }
    if (call->split && call->shape.known && !interrupted &&
        !oomkit_ranks_agreed(call)) {
        oomkit_signature_doubt(call);
    }
    oomkit_exception_give(exception);
    return -1;
}
