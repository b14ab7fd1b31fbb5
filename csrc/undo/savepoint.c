/* The transaction of a call: marks at entry, everything back after a failure. */
#include "parameters.h"
#include "undo.h"
#include "../accum/accum.h"
#include "../optim/optim.h"
#include "../optim/optimizer_extras.h"
#include "../plain/plain.h"
#include "../plain/plain_state.h"
#include "../py/tensor.h"

static _Thread_local oomkit_call *current_call;

oomkit_call *
oomkit_call_current(void)
{
    return current_call;
}

void
oomkit_call_set_current(oomkit_call *call)
{
    current_call = call;
}

/* The version of every parameter, and whether it requires grad; either may be NULL. 0
 * or -1. */
static int
params_read(oomkit_state *st, const oomkit_participants *parts, uint32_t *versions,
            uint8_t *requires_grad)
{
    Py_ssize_t i;

    if (st->bridge != NULL) {
        if (st->bridge->versions((const void *const *)parts->params, st->impl_offset,
                                 (size_t)parts->param_count, versions,
                                 requires_grad) == OOMKIT_OK) {
            return 0;
        }
        PyErr_SetString(PyExc_RuntimeError, "oomkit could not read the parameters");
        return -1;
    }
    for (i = 0; i < parts->param_count; i++) {
        oomkit_tensor_facts facts;
        if (oomkit_tensor_facts_get(st, parts->params[i], 0, &facts) < 0) {
            return -1;
        }
        if (versions != NULL) {
            versions[i] = facts.version;
        }
        if (requires_grad != NULL) {
            requires_grad[i] = facts.requires_grad != 0;
        }
    }
    return 0;
}

