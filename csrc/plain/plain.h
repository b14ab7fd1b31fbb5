/* Plain state of the user's. */
#ifndef OOMKIT_PLAIN_PLAIN_H
#define OOMKIT_PLAIN_PLAIN_H

#include "../call/call_types.h"

/* --- parameter_writes.c --- */
/* Once per list of participants: does the step's code show that it writes to
 * parameters by hand? 0 or -1. Runs Python code. */
int
oomkit_writes_look(oomkit_call *call);
/* What it found: the line (borrowed str), or NULL. */
PyObject *
oomkit_writes_shown(const oomkit_call *call);
/* May it be a write that no version tells of? */
int
oomkit_writes_hidden(const oomkit_call *call);
/* The words for them, `first` one and `count` in all. 1 and *message (owned),
 * or -1. */
int
oomkit_param_copies_refuse(oomkit_call *call, PyObject **message, Py_ssize_t first,
                           Py_ssize_t count);

#endif
