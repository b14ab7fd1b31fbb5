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

/* Is it the split alone that this error (borrowed) refuses? */
int
oomkit_split_is_refused(const oomkit_call *call, const PyObject *exception);
/* The refusal (stolen, not in flight) is followed by the whole batch once more, if all
 * is back, as far as can be told; `runs`: rows of a micro-batch may be run to see. 0
 * that attempt is planned; -1 with the exception to raise. Runs Python code. */
int
oomkit_split_refused(oomkit_call *call, PyObject *exception, int runs);
/* No batch is found in a whole call that has failed, or it cannot be cut, as the
 * exception in flight says: it runs again as it is. As above. */
int
oomkit_split_impossible(oomkit_call *call);
/* That batch does not run, or no rung has room for it: the refusal is in flight, with a
 * note that says so: "the whole batch ", and `text` (stolen, may be NULL). 1, or 0
 * where there was none. */
int
oomkit_split_refusal_stands(oomkit_call *call, PyObject *text);
/* Rolls back. 0; -1 with `exception` (stolen) in flight, and what is not back said. */
int
oomkit_unfit_undo(oomkit_call *call, PyObject *exception);

/* The call has worked: what it had to keep to, later plans of the site keep to. */
void
oomkit_unfit_learn(oomkit_call *call);

/* "ValueError: Expected more ..." and where. New str or NULL. */
PyObject *
oomkit_unfit_describe(oomkit_call *call, PyObject *exception);
/* Appends to what is said of a call that can be split no further why it can not. Steals
 * `reason`, which may be NULL. New reference or NULL. */
PyObject *
oomkit_unfit_explain(const oomkit_call *call, PyObject *reason);

#endif
