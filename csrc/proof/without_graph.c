/* The weaker proof, where no more than one row fits: two micro-batches at once and each
 * alone, without a graph, which nearly always fits. Backwards are withheld and updates
 * held back; losses and results are judged by oomkit._proof.diagnose. */
#include "proof.h"
#include "../accum/accum.h"
#include "../batch/batch.h"
#include "../optim/optim.h"
#include "../plain/alike.h"
#include "../py/modes.h"
#include "../result/result.h"
#include "../undo/undo.h"

/* What a run has returned, to be joined where it is a part. 0 or -1. */
static int
verify_result(oomkit_proof *p, PyObject *result, int64_t length, int part)
{
    oomkit_call *call = p->call;
    const double weight = part < 0 ? 1.0 : call->cut->weights[part];
    OWNED PyObject *done = NULL;

    EXEMPT (call->st) {
        done = PyObject_CallMethod(p->judge, "result", "OOLdO", result, Py_None,
                                   (long long)length, weight,
                                   oomkit_losses_are_sums(call) ? Py_True : Py_False);
    }
    if (done == NULL || part < 0 || oomkit_call_is_replay(call)) {
        return done == NULL ? -1 : 0;
    }
    if (oomkit_join_add(call->st, call->options, &call->cut->join, result, length,
                        weight) < 0) {
        return -1;
    }
    return part > 0 ? oomkit_proof_joined(call) : 0;
}

/* One run of the function on rows start .. start + length; what it shows goes to the
 * verification. 0 or -1. */
