/* Random streams: torch's CPU generator and the devices' in use always, other
 * generators that take part, Python's and numpy's where the code names them. Public
 * calls only. */
#include "generator.h"
#include "undo.h"
#include "../device/torch_calls.h"
#include "../py/tensor.h"

static PyObject *
rng_state(oomkit_state *st, PyObject *generator)
{
    PyObject *state = NULL; /* owned, returned */

    EXEMPT (st) {
        state = PyObject_CallMethodNoArgs(generator, st->str_get_state);
    }
    return state;
}

/* The state of one generator as an object that rng_put takes. New reference or NULL. On
 * a device it is (seed, offset), for a state tensor there costs more; a backend whose
 * generator has no offset (MPS) says so by a RuntimeError. */
static PyObject *
rng_get(oomkit_state *st, PyObject *generator, int is_device)
{
    OWNED PyObject *seed = NULL, *offset = NULL;
    PyObject *state; /* owned, returned */

    if (!is_device) {
        return rng_state(st, generator);
    }
    seed = PyObject_CallMethodNoArgs(generator, st->str_initial_seed);
    offset = seed ? PyObject_CallMethodNoArgs(generator, st->str_get_offset) : NULL;
    state = offset ? PyTuple_Pack(2, seed, offset) : NULL;
    if (state == NULL && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear();
        return rng_state(st, generator);
    }
    return state;
}

static int
rng_put(oomkit_state *st, PyObject *generator, PyObject *state)
{
    OWNED PyObject *done = NULL;

    if (!PyTuple_CheckExact(state)) {
        done = PyObject_CallMethodOneArg(generator, st->str_set_state, state);
        return done == NULL ? -1 : 0;
    }
    done = PyObject_CallMethodOneArg(generator, st->str_manual_seed,
                                     PyTuple_GET_ITEM(state, 0));
    if (done == NULL) {
        return -1;
    }
    Py_SETREF(done, PyObject_CallMethodOneArg(generator, st->str_set_offset,
                                              PyTuple_GET_ITEM(state, 1)));
    return done == NULL ? -1 : 0;
}

static int
rng_mark_one(oomkit_state *st, oomkit_rng *rng, PyObject *generator, int is_device)
{
    return oomkit_memo_add(&rng->others, generator, rng_get(st, generator, is_device));
}

/* While a graph is being captured a CUDA generator tells nothing; a call in there is
 * never replayed. 1 when that is why the mark failed: the error is gone. Else 0. */
static int
rng_is_captured(void)
{
    int captured = 0;

    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        return 0;
    }
    KEEPING_EXCEPTION { /* the generator's own error is the one to see */
        captured = oomkit_is_capturing() == 1;
    }
    if (captured) {
        PyErr_Clear(); /* that is why */
    }
    return captured;
}

/* Every accelerator of the process that is in use: a step whose batch and parameters
 * are on the CPU, as far as they were found, may move them itself. */
static int
rng_mark_devices(oomkit_call *call, oomkit_rng *rng)
{
    OWNED PyObject *all = NULL;
    Py_ssize_t i;
    int result = 0, type = call->device.type;

    if (type == OOMKIT_DEVICE_CPU) {
        type = oomkit_device_type_beside(call->st);
    }
    if (type == OOMKIT_DEVICE_CPU) {
        return 0;
    }
    all =
        type == OOMKIT_DEVICE_CUDA
            ? PyObject_GetAttr(call->st->cuda_module, call->st->str_default_generators)
            : oomkit_torch_generators(call->st, type);
    if (all == NULL) {
        return -1;
    }
    for (i = 0; PyTuple_Check(all) && i < PyTuple_GET_SIZE(all) && result == 0; i++) {
        result = rng_mark_one(call->st, rng, PyTuple_GET_ITEM(all, i), 1);
        if (result < 0 && type != call->device.type &&
            PyErr_ExceptionMatches(PyExc_RuntimeError)) {
            PyErr_Clear(); /* captured elsewhere, or lost: a step on the CPU works */
            result = 0;
        }
    }
    return result < 0 && rng_is_captured() ? 0 : result;
}

