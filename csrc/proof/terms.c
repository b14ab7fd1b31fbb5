/* What micro-batches multiply the terms of their losses by, beside what proofs have
 * shown: see oomkit._proof.graphs.terms. */
#include "../accum/accum.h"
#include "../call/call.h"
#include "../optim/updating.h"
#include "proof.h"

PyObject *
oomkit_terms_given(PyObject *gradients)
{
    const Py_ssize_t n = PyTuple_Check(gradients) ? PyTuple_GET_SIZE(gradients) : 0;
    PyObject *given = PyTuple_New(n); /* owned, returned */
    Py_ssize_t i;

    for (i = 0; given != NULL && i < n; i++) {
        PyObject *gradient = PyTuple_GET_ITEM(gradients, i); /* borrowed */
        PyTuple_SET_ITEM(given, i,
                         Py_NewRef(Py_REFCNT(gradient) > 1 ? gradient : Py_None));
    }
    return given;
}

int
oomkit_terms_note(oomkit_call *call, const oomkit_backward *backward)
{
    oomkit_cut *cut = call->cut;
    OWNED PyObject *given = NULL, *done = NULL;

    if (!oomkit_paths_watched(call)) {
        return 0;
    }
    given = oomkit_terms_given(backward->gradients);
    EXEMPT (call->st) {
        if (cut->terms == NULL) {
            cut->terms = PyObject_CallMethod(call->st->proof, "terms", NULL);
        }
        if (given != NULL && cut->terms != NULL) {
            done = PyObject_CallMethod(
                cut->terms, "note", "OOLLd", backward->roots, given, (long long)cut->at,
                (long long)cut->slices[cut->at].length, cut->weights[cut->at]);
        }
    }
    return done == NULL ? -1 : 0;
}

/* They differ however often that is proven. 0 or -1. */
static int
terms_refuse(oomkit_call *call)
{
    if (call->options->verify == OOMKIT_VERIFY_WARN) {
        return oomkit_warn(
            call->st->OomkitWarning, 1,
            "oomkit: %U is split (verify=\"warn\"), but a number that its loss is "
            "multiplied or divided by differs between micro-batches in a way that "
            "could not be verified" SEE("micro-batches-differ"),
            call->options->label);
    }
    return oomkit_refuse_split(
        call, "its loss is multiplied or divided by a number that differs between "
              "micro-batches, which no proof of their rows explains: the step counts "
              "rows itself, or decides by a value of the loss. Pass weight= to "
              "auto_batch, or what is counted as an argument of the step" SEE(
                  "micro-batches-differ"));
}

/* New list of micro-batches, the oddest first, or NULL. */
static PyObject *
terms_stray(oomkit_call *call, PyObject *tried)
{
    PyObject *odd = NULL; /* owned, returned */

    EXEMPT (call->st) {
        odd = PyObject_CallMethod(call->cut->terms, "strays", "O", tried);
    }
    return odd;
}

/* All of them are proven, or enough: does that explain them? 1, 0 or -1. */
static int
terms_settle(oomkit_call *call, PyObject *tried)
{
    OWNED PyObject *explained =
        PyObject_CallMethod(call->cut->terms, "settle", "O", tried);

    return explained == NULL ? -1 : explained == Py_True;
}

int
oomkit_terms_are_new(oomkit_call *call)
{
    oomkit_proven *found;
    OWNED PyObject *odd = NULL, *tried = NULL;
    Py_ssize_t i;
    int explained;

    if (call->proof != NULL || !call->is_last || !oomkit_paths_watched(call) ||
        call->cut->terms == NULL) {
        return 0;
    }
    /* Calls into Python let other threads' calls take the place of what was found. */
    tried = Py_XNewRef(oomkit_proven_find(call)->tried);
    odd = tried == NULL ? PyList_New(0) : terms_stray(call, tried);
    if (odd == NULL || PyList_GET_SIZE(odd) == 0) {
        return odd == NULL ? -1 : 0;
    }
    if (oomkit_updates_made(call) > 0 || oomkit_update_is_final(call)) {
        found = oomkit_proven_find(call);
        if (found != NULL) {
            found->unseen = 1; /* it is the next call that is proven */
        }
        return terms_settle(call, tried) < 0 ? -1 : 0;
    }
    for (i = 0; i < PyList_GET_SIZE(odd); i++) {
        const int64_t at = PyLong_AsLongLong(PyList_GET_ITEM(odd, i));
        if (oomkit_paths_prove_next(call, at)) {
            return 1;
        }
    }
    explained = terms_settle(call, tried);
    return explained == 0 ? terms_refuse(call) : explained < 0 ? -1 : 0;
}
