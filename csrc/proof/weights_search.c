/* What a loss is a mean over, where it is not one over rows: weights of the parts that
 * make them the whole, tried at more than one place. */
#include "proof.h"
#include "../accum/accum.h"
#include "../call/call.h"
#include "../sizes/sizes.h"

/* Takes the place that the judge has found: (start, length, first), or None. Steals
 * `where`. 1, 0 for None, -1. */
static int
search_place(oomkit_proof *p, PyObject *where)
{
    long long start, length, first;
    int found = where == NULL ? -1 : where != Py_None;

    if (found > 0 && !PyArg_ParseTuple(where, "LLL", &start, &length, &first)) {
        found = -1;
    }
    if (found > 0) {
        p->start = start;
        p->length = length;
        p->first = first;
    }
    Py_XDECREF(where);
    return found;
}

PyObject *
oomkit_search_rules(oomkit_proof *p)
{
    const oomkit_slice whole = {p->start, p->length}, one = {p->start, p->first},
                       two = {p->start + p->first, p->length - p->first};
    OWNED PyObject *leaves = NULL;
    PyObject *rules = NULL; /* owned */
    int status;

    if (!p->trained) {
        return PyList_New(0);
    }
    status = oomkit_proof_run(p, "raw", &whole, 1, NULL) < 0 ||
                     oomkit_proof_run(p, "one", &one, 1, NULL) < 0 ||
                     oomkit_proof_run(p, "two", &two, 1, NULL) < 0
                 ? -1
                 : 0;
    leaves = status < 0 ? NULL : oomkit_proof_leaves(p->call);
    if (leaves == NULL) {
        return NULL;
    }
    EXEMPT (p->call->st) {
        rules = PyObject_CallMethod(p->judge, "search", "O[(LL)(LL)]", leaves,
                                    (long long)one.start, (long long)one.length,
                                    (long long)two.start, (long long)two.length);
    }
    return rules;
}

int
oomkit_search_ask(oomkit_proof *p, const char *method)
{
    OWNED PyObject *leaves = oomkit_proof_leaves(p->call);
    OWNED PyObject *slices = oomkit_proof_slices(p->cut.slices, p->cut.count);
    PyObject *rule = p->rule == NULL ? Py_None : p->rule; /* borrowed */
    PyObject *where = NULL;                               /* owned, then stolen */

    if (leaves == NULL || slices == NULL) {
        return -1;
    }
    EXEMPT (p->call->st) {
        where = PyObject_CallMethod(p->judge, method, "OOLLLO(LL)", leaves, rule,
                                    (long long)p->start, (long long)p->length,
                                    (long long)p->first, slices,
                                    (long long)oomkit_unfit_multiple(p->call),
                                    (long long)oomkit_unfit_least(p->call));
    }
    return search_place(p, where);
}

int
oomkit_proof_weakly(oomkit_proof *p, PyObject **text)
{
    oomkit_call *call = p->call;
    OWNED PyObject *verdict = oomkit_verify_rows(p, p->start, p->length, p->first);
    PyObject *equal, *line, *rules; /* borrowed from verdict */

    *text = NULL;
    if (verdict == NULL) {
        return -1;
    }
    if (verdict == Py_None && p->raises) {
        *text = PyUnicode_FromFormat(
            "nothing could be compared, because the step raises an error under "
            "torch.no_grad() with %lld rows: %V",
            (long long)p->length, p->raised, "no message");
        Py_XSETREF(p->rules, PyList_New(0));
        return *text == NULL || p->rules == NULL ? -1 : 1;
    }
    if (verdict == Py_None) {
        OWNED PyObject *nothing = PyUnicode_FromFormat(
            "%U is split, but the split could not be verified: micro-batches of %lld "
            "rows cannot be cut further, and two of them do not fit into memory at "
            "once. If the loss is a mean over samples, pass verify=False to silence "
            "this" SEE("split-not-verified"),
            call->options->label, (long long)p->first);
        return nothing == NULL ? -1
               : call->batch.ambiguous != NULL
                   ? 0
                   : oomkit_proof_log(call, "warning", nothing);
    }
    if (!PyArg_ParseTuple(verdict, "OUO", &equal, &line, &rules)) {
        return -1;
    }
    Py_XSETREF(p->rules, Py_NewRef(rules));
    *text = equal == Py_False ? Py_NewRef(line) : NULL;
    return *text == NULL && oomkit_proof_log(call, "info", line) < 0 ? -1 : 1;
}

