/* Parameters as they were before the first micro-batch of a site's first split call:
 * where it turns out that the step changes them by itself, they go back as they were.
 * Taken once per site, on the host, and only of models that are small enough.
 *
 * A small plain tensor of the CPU is kept as bytes: a copy by torch costs two
 * microseconds, however small the parameter, and stands between an error and its
 * replay. Of large ones the bytes are what costs, and torch's blocks are warm. */
#include "call.h"
#include "step.h"
#include "tensor.h"

#define PRISTINE_BYTES (256u << 20) /* of all of them together */
#define IMAGE_BYTES (1u << 16)      /* one up to this is kept as bytes */

typedef struct pristine_item {
    PyObject *copy; /* owned host copy, or NULL */
    void *image;    /* its bytes, or NULL */
    uint64_t bytes; /* how many, 0 where it is not to be kept so */
    uint64_t shape; /* hash of dtype and all sizes */
} pristine_item;

struct oomkit_pristine {
    Py_ssize_t count;
    pristine_item items[];
};

void
oomkit_pristine_release(oomkit_call *call)
{
    oomkit_pristine *p = call->pristine;
    Py_ssize_t i;

    call->pristine = NULL; /* first: a finaliser that runs here must see none */
    for (i = 0; p != NULL && i < p->count; i++) {
        Py_CLEAR(p->items[i].copy);
        PyMem_Free(p->items[i].image);
    }
    PyMem_Free(p);
}

/* The facts of a parameter, with a hash of all its sizes. 0 or -1. */
static int
pristine_facts(const oomkit_call *call, Py_ssize_t i, oomkit_tensor_facts *facts)
{
    return oomkit_tensor_facts_get(call->st, call->parts->params[i], INT64_MAX, facts);
}

/* The kind of each, how many bytes it is where it may be kept so, and of how many bytes
 * all are. 0 or -1. */
static int
pristine_measure(const oomkit_call *call, uint64_t *total)
{
    oomkit_tensor_facts facts;
    Py_ssize_t i;

    *total = 0;
    for (i = 0; i < call->pristine->count; i++) {
        pristine_item *item = &call->pristine->items[i];
        if (pristine_facts(call, i, &facts) < 0) {
            return -1;
        }
        *total += facts.bytes;
        item->shape = facts.shape_hash;
        if (call->st->bridge != NULL && facts.device_type == 0 && facts.is_strided &&
            facts.bytes <= IMAGE_BYTES) {
            item->bytes = facts.bytes;
        }
    }
    return 0;
}

/* The bytes of one parameter. 1 taken, 0 it is not kept so, -1 with MemoryError. */
static int
pristine_image(const oomkit_call *call, Py_ssize_t i)
{
    const oomkit_state *st = call->st;
    pristine_item *item = &call->pristine->items[i];

    if (item->bytes == 0) {
        return 0;
    }
    item->image = PyMem_Malloc((size_t)item->bytes);
    if (item->image == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (st->bridge->bytes_get(call->parts->params[i], st->impl_offset, item->image,
                              item->bytes) == OOMKIT_OK) {
        return 1;
    }
    PyMem_Free(item->image);
    item->image = NULL;
    return 0;
}

/* The value of one parameter: its bytes, or a copy by torch. 0 or -1. */
static int
pristine_take_one(oomkit_call *call, Py_ssize_t i)
{
    pristine_item *item = &call->pristine->items[i];
    int taken = pristine_image(call, i);

    if (taken != 0) {
        return taken < 0 ? -1 : 0;
    }
    item->copy = oomkit_host_copy(call->st, call->parts->params[i]);
    if (item->copy == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) {
            return -1;
        }
        PyErr_Clear(); /* not there yet (a lazy module's), or of a kind of its own */
    }
    return 0;
}

