/* The caller's backward ran out of memory: what it reached is found in its graph, taken
 * back and run again; or it is said why that cannot be. */
#include "callers_backward.h"
#include "../accum/accum.h"
#include "../hook/graph.h"
#include "../hook/hook.h"
#include "../plain/plain_state.h"
#include "../py/tensor.h"
#include "../sizes/sizes.h"
#include "../batch/batch.h"
#include "../undo/gradients.h"
#include "../undo/undo.h"

/* Every marked gradient as it was, but those of another thread's. 0; 1 with *message
 * (owned); -1, and *message as of oomkit_take_back(). */
static int
failed_roll_back(oomkit_callers *s, PyObject **message)
{
    int i, result = 0;

    for (i = 0; i < s->call_count; i++) {
        oomkit_call *call = s->calls[i];
        OWNED PyObject *more = NULL;
        KEEPING_EXCEPTION { /* of one before it: the others go back all the same */
            if (!call->deferred.elsewhere) {
                oomkit_grads_allow_no_aside(call);
            }
            if (!call->deferred.elsewhere && oomkit_take_back(call, &more) < 0 &&
                result < 0) {
                oomkit_error_unraised(call->given.func);
            }
        }
        result = PyErr_Occurred() ? -1 : result == 1 || more != NULL;
        if (*message == NULL) {
            *message = STEAL(more);
        }
    }
    return result;
}

void
oomkit_callers_say_changed(PyObject *message)
{
    PyObject *exception = oomkit_exception_take(); /* owned, given back */
    OWNED PyObject *note = PyUnicode_FromFormat(
        "not everything is as before: %U" SEE("state-not-restored"), message);
    OWNED PyObject *done =
        note ? PyObject_CallMethod(exception, "add_note", "O", note) : NULL;

    if (done == NULL) {
        oomkit_error_unraised(exception);
    }
    oomkit_exception_give(exception);
}

void
oomkit_callers_take_back(oomkit_callers *s)
{
    PyObject *exception = oomkit_exception_take(); /* owned, given back */
    OWNED PyObject *message = NULL;
    int result = failed_roll_back(s, &message);

    if (result < 0) {
        oomkit_error_unraised(NULL);
    }
    oomkit_exception_give(exception);
    if (message != NULL) {
        oomkit_callers_say_changed(message);
    }
}

/* --- what was reached --- */

#define CHANGED                                                                        \
    "a backward() function of your own changed the gradient of the returned loss in "  \
    "place: return a new tensor from it"

/* The same of one call. */
static const char *
refusal_of(const oomkit_callers *s, const oomkit_deferred *p)
{
    uint32_t version;
    int watched;

    if (s->changed) {
        return CHANGED;
    }
    if (p->callers != s || p->gradient == NULL) {
        return "memory ran out before the gradient had reached the returned loss: "
               "return the whole loss from the step";
    }
    if (p->hooks_inside) {
        return "the step registers a hook on the loss that it returns, which would run "
               "on gradients that exist already: call register_hook() where backward() "
               "is called";
    }
    watched = oomkit_deferred_watched(p);
    if (watched < 0) {
        PyErr_Clear(); /* what cannot be asked may have a hook */
    }
    if (watched != 0) {
        return "register_hook() or retain_grad() was called on another result of the "
               "step than its loss, where the gradients of micro-batches do not pass: "
               "call it inside the step";
    }
    if (oomkit_tensor_version(s->st, p->gradient, &version) < 0) {
        PyErr_Clear(); /* a gradient that cannot be read is not used */
        version = p->gradient_version + 1;
    }
    return version == p->gradient_version ? NULL : CHANGED;
}

/* Why the calls that were reached cannot be run again (static text), or NULL. */
static const char *
failed_refusal(const oomkit_callers *s, PyObject *reached, int paths, int beneath)
{
    const char *why = NULL;
    Py_ssize_t i;

    if (s->keep_graph || s->create_graph) {
        return "retain_graph or create_graph was asked for, and the graphs of "
               "micro-batches are not kept: run that backward() inside the decorated "
               "step";
    }
    if (s->foreign) {
        return "a hook ran another backward() inside it, whose gradients would be "
               "lost: call that one afterwards, in the program";
    }
    if (paths) {
        return "backward() also reaches parameters by paths that do not pass through "
               "the returned loss: return the whole loss from the step";
    }
    for (i = 0; why == NULL && i < PyList_GET_SIZE(reached); i++) {
        why = refusal_of(s, deferred_CAST(PyList_GET_ITEM(reached, i)));
    }
    return why != NULL ? why
           : beneath
               ? "the returned loss was computed from another loss that was returned: "
                 "make one decorated step of both"
               : NULL;
}

