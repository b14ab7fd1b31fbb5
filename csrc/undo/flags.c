/* What a step switches: train() and eval() of modules, requires_grad of parameters. A
 * step that fails, or ends, between one switch and the next must not leave it to the
 * next attempt or micro-batch: each of them begins as the call began, and what the last
 * one leaves stays.
 *
 * requires_grad is marked at entry, behind the versions. The training flag of a module
 * is noted when torch.nn.Module.train() (eval() calls it, too) is about to set it,
 * which oomkit._engine.patches reports: a step that switches nothing pays nothing.
 *
 * A step may switch once and note elsewhere that it has: then no other micro-batch
 * switches what the first one has. The whole batch is computed as that one is, so that
 * one which is computed otherwise is refused, and what the first alone has left stays
 * in the end. */
#include "undo.h"
#include "../py/errors.h"

/* torch is about to set `training` of this module. 0 or -1. */
int
oomkit_flags_note(oomkit_state *st, PyObject *module)
{
    oomkit_call *call = oomkit_call_noting(st);
    OWNED PyObject *address = NULL, *flag = NULL, *ref = NULL, *pair = NULL;
    PyObject *known; /* borrowed from the dict */

    if (st->wiring->outside->mode_changes(st, module) < 0) {
        return -1;
    }
    if (call == NULL) {
        return 0;
    }
    if (call->entry.flags.training == NULL &&
        (call->entry.flags.training = PyDict_New()) == NULL) {
        return -1;
    }
    address = PyLong_FromVoidPtr(module);
    known =
        address ? PyDict_GetItemWithError(call->entry.flags.training, address) : NULL;
    if (known != NULL) {
        OWNED PyObject *there = oomkit_reference_get(PyTuple_GET_ITEM(known, 0));
        if (there != NULL) { /* else that one is gone, and this one lies where it lay */
            return 0;
        }
    }
    flag = PyErr_Occurred() ? NULL : PyObject_GetAttr(module, st->str_training);
    ref = flag ? PyWeakref_NewRef(module, NULL) : NULL;
    pair = ref ? PyTuple_Pack(2, ref, flag) : NULL;
    return pair ? PyDict_SetItem(call->entry.flags.training, address, pair) : -1;
}

/* The flag of each of these modules (a dict as above, borrowed) as it was. 0 or -1. */
static int
flags_training(oomkit_state *st, PyObject *switches)
{
    OWNED PyObject *pairs = PyDict_Values(switches);
    Py_ssize_t i;

    for (i = 0; pairs != NULL && i < PyList_GET_SIZE(pairs); i++) {
        PyObject *pair = PyList_GET_ITEM(pairs, i); /* borrowed */
        PyObject *then = PyTuple_GET_ITEM(pair, 1); /* borrowed */
        OWNED PyObject *module = oomkit_reference_get(PyTuple_GET_ITEM(pair, 0));
        OWNED PyObject *now = NULL;
        if (module == NULL) {
            continue;
        }
        now = PyObject_GetAttr(module, st->str_training);
        if (now == NULL ||
            (now != then && PyObject_SetAttr(module, st->str_training, then) < 0)) {
            return -1;
        }
    }
    return pairs == NULL ? -1 : 0;
}

/* Whether each parameter requires grad now. Owned by the caller; NULL with an
 * exception.
 */
static uint8_t *
requires_now(oomkit_state *st, const oomkit_participants *parts)
{
    uint8_t *flags = PyMem_Malloc((size_t)parts->param_count + 1);

    if (flags == NULL) {
        PyErr_NoMemory();
    } else if (oomkit_params_flags_now(st, parts, flags) < 0) {
        PyMem_Free(flags);
        flags = NULL;
    }
    return flags;
}

