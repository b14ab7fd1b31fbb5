/* What an optimizer of somebody's own keeps beside its state: lists, queues, arrays. */
#ifndef OOMKIT_OPTIM_OPTIMIZER_EXTRAS_H
#define OOMKIT_OPTIM_OPTIMIZER_EXTRAS_H

#include "../call/call_types.h"

/* Notes it before an update. 0 or -1. Runs Python code. */
int
oomkit_extras_take(oomkit_call *call, oomkit_optimizer_mark *mark);
/* It is as it was. 0 or -1. */
int
oomkit_extras_restore(oomkit_call *call, const oomkit_optimizer_mark *mark);
/* What of it cannot be put back (borrowed str), or NULL. */
PyObject *
oomkit_extras_unknown(const oomkit_call *call, int index);
/* The same of the first optimizer that has any. */
PyObject *
oomkit_extras_any_unknown(const oomkit_call *call);

/* The words for it, while rolling back. 1 and *message (owned), or -1. */
int
oomkit_extras_refuse(oomkit_call *call, PyObject **message);
/* An update has failed and everything else is back: it is not repeated. Steals
 * `exception`. NULL always. */
PyObject *
oomkit_extras_raise(oomkit_call *call, int index, PyObject *exception);

#endif
