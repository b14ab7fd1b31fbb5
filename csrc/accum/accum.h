/* What a split call has to watch so that micro-batches make the whole batch. */
#ifndef OOMKIT_ACCUM_ACCUM_H
#define OOMKIT_ACCUM_ACCUM_H

#include "../hook/method.h"

#define OOMKIT_RESTARTS 4 /* of one call: each one has taken something in */

/* --- empty_mean.c --- */
/* Before a backward from `root` (borrowed, NULL for several) of a split call
 * and after it. 0, or -1 with SplitError: it was of a mean over nothing. */
void
oomkit_nothing_begin(oomkit_call *call, PyObject *root);
int
oomkit_nothing_end(oomkit_call *call);

/* --- grad_hooks.c --- */
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
/* After an OOM: may it be retried? Sets call->refused.why, and *committed to 1 where a
 * hook has changed parameters already. 0 or -1. */
int
oomkit_hooks_judge(oomkit_call *call, int *committed);

/* --- held_update.c --- */
/* The optimizer that this step() updates, by itself or through a scaler; borrowed, or
 * NULL. */
PyObject *
oomkit_interceptor_optimizer(interceptor_object *self, PyObject *const *args,
                             size_t nargsf, PyObject *kwnames);
int
oomkit_interceptor_hold(interceptor_object *self, PyObject *const *args, size_t nargsf,
                        PyObject *kwnames);

/* --- late.c --- */
/* 1 something was taken in, 0 nothing, -1 with an exception. */
int
oomkit_strangers_adopt(oomkit_call *call, PyObject *leaf, PyObject *all);
int
oomkit_strangers_known(const oomkit_call *call, const PyObject *leaf);
int
oomkit_strangers_kept(oomkit_call *call, PyObject *leaf, PyObject *ours);
PyObject *
oomkit_modules_alive(oomkit_state *st);
/* Adopted leaves are among the parameters from the first to the second. */
int
oomkit_participants_hold(oomkit_participants *parts);

/* --- loss_value.c --- */
int
oomkit_loss_is_nan(oomkit_state *st, PyObject *root, int32_t dtype);

/* --- restart.c --- */
int
oomkit_strangers_restart(oomkit_call *call);
int
oomkit_strangers_check(oomkit_call *call, PyObject *result);
/* At entry of an attempt: a buffer (borrowed) that requires grad takes part as a leaf.
 * 0 or -1. */
int
oomkit_restart_with_buffer(oomkit_call *call, PyObject *buffer);

/* --- sequence.c --- */
/* 0, or -1 with SplitError that names both lines. Of _cut: 1 with it. */
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
int
oomkit_course_scale_note(oomkit_call *call, PyObject *scaler);

/* --- side_effects.c --- */
/* What micro-batch 1 of a site's first split call changes besides. */
int
oomkit_effects_begin(oomkit_call *call);
int
oomkit_effects_end(oomkit_call *call);
void
oomkit_effects_abandon(oomkit_call *call);

/* --- stale_forward.c --- */
/* After an update that was held back, a forward of what it updates. */
int
oomkit_forward_watch(oomkit_call *call, PyObject *target, oomkit_owner_kind kind,
                     PyObject *optimizer);
int
oomkit_forward_begins(PyObject *module);
void
oomkit_forward_release(oomkit_call *call);

/* --- stray_grads.c --- */
/* Gradients that no backward of ours explains */
int
oomkit_grads_begin_micro(oomkit_call *call);
void
oomkit_grads_end_micro(oomkit_call *call);
int
oomkit_grads_refuse_unexpected(oomkit_call *call);

/* --- unknown_leaves.c --- */
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

#endif
