/* Where a call asks the other ranks: each place calls oomkit/_ranks, and takes its
 * answer. */
#include "agree.h"
#include "ranks.h"
#include "../call/call.h"
#include "../py/errors.h"
#include "../result/result.h"

#define ALONE 2 /* what commit() answers where no other rank has a part in it */

/* What the answer of the agreement means: 1 is that another rank has failed, so that
 * this attempt is to end and begin again. Steals `answer`. 0, another answer, or -1. */
static int
ranks_answer(oomkit_call *call, PyObject *answer)
{
    long failed;

    if (answer == NULL) {
        return -1;
    }
    failed = PyLong_AsLong(answer);
    Py_DECREF(answer);
    if (failed != 1) {
        return (int)failed; /* -1 with an exception */
    }
    call->tries.restart = OOMKIT_RESTART_RANKS;
    oomkit_raise(
        call->st->SplitError,
        "another rank ran out of memory, so this attempt ends and starts again. Do not "
        "catch oomkit's errors in the step" SEE("let-errors-pass"));
    return -1;
}

/* A method of the agreement, outside the budget: collectives have no smaller size. New
 * reference or NULL. */
static PyObject *
ranks_call(oomkit_call *call, const char *method, PyObject *argument)
{
    OWNED PyObject *name = PyUnicode_InternFromString(method);
    PyObject *answer = NULL; /* owned */

    EXEMPT (call->st) {
        if (name != NULL) {
            answer = PyObject_CallMethodObjArgs(call->ranks.agreed, name, argument,
                                                (PyObject *)NULL);
        }
    }
    return answer;
}

int
oomkit_ranks_ask(oomkit_call *call, const char *method)
{
    return ranks_answer(call, ranks_call(call, method, NULL)) < 0 ? -1 : 0;
}

/* An attribute that is True or False. 1, 0 or -1. */
static int
ranks_says(oomkit_call *call, const char *name)
{
    OWNED PyObject *said = PyObject_GetAttrString(call->ranks.agreed, name);

    return said == NULL ? -1 : PyObject_IsTrue(said);
}

int
oomkit_ranks_enter(oomkit_call *call)
{
    const int weighs = call->options->global_weight;
    OWNED PyObject *wrappers = NULL;
    PyObject *agreed = NULL; /* owned, then by the call */
    int found = oomkit_wrappers_any(call);

    if (found < 0 || (found == 0 && !weighs)) {
        return found;
    }
    wrappers = oomkit_wrappers(call);
    EXEMPT (call->st) {
        if (wrappers != NULL) {
            agreed = PyObject_CallFunction(call->st->ranks_enter, "OOOO", call->step,
                                           call->options->label, wrappers,
                                           weighs ? Py_True : Py_False);
        }
    }
    if (agreed == NULL) {
        return -1;
    }
    if (agreed == Py_None) { /* what it is has been said */
        Py_DECREF(agreed);
        return 0;
    }
    call->ranks.agreed = agreed;
    call->ranks.sharded = ranks_says(call, "sharded");
    return call->ranks.sharded > 0 ? ranks_says(call, "resharded")
                                   : call->ranks.sharded;
}

int
oomkit_ranks_weigh(oomkit_call *call, const double *items, Py_ssize_t count)
{
    OWNED PyObject *list = PyList_New(count), *shares = NULL;
    double *values = PyMem_New(double, (size_t)count); /* owned, then by the call */
    Py_ssize_t i;

    for (i = 0; list != NULL && i < count; i++) {
        PyObject *item = PyFloat_FromDouble(items[i]); /* owned, stolen by the list */
        if (item == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i, item);
    }
    shares = list == NULL ? NULL : ranks_call(call, "weigh", list);
    if (values == NULL && shares != NULL) {
        PyErr_NoMemory();
    }
    for (i = 0; values != NULL && shares != NULL && i < count; i++) {
        values[i] = PyFloat_AsDouble(PyList_GET_ITEM(shares, i));
    }
    if (PyErr_Occurred()) {
        PyMem_Free(values);
        return -1;
    }
    call->ranks.shares = values;
    call->ranks.share_count = count;
    return 0;
}

