/* Plain state of a call: marked at the begin of an attempt, put back when that is
 * rolled back. Where it lies is the site's table, which holds none of the objects on
 * the way. */
#include "marks.h"
#include "../call/step.h"
#include "../py/modes.h"

/* --- marks --- */

static void
marks_clear(oomkit_plain_marks *marks)
{
    Py_ssize_t i, count = marks->count;

    marks->count = 0; /* first: a finaliser that runs here must see no half of it */
    marks->taken = 0;
    for (i = 0; i < count; i++) {
        oomkit_at_clear(&marks->items[i].at);
        oomkit_held_clear(&marks->items[i].old);
        oomkit_content_clear(&marks->items[i].content);
    }
}

/* One more, empty. NULL with MemoryError. */
static oomkit_plain_mark *
marks_add(oomkit_plain_marks *marks, Py_ssize_t node)
{
    if (ARRAY_GROW(marks->items, marks->count, marks->room) < 0) {
        return NULL;
    }
    memset(&marks->items[marks->count], 0, sizeof(oomkit_plain_mark));
    marks->items[marks->count].node = node;
    return &marks->items[marks->count++];
}

#define EACH 1024 /* looked at in one container */

/* Things in a container whose own content may change. 0 or -1. */
static int
mark_each(oomkit_call *call, oomkit_plain_marks *marks, Py_ssize_t node,
          PyObject *value, uint64_t *room)
{
    OWNED PyObject *list = NULL;
    Py_ssize_t i;
    int result = 0;

    if (PyDict_Check(value)) {
        list =
            marks->all || PyDict_GET_SIZE(value) <= EACH ? PyDict_Values(value) : NULL;
    } else if (PyList_Check(value) || PyTuple_Check(value)) {
        list = marks->all || PySequence_Fast_GET_SIZE(value) <= EACH
                   ? PySequence_List(value)
                   : NULL;
    }
    for (i = 0; list != NULL && result == 0 && i < PyList_GET_SIZE(list); i++) {
        PyObject *item = PyList_GET_ITEM(list, i); /* borrowed */
        oomkit_plain_mark *mark;
        if (oomkit_is_plain(item)) {
            continue;
        }
        mark = marks_add(marks, node);
        result = mark == NULL ? -1
                              : oomkit_content_take(call->st, item,
                                                    OOMKIT_PLAIN_CONTENT | marks->all,
                                                    room, &mark->content);
        if (mark != NULL) {
            mark->inside = 1;
        }
        if (result <= 0 && mark != NULL) {
            marks->count--;
        } else {
            result = 0;
        }
    }
    return PyErr_Occurred() ? -1 : result;
}

/* Marks what one node says. Takes *at. 0 or -1. */
static int
mark_node(oomkit_call *call, const oomkit_plain_site *site, oomkit_plain_marks *marks,
          Py_ssize_t i, oomkit_at *at, PyObject *value, uint64_t *room)
{
    int what = site->nodes[i].what | marks->all, taken = 0;
    oomkit_plain_mark *mark = marks_add(marks, i);

    if (mark == NULL) {
        oomkit_at_clear(at);
        return -1;
    }
    mark->at = *at;
    memset(at, 0, sizeof(*at));
    if ((what & OOMKIT_PLAIN_BIND) != 0 && mark->at.kind != OOMKIT_AT_NOTHING &&
        mark->at.kind != OOMKIT_AT_SEQUENCE) {
        if (oomkit_held_take(call->st, value, what, room, &mark->old) < 0) {
            return -1;
        }
        mark->bound = 1;
    }
    if (value != NULL && (what & (OOMKIT_PLAIN_CONTENT | OOMKIT_PLAIN_GROWS)) != 0) {
        taken = oomkit_content_take(call->st, value, what, room, &mark->content);
    }
    if (taken >= 0 && value != NULL && (what & OOMKIT_PLAIN_EACH) != 0) {
        taken = mark_each(call, marks, i, value, room);
    }
    return taken < 0 ? -1 : 0;
}

typedef struct taking {
    oomkit_call *call;
    const oomkit_plain_site *site;
    oomkit_plain_marks *marks;
    uint64_t room;
} taking;

