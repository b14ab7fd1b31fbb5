/* What lies below a step's own memory, for the planner: what was allocated at entry,
 * without the gradients that the step drops before it makes its own. A step that begins
 * with zero_grad() finds those of the call before, which lie in none of its peaks. */
#include "sizes.h"

#define PROBED                                                                         \
    4 /* parameters looked at: where one has a gradient, all count as having */

uint64_t
oomkit_baseline(const oomkit_call *call)
{
    if (call->sizes.baseline == OOMKIT_UNKNOWN) {
        return OOMKIT_UNKNOWN;
    }
    return call->sizes.dropped < call->sizes.baseline
               ? call->sizes.baseline - call->sizes.dropped
               : 0;
}

/* Before the first plan of a call. A step is taken to drop them until it was seen not
 * to, or never to update anything. Never raises. */
void
oomkit_baseline_enter(oomkit_call *call)
{
    oomkit_step *step = call->step;
    Py_ssize_t i, left = PROBED;

    call->sizes.entry_gradients = call->sizes.dropped = 0;
    if (step->gradient_bytes == 0) { /* no OOM yet, or nothing is trained */
        return;
    }
    for (i = 0; i < call->parts->param_count && left > 0; i++, left--) {
        OWNED PyObject *gradient =
            PyObject_GetAttr(call->parts->params[i], call->st->str_grad);
        oomkit_error_dismiss(); /* an estimate goes without it */
        if (gradient != NULL && gradient != Py_None) {
            call->sizes.entry_gradients = step->gradient_bytes;
            left = 0;
        }
    }
    if (step->drops_gradients > 0 ||
        (step->drops_gradients == 0 && step->updates != 0)) {
        call->sizes.dropped = call->sizes.entry_gradients;
    }
}

/* At the first backward it shows. */
void
oomkit_baseline_marked(oomkit_call *call, int gradients)
{
    call->sizes.gradients = gradients ? OOMKIT_GRADIENTS_THERE : OOMKIT_GRADIENTS_NONE;
    if (call->sizes.entry_gradients > 0) {
        call->step->drops_gradients = gradients ? -1 : 1;
        call->sizes.dropped = gradients ? 0 : call->sizes.entry_gradients;
    }
}

/* After a roll-back the figure itself tells: `now` is allocated. */
void
oomkit_baseline_rolled_back(oomkit_call *call, uint64_t now)
{
    if (!oomkit_call_is_replay(call) && now != OOMKIT_UNKNOWN &&
        call->sizes.baseline != OOMKIT_UNKNOWN && now < call->sizes.baseline) {
        call->sizes.dropped = call->sizes.baseline - now;
    }
}
