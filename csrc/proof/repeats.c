/* Does the step do the same when it runs again? Asked where a split is refused, before
 * the whole batch runs once more: what could not be put back would be in its result,
 * and no comparison with parts of it is left to show that. */
#include "proof.h"
#include "../accum/accum.h"
#include "../call/call.h"
#include "../call/step.h"

/* The rows of a micro-batch, and the same rows again in the place of the parts. *text
 * (owned) as in oomkit_proof_compare(). 0 or -1. */
static int
repeats_compare(oomkit_proof *p, PyObject **text)
{
    const oomkit_slice whole = {p->start, p->length};

    return oomkit_proof_aside(p) < 0 || oomkit_proof_judge(p) < 0 ||
                   oomkit_proof_whole(p) < 0
               ? -1
               : oomkit_proof_compare_with(p, &whole, 1, text);
}

/* Nothing but values of the result differ: a time that was taken. 1, 0 or -1. */
static int
repeats_but_for_results(const oomkit_proof *p)
{
    OWNED PyObject *results = PyObject_GetAttrString(p->judge, "volatile");

    return results == NULL ? -1 : results == Py_True;
}

/* An error has ended it: of the step's own, of the device's memory, or another refusal.
 * It was not shown. 0, or -1 with an interrupt, or without memory of the interpreter.
 */
static int
repeats_unknown(oomkit_call *call)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception) ||
        PyErr_ExceptionMatches(PyExc_MemoryError)) {
        return -1;
    }
    oomkit_exception_discard(call->st, oomkit_exception_take());
    return 0;
}

int
oomkit_proof_repeats(oomkit_call *call)
{
    oomkit_proof p = {.call = call};
    OWNED PyObject *text = NULL;
    int result;

    (void)oomkit_proof_rows_largest(&p);
    p.fits = p.length;
    result = repeats_compare(&p, &text);
    result = result < 0 ? -1 : text == NULL ? 1 : repeats_but_for_results(&p);
    result = result < 0 ? repeats_unknown(call) : result;
    oomkit_proof_loud(&p);
    if (oomkit_proof_back(&p) < 0) {
        result = -1;
    }
    call->refused.raised = 0;
    call->tries.restart = 0;
    oomkit_proof_clear(&p);
    return result;
}