static int
take_node(void *argument, Py_ssize_t i, oomkit_at *at, PyObject *value)
{
    taking *t = argument;

    return t->site->nodes[i].what == 0
               ? 0
               : mark_node(t->call, t->site, t->marks, i, at, value, &t->room);
}

static int
marks_take(oomkit_call *call, const oomkit_plain_site *site, oomkit_plain_marks *marks,
           uint64_t room)
{
    taking t = {call, site, marks, room};

    marks_clear(marks);
    marks->taken = oomkit_plain_walk(call, site, take_node, &t) == 0;
    if (!marks->taken) {
        KEEPING_EXCEPTION {
            marks_clear(marks);
        }
    }
    return marks->taken ? 0 : -1;
}

/* --- putting back --- */

/* A model or an optimizer that the step has made, where there was none: its parameters
 * take part from now on. */
static int
is_made(const oomkit_call *call, const oomkit_plain_mark *mark, PyObject *now)
{
    const oomkit_state *st = call->st;

    return now != NULL &&
           (mark->old.kind == OOMKIT_HELD_ABSENT || mark->old.address == Py_None) &&
           (PyObject_TypeCheck(now, (PyTypeObject *)st->Module) ||
            PyObject_TypeCheck(now, (PyTypeObject *)st->Optimizer) ||
            PyObject_TypeCheck(now, (PyTypeObject *)st->Parameter));
}

static int
restore_binding(oomkit_call *call, const oomkit_plain_mark *mark)
{
    OWNED PyObject *now = NULL, *old = NULL;

    if (oomkit_at_read(&mark->at, &now) < 0) {
        return -1;
    }
    if (oomkit_held_same(&mark->old, now)) {
        return 0;
    }
    if (is_made(call, mark, now)) {
        call->tries.keeps_made = 1;
        return 0;
    }
    old = oomkit_held_give(call, &mark->old);
    if (old == NULL && PyErr_Occurred()) {
        return -1;
    }
    if (old != NULL || mark->old.kind == OOMKIT_HELD_ABSENT) {
        return oomkit_at_write(&mark->at, old);
    }
    return mark->old.is_state;
}

/* The object whose content is marked. New reference; NULL where it is gone. */
static PyObject *
content_target(oomkit_call *call, const oomkit_plain_mark *mark)
{
    PyObject *now = NULL; /* owned */

    if (mark->content.target.kind != OOMKIT_HELD_ADDRESS) {
        return oomkit_held_give(call, &mark->content.target);
    }
    if (mark->at.kind != OOMKIT_AT_NOTHING && oomkit_at_read(&mark->at, &now) < 0) {
        return NULL;
    }
    if (now != NULL && now != mark->content.target.address &&
        Py_TYPE(now) != &PyList_Type && Py_TYPE(now) != &PyDict_Type) {
        Py_CLEAR(now);
    }
    return now;
}