int
oomkit_proof_is_weak(const oomkit_proof *p)
{
    return p->weakly && p->length > p->fits;
}

int
oomkit_proof_there(oomkit_proof *p, PyObject **text)
{
    *text = NULL;
    if (!oomkit_proof_is_weak(p)) {
        if (oomkit_proof_whole(p) == 0 &&
            oomkit_proof_compare(p, p->first, text) == 0) {
            return 0;
        }
        if (p->length <= p->fits || p->call->tries.restart != 0 ||
            !oomkit_exception_is_oom(p->call->st) || oomkit_proof_forgive(p) < 0) {
            return -1;
        }
        p->weakly = 1;
    }
    return oomkit_proof_weakly(p, text) < 0 ? -1 : 0;
}

#define UNTOLD 2 /* it holds for this cut, and no other place tells it from rows */

/* Does this rule hold, for this cut and at another place? 1, 0, UNTOLD or -1. *closer
 * (owned, or NULL) becomes what differs with the first one. */
static int
search_holds(oomkit_proof *p, PyObject **closer)
{
    const oomkit_slice found = {p->start, p->length};
    const int64_t first = p->first;
    OWNED PyObject *text = NULL;
    int place, holds;

    if (oomkit_proof_is_weak(p)) {
        place = oomkit_proof_weakly(p, &text);
    } else {
        place = oomkit_proof_compare(p, p->first, &text);
    }
    if (place < 0) {
        return -1;
    }
    holds = text == NULL ? UNTOLD : 0;
    if (text != NULL && *closer == NULL) {
        *closer = Py_NewRef(text);
    }
    place = text == NULL ? oomkit_search_ask(p, "confirm") : 0;
    if (place > 0) {
        if (oomkit_proof_there(p, &text) < 0) {
            return -1;
        }
        holds = text == NULL;
        p->start = found.start;
        p->length = found.length;
        p->first = first;
        if (!holds && !oomkit_proof_is_weak(p) && oomkit_proof_whole_again(p) < 0) {
            place = -1; /* it is for the next one */
        }
    }
    return place < 0 ? -1 : holds;
}

int
oomkit_search_try(oomkit_proof *p, PyObject *rules, PyObject **text)
{
    OWNED PyObject *closer = NULL;
    Py_ssize_t i = 0;
    int found = 0;

    while (found == 0 && i < PyList_GET_SIZE(rules)) {
        Py_XSETREF(p->rule, Py_NewRef(PyList_GET_ITEM(rules, i)));
        found = search_holds(p, &closer);
        if (found == UNTOLD) {
            found = 0;
            i++;
        } else if (found == 0) { /* nor is it proposed */
            found = PyList_SetSlice(rules, i, i + 1, NULL);
        }
    }
    if (found == 0) {
        Py_CLEAR(p->rule);
    }
    if (closer != NULL) {
        Py_SETREF(*text, STEAL(closer));
    }
    return found;
}

int
oomkit_search_say(oomkit_proof *p)
{
    OWNED PyObject *done = PyObject_CallMethod(p->rule, "forget", NULL);
    OWNED PyObject *what = done ? PyObject_GetAttrString(p->rule, "text") : NULL;
    OWNED PyObject *text =
        what == NULL
            ? NULL
            : PyUnicode_FromFormat("the loss of %U is treated as a %U: weighted so, "
                                   "two parts of a batch give the result of the whole",
                                   p->call->options->label, what);

    return oomkit_proof_log(p->call, "info", text);
}
