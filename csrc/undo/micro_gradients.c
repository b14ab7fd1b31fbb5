/* Gradients since a micro-batch began: which have come or moved, by whatever way. */
#include "gradients.h"
#include "undo.h"

int
oomkit_grads_micro_begins(oomkit_call *call)
{
    oomkit_grads_end_micro(call);
    return oomkit_grads_marks_take(call, &call->grads.began);
}

int
oomkit_grads_since_micro(oomkit_call *call, uint8_t *states)
{
    return oomkit_grads_marks_compare(call, call->grads.began, states, NULL) < 0 ? -1
                                                                                 : 0;
}

/* Forgets what was marked when a micro-batch began. */
void
oomkit_grads_end_micro(oomkit_call *call)
{
    oomkit_grads_marks_drop(call, &call->grads.began);
}
