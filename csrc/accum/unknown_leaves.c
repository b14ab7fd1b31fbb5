/* Strangers: parameters and optimizers that the search did not find. What is not known
 * is neither marked nor parked nor intercepted, so a replay would count it twice: it is
 * looked for where it shows. Leaves of the graph of a backward become participants
 * (adopt_leaves.c); an optimizer that steps unknown is refused by name. */
#include "accum.h"
#include "../hook/graph.h"
#include "../optim/optim.h"
#include "../ranks/agree.h"
#include "../undo/undo.h"

/* Is one of those leaves still alive, now that the failed attempt is gone? */
static int
unknown_alive(oomkit_call *call)
{
    Py_ssize_t i;
    int alive = 0;
    PyObject *leaves = call->unknown.of_graph; /* borrowed from call */

    for (i = 0; leaves != NULL && i < PyList_GET_SIZE(leaves) && !alive; i++) {
        OWNED PyObject *leaf = oomkit_reference_get(PyList_GET_ITEM(leaves, i));
        alive = leaf != NULL && !oomkit_buffers_bare_again(call, leaf);
    }
    Py_CLEAR(call->unknown.of_graph);
    return alive;
}

typedef struct unknown_walk {
    oomkit_call *call;
    oomkit_addresses known; /* of the parameters that take part */
    PyObject *found;        /* owned list: leaves that are no participants */
} unknown_walk;

static int
walk_edge(oomkit_state *Py_UNUSED(st), const oomkit_edge *edge, void *context)
{
    const unknown_walk *w = context;
    return oomkit_paths_edge(w->call, edge);
}

/* A leaf into `found` when it is no participant; behind others the walk goes on. */
static int
walk_visit(oomkit_state *Py_UNUSED(st), PyObject *node, const oomkit_node_type *type,
           void *context)
{
    unknown_walk *w = context;
    OWNED PyObject *variable = NULL;
    int made; /* of parameters, for the time of a forward */

    if (!type->is_leaf) {
        return 1;
    }
    variable = oomkit_node_get(node, &type->variable);
    if (variable == NULL) {
        return -1;
    }
    if (oomkit_addresses_have(&w->known, variable)) {
        return 0;
    }
    made = oomkit_ranks_made(w->call, variable);
    return made != 0 ? (made < 0 ? -1 : 0) : PyList_Append(w->found, variable);
}

/* Walks the graph of a backward to its leaves, and shows its edges to the proof of
 * calls like this one. New list of leaves that are no participants, or NULL with an
 * exception. */
static PyObject *
graph_strangers(oomkit_call *call, PyObject *roots)
{
    unknown_walk w = {.call = call, .found = PyList_New(0)}; /* returned */
    int leaves = 0;
    const int watched = oomkit_paths_watched(call);

    if (watched) {
        oomkit_paths_graph(call);
    }
    if (w.found == NULL ||
        oomkit_addresses_fill(&w.known, call->parts->params, call->parts->param_count) <
            0 ||
        oomkit_graph_walk_edges(call->st, roots, walk_visit, watched ? walk_edge : NULL,
                                &w, &leaves) < 0) {
        call->refused.raised |= PyErr_ExceptionMatches(call->st->SplitError);
        Py_CLEAR(w.found);
    }
    oomkit_addresses_free(&w.known);
    return w.found;
}

/* Does it have a gradient? 1, 0 or -1. */
static int
leaf_has_gradient(oomkit_call *call, PyObject *leaf)
{
    OWNED PyObject *gradient = PyObject_GetAttr(leaf, call->st->str_grad);
    return gradient == NULL ? -1 : gradient != Py_None;
}

/* Appends a weak reference to a list made when needed; with `flag` >= 0 a pair of the
 * reference and the flag. 0 or -1. */
static int
leaves_add(PyObject **list, PyObject *leaf, int flag)
{
    OWNED PyObject *ref = PyWeakref_NewRef(leaf, NULL), *item = NULL;

    if (ref == NULL) {
        return -1;
    }
    item = flag < 0 ? Py_NewRef(ref) : Py_BuildValue("Oi", ref, flag);
    if (item == NULL || (*list == NULL && (*list = PyList_New(0)) == NULL)) {
        return -1;
    }
    return PyList_Append(*list, item);
}

static int
meet_refuse(oomkit_call *call, PyObject *leaf)
{
    OWNED PyObject *name = oomkit_describe_tensor(call, leaf);

    if (name == NULL) {
        return -1;
    }
    return oomkit_refuse_step(
        call,
        "%U contributes to the loss, but was not found in the arguments, self, closure "
        "or globals of the step; pass model=... and optimizer=... to auto_batch" SEE(
            "parameters-not-found"),
        name);
}

/* Was this leaf in the graph that is run again, and without a gradient? What it gets in
 * the micro-batches adds up as it did there. A parameter may have more beside it. */
