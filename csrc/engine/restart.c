/* Beginning a split attempt again with the same plan, or nearly, because a rule wants
 * it: nothing but the forward of its first micro-batch has run. */
#include "engine.h"
#include "../accum/accum.h"
#include "../batch/batch.h"
#include "../device/device.h"
#include "../ranks/agree.h"
#include "../result/result.h"
#include "../sizes/sizes.h"
#include "../undo/undo.h"

/* The second slice joins the first. */
static void
restart_wider(oomkit_call *call)
{
    call->cut->slices[0].length += call->cut->slices[1].length;
    call->cut->count--;
    memmove(&call->cut->slices[1], &call->cut->slices[2],
            (size_t)(call->cut->count - 1) * sizeof(*call->cut->slices));
    call->split = call->cut->count > 1;
    call->tries.widened = 1;
}

/* Another rank failed where this one did not: the same plan once more, of a whole call
 * as one slice, in step with the others. 0 or -1. */
static int
restart_ranks(oomkit_call *call)
{
    if (oomkit_ranks_again(call) < 0 ||
        oomkit_recover_reclaim(call, oomkit_baseline_at_entry(call)) < 0) {
        return -1;
    }
    if (call->cut->slices == NULL) {
        if (oomkit_recover_batch(call) < 0) {
            return -1;
        }
        call->cut->plan = (oomkit_plan){
            .batch = call->batch.rows, .accumulation = 1, .multiple_of = 1};
        call->cut->count = 0;
        if (oomkit_cut_planned(call) < 0) {
            return -1;
        }
    }
    memset(&call->cut->measured, 0, sizeof(call->cut->measured));
    oomkit_window_anew(call);
    return 0;
}

/* The attempt that a rule has ended (call->tries.restart says why), with an exception
 * in flight or caught by the step. 0 the same plan can be tried again; 1 something else
 * went wrong, the exception in flight says what; -1 with the exception to raise. */
int
oomkit_restart(oomkit_call *call)
{
    int result, why = call->tries.restart;

    call->tries.restart = 0;
    call->tries.restarts += why != OOMKIT_RESTART_WIDER &&
                            why != OOMKIT_RESTART_RANKS && why != OOMKIT_RESTART_ROWS;
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(call->st->SplitError)) {
        oomkit_unknown_forget(call);
        return 1;
    }
    if (PyErr_Occurred()) {
        oomkit_exception_discard(call->st, oomkit_exception_take());
    }
    result = oomkit_join_truncate(&call->cut->join, 0);
    if (result == 0) {
        result = oomkit_recover_roll_back(call);
    }
    oomkit_savepoint_end_attempt(call);
    if (result == 0 && call->batch.searched) { /* its rows are to run once more */
        EXEMPT (call->st) {
            result = oomkit_batch_check(call->st, &call->batch, call->step->names);
        }
    }
    if (why == OOMKIT_RESTART_WIDER) {
        restart_wider(call);
    } else if (result == 0 && why == OOMKIT_RESTART_RANKS) {
        result = restart_ranks(call);
    }
    if (result < 0 || oomkit_tell_before_restart(call, why) < 0) {
        return -1;
    }
    call->cut->at = 0;
    return oomkit_savepoint_take(call);
}