/* requires_grad of the first `n` parameters as in `flags`. 0 or -1. */
static int
flags_grads(oomkit_call *call, const uint8_t *flags, Py_ssize_t n)
{
    Py_ssize_t i;
    OWNED_MEMORY uint8_t *now = requires_now(call->st, call->parts);

    for (i = 0; now != NULL && i < n; i++) {
        if (now[i] != flags[i] &&
            PyObject_SetAttr(call->parts->params[i], call->st->str_requires_grad,
                             flags[i] ? Py_True : Py_False) < 0) {
            return -1;
        }
    }
    return now == NULL ? -1 : 0;
}

/* Everything as at entry. 0 or -1. */
int
oomkit_flags_restore(oomkit_call *call)
{
    if (call->entry.flags.training != NULL &&
        flags_training(call->st, call->entry.flags.training) < 0) {
        return -1;
    }
    if (call->entry.versions == NULL || call->parts->param_count == 0) {
        return 0;
    }
    return flags_grads(call, oomkit_params_flags(call, 0), call->parts->param_count);
}

/* --- around a replay, which begins as the call began --- */

/* It will not be run: everything stays as it stands. Keeps the exception in flight when
 * it has nothing to add. 0 or -1. */
int
oomkit_flags_keep(oomkit_call *call)
{
    Py_ssize_t n = call->parts->param_count;
    OWNED PyObject *exception = PyErr_Occurred() ? oomkit_exception_take() : NULL;
    OWNED_MEMORY uint8_t *now = requires_now(call->st, call->parts);

    oomkit_savepoint_notes_end(call);
    if (now == NULL) {
        return -1;
    }
    if (call->entry.versions != NULL) {
        memcpy(oomkit_params_flags(call, 0), now, (size_t)n);
    }
    if (exception != NULL) {
        oomkit_exception_give(STEAL(exception));
    }
    return 0;
}

PyObject *
oomkit_flags_take(oomkit_call *call)
{
    return STEAL(call->entry.flags.training);
}

void
oomkit_flags_put(oomkit_call *call, PyObject *training)
{
    Py_XSETREF(call->entry.flags.training, training);
}

/* At the end of a call whose loss is returned. 0 or -1. */
int
oomkit_flags_note_end(oomkit_call *call)
{
    if (call->entry.versions == NULL || call->parts->param_count == 0) {
        return 0;
    }
    return oomkit_params_flags_now(call->st, call->parts, oomkit_params_flags(call, 1));
}

int
oomkit_flags_frozen_since(oomkit_state *st, const oomkit_participants *parts,
                          const oomkit_savepoint *since)
{
    const uint32_t *param_versions = since->versions;
    size_t n = (size_t)parts->param_count;
    OWNED_MEMORY uint8_t *now = NULL;

    if (param_versions == NULL || n == 0) {
        return 0;
    }
    now = requires_now(st, parts);
    return now == NULL ? -1
                       : memcmp(now, (const uint8_t *)(param_versions + n) + n, n) != 0;
}

/* How everything stands now. 0 or -1. */
static int
flags_read(oomkit_call *call, oomkit_flags *now)
{
    PyObject *key, *pair; /* borrowed from the dict */
    Py_ssize_t at = 0;

    now->training = PyDict_New(); /* first: without it there is nothing to be cleared */
    now->requires_grad =
        now->training == NULL ? NULL : requires_now(call->st, call->parts);
    now->count = call->parts->param_count;
    if (now->requires_grad == NULL) {
        return -1;
    }
    while (call->entry.flags.training != NULL &&
           PyDict_Next(call->entry.flags.training, &at, &key, &pair)) {
        PyObject *ref = PyTuple_GET_ITEM(pair, 0); /* borrowed */
        OWNED PyObject *module = oomkit_reference_get(ref);
        OWNED PyObject *flag = NULL, *kept = NULL;
        if (module == NULL) {
            continue;
        }
        flag = PyObject_GetAttr(module, call->st->str_training);
        kept = flag ? PyTuple_Pack(2, ref, flag) : NULL;
        if (kept == NULL || PyDict_SetItem(now->training, key, kept) < 0) {
            return -1;
        }
    }
    return 0;
}

