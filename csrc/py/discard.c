/* Dropping an exception so that nothing which it reached stays alive.
 *
 * A traceback holds frames, and frames hold tensors. Four kinds of link can keep them:
 * the traceback, __cause__ and __context__, members of a group, and exceptions stored
 * as attributes (`.inner_exception`). Any of them can lead back to where it came from,
 * or to the exception that the caller is handling, which is not ours to strip. */
#include "errors.h"

#define LIST_INLINE 32

/* Exceptions, each once. Nothing here fails: what no memory can be had for is left out.
 */
typedef struct exception_list {
    PyObject *inline_items[LIST_INLINE];
    PyObject **items; /* owned references */
    Py_ssize_t count, room;
    int incomplete;
} exception_list;

static void
list_init(exception_list *list)
{
    list->items = list->inline_items;
    list->count = 0;
    list->room = LIST_INLINE;
    list->incomplete = 0;
}

/* Can run Python code (finalisers). */
static void
list_clear(exception_list *list)
{
    while (list->count > 0) {
        Py_DECREF(list->items[--list->count]);
    }
    if (list->items != list->inline_items) {
        PyMem_Free(list->items);
    }
}

static int
list_has(const exception_list *list, PyObject *exception)
{
    Py_ssize_t i;
    for (i = 0; i < list->count; i++) {
        if (list->items[i] == exception) {
            return 1;
        }
    }
    return 0;
}

static int
list_grow(exception_list *list)
{
    PyObject **grown; /* as items */
    size_t bytes = (size_t)list->room * 2 * sizeof(*grown);

    if (list->items == list->inline_items) {
        grown = PyMem_Malloc(bytes);
        if (grown != NULL) {
            memcpy(grown, list->items, (size_t)list->count * sizeof(*grown));
        }
    } else {
        grown = PyMem_Realloc(list->items, bytes);
    }
    if (grown == NULL) {
        list->incomplete = 1;
        return -1;
    }
    list->items = grown;
    list->room *= 2;
    return 0;
}

/* Adds `object` (borrowed, may be NULL) when it is an exception that is neither in
 * `list` nor in `kept` (which may be NULL). */
static void
list_add(exception_list *list, PyObject *object, const exception_list *kept)
{
    if (object == NULL || !PyExceptionInstance_Check(object) ||
        list_has(list, object) || (kept != NULL && list_has(kept, object))) {
        return;
    }
    if (list->count == list->room && list_grow(list) < 0) {
        return;
    }
    list->items[list->count++] = Py_NewRef(object);
}

/* Adds what `exception` links to. Runs no Python code. */
static void
list_add_links(exception_list *list, PyObject *exception, const exception_list *kept)
{
    const PyBaseExceptionObject *base = (PyBaseExceptionObject *)exception;
    PyObject *key, *value, *members; /* borrowed from exception */
    Py_ssize_t at = 0;

    list_add(list, base->cause, kept);
    list_add(list, base->context, kept);
    while (base->dict != NULL && PyDict_Next(base->dict, &at, &key, &value)) {
        list_add(list, value, kept);
    }
    if (!PyObject_TypeCheck(exception, (PyTypeObject *)PyExc_BaseExceptionGroup)) {
        return;
    }
    members = ((PyBaseExceptionGroupObject *)exception)->excs;
    for (at = 0; members != NULL && at < PyTuple_GET_SIZE(members); at++) {
        list_add(list, PyTuple_GET_ITEM(members, at), kept);
    }
}

/* Fills `list` with everything that can be reached from `root`, which may be NULL. With
 * a list of what to keep that is incomplete, links are not followed: anything beyond
 * might have to be kept. */
static void
list_collect(exception_list *list, PyObject *root, const exception_list *kept)
{
    Py_ssize_t i;

    list_init(list);
    list_add(list, root, kept);
    if (kept != NULL && kept->incomplete) {
        return;
    }
    for (i = 0; i < list->count; i++) {
        list_add_links(list, list->items[i], kept);
    }
}

/* The first entry of an exception's traceback, or NULL. Borrowed. A traceback that was
 * taken away is None up to 3.11. */
static PyTracebackObject *
exception_traceback(PyObject *exception)
{
    PyObject *first = ((PyBaseExceptionObject *)exception)->traceback; /* borrowed */
    return first != NULL && PyTraceBack_Check(first) ? (PyTracebackObject *)first
                                                     : NULL;
}

