/* Buffers that are leaves of a graph: a codebook that requires grad, the zero that a
 * module adds its losses to. No optimizer has them, and nothing may ever clear their
 * gradients; as a participant one may move in a forward, as buffers do. */
#include "undo.h"
#include "../py/tensor.h"

/* One that requires grad takes part as a leaf; of others a site's first call notes that
 * they have no gradient: what a forward makes a leaf gets its first one there. 0 or -1.
 */
int
oomkit_buffer_leaf(oomkit_call *call, oomkit_buffer *item,
                   const oomkit_tensor_facts *facts)
{
    int leaf;

    item->bare = 0;
    if (facts->requires_grad) {
        leaf = oomkit_tensor_is_leaf(item->tensor, facts);
        return leaf > 0 ? oomkit_tell_leaf_at_entry(call, item->tensor) : leaf;
    }
    if (call->parts->buffers_serial == 1) {
        OWNED PyObject *gradient = PyObject_GetAttr(item->tensor, call->st->str_grad);
        if (gradient == NULL) {
            return -1;
        }
        item->bare = gradient == Py_None;
    }
    return 0;
}

static oomkit_buffer *
buffer_of(const oomkit_call *call, const PyObject *tensor)
{
    Py_ssize_t i;

    for (i = 0; i < call->entry.buffers.count; i++) {
        if (call->entry.buffers.items[i].tensor == tensor) {
            return &call->entry.buffers.items[i];
        }
    }
    return NULL;
}

int
oomkit_buffer_is_marked(const oomkit_call *call, const PyObject *tensor)
{
    return buffer_of(call, tensor) != NULL;
}

int
oomkit_buffers_have(const oomkit_call *call, Py_ssize_t which)
{
    const oomkit_participants *parts = call->parts;
    return which >= parts->param_count - parts->adopted_count &&
           buffer_of(call, parts->params[which]) != NULL;
}

int
oomkit_buffers_bare_again(oomkit_call *call, PyObject *tensor)
{
    const oomkit_buffer *item = buffer_of(call, tensor);

    if (item == NULL || !item->bare) {
        return 0;
    }
    if (PyObject_SetAttr(tensor, call->st->str_grad, Py_None) < 0) {
        oomkit_error_dismiss(); /* then it is refused */
        return 0;
    }
    return 1;
}
