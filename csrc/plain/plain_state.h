/* Plain state of the user's: counters, lists, metrics, tensors that are nobody's
 * parameters. A table of places is made by oomkit/_code/plain_state.py from the code of
 * the step; each attempt marks what is there and puts it back when it is rolled back.
 */
#ifndef OOMKIT_PLAIN_PLAIN_STATE_H
#define OOMKIT_PLAIN_PLAIN_STATE_H

#include "../call/call_types.h"

/* How a place is reached from the one before it; the numbers are those of
 * _code/spots.py. */
typedef enum {
    OOMKIT_PLAIN_ARGUMENT = 0, /* key: position */
    OOMKIT_PLAIN_KEYWORD,      /* key: name */
    OOMKIT_PLAIN_OBJECT,       /* key: the object, or a weak reference to it */
    OOMKIT_PLAIN_CELL,         /* key: the cell */
    OOMKIT_PLAIN_ATTRIBUTE,    /* key: name */
    OOMKIT_PLAIN_ITEM,         /* key: of a dict, or index of a list or tuple */
    OOMKIT_PLAIN_SWITCH        /* key: what reads and what writes it */
} oomkit_plain_kind;

/* What is marked of it; the numbers are those of _code/plain_state.py. */
enum {
    OOMKIT_PLAIN_BIND = 1,    /* what it leads to */
    OOMKIT_PLAIN_CONTENT = 2, /* what that holds */
    OOMKIT_PLAIN_GROWS = 4,   /* a list that things are appended to */
    OOMKIT_PLAIN_EACH = 8,    /* what the things in it hold */
    OOMKIT_PLAIN_FLOWS = 32,  /* goes on from one micro-batch to the next: a metric's */
    OOMKIT_PLAIN_ALL = 16     /* whatever it costs; not in the table */
};

/* --- held_value.c: one value, held so that nothing large lives longer for it --- */

typedef enum {
    OOMKIT_HELD_ABSENT = 0,
    OOMKIT_HELD_STRONG, /* value is it */
    OOMKIT_HELD_WEAK,   /* value is a weak reference to it, copy a copy or NULL */
    OOMKIT_HELD_ADDRESS /* not held */
} oomkit_held_kind;

typedef struct oomkit_held {
    PyObject *value;     /* owned, or NULL */
    PyObject *copy;      /* owned tensor, or NULL */
    PyObject *device;    /* owned: where the copy belongs; NULL: where it is */
    const void *address; /* borrowed, compared only */
    uint8_t kind;        /* oomkit_held_kind */
    uint8_t has_graph;   /* which the copy has not */
    uint8_t is_leaf;     /* it requires a gradient, which the copy does not */
    uint8_t is_state; /* not there any more, it is missed: a tensor without a graph */
} oomkit_held;

/* `value` may be NULL. `what`: with OOMKIT_PLAIN_ALL it stays alive, unless it is a
 * tensor, which is copied. *room: bytes that copies of large tensors may take, 0 for
 * none. 0 or -1. */
int
oomkit_held_take(oomkit_state *st, PyObject *value, int what, uint64_t *room,
                 oomkit_held *held);
/* Is it what it was? `now` may be NULL. Runs no Python code. */
int
oomkit_held_same(const oomkit_held *held, const PyObject *now);
/* The value. New reference; NULL without an exception where it is gone or was absent.
 */
PyObject *
oomkit_held_give(oomkit_call *call, const oomkit_held *held);
void
oomkit_held_clear(oomkit_held *held);
int
oomkit_is_array(const PyTypeObject *type);

#define OOMKIT_PLAIN_SMALL (1u << 16) /* bytes: copied in every call */
#define OOMKIT_PLAIN_ROOM (1u << 28)  /* bytes of copies of what is larger */

/* --- content.c: what a container, a tensor or an array holds --- */

typedef enum {
    OOMKIT_CONTENT_NONE = 0,
    OOMKIT_CONTENT_LIST,
    OOMKIT_CONTENT_LENGTH, /* of a list: what comes behind it is new */
    OOMKIT_CONTENT_DICT,
    OOMKIT_CONTENT_SET,
    OOMKIT_CONTENT_DEQUE,
    OOMKIT_CONTENT_TENSOR,
    OOMKIT_CONTENT_ARRAY
} oomkit_content_kind;

typedef struct oomkit_content {
    oomkit_held target;
    oomkit_held *items; /* of a container */
    PyObject **keys;    /* owned: of a dict */
    Py_ssize_t count;
    void *bytes; /* of a small tensor or array */
    uint64_t size;
    uint64_t sample; /* of a tensor: see the bridge */
    PyObject *copy;  /* owned: of another one, or NULL */
    uint32_t version;
    uint8_t kind; /* oomkit_content_kind */
} oomkit_content;

/* 1 there is something to mark, 0 there is not, -1. */
int
oomkit_content_take(oomkit_state *st, PyObject *value, int what, uint64_t *room,
                    oomkit_content *content);
/* Puts it back into `target` (borrowed). 0; 1 it cannot be; -1. */
int
oomkit_content_restore(oomkit_call *call, const oomkit_content *content,
                       PyObject *target);