void
oomkit_flags_clear(oomkit_flags *flags)
{
    Py_CLEAR(flags->training);
    MEMORY_CLEAR(flags->requires_grad);
    flags->count = 0;
}

int
oomkit_flags_now(oomkit_call *call, const oomkit_after *Py_UNUSED(after),
                 oomkit_savepoint *now)
{
    return flags_read(call, &now->flags);
}

int
oomkit_flags_back(oomkit_call *call, const oomkit_savepoint *now,
                  int Py_UNUSED(finished))
{
    const oomkit_flags *flags = &now->flags;
    const Py_ssize_t n = call->parts->param_count;

    return flags_training(call->st, flags->training) < 0
               ? -1
               : flags_grads(call, flags->requires_grad,
                             flags->count < n ? flags->count : n);
}

int
oomkit_flags_visit(const oomkit_savepoint *savepoint, visitproc visit, void *arg)
{
    Py_VISIT(savepoint->flags.training);
    return 0;
}

/* --- what is switched once --- */

/* A module that the first micro-batch had switched (`pair`, of its dict), and that is
 * as at entry again: where `fills` it is switched as well. 1 and *which (owned), 0 or
 * -1.
 */
static int
switch_of_module(const oomkit_call *call, PyObject *address, PyObject *pair, int fills,
                 PyObject **which)
{
    PyObject *then = PyTuple_GET_ITEM(pair, 1); /* borrowed */
    OWNED PyObject *module = oomkit_reference_get(PyTuple_GET_ITEM(pair, 0));
    OWNED PyObject *now = NULL;
    OWNED PyObject *entry = /* reading `training` may run code that switches it */
        call->entry.flags.training == NULL
            ? NULL
            : Py_XNewRef(PyDict_GetItemWithError(call->entry.flags.training, address));

    if (module == NULL || entry == NULL || PyTuple_GET_ITEM(entry, 1) == then) {
        return PyErr_Occurred() ? -1 : 0;
    }
    now = PyObject_GetAttr(module, call->st->str_training);
    if (now == NULL || now != PyTuple_GET_ITEM(entry, 1)) {
        return now == NULL ? -1 : 0;
    }
    if (fills) {
        return PyObject_SetAttr(module, call->st->str_training, then);
    }
    *which = PyUnicode_FromFormat("train() or eval() of %s", Py_TYPE(module)->tp_name);
    return *which == NULL ? -1 : 1;
}

/* The same of parameters. */
static int
switch_of_params(oomkit_call *call, const oomkit_flags *first, int fills,
                 PyObject **which)
{
    OWNED_MEMORY uint8_t *now = requires_now(call->st, call->parts);
    const uint8_t *entry = oomkit_params_flags(call, 0);
    Py_ssize_t i;

    for (i = 0; now != NULL && i < call->parts->param_count && i < first->count; i++) {
        const uint8_t then = first->requires_grad[i];
        if (then == entry[i] || now[i] != entry[i]) {
            continue;
        }
        if (!fills) {
            *which = PyUnicode_FromString("requires_grad of a parameter");
            return *which == NULL ? -1 : 1;
        }
        if (PyObject_SetAttr(call->parts->params[i], call->st->str_requires_grad,
                             then ? Py_True : Py_False) < 0) {
            return -1;
        }
    }
    return now == NULL ? -1 : 0;
}

/* Of all: what the first micro-batch had switched, as `first` says, and this has not. 1
 * and *which (owned) unless `fills`, 0 or -1. */
static int
switches_lack(oomkit_call *call, const oomkit_flags *first, int fills, PyObject **which)
{
    OWNED PyObject *items = first->training ? PyDict_Items(first->training) : NULL;
    Py_ssize_t i;
    int found = 0;

    for (i = 0; items != NULL && found == 0 && i < PyList_GET_SIZE(items); i++) {
        PyObject *item = PyList_GET_ITEM(items, i); /* borrowed */
        found = switch_of_module(call, PyTuple_GET_ITEM(item, 0),
                                 PyTuple_GET_ITEM(item, 1), fills, which);
    }
    if (PyErr_Occurred() || found != 0 || call->entry.versions == NULL ||
        first->requires_grad == NULL) {
        return PyErr_Occurred() ? -1 : found;
    }
    return switch_of_params(call, first, fills, which);
}

