/* Parameters as they were, so that what the step changes in them by itself goes back:
 * - before the first micro-batch of a site's first split call, once per site;
 * - at entry of every attempt of a step whose code shows that it writes to parameters
 *   (parameter_writes.c);
 * - with optimizer_safety="copy" before an update, of those that no optimizer has.
 * On the host, and only of models that are small enough, but with "copy".
 *
 * A small plain tensor of the CPU is kept as bytes: a copy by torch costs two
 * microseconds, however small the parameter, and stands between an error and its
 * replay. Of large ones the bytes are what costs, and torch's blocks are warm. */
#include "parameters.h"
#include "undo.h"
#include "../call/step.h"
#include "../optim/updating.h"
#include "../plain/plain.h"
#include "../py/tensor.h"

#define COPIED_BYTES (256u << 20) /* of all of them together */
#define IMAGE_BYTES (1u << 16)    /* one up to this is kept as bytes */

typedef struct param_copy {
    PyObject *copy; /* owned host copy, or NULL */
    void *image;    /* its bytes, or NULL */
    uint64_t bytes; /* how many, 0 where it is not to be kept so */
    uint64_t shape; /* hash of dtype and all sizes */
    int stuck;      /* it could not take its value again */
} param_copy;

struct oomkit_param_copies {
    Py_ssize_t count;
    int rest; /* see oomkit_param_copies_rest */
    param_copy items[];
};

void
oomkit_param_copies_release(oomkit_call *call)
{
    oomkit_param_copies *p = call->entry.copies;
    Py_ssize_t i;

    call->entry.copies = NULL; /* first: a finaliser that runs here must see none */
    for (i = 0; p != NULL && i < p->count; i++) {
        Py_CLEAR(p->items[i].copy);
        PyMem_Free(p->items[i].image);
    }
    PyMem_Free(p);
}

/* The facts of a parameter, with a hash of all its sizes. 0 or -1. */
static int
param_copies_facts(const oomkit_call *call, Py_ssize_t i, oomkit_tensor_facts *facts)
{
    return oomkit_tensor_facts_get(call->st, call->parts->params[i], INT64_MAX, facts);
}

/* The kind of each, how many bytes it is where it may be kept so, and of how many bytes
 * all are. 0 or -1. */
static int
param_copies_measure(const oomkit_call *call, uint64_t *total)
{
    oomkit_tensor_facts facts;
    Py_ssize_t i;

    *total = 0;
    for (i = 0; i < call->entry.copies->count; i++) {
        param_copy *item = &call->entry.copies->items[i];
        if (param_copies_facts(call, i, &facts) < 0) {
            return -1;
        }
        *total += facts.bytes;
        item->shape = facts.shape_hash;
        if (facts.device_type == 0 && facts.is_strided && facts.bytes <= IMAGE_BYTES) {
            item->bytes = facts.bytes;
        }
    }
    return 0;
}

