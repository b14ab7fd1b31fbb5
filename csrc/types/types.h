/* The types of oomkit._C. */
#ifndef OOMKIT_TYPES_TYPES_H
#define OOMKIT_TYPES_TYPES_H

#include "../loop/chunks.h"
#include "../loop/guard.h"

/* --- bound_type.c --- */
PyObject *
oomkit_bound_new(oomkit_state *st, PyObject *step, PyObject *object);
PyObject *
oomkit_bound_step(PyObject *op); /* borrowed */

/* --- chunks_options.c --- */
/* Fills self->options and what chunks() has beside them; `given` is borrowed and may be
 * NULL. 0, or -1 with TypeError or ValueError. */
int
oomkit_chunks_options(oomkit_chunks *self, PyObject *given);

/* --- guarded_type.c --- */
/* `func` under a guard of its own, with the options of `guard` and the
 * name of `func` where it has no label. New reference, or NULL with TypeError. */
PyObject *
oomkit_guarded_new(const oomkit_guard *guard, PyObject *func);

/* --- options.c --- */
/* Are the keywords (borrowed, may be NULL) of `function` all among `names`, which ends
 * with NULL? 0, or -1 with TypeError that names the one that may be meant. */
int
oomkit_options_known(oomkit_state *st, const char *function, PyObject *kwargs,
                     const char *const *names);
/* Fills *options from keyword arguments. 0 or -1 with TypeError/ValueError.
 */
int
oomkit_options_parse(oomkit_state *st, PyObject *kwargs, oomkit_options *options);
void
oomkit_options_clear(oomkit_options *options);
int
oomkit_options_traverse(oomkit_options *options, visitproc visit, void *arg);

/* --- per_object.c --- */
void
oomkit_step_drop_instances(oomkit_step *step);

/* --- step_copy.c --- */
/* The options as keyword arguments, participants included; those that
 * `memo` (borrowed, may be NULL) has a copy of are that copy. New dict or NULL. */
PyObject *
oomkit_step_options(const oomkit_step *step, PyObject *memo);
PyObject *
oomkit_step_reduce(PyObject *op, PyObject *ignored);
PyObject *
oomkit_step_copy(PyObject *op, PyObject *ignored);
PyObject *
oomkit_step_deepcopy(PyObject *op, PyObject *memo);

/* --- step_make.c --- */
/* `func` decorated with the options of `kwargs` (borrowed, may be NULL).
 * New reference or NULL. */
PyObject *
oomkit_step_make(oomkit_state *st, PyObject *func, PyObject *kwargs);

/* --- step_state.c --- */
/* New references or NULL. */
PyObject *
oomkit_step_state(PyObject *op, PyObject *ignored);
PyObject *
oomkit_step_load(PyObject *op, PyObject *state);

/* per_object.c: the step that knows about `object` (borrowed). Borrowed from `step`, or
 * NULL with an exception. */
oomkit_step *
oomkit_step_of_instance(oomkit_step *step, PyObject *object);

#endif
