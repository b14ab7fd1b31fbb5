/* Who lets go of what: references and memory of one scope, sets of addresses, objects
 * with what was saved of them. */
#ifndef OOMKIT_PY_REFS_H
#define OOMKIT_PY_REFS_H

#include "compat.h"

#define OOMKIT_JOINED_(a, b) a##b
#define OOMKIT_JOINED(a, b) OOMKIT_JOINED_(a, b)
#define OOMKIT_AT_END(function) __attribute__((cleanup(function)))

/* `OWNED PyObject *name = ...;` is a reference of this scope: it is dropped where the
 * scope is left, by whichever way, after the value of a return has been computed. So
 * each has a value from the start (NULL, if nothing else), and what must be gone sooner
 * (memory of a failed attempt, before more is asked for) is still cleared by hand. */
#define OWNED OOMKIT_AT_END(oomkit_owned_drop)

static inline void
oomkit_owned_drop(PyObject **object)
{
    Py_XDECREF(*object);
}

/* The same for memory of PyMem_Malloc(). */
#define OWNED_MEMORY OOMKIT_AT_END(oomkit_owned_free)

static inline void
oomkit_owned_free(void *pointer)
{
    void *memory;
    memcpy(&memory, pointer, sizeof(memory)); /* a pointer of any type */
    PyMem_Free(memory);
}

/* PyMem_Free() and NULL, as Py_CLEAR() does it. What a healthy call has none of costs
 * no call. */
#define MEMORY_CLEAR(pointer)                                                          \
    do {                                                                               \
        if ((pointer) != NULL) {                                                       \
            void *memory_ = (pointer);                                                 \
            (pointer) = NULL;                                                          \
            PyMem_Free(memory_);                                                       \
        }                                                                              \
    } while (0)

/* An OWNED reference goes to the caller, or to what steals it: `return STEAL(name);`.
 */
#define STEAL(name) oomkit_owned_steal(&(name))

static inline PyObject *
oomkit_owned_steal(PyObject **object)
{
    PyObject *stolen = *object; /* owned by the caller now */
    *object = NULL;
    return stolen;
}

/* `KEEPING_EXCEPTION { ... }`: the exception in flight is aside while the block runs,
 * and back in flight after it, whichever way it is left. It takes the place of one that
 * the block raises; where none was in flight, that one stays. */
#define KEEPING_EXCEPTION                                                              \
    for (oomkit_kept_exception OOMKIT_JOINED(kept_, __LINE__)                          \
             OOMKIT_AT_END(oomkit_kept_back) = {oomkit_exception_take(), 1};           \
         OOMKIT_JOINED(kept_, __LINE__).once; OOMKIT_JOINED(kept_, __LINE__).once = 0)

typedef struct oomkit_kept_exception {
    PyObject *exception; /* owned, or NULL */
    int once;
} oomkit_kept_exception;

static inline void
oomkit_kept_back(oomkit_kept_exception *kept)
{
    if (kept->exception != NULL) {
        oomkit_exception_give(kept->exception);
    }
}

/* `items` has room for one more than `count`: `if (ARRAY_GROW(a->items, a->count,
 * a->room) < 0)`. 0, or -1 with MemoryError, and the array is as it was. */
#define ARRAY_GROW(items, count, room)                                                 \
    ((count) < (room) ? 0 : oomkit_array_grow(&(items), &(room), sizeof(*(items))))

int
oomkit_array_grow(void *items, Py_ssize_t *room, size_t size);

/* The same where the first items lie in `first`, an array beside the pointer, which is
 * NULL before: what a healthy call has but one of costs no memory. */
#define ARRAY_GROW_FIRST(items, count, room, first)                                    \
    ((count) < (room)                                                                  \
         ? 0                                                                           \
         : oomkit_array_grow_first(&(items), &(room), sizeof(*(items)), (first),       \
                                   sizeof(first) / sizeof(*(first))))

int
oomkit_array_grow_first(void *items, Py_ssize_t *room, size_t size, void *first,
                        Py_ssize_t first_room);

