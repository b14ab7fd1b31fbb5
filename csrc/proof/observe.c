/* What a run of a proof sees of the step: its backwards, what its updates are given,
 * its results and its gradients. All of it is handed to oomkit._proof.judge.Proof. */
#include "proof.h"
#include "../call/step.h"
#include "../engine/engine.h"
#include "../hook/step_arguments.h"
#include "../optim/optim.h"
#include "../py/tensor.h"
#include "../result/result.h"
#include "../undo/gradients.h"

/* judge.method(argument), outside the budget. 0 or -1. */
static int
watch_tell(const oomkit_proof *p, const char *method, PyObject *argument)
{
    PyObject *done; /* owned */

    oomkit_exempt_enter(p->call->st);
    done = PyObject_CallMethod(p->judge, method, "(O)", argument);
    oomkit_exempt_leave(p->call->st);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

int
oomkit_proof_root(oomkit_call *call, PyObject *roots)
{
    call->proof->trained = 1;
    return watch_tell(call->proof, "root", roots);
}

/* The gradients that this call has accumulated, None where there is none. New list or
 * NULL. */
static PyObject *
watch_gradients(oomkit_call *call, int parked)
{
    Py_ssize_t i, n = call->parts->param_count;
    PyObject **stash = call->grads.is_parked ? call->grads.parked : NULL; /* borrowed */
    PyObject *list = PyList_New(n);                                       /* owned */

    for (i = 0; list != NULL && i < n; i++) {
        PyObject *gradient = /* owned, stolen by the list */
            parked ? Py_NewRef(stash != NULL && stash[i] != NULL ? stash[i] : Py_None)
                   : grads_get(call, i);
        if (gradient == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i, gradient);
    }
    return list;
}

PyObject *
oomkit_proof_marks(const oomkit_call *call)
{
    const oomkit_bridge *bridge = call->st->bridge;
    const oomkit_participants *parts = call->parts;
    Py_ssize_t i, n = parts->param_count;
    PyObject *list; /* owned */
    uint32_t *versions;

    if (bridge == NULL || call->device.type != OOMKIT_DEVICE_CPU) {
        Py_RETURN_NONE;
    }
    versions = PyMem_Calloc((size_t)n + 1, sizeof(*versions));
    if (versions == NULL) {
        return PyErr_NoMemory();
    }
    list = bridge->versions((const void *const *)parts->params, call->st->impl_offset,
                            (size_t)n, versions, NULL) == OOMKIT_OK
               ? PyList_New(n)
               : Py_NewRef(Py_None);
    for (i = 0; list != NULL && list != Py_None && i < n; i++) {
        uint64_t mark = bridge->sample(parts->params[i], call->st->impl_offset) ^
                        versions[i] * 0x9e3779b97f4a7c15u;
        PyObject *number = PyLong_FromUnsignedLongLong(mark); /* owned, stolen */
        if (number == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i, number);
    }
    PyMem_Free(versions);
    return list;
}

static int
watch_tell_gradients(oomkit_call *call, const char *method, int parked)
{
    PyObject *list = watch_gradients(call, parked); /* owned */
    PyObject *done = NULL;                          /* owned */
    int result;

    if (list != NULL && call->grads.stashing) {
        done = PyObject_CallMethod(call->proof->judge, "stashed", NULL);
        if (done == NULL) {
            Py_CLEAR(list);
        }
        Py_XDECREF(done);
    }
    result = list == NULL ? -1 : watch_tell(call->proof, method, list);

    Py_XDECREF(list);
    return result;
}

int
oomkit_proof_swept(oomkit_call *call)
{
    if (!call->is_last) {
        return watch_tell_gradients(call, "parked", 1);
    }
    return call->proof->raw ? watch_tell_gradients(call, "swept", call->grads.stashing)
                            : 0;
}

int
oomkit_proof_finish(oomkit_proof *p)
{
    PyObject *marks = oomkit_proof_marks(p->call); /* owned */
    PyObject *done;                                /* owned */
    int result = -1;

    if (marks != NULL) {
        done = PyObject_CallMethod(p->judge, "ended", "O", marks);
        result = done == NULL
                     ? -1
                     : watch_tell_gradients(p->call, "finish", p->call->grads.stashing);
        Py_XDECREF(done);
    }
    Py_XDECREF(marks);
    return result;
}

int
oomkit_proof_returns_nothing(const oomkit_call *call)
{
    return call->training && call->deferred.returned == OOMKIT_RETURNED_NOTHING &&
           call->deferred.replayed == NULL && call->options->backward == NULL;
}

int
oomkit_proof_micro_end(oomkit_call *call, PyObject *result)
{
    PyObject *loss = /* owned, or NULL */
        oomkit_proof_returns_nothing(call) ? NULL
                                           : oomkit_result_loss(call->st, result);
    PyObject *done; /* owned */

    if (loss == NULL && PyErr_Occurred()) {
        return -1;
    }
    oomkit_exempt_enter(call->st);
    done = PyObject_CallMethod(call->proof->judge, "result", "OOLd", result,
                               loss == NULL ? Py_None : loss,
                               (long long)call->cut->slices[call->cut->at].length,
                               call->cut->weights[call->cut->at]);
    oomkit_exempt_leave(call->st);
    if (done != NULL && call->deferred.replayed == NULL) {
        /* a call of so many rows like any other: what is no count shows, and what is */
        call->step->results.integers_only = !oomkit_proof_of_whole(call);
        oomkit_result_learn(call->st, &call->step->results, result,
                            call->cut->slices[call->cut->at].length, call->options->dim);
        call->step->results.integers_only = 0;
    }
    Py_XDECREF(loss);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

int
oomkit_proof_joined(oomkit_call *call)
{
    PyObject *result = oomkit_attempt_join(call); /* owned */
    int status = result == NULL ? -1 : watch_tell(call->proof, "joined", result);

    if (result == NULL && !call->proof->own &&
        PyErr_ExceptionMatches(call->st->SplitError) &&
        (call->cut->slices[0].length == 1 || call->cut->slices[1].length == 1)) {
        PyErr_Clear(); /* of one row much looks like anything: see proof_joins() */
        call->refused.raised = 0;
        call->proof->unjoined = 1;
        status = PyObject_SetAttrString(call->proof->judge, "unjoined", Py_True);
    }
    call->tries.joining = 0;
    Py_XDECREF(result);
    return status;
}

/* The arguments as (tuple, dict), with `mean` in the place of number `at`. 0 or -1. */
static int
watch_arguments(PyObject *const *args, size_t nargsf, PyObject *kwnames, PyObject *mean,
                Py_ssize_t at, PyObject **positional, PyObject **named)
{
    Py_ssize_t i, n = PyVectorcall_NARGS(nargsf);

    *named = PyDict_New();
    *positional = *named == NULL ? NULL : PyTuple_New(n);
    if (*positional == NULL) {
        return -1;
    }
    for (i = 0; i < n; i++) {
        PyTuple_SET_ITEM(*positional, i,
                         Py_NewRef(mean != NULL && i == at ? mean : args[i]));
    }
    for (i = 0; kwnames != NULL && i < PyTuple_GET_SIZE(kwnames); i++) {
        if (PyDict_SetItem(*named, PyTuple_GET_ITEM(kwnames, i),
                           mean != NULL && n + i == at ? mean : args[n + i]) < 0) {
            return -1;
        }
    }
    return 0;
}

int
oomkit_proof_update(interceptor_object *self, PyObject *optimizer,
                    PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    oomkit_call *call = self->call;
    PyObject *mean = NULL, *positional = NULL, *named = NULL, *done = NULL; /* owned */
    PyObject *given = NULL;                                                 /* owned */
    Py_ssize_t at = 0;
    int settled = 0;

    if (self->name == call->st->str_unscale) {
        return 0; /* what follows, clipping above all, depends on it; it is undone */
    }
    if (self->kind == OOMKIT_OWNER_OPTIMIZER) {
        given = oomkit_given_settle(self, args, PyVectorcall_NARGS(nargsf), kwnames);
        if (given == NULL) {
            return -1;
        }
        args = PySequence_Fast_ITEMS(given);
    } else if (self->kind == OOMKIT_OWNER_SCHEDULER) {
        settled = oomkit_metrics_settle(
            call, self->target, args, PyVectorcall_NARGS(nargsf), kwnames, &mean, &at);
    }
    if (settled >= 0 &&
        watch_arguments(args, nargsf, kwnames, mean, at, &positional, &named) == 0) {
        oomkit_exempt_enter(call->st);
        done = PyObject_CallMethod(call->proof->judge, "update", "OOOOO", self->target,
                                   self->name, optimizer == NULL ? Py_None : optimizer,
                                   positional, named);
        oomkit_exempt_leave(call->st);
    }
    Py_XDECREF(given);
    Py_XDECREF(mean);
    Py_XDECREF(positional);
    Py_XDECREF(named);
    Py_XDECREF(done);
    return done == NULL ? -1 : 1;
}
