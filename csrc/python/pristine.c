/* Copies of parameters during the first micro-batch of a site's first split call: where
 * it turns out that the step changes them by itself, they go back as they were. Taken
 * once per site, on the host, and only of models that are small enough. */
#include "call.h"
#include "step.h"
#include "tensor.h"

#define PRISTINE_BYTES (256u << 20)

void
oomkit_pristine_release(oomkit_call *call)
{
    PyObject **copies = call->pristine;
    Py_ssize_t i;

    call->pristine = NULL; /* first: a finaliser that runs here must see none */
    for (i = 0; copies != NULL && i < call->parts->param_count; i++) {
        Py_CLEAR(copies[i]);
    }
    PyMem_Free(copies);
}

/* Before the first micro-batch of an attempt. 0 or -1. */
int
oomkit_pristine_take(oomkit_call *call)
{
    oomkit_participants *parts = call->parts;
    oomkit_tensor_facts facts;
    uint64_t bytes = 0;
    Py_ssize_t i;

    if (call->step->effects_said || call->pristine != NULL || parts->param_count == 0) {
        return 0;
    }
    for (i = 0; i < parts->param_count; i++) {
        if (oomkit_tensor_facts_get(call->st, parts->params[i], 0, &facts) < 0) {
            return -1;
        }
        bytes += facts.bytes;
    }
    if (bytes > PRISTINE_BYTES) {
        return 0;
    }
    call->pristine = PyMem_Calloc((size_t)parts->param_count, sizeof(PyObject *));
    if (call->pristine == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (i = 0; i < parts->param_count; i++) {
        call->pristine[i] = oomkit_host_copy(call->st, parts->params[i]);
        if (call->pristine[i] == NULL) {
            if (!PyErr_ExceptionMatches(PyExc_Exception)) {
                return -1;
            }
            PyErr_Clear(); /* not there yet (a lazy module's), or of a kind of its own
                            */
        }
    }
    return 0;
}

/* Parameter i as it was. 1 done, 0 there is no copy, -1. */
static int
pristine_put_back(oomkit_call *call, Py_ssize_t i)
{
    PyObject *plain, *done; /* owned */

    if (call->pristine[i] == NULL) {
        return 0;
    }
    plain = PyObject_CallMethodNoArgs(call->parts->params[i], call->st->str_detach);
    done = plain
               ? PyObject_CallMethodOneArg(plain, call->st->str_copy, call->pristine[i])
               : NULL;
    Py_XDECREF(plain);
    Py_XDECREF(done);
    return done == NULL ? -1 : 1;
}

/* While rolling back: what the step itself changed in parameters. Those without a copy
 * stay as they are, for others to see. 0 or -1. */
int
oomkit_pristine_restore(oomkit_call *call)
{
    Py_ssize_t i, which;
    int moved, all = 1;

    if (call->pristine == NULL) {
        return 0;
    }
    moved = oomkit_tx_params_moved(call, &which);
    if (moved == 0) {
        moved = oomkit_tx_params_rewritten(call, &which);
    }
    if (moved <= 0) {
        return moved;
    }
    for (i = 0; i < call->parts->param_count; i++) {
        int done = pristine_put_back(call, i);
        if (done < 0) {
            return -1;
        }
        all = all && done;
    }
    return all ? oomkit_tx_params_mark(call) : 0;
}
