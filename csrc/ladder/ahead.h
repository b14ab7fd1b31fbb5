/* State of the next part of an update, on its way to the device while the present part
 * runs: on a stream of its own. Of CUDA alone; the update is the same without. */
#ifndef OOMKIT_LADDER_AHEAD_H
#define OOMKIT_LADDER_AHEAD_H

#include "../call/call.h"

typedef struct oomkit_ahead {
    PyObject *stream; /* owned: beside the update's; NULL: there is nothing like it */
    PyObject *copies; /* owned: dict of address of a tensor to its copy, or NULL */
    int on_its_way;   /* the update's stream has not waited for them */
} oomkit_ahead;

/* Leaves *ahead without a stream where there is none. 0 or -1. */
int
oomkit_ahead_begin(oomkit_call *call, oomkit_ahead *ahead);
/* Begins to copy tensors (a list; they are on the host). No room: nothing is on its way
 * then. 0 or -1. */
int
oomkit_ahead_fetch(oomkit_call *call, oomkit_ahead *ahead, PyObject *tensors);
/* What the present stream is given from here on comes after the copies. 0 or -1. */
int
oomkit_ahead_wait(oomkit_call *call, oomkit_ahead *ahead);
/* The copy of the tensor of that address: the caller's alone. New reference; NULL,
 * without an exception where there is none. */
PyObject *
oomkit_ahead_take(const oomkit_ahead *ahead, PyObject *key);
/* The copies go, when they are done. Never fails; keeps an exception. */
void
oomkit_ahead_drop(oomkit_call *call, oomkit_ahead *ahead);
void
oomkit_ahead_end(oomkit_call *call, oomkit_ahead *ahead);

#endif
