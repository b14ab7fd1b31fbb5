/* A call of a process group: what it tells the other ranks, and what they say. Who
 * agrees on what, and when, is said in oomkit/_ranks/agreement.py; these are the places
 * of a call where it is asked. All but the first return at once in any other call.
 * Whether it is such a call is asked by oomkit_ranks_agreed() (call/call_types.h). */
#ifndef OOMKIT_RANKS_AGREE_H
#define OOMKIT_RANKS_AGREE_H

#include "../call/call_types.h"

/* Before anything of the call is marked: does it train a model that is spread over
 * ranks? Collectives that a forward would begin with are made now. 0; 1 where
 * parameters were gathered and are not any more, so that who takes part is to be found
 * again; -1. Runs Python code. */
int
oomkit_ranks_enter(oomkit_call *call);
/* With global_weight=: this rank has `count` such numbers of items, of which each
 * backward of its step takes the mean. What its losses count is in call->ranks.shares
 * then. 0 or -1. */
int
oomkit_ranks_weigh(oomkit_call *call, const double *items, Py_ssize_t count);
/* An outermost backward, with all gradients of the batch in .grad after the last
 * micro-batch's: they are reduced here. 0 or -1; also -1 where another rank has failed,
 * and call->tries.restart says so. */
int
oomkit_ranks_backward_begins(oomkit_call *call);
int
oomkit_ranks_backward_ends(oomkit_call *call);
/* How near memory is to its end in an update: it fits, as far as is known; it may not;
 * it goes in parts, so that all ranks keep copies to go back to. */
enum { OOMKIT_UPDATE_ROOMY = 0, OOMKIT_UPDATE_NEAR, OOMKIT_UPDATE_TIGHT };
/* Before the first update, which on this rank is `tight`, and where the function has
 * returned: have all ranks come as far? The same. */
int
oomkit_ranks_commit(oomkit_call *call, int tight);
int
oomkit_ranks_returned(oomkit_call *call);
/* The same, told when a closure (borrowed) of an optimizer's step() has returned, which
 * computes the gradients. New reference: what is called in its place, or NULL. */
PyObject *
oomkit_ranks_closure(oomkit_call *call, PyObject *closure);
/* Is that vote still to come? */
static inline int
oomkit_ranks_will_commit(const oomkit_call *call)
{
    return oomkit_ranks_agreed(call) && !call->ranks.committed && call->proof == NULL;
}

/* Is there one more after it? */
static inline int
oomkit_ranks_will_settle(const oomkit_call *call)
{
    return call->ranks.tight != 0;
}

/* After the updates of a call in which one was tight, and before anything else that
 * cannot be taken back: have those of all ranks worked? Asked once in a call. The same.
 */
int
oomkit_ranks_settle(oomkit_call *call);
/* An error (borrowed, not in flight) leaves the call between these two votes, or has
 * come out of the second one: is the update to be taken back, as on other ranks? */
int
oomkit_ranks_takes_back(oomkit_call *call, PyObject *exception);
/* A call that was whole returns this: not a loss whose backward, which the caller runs
 * out of the call, would not be weighed among other ranks'. 0 or -1. */
int
oomkit_ranks_whole_returns(oomkit_call *call, PyObject *result);
/* Has it committed, so that others have updated, or may have, and keep it? 1, 0 or -1.
 */
int
oomkit_ranks_committed(oomkit_call *call);
/* An attempt has ended without a result: was it because another rank has failed? Then
 * call->tries.restart says so. Keeps the exception in flight. */
void
oomkit_ranks_note_stop(oomkit_call *call);
/* Is this error (borrowed, not in flight) one of a collective that lacks a rank? 1, 0
 * or -1. */
int
oomkit_ranks_lost(oomkit_call *call, PyObject *exception);
/* Is this leaf a parameter that a model which is sharded has gathered? 1, 0 or -1. */
int
oomkit_ranks_made(oomkit_call *call, PyObject *leaf);
/* Before anything else is put back: what a model that is sharded has begun. 0 or -1. */
int
oomkit_ranks_back(oomkit_call *call);
/* A proof is about to run this step, and has shown what it wanted. As above. */
int
oomkit_ranks_proof_begins(oomkit_call *call);
int
oomkit_ranks_proof_ends(oomkit_call *call);
/* An attempt has failed here, and everything is back: the others are told if they have
 * seen anything of it. And another rank has failed, and everything is back here, too. 0
 * or -1. */
int
oomkit_ranks_failed(oomkit_call *call);
int
oomkit_ranks_again(oomkit_call *call);
/* A method of the agreement that answers with 1 where another rank has failed, which
 * ends the attempt here. 0 or -1. */
int
oomkit_ranks_ask(oomkit_call *call, const char *method);
/* The call has ended: have all of its updates been made? */
static inline void
oomkit_ranks_note_updated(oomkit_call *call, int updated)
{
    call->ranks.updated = updated;
}

/* The call is over; `exception` (borrowed, not in flight) is what it raises, or NULL.
 * Keeps no exception. */
void
oomkit_ranks_leave(oomkit_call *call, PyObject *exception);

extern PyMethodDef oomkit_ranks_methods[];

#endif
