/* Random generators beside torch's own and the modules' of Python and numpy: objects
 * that the step's code calls, or (rng="all") that its names lead to. */
#include "generator.h"
#include "undo.h"
#include "../call/step.h"
#include "../plain/plain_state.h"
#include "../py/tensor.h"

/* Of which kind is it: is there `name`, an attribute? 1, 0 or -1. */
static int
has(PyObject *stream, const char *name)
{
    return oomkit_has_attribute_string(stream, name);
}

/* Its state. New reference or NULL. */
static PyObject *
stream_get(oomkit_state *st, PyObject *stream)
{
    PyObject *state = NULL;                   /* owned, returned */
    int found = has(stream, "bit_generator"); /* numpy's Generator */

    if (found > 0) {
        OWNED PyObject *bits = PyObject_GetAttrString(stream, "bit_generator");
        return bits == NULL ? NULL : PyObject_GetAttr(bits, st->str_state);
    }
    if (found == 0) {
        found = has(stream, "getstate"); /* random.Random */
    }
    if (found < 0) {
        return NULL;
    }
    EXEMPT (st) {
        state = PyObject_CallMethodNoArgs(stream,
                                          found ? st->str_getstate : st->str_get_state);
    }
    return state;
}

static int
stream_set(oomkit_state *st, PyObject *stream, PyObject *state)
{
    OWNED PyObject *done = NULL;
    int found = has(stream, "bit_generator");

    if (found > 0) {
        OWNED PyObject *bits = PyObject_GetAttrString(stream, "bit_generator");
        return bits == NULL ? -1 : PyObject_SetAttr(bits, st->str_state, state);
    }
    if (found == 0) {
        found = has(stream, "getstate");
    }
    if (found < 0) {
        return -1;
    }
    done = PyObject_CallMethodOneArg(
        stream, found ? st->str_setstate : st->str_set_state, state);
    return done == NULL ? -1 : 0;
}

int
oomkit_streams_equal(PyObject *was, PyObject *now)
{
    OWNED PyObject *pickle =
        PyImport_ImportModule("pickle"); /* it copies arrays, too */
    OWNED PyObject *one =
        pickle == NULL ? NULL : PyObject_CallMethod(pickle, "dumps", "(O)", was);
    OWNED PyObject *two =
        one == NULL ? NULL : PyObject_CallMethod(pickle, "dumps", "(O)", now);

    if (two == NULL && PyErr_ExceptionMatches(PyExc_Exception) &&
        !PyErr_ExceptionMatches(PyExc_MemoryError)) {
        PyErr_Clear(); /* a generator of somebody's own, whose state has no copy */
        return 0;
    }
    return two == NULL ? -1 : PyObject_RichCompareBool(one, two, Py_EQ);
}

/* 1 the same, 0 not, -1. */
static int
stream_same(oomkit_state *st, PyObject *was, PyObject *now)
{
    return oomkit_tensor_check(st, was) ? oomkit_stream_equal(st, was, now)
                                        : oomkit_streams_equal(was, now);
}

int
oomkit_streams_mark(oomkit_call *call, oomkit_rng *rng)
{
    const oomkit_plain_site *site = call->given.places->site;
    Py_ssize_t i, n = site == NULL ? 0 : PyTuple_GET_SIZE(site->streams);
    OWNED PyObject *streams = NULL;

    if (n == 0) {
        return 0;
    }
    streams = Py_NewRef(site->streams);
    for (i = 0; i < n; i++) {
        PyObject *stream = PyTuple_GET_ITEM(streams, i); /* borrowed */
        if (oomkit_memo_add(&rng->streams, stream, stream_get(call->st, stream)) < 0) {
            return -1;
        }
    }
    return 0;
}

int
oomkit_streams_restore(oomkit_state *st, const oomkit_rng *rng)
{
    EACH_MEMO (stream, rng->streams) {
        if (stream_set(st, stream.object, stream.saved) < 0) {
            return -1;
        }
    }
    return 0;
}

int
oomkit_streams_same(oomkit_state *st, const oomkit_rng *rng)
{
    EACH_MEMO (stream, rng->streams) {
        OWNED PyObject *now = stream_get(st, stream.object);
        int same = now == NULL ? -1 : stream_same(st, stream.saved, now);
        if (same != 1) {
            return same;
        }
    }
    return 1;
}

/* The module, where `state` (borrowed, may be NULL) is one of its stream's. 0 or -1. */
static int
streams_add_module(PyObject *found, const char *name, PyObject *state)
{
    OWNED PyObject *module = state == NULL ? NULL : PyImport_ImportModule(name);

    return state == NULL ? 0 : module == NULL ? -1 : PyList_Append(found, module);
}

PyObject *
oomkit_rng_streams(const oomkit_call *call)
{
    const oomkit_rng *rng = &call->entry.rng;
    oomkit_memo *const memos[] = {rng->others, rng->streams};
    OWNED PyObject *found = PyList_New(0);
    size_t i;

    if (found == NULL || streams_add_module(found, "random", rng->random_state) < 0 ||
        streams_add_module(found, "numpy.random", rng->numpy_state) < 0) {
        return NULL;
    }
    for (i = 0; i < Py_ARRAY_LENGTH(memos); i++) {
        EACH_MEMO (stream, memos[i]) {
            if (PyList_Append(found, stream.object) < 0) {
                return NULL;
            }
        }
    }
    return STEAL(found);
}
