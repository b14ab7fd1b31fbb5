/* Attributes that an optimizer or a scheduler keeps on itself while it steps. */
#ifndef OOMKIT_OPTIM_STEP_ATTRIBUTES_H
#define OOMKIT_OPTIM_STEP_ATTRIBUTES_H

#include "../call/call_types.h"

/* What oomkit_own_taken() has told is what the object has: new attributes go,
 * others have their value again. Can be done again. 0 or -1. */
int
oomkit_attributes_put(const oomkit_state *st, PyObject *object, PyObject *saved);

/* Notes them, before anything of its step() runs, once per attempt as long as the call
 * can be taken back: of a scheduler also those of the schedulers that it
 * steps. 0 or -1. */
int
oomkit_attributes_mark(oomkit_call *call, PyObject *object);

/* Marks a scheduler that goes back to its mark whatever it has done, so that nobody has
 * to see its step(). 1; 0: it is another one; -1. */
int
oomkit_scheduler_mark(oomkit_call *call, PyObject *scheduler);

/* But for what a function of the user's counts: has one that was marked called such a
 * function? Each step() of torch ends with a new list `_last_lr`. 1, 0 or -1. */
int
oomkit_scheduler_is_final(const oomkit_call *call);

/* The same of an optimizer, with what was told of it. */
int
oomkit_attributes_note(oomkit_call *call, PyObject *object, PyObject *saved);

/* All that were noted are as they were. Can be done again. 0 or -1. */
int
oomkit_attributes_restore(oomkit_call *call);

/* Those of the optimizer whose step() ran out of memory (oomkit_update_broke_off()) go
 * back, if there is one. Keeps the exception in flight, but for one of its own. */
void
oomkit_attributes_undo(oomkit_call *call);

#endif
