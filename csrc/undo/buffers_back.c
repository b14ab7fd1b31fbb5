/* Buffers as they were at entry, from the copies that buffers.c took. */
#include "undo.h"
#include "../py/modes.h"
#include "../py/tensor.h"

static int
buffer_put_back(oomkit_call *call, Py_ssize_t i)
{
    oomkit_buffer *item = &call->entry.buffers.items[i];
    OWNED PyObject *dict = NULL;

    /* Whatever the version says: a kernel that fails half-way (batch_norm) has written
     * to its buffers and not bumped them. */
    if (item->copied == 2) {
        const oomkit_image *image = &call->parts->images[i];
        if (call->st->bridge->bytes_set(item->tensor, call->st->impl_offset,
                                        image->bytes, image->size) != OOMKIT_OK) {
            PyErr_SetString(
                PyExc_RuntimeError,
                "oomkit could not write a buffer back: it changed its shape" SEE(
                    "internal-error"));
            return -1;
        }
    } else if (item->copied) {
        if (oomkit_tensor_write(call->st, item->tensor, call->parts->copies[i]) < 0) {
            return -1;
        }
    }
    dict = PyObject_GetAttr(item->module, call->st->str_buffers);
    if (dict == NULL) {
        return -1;
    }
    if (PyDict_GetItemWithError(dict, item->key) != item->tensor) {
        return PyErr_Occurred() ? -1 : PyDict_SetItem(dict, item->key, item->tensor);
    }
    return 0;
}

/* Has it moved (or changed its shape) so that nothing can put it back? 1, 0 or -1. */
static int
buffer_is_stuck(oomkit_call *call, Py_ssize_t i)
{
    const oomkit_buffer *item = &call->entry.buffers.items[i];
    oomkit_tensor_facts facts;
    uint32_t version;

    if (item->copied == 2) {
        if (oomkit_tensor_facts_get(call->st, item->tensor, 0, &facts) < 0) {
            return -1;
        }
        return facts.bytes != call->parts->images[i].size || facts.device_type != 0;
    }
    if (oomkit_tensor_version(call->st, item->tensor, &version) < 0) {
        return -1;
    }
    return version != item->version && !item->copied;
}

/* 0 all buffers are as at entry; 1 all but at least one, *which is an owned str that
 * names the first of those; -1. */
int
oomkit_buffers_restore(oomkit_call *call, PyObject **which)
{
    oomkit_buffers *b = &call->entry.buffers;
    Py_ssize_t i;
    int refused = 0;

    for (i = 0; i < b->count; i++) {
        int stuck = buffer_is_stuck(call, i);
        if (stuck < 0 || (!stuck && buffer_put_back(call, i) < 0)) {
            goto error;
        }
        if (stuck && !refused) {
            *which = PyUnicode_FromFormat("%s.%U", Py_TYPE(b->items[i].module)->tp_name,
                                          b->items[i].key);
            if (*which == NULL) {
                return -1;
            }
            refused = 1;
        }
    }
    return refused;
error:
    if (refused) {
        Py_CLEAR(*which);
    }
    return -1;
}
