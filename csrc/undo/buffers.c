/* Buffers: identity and version of all, copies of those that move.
 *
 * In its first finished call every buffer is copied. Those seen moving are copied from
 * then on, running statistics in training mode always; a buffer that moves without a
 * copy cannot be taken back and is named. */
#include "undo.h"
#include "../py/modes.h"
#include "../py/tensor.h"

static int
buffers_room(oomkit_call *call)
{
    oomkit_buffers *b = &call->entry.buffers;
    oomkit_participants *parts = call->parts;

    if (ARRAY_GROW(b->items, b->count, b->room) < 0) {
        return -1;
    }
    if (parts->moving_count <= b->count) {
        Py_ssize_t n = b->count + 1;
        void *moving = PyMem_Realloc(parts->moving, (size_t)n);
        void *copies, *images;
        if (moving == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        parts->moving = moving;
        copies = PyMem_Realloc(parts->copies, (size_t)n * sizeof(PyObject *));
        if (copies == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        parts->copies = copies;
        images = PyMem_Realloc(parts->images, (size_t)n * sizeof(*parts->images));
        if (images == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        parts->images = images;
        parts->images[n - 1] = (oomkit_image){NULL, 0};
        parts->moving[n - 1] = OOMKIT_BUFFER_NEW;
        parts->copies[n - 1] = NULL;
        parts->moving_count = n;
    }
    return 0;
}

#define IMAGE_BYTES (1u << 16)       /* a CPU buffer up to this is kept as bytes */
#define DEVICE_COPY_BYTES (1u << 20) /* a larger buffer's copy lives on the host */

/* The copy of a buffer: beside it on its device while small, so that taking it does not
 * wait for the device. New reference or NULL. */
static PyObject *
buffer_copy(oomkit_state *st, PyObject *tensor, const oomkit_tensor_facts *facts)
{
    PyObject *plain, *copy = NULL; /* owned */

    if (facts->device_type == 0 || facts->bytes > DEVICE_COPY_BYTES) {
        return oomkit_host_copy(st, tensor);
    }
    plain = PyObject_CallMethodNoArgs(tensor, st->str_detach);
    EXEMPT (st) {
        copy = plain ? PyObject_CallMethodNoArgs(plain, st->str_clone) : NULL;
    }
    Py_XDECREF(plain);
    if (copy == NULL && oomkit_exception_is_oom(st)) {
        PyErr_Clear(); /* not even that fits beside what is there: on the host it does
                        */
        return oomkit_host_copy(st, tensor);
    }
    return copy;
}

/* Is the copy of an earlier call of the same shape and type? Buffers come and go. */
static int
buffer_copy_fits(oomkit_state *st, PyObject *copy, const oomkit_tensor_facts *facts)
{
    oomkit_tensor_facts was;
    if (copy == NULL) {
        return 0;
    }
    if (oomkit_tensor_facts_get(st, copy, 0, &was) < 0) {
        oomkit_error_dismiss(); /* unreadable: a new copy fails by itself */
        return 0;
    }
    return facts->is_strided && facts->ndim >= 0 &&
           was.shape_hash == facts->shape_hash && was.size == facts->size &&
           was.bytes == facts->bytes && was.dtype == facts->dtype;
}

/* The bytes of a small CPU buffer: some 10 ns where a tensor copy takes 400. 1 taken, 0
 * not such a buffer, -1 with MemoryError. */
static int
buffer_image(oomkit_call *call, Py_ssize_t i, PyObject *tensor,
             const oomkit_tensor_facts *facts)
{
    oomkit_image *image = &call->parts->images[i];

    if (facts->device_type != 0 || facts->bytes == 0 || facts->bytes > IMAGE_BYTES) {
        return 0;
    }
    if (image->size != facts->bytes) {
        void *grown = PyMem_Realloc(image->bytes, (size_t)facts->bytes);
        if (grown == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        image->bytes = grown;
        image->size = facts->bytes;
    }
    return call->st->bridge->bytes_get(tensor, call->st->impl_offset, image->bytes,
                                       image->size) == OOMKIT_OK;
}

/* Takes the value of a marked buffer: as bytes, as a new copy, or into the copy of an
 * earlier call (then it is appended to `from` and `to`). 0 or -1. */
static int
buffer_take(oomkit_call *call, Py_ssize_t i, const oomkit_tensor_facts *facts,
            PyObject *from, PyObject *to)
{
    oomkit_buffer *item = &call->entry.buffers.items[i];
    PyObject **copy = &call->parts->copies[i];
    int taken = buffer_image(call, i, item->tensor, facts);

    if (taken != 0) {
        item->copied = 2 * (taken > 0);
        return taken < 0 ? -1 : 0;
    }
    if (!buffer_copy_fits(call->st, *copy, facts)) {
        Py_XSETREF(*copy, buffer_copy(call->st, item->tensor, facts));
        item->copied = *copy != NULL;
        return *copy == NULL ? -1 : 0;
    }
    item->copied = 1;
    return PyList_Append(from, item->tensor) < 0 || PyList_Append(to, *copy) < 0 ? -1
                                                                                 : 0;
}

/* One module's buffers are marked; the ones to copy are appended to `from` and `to`. */
static int
buffers_mark_module(oomkit_call *call, PyObject *module, int always, PyObject *from,
                    PyObject *to)
{
    oomkit_state *st = call->st;
    PyObject *key, *value; /* borrowed from the dict */
    Py_ssize_t at = 0;
    OWNED PyObject *dict = PyObject_GetAttr(module, st->str_buffers);

    if (dict == NULL) {
        return -1;
    }
    while (PyDict_Check(dict) && PyDict_Next(dict, &at, &key, &value)) {
        oomkit_buffer *item;
        oomkit_tensor_facts facts;
        Py_ssize_t i = call->entry.buffers.count;

        if (value == Py_None ||
            strcmp(Py_TYPE(value)->tp_name, "UninitializedBuffer") == 0) {
            continue; /* nothing is there yet */
        }
        if (buffers_room(call) < 0 ||
            oomkit_tensor_facts_get(st, value, 0, &facts) < 0) {
            return -1;
        }
        item = &call->entry.buffers.items[i];
        item->tensor = Py_NewRef(value);
        item->module = Py_NewRef(module);
        item->key = Py_NewRef(key);
        item->version = facts.version;
        item->copied = 0;
        call->entry.buffers.count++;
        if (oomkit_buffer_leaf(call, item, &facts) < 0) {
            return -1;
        }
        if (!always && call->parts->moving[i] == OOMKIT_BUFFER_RESTS) {
            /* Versions do not tell everything (batch_norm bumps none of its
             * statistics'): where a copy costs next to nothing it is always taken. */
            int taken = buffer_image(call, i, value, &facts);
            if (taken < 0) {
                return -1;
            }
            item->copied = taken ? 2 : 0;
            continue;
        }
        if (buffer_take(call, i, &facts, from, to) < 0) {
            call->parts->moving[i] &=
                ~OOMKIT_BUFFER_NEW; /* the next call can do without */
            return -1;
        }
    }
    return 0;
}

/* From number `from` on. */
static void
buffers_forget(oomkit_buffers *b, Py_ssize_t from)
{
    Py_ssize_t i, count = b->count;

    b->count = from;
    for (i = from; i < count; i++) {
        Py_CLEAR(b->items[i].tensor);
        Py_CLEAR(b->items[i].module);
        Py_CLEAR(b->items[i].key);
    }
}

/* Into the copies of earlier calls. 0 or -1. */
static int
buffers_copy(oomkit_state *st, PyObject *from, PyObject *to)
{
    OWNED PyObject *done = NULL;

    if (PyList_GET_SIZE(to) == 0) {
        return 0;
    }
    EXEMPT (st) {
        done = PyObject_CallFunctionObjArgs(st->foreach_copy, to, from, NULL);
    }
    return done == NULL ? -1 : 0;
}

/* All modules' buffers are marked, and those to copy copied. 0 or -1. */
static int
buffers_mark_all(oomkit_call *call)
{
    oomkit_state *st = call->st;
    oomkit_participants *parts = call->parts;
    OWNED PyObject *from = PyList_New(0), *to = PyList_New(0);
    Py_ssize_t i;

    if (from == NULL || to == NULL) {
        return -1;
    }
    for (i = 0; i < parts->buffered_count; i++) {
        OWNED PyObject *module = oomkit_reference_get(parts->buffered[i].ref);
        int always = 0;
        if (module == NULL) {
            continue;
        }
        if (parts->buffered[i].is_norm) {
            always = oomkit_module_is_training(st, module);
        }
        if (always < 0 || buffers_mark_module(call, module, always, from, to) < 0) {
            return -1;
        }
    }
    return buffers_copy(st, from, to);
}

static int
buffers_mark_one(oomkit_call *call, PyObject *module)
{
    OWNED PyObject *from = PyList_New(0), *to = PyList_New(0);

    return from == NULL || to == NULL ||
                   buffers_mark_module(call, module, 1, from, to) < 0
               ? -1
               : buffers_copy(call->st, from, to);
}

int
oomkit_buffers_mark_late(oomkit_call *call, PyObject *module, PyObject *noted)
{
    oomkit_buffers *b = &call->entry.buffers;
    const Py_ssize_t before = b->count;
    PyObject *guard; /* owned */

    if (oomkit_inference_begin(call->st, 0, &guard) < 0) {
        return -1;
    }
    if (oomkit_inference_end(call->st, guard, buffers_mark_one(call, module)) == 0 &&
        oomkit_participants_add_late(call->st, call->parts, module) == 0 &&
        oomkit_memo_add(&b->attributes, module, Py_NewRef(noted)) == 0) {
        return 1;
    }
    oomkit_error_dismiss(); /* the step knows nothing of it, and may have room enough */
    buffers_forget(b, before);
    return 0;
}

/* At entry of an attempt. 0 or -1. */
int
oomkit_buffers_mark(oomkit_call *call)
{
    PyObject *guard; /* owned */

    if (call->parts->buffered_count > 0) {
        if (oomkit_inference_begin(call->st, 0, &guard) < 0) {
            return -1;
        }
        call->parts->buffers_serial++;
        if (oomkit_inference_end(call->st, guard, buffers_mark_all(call)) < 0) {
            return -1;
        }
    }
    call->entry.buffers.taken = 1;
    return 0;
}

/* The same for one. 0 or -1. */
static int
buffer_take_again(oomkit_call *call, Py_ssize_t i, PyObject *from, PyObject *to)
{
    oomkit_buffer *item = &call->entry.buffers.items[i];
    oomkit_tensor_facts facts;

    if (oomkit_tensor_facts_get(call->st, item->tensor, 0, &facts) < 0) {
        return -1;
    }
    item->version = facts.version;
    return item->copied ? buffer_take(call, i, &facts, from, to) : 0;
}

int
oomkit_buffers_take_again(oomkit_call *call, PyObject *tensors)
{
    const oomkit_buffers *b = &call->entry.buffers;
    OWNED PyObject *from = PyList_New(0), *to = PyList_New(0);
    Py_ssize_t i, j;

    if (from == NULL || to == NULL) {
        return -1;
    }
    for (i = 0; i < b->count; i++) {
        for (j = 0; j < PyTuple_GET_SIZE(tensors); j++) {
            if (PyTuple_GET_ITEM(tensors, j) == b->items[i].tensor &&
                buffer_take_again(call, i, from, to) < 0) {
                return -1;
            }
        }
    }
    return buffers_copy(call->st, from, to);
}

int
oomkit_buffer_moved(const oomkit_call *call, const oomkit_buffer *item)
{
    uint32_t version;
    PyObject *now; /* borrowed from dict */
    OWNED PyObject *dict = PyObject_GetAttr(item->module, call->st->str_buffers);

    if (dict == NULL) {
        return -1;
    }
    now = PyDict_GetItemWithError(dict, item->key);
    if (now != item->tensor) {
        return now == NULL && PyErr_Occurred() ? -1 : 2;
    }
    return oomkit_tensor_version(call->st, item->tensor, &version) < 0
               ? -1
               : version != item->version;
}

int
oomkit_buffers_moved(oomkit_call *call)
{
    Py_ssize_t i;
    for (i = 0; i < call->entry.buffers.count; i++) {
        int state = oomkit_buffer_moved(call, &call->entry.buffers.items[i]);
        if (state != 0) {
            return state < 0 ? -1 : 1;
        }
    }
    return 0;
}

/* Did a buffer move in this call? By version, and by value where a copy was taken. 1,
 * 0, or -1 with an exception. */
static int
buffer_has_moved(oomkit_call *call, Py_ssize_t i)
{
    const oomkit_buffer *item = &call->entry.buffers.items[i];
    OWNED PyObject *equal = NULL;
    uint32_t version;

    if (oomkit_tensor_version(call->st, item->tensor, &version) < 0) {
        return -1;
    }
    if (version != item->version || item->copied != 1) {
        return version != item->version;
    }
    EXEMPT (call->st) {
        equal = PyObject_CallFunctionObjArgs(call->st->torch_equal, item->tensor,
                                             call->parts->copies[i], NULL);
    }
    return equal == NULL ? -1 : equal != Py_True;
}

/* After a finished call: those that moved will be copied from now on. Never fails: what
 * cannot be compared (a copy on another device) counts as moving. */
void
oomkit_buffers_learn(oomkit_call *call)
{
    Py_ssize_t i;
    for (i = 0; i < call->entry.buffers.count && i < call->parts->moving_count; i++) {
        int moved;
        if (call->parts->moving[i] == OOMKIT_BUFFER_MOVES ||
            call->entry.buffers.items[i].copied == 2) {
            continue;
        }
        moved = buffer_has_moved(call, i);
        if (moved < 0) {
            oomkit_error_dismiss(); /* no reason to fail a finished step */
        }
        call->parts->moving[i] = moved ? OOMKIT_BUFFER_MOVES : OOMKIT_BUFFER_RESTS;
        if (moved == 0) {
            /* The marks may go to a pending call, which must not look for it. */
            Py_CLEAR(call->parts->copies[i]);
            call->entry.buffers.items[i].copied = 0;
        }
    }
}

/* --- back to that --- */

/* Its copy into a buffer, which may have another shape by now: an observer of
 * quantisation has none before its first forward. 0 or -1. */
static int
buffer_write(oomkit_call *call, PyObject *buffer, PyObject *copy)
{
    oomkit_tensor_facts facts;

    if (oomkit_tensor_facts_get(call->st, buffer, 0, &facts) < 0) {
        return -1;
    }
    if (!buffer_copy_fits(call->st, copy, &facts) && facts.is_strided) {
        OWNED PyObject *done = NULL;
        EXEMPT (call->st) {
            done = PyObject_CallMethod(buffer, "resize_as_", "O", copy);
        }
        if (done == NULL) {
            return -1;
        }
    }
    return oomkit_tensor_write(call->st, buffer, copy);
}

static int
buffer_put_back(oomkit_call *call, Py_ssize_t i)
{
    oomkit_buffer *item = &call->entry.buffers.items[i];
    OWNED PyObject *dict = NULL;

    /* Whatever the version says: a kernel that fails half-way (batch_norm) has written
     * to its buffers and not bumped them. */
    if (item->copied == 2) {
        const oomkit_image *image = &call->parts->images[i];
        if (call->st->bridge->bytes_set(item->tensor, call->st->impl_offset,
                                        image->bytes, image->size) != OOMKIT_OK) {
            PyErr_SetString(
                PyExc_RuntimeError,
                "oomkit could not write a buffer back: it changed its shape" SEE(
                    "internal-error"));
            return -1;
        }
    } else if (item->copied) {
        if (buffer_write(call, item->tensor, call->parts->copies[i]) < 0) {
            return -1;
        }
    }
    dict = PyObject_GetAttr(item->module, call->st->str_buffers);
    if (dict == NULL) {
        return -1;
    }
    if (PyDict_GetItemWithError(dict, item->key) != item->tensor) {
        return PyErr_Occurred() ? -1 : PyDict_SetItem(dict, item->key, item->tensor);
    }
    return 0;
}

/* Has it moved (or changed its shape) so that nothing can put it back? 1, 0 or -1. */
static int
buffer_is_stuck(oomkit_call *call, Py_ssize_t i)
{
    const oomkit_buffer *item = &call->entry.buffers.items[i];
    oomkit_tensor_facts facts;
    uint32_t version;

    if (item->copied == 2) {
        if (oomkit_tensor_facts_get(call->st, item->tensor, 0, &facts) < 0) {
            return -1;
        }
        return facts.bytes != call->parts->images[i].size || facts.device_type != 0;
    }
    if (oomkit_tensor_version(call->st, item->tensor, &version) < 0) {
        return -1;
    }
    return version != item->version && !item->copied;
}

/* 0 all buffers are as at entry; 1 all but at least one, *which is an owned str that
 * names the first of those; -1. */
int
oomkit_buffers_restore(oomkit_call *call, PyObject **which)
{
    oomkit_buffers *b = &call->entry.buffers;
    Py_ssize_t i;
    int refused = 0;

    if (oomkit_undone_buffers_note(call) < 0) {
        return -1;
    }
    for (i = 0; i < b->count; i++) {
        int stuck = buffer_is_stuck(call, i);
        if (stuck < 0 || (!stuck && buffer_put_back(call, i) < 0)) {
            goto error;
        }
        if (stuck && !refused) {
            *which = PyUnicode_FromFormat("%s.%U", Py_TYPE(b->items[i].module)->tp_name,
                                          b->items[i].key);
            if (*which == NULL) {
                return -1;
            }
            refused = 1;
        }
    }
    if (oomkit_late_modules_put(b->attributes) < 0) {
        goto error;
    }
    return refused;
error:
    if (refused) {
        Py_CLEAR(*which);
    }
    return -1;
}

/* --- what is kept of a call whose loss is returned --- */

int
oomkit_buffers_versions(oomkit_state *st, const oomkit_savepoint *savepoint,
                        uint32_t **versions)
{
    const oomkit_buffers *b = &savepoint->buffers;
    Py_ssize_t i;

    if (b->count == 0) {
        return 0;
    }
    *versions = PyMem_Malloc((size_t)b->count * sizeof(**versions));
    if (*versions == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (i = 0; i < b->count; i++) {
        if (oomkit_tensor_version(st, b->items[i].tensor, &(*versions)[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

int
oomkit_buffers_now(oomkit_call *call, const oomkit_after *after, oomkit_savepoint *now)
{
    const oomkit_buffers *b = &call->entry.buffers;
    Py_ssize_t i;

    now->buffers.used = after->buffers_serial != call->parts->buffers_serial;
    for (i = 0; i < b->count; i++) {
        PyObject *tensor = b->items[i].tensor; /* borrowed */
        uint32_t version;
        if (oomkit_tensor_version(call->st, tensor, &version) < 0 ||
            oomkit_memo_add(&now->buffers.values, tensor,
                            oomkit_host_copy(call->st, tensor)) < 0) {
            return -1;
        }
        now->buffers.used |= after->buffers == NULL || version != after->buffers[i];
    }
    if (oomkit_late_modules_now(b->attributes, &now->buffers.attributes) < 0) {
        return -1;
    }
    if (now->buffers.used) { /* the copies at entry are another call's by now */
        oomkit_buffers_release(&call->entry);
    }
    return 0;
}

int
oomkit_buffers_back(oomkit_call *call, const oomkit_savepoint *now, int finished)
{
    EACH_MEMO (buffer, now->buffers.used || !finished ? now->buffers.values : NULL) {
        OWNED PyObject *done =
            PyObject_CallMethodOneArg(buffer.object, call->st->str_copy, buffer.saved);
        if (done == NULL) {
            return -1;
        }
    }
    return oomkit_late_modules_put(now->buffers.attributes);
}

void
oomkit_buffers_release(oomkit_savepoint *savepoint)
{
    oomkit_buffers *b = &savepoint->buffers;

    oomkit_memo_drop(&b->attributes);
    oomkit_memo_drop(&b->values);
    buffers_forget(b, 0);
    MEMORY_CLEAR(b->items);
    b->room = 0;
    b->taken = 0;
}

/* --- buffers that are leaves of a graph: a codebook that requires grad, the zero that
 * a module adds its losses to. No optimizer has them, and nothing may ever clear their
 * gradients; as a participant one may move in a forward, as buffers do. --- */

/* One that requires grad takes part as a leaf; of others a site's first call notes that
 * they have no gradient: what a forward makes a leaf gets its first one there. 0 or -1.
 */
int
oomkit_buffer_leaf(oomkit_call *call, oomkit_buffer *item,
                   const oomkit_tensor_facts *facts)
{
    int leaf;

    item->bare = 0;
    if (facts->requires_grad) {
        leaf = oomkit_tensor_is_leaf(item->tensor, facts);
        return leaf > 0 ? oomkit_tell_leaf_at_entry(call, item->tensor) : leaf;
    }
    if (call->parts->buffers_serial == 1) {
        OWNED PyObject *gradient = PyObject_GetAttr(item->tensor, call->st->str_grad);
        if (gradient == NULL) {
            return -1;
        }
        item->bare = gradient == Py_None;
    }
    return 0;
}

static oomkit_buffer *
buffer_of(const oomkit_call *call, const PyObject *tensor)
{
    Py_ssize_t i;

    for (i = 0; i < call->entry.buffers.count; i++) {
        if (call->entry.buffers.items[i].tensor == tensor) {
            return &call->entry.buffers.items[i];
        }
    }
    return NULL;
}

int
oomkit_buffer_is_marked(const oomkit_call *call, const PyObject *tensor)
{
    return buffer_of(call, tensor) != NULL;
}

int
oomkit_buffers_have(const oomkit_call *call, Py_ssize_t which)
{
    const oomkit_participants *parts = call->parts;
    return which >= parts->param_count - parts->adopted_count &&
           buffer_of(call, parts->params[which]) != NULL;
}

int
oomkit_buffers_bare_again(oomkit_call *call, PyObject *tensor)
{
    const oomkit_buffer *item = buffer_of(call, tensor);

    if (item == NULL || !item->bare) {
        return 0;
    }
    if (PyObject_SetAttr(tensor, call->st->str_grad, Py_None) < 0) {
        oomkit_error_dismiss(); /* then it is refused */
        return 0;
    }
    return 1;
}