static int
is_marked(const oomkit_callers *s, const PyObject *leaf)
{
    Py_ssize_t k;
    int i;
    for (i = 0; i < s->call_count; i++) {
        for (k = 0; k < s->calls[i]->parts->param_count; k++) {
            if (s->calls[i]->parts->params[k] == leaf) {
                return 1;
            }
        }
    }
    return 0;
}

/* A leaf that nobody marked and that has a gradient may hold a part of this batch
 * already: 1, 0 or -1. Those without one (a batch that requires grad) are noted. */
static int
failed_strangers(oomkit_callers *s)
{
    OWNED PyObject *leaves = PyList_New(0);
    int result = leaves == NULL ? -1 : oomkit_graph_leaves(s->st, s->roots, leaves);
    Py_ssize_t i;

    Py_XSETREF(s->loose, PyList_New(0));
    result = s->loose == NULL ? -1 : result;
    for (i = 0; result == 0 && i < PyList_GET_SIZE(leaves); i++) {
        PyObject *leaf = PyList_GET_ITEM(leaves, i); /* borrowed */
        OWNED PyObject *gradient = NULL;
        if (is_marked(s, leaf)) {
            continue;
        }
        gradient = PyObject_GetAttr(leaf, s->st->str_grad);
        result = gradient == NULL ? -1 : gradient != Py_None;
        if (result == 0) {
            result = PyList_Append(s->loose, leaf);
        }
    }
    return result;
}

/* The first of the reached calls whose graph was whole, after number `at`; -1. */
static Py_ssize_t
next_whole(PyObject *reached, Py_ssize_t at)
{
    for (at++; at < PyList_GET_SIZE(reached); at++) {
        if (deferred_CAST(PyList_GET_ITEM(reached, at))->kind ==
            OOMKIT_RETURNED_WHOLE) {
            return at;
        }
    }
    return -1;
}

/* --- giving up --- */

/* Raises oomkit.OutOfMemory. Steals `exception`, the failure; -1 always. */
static int
failed_give_up(oomkit_callers *s, oomkit_deferred *p, PyObject *exception,
               const char *why)
{
    oomkit_call *call = oomkit_callers_call(s, p->parts);
    OWNED PyObject *message = NULL;
    PyObject *reason = NULL; /* owned, given away */
    int result;

    call = call == NULL ? s->calls[0] : call;
    oomkit_exception_discard(s->st, exception);
    if (oomkit_backward_drain(s->st) < 0) {
        return -1;
    }
    call->tries.ooms++;
    p->step->seen_oom = 1;
    if (strcmp(why, OOMKIT_TOO_DEEP) != 0) { /* smaller ones are as deep */
        oomkit_signature_failed(call, oomkit_batch_rows(&p->batch));
    }
    result = failed_roll_back(s, &message);
    if (result == 0) {
        reason = PyUnicode_FromFormat(
            "the backward() of %U's loss ran out of memory and is not retried: %s; the "
            "gradients are as before it" SEE("backward-not-retried"),
            call->options->label, why);
    } else if (result == 1) {
        reason =
            PyUnicode_FromFormat("the backward() of %U's loss ran out of memory and is "
                                 "not retried: %s; %U" SEE("backward-not-retried"),
                                 call->options->label, why, message);
    }
    return oomkit_give_up_for(call, reason);
}

/* --- running again --- */