static int
verify_call(oomkit_proof *p, int64_t start, int64_t length, int part)
{
    oomkit_call *call = p->call;
    Py_ssize_t i;
    OWNED PyObject *result = NULL, *loss = NULL, *done = NULL;
    OWNED_MEMORY PyObject **vector =
        PyMem_Calloc((size_t)call->batch.total + 1, sizeof(PyObject *));

    if (vector == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (oomkit_batch_build(call->st, call->options, &call->batch, start, length,
                           vector) == 0) {
        result = oomkit_attempt_function(call, vector);
    }
    for (i = 0; i < call->batch.total; i++) {
        Py_CLEAR(vector[i]);
    }
    if (result == NULL) {
        return -1;
    }
    /* Without a graph there is no backward to run. */
    loss = oomkit_result_loss(call->st, result);
    if (PyErr_Occurred()) {
        return -1;
    }
    done = PyObject_CallMethod(call->cut->verification, "finish", "OOL", result,
                               loss ? loss : Py_None, (long long)length);
    return done == NULL || oomkit_plain_alike_ends(call, result) < 0
               ? -1
               : verify_result(p, result, length, part);
}

/* A run begins, with its marks; the second part finds what the first has left, as the
 * next micro-batch of a call would. 0 or -1. */
static int
verify_begin(oomkit_proof *p, const oomkit_slice *cut, int part)
{
    oomkit_call *call = p->call;
    OWNED PyObject *slices = NULL, *done = NULL;

    call->cut->at = part > 0;
    call->cut->count = part < 0 ? 1 : 2;
    call->cut->slices[0] = cut[0];
    if (part < 0) {
        call->cut->slices[0].length += cut[1].length;
    }
    if (part > 0) {
        return oomkit_flags_restore(call) < 0 || oomkit_owners_again(call) < 0
                   ? -1
                   : oomkit_plain_alike_begins(call);
    }
    slices = oomkit_proof_slices(call->cut->slices, call->cut->count);
    done = slices == NULL ? NULL
                          : PyObject_CallMethod(p->judge, "start", "sO",
                                                part < 0 ? "whole" : "parts", slices);
    return done == NULL || oomkit_savepoint_take(call) < 0 ||
                   oomkit_plain_alike_begins(call) < 0
               ? -1
               : oomkit_attempt_marks(call);
}

/* The same without a graph. `part` is -1 for the whole: behind it and the last part
 * everything is put back. *moved tells whether random numbers were drawn. 0 or -1. */
static int
verify_run(oomkit_proof *p, const oomkit_slice *cut, int part, int *moved)
{
    oomkit_call *call = p->call;
    const int64_t start = part > 0 ? cut[1].start : cut[0].start;
    const int64_t length = part < 0 ? cut[0].length + cut[1].length : cut[part].length;
    int result = verify_begin(p, cut, part), mode;

    call->is_last = 0;
    mode = result < 0 ? -1 : oomkit_grad_mode_off(call->st);
    if (mode >= 0) {
        result = oomkit_proof_run_enter(p);
        if (result == 0) {
            result = verify_call(p, start, length, part);
            result = oomkit_proof_run_leave(p) < 0 ? -1 : result;
        }
        result = oomkit_grad_mode_back(call->st, mode, result);
    } else {
        result = -1;
    }
    Py_CLEAR(call->backward.cleared); /* no micro-batch has ended */
    if (result == 0) {
        *moved = oomkit_proof_drew(p);
        result = *moved < 0 ? -1 : 0;
    }
    if (result == 0 && part == 0) {
        return 0;
    }
    return oomkit_proof_put_back(p) < 0 ? -1 : result;
}

/* The verification could not be made: a debug line. Errors that ask the program to end
 * pass. Steals `exception`. 0 or -1. */
static int
verify_abandon(oomkit_proof *p, PyObject *exception)
{
    oomkit_call *call = p->call;
    OWNED PyObject *message = NULL, *location = NULL;
    uint64_t requested;

    if (!PyObject_TypeCheck(exception, (PyTypeObject *)PyExc_Exception)) {
        oomkit_exception_give(exception);
        return -1;
    }
    oomkit_exception_describe(call->st, exception, &requested, &message, &location);
    oomkit_exception_discard(call->st, exception);
    Py_XSETREF(p->raised, Py_XNewRef(message));
    return oomkit_say(call->st, "debug", "sOO", "%s was not verified: %s",
                      call->options->label, message ? message : Py_None);
}

/* What each of the two parts weighs, and is it a sum? 0 or -1. */
static int
verify_shares(oomkit_proof *p, const oomkit_slice *cut, PyObject **one, PyObject **two)
{
    oomkit_call *call = p->call;

    if (oomkit_cut_given(call, cut, 2) < 0 || oomkit_weights_set(call) < 0) {
        return -1;
    }
    *one = oomkit_weights_of_slice(call, 0);
    *two = *one ? oomkit_weights_of_slice(call, 1) : NULL;
    return *two == NULL ? -1 : 0;
}

/* (equal, text) of the three runs, with the weights that make the losses equal. New
 * reference or NULL. */
static PyObject *
verify_search(oomkit_proof *p, PyObject *verdict, const oomkit_slice *cut, int moved)
{
    OWNED PyObject *leaves = oomkit_proof_leaves(p->call);
    OWNED PyObject *slices = oomkit_proof_slices(cut, 2);
    PyObject *answer = NULL; /* owned */

    if (leaves == NULL || slices == NULL) {
        return NULL;
    }
    EXEMPT (p->call->st) {
        answer = PyObject_CallMethod(p->judge, "weighed", "OOOOO",
                                     p->call->cut->verification, verdict, leaves,
                                     slices, moved ? Py_True : Py_False);
    }
    return answer;
}

/* Nothing has been seen yet. 0 or -1. */
static int
verify_anew(const oomkit_call *call)
{
    Py_XSETREF(call->cut->verification, PyObject_CallNoArgs(call->st->verification));
    return call->cut->verification == NULL ? -1 : 0;
}

/* The whole and its parts. *moved: random numbers were drawn that the parts were not
 * given. 0 or -1. */
static int
verify_all(oomkit_proof *p, const oomkit_slice *cut, int *moved)
{
    int one, two, kept;

    p->raises = 1;
    if (verify_anew(p->call) < 0 || verify_run(p, cut, -1, moved) < 0) {
        return -1;
    }
    p->raises = 0; /* what a part raises, its micro-batch raises in the call as well */
    if (*moved && p->numbers == OOMKIT_NUMBERS_NONE) {
        p->numbers = OOMKIT_NUMBERS_SAME;
        return verify_all(p, cut, moved);
    }
    if (verify_run(p, cut, 0, &one) < 0 || verify_run(p, cut, 1, &two) < 0) {
        return -1;
    }
    if (p->numbers != OOMKIT_NUMBERS_SAME) {
        return 0;
    }
    kept = oomkit_proof_kept(p, one || two);
    if (kept == 0) {
        kept = oomkit_proof_after(p, 0);
        if (kept == 1 || kept == 3) {
            return verify_all(p, cut, moved);
        }
        p->numbers = kept < 0 ? p->numbers : OOMKIT_NUMBERS_OTHER;
    }
    *moved = p->numbers != OOMKIT_NUMBERS_SAME;
    return kept < 0 ? -1 : 0;
}

/* The three runs, and what they tell. New reference or NULL. */
static PyObject *
verify_once(oomkit_proof *p, const oomkit_slice *cut)
{
    oomkit_call *call = p->call;
    OWNED PyObject *one = NULL, *two = NULL;
    PyObject *verdict = NULL; /* owned */
    int moved = 0;

    if (verify_shares(p, cut, &one, &two) == 0 && verify_all(p, cut, &moved) == 0) {
        verdict = PyObject_CallMethod(call->cut->verification, "judge", "OOOOO",
                                      call->options->label, one, two,
                                      oomkit_losses_are_sums(call) ? Py_True : Py_False,
                                      moved ? Py_True : Py_False);
    }
    p->moved = moved;
    if (verdict != NULL && verdict != Py_None) {
        Py_SETREF(verdict, verify_search(p, verdict, cut, moved));
    }
    return verdict;
}

/* Does it say that they differ, whatever they weigh? */
static int
verify_differs(PyObject *verdict)
{
    return verdict != NULL && verdict != Py_None &&
           PyTuple_GET_ITEM(verdict, 0) == Py_False &&
           PyList_GET_SIZE(PyTuple_GET_ITEM(verdict, 2)) == 0;
}

/* The same, where they differ with numbers in another order, too, if there is one. */
static PyObject *
verify_runs(oomkit_proof *p, const oomkit_slice *cut)
{
    PyObject *verdict = verify_once(p, cut); /* owned */
    int after = verify_differs(verdict) ? oomkit_proof_after(p, 1) : 0;

    if (after == 1) {
        Py_SETREF(verdict, verify_once(p, cut));
        after = verify_differs(verdict) ? oomkit_proof_after(p, 1) : 0;
    }
    if (after < 0) {
        Py_CLEAR(verdict);
    }
    return verdict;
}

/* Numbers that no part can be given may hide a difference: with every module in eval
 * mode there may be none. Steals `verdict`. New reference or NULL. */
static PyObject *
verify_quietly(oomkit_proof *p, const oomkit_slice *cut, PyObject *verdict)
{
    OWNED PyObject *text = NULL, *quiet = NULL;

    if (verdict == NULL || verdict == Py_None || !p->moved) {
        return verdict;
    }
    if (oomkit_proof_hidden(p, 0, &text) < 0 || text == NULL) {
        return text == NULL && !PyErr_Occurred() ? verdict : (Py_DECREF(verdict), NULL);
    }
    quiet = PyObject_CallMethod(p->judge, "quiet", "O", Py_True);
    Py_SETREF(verdict, quiet == NULL ? NULL : verify_once(p, cut));
    if (verdict == NULL && quiet != NULL && oomkit_proof_own_error(p->call)) {
        oomkit_error_dismiss(); /* it does not work in eval: nothing is shown there */
        p->moved = 1;
        verdict = Py_NewRef(Py_None);
    }
    if (verdict != NULL && p->moved) {
        p->moved = 0; /* this is no matter of other numbers */
        Py_SETREF(verdict, Py_BuildValue("OO[]", Py_False, text));
    }
    return verdict;
}

/* The program's warnings are heard again. Steals `verdict`, which is returned; NULL
 * with an exception. */
static PyObject *
verify_speak(oomkit_proof *p, PyObject *verdict)
{
    PyObject *exception = verdict == NULL ? oomkit_exception_take() : NULL; /* owned */
    OWNED PyObject *done = PyObject_CallMethod(p->around, "speak", NULL);

    if (done == NULL) {
        Py_CLEAR(verdict);
    }
    if (exception != NULL) {
        if (done == NULL) {
            oomkit_error_unraised(p->call->given.func); /* the first one tells more */
        }
        oomkit_exception_give(exception);
    }
    return verdict;
}

/* In place of an outermost backward there: it is told of the roots. */
static PyObject *
verify_backward(oomkit_call *call, PyObject *engine, PyObject *const *args,
                size_t nargsf, PyObject *kwnames)
{
    const Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    OWNED PyObject *given = oomkit_terms_given(n > 1 ? args[1] : Py_None), *done = NULL;

    (void)engine;
    (void)kwnames;
    if (given != NULL) {
        done = PyObject_CallMethod(call->cut->verification, "root", "OO",
                                   n > 0 ? args[0] : call->st->empty_tuple, given);
    }
    if (done == NULL) {
        return NULL;
    }
    call->training = 1;
    call->backward.done++;
    Py_RETURN_NONE;
}

PyObject *
oomkit_verify_rows(oomkit_proof *p, int64_t start, int64_t length, int64_t first)
{
    oomkit_call *call = p->call;
    const oomkit_slice cut[2] = {{start, first}, {start + first, length - first}};
    const int raised = call->refused.raised;
    PyObject *verdict = NULL; /* owned */
    OWNED PyObject *done = NULL;

    if (verify_anew(call) < 0) {
        return NULL;
    }
    call->backward.instead = verify_backward;
    done = PyObject_CallMethod(p->around, "hush", NULL);
    if (done != NULL) {
        Py_SETREF(done, PyObject_CallMethod(p->judge, "quiet", "O",
                                            p->everything ? Py_True : Py_False));
        verdict = done == NULL ? NULL : verify_runs(p, cut);
        verdict = verify_quietly(p, cut, verdict);
        verdict = verify_speak(p, verdict);
    }
    if (oomkit_join_empty(&call->cut->join) < 0) {
        Py_CLEAR(verdict);
    }
    call->backward.instead = NULL;
    Py_CLEAR(call->cut->verification);
    p->unfit = verdict == NULL && oomkit_exception_is_oom(call->st);
    p->raises = p->raises && verdict == NULL && !p->unfit;
    if (verdict == NULL && call->tries.restart == 0) {
        call->refused.raised = raised; /* the call itself is asked anew */
        return verify_abandon(p, oomkit_exception_take()) < 0 ? NULL
                                                              : Py_NewRef(Py_None);
    }
    return verdict;
}
