/* What is asked of a call. */
#include "call.h"
#include "step.h"

#include <stddef.h>
#include "../py/tensor.h"

/* What a call has that is not cut: zeros, in memory that cannot be written to. */
static const oomkit_cut not_cut;

void
oomkit_call_init(oomkit_call *call, oomkit_cut *room, struct oomkit_step *step,
                 const oomkit_options *options)
{
    size_t size = offsetof(oomkit_call, batch.tree.inline_nodes);

    /* gcc makes a string instruction of a size that it knows, which takes twice as long
     * as the library's function. */
    __asm__("" : "+r"(size));
    memset(call, 0, size);
    call->st = step->st;
    call->step = step;
    call->options = options;
    call->given.func = step->func;
    call->given.places = &step->plain;
    call->cut = (oomkit_cut *)&not_cut;
    call->cut_room = room;
    call->tries.began_ns = call->tries.started_ns = oomkit_now_ns();
}

void
oomkit_call_cut(oomkit_call *call)
{
    if (oomkit_call_is_cut(call)) {
        return;
    }
    call->cut = call->cut_room;
    memset(call->cut, 0, offsetof(oomkit_cut, sequence));
    call->cut->sequence[0].count = call->cut->sequence[1].count = 0;
    call->cut->join.site = &call->step->results;
}

int
oomkit_call_has_module(const oomkit_call *call, const PyObject *module)
{
    PyObject *roots = call->parts->roots; /* borrowed */
    Py_ssize_t i;

    for (i = 0; roots != NULL && i < PyList_GET_SIZE(roots); i++) {
        OWNED PyObject *root = oomkit_reference_get(PyList_GET_ITEM(roots, i));
        if (root == module) {
            return 1;
        }
    }
    return 0;
}

/* The call's arguments as (tuple, dict). 0 or -1; both are owned. */
int
oomkit_effects_arguments(const oomkit_call *call, PyObject **positional,
                         PyObject **named)
{
    Py_ssize_t i, n = PyVectorcall_NARGS(call->given.nargsf);

    *named = PyDict_New();
    *positional = *named ? PyTuple_New(n) : NULL;
    if (*positional == NULL) {
        Py_CLEAR(*named);
        return -1;
    }
    for (i = 0; i < n; i++) {
        PyTuple_SET_ITEM(*positional, i, Py_NewRef(call->given.args[i]));
    }
    for (i = 0;
         call->given.kwnames != NULL && i < PyTuple_GET_SIZE(call->given.kwnames);
         i++) {
        if (PyDict_SetItem(*named, PyTuple_GET_ITEM(call->given.kwnames, i),
                           call->given.args[n + i]) < 0) {
            Py_CLEAR(*positional);
            Py_CLEAR(*named);
            return -1;
        }
    }
    return 0;
}

void
oomkit_engine_device(oomkit_call *call)
{
    if (call->parts->device_type != 0) {
        call->device.type = call->parts->device_type;
        call->device.index = call->parts->device_index;
    } else {
        call->device.type = call->batch.device_type;
        call->device.index = call->batch.device_index;
    }
}

oomkit_device
oomkit_engine_device_of_failure(const oomkit_call *call)
{
    return call->device.type == OOMKIT_DEVICE_CPU ? oomkit_device_default(call->st)
                                                  : call->device;
}
