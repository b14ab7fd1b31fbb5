/* Weights of micro-batches, and the three ways of noticing wrong ones: labels of -100,
 * a whole loss to compare with, and a micro-batch compared with its own halves. */
#ifndef OOMKIT_ACCUM_WEIGHTS_H
#define OOMKIT_ACCUM_WEIGHTS_H

#include "../call/loss_types.h"

struct oomkit_call;

/* --- weights.c --- */

/* The share of the loss that each slice of the attempt carries. Runs weight=. 0 or -1.
 */
int
oomkit_weights_set(struct oomkit_call *call);

/* What a slice weighs in each group of losses, one without weight=. New list or NULL.
 */
PyObject *
oomkit_weights_of_slice(const struct oomkit_call *call, int64_t slice);

/* Are the losses of the micro-batches added up as they are? */
int
oomkit_losses_are_sums(const struct oomkit_call *call);

/* A proof runs, where `rule` (borrowed) has its weights; NULL: it is over. */
void
oomkit_weights_on_trial(struct oomkit_call *call, PyObject *const *rule);

/* Has nobody said what the loss is a mean over? */
int
oomkit_weights_are_free(const struct oomkit_call *call);

/* Has nobody said it, and are values of the batch to be read for it in this call? */
int
oomkit_weights_are_due(const struct oomkit_call *call);

/* --- loss_value.c --- */

/* The loss of the call's first backward: `roots` is the tensor, or a tuple with it
 * alone (others are not looked at). While whole it is kept, at the cost of some 10 ns;
 * in the first split call it is compared with the last whole one, and a factor near the
 * number of micro-batches is said. For a loss that the caller runs backward on: call it
 * with the loss when the function has returned. 0, or -1 with an exception. */
int
oomkit_losses_note(struct oomkit_call *call, PyObject *roots);

/* After a finished whole call of `rows` rows. */
void
oomkit_losses_learn(struct oomkit_call *call, int64_t rows);

void
oomkit_loss_site_clear(oomkit_loss_site *site);

/* The value of a loss that is returned, where that costs little. */
void
oomkit_loss_take(oomkit_state *st, PyObject *tensor, oomkit_loss *loss);
void
oomkit_loss_drop(oomkit_loss *loss);
/* Is there one? Is it known to be of half precision, as a scalar on the CPU? */
static inline int
oomkit_loss_known(const oomkit_loss *loss)
{
    return loss->size != 0 || loss->tensor != NULL;
}
static inline int
oomkit_loss_is_half(const oomkit_loss *loss)
{
    return loss->size == 2;
}

/* The same of a small one with several elements: its memory, while it is as it was. */
void
oomkit_loss_rows_take(oomkit_state *st, PyObject *tensor, oomkit_loss *loss);

/* A kept loss as a number, given the dtype that losses have here. NaN where that is not
 * known. */
double
oomkit_loss_value(oomkit_state *st, const oomkit_loss *loss, int32_t dtype);

/* The only root of a backward; borrowed, NULL when there are several or none. */
PyObject *
oomkit_losses_root(oomkit_state *st, PyObject *roots);

/* The loss of a micro-batch of a call that is run again. 0 or -1. */
int
oomkit_losses_replay(struct oomkit_call *call, PyObject *root);

/* loss_rows.c: the same of a result with a row per sample, beside `whole`; and of all
 * of them. 0 or -1. */
int
oomkit_losses_rows(struct oomkit_call *call, PyObject *result,
                   const oomkit_loss *whole);
int
oomkit_losses_rows_judge(struct oomkit_call *call, int noise);

/* What is to be said of losses of a replay (`text`, borrowed; None for nothing, NULL
 * with an exception): OutOfMemory, or a warning where noise may explain it. 0 or -1. */
int
oomkit_losses_replay_differs(struct oomkit_call *call, PyObject *text, int noise);

/* All of them are there: do they make the loss that the call had? Said if not; `noise`:
 * random numbers or batch statistics are in it. 0, or -1 (a warning that is an error).
 */
int
oomkit_losses_replayed(struct oomkit_call *call, const oomkit_loss *loss, int noise);

#endif
