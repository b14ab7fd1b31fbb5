/* Versions of parameters, and whether they require grad: what moved since the entry. */
#include "parameters.h"
#include "undo.h"
#include "../plain/plain.h"
#include "../py/tensor.h"

#define ALIGNED(bytes) (((bytes) + sizeof(void *) - 1) & ~(sizeof(void *) - 1))

/* The version of every parameter, whether it requires grad, and its gradient; each may
 * be NULL. 0 or -1. */
static int
params_read(oomkit_state *st, const oomkit_participants *parts, uint32_t *versions,
            uint8_t *requires_grad, const void **gradients)
{
    return st->bridge->versions((const void *const *)parts->params, st->impl_offset,
                                (size_t)parts->param_count, versions, requires_grad,
                                gradients) == OOMKIT_OK
               ? 0
               : oomkit_bridge_failed("read the parameters");
}

uint8_t *
oomkit_params_all_moved(oomkit_call *call)
{
    const Py_ssize_t n = call->parts->param_count;
    uint8_t *moved = PyMem_Calloc((size_t)n + 1, 1); /* returned */
    OWNED_MEMORY uint32_t *now = PyMem_Malloc((size_t)(n + 1) * sizeof(*now));
    Py_ssize_t i;

    if (moved == NULL || now == NULL) {
        PyErr_NoMemory();
        MEMORY_CLEAR(moved);
        return NULL;
    }
    if (n == 0 || call->entry.versions == NULL) {
        return moved;
    }
    if (params_read(call->st, call->parts, now, NULL, NULL) < 0) {
        MEMORY_CLEAR(moved);
        return NULL;
    }
    for (i = 0; i < n; i++) {
        moved[i] = !oomkit_buffers_have(call, i) &&
                   (now[i] != call->entry.versions[i] ||
                    (call->entry.samples != NULL &&
                     oomkit_tensor_sample(call->st, call->parts->params[i]) !=
                         call->entry.samples[i]));
    }
    return moved;
}

/* A parameter that moved since the attempt began: 1 and its index; 0; -1. */
int
oomkit_params_moved(oomkit_call *call, Py_ssize_t *which)
{
    Py_ssize_t i, n = call->parts->param_count;
    OWNED_MEMORY uint32_t *now = NULL;

    if (call->entry.versions == NULL || n == 0) {
        return 0;
    }
    now = PyMem_Malloc((size_t)n * sizeof(*now));
    if (now == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (params_read(call->st, call->parts, now, NULL, NULL) < 0) {
        return -1;
    }
    for (i = 0; i < n; i++) {
        if (now[i] != call->entry.versions[i] && !oomkit_buffers_have(call, i)) {
            *which = i;
            return 1;
        }
    }
    return 0;
}

/* While split: what 64 values of each parameter are, for writes that bump no version.
 */
int
oomkit_params_sample(oomkit_call *call)
{
    Py_ssize_t i, n = call->parts->param_count;

    if (n == 0) {
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
        call->entry.samples[i] = oomkit_tensor_sample(call->st, call->parts->params[i]);
    }
    return 0;
}

/* A parameter whose values changed since then: 1 and its index, or 0. */
int
oomkit_params_rewritten(const oomkit_call *call, Py_ssize_t *which)
{
    Py_ssize_t i;
    for (i = 0; call->entry.samples != NULL && i < call->parts->param_count; i++) {
        if (oomkit_tensor_sample(call->st, call->parts->params[i]) !=
                call->entry.samples[i] &&
            !oomkit_buffers_have(call, i)) {
            *which = i;
            return 1;
        }
    }
    return 0;
}

/* Behind the versions and the two bytes of each. */
static const void **
params_gradients(const oomkit_call *call)
{
    const size_t before = (size_t)call->parts->param_count * (sizeof(uint32_t) + 2);
    return (const void **)((char *)call->entry.versions + ALIGNED(before));
}

const void *const *
oomkit_params_gradients(const oomkit_call *call)
{
    return call->entry.versions == NULL ? NULL : params_gradients(call);
}

int
oomkit_params_gradients_now(oomkit_call *call, const void **gradients)
{
    return params_read(call->st, call->parts, NULL, NULL, gradients);
}

/* What the parameters' versions are now. 0 or -1. */
int
oomkit_params_mark(oomkit_call *call)
{
    Py_ssize_t n = call->parts->param_count;

    if (n == 0) {
        return 0;
    }
    if (call->entry.versions == NULL) {
        call->entry.versions = oomkit_spare_take(
            &call->parts->spare_versions, ALIGNED((size_t)n * (sizeof(uint32_t) + 2)) +
                                              ((size_t)n + 1) * sizeof(void *));
        if (call->entry.versions == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    return params_read(call->st, call->parts, call->entry.versions,
                       oomkit_params_flags(call, 0), params_gradients(call));
}

void
oomkit_params_release(oomkit_savepoint *savepoint)
{
    void *versions = NULL;

    SPARE_GIVE(versions, savepoint->versions); /* it lies behind a head */
    PyMem_Free(versions);
}

void
oomkit_params_version_is(oomkit_call *call, const PyObject *param, uint32_t version)
{
    Py_ssize_t i;
    for (i = 0; call->entry.versions != NULL && i < call->parts->param_count; i++) {
        if (call->parts->params[i] == param) {
            call->entry.versions[i] = version;
        }
    }
}

uint8_t *
oomkit_params_flags(const oomkit_call *call, int at_end)
{
    Py_ssize_t n = call->parts->param_count;
    return (uint8_t *)(call->entry.versions + n) + (at_end ? n : 0);
}

int
oomkit_params_flags_now(oomkit_state *st, const oomkit_participants *parts,
                        uint8_t *flags)
{
    return params_read(st, parts, NULL, flags, NULL);
}

int
oomkit_params_begin(oomkit_call *call)
{
    return oomkit_params_mark(call) < 0 ? -1 : oomkit_param_copies_begin(call);
}

int
oomkit_params_restore(oomkit_call *call, PyObject **message)
{
    Py_ssize_t first = 0, stay = oomkit_param_copies_restore(call, &first);

    return stay <= 0 ? (int)stay
                     : oomkit_param_copies_refuse(call, message, first, stay);
}
