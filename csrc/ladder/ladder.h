/* The ladder: what is done where smaller micro-batches are not enough. */
#ifndef OOMKIT_LADDER_LADDER_H
#define OOMKIT_LADDER_LADDER_H

#include "../call/call.h"
#include "../call/events.h"
#include "../call/step.h"

/* In the order in which they are climbed. A plan's `rung`, and a record's, is the
 * highest that is used: those below it act where they are needed. */
typedef enum oomkit_rung {
    OOMKIT_RUNG_SPLIT = 0,   /* smaller micro-batches, and nothing else */
    OOMKIT_RUNG_UPDATE,      /* "update": an optimizer's step() in parts */
    OOMKIT_RUNG_STATE,       /* "state": optimizer state on the host */
    OOMKIT_RUNG_ACTIVATIONS, /* "activations": saved tensors on the host */
    OOMKIT_RUNG_RECOMPUTE,   /* "recompute": modules that repeat, checkpointed */
    OOMKIT_RUNG_GRADIENTS =
        OOMKIT_RUNG_NONE_BESIDE /* "gradients": what has accumulated on the host */
} oomkit_rung;

#define OOMKIT_RUNGS 6
#define OOMKIT_RUNG_BIT(rung) (1u << (rung)) /* also of OOMKIT_SAID_RUNGS */
#define OOMKIT_LADDER_ALL (OOMKIT_RUNG_BIT(OOMKIT_RUNGS) - 2)

/* --- rungs.c --- */
/* "split", "update", ... */
const char *
oomkit_rung_name(int rung);
/* The rung of a name (str); 0 for any other text. */
int
oomkit_rung_of(PyObject *name);
/* May this call climb to it? */
int
oomkit_rung_allowed(const oomkit_call *call, oomkit_rung rung);
/* The rungs that `ladder=` names, as bits. 0, or -1 with ValueError. */
int
oomkit_ladder_parse(PyObject *given, unsigned *mask);
/* What calls on this thread that do not say may climb: a mask (a trial of a search has
 * none), or -1 for all. What it was before. */
int
oomkit_ladder_scope(int mask);
/* The call uses it, for its record. Once for each step and rung: a WARNING with what it
 * costs, to which `detail` (static text or NULL) is added. 0 or -1. */
int
oomkit_rung_used(oomkit_call *call, oomkit_rung rung, const char *detail);

/* Nothing smaller is allowed. The rung that the call has climbed to, > 0; 0 where there
 * is none left that helps, up to `highest`; -1. What the shape knows of sizes is of
 * that rung from here on. */
int
oomkit_ladder_climb(oomkit_call *call, int highest);
/* Has a call of this shape worked on the rung of the present plan? 1 or 0; 0 without a
 * ladder. */
int
oomkit_ladder_has_worked(oomkit_call *call);
/* A call is about to be planned: 1 where there is so much more room than when its rung
 * was climbed to that it is tried without, or where state has gone to the host as in an
 * earlier run; 0 or -1. */
int
oomkit_ladder_begins(oomkit_call *call, const oomkit_plan_request *request);

/* --- careful.c --- */
/* Before marks are taken: a call that may be left half done keeps copies of what its
 * updates change. 0 or -1. */
int
oomkit_careful_begin(oomkit_call *call);
/* Has the host room for copies of what updates change? Half of what it has to spare is
 * asked for, at most. 1 or 0. */
int
oomkit_host_has_room(const oomkit_call *call);
/* At the end of a call that has gone well, with so many rows at a time. */
void
oomkit_careful_learn(oomkit_call *call, int64_t rows);

/* --- update_room.c --- */
/* Before an optimizer's step(), whose mark has number `index`: 1 it may run as it is, 2
 * the same, but only just, so that it is worth measuring; 0 it must go in parts; 3 it
 * may not fit and cannot go in parts: as 2, with copies to go back to; -1 with an
 * exception (nothing has moved). */
int
oomkit_update_fits(oomkit_call *call, PyObject *optimizer, int index);
/* The same of a step() with a closure, which never goes in parts. `computes`: it is the
 * closure that makes the gradients, so that nothing is known of what the update needs.
 */
