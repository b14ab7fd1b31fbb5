/* The rungs that concern a forward. */
#ifndef OOMKIT_LADDER_ACTIVATIONS_H
#define OOMKIT_LADDER_ACTIVATIONS_H

#include "../call/call.h"

/* Half of the host memory that is to be had, in bytes; OOMKIT_UNKNOWN. Never raises. */
uint64_t
oomkit_host_spare(oomkit_state *st);

/* Are there modules to be computed again? 1, 0 or -1. Runs Python code. */
int
oomkit_recompute_find(oomkit_call *call);
/* Which ones, for people. New str; NULL without an exception where there are none. */
PyObject *
oomkit_recompute_names(const oomkit_call *call);

/* From here on what is saved goes to the host, whatever the rung and ladder=, or no
 * longer. 1, or 0 where that cannot be done. */
int
oomkit_activations_offload(oomkit_call *call, int on);

/* Before the step's function is called, by call->cut->plan.rung: *entered is for
 * leaving. 0 or -1. */
int
oomkit_activations_enter(oomkit_call *call, int *entered);
/* After it, whatever became of it. Keeps the exception in flight, but for an error of
 * recomputation, which is the cause of one that says so. */
void
oomkit_activations_leave(oomkit_call *call, int entered);
/* At the end of the call. */
void
oomkit_activations_end(oomkit_call *call);

#endif
