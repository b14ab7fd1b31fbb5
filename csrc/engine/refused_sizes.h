/* Sizes of micro-batches that the step itself cannot work on. */
#ifndef OOMKIT_SIZES_REFUSED_SIZES_H
#define OOMKIT_SIZES_REFUSED_SIZES_H

#include "../call/call_types.h"

/* The step's own error (stolen, not in flight) has ended a micro-batch: one that only
 * the split makes is followed by an attempt in other sizes. 0 the next attempt is
 * planned; -1 with the exception to raise: the error itself where it says nothing about
 * sizes, SplitError where no other size is left, oomkit.OutOfMemory where there is no
 * memory for one. Runs Python code. */
int
oomkit_unfit(oomkit_call *call, PyObject *exception);

/* The call has worked: what it had to keep to, later plans of the site keep to. */
void
oomkit_unfit_learn(oomkit_call *call);

/* Appends to what is said of a call that can be split no further why it can not. Steals
 * `reason`, which may be NULL. New reference or NULL. */
PyObject *
oomkit_unfit_explain(const oomkit_call *call, PyObject *reason);

#endif
