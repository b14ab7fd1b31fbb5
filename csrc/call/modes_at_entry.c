/* Gradient recording and autocast as they were when a call began. */
#include "call.h"
#include "../py/modes.h"

int
oomkit_modes_entry(oomkit_call *call)
{
    oomkit_state *st = call->st;
    OWNED PyObject *on = NULL;

    call->entry.modes_known = 1;
    if (st->bridge != NULL) {
        st->bridge->modes_get(&call->entry.modes);
        return 0;
    }
    on = PyObject_CallNoArgs(st->is_grad_enabled);
    call->entry.modes.grad = on == Py_True;
    call->entry.modes_known = on != NULL;
    return on == NULL ? -1 : 0;
}

int
oomkit_modes_entry_back(oomkit_call *call)
{
    oomkit_state *st = call->st;

    if (!call->entry.modes_known) {
        return 0;
    }
    if (st->bridge != NULL) {
        st->bridge->modes_set(&call->entry.modes);
        return 0;
    }
    return oomkit_grad_mode_set(st, call->entry.modes.grad) < 0 ? -1 : 0;
}
