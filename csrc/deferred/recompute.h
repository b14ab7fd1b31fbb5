/* What a failed backward has added to gradients that were there, computed again. */
#ifndef OOMKIT_UNDO_RECOMPUTE_H
#define OOMKIT_UNDO_RECOMPUTE_H

#include "../call/call_types.h"

/* A backward over the whole batch has failed, with its exception in flight: its loss is
 * noted, by which the second time is known to be the same. */
void
oomkit_recompute_note(oomkit_call *call, PyObject *roots);

/* Between two attempts, where grads.owed says so: takes off the gradients that were set
 * aside what they hold of the failed attempt, and puts them back. 0 the next attempt
 * can begin; -1 with an exception. */
int
oomkit_recompute(oomkit_call *call);

/* The backward of that: `engine` is torch's. NULL always. */
PyObject *
oomkit_recompute_backward(oomkit_call *call, PyObject *engine, PyObject *const *args,
                          size_t nargsf, PyObject *kwnames);

#endif
