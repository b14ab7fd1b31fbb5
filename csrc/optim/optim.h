/* Optimizers, schedulers and scalers: what they have moved, and what they are given. */
#ifndef OOMKIT_OPTIM_OPTIM_H
#define OOMKIT_OPTIM_OPTIM_H

#include "updating.h"
#include "../call/events.h"

/* What happens in a call concerns (call/events.h): */
extern const oomkit_rule oomkit_hyperparams_rule, oomkit_scheduler_args_rule;

/* --- after_update.c --- */
/* What the update has changed: what it was, with what it is now. 0 or -1. */
int
oomkit_updated(oomkit_call *call, oomkit_memo **found);
/* Were fewer optimizers stepped than the step steps? Known from a finished call, else
 * guessed from those that take part: then rather fewer than all. Of optimizers that
 * were not found it is not known how many there are. */
int
oomkit_updates_are_left(const oomkit_call *call);
/* Has it failed with an out-of-memory error (in flight) after it had begun a
 * collective, which the other ranks make once? 1: then it cannot be made again, and the
 * error in flight says so. */
int
oomkit_update_failed_shared(oomkit_call *call, PyObject *optimizer);
/* Before a scaler's real update(): its scale, which update() changes in place. 0 or -1.
 */
int
oomkit_scale_note(oomkit_call *call, PyObject *scaler);
/* Has a scaler found infinite gradients and skipped the update? 1, 0 or -1. */
int
oomkit_scale_fell(const oomkit_call *call);

/* --- groups.c --- */
/* Copies of groups, or of an optimizer's: values, one dictionary for each. */
PyObject *
oomkit_groups_copy(oomkit_state *st, PyObject *groups);
PyObject *
oomkit_hyperparams_copy(oomkit_state *st, PyObject *optimizer);
/* An optimizer's groups at entry, for oomkit_hyperparams_restore(); the same as before,
 * where nothing in them has changed since. */
PyObject *
oomkit_hyperparams_mark(const oomkit_call *call, PyObject *optimizer);
/* The copies among that, borrowed from it. */
PyObject *
oomkit_hyperparams_copies(PyObject *entry);
/* Kept copies of these groups. New reference; NULL, never with an exception. */
PyObject *
oomkit_hyperparams_kept(const oomkit_owner *owner, PyObject *groups);
/* Values of the groups that are there now and were at entry, as they were. 0 or -1. */
int
oomkit_hyperparams_again(oomkit_state *st, PyObject *optimizer, PyObject *entry);
/* And which groups there were, with the values, the parameters and the lists that they
 * had. Can be done again. 0 or -1. */
int
oomkit_hyperparams_restore(oomkit_state *st, PyObject *optimizer, PyObject *entry);
/* Of an optimizer (any other object has none): are there more groups now? 1 or 0. */
int
oomkit_groups_grew(const oomkit_state *st, PyObject *object, PyObject *entry);

/* --- hyperparams.c --- */
int
oomkit_hyperparams_note(oomkit_call *call, PyObject *optimizer);
int
oomkit_owners_epochs_note(oomkit_call *call);
int
oomkit_owners_epochs_moved(oomkit_call *call, PyObject **scheduler);
int
oomkit_hyperparams_changed(oomkit_call *call, PyObject *optimizer, PyObject **name);

/* --- optimizer_mark.c --- */
int
oomkit_optimizer_mark_take(oomkit_call *call, PyObject *optimizer, int *index);
void
oomkit_optimizers_release(oomkit_call *call);
/* An attribute that an optimizer has itself, or by a property. New reference or NULL.
 */
PyObject *
oomkit_optimizer_attribute(PyObject *optimizer, PyObject *name);

/* --- optimizer.c --- */
/* Moved: 1 when a parameter or a state tensor changed in place. */
int
oomkit_optimizer_moved(oomkit_call *call, int index);
int
oomkit_optimizer_undo(oomkit_call *call, int index);
int
oomkit_optimizer_copy(oomkit_call *call, int index);
/* Tells of each parameter (borrowed) that is its old value again, at a new version. */
int
oomkit_optimizer_restore_copy(oomkit_call *call, int index, oomkit_param_is_back told);
/* The same of all that have begun a step(): then the update may be made again. And what
 * they have made or replaced goes. 0 or -1. */
int
oomkit_optimizers_restore_copies(oomkit_call *call, oomkit_param_is_back told);
int
oomkit_optimizers_undo(oomkit_call *call);
int
oomkit_optimizer_is_foreach(oomkit_call *call, int index);
int
oomkit_optimizers_any_moved(oomkit_call *call);
/* Removes from a dict every key that is not among those. 0 or -1. */
int
oomkit_undo_new_keys(PyObject *dict, PyObject *const *known, Py_ssize_t count);
/* Removes what an optimizer's step() has put into the state of one parameter, whose
 * values begin here. 0 or -1. */
int
oomkit_undo_new_values(const oomkit_state_item *items, Py_ssize_t count);
/* Had an optimizer's step() begun to make its state, and nothing else? */
int
oomkit_optimizer_failed_in_init(oomkit_state *st, PyObject *exception);

int
oomkit_hyperparams_refuse_moved(oomkit_call *call, PyObject *optimizer);

int
oomkit_update_committed(oomkit_call *call);
/* Of a call that is committed: by the step() of a scheduler alone, before any update?
 */
int
oomkit_only_scheduled(oomkit_call *call);

/* --- user_state.c --- */
/* Schedulers, scalers and the user's own objects, as they were at entry. */
int
oomkit_scaler_mark(oomkit_call *call, PyObject *scaler);
/* Has a method of a scaler run? */
int
oomkit_scaler_marked(const oomkit_call *call);
/* accelerate's Accelerator (borrowed), found while the call runs: its count of batches.
 * 0 or -1. */
int
oomkit_accelerator_mark(oomkit_call *call, PyObject *accelerator);
int
oomkit_owner_copy(oomkit_call *call, PyObject *owner);
int
oomkit_owners_mark(oomkit_call *call);
int
oomkit_owners_again(oomkit_call *call);
int
oomkit_owners_restore(oomkit_call *call);
void
oomkit_owners_release(oomkit_savepoint *savepoint);
int
oomkit_owners_visit(const oomkit_savepoint *savepoint, visitproc visit, void *arg);
/* Beside a replay (undo/savepoint.c): what is marked there is marked in the call, too,
 * for what it has done to them counts once. */
int
oomkit_owners_now(oomkit_call *call, const oomkit_after *after, oomkit_savepoint *now);
int
oomkit_owners_back(oomkit_call *call, const oomkit_savepoint *now, int finished);

#endif
