/* Sets of addresses: open addressing, at most half full. Lists of pairs. Arrays. */
#include "state.h"

#include <stddef.h>

int
oomkit_array_grow(void *items, Py_ssize_t *room, size_t size)
{
    const Py_ssize_t first = size > 64 ? 4 : 8; /* no more than pymalloc takes */
    Py_ssize_t wanted = *room == 0 ? first : *room * 2;
    void *old, *grown;

    memcpy(&old, items, sizeof(old)); /* a pointer of any type */
    grown = PyMem_Realloc(old, (size_t)wanted * size);
    if (grown == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(items, &grown, sizeof(grown));
    *room = wanted;
    return 0;
}

int
oomkit_array_grow_first(void *items, Py_ssize_t *room, size_t size, void *first,
                        Py_ssize_t first_room)
{
    void *old, *grown = first;

    memcpy(&old, items, sizeof(old)); /* a pointer of any type */
    if (old != NULL && old != first) {
        return oomkit_array_grow(items, room, size);
    }
    if (old == first) {
        grown = PyMem_Malloc((size_t)first_room * 2 * size);
        if (grown == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        memcpy(grown, first, (size_t)first_room * size);
    }
    memcpy(items, &grown, sizeof(grown));
    *room = old == first ? first_room * 2 : first_room;
    return 0;
}

/* In front of the memory: how much it is. */
typedef union {
    size_t bytes;
    max_align_t all;
} spare_head;

void *
oomkit_spare_take(void **spare, size_t bytes)
{
    spare_head *head = *spare; /* owned, then by the caller */

    if (head == NULL || head->bytes != bytes) {
        head = PyMem_Malloc(sizeof(*head) + bytes);
        if (head == NULL) {
            return NULL;
        }
        head->bytes = bytes;
    } else {
        *spare = NULL;
    }
    return head + 1;
}

void
oomkit_spare_give(void **spare, void *memory)
{
    if (memory != NULL) {
        PyMem_Free(*spare); /* of another size, or NULL */
        *spare = (spare_head *)memory - 1;
    }
}

/* Where the search for an address begins: objects lie at multiples of 16. */
static size_t
addresses_home(const oomkit_addresses *set, const PyObject *object)
{
    uint64_t hash = (uint64_t)(uintptr_t)object * 0x9e3779b97f4a7c15u;
    return (size_t)(hash >> 32) & set->mask;
}

/* The place of an address, or the free one where it belongs. */
static size_t
addresses_place(const oomkit_addresses *set, const PyObject *object)
{
    size_t at = addresses_home(set, object);

    while (set->slots[at] != NULL && set->slots[at] != object) {
        at = (at + 1) & set->mask;
    }
    return at;
}

int
oomkit_addresses_fill(oomkit_addresses *set, PyObject *const *objects, Py_ssize_t count)
{
    size_t room = 8;
    Py_ssize_t i;

    while (room < (size_t)count * 2) {
        room *= 2;
    }
    set->slots = PyMem_Calloc(room, sizeof(*set->slots));
    if (set->slots == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    set->mask = room - 1;
    for (i = 0; i < count; i++) {
        set->slots[addresses_place(set, objects[i])] = objects[i];
    }
    return 0;
}

int
oomkit_addresses_have(const oomkit_addresses *set, const PyObject *object)
{
    return set->slots[addresses_place(set, object)] != NULL;
}

void
oomkit_addresses_free(oomkit_addresses *set)
{
    PyMem_Free(set->slots);
    set->slots = NULL;
}

/* --- objects with what was saved of each --- */

int
oomkit_memo_add(oomkit_memo **memo, PyObject *object, PyObject *saved)
{
    OWNED PyObject *kept = saved;
    oomkit_memo *m = *memo;

    if (kept == NULL) {
        return -1;
    }
    if (m == NULL) {
        m = PyMem_Malloc(sizeof(*m));
        if (m == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        m->items = m->first;
        m->room = (Py_ssize_t)(sizeof(m->first) / sizeof(m->first[0]));
        m->count = 0;
        m->holders = 1;
        *memo = m;
    }
    if (ARRAY_GROW_FIRST(m->items, m->count, m->room, m->first) < 0) {
        return -1;
    }
    m->items[m->count].object = Py_NewRef(object);
    m->items[m->count++].saved = STEAL(kept);
    return 0;
}

Py_ssize_t
oomkit_memo_at(const oomkit_memo *memo, const PyObject *object)
{
    Py_ssize_t i = memo == NULL ? 0 : memo->count;

    while (i-- > 0 && memo->items[i].object != object) {
    }
    return i;
}

PyObject *
oomkit_memo_find(const oomkit_memo *memo, const PyObject *object)
{
    Py_ssize_t at = oomkit_memo_at(memo, object);

    return at < 0 ? NULL : memo->items[at].saved;
}

oomkit_memo *
oomkit_memo_hold(oomkit_memo *memo)
{
    if (memo != NULL) {
        memo->holders++;
    }
    return memo;
}

void
oomkit_memo_let_go(oomkit_memo *m)
{
    if (--m->holders > 0) {
        return;
    }
    for (Py_ssize_t i = 0; i < m->count; i++) {
        Py_DECREF(m->items[i].object);
        Py_DECREF(m->items[i].saved);
    }
    if (m->items != m->first) {
        PyMem_Free(m->items);
    }
    PyMem_Free(m);
}

int
oomkit_memo_visit(const oomkit_memo *memo, visitproc visit, void *arg)
{
    for (Py_ssize_t i = 0; memo != NULL && memo->holders == 1 && i < memo->count; i++) {
        Py_VISIT(memo->items[i].object);
        Py_VISIT(memo->items[i].saved);
    }
    return 0;
}

int
oomkit_memo_next(oomkit_memo_walk *walk)
{
    Py_CLEAR(walk->object);
    Py_CLEAR(walk->saved);
    if (walk->memo == NULL || walk->next >= walk->memo->count) {
        return 0;
    }
    walk->object = Py_NewRef(walk->memo->items[walk->next].object);
    walk->saved = Py_NewRef(walk->memo->items[walk->next++].saved);
    return 1;
}

void
oomkit_memo_end(oomkit_memo_walk *walk)
{
    Py_CLEAR(walk->object);
    Py_CLEAR(walk->saved);
    oomkit_memo_drop(&walk->memo);
}
