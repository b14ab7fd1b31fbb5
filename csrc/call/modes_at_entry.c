/* Gradient recording and autocast as they were when a call began. */
#include "call.h"
#include "../py/tensor.h"
#include "../core/status.h"

int
oomkit_modes_entry(oomkit_call *call)
{
    call->entry.modes_known =
        call->st->bridge->modes_get(&call->entry.modes) == OOMKIT_OK;
    return call->entry.modes_known ? 0 : oomkit_bridge_failed("read torch's modes");
}

int
oomkit_modes_without_grad(const oomkit_call *call)
{
    return call->entry.modes_known && !call->entry.modes.grad;
}

int
oomkit_modes_entry_back(oomkit_call *call)
{
    if (!call->entry.modes_known ||
        call->st->bridge->modes_set(&call->entry.modes) == OOMKIT_OK) {
        return 0;
    }
    return oomkit_bridge_failed("set torch's modes");
}
