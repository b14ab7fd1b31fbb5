/* Optimizers, schedulers and scalers: what they have moved, and what they are given. */
#ifndef OOMKIT_OPTIM_OPTIM_H
#define OOMKIT_OPTIM_OPTIM_H

#include "../call/events.h"

/* What happens in a call concerns (call/events.h): */
extern const oomkit_rule oomkit_hyperparams_rule;

/* --- after_update.c --- */
/* List of (was, now) of what the update has changed. 0 or -1. */
int
oomkit_updated(oomkit_call *call, oomkit_memo **found);

/* --- hyperparams.c --- */
PyObject *
oomkit_hyperparams_copy(oomkit_state *st, PyObject *optimizer);
int
oomkit_hyperparams_restore(oomkit_state *st, PyObject *optimizer, PyObject *copies);
int
oomkit_hyperparams_note(oomkit_call *call, PyObject *optimizer);
int
oomkit_owners_again(oomkit_call *call);
int
oomkit_owners_epochs_note(oomkit_call *call);
int
oomkit_owners_epochs_moved(oomkit_call *call, PyObject **scheduler);
int
oomkit_hyperparams_changed(oomkit_call *call, PyObject *optimizer, PyObject **name);

/* --- optimizer.c --- */
/* Moved: 1 when a parameter or a state tensor changed in place. */
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
/* A parameter was put back from its copy and has this version. */
void
oomkit_optimizer_param_version(oomkit_call *call, const PyObject *param,
                               uint32_t version);
/* Removes from a dict every key that is not in `known` (list). 0 or -1. */
int
oomkit_undo_new_keys(PyObject *dict, PyObject *known);
/* Had an optimizer's step() begun to make its state, and nothing else? */
int
oomkit_optimizer_failed_in_init(oomkit_state *st, PyObject *exception);

/* --- scheduler_args.c --- */
/* Arguments of schedulers and optimizers that are held back. */
int
oomkit_metric_number(oomkit_state *st, PyObject *argument, double *value);
int
oomkit_metrics_note(oomkit_call *call, PyObject *scheduler, PyObject *const *args,
                    Py_ssize_t positional, PyObject *kwnames);
int
oomkit_metrics_settle(oomkit_call *call, PyObject *scheduler, PyObject *const *args,
                      Py_ssize_t positional, PyObject *kwnames, PyObject **mean,
                      Py_ssize_t *at);

int
oomkit_hyperparams_refuse_moved(oomkit_call *call, PyObject *optimizer);

int
oomkit_update_committed(oomkit_call *call);

#endif
