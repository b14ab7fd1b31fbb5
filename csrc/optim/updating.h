/* What updates have done in the present attempt, in the words of those who ask. */
#ifndef OOMKIT_OPTIM_UPDATING_H
#define OOMKIT_OPTIM_UPDATING_H

#include "../call/call_types.h"

/* Who is told of a parameter (borrowed) that was put back from its copy: at this
 * version it has its old value. */
typedef void (*oomkit_param_is_back)(oomkit_call *call, const PyObject *param,
                                     uint32_t version);

/* --- asked --- */

/* Has an optimizer's step() begun? */
static inline int
oomkit_update_begun(const oomkit_call *call)
{
    return call->updating.count > 0;
}

/* Optimizer steps that were made, those of optimizers that were not found too. */
static inline int
oomkit_updates_made(const oomkit_call *call)
{
    return call->updating.made + call->updating.unknown_made;
}

/* Was there a backward between two of them? */
static inline int
oomkit_updates_were_apart(const oomkit_call *call)
{
    return call->updating.apart;
}

/* Was one made by an optimizer that was not found? Does one run? */
static inline int
oomkit_update_by_unknown(const oomkit_call *call)
{
    return call->updating.unknown_made > 0;
}

static inline int
oomkit_update_of_unknown_runs(const oomkit_call *call)
{
    return call->updating.unknown_begun > 0;
}

/* Has an optimizer's step() run out of memory, and was not finished? */
static inline int
oomkit_update_unfinished(const oomkit_call *call)
{
    return call->updating.step_failed;
}

/* Is it known already that nothing can be taken back? (oomkit_update_committed() looks
 * at what has moved.) */
static inline int
oomkit_update_is_final(const oomkit_call *call)
{
    return call->updating.committed;
}

/* Does an intercepted method run? Inside another one? Without a closure, which is code
 * of the step? */
static inline int
oomkit_update_runs(const oomkit_call *call)
{
    return call->updating.depth > 0;
}

static inline int
oomkit_update_is_nested(const oomkit_call *call)
{
    return call->updating.depth > 1;
}

static inline int
oomkit_update_runs_alone(const oomkit_call *call)
{
    return call->updating.depth > 0 && !call->updating.closure;
}

/* Has it begun a collective with the other ranks, who make each of its collectives
 * once?
 */
static inline int
oomkit_update_is_shared(const oomkit_call *call)
{
    return call->updating.shared;
}

/* Do parameters, or what an optimizer keeps elsewhere, stay as the failed attempt has
 * left them? And is it only not known that they do not? */
static inline int
oomkit_params_stay(const oomkit_call *call)
{
    return call->updating.params_stuck != 0;
}

static inline int
oomkit_params_may_stay(const oomkit_call *call)
{
    return call->updating.params_stuck == 2;
}

/* --- told --- */

static inline void
oomkit_params_found_stuck(oomkit_call *call, int surely)
{
    call->updating.params_stuck = surely ? 1 : 2;
}

/* Has the last one raised an error, so that it may be half made? */
static inline int
oomkit_update_has_raised(const oomkit_call *call)
{
    return call->updating.raised;
}

/* An intercepted method begins; it has been left: was it the outermost one? */
static inline void
oomkit_update_enter(oomkit_call *call)
{
    call->updating.depth++;
}

static inline int
oomkit_update_leave(oomkit_call *call, int raised)
{
    call->updating.raised = raised;
    call->updating.shared &= call->updating.depth > 1;
    return --call->updating.depth == 0;
}

static inline void
oomkit_update_becomes_shared(oomkit_call *call)
{
    call->updating.shared = 1;
}

/* What runs now has a closure, or has none. What it was before, to be put back. */
static inline int
oomkit_update_closure(oomkit_call *call, int closure)
{
    const int before = call->updating.closure;
    call->updating.closure = closure;
    return before;
}

/* A step() of this optimizer (borrowed) was made; one that works after it has failed
 * keeps what it has set. */
static inline void
oomkit_update_worked(oomkit_call *call, const PyObject *optimizer)
{
    oomkit_updating *u = &call->updating;

    u->apart |= u->made > 0 && call->backward.done != u->backwards;
    u->backwards = call->backward.done;
    u->made++;
    if (call->entry.owners.failed_step == optimizer) {
        call->entry.owners.failed_step = NULL;
    }
}

/* It ran out of memory: its attributes go back when the outermost step() that it is
 * part of has been left. */
static inline void
oomkit_update_broke_off(oomkit_call *call, const PyObject *optimizer)
{
    call->updating.step_failed = 1;
    call->entry.owners.failed_step = optimizer;
}

/* Nothing of it is left to run: what it has set is as it is to be. */
static inline void
oomkit_update_settled(oomkit_call *call)
{
    call->entry.owners.failed_step = NULL;
}

/* Something has moved on that cannot be taken back. */
static inline void
oomkit_update_becomes_final(oomkit_call *call)
{
    call->updating.committed = 1;
}

/* A step() of an optimizer that was not found. */
static inline void
oomkit_update_of_unknown_begins(oomkit_call *call)
{
    call->updating.unknown_begun++;
}

static inline void
oomkit_update_of_unknown_ends(oomkit_call *call)
{
    call->updating.unknown_begun--;
    call->updating.unknown_made++;
}

/* The attempt is over: none of it has happened. */
static inline void
oomkit_updates_forget(oomkit_call *call)
{
    oomkit_updating *u = &call->updating;

    u->committed = u->made = u->unknown_made = u->params_stuck = 0;
    u->depth = u->closure = u->shared = u->unknown_begun = u->step_failed = 0;
    u->raised = u->backwards = u->apart = 0;
}

#endif
