/* The comparison that a proof is made of: a slice whole, and in two parts. */
#include "proof.h"
#include "../sizes/sizes.h"

#define CHANCES 2 /* wholes with other random numbers */

/* An answer of the judge's (stolen): *text (owned) is what differs, NULL for nothing. 0
 * or -1. */
static int
proof_answer(PyObject *answer, PyObject **text)
{
    *text = answer == Py_None ? NULL : answer;
    if (answer == Py_None) {
        Py_DECREF(answer);
    }
    return answer == NULL ? -1 : 0;
}

/* judge.verdict(). As proof_answer(). */
static int
proof_ask(oomkit_proof *p, PyObject **text)
{
    PyObject *answer = NULL; /* owned, then stolen */

    EXEMPT (p->call->st) {
        answer = PyObject_CallMethod(p->judge, "verdict", NULL);
    }
    return proof_answer(answer, text);
}

int
oomkit_proof_hidden(oomkit_proof *p, int by_chance, PyObject **text)
{
    PyObject *answer = NULL; /* owned, then stolen */

    EXEMPT (p->call->st) {
        answer = PyObject_CallMethod(p->judge, "hidden", "O",
                                     by_chance ? Py_True : Py_False);
    }
    return proof_answer(answer, text);
}

/* Nothing but values of the result differ: would they be the same if the whole ran
 * twice? Times are not. As proof_ask(), which has answered *text. */
static int
proof_twice(oomkit_proof *p, PyObject **text)
{
    const oomkit_slice whole = {p->start, p->length};
    OWNED PyObject *volatile_ = PyObject_GetAttrString(p->judge, "volatile");

    if (volatile_ == NULL) {
        Py_CLEAR(*text);
        return -1;
    }
    if (volatile_ != Py_True) {
        return 0;
    }
    Py_CLEAR(*text);
    return oomkit_proof_run(p, "whole again", &whole, 1, NULL) < 0 ? -1
                                                                   : proof_ask(p, text);
}

/* Gradients that overflow under a scaler tell nothing; with a smaller scale they do.
 * Is there one to try? 1, 0 or -1. */
static int
proof_overflows(oomkit_proof *p)
{
    OWNED PyObject *overflows = NULL;

    EXEMPT (p->call->st) {
        overflows = PyObject_CallMethod(p->judge, "overflows", NULL);
    }
    return overflows == NULL ? -1 : overflows == Py_True;
}

int
oomkit_proof_whole_once(oomkit_proof *p, int everything, int *moved)
{
    const oomkit_slice whole = {p->start, p->length};
    int again;

    p->everything = everything;
    p->by_chance = 0;
    do {
        OWNED PyObject *done = NULL;
        EXEMPT (p->call->st) {
            done = PyObject_CallMethod(p->judge, "quiet", "O",
                                       everything ? Py_True : Py_False);
        }
        again = done == NULL || oomkit_proof_run(p, "whole", &whole, 1, moved) < 0
                    ? -1
                    : proof_overflows(p);
    } while (again > 0);
    return again;
}

/* Nothing keeps the step from drawing numbers: the whole, and again with other ones,
 * which tells what chance makes of it. 0 or -1. */
static int
whole_by_chance(oomkit_proof *p)
{
    const oomkit_slice whole = {p->start, p->length};
    int moved, result = oomkit_proof_whole_once(p, 0, &moved);

    p->by_chance = 1;
    for (p->draw = 1; result == 0 && p->draw <= CHANCES; p->draw++) {
        OWNED PyObject *done = NULL;
        result = oomkit_proof_run(p, "whole by chance", &whole, 1, NULL);
        if (result == 0) {
            EXEMPT (p->call->st) {
                done = PyObject_CallMethod(p->judge, "chance", NULL);
            }
            result = done == NULL ? -1 : 0;
        }
    }
    p->draw = 0;
    return result;
}

/* A coarse comparison has passed: does the step draw no numbers in eval mode, so that
 * it is compared exactly there? What it does in training alone has been compared
 * already. 1; 0, and the whole has run by chance again; -1. */
static int
whole_in_eval(oomkit_proof *p)
{
    int moved, result = oomkit_proof_whole_once(p, 1, &moved);

    if (result < 0 && oomkit_proof_own_error(p->call)) {
        oomkit_error_dismiss(); /* it does not work in eval */
        moved = 1;
    } else if (result < 0) {
        return -1;
    }
    p->numbers = moved ? OOMKIT_NUMBERS_CHANCE : OOMKIT_NUMBERS_QUIET;
    return moved ? whole_by_chance(p) : 1;
}

int
oomkit_proof_whole_again(oomkit_proof *p)
{
    int moved;

    return p->by_chance ? whole_by_chance(p)
                        : oomkit_proof_whole_once(p, p->everything, &moved);
}

int
oomkit_proof_kept(oomkit_proof *p, int drawn)
{
    OWNED PyObject *kept = PyObject_GetAttrString(p->draws, "kept");

    return kept == NULL ? -1 : kept == Py_True && !drawn;
}