int
oomkit_update_fits_whole(oomkit_call *call, PyObject *optimizer, int index,
                         int computes);
/* Of what that has said: may it fail for all that? */
int
oomkit_update_is_near(const oomkit_call *call, PyObject *optimizer, int fits);
/* It ran out of memory where it was to fit: in parts from now on. */
void
oomkit_update_failed(oomkit_call *call, PyObject *optimizer);
/* It went well, in parts. */
void
oomkit_update_went(oomkit_call *call, PyObject *optimizer);
/* Of all updates of a call that has worked, for later runs. */
void
oomkit_updates_known(oomkit_call *call, oomkit_update_known *update);
/* What it needed, of a window around it, or around parts that were whole groups. */
void
oomkit_update_measured(oomkit_call *call, PyObject *optimizer, uint64_t bytes);

/* --- update_parts.c --- */
/* step() in parts: as one step() with these arguments, `original` (borrowed, may be
 * NULL) standing in the instance dictionary. New reference; or NULL with an exception,
 * and after one of memory nothing has moved. Py_NotImplemented (new reference) where it
 * cannot be cut. */
PyObject *
oomkit_update_in_parts(oomkit_call *call, PyObject *optimizer, int index,
                       PyObject *original, PyObject *const *args, size_t nargsf,
                       PyObject *kwnames);

/* --- host_grads.c --- */
/* May gradients go to the host while they accumulate, and has it room? 1, 0 or -1. */
int
oomkit_host_grads_possible(oomkit_call *call);
/* Is that still to be climbed to? */
int
oomkit_host_grads_are_next(const oomkit_call *call);
extern const oomkit_rule oomkit_host_grads_rule;

/* --- host_state.c --- */
/* A copy of a tensor on the device of the call, inside its budget. New or NULL. */
PyObject *
oomkit_device_copy(oomkit_call *call, PyObject *tensor);

/* Dict of address to tensor: state of an optimizer that is on the host. Borrowed; NULL
 * without an exception where there is none. */
PyObject *
oomkit_hosted_of(oomkit_state *st, PyObject *optimizer);
/* The same, made where there is none. Borrowed, or NULL with an exception. */
PyObject *
oomkit_hosted_make(oomkit_call *call, PyObject *optimizer);
/* An optimizer that has nothing there is forgotten. 0 or -1. */
int
oomkit_hosted_tidy(oomkit_state *st, PyObject *optimizer);
/* The value of a tensor to the host, where that has room for it in an update in parts,
 * or back to `device`. 0 or -1. */
int
oomkit_host_move_out(oomkit_call *call, PyObject *hosted, PyObject *tensor,
                     uint64_t *bytes);
struct oomkit_ahead;
/* `ahead` (may be NULL) may have it on the device already. */
int
oomkit_host_move_in(oomkit_call *call, PyObject *hosted, PyObject *tensor,
                    const struct oomkit_ahead *ahead);
/* What an optimizer has there goes back to the device. 0 or -1. */
int
oomkit_host_return(oomkit_call *call, PyObject *optimizer);
/* State of all optimizers of the call that may go in parts, `most` bytes of it. *bytes
 * is what that freed. 0 or -1. */
int
oomkit_host_all(oomkit_call *call, uint64_t most, uint64_t *bytes);
/* Bytes of this call's optimizers that are there now. */
uint64_t
oomkit_host_bytes(oomkit_call *call);
/* Bytes of it that may still be taken: half of what is free and what they take, but for
 * that. OOMKIT_UNKNOWN. */
uint64_t
oomkit_host_left(oomkit_call *call);
/* Before an update with state on the host, which would need `needed` bytes with all of
 * it on the device, where `left` are left: is there room for it? It is counted. */
void
oomkit_host_room(oomkit_call *call, uint64_t needed, uint64_t left);
/* After a call that worked: back to the device where there has been room for it for a
 * while. 0 or -1. */
int
oomkit_host_settle(oomkit_call *call);

#endif