static int
restore_content(oomkit_call *call, const oomkit_plain_mark *mark)
{
    OWNED PyObject *target = NULL;

    if (mark->content.kind == OOMKIT_CONTENT_NONE) {
        return 0;
    }
    target = content_target(call, mark);
    if (target == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    return oomkit_content_restore(call, &mark->content, target);
}

static int
marks_lost(oomkit_plain *plain, Py_ssize_t node)
{
    if (plain->lost == NULL && (plain->lost = PySet_New(NULL)) == NULL) {
        return -1;
    }
    return PySet_Add(plain->lost, plain->site->nodes[node].name);
}

/* What names lead to first: contents are put into what stands there then. Of one place,
 * or (-1) of all. 0 or -1. */
static int
marks_restore(oomkit_call *call, oomkit_plain *plain, const oomkit_plain_marks *marks,
              Py_ssize_t node)
{
    Py_ssize_t i;
    int lost = 0, round;

    for (round = 0; round < 2; round++) {
        for (i = 0; i < marks->count; i++) {
            const oomkit_plain_mark *mark = &marks->items[i];
            if (node >= 0 && mark->node != node) {
                continue;
            }
            lost = round == 1    ? restore_content(call, mark)
                   : mark->bound ? restore_binding(call, mark)
                                 : 0;
            if (lost < 0 || (lost > 0 && marks_lost(plain, mark->node) < 0)) {
                return -1;
            }
        }
    }
    return 0;
}

int
oomkit_plain_restore(oomkit_call *call)
{
    oomkit_plain *plain = call->entry.plain;

    if (plain == NULL) {
        return 0;
    }
    if (plain->keep) {
        return marks_restore(call, plain, &plain->part, -1);
    }
    return plain->entry.taken ? marks_restore(call, plain, &plain->entry, -1) : 0;
}

int
oomkit_plain_node_back(oomkit_call *call, Py_ssize_t node)
{
    return marks_restore(call, call->entry.plain, &call->entry.plain->entry, node);
}

int
oomkit_plain_node_set(oomkit_call *call, Py_ssize_t node, PyObject *value)
{
    const oomkit_plain_marks *marks = &call->entry.plain->entry;
    Py_ssize_t i;

    for (i = 0; i < marks->count; i++) {
        const oomkit_plain_mark *mark = &marks->items[i];
        if (mark->node == node && mark->bound && !mark->inside &&
            oomkit_at_write(&mark->at, value) < 0) {
            return -1;
        }
    }
    return 0;
}

/* See oomkit_plain_node_moved(). */
static int
mark_moved(oomkit_call *call, const oomkit_plain_mark *mark, PyObject *now)
{
    const oomkit_content *content = &mark->content;
    OWNED PyObject *target = NULL;
    int moved;

    if (mark->bound && !oomkit_held_same(&mark->old, now)) {
        return mark->old.kind == OOMKIT_HELD_ABSENT || mark->old.address == Py_None ||
                       now == NULL
                   ? 3
                   : 1;
    }
    if (content->kind == OOMKIT_CONTENT_NONE) {
        return 0;
    }
    target = content_target(call, mark);
    moved = target != NULL ? oomkit_content_moved(call->st, content, target) : 0;
    if (PyErr_Occurred() || moved <= 0) {
        return PyErr_Occurred() ? -1 : 0;
    }
    return content->kind == OOMKIT_CONTENT_LENGTH ||
                   (PyList_Check(target) &&
                    PyList_GET_SIZE(target) != content->count) ||
                   (PyDict_Check(target) && PyDict_GET_SIZE(target) != content->count)
               ? 2
               : 1;
}

int
oomkit_plain_node_moved(oomkit_call *call, Py_ssize_t node, PyObject **value)
{
    const oomkit_plain_marks *marks = &call->entry.plain->entry;
    Py_ssize_t i;
    int moved = 0;

    *value = NULL;
    for (i = 0; moved >= 0 && i < marks->count; i++) {
        const oomkit_plain_mark *mark = &marks->items[i];
        int by;
        if (mark->node != node) {
            continue;
        }
        if (*value == NULL && !mark->inside) {
            if (mark->at.kind != OOMKIT_AT_NOTHING &&
                oomkit_at_read(&mark->at, value) < 0) {
                return -1;
            }
            if (mark->at.kind == OOMKIT_AT_NOTHING) {
                *value = content_target(call, mark);
            }
        }
        by = PyErr_Occurred() ? -1 : mark_moved(call, mark, *value);
        moved = by < 0 || by > moved ? by : moved;
    }
    return moved;
}

/* --- the call --- */

#define SPARE_ROOM 64

static oomkit_plain *
plain_new(oomkit_plain_site *site)
{
    oomkit_plain *plain = site->spare;

    site->spare = NULL;
    if (plain == NULL) {
        plain = PyMem_Calloc(1, sizeof(*plain));
    }
    if (plain == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    plain->site = site;
    site->refs++;
    return plain;
}

/* An empty one stays for the next call of the site. */
void
oomkit_plain_release(oomkit_savepoint *savepoint)
{
    oomkit_plain *plain = savepoint->plain;
    oomkit_plain_site *site;

    if (plain == NULL) {
        return;
    }
    savepoint->plain = NULL; /* first: a finaliser that runs here must see none */
    site = plain->site;
    marks_clear(&plain->entry);
    marks_clear(&plain->part);
    Py_CLEAR(plain->lost);
    plain->entry.all = plain->keep = 0;
    plain->site = NULL;
    if (site->spare == NULL && plain->entry.room <= SPARE_ROOM) {
        site->spare = plain;
    } else {
        oomkit_plain_drop(plain);
    }
    oomkit_plain_site_release(site);
}

void
oomkit_plain_drop(oomkit_plain *plain)
{
    if (plain != NULL) {
        PyMem_Free(plain->entry.items);
        PyMem_Free(plain->part.items);
        PyMem_Free(plain);
    }
}

/* Large things are copied where the site knows that it may have to put them back. */
static uint64_t
plain_room(const oomkit_call *call)
{
    return call->tries.ooms > 0 || call->step->seen_oom || call->options->optimizer_copy
               ? OOMKIT_PLAIN_ROOM
               : 0;
}

int
oomkit_plain_begin(oomkit_call *call)
{
    oomkit_plain_site *site = call->given.places->site;
    oomkit_plain *plain = call->entry.plain;

    if (call->tries.ooms > 0 && call->given.places->looked == 1 && plain == NULL) {
        if (oomkit_plain_find(call, 1) < 0) {
            return -1;
        }
        site = call->given.places->site;
    }
    if (plain == NULL) {
        if (site == NULL || site->count == 0) {
            return 0;
        }
        plain = call->entry.plain = plain_new(site);
        if (plain == NULL) {
            return -1;
        }
    }
    if (plain->keep && plain->entry.taken) {
        plain->keep = 0;
        return marks_take(call, plain->site, &plain->part, plain_room(call));
    }
    plain->keep = 0;
    return marks_take(call, plain->site, &plain->entry, plain_room(call));
}

int
oomkit_plain_begin_part(oomkit_call *call)
{
    return call->entry.plain == NULL || !call->entry.plain->entry.taken
               ? 0
               : marks_take(call, call->entry.plain->site, &call->entry.plain->part,
                            plain_room(call));
}

void
oomkit_plain_keep(oomkit_call *call, int keep)
{
    if (call->entry.plain != NULL) {
        call->entry.plain->keep = keep && call->entry.plain->part.taken;
    }
}

void
oomkit_plain_give_up(oomkit_call *call)
{
    PyObject *exception; /* owned, given back */
    int mode;

    if (call->entry.plain == NULL || !call->entry.plain->keep) {
        return;
    }
    call->entry.plain->keep = 0;
    exception = oomkit_exception_take();
    EXEMPT (call->st) {
        mode = oomkit_grad_mode_off(call->st);
        if (mode < 0 ||
            oomkit_grad_mode_back(call->st, mode, oomkit_plain_restore(call)) < 0) {
            oomkit_error_unraised(call->given.func); /* the first one tells more */
        }
    }
    oomkit_exception_give(exception);
}

void
oomkit_plain_end_attempt(oomkit_call *call)
{
    if (call->entry.plain == NULL) {
        return;
    }
    marks_clear(&call->entry.plain->part);
    if (!call->entry.plain->keep) {
        oomkit_plain_release(&call->entry);
    }
}

int
oomkit_plain_now(oomkit_call *call, const oomkit_after *Py_UNUSED(after),
                 oomkit_savepoint *now)
{
    oomkit_plain_site *site =
        call->entry.plain != NULL ? call->entry.plain->site : call->given.places->site;
    oomkit_plain *plain; /* owned, then by the savepoint */

    now->plain = NULL;
    if (site == NULL || site->count == 0) {
        return 0;
    }
    now->plain = plain = plain_new(site);
    if (plain == NULL) {
        return -1;
    }
    plain->entry.all = OOMKIT_PLAIN_ALL;
    return marks_take(call, site, &plain->entry, OOMKIT_PLAIN_ROOM) == 0 ? 0 : -1;
}

int
oomkit_plain_back(oomkit_call *call, const oomkit_savepoint *now,
                  int Py_UNUSED(finished))
{
    oomkit_plain *plain = now->plain; /* borrowed */

    return plain == NULL || !plain->entry.taken
               ? 0
               : marks_restore(call, plain, &plain->entry, -1);
}