void
oomkit_ranks_note_stop(oomkit_call *call)
{
    PyObject *exception; /* owned, given back */
    int stopped;

    if (!oomkit_ranks_agreed(call) || call->tries.restart) {
        return;
    }
    exception = PyErr_Occurred() ? oomkit_exception_take() : NULL;
    stopped = ranks_says(call, "stopped");
    if (stopped < 0) {
        oomkit_error_unraised(call->given.func);
    }
    if (stopped > 0) {
        call->tries.restart = OOMKIT_RESTART_RANKS;
    }
    if (exception != NULL) {
        oomkit_exception_give(exception);
    }
}

int
oomkit_ranks_lost(oomkit_call *call, PyObject *exception)
{
    OWNED PyObject *answer = NULL;

    if (!oomkit_ranks_agreed(call)) {
        return 0;
    }
    answer = ranks_call(call, "is_lost", exception);
    return answer == NULL ? -1 : PyObject_IsTrue(answer);
}

int
oomkit_ranks_made(oomkit_call *call, PyObject *leaf)
{
    OWNED PyObject *answer = NULL;

    if (!call->ranks.sharded) {
        return 0;
    }
    answer = ranks_call(call, "made", leaf);
    return answer == NULL ? -1 : PyObject_IsTrue(answer);
}

int
oomkit_ranks_back(oomkit_call *call)
{
    OWNED PyObject *done = NULL;

    if (!oomkit_ranks_agreed(call) || !call->ranks.sharded) {
        return 0;
    }
    done = ranks_call(call, "back", NULL);
    return done == NULL ? -1 : 0;
}

int
oomkit_ranks_proof_begins(oomkit_call *call)
{
    return oomkit_ranks_agreed(call) ? oomkit_ranks_ask(call, "proof_begins") : 0;
}

int
oomkit_ranks_proof_ends(oomkit_call *call)
{
    return oomkit_ranks_agreed(call) ? oomkit_ranks_ask(call, "proof_ends") : 0;
}

/* Do gradients of this backward go to the other ranks? Those of a proof and of earlier
 * micro-batches do not. */
static int
ranks_concerns(const oomkit_call *call)
{
    return oomkit_ranks_agreed(call) && call->proof == NULL &&
           (!call->split || call->is_last) && !oomkit_call_is_replay(call);
}

int
oomkit_ranks_backward_begins(oomkit_call *call)
{
    return !ranks_concerns(call)           ? 0
           : oomkit_ranks_settle(call) < 0 ? -1
                                           : oomkit_ranks_ask(call, "backward_begins");
}

int
oomkit_ranks_backward_ends(oomkit_call *call)
{
    return ranks_concerns(call) ? oomkit_ranks_ask(call, "backward_ends") : 0;
}

/* The update of some rank is tight: all keep copies, as with optimizer_safety="parts".
 * 0 or -1. */