/* There are no items any more. */
#define ARRAY_FREE_FIRST(items, room, first)                                           \
    do {                                                                               \
        void *memory_ = (items) == (first) ? NULL : (items);                           \
        (items) = NULL;                                                                \
        (room) = 0;                                                                    \
        if (memory_ != NULL) {                                                         \
            PyMem_Free(memory_);                                                       \
        }                                                                              \
    } while (0)

/* Memory that each call needs and gives back: the next one finds it in `spare`, if it
 * is of the same size. A block of a KiB or more that is made and freed in each call
 * makes malloc() merge all small ones each time, for which the caller's own code pays.
 * NULL without MemoryError. */
void *
oomkit_spare_take(void **spare, size_t bytes);

/* `memory` is one of these, or NULL; it becomes NULL. What is left in `spare` is freed
 * by PyMem_Free(). */
#define SPARE_GIVE(spare, memory) (oomkit_spare_give(&(spare), memory), (memory) = NULL)

void
oomkit_spare_give(void **spare, void *memory);

/* A set of addresses that are only ever compared: which of thousands of nodes is a
 * parameter? Filled once, for one walk. */
typedef struct oomkit_addresses {
    const PyObject **slots; /* borrowed addresses; a power of two of places, or NULL */
    size_t mask;            /* one less than that */
} oomkit_addresses;

/* Fills an empty (zeroed) set. 0, or -1 with MemoryError. */
int
oomkit_addresses_fill(oomkit_addresses *set, PyObject *const *objects,
                      Py_ssize_t count);

int
oomkit_addresses_have(const oomkit_addresses *set, const PyObject *object);

void
oomkit_addresses_free(oomkit_addresses *set);

/* Objects, each with what was saved of it, in the order in which they came. NULL is an
 * empty one. */
typedef struct oomkit_memo_item {
    PyObject *object, *saved; /* owned */
} oomkit_memo_item;

typedef struct oomkit_memo {
    oomkit_memo_item *items; /* the first ones lie in the memo itself */
    Py_ssize_t count, room;
    Py_ssize_t holders;
    oomkit_memo_item first[4];
} oomkit_memo;

/* Adds to one that is made when needed. Steals `saved`, which may be NULL with an
 * exception. 0 or -1. */
int
oomkit_memo_add(oomkit_memo **memo, PyObject *object, PyObject *saved);

/* The place of an object, or -1. */
Py_ssize_t
oomkit_memo_at(const oomkit_memo *memo, const PyObject *object);

/* What was saved of it, borrowed; NULL when it is not there. */
PyObject *
oomkit_memo_find(const oomkit_memo *memo, const PyObject *object);

/* The same one, held once more; each holder drops it. */
oomkit_memo *
oomkit_memo_hold(oomkit_memo *memo);
void
oomkit_memo_let_go(oomkit_memo *memo);

static inline void
oomkit_memo_drop(oomkit_memo **memo) /* what a healthy call has none of costs no call */
{
    oomkit_memo *held = *memo;

    if (held != NULL) {
        *memo = NULL;
        oomkit_memo_let_go(held);
    }
}

/* For tp_traverse: one that has another holder is alive. */
int
oomkit_memo_visit(const oomkit_memo *memo, visitproc visit, void *arg);

/* `EACH_MEMO(one, memo) { ... one.object ... one.saved ... }`: both are held while the
 * block runs, which may be left in any way. */
typedef struct oomkit_memo_walk {
    oomkit_memo *memo; /* held */
    Py_ssize_t next;
    PyObject *object, *saved; /* owned */
} oomkit_memo_walk;

int
oomkit_memo_next(oomkit_memo_walk *walk);
void
oomkit_memo_end(oomkit_memo_walk *walk);

#define EACH_MEMO(walk, of)                                                            \
    for (oomkit_memo_walk walk OOMKIT_AT_END(                                          \
             oomkit_memo_end) = {.memo = oomkit_memo_hold(of)};                        \
         oomkit_memo_next(&walk);)

#endif
