/* Copies of parameters, for a step that changes them outside an optimizer. */
#ifndef OOMKIT_PYTHON_PRISTINE_H
#define OOMKIT_PYTHON_PRISTINE_H

#include "call.h"

/* shown.c. Once per list of participants: does the step's code show that it writes to
 * parameters by hand? 0 or -1. Runs Python code. */
int
oomkit_writes_look(oomkit_call *call);
/* What it found: the line (borrowed str), or NULL. */
PyObject *
oomkit_writes_shown(const oomkit_call *call);
/* May it be a write that no version tells of? */
int
oomkit_writes_hidden(const oomkit_call *call);

/* At entry of an attempt: copies where the code shows writes, and what 64 values of
 * each parameter are there or where a call has met an error before. 0 or -1. */
int
oomkit_pristine_begin(oomkit_call *call);
/* Before the first micro-batch of an attempt. 0 or -1. */
int
oomkit_pristine_take(oomkit_call *call);
/* optimizer_safety="copy": before an update, of the parameters that no optimizer has.
 * 0 or -1. */
int
oomkit_pristine_rest(oomkit_call *call);
/* While rolling back: how many parameters stay changed by the step, and *which is the
 * first of them; -1. */
Py_ssize_t
oomkit_pristine_restore(oomkit_call *call, Py_ssize_t *which);
/* shown.c. The words for them, `first` one and `count` in all. 1 and *message (owned),
 * or -1. */
int
oomkit_pristine_refuse(oomkit_call *call, PyObject **message, Py_ssize_t first,
                       Py_ssize_t count);
/* The first micro-batch has changed nothing: without the copies from here on, but where
 * the code shows writes. */
void
oomkit_pristine_checked(oomkit_call *call);
void
oomkit_pristine_release(oomkit_call *call);

#endif
