/* The state of torch's CPU generator, as a tensor that is taken anew only when the
 * generator has moved, and as bytes that tell whether it has.
 *
 * The bridge reads those bytes; where it cannot, every mark is a
 * tensor of 5 KiB and every comparison takes another one. */
#include "generator.h"
#include "../device/device.h"

#include <string.h>

#define ROOM 8192 /* bytes; CPUGeneratorImpl has about 2,600 */

/* The generator's bytes now. New reference; NULL with an exception, or without one when
 * they cannot be read. */
static PyObject *
stream_read(const oomkit_state *st, void *generator, uint64_t size)
{
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size); /* owned */

    if (bytes != NULL &&
        st->bridge->generator_read(generator, PyBytes_AS_STRING(bytes), size) != size) {
        Py_CLEAR(bytes);
    }
    return bytes;
}

static int
stream_is_at(const oomkit_state *st, void *generator, PyObject *bytes)
{
    return st->bridge->generator_same(generator, PyBytes_AS_STRING(bytes),
                                      (uint64_t)PyBytes_GET_SIZE(bytes));
}

/* Generator.get_state(), outside the budget. New reference or NULL. */
static PyObject *
stream_tensor(oomkit_state *st)
{
    PyObject *state = NULL; /* owned, returned */

    EXEMPT (st) {
        state = PyObject_CallNoArgs(st->generator_get);
    }
    return state;
}

/* Bytes and tensor together are kept in the state. 0 or -1. */
static int
stream_refresh(oomkit_state *st)
{
    OWNED PyObject *bytes = stream_read(st, st->stream_generator, st->stream_size);
    PyObject *tensor; /* owned, then by the state */

    if (bytes == NULL && PyErr_Occurred()) {
        return -1;
    }
    tensor = stream_tensor(st);
    if (tensor == NULL) {
        return -1;
    }
    Py_XSETREF(st->stream_state, tensor);
    Py_XSETREF(st->stream_bytes, STEAL(bytes));
    return 0;
}

int
oomkit_stream_mark(oomkit_state *st, PyObject **tensor, PyObject **bytes)
{
    *bytes = NULL;
    if (st->stream_size == 0) {
        *tensor = stream_tensor(st);
        return *tensor == NULL ? -1 : 0;
    }
    if (st->stream_bytes == NULL ||
        !stream_is_at(st, st->stream_generator, st->stream_bytes)) {
        if (stream_refresh(st) < 0) {
            return -1;
        }
        /* Another thread may have drawn between the two: a tensor that does not belong
         * to its bytes must not be believed later. */
        if (st->stream_bytes == NULL ||
            !stream_is_at(st, st->stream_generator, st->stream_bytes)) {
            Py_CLEAR(st->stream_bytes);
            *tensor = Py_NewRef(st->stream_state);
            return 0;
        }
    }
    *tensor = Py_NewRef(st->stream_state);
    *bytes = Py_NewRef(st->stream_bytes);
    return 0;
}

int
oomkit_stream_note(oomkit_state *st, PyObject **tensor, PyObject **bytes)
{
    *tensor = NULL;
    if (st->stream_size != 0) {
        if (st->stream_bytes != NULL &&
            stream_is_at(st, st->stream_generator, st->stream_bytes)) {
            *bytes = Py_NewRef(st->stream_bytes);
            return 0;
        }
        *bytes = stream_read(st, st->stream_generator, st->stream_size);
        if (*bytes != NULL || PyErr_Occurred()) {
            return *bytes == NULL ? -1 : 0;
        }
    }
    return oomkit_stream_mark(st, tensor, bytes);
}

int
oomkit_stream_moved(oomkit_state *st, PyObject *tensor, PyObject *bytes)
{
    OWNED PyObject *now = NULL;
    int same;

    if (bytes != NULL) {
        return !stream_is_at(st, st->stream_generator, bytes);
    }
    now = stream_tensor(st);
    same = now == NULL ? -1 : oomkit_stream_equal(st, tensor, now);
    return same < 0 ? -1 : !same;
}

int
oomkit_stream_equal(oomkit_state *st, PyObject *one, PyObject *other)
{
    OWNED PyObject *equal = NULL;

    EXEMPT (st) {
        equal = PyObject_CallFunctionObjArgs(st->torch_equal, one, other, NULL);
    }
    return equal == NULL ? -1 : equal == Py_True;
}

/* --- trying it out --- */

/* `_cdata`: the object in torch's own library. NULL, perhaps with an exception. */
static void *
generator_pointer(PyObject *generator)
{
    OWNED PyObject *number = PyObject_GetAttrString(generator, "_cdata");

    return number == NULL ? NULL : PyLong_AsVoidPtr(number);
}

/* Draws from `generator`. 0 or -1. */
static int
try_draw(oomkit_state *st, PyObject *generator, int count)
{
    OWNED PyObject *args = Py_BuildValue("(i)", count);
    OWNED PyObject *kwargs =
        Py_BuildValue("{sOss}", "generator", generator, "device", "cpu");
    OWNED PyObject *drawn = args == NULL || kwargs == NULL
                                ? NULL
                                : PyObject_Call(st->torch_randn, args, kwargs);

    return drawn == NULL ? -1 : 0;
}

/* Does reading the state leave the bytes alone, and does every draw change them? The
 * second value of a pair of normal ones comes out of a store beside the engine; 1,000
 * values go once round the engine. 1 or 0; may leave an exception. */
static int
try_generator(oomkit_state *st, PyObject *generator, void *pointer, uint64_t size)
{
    static const int draws[] = {0, 1, 1, 1, 15, 1000, 0};
    OWNED PyObject *bytes = NULL;
    size_t i;
    int works = 1;

    for (i = 0; works && i < sizeof(draws) / sizeof *draws; i++) {
        Py_XSETREF(bytes, stream_read(st, pointer, size));
        works = bytes != NULL && stream_is_at(st, pointer, bytes);
        if (works && draws[i] > 0) {
            works = try_draw(st, generator, draws[i]) == 0 &&
                    !stream_is_at(st, pointer, bytes);
        } else if (works) {
            OWNED PyObject *state =
                PyObject_CallMethodNoArgs(generator, st->str_get_state);
            works = state != NULL && stream_is_at(st, pointer, bytes);
        }
    }
    return works;
}

int
oomkit_stream_calibrate(oomkit_state *st)
{
    char bytes[ROOM];
    uint64_t size = 0;

    st->stream_size = 0;
    Py_CLEAR(st->stream_bytes);
    Py_CLEAR(st->stream_state);
    EXEMPT (st) {
        OWNED PyObject *own = PyObject_CallNoArgs(st->Generator);
        void *sample = own == NULL ? NULL : generator_pointer(own);
        void *generator =
            sample == NULL ? NULL : generator_pointer(st->default_generator);
        if (generator != NULL) {
            size = st->bridge->generator_read(sample, bytes, ROOM);
        }
        if (size > 0 && size <= ROOM &&
            st->bridge->generator_read(generator, bytes, ROOM) == size &&
            try_generator(st, own, sample, size)) {
            st->stream_generator = generator;
            st->stream_size = size;
        }
    }
    /* What else went wrong means "take the tensor each time". */
    return oomkit_state_passes();
}
