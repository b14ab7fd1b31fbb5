/* What a step changes besides gradients, parameters and buffers: everything of it runs
 * once per micro-batch. Looked at by Python code of the package (`watch_effects`), once
 * per site: around the first micro-batch of its first split call. */
#include "accum.h"
#include "../call/step.h"
#include "../plain/alike.h"
#include "../undo/parameters.h"
#include "../undo/undo.h"

/* Has no module a buffer? Then there is no need to look at each of them from Python.
 * Not what the search has found: a buffer may be put where no hook of torch's tells of
 * it. 1, 0 or -1. */
static int
effects_no_buffers(const oomkit_call *call)
{
    PyObject *roots = call->parts->roots; /* borrowed */
    Py_ssize_t i, n = roots == NULL ? 0 : PyList_GET_SIZE(roots);
    int none = 1;

    for (i = 0; i < n && none > 0; i++) {
        OWNED PyObject *root = oomkit_reference_get(PyList_GET_ITEM(roots, i));
        OWNED PyObject *own = NULL;
        PyObject *buffers; /* borrowed from own */
        if (root == NULL) {
            continue;
        }
        own = PyObject_GenericGetDict(root, NULL);
        buffers =
            own == NULL ? NULL : PyDict_GetItemWithError(own, call->st->str_buffers);
        none = PyErr_Occurred() ? -1
               : buffers != NULL && PyDict_CheckExact(buffers)
                   ? PyDict_GET_SIZE(buffers) == 0
                   : 0;
    }
    return none;
}

/* The modules among the participants (weak references), whether one has a buffer, those
 * of their parameters that are plain tensors (an nn.Parameter is known by its type, and
 * there may be thousands), the user's own objects, and the rows. New reference (a
 * tuple) or NULL. */
static PyObject *
effects_participants(const oomkit_call *call)
{
    const oomkit_participants *parts = call->parts;
    OWNED PyObject *params = PyList_New(0), *users = PyList_New(0);
    OWNED PyObject *modules = oomkit_participants_modules(parts);
    Py_ssize_t i;
    int none;

    if (params == NULL || users == NULL || modules == NULL) {
        return NULL;
    }
    for (i = 0; i < parts->param_count; i++) {
        PyObject *param = parts->params[i]; /* borrowed */
        if (!PyObject_TypeCheck(param, (PyTypeObject *)call->st->Parameter) &&
            PyList_Append(params, param) < 0) {
            return NULL;
        }
    }
    for (i = 0; i < parts->owner_count; i++) {
        if (parts->owners[i].kind == OOMKIT_OWNER_USER &&
            PyList_Append(users, parts->owners[i].ref) < 0) {
            return NULL;
        }
    }
    none = parts->roots == NULL ? 1 : effects_no_buffers(call);
    return none < 0 ? NULL
                    : Py_BuildValue("(OOOOL)", modules,
                                    none && !parts->some_late ? Py_False : Py_True,
                                    params, users, (long long)call->batch.rows);
}

typedef struct abandoning {
    oomkit_state *st;
    PyObject *effects; /* borrowed from effects_abandon */
} abandoning;

/* Needs no memory: what left the micro-batch may be that there is none. */
static int
effects_abandon_once(void *argument)
{
    const abandoning *it = argument;
    OWNED PyObject *done = PyObject_CallMethodNoArgs(it->effects, it->st->str_abandon);
    return done == NULL ? -1 : 0;
}

/* The micro-batch did not end: what was put into modules is taken out. Keeps the
 * exception in flight. */
static void
effects_abandon(oomkit_call *call)
{
    PyObject *effects = call->cut->effects; /* owned */
    PyObject *exception = NULL, *error;     /* owned; the first given back */
    abandoning it = {call->st, effects};

    if (effects == NULL) {
        return;
    }
    call->cut->effects = NULL;
    if (PyErr_Occurred()) {
        exception = oomkit_exception_take();
    }
    (void)oomkit_insist(call->st, effects_abandon_once, &it, &error);
    if (error != NULL) {
        oomkit_exception_give(error);
        oomkit_error_unraised(effects);
    }
    Py_DECREF(effects);
    if (exception != NULL) {
        oomkit_exception_give(exception);
    }
}