/* The bytes of one parameter. 1 taken, 0 it is not kept so, -1 with MemoryError. */
static int
param_copies_image(const oomkit_call *call, Py_ssize_t i)
{
    const oomkit_state *st = call->st;
    param_copy *item = &call->entry.copies->items[i];

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
param_copies_take_one(oomkit_call *call, Py_ssize_t i)
{
    param_copy *item = &call->entry.copies->items[i];
    int taken = param_copies_image(call, i);

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

/* Room for the copies, where there is none yet. 0 or -1. */
static int
param_copies_room(oomkit_call *call)
{
    Py_ssize_t n = call->parts->param_count;

    if (call->entry.copies == NULL) {
        call->entry.copies = PyMem_Calloc(1, sizeof(oomkit_param_copies) +
                                                 (size_t)n * sizeof(param_copy));
        if (call->entry.copies == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        call->entry.copies->count = n;
    }
    return 0;
}

/* Copies of all, if they are no larger than that together. 0 or -1. */
static int
param_copies_take_all(oomkit_call *call, uint64_t most)
{
    uint64_t total;
    Py_ssize_t i;

    if (param_copies_room(call) < 0 || param_copies_measure(call, &total) < 0) {
        return -1;
    }
    if (total > most) {
        oomkit_param_copies_release(call);
        return 0;
    }
    for (i = 0; i < call->entry.copies->count; i++) {
        if (param_copies_take_one(call, i) < 0) {
            return -1;
        }
    }
    return 0;
}

int
oomkit_param_copies_begin(oomkit_call *call)
{
    int shown = oomkit_writes_shown(call) != NULL;

    if (!shown && !call->step->seen_oom) { /* an ordinary step, nothing of it failed */
        PyMem_Free(call->entry.samples);
        call->entry.samples = NULL;
        return 0;
    }
    if (oomkit_params_sample(call) < 0) {
        return -1;
    }
    return !shown || call->entry.copies != NULL
               ? 0
               : param_copies_take_all(
                     call, call->options->optimizer_copy ? UINT64_MAX : COPIED_BYTES);
}

int
oomkit_param_copies_take(oomkit_call *call)
{
    if ((oomkit_has_said(call->step, OOMKIT_SAID_EFFECTS) &&
         call->step->averaged == NULL && call->proof == NULL) ||
        call->entry.copies != NULL || call->parts->param_count == 0) {
        return 0;
    }
    return param_copies_take_all(call, COPIED_BYTES);
}

void
oomkit_param_copies_checked(oomkit_call *call)
{
    if (oomkit_writes_shown(call) == NULL && call->step->averaged == NULL) {
        oomkit_param_copies_release(call);
    }
}

/* Adds an address to a set. 0 or -1. */
static int
rest_add(PyObject *known, PyObject *object)
{
    OWNED PyObject *address = PyLong_FromVoidPtr(object);

    return address == NULL ? -1 : PySet_Add(known, address);
}

/* Is an address in it? 1, 0 or -1. */
static int
rest_has(PyObject *known, PyObject *object)
{
    OWNED PyObject *address = PyLong_FromVoidPtr(object);

    return address == NULL ? -1 : PySet_Contains(known, address);
}

/* Adds the addresses of the parameters of an optimizer. 0 or -1. */
static int
rest_known(const oomkit_call *call, PyObject *optimizer, PyObject *known)
{
    OWNED PyObject *groups = PyObject_GetAttr(optimizer, call->st->str_param_groups);
    Py_ssize_t i, j;

    if (groups == NULL) {
        return -1;
    }
    for (i = 0; PyList_Check(groups) && i < PyList_GET_SIZE(groups); i++) {
        PyObject *group = PyList_GET_ITEM(groups, i); /* borrowed */
        PyObject *params = PyDict_Check(group)        /* borrowed */
                               ? PyDict_GetItemWithError(group, call->st->str_params)
                               : NULL;
        if (params == NULL && PyErr_Occurred()) {
            return -1;
        }
        for (j = 0;
             params != NULL && PyList_Check(params) && j < PyList_GET_SIZE(params);
             j++) {
            if (rest_add(known, PyList_GET_ITEM(params, j)) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

PyObject *
oomkit_params_of_optimizers(const oomkit_call *call)
{
    OWNED PyObject *known = PySet_New(NULL);

    EACH_OWNER (one, call->parts, OWNERS_OF(OOMKIT_OWNER_OPTIMIZER)) {
        if (known == NULL || rest_known(call, one.object, known) < 0) {
            return NULL;
        }
    }
    return STEAL(known);
}

/* Is parameter i what it was at entry, as far as that shows? 1, 0 or -1. */
static int
param_copies_same(const oomkit_call *call, Py_ssize_t i)
{
    oomkit_state *st = call->st;
    uint32_t version;

    if (oomkit_tensor_version(st, call->parts->params[i], &version) < 0) {
        return -1;
    }
    return (call->entry.versions == NULL || version == call->entry.versions[i]) &&
           (call->entry.samples == NULL ||
            oomkit_tensor_sample(st, call->parts->params[i]) == call->entry.samples[i]);
}

int
oomkit_param_copies_rest(oomkit_call *call)
{
    OWNED PyObject *known = NULL;
    uint64_t ignored;
    Py_ssize_t i;

    if (call->parts->param_count == 0 ||
        (call->entry.copies != NULL && call->entry.copies->rest)) {
        return 0;
    }
    if (call->entry.copies == NULL &&
        (param_copies_room(call) < 0 || param_copies_measure(call, &ignored) < 0)) {
        return -1;
    }
    known = oomkit_params_of_optimizers(call);
    for (i = 0; known != NULL && i < call->entry.copies->count; i++) {
        const param_copy *item = &call->entry.copies->items[i];
        int has = rest_has(known, call->parts->params[i]);
        if (has == 0 && item->copy == NULL && item->image == NULL) {
            const int same = param_copies_same(call, i);
            if (same < 0 || (same && param_copies_take_one(call, i) < 0)) {
                return -1;
            }
        }
        if (has < 0) {
            return -1;
        }
    }
    if (known == NULL) {
        return -1;
    }
    call->entry.copies->rest = 1;
    return 0;
}

/* Writes a copy by torch back. 1, or -1. */
static int
param_copies_write(const oomkit_call *call, Py_ssize_t i, PyObject *copy)
{
    OWNED PyObject *plain =
        PyObject_CallMethodNoArgs(call->parts->params[i], call->st->str_detach);
    OWNED PyObject *done =
        plain ? PyObject_CallMethodOneArg(plain, call->st->str_copy, copy) : NULL;

    return done == NULL ? -1 : 1;
}

/* The same, but where it has that value: others may hold it at its version. 1, or -1.
 */
static int
param_copies_copy_back(const oomkit_call *call, Py_ssize_t i,
                       const oomkit_tensor_facts *facts)
{
    PyObject *copy = call->entry.copies->items[i].copy; /* borrowed */

    if (facts->device_type == 0 && facts->is_strided) {
        /* This rank's own values: those of all are compared by a collective. */
        OWNED PyObject *kept = oomkit_tensor_local(call->st, copy);
        OWNED PyObject *now = oomkit_tensor_local(call->st, call->parts->params[i]);
        OWNED PyObject *equal = PyObject_CallMethod(kept, "equal", "O", now);
        if (equal == NULL && !PyErr_ExceptionMatches(PyExc_Exception)) {
            return -1;
        }
        if (equal == NULL) {
            PyErr_Clear(); /* of a kind of its own: written in any case */
        }
        if (equal == Py_True) {
            return 1;
        }
    }
    return param_copies_write(call, i, copy);
}

/* The bytes of parameter i go back through a tensor of its present strides' sizes: its
 * `.data` is another tensor now, which is not contiguous. 1 done, 0 it is no such
 * tensor, -1. */
static int
param_copies_through(const oomkit_call *call, Py_ssize_t i)
{
    const oomkit_state *st = call->st;
    const param_copy *item = &call->entry.copies->items[i];
    OWNED PyObject *plain =
        PyObject_CallMethodNoArgs(call->parts->params[i], st->str_detach);
    OWNED PyObject *fresh =
        plain ? PyObject_CallMethod(plain, "contiguous", NULL) : NULL;

    if (fresh == NULL) {
        return -1;
    }
    return st->bridge->bytes_set(fresh, st->impl_offset, item->image, item->bytes) ==
                   OOMKIT_OK
               ? param_copies_write(call, i, fresh)
               : 0;
}

/* Parameter i as it was. 1 done, 0 there is no copy; 2 there is, but it is a tensor of
 * another shape, type or device now; -1. */
static int
param_copies_put_back(const oomkit_call *call, Py_ssize_t i)
{
    const oomkit_state *st = call->st;
    const param_copy *item = &call->entry.copies->items[i];
    oomkit_tensor_facts facts;
    int result;

    if (item->image == NULL && item->copy == NULL) {
        return 0;
    }
    if (param_copies_facts(call, i, &facts) < 0) {
        return -1;
    }
    if (facts.shape_hash != item->shape) {
        return 2;
    }
    if (item->image == NULL) {
        return param_copies_copy_back(call, i, &facts);
    }
    if (st->bridge->bytes_set(call->parts->params[i], st->impl_offset, item->image,
                              item->bytes) == OOMKIT_OK) {
        return 1;
    }
    result = param_copies_through(call, i);
    return result == 0 ? 2 : result;
}

/* Parameter i as it was, at its present version. 0 or -1. */
static int
param_copies_restore_one(oomkit_call *call, Py_ssize_t i)
{
    param_copy *item = &call->entry.copies->items[i];
    int done = param_copies_put_back(call, i);

    item->stuck = done == 2;
    return done == 1 ? oomkit_tensor_version(call->st, call->parts->params[i],
                                             &call->entry.versions[i])
                     : done;
}

int
oomkit_param_copies_put_one(oomkit_call *call, Py_ssize_t i)
{
    if (call->entry.copies == NULL || i >= call->entry.copies->count) {
        return 0;
    }
    switch (param_copies_put_back(call, i)) {
    case 1:
        return oomkit_tensor_version(call->st, call->parts->params[i],
                                     &call->entry.versions[i]) < 0
                   ? -1
                   : 1;
    case -1:
        return -1;
    default:
        return 0;
    }
}

/* Can nothing tell whether parameter i was written to? 1, 0 or -1. */
static int
param_copies_unknown(const oomkit_call *call, Py_ssize_t i)
{
    const param_copy *item = call->entry.copies ? &call->entry.copies->items[i] : NULL;
    oomkit_tensor_facts facts;

    if (!oomkit_writes_hidden(call) ||
        (item != NULL && (item->image != NULL || item->copy != NULL)) ||
        (call->entry.samples != NULL && call->entry.samples[i] != 0)) {
        return 0;
    }
    return param_copies_facts(call, i, &facts) < 0 ? -1 : facts.bytes > 0;
}

/* How many are not as they were, else how many may not be; *which is the first. -1. */
static Py_ssize_t
param_copies_stay(oomkit_call *call, Py_ssize_t *which)
{
    Py_ssize_t i, counts[2] = {0, 0};

    for (i = 0; i < call->parts->param_count; i++) {
        int unknown = param_copies_unknown(call, i);
        int same = unknown < 0 ? -1 : param_copies_same(call, i);
        int stuck = call->entry.copies != NULL && call->entry.copies->items[i].stuck;
        if (same < 0) {
            return -1;
        }
        stuck |= !same;
        if (oomkit_buffers_have(call, i)) {
            continue; /* a buffer that is a leaf: it may move, and goes back as such */
        }
        if (!stuck && (!unknown || counts[0] > 0)) {
            continue;
        }
        if (counts[!stuck]++ == 0) {
            *which = i;
        }
    }
    if (counts[0] + counts[1] > 0) {
        oomkit_params_found_stuck(call, counts[0] > 0);
    }
    return counts[0] > 0 ? counts[0] : counts[1];
}

Py_ssize_t
oomkit_param_copies_restore(oomkit_call *call, Py_ssize_t *which)
{
    Py_ssize_t i, at;
    int moved = oomkit_writes_hidden(call) || /* what no version tells of */
                (call->entry.copies != NULL && call->entry.copies->rest);

    if (call->entry.versions == NULL) {
        return 0;
    }
    if (moved == 0) {
        moved = oomkit_params_moved(call, &at);
    }
    if (moved == 0) {
        moved = oomkit_params_rewritten(call, &at);
    }
    if (moved <= 0) {
        return moved;
    }
    for (i = 0; call->entry.copies != NULL && i < call->entry.copies->count; i++) {
        if (param_copies_restore_one(call, i) < 0) {
            return -1;
        }
    }
    return param_copies_stay(call, which);
}