static int
meet_is_loose(const oomkit_call *call, PyObject *leaf)
{
    Py_ssize_t i = 0, n = call->unknown.loose == NULL
                              ? 0
                              : PyList_GET_SIZE(call->unknown.loose);

    while (i < n && PyList_GET_ITEM(call->unknown.loose, i) != leaf) {
        i++;
    }
    return i < n && !PyObject_TypeCheck(leaf, (PyTypeObject *)call->st->Parameter);
}

int
oomkit_unknown_loose_drop(oomkit_call *call)
{
    Py_ssize_t i;
    int result = 0;

    for (i = 0; call->unknown.loose != NULL &&
                i < PyList_GET_SIZE(call->unknown.loose) && result == 0;
         i++) {
        PyObject *leaf = PyList_GET_ITEM(call->unknown.loose, i); /* borrowed */
        if (meet_is_loose(call, leaf)) {
            result = PyObject_SetAttr(leaf, call->st->str_grad, Py_None);
        }
    }
    return result;
}

/* Before a backward of a later micro-batch: what only its rows lead to was not met in
 * the first one, and the whole batch may have added to it already. 0 or -1. */
static int
meet_late(oomkit_call *call, PyObject *roots)
{
    OWNED PyObject *found = NULL;
    Py_ssize_t i;

    if (!call->tries.may_hold && !oomkit_paths_watched(call)) {
        return 0;
    }
    found = graph_strangers(call, roots);
    if (found == NULL) {
        return -1;
    }
    for (i = 0; call->tries.may_hold && i < PyList_GET_SIZE(found); i++) {
        PyObject *leaf = PyList_GET_ITEM(found, i); /* borrowed */
        if (PyObject_TypeCheck(leaf, (PyTypeObject *)call->st->Parameter)) {
            return meet_refuse(call, leaf);
        }
    }
    return 0;
}

/* Before a backward of the first micro-batch of a split call: everything that it will
 * write to must be known. Unknown leaves are noted, and the attempt is given up so that
 * those that outlive it can be taken in; where that was done already they are looked at
 * again at the end of the micro-batch. `nested`: a custom Function's own backward,
 * whose graph no other one leads to; of its leaves only parameters are worth an
 * attempt, for a reentrant checkpoint makes its inputs anew. 0, or -1 with an
 * exception. */
int
oomkit_unknown_meet(oomkit_call *call, PyObject *roots, int nested)
{
    PyObject *found = /* owned */
        call->cut->at > 0 ? NULL : graph_strangers(call, roots);
    Py_ssize_t i, n = found == NULL ? 0 : PyList_GET_SIZE(found);
    int result = found == NULL ? -1 : 0;
    int restart = !nested && !call->parts->leaves_die;
    /* Others may have arrays of as many parameters: the returned losses of this site.
     */
    int alone = !oomkit_call_is_replay(call) && call->parts->refs <= 2;

    if (call->cut->at > 0) {
        return meet_late(call, roots);
    }
    for (i = 0; i < n && result == 0; i++) {
        PyObject *leaf = PyList_GET_ITEM(found, i); /* borrowed */
        if (PyObject_TypeCheck(leaf, (PyTypeObject *)call->st->Parameter)) {
            restart = 1;
            result = alone ? 0 : meet_refuse(call, leaf);
        }
    }
    restart = restart && alone && n > 0 && call->tries.restarts < OOMKIT_RESTARTS;
    for (i = 0; i < n && result == 0; i++) {
        PyObject *leaf = PyList_GET_ITEM(found, i); /* borrowed */
        if (meet_is_loose(call, leaf)) {
            continue;
        }
        if (restart) {
            result = leaves_add(&call->unknown.leaves, leaf, -1);
        } else {
            int has = leaf_has_gradient(call, leaf);
            result = has < 0 ? -1 : leaves_add(&call->unknown.of_step, leaf, has);
        }
    }
    Py_XDECREF(found);
    if (result == 0 && restart) {
        call->tries.restart = OOMKIT_RESTART_UNKNOWN;
        oomkit_raise(
            call->st->SplitError,
            "auto_batch starts the step again, because it found more tensors that "
            "contribute to the loss. Do not catch this error in the step" SEE(
                "let-errors-pass"));
        return -1;
    }
    return result;
}

/* After a failed backward, over the whole batch or in a micro-batch after the first: an
 * unknown leaf that has a gradient may hold a part of this batch's contribution
 * already. Keeps the exception in flight. */
