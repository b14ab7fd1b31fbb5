/* Parameters as they were before the first micro-batch of a site's first split call:
 * where it turns out that the step changes them by itself, they go back as they were.
 * Taken once per site, on the host, and only of models that are small enough.
 *
 * A plain tensor of the CPU is kept as bytes in one block: a copy by torch costs two
 * microseconds for each parameter, however small, and stands between an error and its
 * replay. */
#include "call.h"
#include "step.h"
#include "tensor.h"

#define PRISTINE_BYTES (256u << 20)

typedef struct pristine_item {
    PyObject *copy; /* owned host copy, or NULL */
    uint64_t at;    /* where its bytes are in the image ... */
    uint64_t bytes; /* ... and how many, 0 where it has none there */
    uint64_t shape; /* of dtype and all sizes */
} pristine_item;

struct oomkit_pristine {
    unsigned char *image; /* or NULL */
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
    }
    if (p != NULL) {
        PyMem_Free(p->image);
    }
    PyMem_Free(p);
}

/* The facts of a parameter, with a hash of all its sizes. 0 or -1. */
static int
pristine_facts(const oomkit_call *call, Py_ssize_t i, oomkit_tensor_facts *facts)
{
    return oomkit_tensor_facts_get(call->st, call->parts->params[i], INT64_MAX, facts);
}

/* How many bytes there are of each, and of all that may lie in the image. *total is of
 * all. 0 or -1. */
static int
pristine_measure(const oomkit_call *call, uint64_t *total, uint64_t *in_image)
{
    oomkit_pristine *p = call->pristine;
    oomkit_tensor_facts facts;
    Py_ssize_t i;

    *total = *in_image = 0;
    for (i = 0; i < p->count; i++) {
        if (pristine_facts(call, i, &facts) < 0) {
            return -1;
        }
        *total += facts.bytes;
        if (call->st->bridge != NULL && facts.device_type == 0 && facts.is_strided) {
            p->items[i].at = *in_image;
            p->items[i].bytes = facts.bytes;
            p->items[i].shape = facts.shape_hash;
            *in_image += facts.bytes;
        }
    }
    return 0;
}

/* The value of one parameter: its bytes, or a copy by torch. 0 or -1. */
static int
pristine_take_one(oomkit_call *call, Py_ssize_t i)
{
    const oomkit_state *st = call->st;
    pristine_item *item = &call->pristine->items[i];

    if (item->bytes > 0 &&
        st->bridge->bytes_get(call->parts->params[i], st->impl_offset,
                              call->pristine->image + item->at, item->bytes) == 0) {
        return 0;
    }
    item->bytes = 0;
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
    uint64_t total, in_image;
    oomkit_pristine *p; /* owned by call */

    if (call->step->effects_said || call->pristine != NULL || n == 0) {
        return 0;
    }
    p = PyMem_Calloc(1, sizeof(*p) + (size_t)n * sizeof(*p->items));
    if (p == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    p->count = n;
    call->pristine = p;
    if (pristine_measure(call, &total, &in_image) < 0) {
        return -1;
    }
    if (total > PRISTINE_BYTES) {
        oomkit_pristine_release(call);
        return 0;
    }
    if (in_image > 0 && (p->image = PyMem_Malloc((size_t)in_image)) == NULL) {
        PyErr_NoMemory();
        return -1;
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
        result =
            st->bridge->bytes_set(fresh, st->impl_offset,
                                  call->pristine->image + item->at, item->bytes) == 0
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

    if (item->bytes == 0) {
        return item->copy == NULL ? 0 : pristine_write(call, i, item->copy);
    }
    if (pristine_facts(call, i, &facts) < 0) {
        return -1;
    }
    if (facts.device_type != 0 || facts.bytes != item->bytes ||
        facts.shape_hash != item->shape) {
        return 2;
    }
    if (st->bridge->bytes_set(call->parts->params[i], st->impl_offset,
                              call->pristine->image + item->at, item->bytes) == 0) {
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
