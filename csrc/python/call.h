/* What can be done with a protected call, file by file. */
#ifndef OOMKIT_PYTHON_CALL_H
#define OOMKIT_PYTHON_CALL_H

#include "call_types.h"

/* The call in progress on this thread, or NULL. */
oomkit_call *
oomkit_call_current(void);
void
oomkit_call_set_current(oomkit_call *call);

/* gradients.c. restore: 0 restored; 1 refused, *why tells (static text); -1 error. */
int
oomkit_grads_mark(oomkit_call *call);
int
oomkit_grads_park(oomkit_call *call);
int
oomkit_grads_hide(oomkit_call *call);
int
oomkit_grads_unpark(oomkit_call *call);
int
oomkit_grads_settle(oomkit_call *call);
int
oomkit_grads_put_away(oomkit_call *call);
int
oomkit_grads_bring_back(oomkit_call *call);
void
oomkit_grads_abandon(oomkit_call *call);
int
oomkit_grads_restore(oomkit_call *call, const char **why, PyObject **which);
void
oomkit_grads_end_attempt(oomkit_call *call);
int
oomkit_grads_grow(oomkit_call *call, Py_ssize_t old);
void
oomkit_grads_release(oomkit_call *call);

/* escaped.c: gradients that no backward of ours explains */
int
oomkit_grads_begin_micro(oomkit_call *call);
void
oomkit_grads_end_micro(oomkit_call *call);
int
oomkit_grads_refuse_unexpected(oomkit_call *call);

/* nested.c: backwards inside backwards */
int
oomkit_nested_any(void);
/* Is this backward a custom Function's (reentrant checkpoint), no hook's? 1, 0, -1. */
int
oomkit_nested_is_functions(void);
/* Is this thread one of the engine's, or its caller's, at work on a graph? */
int
oomkit_nested_in_engine(const oomkit_state *st);
int
oomkit_nested_refuse(oomkit_state *st, oomkit_call *call);
void *
oomkit_nested_enter(const oomkit_call *call);
void
oomkit_nested_leave(const oomkit_call *call, void *outer);

/* buffers.c */
int
oomkit_buffers_mark(oomkit_call *call);
int
oomkit_buffers_restore(oomkit_call *call, PyObject **which);
int
oomkit_buffers_moved(oomkit_call *call);
void
oomkit_buffers_learn(oomkit_call *call);
void
oomkit_buffers_release(oomkit_call *call);
void
oomkit_buffers_free(oomkit_buffers *buffers);
/* norms.c: does one use the batch's statistics (or move its own)? 1, 0, -1. */
int
oomkit_buffers_norm(oomkit_call *call, int moves);
int
oomkit_buffers_say_norm(oomkit_call *call);

/* phases.c. Never fail; may be called with an exception set, which they keep. */
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

/* --- baseline.c: what lies below the step's own memory, as the planner counts --- */
uint64_t
oomkit_baseline(const oomkit_call *call);
void
oomkit_baseline_enter(oomkit_call *call);
void
oomkit_baseline_marked(oomkit_call *call);
void
oomkit_baseline_rolled_back(oomkit_call *call, uint64_t now);

/* rng.c */
int
oomkit_rng_mark(oomkit_call *call);
/* The same for comparing alone, into *rng. 0 or -1. */
int
oomkit_rng_note(oomkit_call *call, oomkit_rng *rng);
int
oomkit_rng_restore(oomkit_call *call);
int
oomkit_rng_moved(oomkit_call *call);
/* The same of all but torch's CPU generator. */
int
oomkit_rng_moved_beside(oomkit_call *call);
/* Was something drawn between two marks? 1 (also where that is not known), 0 or -1. */
int
oomkit_rng_drawn(oomkit_state *st, const oomkit_rng *before, const oomkit_rng *after);
void
oomkit_rng_free(oomkit_rng *rng);
void
oomkit_rng_release(oomkit_call *call);

/* optimizers.c. moved: 1 when a parameter or a state tensor changed in place. */
int
oomkit_optimizer_mark_take(oomkit_call *call, PyObject *optimizer, int *index);
int
oomkit_optimizer_moved(oomkit_call *call, int index);
int
oomkit_optimizer_undo(oomkit_call *call, int index);
int
oomkit_optimizer_copy(oomkit_call *call, int index);
int
oomkit_optimizer_restore_copy(oomkit_call *call, int index);
int
oomkit_optimizer_is_foreach(oomkit_call *call, int index);
int
oomkit_optimizers_any_moved(oomkit_call *call);
void
oomkit_optimizers_release(oomkit_call *call);