/* Before the first micro-batch of an attempt. 0 or -1. */
int
oomkit_pristine_take(oomkit_call *call)
{
    Py_ssize_t i, n = call->parts->param_count;
    uint64_t total;
    oomkit_pristine *p; /* owned by call */

    if ((call->step->effects_said && call->proof == NULL) || call->pristine != NULL ||
        n == 0) {
        return 0;
    }
    p = PyMem_Calloc(1, sizeof(*p) + (size_t)n * sizeof(*p->items));
    if (p == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    p->count = n;
    call->pristine = p;
    if (pristine_measure(call, &total) < 0) {
        return -1;
    }
    if (total > PRISTINE_BYTES) {
        oomkit_pristine_release(call);
        return 0;
    }
    for (i = 0; i < n; i++) {
        if (pristine_take_one(call, i) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Writes a copy by torch back. 1, or -1. */
static int
pristine_write(const oomkit_call *call, Py_ssize_t i, PyObject *copy)
{
    PyObject *plain, *done; /* owned */

    plain = PyObject_CallMethodNoArgs(call->parts->params[i], call->st->str_detach);
    done = plain ? PyObject_CallMethodOneArg(plain, call->st->str_copy, copy) : NULL;
    Py_XDECREF(plain);
    Py_XDECREF(done);
    return done == NULL ? -1 : 1;
}

/* The bytes of parameter i go back through a tensor of its present strides' sizes: its
 * `.data` is another tensor now, which is not contiguous. 1 done, 0 it is no such
 * tensor, -1. */
static int
pristine_through(const oomkit_call *call, Py_ssize_t i)
{
    const oomkit_state *st = call->st;
    const pristine_item *item = &call->pristine->items[i];
    PyObject *plain = /* owned */
        PyObject_CallMethodNoArgs(call->parts->params[i], st->str_detach);
    PyObject *fresh = plain ? PyObject_CallMethod(plain, "contiguous", NULL) : NULL;
    int result = -1; /* fresh: owned */

    if (fresh != NULL) {
        result = st->bridge->bytes_set(fresh, st->impl_offset, item->image,
                                       item->bytes) == OOMKIT_OK
                     ? pristine_write(call, i, fresh)
                     : 0;
    }
    Py_XDECREF(fresh);
    Py_XDECREF(plain);
    return result;
}

/* Parameter i as it was. 1 done, 0 there is no copy; 2 there is, but it is a tensor of
 * another shape, type or device now; -1. */
static int
pristine_put_back(const oomkit_call *call, Py_ssize_t i)
{
    const oomkit_state *st = call->st;
    const pristine_item *item = &call->pristine->items[i];
    oomkit_tensor_facts facts;
    int result;

    if (item->image == NULL && item->copy == NULL) {
        return 0;
    }
    if (pristine_facts(call, i, &facts) < 0) {
        return -1;
    }
    if (facts.shape_hash != item->shape) {
        return 2;
    }
    if (item->image == NULL) {
        return pristine_write(call, i, item->copy);
    }
    if (st->bridge->bytes_set(call->parts->params[i], st->impl_offset, item->image,
                              item->bytes) == OOMKIT_OK) {
        return 1;
    }
    result = pristine_through(call, i);
    return result == 0 ? 2 : result;
}

/* While rolling back: what the step itself changed in parameters. Those without a copy
 * stay as they are, for others to see. 0; 1 and *which of one that has a copy and
 * cannot take it; -1. */
int
oomkit_pristine_restore(oomkit_call *call, Py_ssize_t *which)
{
    Py_ssize_t i, at;
    int moved, all = 1, stuck = 0;

    if (call->pristine == NULL) {
        return 0;
    }
    moved = oomkit_tx_params_moved(call, &at);
    if (moved == 0) {
        moved = oomkit_tx_params_rewritten(call, &at);
    }
    if (moved <= 0) {
        return moved;
    }
    for (i = 0; i < call->pristine->count; i++) {
        int done = pristine_put_back(call, i);
        if (done < 0) {
            return -1;
        }
        if (done == 2) {
            stuck = 1;
            *which = i;
        }
        all = all && done == 1;
    }
    return all ? oomkit_tx_params_mark(call) : stuck;
}
