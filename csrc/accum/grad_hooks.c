/* Hooks on gradients, which run once per micro-batch while a call is split.
 *
 * A hook that is linear in the gradient gives the same sum; what a hook does cannot be
 * seen, so that it is said once per site, or refused with hooks="error". A
 * post-accumulate-grad hook (an optimizer in the backward) acts on a part of the
 * gradient, and cannot be taken back: such a step is neither split nor retried. */
#include "accum.h"
#include "../call/step.h"
#include "../undo/gradients.h"
#include "../undo/undo.h"

int
oomkit_hooks_of(PyObject *object, PyObject *name)
{
    OWNED PyObject *hooks = PyObject_GetAttr(object, name);
    Py_ssize_t count;

    if (hooks == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear(); /* this release of torch has no such hooks */
        return 0;
    }
    count = hooks == Py_None ? 0 : PyObject_Size(hooks);
    return count < 0 ? -1 : count > 0;
}

/* A participant with a post-accumulate-grad hook: 1 and its name (owned), 0, -1. */
int
oomkit_hooks_post(oomkit_call *call, PyObject **name)
{
    Py_ssize_t i;
    for (i = 0; i < call->parts->param_count; i++) {
        int state = oomkit_hooks_of(call->parts->params[i],
                                    call->st->str_post_accumulate_hooks);
        if (state != 0) {
            *name =
                state < 0 ? NULL : oomkit_describe_tensor(call, call->parts->params[i]);
            return *name == NULL ? -1 : 1;
        }
    }
    return 0;
}

/* A participant with a hook on its gradient, or a module with a backward hook: 1 and
 * its name (owned), 0, -1. */
static int
hooks_on_gradients(oomkit_call *call, PyObject **name)
{
    oomkit_state *st = call->st;
    PyObject *roots = call->parts->roots; /* borrowed */
    Py_ssize_t i;
    int state;

    for (i = 0; i < call->parts->param_count; i++) {
        state = oomkit_hooks_of(call->parts->params[i], st->str_backward_hooks);
        if (state != 0) {
            *name =
                state < 0 ? NULL : oomkit_describe_tensor(call, call->parts->params[i]);
            return *name == NULL ? -1 : 1;
        }
    }
    for (i = 0; roots != NULL && i < PyList_GET_SIZE(roots); i++) {
        OWNED PyObject *root = oomkit_reference_get(PyList_GET_ITEM(roots, i));
        if (root == NULL) {
            continue;
        }
        state = oomkit_hooks_of(root, st->str_backward_hooks);
        if (state == 0) {
            state = oomkit_hooks_of(root, st->str_backward_pre_hooks);
        }
        if (state != 0) {
            *name = state < 0 ? NULL : PyUnicode_FromString(Py_TYPE(root)->tp_name);
            return *name == NULL ? -1 : 1;
        }
    }
    return 0;
}

static int
hooks_judge(oomkit_call *call, int *committed)
{
    Py_ssize_t which;
    int state;

    if (!call->training || call->refused.hooked != NULL) {
        return 0;
    }
    state = oomkit_hooks_post(call, &call->refused.hooked);
    if (state <= 0) {
        return state;
    }
    call->refused.why = "has a post-accumulate-grad hook, which may have run on the "
                        "gradient of a part of the batch already; move what the hook "
                        "does into the step, after backward()" SEE("gradient-hooks");
    if (!*committed && call->backward.failed) {
        state = oomkit_params_moved(call, &which);
        *committed = state > 0;
        return state < 0 ? -1 : 0;
    }
    return 0;
}

/* A hook that runs once per micro-batch: said once, or refused. `name` (may be NULL,
 * with an exception) has it. 0, or -1 with SplitError (or the warning, made an error).
 */
static int
hooks_are_looked_for(const oomkit_call *call)
{
    return call->options->hooks_error ||
           !oomkit_has_said(call->step, OOMKIT_SAID_HOOKS);
}

static int
hooks_say(oomkit_call *call, PyObject *name)
{
    if (name == NULL) {
        return -1;
    }
    if (call->options->hooks_error) {
        return oomkit_refuse_step(
            call,
            "%U has a gradient hook (hooks=\"error\"). Move what the hook does into "
            "the step, after backward(), or pass hooks=\"warn\" if the hook is linear "
            "in the gradient" SEE("gradient-hooks"),
            name);
    }
    (void)oomkit_say_once(call->step, OOMKIT_SAID_HOOKS);
    return oomkit_warn(
        call->st->OomkitWarning, 1,
        "oomkit: the batch is split, so the gradient hook of %U runs once per "
        "micro-batch. The result is exact only if the hook is linear in the gradient "
        "(scaling or masking, not clipping or noise). Pass hooks=\"error\" to "
        "auto_batch to refuse such a split" SEE("gradient-hooks"),
        name);
}

/* Before the first backward of a split attempt. 0, or -1 with SplitError (or the
 * warning, made an error). */
static int
hooks_check(oomkit_call *call)
{
    OWNED PyObject *name = NULL;
    int state = oomkit_hooks_post(call, &name);

    if (state > 0) {
        return oomkit_refuse_split(
            call,
            "%U has a post-accumulate-grad hook, which would run on the gradient of "
            "each micro-batch instead of the whole batch. Move what the hook does into "
            "the step, after backward()" SEE("gradient-hooks"),
            name);
    }
    if (state == 0 && hooks_are_looked_for(call)) {
        state = hooks_on_gradients(call, &name);
    }
    return state <= 0 ? state : hooks_say(call, name);
}

int
oomkit_hooks_loss(oomkit_call *call, PyObject *loss)
{
    OWNED PyObject *name = NULL;
    int state = hooks_are_looked_for(call)
                    ? oomkit_hooks_of(loss, call->st->str_backward_hooks)
                    : 0;

    if (state <= 0) {
        return state;
    }
    name = PyUnicode_FromString("the returned loss");
    return hooks_say(call, name);
}

static int
hooks_before_backward(oomkit_call *call, oomkit_backward *backward)
{
    (void)backward;
    return call->cut->at == 0 && !oomkit_grads_marked(call) ? hooks_check(call) : 0;
}

/* The caller's backward of a returned loss is made of these. */
static int
hooks_before_replay(oomkit_call *call)
{
    return call->split && oomkit_call_is_replay(call) ? hooks_check(call) : 0;
}

const oomkit_rule oomkit_grad_hooks_rule = {.attempt_begins = hooks_before_replay,
                                            .backward_begins = hooks_before_backward,
                                            .failure_is_judged = hooks_judge};
