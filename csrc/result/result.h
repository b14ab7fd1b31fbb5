/* Results of micro-batches: kept, judged, joined. */
#ifndef OOMKIT_RESULT_RESULT_H
#define OOMKIT_RESULT_RESULT_H

#include "facts.h"
#include "../py/options.h"

/* --- detach.c --- */
/* Keeps a result of a micro-batch: tensors that carry a graph are detached at once, so
 * that nothing of the micro-batch's graph stays alive, and caches of models are dropped
 * (with join= everything that is not a tensor stays). 0 or -1. */
int
oomkit_join_add(oomkit_state *st, const oomkit_options *options, oomkit_join *join,
                PyObject *result, int64_t rows, double weight);
/* A result with convert(tensor) (anything) in place of each tensor, containers made
 * anew; every other value stays. New reference or NULL. */
PyObject *
oomkit_keep_converted(oomkit_state *st, const oomkit_options *options, PyObject *result,
                      PyObject *convert);
/* Drops the results from number `keep` on (roll back). */
int
oomkit_join_truncate(oomkit_join *join, Py_ssize_t keep);
void
oomkit_join_clear(oomkit_join *join);

/* --- join.c --- */
/* The result of the whole batch. Rules: tensors whose dim 0 is the micro-batch's are
 * concatenated in order; a 0-d tensor or a float is the weighted sum with the weights
 * (they sum to 1 for a mean; with reduction sum the loss's are all 1 and other floats
 * get rows/B); integers added, but kept where they are no counts; booleans must agree;
 * equal strings and None kept; lists whose length is the micro-batch's are
 * concatenated; mappings, data classes, tuples, lists and named tuples by element and
 * rebuilt as their own type; anything else must be equal or is an error that names the
 * place and proposes join=. A tensor that required grad comes back requiring grad, by a
 * node that raises when a gradient reaches it; not so the loss while nothing is parked.
 * New reference, or NULL with SplitError. */
PyObject *
oomkit_join_finish(oomkit_state *st, const oomkit_options *options, oomkit_join *join);

/* --- loss_place.c --- */
/* The loss in a result: the result itself when it is a tensor, ["loss"] of a mapping,
 * .loss; of a tuple or list the first element, or the only 0-d tensor that requires
 * grad where the first is none: (logits, loss). New reference, or NULL without an
 * exception when there is none, NULL with an exception on failure (check
 * PyErr_Occurred). */
PyObject *
oomkit_result_loss(oomkit_state *st, PyObject *result);
/* Does it need a backward? 1 and *loss (owned, unless NULL) with its facts, 0 or -1. */
int
oomkit_result_wants_backward(oomkit_state *st, PyObject *result, PyObject **loss,
                             oomkit_tensor_facts *facts);
/* The number of that element, 0 where there are none; -1 with an exception. */
Py_ssize_t
oomkit_loss_place(oomkit_state *st, PyObject *result);
/* The same of a result whose tensors have lost their graphs. */
PyObject *
oomkit_result_loss_at(oomkit_state *st, PyObject *result, Py_ssize_t at);

#endif