/* intercept.c */
int
oomkit_intercept_install(oomkit_call *call);
void
oomkit_intercept_remove(oomkit_call *call);
int
oomkit_intercept_split(oomkit_call *call);
/* A plain interceptor in a copy of a participant, until the call ends. New reference.
 */
PyObject *
oomkit_intercept_copy(oomkit_call *call, PyObject *copy, PyObject *name);

/* metrics.c: arguments of schedulers and optimizers that are held back. */
int
oomkit_metric_number(oomkit_state *st, PyObject *argument, double *value);
int
oomkit_metrics_note(oomkit_call *call, PyObject *scheduler, PyObject *const *args,
                    Py_ssize_t positional, PyObject *kwnames);
int
oomkit_metrics_settle(oomkit_call *call, PyObject *scheduler, PyObject *const *args,
                      Py_ssize_t positional, PyObject *kwnames, PyObject **mean,
                      Py_ssize_t *at);

/* hooks.c */
int
oomkit_hooks_post(oomkit_call *call, PyObject **name);
int
oomkit_hooks_check(oomkit_call *call);
/* Is a hook table of this name there and not empty? 1, 0 or -1. */
int
oomkit_hooks_of(PyObject *object, PyObject *name);

/* The loss that a micro-batch returns has hooks of the step's own: as above. 0, -1. */
int
oomkit_hooks_loss(oomkit_call *call, PyObject *loss);
/* After an OOM: may it be retried? Sets call->refusal, and *committed to 1 where a hook
 * has changed parameters already. 0 or -1. */
int
oomkit_hooks_judge(oomkit_call *call, int *committed);

/* slots.c */
int
oomkit_slots_note(oomkit_call *call);
int
oomkit_slots_changed(const oomkit_call *call, PyObject **key);
int
oomkit_slots_restore(oomkit_call *call);
void
oomkit_slots_release(oomkit_call *call);

/* effects.c: what micro-batch 1 of a site's first split call changes besides. */
int
oomkit_effects_begin(oomkit_call *call);
int
oomkit_effects_end(oomkit_call *call);
/* The call's arguments as (tuple, dict). 0 or -1; both are owned. */
int
oomkit_effects_arguments(const oomkit_call *call, PyObject **positional,
                         PyObject **named);
void
oomkit_effects_abandon(oomkit_call *call);
int
oomkit_intercept_zero_grad(oomkit_call *call, Py_ssize_t r);
int
oomkit_call_has_module(const oomkit_call *call, const PyObject *module);

/* backward.c */
int
oomkit_backward_install(oomkit_state *st);
int
oomkit_backward_drain(oomkit_state *st);
int
oomkit_backward_nesting(void);
/* How many that write to .grad this thread has begun. */
uint64_t
oomkit_backward_runs(void);
/* Those outside every protected call. */
int
oomkit_backward_outside(void);
int
oomkit_backward_run(oomkit_call *call, PyObject *result);

/* refuse.c: why this call must not be replayed or split (static text), or NULL. 0 or
 * -1. */
int
oomkit_refusal(oomkit_call *call, const char **why);
int
oomkit_refusal_transform(oomkit_state *st);

/* strangers.c */
int
oomkit_strangers_alive(oomkit_call *call);
int
oomkit_strangers_meet(oomkit_call *call, PyObject *roots, int nested);
void
oomkit_strangers_note(oomkit_call *call, PyObject *roots);
/* Leaves without a gradient that the replay of a returned loss writes to: none again.
 * 0 or -1. */
int
oomkit_strangers_loose_drop(oomkit_call *call);
int
oomkit_strangers_optimizer_begins(PyObject *optimizer);
void
oomkit_strangers_optimizer_ends(void);

/* adopt.c: 1 something was taken in, 0 nothing, -1 with an exception. */
int
oomkit_strangers_adopt(oomkit_call *call, PyObject *leaf, PyObject *all);
int
oomkit_strangers_known(const oomkit_call *call, const PyObject *leaf);
int
oomkit_strangers_kept(oomkit_call *call, PyObject *leaf, PyObject *ours);
PyObject *
oomkit_modules_alive(oomkit_state *st);

/* restart.c */
#define OOMKIT_RESTARTS 4 /* of one call: each one has taken something in */
int
oomkit_strangers_restart(oomkit_call *call);
int
oomkit_strangers_check(oomkit_call *call, PyObject *result);

/* compiled.c: torch.compile() off, and back as it was. Keep an exception in flight. 0
 * or -1. */
int
oomkit_compiler_off(oomkit_call *call);
int
oomkit_compiler_on(oomkit_call *call);

/* attempt.c: the present slices, from slice_index on. *result (owned) when there is one
 * alone. 0 or -1. */