/* Before the first micro-batch of an attempt. 0 or -1. */
static int
effects_begin(oomkit_call *call)
{
    OWNED PyObject *positional = NULL, *named = NULL, *parts = NULL;

    if (oomkit_has_said(call->step, OOMKIT_SAID_EFFECTS) ||
        call->st->watch_effects == NULL) {
        return 0;
    }
    if (oomkit_effects_arguments(call, &positional, &named) == 0) {
        parts = effects_participants(call);
    }
    if (parts != NULL) {
        effects_abandon(call);
        call->cut->effects = PyObject_CallFunctionObjArgs(
            call->st->watch_effects, call->given.func, positional, named, parts, NULL);
        if (call->cut->effects == Py_None) {
            Py_CLEAR(call->cut->effects);
        }
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* The answer (refusal, warning, beside): 0, or -1 with SplitError or a warning made an
 * error.
 */
static int
effects_say(oomkit_call *call, PyObject *answer)
{
    PyObject *refusal, *warning, *beside; /* borrowed from answer */
    oomkit_state *st = call->st;

    if (!PyTuple_Check(answer) || PyTuple_GET_SIZE(answer) != 3) {
        return 0;
    }
    refusal = PyTuple_GET_ITEM(answer, 0);
    warning = PyTuple_GET_ITEM(answer, 1);
    beside = PyTuple_GET_ITEM(answer, 2);
    if (refusal != Py_None) {
        return oomkit_refuse_split(
            call,
            "%U was changed in micro-batch %lld of %lld by the step itself, outside "
            "the forward of a module. Move the line into the module's forward (and "
            "call the module, not its forward), or guard it with `if "
            "oomkit.current().is_last:`" SEE("side-effects"),
            refusal, (long long)(call->cut->at + 1), (long long)call->cut->count);
    }
    if (beside != Py_None &&
        oomkit_warn(
            st->OomkitWarning, 1,
            "oomkit: the batch of %U is split, but the step also reads what is not an "
            "argument and has as many rows: %U. Every micro-batch gets all of its "
            "rows. Pass what has one row per sample as an argument. Warned once" SEE(
                "rows-outside-arguments"),
            call->options->label, beside) < 0) {
        return -1;
    }
    if (warning == Py_None) {
        return 0;
    }
    return oomkit_warn(st->OomkitWarning, 1,
                       "oomkit: the batch of %U is split, so this code runs once per "
                       "micro-batch: %U. Guard what must run once per batch with `if "
                       "oomkit.current().is_last:`. Warned once" SEE("side-effects"),
                       call->options->label, warning);
}

/* After the first micro-batch. 0 or -1. */
static int
effects_end(oomkit_call *call)
{
    PyObject *effects = call->cut->effects; /* owned */
    OWNED PyObject *answer = NULL, *settled = NULL;

    oomkit_param_copies_checked(call);
    if (effects == NULL) {
        return 0;
    }
    call->cut->effects = NULL;
    settled = oomkit_plain_settled(call);
    EXEMPT (call->st) {
        answer = settled == NULL
                     ? NULL
                     : PyObject_CallFunctionObjArgs(
                           effects, call->sequence_waived ? Py_True : Py_False, settled,
                           NULL);
    }
    if (answer == NULL) {
        call->cut->effects = effects; /* its hooks may be in the modules still */
        return -1;
    }
    Py_DECREF(effects);
    (void)oomkit_say_once(call->step, OOMKIT_SAID_EFFECTS);
    return effects_say(call, answer);
}

static int
effects_attempt_begins(oomkit_call *call)
{
    return call->split && call->proof == NULL ? effects_begin(call) : 0;
}

static int
effects_micro_ends(oomkit_call *call, PyObject *result)
{
    (void)result;
    return call->is_last || call->proof != NULL ? 0 : effects_end(call);
}

const oomkit_rule oomkit_side_effects_rule = {.attempt_begins = effects_attempt_begins,
                                              .micro_ends = effects_micro_ends,
                                              .attempt_ends = effects_abandon};