/* The only call that was reached: its marks serve the replay. Steals `exception`. */
static int
failed_replay_one(oomkit_callers *s, oomkit_deferred *p, PyObject *exception)
{
    oomkit_call *call = oomkit_callers_call(s, p->parts);
    const char *why = NULL;
    int result;

    /* Calls of the same list are of one site, but be sure. */
    Py_SETREF(call->step, (struct oomkit_step *)Py_NewRef((PyObject *)p->step));
    call->options = &p->step->options;
    call->given.func = p->step->func;
    call->log.number = p->number;
    call->shape.known = 0;
    result = oomkit_replay_prepare(call, p, &why);
    if (result == 1) {
        /* Streams and buffers belong to what ran since the call. */
        oomkit_rng_release(&call->entry);
        oomkit_buffers_release(&call->entry);
        oomkit_plain_release(&call->entry);
        return failed_give_up(s, p, exception, why);
    }
    if (result == 0) {
        result = oomkit_graph_free(s->st, s->roots);
    }
    if (result < 0) {
        Py_DECREF(exception);
        return -1;
    }
    call->backward.failed = call->backward.queued = 1;
    oomkit_unknown_note_loose(call, s->loose);
    return oomkit_replay_run(call, p, s->inputs, exception);
}

int
oomkit_callers_again(oomkit_callers *s, oomkit_deferred *p, PyObject *exception)
{
    OWNED_MEMORY oomkit_call *call = PyMem_Malloc(sizeof(oomkit_own_call));
    const char *why = NULL;
    int result;

    if (call == NULL) {
        Py_XDECREF(exception);
        PyErr_NoMemory();
        return -1;
    }
    result = oomkit_callers_mark(s, p, call);
    oomkit_grads_end_attempt(call); /* its own backwards mark anew */
    call->training = 0;
    if (result == 0) {
        result = oomkit_replay_prepare(call, p, &why);
    }
    if (result == 1) {
        if (exception == NULL) {
            result = oomkit_give_up_for(
                call, PyUnicode_FromFormat(
                          "%U has to run again for its backward() and cannot: %s" SEE(
                              "backward-not-retried"),
                          call->options->label, why));
        } else {
            result = failed_give_up(s, p, exception, why);
            exception = NULL;
        }
    } else if (result == 0) {
        call->backward.queued = exception != NULL;
        result = oomkit_replay_run(call, p, s->inputs, exception);
        exception = NULL;
    }
    Py_XDECREF(exception);
    oomkit_replay_end(call, p, result == 0);
    return result;
}

/* Several calls were reached: everything back first, with copies of what was there, so
 * that a failure of the second replay takes the first one back as well. Steals
 * `exception`. */
static int
failed_replay_all(oomkit_callers *s, PyObject *reached, PyObject *exception)
{
    OWNED PyObject *message = NULL;
    Py_ssize_t at = -1;
    int i, result;

    result = oomkit_graph_free(s->st, s->roots);
    if (result == 0) {
        result = failed_roll_back(s, &message);
    }
    if (result == 1) {
        const char *why = PyUnicode_AsUTF8(message); /* borrowed from message */
        if (why == NULL) {
            Py_DECREF(exception);
            return -1;
        }
        return failed_give_up(s, deferred_CAST(PyList_GET_ITEM(reached, 0)), exception,
                              why);
    }
    for (i = 0; i < s->call_count && result == 0; i++) {
        if (!s->calls[i]->deferred.elsewhere) {
            oomkit_grads_end_attempt(s->calls[i]);
            oomkit_grads_force_copies(s->calls[i]);
            result = oomkit_grads_mark(s->calls[i]);
        }
    }
    for (at = 0; at < PyList_GET_SIZE(reached); at++) { /* all gradients are known */
        deferred_CAST(PyList_GET_ITEM(reached, at))->fired = 1;
    }
    at = -1;
    while (result == 0 && (at = next_whole(reached, at)) >= 0) {
        oomkit_deferred *p = deferred_CAST(PyList_GET_ITEM(reached, at));
        result = oomkit_callers_again(s, p, exception);
        exception = NULL;
        p->replayed = result == 0;
        if (result < 0) {
            oomkit_callers_take_back(s);
        }
    }
    Py_XDECREF(exception);
    return result;
}

/* Everything that was reached has its gradients already, and what reaches each loss is
 * known: what failed need not be run. Steals `exception`. */
static int
failed_before_eager(oomkit_callers *s, PyObject *reached, PyObject *exception)
{
    Py_ssize_t i;

    oomkit_exception_discard(s->st, exception);
    for (i = 0; i < PyList_GET_SIZE(reached); i++) {
        deferred_CAST(PyList_GET_ITEM(reached, i))->fired = 1;
    }
    return oomkit_backward_drain(s->st);
}

/* --- */

