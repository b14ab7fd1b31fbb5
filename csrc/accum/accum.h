/* What a split call has to watch so that micro-batches make the whole batch. */
#ifndef OOMKIT_ACCUM_ACCUM_H
#define OOMKIT_ACCUM_ACCUM_H

#include "weights.h"
#include "../call/events.h"
#include "../call/proven.h"
#include "../hook/graph.h"
#include "../hook/method.h"

#define OOMKIT_RESTARTS 4 /* of one call: each one has taken something in */

/* What happens in a call concerns (call/events.h): */
extern const oomkit_rule oomkit_sequence_rule, oomkit_stray_grads_rule,
    oomkit_stray_grads_at_end_rule, oomkit_grad_hooks_rule, oomkit_loss_value_rule,
    oomkit_weights_rule, oomkit_unknown_leaves_rule, oomkit_moved_early_rule,
    oomkit_side_effects_rule, oomkit_empty_mean_rule, oomkit_held_update_rule,
    oomkit_stale_forward_rule;

/* --- empty_mean.c --- */
/* Before a backward from `root` (borrowed, NULL for several) of a split call
 * and after it. 0, or -1 with SplitError: it was of a mean over nothing. */
void
oomkit_nothing_begin(oomkit_call *call, PyObject *root);

/* --- grad_hooks.c --- */
int
oomkit_hooks_post(oomkit_call *call, PyObject **name);
/* Is a hook table of this name there and not empty? 1, 0 or -1. */
int
oomkit_hooks_of(PyObject *object, PyObject *name);
/* The loss that a micro-batch returns has hooks of the step's own: as above. 0, -1. */
int
oomkit_hooks_loss(oomkit_call *call, PyObject *loss);

/* --- late.c --- */
/* 1 something was taken in, 0 nothing, -1 with an exception. */
int
oomkit_unknown_adopt(oomkit_call *call, PyObject *leaf, PyObject *all);
int
oomkit_unknown_known(const oomkit_call *call, const PyObject *leaf);
int
oomkit_unknown_kept(oomkit_call *call, PyObject *leaf, PyObject *ours);
/* Adopted leaves are among the parameters from the first to the second. */
int
oomkit_participants_hold(oomkit_participants *parts);

/* --- loss_value.c --- */
int
oomkit_loss_is_nan(oomkit_state *st, PyObject *root, const oomkit_tensor_facts *facts);

/* --- proven.c --- */
/* Is this split to be proven before it is run? 1, OOMKIT_PROOF_WEIGHTS where it was and
 * weights that it could not tell apart make a difference now, OOMKIT_PROOF_LOSSES where
 * weights were found and it is time to look at them again, 0 or -1. */
enum { OOMKIT_PROOF_WEIGHTS = 2, OOMKIT_PROOF_LOSSES };
int
oomkit_proof_wanted(oomkit_call *call);
/* For the search of weights: (number, name, tensor, sliced) of the tensors of the
 * batch, and micro-batches as (start, length). New list or NULL. */
PyObject *
oomkit_proof_leaves(const oomkit_call *call);
/* A tensor that is sliced, by its number among the leaves, with its rows in front; None
 * where it is not there or cannot be counted. New reference or NULL. */
PyObject *
oomkit_proof_leaf(const oomkit_call *call, Py_ssize_t index);
PyObject *
oomkit_proof_slices(const oomkit_slice *slices, int64_t count);
/* What was proven of calls like this one, or NULL. */
oomkit_proven *
oomkit_proven_find(oomkit_call *call);
/* Notes what was shown; the oldest gives way. Steals `rule` and `tried` (either may be
 * NULL). 0 or -1. */
int
oomkit_proven_note(oomkit_call *call, PyObject *rule, PyObject *tried,
                   uint64_t sequence, oomkit_proof_level level);
/* These rows were proven in this call. 0 or -1. */
int
oomkit_paths_prove(oomkit_call *call, oomkit_slice rows);
/* The weights that were found for a call like this one; borrowed from the site, or
 * NULL. */