/* Python's random module, or numpy.random, through a pair of its functions. */
static PyObject *
rng_library_call(const char *module_name, const char *function, PyObject *argument)
{
    OWNED PyObject *module = PyImport_ImportModule(module_name);
    OWNED PyObject *callable = module ? PyObject_GetAttrString(module, function) : NULL;

    if (callable == NULL) {
        return NULL;
    }
    return argument ? PyObject_CallOneArg(callable, argument)
                    : PyObject_CallNoArgs(callable);
}

/* The streams beside torch's CPU generator. 0 or -1. */
static int
rng_mark_others(oomkit_call *call, oomkit_rng *rng)
{
    oomkit_state *st = call->st;
    oomkit_participants *parts = call->parts;

    if (rng_mark_devices(call, rng) < 0) {
        return -1;
    }
    EACH_OWNER (one, parts, OWNERS_OF(OOMKIT_OWNER_GENERATOR)) {
        if (one.object != st->default_generator &&
            rng_mark_one(st, rng, one.object, 0) < 0) {
            return -1;
        }
    }
    if (parts->uses_random) {
        rng->random_state = rng_library_call("random", "getstate", NULL);
        if (rng->random_state == NULL) {
            return -1;
        }
    }
    if (parts->uses_numpy) {
        rng->numpy_state = rng_library_call("numpy.random", "get_state", NULL);
        if (rng->numpy_state == NULL) {
            if (!PyErr_ExceptionMatches(PyExc_ImportError)) {
                return -1;
            }
            PyErr_Clear(); /* rng="all" without numpy: there is no such stream */
        }
    }
    return oomkit_streams_mark(call, rng);
}

static int
rng_mark(oomkit_call *call, oomkit_rng *rng)
{
    if (call->options->rng == OOMKIT_RNG_NONE) {
        return 0;
    }
    return oomkit_stream_mark(call->st, &rng->cpu_state, &rng->cpu_bytes) < 0 ||
                   rng_mark_others(call, rng) < 0
               ? -1
               : 0;
}

/* At entry of an attempt. 0 or -1. */
int
oomkit_rng_mark(oomkit_call *call)
{
    return rng_mark(call, &call->entry.rng);
}

int
oomkit_rng_note(oomkit_call *call, oomkit_rng *rng)
{
    *rng = (oomkit_rng){0};
    return oomkit_stream_note(call->st, &rng->cpu_state, &rng->cpu_bytes) < 0 ||
                   rng_mark_others(call, rng) < 0
               ? -1
               : 0;
}

static int
rng_restore(oomkit_state *st, const oomkit_rng *rng)
{
    if (rng->cpu_state != NULL) {
        OWNED PyObject *done = PyObject_CallOneArg(st->generator_set, rng->cpu_state);
        if (done == NULL) {
            return -1;
        }
    }
    EACH_MEMO (stream, rng->others) {
        if (rng_put(st, stream.object, stream.saved) < 0) {
            return -1;
        }
    }
    if (rng->random_state != NULL) {
        OWNED PyObject *done =
            rng_library_call("random", "setstate", rng->random_state);
        if (done == NULL) {
            return -1;
        }
    }
    if (rng->numpy_state != NULL) {
        OWNED PyObject *done =
            rng_library_call("numpy.random", "set_state", rng->numpy_state);
        if (done == NULL) {
            return -1;
        }
    }
    return oomkit_streams_restore(st, rng);
}

/* Puts every stream back to where it was at entry. 0 or -1. */
int
oomkit_rng_restore(oomkit_call *call)
{
    return rng_restore(call->st, &call->entry.rng);
}

static int
rng_same(oomkit_state *st, PyObject *before, PyObject *now)
{
    return PyTuple_CheckExact(before) ? PyObject_RichCompareBool(before, now, Py_EQ)
                                      : oomkit_stream_equal(st, before, now);
}