/* Has somebody who takes part a hook that may have updated parameters in this backward?
 * 1, 0 or -1. */
static int
failed_post_hooks(const oomkit_callers *s)
{
    int i, found = 0;

    for (i = 0; i < s->call_count && found == 0; i++) {
        OWNED PyObject *name = NULL;
        found =
            s->calls[i]->deferred.elsewhere ? 0 : oomkit_hooks_post(s->calls[i], &name);
    }
    return found;
}

static int
failed_reached(oomkit_callers *s, PyObject *exception, PyObject *reached, int paths)
{
    int beneath = oomkit_graph_beneath(s->st, s->roots, reached);
    int strangers = beneath < 0 ? -1 : failed_strangers(s);
    int deep = strangers < 0 && oomkit_graph_too_deep(s->st);
    const char *why =
        deep ? OOMKIT_TOO_DEEP : failed_refusal(s, reached, paths, beneath);
    Py_ssize_t first = next_whole(reached, -1);
    int hooks = strangers < 0 && !deep ? -1 : failed_post_hooks(s), result;
    oomkit_deferred *p;

    if (hooks < 0) {
        Py_DECREF(exception);
        return -1;
    }
    if (hooks) {
        why = "a parameter has a post-accumulate-grad hook, which may have run on a "
              "part of the gradients already (the update may be half done): move what "
              "the hook does behind backward(), in the program";
    }
    if (strangers && !deep) {
        why =
            "a tensor that requires grad and that auto_batch did not find in the "
            "arguments, self, closure or globals of the step has a gradient, which may "
            "contain a part of this batch already: pass model=..., optimizer=... or "
            "participants=... to auto_batch, and clear its .grad before you continue";
    }
    if (why == NULL && first < 0) {
        return failed_before_eager(s, reached, exception);
    }
    if (why != NULL) {
        return failed_give_up(s, deferred_CAST(PyList_GET_ITEM(reached, 0)), exception,
                              why);
    }
    if (PyList_GET_SIZE(reached) > 1) {
        return failed_replay_all(s, reached, exception);
    }
    p = deferred_CAST(PyList_GET_ITEM(reached, first));
    p->fired = 1;
    result = failed_replay_one(s, p, exception);
    p->replayed = result == 0;
    return result;
}

/* Losses that the engine had not come to. If that fails (a hook of the caller raises),
 * the gradients go back and its exception is raised. 0 or -1. */
static int
failed_resume(oomkit_callers *s, PyObject *reached, PyObject *nodes, int paths)
{
    if (s->node_hooks == NULL || paths || s->foreign ||
        oomkit_between_resume(s, reached, nodes) == 0) {
        return 0;
    }
    oomkit_callers_take_back(s);
    return -1;
}

int
oomkit_callers_failed(oomkit_callers *s, int may_retry)
{
    PyObject *exception = oomkit_exception_take(); /* owned, then stolen */
    oomkit_class class_ = oomkit_exception_classify(s->st, exception);
    OWNED PyObject *nodes = NULL, *reached = NULL;
    int paths = 0;

    if (class_ != OOMKIT_CLASS_CERTAIN && class_ != OOMKIT_CLASS_MASKED) {
        oomkit_exception_give(exception);
        return -1;
    }
    if (!s->engine_seen && may_retry) {
        /* torch.autograd.backward failed to make the gradient of its root, a few bytes:
         * nothing has run. */
        oomkit_exception_discard(s->st, exception);
        s->exempt = 1;
        oomkit_exempt_enter(s->st);
        return 1;
    }
    s->ours = !s->engine_seen; /* nor could it be made outside the budget */
    reached = PyList_New(0);
    nodes = PyList_New(0);
    if (reached == NULL || nodes == NULL || s->roots == NULL ||
        oomkit_graph_reach(s->st, s->roots, reached, nodes, &paths) < 0) {
        Py_CLEAR(reached);
        Py_CLEAR(nodes);
        oomkit_callers_unseen(s, exception);
        return -1;
    }
    if (PyList_GET_SIZE(reached) == 0) {
        oomkit_exception_give(exception); /* somebody else's graph */
        return -1;
    }
    if (failed_resume(s, reached, nodes, paths) < 0) {
        Py_DECREF(exception);
        return -1;
    }
    s->ours = 1;
    return failed_reached(s, exception, reached, paths);
}