/* What a micro-batch is computed with. 0 or -1. */
static int
switches_ask(oomkit_call *call)
{
    oomkit_switches *s = &call->cut->switches;
    OWNED PyObject *which = NULL;

    if (s->asked) {
        return 0;
    }
    s->asked = 1;
    if (call->cut->at == 0) {
        oomkit_flags_clear(&s->computed);
        return flags_read(call, &s->computed);
    }
    if (switches_lack(call, &s->computed, 0, &which) <= 0) {
        return PyErr_Occurred() ? -1 : 0;
    }
    return oomkit_refuse(
        call,
        "auto_batch cannot split %U: its first micro-batch has switched %U, and "
        "micro-batch %lld has not, because the step does so once and each "
        "micro-batch begins as the call began; do it before the call" SEE(
            "micro-batches-differ"),
        call->options->label, which, (long long)(call->cut->at + 1));
}

static void
switches_forget(oomkit_call *call)
{
    oomkit_flags_clear(&call->cut->switches.computed);
    oomkit_flags_clear(&call->cut->switches.left);
}

static int
switches_begin(oomkit_call *call)
{
    call->cut->switches.asked = 0;
    if (call->cut->at == 0) {
        switches_forget(call); /* of another run of the same attempt, as in a proof */
    }
    return 0;
}

static int
switches_backward(oomkit_call *call, oomkit_backward *backward)
{
    (void)backward;
    return switches_ask(call);
}

static int
switches_returned(oomkit_call *call, PyObject *result)
{
    (void)result;
    return switches_ask(call);
}

/* What the first micro-batch was computed with is no switch behind that: its own code
 * takes it back where it wants to. 0 or -1. */
static int
switches_behind(oomkit_call *call, oomkit_switches *s)
{
    PyObject *address, *pair; /* borrowed from the dict */
    const uint8_t *entry = call->entry.versions ? oomkit_params_flags(call, 0) : NULL;
    Py_ssize_t i, at = 0;

    while (s->computed.training != NULL && call->entry.flags.training != NULL &&
           PyDict_Next(s->computed.training, &at, &address, &pair)) {
        PyObject *was = /* borrowed, as what it is compared with */
            PyDict_GetItemWithError(call->entry.flags.training, address);
        if (was == NULL || PyTuple_GET_ITEM(was, 1) == PyTuple_GET_ITEM(pair, 1)) {
            continue;
        }
        if (PyDict_GetItemWithError(s->left.training, address) != NULL &&
            PyDict_DelItem(s->left.training, address) < 0) {
            return -1;
        }
    }
    for (i = 0; entry != NULL && i < s->computed.count && i < s->left.count; i++) {
        if (s->computed.requires_grad[i] != entry[i]) {
            s->left.requires_grad[i] = entry[i];
        }
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int
switches_end(oomkit_call *call, PyObject *result)
{
    oomkit_switches *s = &call->cut->switches;

    (void)result;
    if (call->cut->at == 0) {
        oomkit_flags_clear(&s->left);
        return flags_read(call, &s->left) < 0 ? -1 : switches_behind(call, s);
    }
    return call->cut->at == call->cut->count - 1
               ? switches_lack(call, &s->left, 1, NULL)
               : 0;
}

const oomkit_rule oomkit_switches_rule = {.micro_begins = switches_begin,
                                          .backward_begins = switches_backward,
                                          .micro_returns = switches_returned,
                                          .micro_ends = switches_end,
                                          .attempt_ends = switches_forget,
                                          .call_ends = switches_forget};
