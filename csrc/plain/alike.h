/* Plain state that each micro-batch of a split step changes alike: see alike.c. */
#ifndef OOMKIT_PLAIN_ALIKE_H
#define OOMKIT_PLAIN_ALIKE_H

#include "../call/events.h"

extern const oomkit_rule oomkit_plain_alike_rule;

/* What the rule does around a micro-batch, for runs without a graph, which tell no
 * rule. 0 or -1. */
int
oomkit_plain_alike_begins(oomkit_call *call);
int
oomkit_plain_alike_ends(oomkit_call *call, PyObject *result);

/* Has the first micro-batch changed a place that no proof has seen changed? It is to be
 * seen in one, once. 1, 0 or -1. */
int
oomkit_plain_is_new(oomkit_call *call);

/* The run of a proof that has just ended has drawn random numbers: tensors may have
 * them in. 0 or -1. */
int
oomkit_plain_is_random(oomkit_call *call);

/* The warning that `name` moves once: nothing compares tensors in the call itself. 0 or
 * -1. */
int
oomkit_plain_moves_once(oomkit_call *call, PyObject *name);

/* The names of places that end as the whole batch would leave them, without a guard,
 * each with its number: a set. New reference or NULL. */
PyObject *
oomkit_plain_settled(const oomkit_call *call);

#endif