/* The streams of Python and numpy. 1 same, 0 not, -1 error. */
static int
rng_same_libraries(const oomkit_rng *rng)
{
    int same = 1;

    if (rng->random_state != NULL) {
        OWNED PyObject *now = rng_library_call("random", "getstate", NULL);
        same =
            now == NULL ? -1 : PyObject_RichCompareBool(rng->random_state, now, Py_EQ);
    }
    if (same == 1 && rng->numpy_state != NULL) {
        OWNED PyObject *now = rng_library_call("numpy.random", "get_state", NULL);
        same = now == NULL ? -1 : oomkit_streams_equal(rng->numpy_state, now);
    }
    return same;
}

/* Are all streams but that of torch's CPU generator where they were? 1, 0 or -1. */
static int
rng_same_beside(oomkit_state *st, const oomkit_rng *rng)
{
    int same;

    EACH_MEMO (stream, rng->others) {
        OWNED PyObject *now =
            rng_get(st, stream.object, PyTuple_CheckExact(stream.saved));
        same = now == NULL ? -1 : rng_same(st, stream.saved, now);
        if (same != 1) {
            return same;
        }
    }
    same = rng_same_libraries(rng);
    return same == 1 ? oomkit_streams_same(st, rng) : same;
}

int
oomkit_rng_moved_beside(oomkit_call *call)
{
    int same = rng_same_beside(call->st, &call->entry.rng);
    return same < 0 ? -1 : !same;
}

/* Has a stream moved since it was marked? 1, 0 or -1. Streams that were not marked
 * count as moved. */
static int
rng_moved(oomkit_state *st, const oomkit_rng *rng)
{
    int same;

    if (rng->cpu_state == NULL && rng->cpu_bytes == NULL) {
        return 1;
    }
    same = oomkit_stream_moved(st, rng->cpu_state, rng->cpu_bytes);
    same = same < 0 ? -1 : !same;
    if (same == 1) {
        same = rng_same_beside(st, rng);
    }
    return same < 0 ? -1 : !same;
}

int
oomkit_rng_moved(oomkit_call *call)
{
    return rng_moved(call->st, &call->entry.rng);
}

int
oomkit_rng_drawn(const oomkit_call *call, const oomkit_after *end)
{
    oomkit_state *st = call->st;
    const oomkit_rng *before = &call->entry.rng, *after = &end->rng;
    Py_ssize_t i, n = before->others == NULL ? 0 : before->others->count;
    int same = 1;

    if (before->cpu_state == NULL || before->random_state != NULL ||
        before->numpy_state != NULL || before->streams != NULL ||
        n != (after->others == NULL ? 0 : after->others->count)) {
        return 1;
    }
    if (before->cpu_bytes != NULL && after->cpu_bytes != NULL) {
        same = before->cpu_bytes == after->cpu_bytes ||
               PyObject_RichCompareBool(before->cpu_bytes, after->cpu_bytes, Py_EQ);
    } else if (after->cpu_state != NULL) {
        same = rng_same(st, before->cpu_state, after->cpu_state);
    } else {
        return 1;
    }
    for (i = 0; same == 1 && i < n; i++) {
        same =
            rng_same(st, before->others->items[i].saved, after->others->items[i].saved);
    }
    return same < 0 ? -1 : !same;
}

int
oomkit_rng_now(oomkit_call *call, const oomkit_after *after, oomkit_savepoint *now)
{
    int moved;

    if (!oomkit_rng_marked(&call->entry)) {
        return 0;
    }
    moved = rng_moved(call->st, &after->rng);
    now->rng.used = moved != 0;
    return moved < 0 || rng_mark(call, &now->rng) < 0 ? -1 : 0;
}

int
oomkit_rng_back(oomkit_call *call, const oomkit_savepoint *now, int finished)
{
    return (now->rng.used || !finished) && oomkit_rng_marked(now)
               ? rng_restore(call->st, &now->rng)
               : 0;
}

void
oomkit_rng_free(oomkit_rng *rng)
{
    Py_CLEAR(rng->cpu_state);
    Py_CLEAR(rng->cpu_bytes);
    oomkit_memo_drop(&rng->others);
    Py_CLEAR(rng->random_state);
    Py_CLEAR(rng->numpy_state);
    oomkit_memo_drop(&rng->streams);
}

void
oomkit_rng_release(oomkit_savepoint *savepoint)
{
    oomkit_rng_free(&savepoint->rng);
}
