/* What moves once per batch must not move in a micro-batch that is not the last. */
#include "accum.h"
#include "../optim/optim.h"
#include "../undo/undo.h"

/* A parameter that was replaced in its module. 0, or -1 with SplitError. */
static int
moved_slots(oomkit_call *call)
{
    PyObject *key = NULL; /* borrowed */
    int changed = oomkit_param_slots_changed(call, &key);

    if (changed <= 0) {
        return changed;
    }
    return oomkit_refuse_split(
        call,
        "the step replaces parameter %R of a module in micro-batch %lld of %lld. "
        "Replace it outside the decorated step" SEE("parameters-changed"),
        key, (long long)(call->cut->at + 1), (long long)call->cut->count);
}

static int
moved_schedulers(oomkit_call *call)
{
    PyObject *scheduler = NULL; /* borrowed */
    int moved = oomkit_owners_epochs_moved(call, &scheduler);

    if (moved <= 0) {
        return moved;
    }
    return oomkit_refuse_split(
        call,
        "%s.step() ran in micro-batch %lld of %lld, because oomkit could not delay it "
        "to the end of the batch. Call it as scheduler.step(), or after the decorated "
        "step" SEE("step-not-delayed"),
        Py_TYPE(scheduler)->tp_name, (long long)(call->cut->at + 1),
        (long long)call->cut->count);
}

/* At the end of a micro-batch that is not the last: nothing that is meant to move once
 * per batch may have moved. 0, or -1 with SplitError that names it. */
static int
moved_micro_ends(oomkit_call *call, PyObject *result)
{
    Py_ssize_t which = 0;
    OWNED PyObject *name = NULL;
    int state;

    (void)result;
    if (call->is_last) {
        return oomkit_update_begun(call)               ? 0
               : oomkit_undone_buffers_check(call) < 0 ? -1
                                                       : oomkit_hooks_check(call);
    }
    state = oomkit_params_moved(call, &which);

    if (state == 0) {
        state = oomkit_params_rewritten(call, &which);
    }
    if (state == 0 && (moved_slots(call) < 0 || moved_schedulers(call) < 0)) {
        return -1;
    }
    if (state <= 0) {
        return state;
    }
    name = oomkit_describe_tensor(call, call->parts->params[which]);
    if (name == NULL) {
        return -1;
    }
    return oomkit_refuse_split(
        call,
        "%U was changed in micro-batch %lld of %lld by something other than a known "
        "optimizer. Pass the optimizer as optimizer=..., or guard the line with `if "
        "oomkit.current().is_last:`" SEE("parameters-changed"),
        name, (long long)(call->cut->at + 1), (long long)call->cut->count);
}

const oomkit_rule oomkit_moved_early_rule = {.micro_ends = moved_micro_ends};