static void
unknown_note(oomkit_call *call, PyObject *roots)
{
    PyObject *exception = oomkit_exception_take(); /* owned, given back */
    const int raised = call->refused.raised;
    PyObject *found = graph_strangers(call, roots); /* owned */
    Py_ssize_t i;

    for (i = 0; found != NULL && i < PyList_GET_SIZE(found) && !PyErr_Occurred(); i++) {
        PyObject *leaf = PyList_GET_ITEM(found, i); /* borrowed */
        if (leaf_has_gradient(call, leaf) != 1) {
            continue;
        }
        if (PyObject_TypeCheck(leaf, (PyTypeObject *)call->st->Parameter)) {
            call->refused.why =
                "a parameter that auto_batch did not find has a gradient, which may "
                "contain a part of this batch already: pass model=... and "
                "optimizer=... to auto_batch, and call zero_grad() before you "
                "continue" SEE("parameters-not-found");
        } else if (leaves_add(&call->unknown.of_graph, leaf, -1) < 0) {
            break; /* made inside the step, or kept elsewhere: told apart after the
                      failed attempt is dropped */
        }
    }
    if (oomkit_graph_too_deep(call->st)) {
        call->refused.raised = raised;
        call->refused.why = OOMKIT_TOO_DEEP;
    } else if (PyErr_Occurred()) {
        call->refused.why =
            "the graph of the failed backward could not be searched for parameters" SEE(
                "parameters-not-found");
        oomkit_error_dismiss(); /* why does not matter: the call is not retried */
    }
    Py_XDECREF(found);
    if (exception != NULL) {
        oomkit_exception_give(exception);
    }
}

/* torch's hook before any optimizer's step: (optimizer, args, kwargs) -> None. Those
 * that are intercepted are known; another one is marked, or refused while the call is
 * split. */
int
oomkit_unknown_optimizer_begins(PyObject *optimizer)
{
    oomkit_call *call = oomkit_call_current();
    int index;

    if (call == NULL || oomkit_update_runs(call)) {
        return 0;
    }
    if (call->split || call->proof != NULL) {
        return oomkit_refuse_step(
            call,
            "it steps an optimizer (%s) that was not found in the arguments, self, "
            "closure or globals of the step; pass optimizer=... to auto_batch" SEE(
                "parameters-not-found"),
            Py_TYPE(optimizer)->tp_name);
    }
    /* What it needs is not known. */
    if (oomkit_ranks_commit(call, OOMKIT_UPDATE_NEAR) < 0 ||
        oomkit_optimizer_mark_take(call, optimizer, &index) < 0) {
        return -1;
    }
    oomkit_update_of_unknown_begins(call);
    return 0;
}

/* torch's hook after any optimizer's step. */
void
oomkit_unknown_optimizer_ends(void)
{
    oomkit_call *call = oomkit_call_current();
    if (call != NULL && !oomkit_update_runs(call) &&
        oomkit_update_of_unknown_runs(call)) {
        oomkit_update_of_unknown_ends(call);
    }
}

static int
unknown_backward(oomkit_call *call, oomkit_backward *backward)
{
    /* Of a run that is compared no gradient may stay where nobody looks, either. */
    return call->split || call->proof != NULL
               ? oomkit_unknown_meet(call, backward->roots, 0)
               : 0;
}

static int
unknown_nested(oomkit_call *call, const oomkit_backward *backward)
{
    return call->split || call->proof != NULL
               ? oomkit_unknown_meet(call, backward->roots, 1)
               : 0;
}

static void
unknown_backward_fails(oomkit_call *call, const oomkit_backward *backward)
{
    if (!call->split || call->cut->at > 0) {
        unknown_note(call, backward->roots);
    }
}

static int
unknown_micro_ends(oomkit_call *call, PyObject *result)
{
    return call->unknown.of_step != NULL ? oomkit_unknown_check(call, result) : 0;
}

static const char *
unknown_remain(oomkit_call *call)
{
    return unknown_alive(call)
               ? "a tensor that requires grad and that auto_batch did not find may "
                 "contain a part of this batch in its .grad; pass it as "
                 "participants=..., and clear its .grad before you continue" SEE(
                     "parameters-not-found")
               : NULL;
}

static void
unknown_attempt_ends(oomkit_call *call)
{
    Py_CLEAR(call->unknown.of_graph);
    Py_CLEAR(call->unknown.of_step);
}

static void
unknown_call_ends(oomkit_call *call)
{
    unknown_attempt_ends(call);
    Py_CLEAR(call->unknown.leaves);
}

const oomkit_rule oomkit_unknown_leaves_rule = {
    .leaf_at_entry = oomkit_restart_with_buffer,
    .backward_begins = unknown_backward,
    .backward_nests = unknown_nested,
    .backward_fails = unknown_backward_fails,
    .micro_ends = unknown_micro_ends,
    .failure_remains = unknown_remain,
    .gradients_go_back = oomkit_unknown_loose_drop,
    .before_restart = oomkit_unknown_take_in,
    .attempt_ends = unknown_attempt_ends,
    .call_ends = unknown_call_ends};
