/* What autograd keeps in the place of a tensor: the tensor itself, or where its bytes
 * are.
 *
 * Bytes are moved by the storage, or by the stretch of it that a tensor reaches, so
 * that its views have one copy on the host, and one on the device while some of them
 * are back. A copy is known by storage, counter of versions and version: a storage that
 * was written to since is another one. */
#include "offload.h"
#include "../core/status.h"
#include "../py/errors.h"
#include "../py/tensor.h"

#include <string.h>

#define SMALLEST_BYTES 4096u
#define LEAST_SHARE 4u     /* of a storage, for it to be moved whole */
#define ALIGNED_BYTES 512u /* kernels take another way by how data is aligned */
#define STORAGE_ALIGNED_BYTES 64u

/* Bytes on the host. Its holders are the packed objects that need it. */
typedef struct oomkit_moved {
    Py_ssize_t holders;
    oomkit_offload *offload;  /* owned */
    oomkit_storage_facts key; /* begin and end are those of the bytes */
    void *storage;          /* owned: a weak hold, so that no other gets its address */
    PyObject *host;         /* owned: tensor, NULL until the bytes have arrived */
    void *restored;         /* owned: what holds the latest copy weakly, or NULL */
    uint64_t counted_bytes; /* of the host's memory */
    struct oomkit_moved *next; /* borrowed: of the same place in the table */
} oomkit_moved;

typedef struct packed {
    PyObject_HEAD
    const oomkit_bridge *bridge; /* borrowed: the table is never unloaded */
    PyObject *tensor;            /* owned: what was not moved, or NULL */
    uint32_t version;            /* of that, when it was saved */
    oomkit_moved *moved;         /* owned: a share */
    void *form;                  /* owned: of the bridge */
} packed;

#define packed_CAST(op) ((packed *)(op))

/* --- the table of what was moved --- */

static size_t
key_place(const oomkit_offload *self, const oomkit_storage_facts *key)
{
    uint64_t hash = (uint64_t)(uintptr_t)key->storage ^ (key->begin << 1);

    hash *= 0x9e3779b97f4a7c15u;
    return (size_t)(hash >> 32) & self->mask;
}

static int
key_same(const oomkit_storage_facts *a, const oomkit_storage_facts *b)
{
    return a->storage == b->storage && a->data == b->data && a->counter == b->counter &&
           a->version == b->version && a->bytes == b->bytes && a->begin == b->begin &&
           a->end == b->end;
}

/* Borrowed, or NULL. */
static oomkit_moved *
table_find(const oomkit_offload *self, const oomkit_storage_facts *key)
{
    oomkit_moved *found =
        self->table == NULL ? NULL : self->table[key_place(self, key)];

    while (found != NULL && !key_same(&found->key, key)) {
        found = found->next;
    }
    return found;
}

static void
table_put(oomkit_offload *self, oomkit_moved *moved)
{
    oomkit_moved **place = &self->table[key_place(self, &moved->key)];

    moved->next = *place;
    *place = moved;
}

/* Room for one more. 0 or -1. */
static int
table_grow(oomkit_offload *self)
{
    size_t old_places = self->table == NULL ? 0 : self->mask + 1;
    size_t places = old_places == 0 ? 64 : old_places * 2;
    oomkit_moved **old = self->table, *moved, *next;

    if ((size_t)self->count < old_places) {
        return 0;
    }
    self->table = PyMem_Calloc(places, sizeof(*self->table));
    if (self->table == NULL) {
        self->table = old;
        PyErr_NoMemory();
        return -1;
    }
    self->mask = places - 1;
    for (size_t i = 0; i < old_places; i++) {
        for (moved = old[i]; moved != NULL; moved = next) {
            next = moved->next;
            table_put(self, moved);
        }
    }
    PyMem_Free(old);
    return 0;
}

static void
table_remove(oomkit_offload *self, oomkit_moved *moved)
{
    oomkit_moved **at = &self->table[key_place(self, &moved->key)];

    while (*at != NULL && *at != moved) {
        at = &(*at)->next;
    }
    if (*at == moved) {
        *at = moved->next;
        self->count--;
    }
}

/* --- bytes on the host --- */

static void
moved_release(oomkit_moved *moved)
{
    oomkit_offload *offload = moved->offload;

    if (--moved->holders > 0) {
        return;
    }
    if (offload->table != NULL) {
        table_remove(offload, moved);
    }
    offload->held_bytes -= moved->counted_bytes;
    if (moved->restored != NULL) {
        offload->bridge->restored_release(moved->restored);
    }
    offload->bridge->storages_release(&moved->storage, 1);
    Py_CLEAR(moved->host);
    PyMem_Free(moved);
    Py_DECREF((PyObject *)offload);
}