/* Is another content in `target`? 1, 0 or -1. */
int
oomkit_content_moved(oomkit_state *st, const oomkit_content *content, PyObject *target);
/* Memory without gaps, of numbers: 1 and *view, 0 it has none, -1. */
int
oomkit_array_view(PyObject *array, int flags, Py_buffer *view);
void
oomkit_content_clear(oomkit_content *content);

/* --- place.c: reading and writing a place --- */

typedef enum {
    OOMKIT_AT_NOTHING = 0,
    OOMKIT_AT_DICT,
    OOMKIT_AT_CELL,
    OOMKIT_AT_TYPE,
    OOMKIT_AT_SLOT,    /* key: the descriptor */
    OOMKIT_AT_SWITCH,  /* of torch's; holder: what reads and what writes it */
    OOMKIT_AT_SEQUENCE /* read only */
} oomkit_at_kind;

typedef struct oomkit_at {
    PyObject *holder; /* owned */
    PyObject *key;    /* owned, or NULL */
    uint8_t kind;     /* oomkit_at_kind */
} oomkit_at;

/* Where an attribute of `owner` lies: *at, whose references are owned. 0 or -1. */
int
oomkit_at_attribute(oomkit_state *st, PyObject *owner, PyObject *name, oomkit_at *at);
int
oomkit_at_item(PyObject *owner, PyObject *key, oomkit_at *at);
void
oomkit_at_clear(oomkit_at *at);
/* *value (owned) is what is there, NULL for nothing. 0 or -1. */
int
oomkit_at_read(const oomkit_at *at, PyObject **value);
/* NULL takes it away. 0 or -1. */
int
oomkit_at_write(const oomkit_at *at, PyObject *value);

/* --- plain_state.c --- */

typedef struct oomkit_plain_node {
    PyObject *key;  /* owned */
    PyObject *name; /* owned str */
    Py_ssize_t parent;
    uint8_t kind, what;
} oomkit_plain_node;

/* What the site's code leads to. Counted by hand: the step has one reference, each call
 * in progress another. */
typedef struct oomkit_plain_site {
    Py_ssize_t refs;
    oomkit_plain_node *nodes;
    Py_ssize_t count;
    struct oomkit_plain *spare; /* marks of no call, for the next one, or NULL */
    PyObject *streams;          /* owned tuple of random generators */
    PyObject *said;             /* owned set of names that could not be put back */
} oomkit_plain_site;

/* When the participants were searched, and once `again`, when what the first call makes
 * may be there: what was found before stays. 0 or -1. */
int
oomkit_plain_find(oomkit_call *call, int again);

/* At the begin of an attempt. 0 or -1. */
int
oomkit_plain_begin(oomkit_call *call);
/* Marks the present state beside that of the entry: finished parts are kept if what
 * follows fails. 0 or -1. */
int
oomkit_plain_begin_part(oomkit_call *call);
/* The roll-back that comes keeps finished parts. */
void
oomkit_plain_keep(oomkit_call *call, int keep);
/* It did, and there is no next attempt: all of it goes back. Keeps the exception in
 * flight. */
void
oomkit_plain_give_up(oomkit_call *call);
int
oomkit_plain_restore(oomkit_call *call);
/* Does something else lie in one place of the site than when the attempt began? *value
 * (owned) is what is there, or NULL. 3: there was nothing, or None; 2: it has another
 * length; 1, 0 or -1. */
int
oomkit_plain_node_moved(oomkit_call *call, Py_ssize_t node, PyObject **value);
/* One place as it was at the begin of the attempt; what cannot be is among those that
 * oomkit_plain_say() names. 0 or -1. */
int
oomkit_plain_node_back(oomkit_call *call, Py_ssize_t node);
/* A number of one place, which was another one when the attempt began. 0 or -1. */
int
oomkit_plain_node_set(oomkit_call *call, Py_ssize_t node, PyObject *value);
/* After a roll-back: names what could not be put back. 0, or -1 with a warning that is
 * an error. */
int
oomkit_plain_say(oomkit_call *call);
void
oomkit_plain_end_attempt(oomkit_call *call);

/* Marks that wait for the caller's backward let go of where they lie, and of what may
 * lead to its loss; where they lie is looked for again once they are a call's. 0 or -1.
 */
int
oomkit_plain_slim(const oomkit_state *st, oomkit_savepoint *savepoint);
int
oomkit_plain_find_again(oomkit_call *call);
/* Of a savepoint that goes, or goes on without. */
void
oomkit_plain_release(oomkit_savepoint *savepoint);
/* One that is empty. */
void
oomkit_plain_drop(struct oomkit_plain *plain);
/* Beside a replay (undo/savepoint.c): marks of the present state, whatever they cost.
 */
int
oomkit_plain_now(oomkit_call *call, const oomkit_after *after, oomkit_savepoint *now);
int
oomkit_plain_back(oomkit_call *call, const oomkit_savepoint *now, int finished);

void
oomkit_plain_site_release(oomkit_plain_site *site);
/* What was found for one is that of another, too: NULL for nothing. */
void
oomkit_plain_share(oomkit_plain_found *to, const oomkit_plain_found *from);
int
oomkit_plain_site_traverse(oomkit_plain_site *site, visitproc visit, void *arg);

#endif
