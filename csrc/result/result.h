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
/* --- join_told.c --- */
/* The result of a part of a loop is about to be added: nothing needs a gradient. `site`
 * is borrowed; so is what each tensor is kept as until it is added: a callable, or
 * NULL.
 */
void
oomkit_join_of_loop(oomkit_join *join, oomkit_result_site *site, int rows_sure,
                    PyObject *convert);
/* The results, as they are kept: borrowed list, or NULL. And the last one, of some. */
PyObject *
oomkit_join_results(const oomkit_join *join);
PyObject *
oomkit_join_last(const oomkit_join *join);
int
oomkit_join_traverse(const oomkit_join *join, visitproc visit, void *arg);
/* Before joining. What the weights are of: is the loss a sum, whatever reduction= says,
 * and were they found by a proof? And of a sequence of so many losses those of each
 * (results x groups, borrowed), 0 without. */
void
oomkit_join_weighed(oomkit_join *join, int is_sum, int found);
void
oomkit_join_grouped(oomkit_join *join, const double *weights, Py_ssize_t groups);
/* What the call was, see oomkit_join. */
typedef struct oomkit_join_of {
    int evaluation, parked, one_loss, rows_sure, proving;
} oomkit_join_of;
void
oomkit_join_is_of(oomkit_join *join, oomkit_join_of of);
/* Are the leaves to be told that gradients are wanted of? They are these (a list); and
 * figures that the update has changed. Both are stolen; NULL for none. */
int
oomkit_join_wants_sources(const oomkit_join *join);
void
oomkit_join_sources(oomkit_join *join, PyObject *sources);
void
oomkit_join_updated(oomkit_join *join, oomkit_memo *updated);
/* The place of the loss in a tuple or list, as it was met last. */
Py_ssize_t
oomkit_join_loss_at(const oomkit_join *join);
/* The results aside, while others are joined for the same site; and back in their
 * place.
 */
void
oomkit_join_aside(oomkit_join *join, oomkit_join *aside);
void
oomkit_join_back(oomkit_join *join, const oomkit_join *aside);
/* What was added goes, and what was told of it. 0, or -1 with an exception: all the
 * same.
 */
int
oomkit_join_empty(oomkit_join *join);

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
/* Does it need a backward? 1 and *loss (owned, unless NULL) with its facts (unless
 * NULL: then there is no *loss), 0 or -1. */
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
