/* Attributes that an optimizer or a scheduler keeps on itself while it steps. */
#ifndef OOMKIT_PYTHON_ATTRIBUTES_H
#define OOMKIT_PYTHON_ATTRIBUTES_H

#include "call.h"

/* Notes them, before anything of its step() runs, once per attempt as long as the call
 * can be taken back: of a scheduler also those of the schedulers that it
 * steps. 0 or -1. */
int
oomkit_attributes_mark(oomkit_call *call, PyObject *object);

/* All that were noted are as they were: new ones go, others have their value again. Can
 * be done again. 0 or -1. */
int
oomkit_attributes_restore(oomkit_call *call);

/* Those of one, when its step() has run out of memory. Keeps the exception in flight.
 * 0, or -1 with another. */
int
oomkit_attributes_undo(oomkit_call *call, PyObject *optimizer);

#endif