int
oomkit_attempt_slices_run(oomkit_call *call, PyObject **result);
/* Their results, joined. New reference or NULL. */
PyObject *
oomkit_attempt_join(oomkit_call *call);

/* Nothing but results came out of this attempt so far, so that finished
 * parts of an evaluation may be kept. */
int
oomkit_attempt_only_results(const oomkit_call *call);

/* course.c. 0, or -1 with SplitError that names both lines. Of _cut: 1 with it. */
int
oomkit_course_note(oomkit_call *call, const void *target, const void *name);
int
oomkit_course_finish(oomkit_call *call);
void
oomkit_course_clear(oomkit_course *course);
int
oomkit_course_skipped(oomkit_call *call);
int
oomkit_course_cut(oomkit_call *call);

/* clear_between.c: zero_grad() after a backward of this micro-batch; 0 or -1. */
int
oomkit_clear_note(oomkit_call *call, PyObject *target);
void
oomkit_clear_forget(oomkit_call *call);
/* Another backward begins: is what it cleared left out of the sum? 1, 0 or -1. */
int
oomkit_clear_between(oomkit_call *call);
/* Is what this backward leaves in .grad about to be cleared? */
int
oomkit_clear_is_due(const oomkit_call *call);
int
oomkit_course_scale_note(oomkit_call *call, PyObject *scaler);
PyObject *
oomkit_course_where(void);

/* accelerate.c */
int
oomkit_accelerate_split(oomkit_call *call);
PyObject *
oomkit_accelerator_save(PyObject *accelerator);
int
oomkit_accelerator_restore(PyObject *accelerator, PyObject *saved);

/* forward.c: after an update that was held back, a forward of what it updates. */
int
oomkit_forward_watch(oomkit_call *call, PyObject *target, oomkit_owner_kind kind,
                     PyObject *optimizer);
int
oomkit_forward_begins(PyObject *module);
void
oomkit_forward_release(oomkit_call *call);

/* owners.c: schedulers, scalers and the user's own objects */
int
oomkit_scaler_mark(oomkit_call *call, PyObject *scaler);
int
oomkit_owner_copy(oomkit_call *call, PyObject *owner);
int
oomkit_owners_mark(oomkit_call *call);
/* groups.c */
PyObject *
oomkit_groups_copy(oomkit_state *st, PyObject *optimizer);
int
oomkit_groups_restore(oomkit_state *st, PyObject *optimizer, PyObject *copies);
int
oomkit_owners_groups_note(oomkit_call *call, PyObject *optimizer);
int
oomkit_owners_again(oomkit_call *call);
int
oomkit_owners_groups_end(oomkit_call *call);
int
oomkit_owners_epochs_note(oomkit_call *call);
int
oomkit_owners_epochs_moved(oomkit_call *call, PyObject **scheduler);
int
oomkit_tx_groups_moved(oomkit_call *call, PyObject *optimizer);
int
oomkit_grads_note_last(oomkit_call *call);
int
oomkit_grads_changed_since(oomkit_call *call);
int
oomkit_owners_groups_changed(oomkit_call *call, PyObject *optimizer, PyObject **name);
int
oomkit_owners_restore(oomkit_call *call);
void
oomkit_owners_release(oomkit_call *call);

/* captured.c. The device that the call's figures are of. */
void
oomkit_engine_device(oomkit_call *call);

/* That which failed: a step with the CPU alone in sight may use the accelerator. */
oomkit_device
oomkit_engine_device_of_failure(const oomkit_call *call);
/* Is a graph captured on that device, a CUDA one? 1 and call->captured, 0, -1. */
int
oomkit_captured_find(oomkit_call *call);
/* The function as it is, and the end of the call. New reference, or NULL: nothing is
 * rolled back. */
PyObject *
oomkit_captured_run(oomkit_call *call);

/* predict.c: before an optimizer's first step: will its state fit? 0, or -1 with
 * oomkit.OutOfMemory before anything moved. */
int
oomkit_predict_update(oomkit_call *call, PyObject *optimizer);

/* describe.c: words for reports. Each gives a new reference or NULL. */
PyObject *
oomkit_describe_tensor(oomkit_call *call, PyObject *tensor);
PyObject *
oomkit_describe_report(oomkit_call *call);
/* Raises oomkit.OutOfMemory with the report; `reason` (borrowed str) leads the message.
 * NULL always. */
PyObject *
oomkit_give_up(oomkit_call *call, PyObject *reason, int committed);

/* returned.c: the loss of a micro-batch that still needs backward. 0 or -1. */
int
oomkit_returned_micro(oomkit_call *call, PyObject *result);