int
oomkit_proof_after(oomkit_proof *p, int kept)
{
    OWNED PyObject *after = NULL;

    if (p->numbers != OOMKIT_NUMBERS_SAME) {
        return 0;
    }
    after = PyObject_CallMethod(p->draws, "after", "O", kept ? Py_True : Py_False);
    return after == NULL ? -1 : (int)PyLong_AsLong(after);
}

/* Parts were not given all their numbers, or differ: is there another comparison? 1 the
 * whole has run for it, 0 or -1. */
static int
compare_otherwise(oomkit_proof *p, int kept)
{
    int moved, after = oomkit_proof_after(p, kept);

    if (after == 3) {
        return oomkit_proof_whole_once(p, 0, &moved) < 0 ? -1 : 1;
    }
    if (after < 2) {
        return after;
    }
    p->numbers = OOMKIT_NUMBERS_OTHER;
    return whole_by_chance(p) < 0 ? -1 : 1;
}

int
oomkit_proof_compare_with(oomkit_proof *p, const oomkit_slice *cut, int64_t count,
                          PyObject **text)
{
    int moved, kept, again;

    do {
        *text = NULL;
        if (oomkit_proof_run(p, "parts", cut, count, &moved) < 0) {
            return -1;
        }
        kept = p->numbers == OOMKIT_NUMBERS_SAME ? oomkit_proof_kept(p, moved) : 1;
        if (kept < 0 || (kept && proof_ask(p, text) < 0)) {
            return -1;
        }
        if (kept && *text == NULL) {
            again = p->numbers == OOMKIT_NUMBERS_OTHER ? whole_in_eval(p) : 0;
            if (again == 0 && p->numbers == OOMKIT_NUMBERS_CHANCE) {
                again = oomkit_proof_hidden(p, 1, text);
            }
            continue;
        }
        again = compare_otherwise(p, kept);
        if (again == 0 && (again = proof_overflows(p)) > 0 &&
            oomkit_proof_whole_again(p) < 0) {
            again = -1;
        }
        if (again != 0) {
            Py_CLEAR(*text);
        }
    } while (again > 0);
    return again < 0 || *text == NULL ? again : proof_twice(p, text);
}

int
oomkit_proof_compare(oomkit_proof *p, int64_t first, PyObject **text)
{
    oomkit_slice cut[2] = {{p->start, first}, {p->start + first, p->length - first}};

    return oomkit_proof_compare_with(p, cut, 2, text);
}

int
oomkit_proof_raises(oomkit_proof *p, PyObject **text)
{
    const oomkit_slice cut[2] = {{p->start, p->first},
                                 {p->start + p->first, p->length - p->first}};
    PyObject *exception; /* owned, given back */

    p->no_parts = 1;
    if (p->numbers != OOMKIT_NUMBERS_SAME) {
        return -1;
    }
    exception = oomkit_exception_take();
    p->numbers = OOMKIT_NUMBERS_OTHER;
    if (whole_by_chance(p) == 0 && oomkit_proof_run(p, "parts", cut, 2, NULL) == 0) {
        Py_DECREF(exception);
        p->no_parts = 0;
        *text = PyUnicode_FromString("the step raises an error of its own where a part "
                                     "has the random numbers of its rows");
        return *text == NULL ? -1 : 0;
    }
    p->numbers = OOMKIT_NUMBERS_SAME;
    p->by_chance = 0;
    if (!oomkit_proof_own_error(p->call) && !oomkit_exception_is_oom(p->call->st)) {
        Py_DECREF(exception); /* a refusal, an interrupt, another rank's failure */
        p->no_parts = 0;
        return -1;
    }
    oomkit_error_dismiss(); /* the first one tells as much */
    oomkit_exception_give(exception);
    return -1;
}

int
oomkit_proof_covers(const oomkit_proof *p)
{
    return p->start == 0 && p->length == p->call->batch.rows;
}

int
oomkit_proof_forgive(oomkit_proof *p)
{
    oomkit_call *call = p->call;

    oomkit_exception_discard(call->st, oomkit_exception_take());
    return oomkit_recover_reclaim(call, oomkit_baseline_at_entry(call));
}

int
oomkit_proof_own_error(const oomkit_call *call)
{
    return !call->refused.raised && call->tries.restart == 0 && call->tries.by_step &&
           PyErr_ExceptionMatches(PyExc_Exception) &&
           !PyErr_ExceptionMatches(call->st->OomkitError) &&
           !oomkit_exception_is_oom(call->st);
}

int
oomkit_proof_whole(oomkit_proof *p)
{
    int moved;

    if (oomkit_proof_whole_once(p, 0, &moved) < 0) {
        return -1;
    }
    if (!moved || p->numbers == OOMKIT_NUMBERS_SAME) {
        return 0;
    }
    if (p->numbers == OOMKIT_NUMBERS_NONE) {
        p->numbers = OOMKIT_NUMBERS_SAME;
        return oomkit_proof_whole_once(p, 0, &moved);
    }
    if (p->numbers == OOMKIT_NUMBERS_QUIET &&
        (oomkit_proof_whole_once(p, 1, &moved) < 0 || !moved)) {
        return PyErr_Occurred() ? -1 : 0;
    }
    return whole_by_chance(p);
}
