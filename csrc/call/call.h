/* What is asked of a protected call. */
#ifndef OOMKIT_CALL_CALL_H
#define OOMKIT_CALL_CALL_H

#include "call_types.h"

/* Will a split of this call be refused unless it was proven by its gradients? (Of
 * slices that a test forces it is the test that compares.) */
static inline int
oomkit_proof_possible(const oomkit_call *call)
{
    return call->options->verify != 0 && call->options->verify != OOMKIT_VERIFY_WARN &&
           !call->st->proves_nothing;
}

/* Does a proof run the rows in one piece, as the undecorated program would? */
static inline int
oomkit_proof_of_whole(const oomkit_call *call)
{
    return call->proof != NULL && call->cut->count == 1;
}

/* --- call.c --- */
/* Makes every call: one of `step` of which nothing has happened. `room` (borrowed) is
 * for when it is cut, and need not be initialised; nor do nodes of the batch beyond its
 * count, which are never read. */
void
oomkit_call_init(oomkit_call *call, oomkit_cut *room, struct oomkit_step *step,
                 const oomkit_options *options);
/* Before anything is written to call->cut: something is to be planned, cut or tried
 * again. */
void
oomkit_call_cut(oomkit_call *call);
int
oomkit_call_has_module(const oomkit_call *call, const PyObject *module);
/* The call's arguments as (tuple, dict). 0 or -1; both are owned. */
int
oomkit_effects_arguments(const oomkit_call *call, PyObject **positional,
                         PyObject **named);

/* --- compiled.c --- */
/* torch.compile() off, and back as it was. Keep an exception in flight. 0
 * or -1. */
int
oomkit_compiler_off(oomkit_call *call);
int
oomkit_compiler_on(oomkit_call *call);

/* --- holders.c --- */
/* The figures of a failure, before anything of the attempt is dropped; `parked`
 * (borrowed, may be NULL) are gradients that are out of sight. Never fails. Looks at
 * every parameter. */
void
oomkit_holders_note(oomkit_call *call, PyObject *const *parked,
                    oomkit_attempt *attempt);
/* The same of a run that puts everything back before its failure is noted. */
void
oomkit_holders_of_run(oomkit_call *call, PyObject *const *parked);
/* Would the last failure, in a forward or a backward, have come with any micro-batch?
 * So it is where the request is the same as in the attempt before, whose micro-batch
 * was larger, and what is there besides activations leaves no room for it; after
 * everything of the attempt is gone; `grads_may_go`: what has accumulated may leave the
 * device until the end of the backward. 1 or 0. */
int
oomkit_holders_leave_no_room(oomkit_call *call, int grads_may_go);
/* Is the last request, in a forward or a backward, larger than what is left when
 * everything of the attempt, gradients and state are away? No rung changes that. 1 or
 * 0. */
int
oomkit_holders_request_too_large(oomkit_call *call);
/* Bytes of parameters of a step (borrowed) on the CPU that its figures do not count.
 * Never fails. */
uint64_t
oomkit_holders_outside(const struct oomkit_step *step);
/* The same by the line through the last two failures: sizes between the last one and
 * the smallest are not worth an attempt each. 1 or 0. */
int
oomkit_holders_skip_sizes(const oomkit_call *call);
/* dict of kind -> bytes at the failure `last`. New reference or NULL. */
PyObject *
oomkit_holders(oomkit_call *call, oomkit_attempt *last);

/* --- describe.c --- */
/* Words for reports. Each gives a new reference or NULL. */
PyObject *
oomkit_describe_tensor(oomkit_call *call, PyObject *tensor);
PyObject *
oomkit_describe_report(oomkit_call *call);
/* Raises oomkit.OutOfMemory with the report; `reason` (borrowed str) leads the message.
 * NULL always. */
PyObject *
oomkit_give_up(oomkit_call *call, PyObject *reason, int committed);
/* The same where nothing is committed. Steals `reason`, which may be NULL with an
 * exception. -1 always. */
int
oomkit_give_up_for(oomkit_call *call, PyObject *reason);

/* The device that the call's figures are of. */
void
oomkit_engine_device(oomkit_call *call);
/* That which failed: a step with the CPU alone in sight may use the accelerator. */
oomkit_device
oomkit_engine_device_of_failure(const oomkit_call *call);
/* --- modes_at_entry.c --- */
/* Gradient recording and autocast at entry, and back to it after a failure: torch's own
 * context managers leave them as they are where there is no memory to leave them. 0 or
 * -1; with the bridge neither can fail. */
int
oomkit_modes_entry(oomkit_call *call);
/* Were no gradients recorded then? */
int
oomkit_modes_without_grad(const oomkit_call *call);
int
oomkit_modes_entry_back(oomkit_call *call);

/* --- norms.c --- */
/* Does one use the batch's statistics (or move its own)? 1, 0, -1. */
int
oomkit_buffers_norm(oomkit_call *call, int moves);
int
oomkit_buffers_say_norm(oomkit_call *call);

/* --- refuse.c --- */
/* SplitError from inside the step, and no retry. -1 always. The split alone is refused:
 * all that the attempt has changed goes back, and the whole batch may run; the text is
 * what follows "auto_batch cannot split this step: ". */
int
oomkit_refuse_split(oomkit_call *call, const char *format, ...);
/* The step itself is, however its batch is cut. */
int
oomkit_refuse_step(oomkit_call *call, const char *format, ...);
/* The same with the whole text. */
int
oomkit_refuse(oomkit_call *call, const char *format, ...);
/* The same with PartialUpdate. NULL always. */
PyObject *
oomkit_half_updated(oomkit_call *call, const char *format, ...);
/* The SplitError in flight is one of the split alone after all. */
int
oomkit_split_alone(oomkit_call *call);

/* Between two micro-batches: SplitError where CUDA graphs of torch.compile() have run.
 * 0 or -1. */
int
oomkit_refuse_graphs(oomkit_call *call);

/* --- surroundings.c --- */
/* Why this call must not be replayed or split (static text), or NULL. 0
 * or -1. */
int
oomkit_refusal(oomkit_call *call, const char **why);
int
oomkit_refusal_transform(oomkit_state *st);
/* The modules that spread a model over ranks. New list or NULL; and whether there are
 * any: 1, 0 or -1. */
PyObject *
oomkit_wrappers(oomkit_call *call);
/* With several ranks: their collectives are told of from now on, so that those inside a
 * part are known. 1, 0 without others, -1. */
int
oomkit_ranks_watched(oomkit_state *st);
int
oomkit_wrappers_any(oomkit_call *call);

#endif
