/* Copies of parameters, for a step that changes them outside an optimizer. */
#ifndef OOMKIT_UNDO_PARAMETERS_H
#define OOMKIT_UNDO_PARAMETERS_H

#include "../call/call_types.h"

/* At entry of an attempt: copies where the code shows writes, and what 64 values of
 * each parameter are there or where a call has met an error before. 0 or -1. */
int
oomkit_param_copies_begin(oomkit_call *call);
/* Before the first micro-batch of an attempt. 0 or -1. */
int
oomkit_param_copies_take(oomkit_call *call);
/* optimizer_safety="copy": before an update, of the parameters that no optimizer has.
 * 0 or -1. */
int
oomkit_param_copies_rest(oomkit_call *call);
/* One flag for each parameter: has it moved since the attempt began, by its version or
 * its values? New memory (PyMem_Free) or NULL. */
uint8_t *
oomkit_params_all_moved(oomkit_call *call);
/* The addresses of all parameters that optimizers have. New set or NULL. */
PyObject *
oomkit_params_of_optimizers(const oomkit_call *call);
/* One parameter as it was at entry. 1; 0 there is no copy that would do; -1. */
int
oomkit_param_copies_put_one(oomkit_call *call, Py_ssize_t i);
/* While rolling back: how many parameters stay changed by the step, and *which is the
 * first of them; -1. */
Py_ssize_t
oomkit_param_copies_restore(oomkit_call *call, Py_ssize_t *which);
/* The first micro-batch has changed nothing: without the copies from here on, but where
 * the code shows writes. */
void
oomkit_param_copies_checked(oomkit_call *call);
void
oomkit_param_copies_release(oomkit_call *call);
static inline void
oomkit_param_copies_end(oomkit_call *call)
{
    if (call->entry.copies != NULL) {
        oomkit_param_copies_release(call);
    }
}

#endif