/* A parameter that moved since the attempt began: 1 and its index; 0; -1. */
int
oomkit_tx_params_moved(oomkit_call *call, Py_ssize_t *which)
{
    Py_ssize_t i, n = call->parts->param_count;
    uint32_t *now;
    int result;

    if (call->entry.versions == NULL || n == 0) {
        return 0;
    }
    now = PyMem_Malloc((size_t)n * sizeof(*now));
    if (now == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    result = params_read(call->st, call->parts, now, NULL);
    for (i = 0; result == 0 && i < n; i++) {
        if (now[i] != call->entry.versions[i] && !oomkit_buffers_have(call, i)) {
            *which = i;
            result = 1;
        }
    }
    PyMem_Free(now);
    return result;
}

/* While split: what 64 values of each parameter are, for writes that bump no version.
 */
int
oomkit_tx_sample(oomkit_call *call)
{
    Py_ssize_t i, n = call->parts->param_count;

    if (call->st->bridge == NULL || n == 0) {
        return 0;
    }
    if (call->entry.samples == NULL) {
        call->entry.samples = PyMem_Malloc((size_t)n * sizeof(uint64_t));
        if (call->entry.samples == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    for (i = 0; i < n; i++) {
        call->entry.samples[i] =
            call->st->bridge->sample(call->parts->params[i], call->st->impl_offset);
    }
    return 0;
}

/* A parameter whose values changed since then: 1 and its index, or 0. */
int
oomkit_tx_params_rewritten(const oomkit_call *call, Py_ssize_t *which)
{
    Py_ssize_t i;
    for (i = 0; call->entry.samples != NULL && i < call->parts->param_count; i++) {
        if (call->st->bridge->sample(call->parts->params[i], call->st->impl_offset) !=
                call->entry.samples[i] &&
            !oomkit_buffers_have(call, i)) {
            *which = i;
            return 1;
        }
    }
    return 0;
}

/* What the parameters' versions are now. 0 or -1. */
int
oomkit_tx_params_mark(oomkit_call *call)
{
    Py_ssize_t n = call->parts->param_count;

    if (n == 0) {
        return 0;
    }
    if (call->entry.versions == NULL) {
        call->entry.versions = PyMem_Malloc((size_t)n * (sizeof(uint32_t) + 2));
        if (call->entry.versions == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    return params_read(call->st, call->parts, call->entry.versions,
                       oomkit_tx_params_flags(call, 0));
}

uint8_t *
oomkit_tx_params_flags(const oomkit_call *call, int at_end)
{
    Py_ssize_t n = call->parts->param_count;
    return (uint8_t *)(call->entry.versions + n) + (at_end ? n : 0);
}

int
oomkit_tx_params_flags_now(oomkit_state *st, const oomkit_participants *parts,
                           uint8_t *flags)
{
    return params_read(st, parts, NULL, flags);
}

/* At entry of an attempt. 0 or -1. */
int
oomkit_tx_begin(oomkit_call *call)
{
    if (oomkit_tx_params_mark(call) < 0 || oomkit_pristine_begin(call) < 0 ||
        oomkit_modes_entry(call) < 0) {
        return -1;
    }
    return oomkit_rng_mark(call) < 0 || oomkit_buffers_mark(call) < 0 ||
                   oomkit_owners_mark(call) < 0 || oomkit_plain_begin(call) < 0
               ? -1
               : 0;
}

/* At the start of a later part of an evaluation: do the marks of the entry still say
 * how everything is? Else the parts before it cannot be kept, for a failure goes back
 * to the entry. What the user's own objects are is not known. 0 or -1. */
int
oomkit_tx_begin_micro(oomkit_call *call)
{
    Py_ssize_t i;
    int moved = oomkit_buffers_moved(call);

    if (moved == 0) { /* no version tells of its statistics */
        moved = oomkit_buffers_norm(call, 1);
    }
    if (moved == 0 && call->entry.rng.cpu_state != NULL) {
        moved = oomkit_rng_moved(call);
    }
    for (i = 0; moved == 0 && i < call->parts->owner_count; i++) {
        moved = call->parts->owners[i].kind == OOMKIT_OWNER_USER;
    }
    call->parts_moved |= moved != 0;
    return moved < 0 || oomkit_plain_begin_part(call) < 0 ? -1 : 0;
}

/* Is the point of no return behind us? 1, 0 or -1. Keeps an exception in flight: torch
 * is asked by attribute where there is no bridge, and that fails while one is set. */
int
oomkit_tx_committed(oomkit_call *call)
{
    PyObject *exception; /* owned, given back */
    int result;

    if (call->updating.committed) {
        return 1;
    }
    exception = PyErr_Occurred() ? oomkit_exception_take() : NULL;
    result = oomkit_optimizers_any_moved(call);
    if (exception != NULL) {
        if (result < 0) {
            PyErr_WriteUnraisable(
                call->given.func); /* the step's own error says more */
        }
        oomkit_exception_give(exception);
    }
    return result;
}

/* optimizer_safety="copy": what optimizers have moved is back. 0 or -1. */
static int
tx_uncommit(oomkit_call *call)
{
    int i;

    for (i = 0; i < call->updating.count; i++) {
        if (oomkit_optimizer_restore_copy(call, i) < 0) {
            return -1;
        }
    }
    call->updating.committed = 0;
    return 0;
}

static int
tx_refuse(PyObject **message, PyObject *what, const char *text)
{
    if (what == NULL) {
        return -1;
    }
    *message = PyUnicode_FromFormat(text, what);
    Py_DECREF(what);
    return *message == NULL ? -1 : 1;
}

static int
tx_restore_gradients(oomkit_call *call, PyObject **message)
{
    const char *why = NULL;
    PyObject *which = NULL; /* owned */
    int result = oomkit_strangers_loose_drop(call) < 0
                     ? -1
                     : oomkit_grads_restore(call, &why, &which);

    if (result == 1) {
        PyObject *name = oomkit_describe_tensor(call, which); /* owned */
        Py_DECREF(which);
        if (name == NULL) {
            return -1;
        }
        *message = PyUnicode_FromFormat(
            "gradients cannot be rolled back: %U: %s; pass gradient_safety=\"copy\" to "
            "auto_batch, and call zero_grad() before going on",
            name, why);
        Py_DECREF(name);
        return *message == NULL ? -1 : 1;
    }
    return result;
}

static int
tx_restore_buffers(oomkit_call *call, PyObject **message)
{
    PyObject *which = NULL; /* owned */
    int result = oomkit_buffers_restore(call, &which);

    return result <= 0 ? result
                       : tx_refuse(message, which,
                                   "buffer %U moved for the first time in this call "
                                   "and no copy of it was taken; run the step once "
                                   "on a small batch first");
}

/* 0 everything is as at entry; 1 it cannot be, *message (owned) says why, and all else
 * is; -1 error. */
int
oomkit_tx_restore(oomkit_call *call, PyObject **message)
{
    PyObject *ignored = NULL; /* owned */
    Py_ssize_t param = 0, stay;
    int result, refused, i;

    if (oomkit_tx_committed(call) == 1 && call->options->optimizer_copy &&
        tx_uncommit(call) < 0) {
        return -1;
    }
    /* the flags first: they stand beside the versions, which restoring may change */
    if (oomkit_slots_restore(call) < 0 || oomkit_switches_restore(call) < 0) {
        return -1;
    }
    stay = oomkit_pristine_restore(call, &param);
    if (stay < 0) {
        return -1;
    }
    refused = 0;
    if (stay > 0) { /* said at the end: everything else goes back all the same */
        refused = oomkit_pristine_refuse(call, message, param, stay);
    } else if (oomkit_beside_any_unknown(call) != NULL) {
        refused = oomkit_beside_refuse(call, message);
    }
    if (refused < 0) {
        return -1;
    }
    result = tx_restore_gradients(call, refused ? &ignored : message);
    Py_CLEAR(ignored);
    if (result < 0) {
        return -1;
    }
    refused |= result;
    result = tx_restore_buffers(call, refused ? &ignored : message);
    Py_CLEAR(ignored);
    if (result < 0) {
        return -1;
    }
    refused |= result;
    for (i = 0; i < call->updating.count; i++) {
        if (oomkit_optimizer_undo(call, i) < 0) {
            return -1;
        }
    }
    return oomkit_plain_restore(call) < 0 || oomkit_owners_restore(call) < 0 ||
                   oomkit_rng_restore(call) < 0
               ? -1
               : refused;
}

/* A learning rate that changes in every micro-batch: asked at each step() after the
 * first micro-batch's, held back or not. 0, or -1 with SplitError. */
int
oomkit_tx_groups_moved(oomkit_call *call, PyObject *optimizer)
{
    PyObject *name = NULL; /* borrowed */
    int changed = oomkit_owners_groups_changed(call, optimizer, &name);

    if (changed <= 0) {
        return changed;
    }
    call->refused.raised = 1;
    oomkit_raise(
        call->st->SplitError,
        "auto_batch cannot split this step: %R in the param_groups of %s was "
        "changed in micro-batch %lld of %lld; do it after the step, or guard the "
        "line with `if oomkit.current().is_last:`",
        name, Py_TYPE(optimizer)->tp_name, (long long)(call->cut->at + 1),
        (long long)call->cut->count);
    return -1;
}

/* A parameter that was replaced in its module. 0, or -1 with SplitError. */
static int
tx_slots_changed(oomkit_call *call)
{
    PyObject *key = NULL; /* borrowed */
    int changed = oomkit_slots_changed(call, &key);

    if (changed > 0) {
        call->refused.raised = 1;
        oomkit_raise(call->st->SplitError,
                     "auto_batch cannot split this step: the parameter %R of a module "
                     "was replaced in micro-batch %lld of %lld; do it outside the "
                     "decorated step",
                     key, (long long)(call->cut->at + 1), (long long)call->cut->count);
        return -1;
    }
    return changed;
}

static int
tx_schedulers_moved(oomkit_call *call)
{
    PyObject *scheduler = NULL; /* borrowed */
    int moved = oomkit_owners_epochs_moved(call, &scheduler);

    if (moved > 0) {
        call->refused.raised = 1;
        oomkit_raise(
            call->st->SplitError,
            "auto_batch cannot split this step: %s.step() was called in "
            "micro-batch %lld of %lld where it could not be held back; call it "
            "as scheduler.step(), or after the decorated step",
            Py_TYPE(scheduler)->tp_name, (long long)(call->cut->at + 1),
            (long long)call->cut->count);
        return -1;
    }
    return moved;
}

/* At the end of a micro-batch that is not the last: nothing that is meant to move once
 * per batch may have moved. 0, or -1 with SplitError that names it. */
int
oomkit_tx_micro_end(oomkit_call *call)
{
    Py_ssize_t which = 0;
    PyObject *name; /* owned */
    int state = oomkit_tx_params_moved(call, &which);

    if (state == 0) {
        state = oomkit_tx_params_rewritten(call, &which);
    }
    if (state == 0 && (tx_slots_changed(call) < 0 || tx_schedulers_moved(call) < 0)) {
        return -1;
    }
    if (state == 0) {
        return oomkit_grads_refuse_unexpected(call);
    }
    if (state < 0) {
        return state;
    }
    name = oomkit_describe_tensor(call, call->parts->params[which]);
    if (name != NULL) {
        call->refused.raised = 1;
        oomkit_raise(call->st->SplitError,
                     "auto_batch cannot split this step: %U was changed in micro-batch "
                     "%lld of %lld, outside an optimizer that it knows; pass it as "
                     "optimizer=..., or guard the line with `if "
                     "oomkit.current().is_last:`",
                     name, (long long)(call->cut->at + 1), (long long)call->cut->count);
        Py_DECREF(name);
    }
    return -1;
}

/* Forgets what belongs to one attempt; what outlives it (copies) stays. */
void
oomkit_tx_end_attempt(oomkit_call *call)
{
    oomkit_grads_end_attempt(call);
    oomkit_buffers_release(call);
    oomkit_rng_release(call);
    oomkit_optimizers_release(call);
    oomkit_effects_abandon(call);
    oomkit_plain_end_attempt(call);
    oomkit_pristine_release(call);
    Py_CLEAR(call->unknown.of_graph);
    Py_CLEAR(call->unknown.of_step);
    Py_CLEAR(call->entry.owners.groups_after);
    Py_CLEAR(call->entry.owners.groups_end);
    Py_CLEAR(call->entry.owners.scales);
    call->cut->scheduled.count = 0;
    Py_CLEAR(call->entry.owners.epochs);
    Py_CLEAR(call->entry.owners.scalers);
    Py_CLEAR(call->entry.owners.copied);
    Py_CLEAR(call->entry.owners.user);
    call->entry.owners.failed_step = NULL;
    Py_CLEAR(call->entry.owners.attributes);
    oomkit_course_clear(&call->cut->course[0]);
    oomkit_course_clear(&call->cut->course[1]);
    call->training = call->backward.done = call->backward.failed =
        call->backward.queued = 0;
    call->updating.committed = call->refused.raised = call->course_waived = 0;
    call->deferred.returned = OOMKIT_RETURNED_NOTHING;
    call->grads.stashing = call->grads.apart = 0;
    call->deferred.rowwise = 0;
    call->updating.made = call->unknown.updates = call->updating.params_stuck = 0;
    call->parts_moved = 0;
    call->hooked.depth = call->hooked.closure = 0;
    call->unknown.steps = call->updating.step_failed = 0;
}

/* Ends the call: nothing of it stays behind. Keeps the exception in flight. */
void
oomkit_tx_end(oomkit_call *call)
{
    oomkit_plain_keep(call, 0);
    oomkit_tx_end_attempt(call);
    oomkit_grads_release(call);
    oomkit_owners_release(call);
    Py_CLEAR(call->unknown.leaves);
    Py_CLEAR(call->entry.flags);
    PyMem_Free(call->entry.versions);
    PyMem_Free(call->entry.samples);
    PyMem_Free(call->cut->scheduled.items);
    oomkit_slots_release(call);
    Py_CLEAR(call->refused.hooked);
    call->cut->scheduled.items = NULL;
    call->entry.versions = NULL;
    call->entry.samples = NULL;
}