/* Is the frame in a traceback of one of these? */
static int
list_has_frame(const exception_list *list, const PyFrameObject *frame)
{
    Py_ssize_t i;

    for (i = 0; i < list->count; i++) {
        /* borrowed from the exception, as its links are: nothing runs in between */
        const PyTracebackObject *at = exception_traceback(list->items[i]);
        for (; at != NULL; at = at->tb_next) {
            if (at->tb_frame == frame) {
                return 1;
            }
        }
    }
    return 0;
}

/* Clears the locals of a frame that has ended. */
static void
frame_clear(oomkit_state *st, PyFrameObject *frame)
{
    /* A generator that only paused will go on: clearing its frame closes it
     * (3.11, 3.12) or raises. One that has ended is no longer known to its frame. */
    OWNED PyObject *generator = PyFrame_GetGenerator(frame);
    OWNED PyObject *done = NULL, *snapshot = NULL;
    PyCodeObject *code; /* owned */

    if (generator != NULL) {
        return;
    }
    done = PyObject_CallMethodNoArgs((PyObject *)frame, st->str_clear);
    if (done == NULL) {
        /* RuntimeError: it is running, so its locals are its owner's. Or no memory:
         * then its references go with the traceback, unless they form a cycle. */
        PyErr_Clear();
        return;
    }
    /* Up to 3.12 locals(), a debugger or a logger leaves a dictionary with the frame
     * that clear() forgets; asking for it again takes what has been cleared out of it.
     */
    code = PyFrame_GetCode(frame);
    if (code->co_flags & CO_OPTIMIZED) {
        snapshot = PyFrame_GetLocals(frame);
        if (snapshot == NULL) {
            PyErr_Clear(); /* no memory: as above */
        }
    }
    Py_DECREF(code);
}

/* Clears the frames of an exception's traceback, those of `kept` excepted. */
static void
traceback_clear(oomkit_state *st, PyObject *exception, const exception_list *kept)
{
    PyObject *at = Py_XNewRef((PyObject *)exception_traceback(exception)); /* owned */

    while (at != NULL) {
        PyTracebackObject *node = (PyTracebackObject *)at;
        PyFrameObject *frame = (PyFrameObject *)Py_NewRef(node->tb_frame); /* owned */
        if (!list_has_frame(kept, frame)) {
            frame_clear(st, frame);
        }
        Py_DECREF(frame);
        Py_SETREF(at, Py_XNewRef((PyObject *)node->tb_next));
    }
}

/* Takes every link out of an exception but the members of a group, which cannot be
 * taken out and cannot form a cycle once the other links are gone. `gone` holds what
 * they lead to, so nothing dies here but tracebacks. */
static void
exception_unlink(PyObject *exception, const exception_list *gone)
{
    PyObject *dict = ((PyBaseExceptionObject *)exception)->dict; /* borrowed */
    PyObject *key, *value; /* borrowed from dict */
    Py_ssize_t at = 0;

    PyException_SetTraceback(exception, Py_None);
    PyException_SetCause(exception, NULL);
    PyException_SetContext(exception, NULL);
    while (dict != NULL && PyDict_Next(dict, &at, &key, &value)) {
        /* A value may be replaced while iterating, a key may not be removed. */
        if (list_has(gone, value) && PyDict_SetItem(dict, key, Py_None) < 0) {
            PyErr_Clear(); /* no memory: the collector has to find it */
        }
    }
}

void
oomkit_exception_drop(oomkit_state *st, PyObject *exception, PyObject *keep)
{
    exception_list kept, gone;
    Py_ssize_t i;

    list_collect(&kept, keep, NULL);
    list_collect(&gone, exception, &kept);
    Py_DECREF(exception);
    for (i = 0; i < gone.count; i++) {
        traceback_clear(st, gone.items[i], &kept);
    }
    for (i = 0; i < gone.count; i++) {
        exception_unlink(gone.items[i], &gone);
    }
    list_clear(&gone);
    list_clear(&kept);
}

void
oomkit_exception_discard(oomkit_state *st, PyObject *exception)
{
    OWNED PyObject *handled = PyErr_GetHandledException();

    oomkit_exception_drop(st, exception, handled);
}

void
oomkit_exception_clear_frames(oomkit_state *st, PyObject *exception, PyObject *keep)
{
    exception_list kept, reached;
    Py_ssize_t i;

    list_collect(&kept, keep, NULL);
    list_collect(&reached, exception, &kept);
    for (i = 0; i < reached.count; i++) {
        traceback_clear(st, reached.items[i], &kept);
    }
    list_clear(&reached);
    list_clear(&kept);
}
