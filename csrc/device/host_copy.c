/* Copies in host memory, and back.
 *
 * Copies to the host have arrived when they are returned, for anybody may read them.
 * Those to CUDA are under way: what is done to them next is done in the order of the
 * stream, and torch keeps pinned memory until what reads it is done. */
#include "device.h"
#include "../py/errors.h"
#include "../py/half_made.h"
#include "../py/tensor.h"

#define SMALLEST_PINNED 4096 /* bytes */

/* The tensor without its graph, readable. New reference or NULL. */
static PyObject *
plain_of(oomkit_state *st, PyObject *tensor, oomkit_tensor_facts *facts)
{
    if (oomkit_tensor_facts_get(st, tensor, 0, facts) < 0 ||
        (!facts->is_strided && oomkit_half_made_refuse(st, tensor) < 0)) {
        return NULL;
    }
    return PyObject_CallMethodNoArgs(tensor, st->str_detach);
}

PyObject *
oomkit_host_copy(oomkit_state *st, PyObject *tensor)
{
    oomkit_tensor_facts facts;
    OWNED PyObject *plain = plain_of(st, tensor, &facts);
    PyObject *copy = NULL; /* owned, returned */

    if (plain == NULL) {
        return NULL;
    }
    EXEMPT (st) {
        copy = PyObject_CallMethodNoArgs(plain, facts.device_type == 0 ? st->str_clone
                                                                       : st->str_cpu);
    }
    return copy;
}

/* torch.empty_like(tensor, device=device, pin_memory=pinned). New reference or NULL. */
static PyObject *
empty_like(oomkit_state *st, PyObject *tensor, const char *device, int pinned)
{
    OWNED PyObject *args = PyTuple_Pack(1, tensor);
    OWNED PyObject *names = Py_BuildValue("{s:s,s:O}", "device", device, "pin_memory",
                                          pinned ? Py_True : Py_False);

    return args == NULL || names == NULL
               ? NULL
               : PyObject_Call(st->torch_empty_like, args, names);
}

/* to.copy_(from, non_blocking). 0 or -1. */
static int
fill(oomkit_state *st, PyObject *to, PyObject *from, PyObject *non_blocking)
{
    OWNED PyObject *done =
        PyObject_CallMethodObjArgs(to, st->str_copy, from, non_blocking, NULL);

    return done == NULL ? -1 : 0;
}

PyObject *
oomkit_host_copy_pinned(oomkit_state *st, PyObject *tensor)
{
    oomkit_tensor_facts facts;
    OWNED PyObject *plain = plain_of(st, tensor, &facts), *host = NULL;

    if (plain == NULL) {
        return NULL;
    }
    if (facts.device_type != OOMKIT_DEVICE_CUDA || !facts.is_strided ||
        facts.bytes < SMALLEST_PINNED) {
        return oomkit_host_copy(st, tensor);
    }
    EXEMPT (st) {
        host = empty_like(st, plain, "cpu", 1);
    }
    if (host == NULL) {
        return oomkit_pinning_failed() ? oomkit_host_copy(st, tensor) : NULL;
    }
    st->pinned_any = 1;
    return fill(st, host, plain, Py_False) < 0 ? NULL : STEAL(host);
}

int
oomkit_pinning_failed(void)
{
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError) &&
        !PyErr_ExceptionMatches(PyExc_MemoryError)) {
        return 0;
    }
    PyErr_Clear(); /* matched: the driver has none, other host memory will do */
    return 1;
}

PyObject *
oomkit_device_like(oomkit_state *st, oomkit_device device, PyObject *tensor)
{
    char text[OOMKIT_DEVICE_TEXT];
    OWNED PyObject *plain = PyObject_CallMethodNoArgs(tensor, st->str_detach);

    oomkit_device_text(device, text);
    return plain == NULL ? NULL : empty_like(st, plain, text, 0);
}

int
oomkit_device_fill(oomkit_state *st, oomkit_device device, PyObject *there,
                   PyObject *tensor)
{
    OWNED PyObject *plain = PyObject_CallMethodNoArgs(tensor, st->str_detach);

    return plain == NULL ? -1
                         : fill(st, there, plain,
                                device.type == OOMKIT_DEVICE_CUDA ? Py_True : Py_False);
}

void
oomkit_host_unpin(oomkit_state *st)
{
    if (!st->pinned_any || st->empty_host_cache == NULL) {
        return;
    }
    KEEPING_EXCEPTION {
        OWNED PyObject *done = PyObject_CallNoArgs(st->empty_host_cache);
        if (done == NULL) {
            oomkit_error_dismiss(); /* it stays in torch's cache, for others */
        }
    }
}