/* transaction.c: a parameter that moved since entry: 1 and its index, 0, -1. */
int
oomkit_tx_params_moved(oomkit_call *call, Py_ssize_t *which);

/* transaction.c: begin an attempt, take it back, end the call. */
int
oomkit_tx_begin(oomkit_call *call);
int
oomkit_tx_begin_micro(oomkit_call *call);
int
oomkit_tx_sample(oomkit_call *call);
void
oomkit_tx_end_attempt(oomkit_call *call);
/* 0 everything is as at entry; 1 it cannot be: *message (owned str) says what and which
 * line to change; -1 error. */
int
oomkit_tx_restore(oomkit_call *call, PyObject **message);
int
oomkit_tx_committed(oomkit_call *call);

/* takeback.c. The same as oomkit_tx_restore, outside the budget and tried again where
 * an error came between. An error that is not out-of-memory is raised when everything
 * is back. */
int
oomkit_take_back(oomkit_call *call, PyObject **message);

/* What must be done to its end: once(argument) until it does not fail, thrice at most.
 * What it answered last; *error (owned, or NULL) is what has to be raised, also after a
 * try that succeeded: not what ran out of memory on the way there. */
int
oomkit_insist(oomkit_state *st, int (*once)(void *), void *argument, PyObject **error);

/* Memory that oomkit needs for itself was refused: the exception in flight becomes
 * oomkit.OutOfMemory, which says so and what it was wanted for; others stay. -1 always.
 */
int
oomkit_own_failed(oomkit_call *call, const char *doing);

/* An error of waiting for a device or of flushing it is in flight: unless it is out of
 * memory itself, it is told what was being recovered from. */
void
oomkit_reclaim_failed(oomkit_call *call);

/* An error after a call that has finished, when the marks at entry are gone: it says
 * so. -1 always. */
int
oomkit_failed_late(oomkit_call *call);
int
oomkit_tx_micro_end(oomkit_call *call);
/* The same by value, for writes that bump no version. */
int
oomkit_tx_params_rewritten(const oomkit_call *call, Py_ssize_t *which);
int
oomkit_tx_params_mark(oomkit_call *call);

/* Does each parameter require grad: at entry, and (once noted) at the end of the call.
 * Borrowed, behind param_versions, which must be there. And now: 0 or -1. */
uint8_t *
oomkit_tx_params_flags(const oomkit_call *call, int at_end);
int
oomkit_tx_params_flags_now(oomkit_state *st, const oomkit_participants *parts,
                           uint8_t *flags);

/* switches.c: train(), eval() and requires_grad as at entry of the call. */
typedef struct oomkit_switches {
    PyObject *training;     /* owned: dict as call->switches, or NULL */
    uint8_t *requires_grad; /* of each parameter, or NULL */
} oomkit_switches;

int
oomkit_switches_note(oomkit_state *st, PyObject *module);
int
oomkit_switches_restore(oomkit_call *call);
int
oomkit_switches_keep(oomkit_call *call);
int
oomkit_switches_note_end(oomkit_call *call);
int
oomkit_switches_frozen_since(oomkit_state *st, const oomkit_participants *parts,
                             const uint32_t *param_versions);
int
oomkit_switches_now(oomkit_call *call, oomkit_switches *now);
int
oomkit_switches_then(oomkit_call *call, oomkit_switches *now);
void
oomkit_switches_clear(oomkit_switches *now);

/* updated.c: list of (was, now) of what the update has changed. 0 or -1. */
int
oomkit_updated(oomkit_call *call, PyObject **list);

void
oomkit_tx_end(oomkit_call *call);

/* Should gradients that are there at the first backward be copied? (signature.c) */
int
oomkit_call_wants_copies(oomkit_call *call);

/* A host copy of a tensor outside the budget. New reference or NULL. */
PyObject *
oomkit_host_copy(oomkit_state *st, PyObject *tensor);

/* Turns gradient recording off and gives back how it was (1, 0), or -1. */
int
oomkit_grad_mode_off(oomkit_state *st);
int
oomkit_grad_mode_set(oomkit_state *st, int enabled);
/* Back to `mode`, twice tried: a mode of torch's that intercepts functions may raise.
 * Keeps the exception in flight. `result`, or -1 with an exception. */
int
oomkit_grad_mode_back(oomkit_state *st, int mode, int result);

/* Gradient recording and autocast at entry, and back to it after a failure: torch's own
 * context managers leave them as they are where there is no memory to leave them. 0 or
 * -1; with the bridge neither can fail. */
int
oomkit_modes_entry(oomkit_call *call);
int
oomkit_modes_entry_back(oomkit_call *call);

#endif
