/* Who judges a proof, what of it stays, and what is refused for want of one. */
#include "proof.h"
#include "../accum/accum.h"
#include "../call/call.h"
#include "../call/step.h"

int
oomkit_proof_judge(oomkit_proof *p)
{
    oomkit_call *call = p->call;
    Py_ssize_t i, n = call->parts->param_count;
    OWNED PyObject *params = PyList_New(n), *entry = NULL;
    OWNED PyObject *positional = NULL, *named = NULL;
    OWNED PyObject *modules = oomkit_participants_modules(call->parts);
    oomkit_proven *known = oomkit_proven_find(call);

    for (i = 0; params != NULL && i < n; i++) {
        PyList_SET_ITEM(params, i, Py_NewRef(call->parts->params[i]));
    }
    entry = params == NULL || modules == NULL ? NULL : oomkit_proof_gradients_values(p);
    if (entry != NULL && oomkit_effects_arguments(call, &positional, &named) == 0) {
        p->judge = PyObject_CallFunction(
            call->st->proof, "OOOOO(OOO)", call->options->label, modules, params, entry,
            known == NULL || known->tried == NULL ? Py_None : known->tried,
            call->given.func, positional, named);
    }
    if (known != NULL) {
        p->rule = Py_XNewRef(known->rule);
        p->numbers = known->draws ? OOMKIT_NUMBERS_SAME : OOMKIT_NUMBERS_NONE;
    }
    p->quieted = p->judge == NULL ? NULL : PyObject_GetAttrString(p->judge, "quieted");
    p->draws = p->quieted == NULL ? NULL : PyObject_GetAttrString(p->judge, "draws");
    p->around = p->draws == NULL ? NULL : PyObject_GetAttrString(p->judge, "around");
    return p->around == NULL ? -1 : 0;
}

void
oomkit_proof_clear(oomkit_proof *p)
{
    Py_CLEAR(p->rule);
    Py_CLEAR(p->rules);
    Py_CLEAR(p->raised);
    Py_CLEAR(p->draws);
    Py_CLEAR(p->around);
    Py_CLEAR(p->judge);
}

int
oomkit_proof_figures(oomkit_proof *p)
{
    oomkit_result_site *site = &p->call->step->results;
    OWNED PyObject *figures = NULL;

    if (site->figures == NULL && (site->figures = PyDict_New()) == NULL) {
        return -1;
    }
    figures = PyObject_CallMethod(p->judge, "all_figures", "O", site->figures);
    return figures == NULL ? -1 : PyDict_Update(site->figures, figures);
}

int
oomkit_proof_judge_level(oomkit_proof *p)
{
    OWNED PyObject *decides = PyObject_GetAttrString(p->judge, "decides");

    if (decides == Py_False && p->level == OOMKIT_PROVEN_FULLY) {
        p->level = OOMKIT_PROVEN_HERE;
    }
    return decides == NULL ? -1 : 0;
}

int
oomkit_proof_ambiguous(oomkit_call *call)
{
    PyObject *exception = NULL, *refusal; /* owned; the former becomes the cause */

    if (PyErr_Occurred() && !PyErr_ExceptionMatches(call->st->SplitError) &&
        !oomkit_proof_own_error(call)) {
        return -1; /* out of memory, an interrupt */
    }
    if (PyErr_Occurred()) {
        exception = oomkit_exception_take();
    }
    oomkit_refuse(call, "%U", call->batch.ambiguous);
    (void)oomkit_split_alone(call);
    refusal = oomkit_exception_take();
    if (PyErr_GivenExceptionMatches(refusal, call->st->SplitError)) {
        PyException_SetCause(refusal, exception); /* stolen */
    } else {
        Py_XDECREF(exception);
    }
    oomkit_exception_give(refusal);
    return -1;
}
