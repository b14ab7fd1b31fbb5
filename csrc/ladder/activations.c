/* The rungs that concern a forward: saved tensors on the host, and modules that are
 * computed again. Entered before the step's function is called, left after it. */
#include "activations.h"
#include "ladder.h"
#include "offload.h"
#include "../py/tensor.h"
#include "../sizes/sizes.h"

uint64_t
oomkit_host_spare(oomkit_state *st)
{
    OWNED PyObject *bytes = PyObject_CallNoArgs(st->host_available);
    unsigned long long available;

    if (bytes == NULL || bytes == Py_None) {
        oomkit_error_dismiss(); /* not known: then nothing speaks against it */
        return OOMKIT_UNKNOWN;
    }
    available = PyLong_AsUnsignedLongLong(bytes);
    if (PyErr_Occurred()) {
        oomkit_error_dismiss();
        return OOMKIT_UNKNOWN;
    }
    return available / 2;
}

/* --- saved tensors --- */

/* Appends the buffers of every module that has some. 0 or -1. */
static int
keep_buffers(oomkit_call *call, PyObject *kept)
{
    const oomkit_participants *parts = call->parts;
    Py_ssize_t i;

    for (i = 0; i < parts->buffered_count; i++) {
        OWNED PyObject *module = oomkit_reference_get(parts->buffered[i].ref);
        OWNED PyObject *buffers = NULL;
        PyObject *key, *buffer; /* borrowed from buffers */
        Py_ssize_t at = 0;
        if (module == NULL) {
            continue;
        }
        buffers = PyObject_GetAttr(module, call->st->str_buffers);
        if (buffers == NULL) {
            return -1;
        }
        while (PyDict_Check(buffers) && PyDict_Next(buffers, &at, &key, &buffer)) {
            if (oomkit_tensor_check(call->st, buffer) &&
                PyList_Append(kept, buffer) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

/* What is not moved: parameters, buffers, the batch. New list or NULL. */
static PyObject *
kept_tensors(oomkit_call *call)
{
    OWNED PyObject *kept = PyList_New(0);
    Py_ssize_t i;

    for (i = 0; kept != NULL && i < call->parts->param_count; i++) {
        if (PyList_Append(kept, call->parts->params[i]) < 0) {
            return NULL;
        }
    }
    for (i = 0; kept != NULL && i < call->batch.count; i++) {
        if (call->batch.nodes[i].kind == OOMKIT_NODE_TENSOR &&
            PyList_Append(kept, call->batch.nodes[i].object) < 0) {
            return NULL;
        }
    }
    return kept == NULL || keep_buffers(call, kept) < 0 ? NULL : STEAL(kept);
}

static int
offload_enter(oomkit_call *call)
{
    if (!oomkit_offload_possible(call->st)) {
        return 0;
    }
    if (call->cut->offload == NULL) {
        OWNED PyObject *kept = kept_tensors(call);
        call->cut->offload = kept == NULL
                                 ? NULL
                                 : oomkit_offload_new(call->st, call->device, kept,
                                                      oomkit_host_left(call));
        if (call->cut->offload == NULL) {
            return -1;
        }
    }
    return oomkit_offload_push(call->cut->offload);
}

/* --- modules --- */

/* A step that torch.compile() has made would be compiled again for every change of its
 * modules. 1 or 0. */
static int
is_compiled(const oomkit_call *call)
{
    return oomkit_has_attribute_string(call->given.func,
                                       "_torchdynamo_orig_callable") == 1;
}

int
oomkit_recompute_find(oomkit_call *call)
{
    oomkit_step *step = call->step;
    OWNED PyObject *modules = NULL, *found = NULL;
    Py_ssize_t i;

    if (call->cut->recompute != NULL || is_compiled(call)) {
        return call->cut->recompute != NULL;
    }
    modules = PyList_New(0);
    for (i = 0; modules != NULL && call->parts->roots != NULL &&
                i < PyList_GET_SIZE(call->parts->roots);
         i++) {
        OWNED PyObject *root =
            oomkit_reference_get(PyList_GET_ITEM(call->parts->roots, i));
        if (root != NULL &&
            PyObject_TypeCheck(root, (PyTypeObject *)call->st->Module) &&
            PyList_Append(modules, root) < 0) {
            return -1;
        }
    }
    if (step->left_out == NULL) {
        step->left_out = PyObject_CallNoArgs(call->st->left_out);
    }
    if (modules == NULL || step->left_out == NULL) {
        return -1;
    }
    found = PyObject_CallFunctionObjArgs(call->st->recompute_begin, modules,
                                         step->left_out, NULL);
    if (found == NULL || found == Py_None) {
        return found == NULL ? -1 : 0;
    }
    call->cut->recompute = STEAL(found);
    return 1;
}

PyObject *
oomkit_recompute_names(const oomkit_call *call)
{
    return call->cut->recompute == NULL
               ? NULL
               : PyObject_GetAttrString(call->cut->recompute, "names");
}

/* --- both --- */

int
oomkit_activations_offload(oomkit_call *call, int on)
{
    call->cut->offloads = on && oomkit_offload_possible(call->st);
    return call->cut->offloads;
}

int
oomkit_activations_enter(oomkit_call *call, int *entered)
{
    const uint32_t rung = call->cut->plan.rung;
    const int offloads = call->cut->offloads;

    *entered = OOMKIT_RUNG_SPLIT;
    if (rung < OOMKIT_RUNG_ACTIVATIONS && !offloads) {
        return 0;
    }
    if ((offloads || oomkit_rung_allowed(call, OOMKIT_RUNG_ACTIVATIONS)) &&
        offload_enter(call) < 0) {
        return -1;
    }
    *entered = OOMKIT_RUNG_ACTIVATIONS;
    if (rung >= OOMKIT_RUNG_RECOMPUTE &&
        oomkit_rung_allowed(call, OOMKIT_RUNG_RECOMPUTE) &&
        oomkit_recompute_find(call) > 0) {
        OWNED PyObject *done = PyObject_CallMethod(call->cut->recompute, "enter", NULL);
        if (done == NULL) {
            oomkit_activations_leave(call, *entered);
            return -1;
        }
        *entered = OOMKIT_RUNG_RECOMPUTE;
    }
    if (PyErr_Occurred()) {
        oomkit_activations_leave(call, *entered);
        return -1;
    }
    return 0;
}

/* An error that a recomputation has raised says which option turns it off. */
static void
advise(oomkit_call *call)
{
    OWNED PyObject *exception = oomkit_exception_take(), *text = NULL;
    PyObject *error; /* owned, given back */

    text = PyObject_CallOneArg(call->st->recompute_advise, exception);
    if (text == NULL || text == Py_None) {
        oomkit_error_dismiss(); /* the step's own error is the one to see */
        oomkit_exception_give(STEAL(exception));
        return;
    }
    call->refused.raised = 1;
    oomkit_raise(call->st->SplitError,
                 "%U failed because of recomputation (ladder=\"recompute\"): %U" SEE(
                     "recomputation"),
                 call->options->label, text);
    error = oomkit_exception_take();
    PyException_SetCause(error, STEAL(exception));
    oomkit_exception_give(error);
}

void
oomkit_activations_leave(oomkit_call *call, int entered)
{
    if (entered == OOMKIT_RUNG_SPLIT) {
        return;
    }
    KEEPING_EXCEPTION {
        if (entered == OOMKIT_RUNG_RECOMPUTE) {
            OWNED PyObject *done =
                PyObject_CallMethod(call->cut->recompute, "leave", NULL);
            if (done == NULL) {
                oomkit_error_unraised(call->given.func);
            }
        }
        if (call->cut->offload != NULL && oomkit_offload_pop(call->cut->offload) < 0) {
            oomkit_error_unraised(call->given.func);
        }
    }
    if (entered == OOMKIT_RUNG_RECOMPUTE && PyErr_Occurred() &&
        !oomkit_exception_is_oom(call->st)) {
        advise(call);
    }
}

void
oomkit_activations_end(oomkit_call *call)
{
    const int moved =
        call->cut->offload != NULL && oomkit_offload_bytes(call->cut->offload) > 0;

    Py_CLEAR(call->cut->offload);
    Py_CLEAR(call->cut->recompute);
    if (moved && call->cut->plan.rung < OOMKIT_RUNG_ACTIVATIONS) {
        oomkit_host_unpin(call->st); /* of a proof; the next call of a rung uses it */
    }
}
