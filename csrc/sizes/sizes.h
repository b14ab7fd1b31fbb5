/* What is known of sizes: measured, remembered, predicted. */
#ifndef OOMKIT_SIZES_SIZES_H
#define OOMKIT_SIZES_SIZES_H

#include "call_window.h"
#include "../call/step.h"

/* --- baseline.c --- */
/* What lies below the step's own memory, as the planner counts --- */
uint64_t
oomkit_baseline(const oomkit_call *call);
void
oomkit_baseline_enter(oomkit_call *call);
/* The attempt has come to its first backward: did some parameter have a gradient? And
 * that attempt is over. */
void
oomkit_baseline_marked(oomkit_call *call, int gradients);
static inline void
oomkit_baseline_unmarked(oomkit_call *call)
{
    call->sizes.gradients = OOMKIT_GRADIENTS_UNSEEN;
}
void
oomkit_baseline_rolled_back(oomkit_call *call, uint64_t now);

/* --- micro_peaks.c --- */
/* Never fail; may be called with an exception set, which they keep. */
void
oomkit_phase_micro_begin(oomkit_call *call);
/* An optimizer is about to step for real: what came before was forward and backward. */
void
oomkit_phase_optimizer(oomkit_call *call);
/* The present micro-batch took `bytes` at most above the baseline; 0: not measured. */
void
oomkit_phase_note(oomkit_call *call, uint64_t bytes);
void
oomkit_phase_micro_end(oomkit_call *call, int finished);
/* A whole call is done: the optimizer's peak is in it. */
void
oomkit_phase_whole(oomkit_call *call);

/* --- remember.c --- */
/* In a step's first call, before its plan. 0 or -1. Runs Python code. */
int
oomkit_recall(oomkit_call *call);
/* After a call that worked, for a step that remembers: a note for later runs if it has
 * changed what is known. Never fails. Runs Python code. */
void
oomkit_recall_note(oomkit_call *call, oomkit_signature *entry);

/* --- shapes.c --- */
/* Should gradients that are there at the first backward be copied? (shapes.c) */
int
oomkit_call_wants_copies(oomkit_call *call);
oomkit_signature *
oomkit_signature_get(oomkit_call *call, int create);
/* The key of a shape under these modes; never 0 in practice. */
uint64_t
oomkit_signature_of(const oomkit_call *call, const oomkit_batch *batch, int autocast,
                    int recording);
/* A hash of training or evaluation, autocast and gradient recording. */
uint64_t
oomkit_signature_modes(const oomkit_call *call);
/* What the planner is to know; *known is borrowed from the step. */
void
oomkit_signature_request(oomkit_call *call, oomkit_plan_request *request,
                         const oomkit_knowledge **known);
/* The call has finished: will nothing accumulate gradients? */
static inline void
oomkit_signature_forward_only(oomkit_call *call, int forward_only)
{
    call->sizes.forward_only = forward_only;
}
/* The call is done, with this largest micro-batch. */
void
oomkit_signature_succeeded(oomkit_call *call, int64_t micro_batch, uint64_t peak_bytes);
/* The micro-batch at call->cut->at has failed; without slices the whole batch, of
 * `micro_batch` rows. */
void
oomkit_signature_failed(oomkit_call *call, int64_t micro_batch);
void
oomkit_signature_forget(oomkit_call *call);
/* The same after an error of the step's own in a split call, if none has worked yet. */
void
oomkit_signature_doubt(oomkit_call *call);
/* What predictions depend on besides peaks: gradients, the room on the device. Asks the
 * driver: for failures and first calls. Never fails. */
void
oomkit_signature_survey(oomkit_call *call);
/* Bounds of a micro-batch: those of the options, and those that were learned. */
int64_t
oomkit_unfit_least(const oomkit_call *call);
int64_t
oomkit_unfit_multiple(const oomkit_call *call);
/* An error of the step's own: in this call at least so many rows (or 0), and even
 * numbers of them. The call worked with that: it is a bound of the site. */
void
oomkit_unfit_bound(oomkit_call *call, int64_t least, int even);
void
oomkit_unfit_bound_site(oomkit_call *call);

#endif