static int
ranks_careful(oomkit_call *call)
{
    if (call->options->optimizer_copy) {
        return 0;
    }
    call->ranks.careful = PyMem_Malloc(sizeof(*call->ranks.careful));
    if (call->ranks.careful == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *call->ranks.careful = *call->options;
    call->ranks.careful->optimizer_copy = call->ranks.careful->optimizer_parts = 1;
    call->ranks.before = call->options;
    call->options = call->ranks.careful;
    return 0;
}

int
oomkit_ranks_committed(oomkit_call *call)
{
    return call->ranks.committed && call->ranks.tight == OOMKIT_UPDATE_TIGHT
               ? ranks_says(call, "settled")
               : call->ranks.committed;
}

/* Neither vote of this attempt has been. */
static void
ranks_not_come(oomkit_call *call)
{
    call->ranks.committed = call->ranks.tight = 0;
}

int
oomkit_ranks_commit(oomkit_call *call, int tight)
{
    OWNED PyObject *given = NULL;
    int answer;

    if (!oomkit_ranks_will_commit(call)) {
        return 0;
    }
    given = PyLong_FromLong(tight);
    answer = given == NULL ? -1 : ranks_answer(call, ranks_call(call, "commit", given));
    call->ranks.committed = answer == 0 || answer > ALONE;
    call->ranks.tight = answer > ALONE ? answer - ALONE : 0;
    return answer < 0 ||
                   (call->ranks.tight == OOMKIT_UPDATE_TIGHT && ranks_careful(call) < 0)
               ? -1
               : 0;
}

PyObject *
oomkit_ranks_closure(oomkit_call *call, PyObject *closure)
{
    return ranks_call(call, "closure", closure);
}

int
oomkit_ranks_settle(oomkit_call *call)
{
    return oomkit_ranks_agreed(call) && oomkit_ranks_will_settle(call) &&
                   call->proof == NULL
               ? oomkit_ranks_ask(call, "settle")
               : 0;
}

int
oomkit_ranks_returned(oomkit_call *call)
{
    return oomkit_ranks_will_commit(call) ? oomkit_ranks_ask(call, "returned")
                                          : oomkit_ranks_settle(call);
}

int
oomkit_ranks_takes_back(oomkit_call *call, PyObject *exception)
{
    OWNED PyObject *answer = NULL;

    if (!oomkit_ranks_agreed(call) || call->ranks.tight != OOMKIT_UPDATE_TIGHT) {
        return 0;
    }
    answer = ranks_call(call, "takes_back", exception);
    return answer == NULL ? -1 : PyObject_IsTrue(answer);
}

int
oomkit_ranks_whole_returns(oomkit_call *call, PyObject *result)
{
    oomkit_tensor_facts facts;
    int wanted = 0;

    if (call->ranks.shares != NULL && !call->training) {
        wanted = oomkit_result_wants_backward(call->st, result, NULL, &facts);
    }
    return wanted <= 0
               ? wanted
               : oomkit_refuse(call, "auto_batch(global_weight=True) cannot weigh a "
                                     "loss that is returned to a caller that runs "
                                     "backward(): call backward() inside the step" SEE(
                                         "distributed"));
}

/* No vote of this attempt has been: another one begins. 0 or -1. */
static int
ranks_anew(oomkit_call *call, const char *why)
{
    PyObject *done; /* owned */

    if (!oomkit_ranks_agreed(call)) {
        return 0;
    }
    done = ranks_call(call, why, NULL);
    ranks_not_come(call);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

int
oomkit_ranks_failed(oomkit_call *call)
{
    return ranks_anew(call, "failed");
}

int
oomkit_ranks_again(oomkit_call *call)
{
    return ranks_anew(call, "again");
}

void
oomkit_ranks_leave(oomkit_call *call, PyObject *exception)
{
    PyObject *done; /* owned */

    if (!oomkit_ranks_agreed(call)) {
        return;
    }
    done = PyObject_SetAttrString(call->ranks.agreed, "updated",
                                  call->ranks.updated ? Py_True : Py_False) < 0
               ? NULL
               : ranks_call(call, "leave", exception == NULL ? Py_None : exception);
    if (done == NULL) {
        oomkit_error_unraised(call->given.func);
    }
    Py_XDECREF(done);
    Py_CLEAR(call->ranks.agreed);
    PyMem_Free(call->ranks.shares);
    call->ranks.shares = NULL;
    if (call->ranks.careful != NULL) {
        call->options = call->ranks.before;
        PyMem_Free(call->ranks.careful);
        call->ranks.careful = NULL;
    }
    ranks_not_come(call);
    call->ranks.sharded = 0;
}

static PyObject *
ranks_rank_is(PyObject *module, PyObject *number)
{
    unsigned long rank = PyLong_AsUnsignedLong(number);

    if (rank == (unsigned long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    oomkit_state_of_module(module)->rank = (uint32_t)rank + 1;
    Py_RETURN_NONE;
}

PyMethodDef oomkit_ranks_methods[] = {
    {"rank_is", ranks_rank_is, METH_O,
     "rank_is(rank, /)\n--\n\nOf this process in the default group, whose ranks have "
     "met: records have it from now on."},
    {NULL, NULL, 0, NULL},
};