/* What the host spends: torch rounds pinned blocks up to a power of two. */
static uint64_t
host_cost(const oomkit_offload *self, uint64_t bytes)
{
    uint64_t cost = 1;

    if (!self->pinned) {
        return bytes;
    }
    while (cost < bytes && cost < UINT64_MAX / 2) {
        cost *= 2;
    }
    return cost;
}

/* One holder's, without its bytes, in no table, counted. NULL with an exception. */
static oomkit_moved *
moved_new(oomkit_offload *self, PyObject *tensor, const oomkit_storage_facts *key)
{
    const void *holder = tensor;
    oomkit_moved *moved = PyMem_Calloc(1, sizeof(*moved));

    if (moved == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    if (self->bridge->storages_hold(&holder, self->st->impl_offset, 1,
                                    &moved->storage) != OOMKIT_OK) {
        PyMem_Free(moved);
        PyErr_SetString(
            PyExc_RuntimeError,
            "torch does not report a tensor's storage" SEE("internal-error"));
        return NULL;
    }
    moved->holders = 1;
    moved->offload = (oomkit_offload *)Py_NewRef((PyObject *)self);
    moved->key = *key;
    moved->counted_bytes = host_cost(self, key->end - key->begin);
    self->held_bytes += moved->counted_bytes;
    return moved;
}

/* Copies the bytes to the host. 1; 0 where they cannot be looked at; -1. */
static int
moved_fill(oomkit_moved *moved, PyObject *tensor)
{
    oomkit_offload *self = moved->offload;
    OWNED PyObject *host =
        oomkit_offload_empty(self, moved->key.end - moved->key.begin, 1);
    OWNED PyObject *flat = host == NULL ? NULL : oomkit_offload_empty(self, 0, 0);
    OWNED PyObject *done = NULL;

    if (flat == NULL) {
        return -1;
    }
    if (self->bridge->storage_bytes(tensor, self->st->impl_offset, moved->key.begin,
                                    moved->key.end, flat) != OOMKIT_OK) {
        return 0;
    }
    done = PyObject_CallMethodOneArg(host, self->st->str_copy, flat);
    if (done == NULL) {
        return -1;
    }
    moved->host = STEAL(host);
    return 1;
}

/* A new entry of the table, a share of it in *made; NULL where the bytes stay: there is
 * no room for them on the host. 0 or -1. */
static int
moved_make(oomkit_offload *self, PyObject *tensor, const oomkit_storage_facts *key,
           oomkit_moved **made)
{
    oomkit_moved *moved = moved_new(self, tensor, key); /* owned */
    int filled = moved == NULL ? -1 : moved_fill(moved, tensor);

    *made = NULL;
    if (filled < 0 && (PyErr_ExceptionMatches(PyExc_MemoryError) ||
                       oomkit_exception_is_oom(self->st))) {
        oomkit_exception_discard(self->st, oomkit_exception_take());
        filled = 0;
    }
    if (filled > 0 && table_grow(self) < 0) {
        filled = -1;
    }
    if (filled <= 0) {
        if (moved != NULL) {
            moved_release(moved);
        }
        return filled;
    }
    /* Another thread may have put the same there meanwhile: then there are two. */
    table_put(self, moved);
    self->count++;
    self->moved_bytes += key->end - key->begin;
    *made = moved;
    return 0;
}

/* --- packing --- */

/* May its storage go at all? 1, 0 or -1. */
static int
may_move(const oomkit_offload *self, const oomkit_storage_facts *facts)
{
    if (facts->device_type != self->device.type ||
        (facts->device_type != OOMKIT_DEVICE_CPU &&
         facts->device_index != self->device.index) ||
        facts->end - facts->begin < SMALLEST_BYTES ||
        (uintptr_t)facts->data % STORAGE_ALIGNED_BYTES != 0 ||
        oomkit_addresses_have(&self->kept_set, facts->storage)) {
        return 0;
    }
    if (facts->device_type != OOMKIT_DEVICE_CPU) {
        int capturing = oomkit_device_is_capturing(self->st, self->device);
        return capturing < 0 ? -1 : !capturing;
    }
    return 1;
}

/* The bytes of a tensor with these facts on the host: a share in *found, NULL where
 * they stay. 0 or -1. */
static int
moved_for(oomkit_offload *self, PyObject *tensor, const oomkit_storage_facts *facts,
          oomkit_moved **found)
{
    oomkit_storage_facts key = *facts;
    uint64_t reached = facts->end - facts->begin, cost;
    int may = may_move(self, facts);

    *found = NULL;
    if (may <= 0) {
        return may;
    }
    key.begin = 0;
    key.end = key.bytes;
    *found = table_find(self, &key);
    if (*found == NULL && reached < key.bytes / LEAST_SHARE) {
        key.begin = facts->begin - facts->begin % ALIGNED_BYTES;
        key.end = facts->end;
        *found = table_find(self, &key);
    }
    if (*found != NULL) {
        (*found)->holders++;
        return 0;
    }
    cost = host_cost(self, key.end - key.begin);
    if (cost > self->room_bytes || self->held_bytes > self->room_bytes - cost) {
        return 0;
    }
    return moved_make(self, tensor, &key, found);
}

/* Of torch's own types, by which nothing else can be meant. */
static int
is_exact(const oomkit_state *st, PyObject *tensor)
{
    return Py_IS_TYPE(tensor, (PyTypeObject *)st->Tensor) ||
           Py_IS_TYPE(tensor, (PyTypeObject *)st->Parameter);
}

/* The tensor without its graph, which would hold what holds it. New reference or NULL.
 */
static PyObject *
without_graph(oomkit_offload *self, PyObject *tensor, const oomkit_storage_facts *facts)
{
    oomkit_state *st = self->st;
    OWNED PyObject *wants = NULL, *alias = NULL;

    if (facts == NULL) {
        wants = PyObject_GetAttr(tensor, st->str_requires_grad);
        if (wants == NULL) {
            return NULL;
        }
    }
    if (facts == NULL ? wants == Py_False
                      : !facts->requires_grad ||
                            Py_IS_TYPE(tensor, (PyTypeObject *)st->Parameter)) {
        return Py_NewRef(tensor);
    }
    if (facts != NULL && is_exact(st, tensor) &&
        facts->device_type == self->device.type &&
        facts->device_index == self->device.index) {
        alias = oomkit_offload_empty(self, 0, 0);
        if (alias == NULL ||
            self->bridge->tensor_alias(tensor, st->impl_offset, alias) == OOMKIT_OK) {
            return STEAL(alias);
        }
    }
    return PyObject_CallMethodNoArgs(tensor, st->str_detach);
}

/* `facts` of a plain tensor, NULL of every other one. New reference or NULL. */
static PyObject *
packed_new(oomkit_offload *self, PyObject *tensor, const oomkit_storage_facts *facts)
{
    PyTypeObject *type = (PyTypeObject *)self->st->packed_type; /* borrowed */
    OWNED PyObject *made = type->tp_alloc(type, 0);
    packed *it = packed_CAST(made);

    if (it == NULL) {
        return NULL;
    }
    it->bridge = self->bridge;
    if (facts != NULL && is_exact(self->st, tensor) &&
        moved_for(self, tensor, facts, &it->moved) < 0) {
        return NULL;
    }
    if (it->moved == NULL) {
        const void *holder;
        it->tensor = without_graph(self, tensor, facts);
        holder = it->tensor;
        if (it->tensor == NULL) {
            return NULL;
        }
        it->bridge->versions(&holder, self->st->impl_offset, 1, &it->version, NULL,
                             NULL);
        return STEAL(made);
    }
    switch (it->bridge->form_make(tensor, self->st->impl_offset, &it->form)) {
    case OOMKIT_OK:
        return STEAL(made);
    case OOMKIT_EOOM:
        return PyErr_NoMemory();
    default:
        PyErr_SetString(PyExc_RuntimeError,
                        "torch does not report a tensor's form" SEE("internal-error"));
        return NULL;
    }
}

PyObject *
oomkit_pack(oomkit_offload *self, PyObject *tensor)
{
    oomkit_storage_facts facts;
    oomkit_thread_keys keys;
    PyObject *made; /* owned, returned */

    const oomkit_storage_facts *known = &facts;

    if (!oomkit_tensor_check(self->st, tensor)) {
        return Py_NewRef(tensor);
    }
    if (self->bridge->storage_facts(tensor, self->st->impl_offset, &facts) !=
        OOMKIT_OK) {
        known = NULL;
    }
    if (known == NULL || !is_exact(self->st, tensor)) {
        return packed_new(self, tensor, known); /* it may have code of its own */
    }
    self->bridge->unseen_enter(&keys);
    made = packed_new(self, tensor, known);
    self->bridge->unseen_leave(&keys);
    return made;
}

/* --- unpacking --- */

/* What torch looks for where there are no hooks. 0 or -1. */
static int
packed_check(oomkit_state *st, const packed *it)
{
    const void *holder = it->tensor;
    uint32_t then = it->version, now = it->version;

    if (it->form != NULL) {
        it->bridge->form_versions(it->form, &then, &now);
    } else if (holder != NULL) {
        it->bridge->versions(&holder, st->impl_offset, 1, &now, NULL, NULL);
    }
    if (now == then) {
        return 0;
    }
    PyErr_Format(PyExc_RuntimeError,
                 "one of the variables needed for gradient computation has been "
                 "modified by an inplace operation: it is at version %u; expected "
                 "version %u instead. Hint: enable anomaly detection to find the "
                 "operation that failed to compute its gradient, with "
                 "torch.autograd.set_detect_anomaly(True).",
                 (unsigned)now, (unsigned)then);
    return -1;
}

/* Brings the bytes back to the device. What holds them in *base (owned). 0 or -1. */
static int
moved_restore(oomkit_moved *moved, PyObject **base)
{
    oomkit_offload *self = moved->offload;
    OWNED PyObject *bytes =
        oomkit_offload_empty(self, moved->key.end - moved->key.begin, 0);
    OWNED PyObject *done =
        bytes == NULL
            ? NULL
            : PyObject_CallMethodOneArg(bytes, self->st->str_copy, moved->host);
    void *restored = NULL; /* owned */
    int status;

    if (done == NULL) {
        return -1;
    }
    status = self->bridge->restored_make(bytes, self->st->impl_offset, &restored);
    if (status == OOMKIT_EOOM) {
        PyErr_NoMemory();
        return -1;
    }
    if (status != OOMKIT_OK) {
        PyErr_SetString(
            PyExc_RuntimeError,
            "torch does not report a tensor's storage" SEE("internal-error"));
        return -1;
    }
    if (moved->restored != NULL) {
        self->bridge->restored_release(moved->restored);
    }
    moved->restored = restored;
    *base = STEAL(bytes);
    return 0;
}

/* The tensor anew, over the copy that is back already or over one more. New reference
 * or NULL. */
static PyObject *
packed_restore(packed *it)
{
    oomkit_moved *moved = it->moved; /* borrowed: the caller holds `it` */
    oomkit_offload *self = moved->offload;
    OWNED PyObject *target = oomkit_offload_empty(self, 0, 0);
    OWNED PyObject *base = NULL;
    int applied = 0;

    if (target == NULL) {
        return NULL;
    }
    if (moved->restored != NULL) {
        applied = self->bridge->restored_apply(
            moved->restored, it->form, moved->key.begin, target, self->st->impl_offset);
    }
    if (applied == 0) {
        if (moved_restore(moved, &base) < 0) {
            return NULL;
        }
        applied = self->bridge->restored_apply(
            moved->restored, it->form, moved->key.begin, target, self->st->impl_offset);
    }
    if (applied <= 0) {
        PyErr_SetString(PyExc_RuntimeError,
                        "a saved tensor could not be rebuilt" SEE("internal-error"));
        return NULL;
    }
    return STEAL(target);
}

PyObject *
oomkit_unpack(PyObject *module, PyObject *op)
{
    oomkit_state *st = oomkit_state_of_module(module);
    oomkit_thread_keys keys;
    packed *it = packed_CAST(op);
    PyObject *tensor; /* owned, returned */

    if (!Py_IS_TYPE(op, (PyTypeObject *)st->packed_type)) {
        return Py_NewRef(op);
    }
    if (packed_check(st, it) < 0) {
        return NULL;
    }
    if (it->tensor != NULL) {
        return Py_NewRef(it->tensor);
    }
    it->bridge->unseen_enter(&keys);
    tensor = packed_restore(it);
    it->bridge->unseen_leave(&keys);
    return tensor;
}

static void
packed_dealloc(PyObject *op)
{
    PyTypeObject *tp = Py_TYPE(op);
    packed *it = packed_CAST(op);
    oomkit_moved *moved = it->moved;

    it->moved = NULL;
    if (it->form != NULL) {
        it->bridge->form_release(it->form);
    }
    Py_CLEAR(it->tensor);
    if (moved != NULL) {
        moved_release(moved);
    }
    tp->tp_free(op);
    Py_DECREF(tp);
}

static PyType_Slot packed_slots[] = {
    {Py_tp_dealloc, packed_dealloc},
    {0, NULL},
};

/* No part in collections: only autograd holds it, of which the collector knows nothing.
 */
PyType_Spec oomkit_packed_spec = {
    .name = "oomkit._C._Packed",
    .basicsize = sizeof(packed),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = packed_slots,
};