PyObject *
oomkit_proof_rule(oomkit_call *call);
/* What the first micro-batch has done, in order: backwards and intercepted calls. 1
 * where the step decides by itself (current()). */
uint64_t
oomkit_proof_sequence(const oomkit_call *call);
/* At the end of a micro-batch, or before an update of the last one: has it done what no
 * proof has seen? Then the attempt is to be begun again, with one. 1, 0 or -1. */
int
oomkit_proof_is_new_path(oomkit_call *call);
/* Was a call like this one proven by its gradients, or does it run for that? */
int
oomkit_proof_known(oomkit_call *call);
/* It was refused after all: the next call is proven from the start. */
void
oomkit_proven_forget(oomkit_call *call);
/* Losses could not be compared in this call: in the next one, a few times. */
void
oomkit_proven_again(oomkit_call *call);
void
oomkit_proven_clear(oomkit_proven *proven);
/* Is a graph that is about to be walked one of a proof, or one that a proof holds for?
 */
int
oomkit_paths_watched(oomkit_call *call);
/* Before each micro-batch, and before each of its graphs: places in one are no places
 * in another one. */
void
oomkit_paths_micro(oomkit_call *call);
void
oomkit_paths_graph(oomkit_call *call);
/* The micro-batch does something that is called so, if a proof has not yet shown that
 * nothing comes of it. 0 or -1. */
int
oomkit_paths_kind(oomkit_call *call, uint64_t kind);
/* A sample of the gradients that the last backward has left; and that, once. */
void
oomkit_paths_leave(oomkit_call *call, uint64_t gradients);
uint64_t
oomkit_paths_left(oomkit_call *call);
/* An edge of it. One of a kind that no proof had is an operation that was not there:
 * the split is proven anew, before an update. So it is where a gradient that is not 0
 * comes to a place that has had none but 0. 0, or -1 with an exception. */
int
oomkit_paths_edge(oomkit_call *call, const oomkit_edge *edge);
/* The attempt is to begin again with a proof of that micro-batch: 1, or 0 where this
 * call has proven its rows, or enough of others. */
int
oomkit_paths_prove_next(oomkit_call *call, int64_t at);
/* A row of the micro-batch that is to be proven, or -1. */
int64_t
oomkit_paths_anchor(const oomkit_call *call);
/* Before the first micro-batch. 0 or -1. */
int
oomkit_paths_begin(oomkit_call *call);
/* What was seen is of an attempt that has ended, or of rows that were not compared. */
void
oomkit_paths_forget(oomkit_call *call);
void
oomkit_paths_clear(oomkit_call *call);

/* --- adopt_leaves.c --- */
/* Before an attempt is begun again: leaves that were met are taken in. 0 or -1. */
int
oomkit_unknown_take_in(oomkit_call *call, int why);
/* Something else came between: they are not taken in. */
void
oomkit_unknown_forget(oomkit_call *call);
int
oomkit_unknown_check(oomkit_call *call, PyObject *result);
/* At entry of an attempt: a buffer (borrowed) that requires grad takes part as a leaf.
 * 0 or -1. */
int
oomkit_restart_with_buffer(oomkit_call *call, PyObject *buffer);

/* --- stale_forward.c --- */
/* After an update that was held back, a forward of what it updates. */
int
oomkit_forward_begins(PyObject *module);

/* --- unknown_leaves.c --- */
int
oomkit_unknown_meet(oomkit_call *call, PyObject *roots, int nested);
/* Leaves without a gradient that the replay of a returned loss writes to (a list, which
 * outlives the call, or NULL); and none again. 0 or -1. */
static inline void
oomkit_unknown_note_loose(oomkit_call *call, PyObject *leaves)
{
    call->unknown.loose = leaves; /* borrowed from the caller's backward */
}

int
oomkit_unknown_loose_drop(oomkit_call *call);
int
oomkit_unknown_optimizer_begins(PyObject *optimizer);
void
oomkit_unknown_optimizer_ends(void);

#endif
