/* Who is told of what happens in a call, and in which order: the index of all rules. To
 * add one, write its file and put its name here. */
#include "wiring.h"
#include "../accum/accum.h"
#include "../deferred/deferred.h"
#include "../engine/engine.h"
#include "../ladder/ladder.h"
#include "../loop/chunks.h"
#include "../optim/optim.h"
#include "../plain/alike.h"
#include "../proof/proof.h"
#include "../ranks/ranks.h"
#include "../types/types.h"
#include "../undo/undo.h"

/* What a call with its whole batch needs. */
static const oomkit_rule *const when_whole[] = {
    &oomkit_loss_value_rule,     /* before marks are taken: it reads, and may fail */
    &oomkit_rank_weights_rule,   /* before them too: it may refuse */
    &oomkit_deferred_rule,       /* the loss that is returned; anywhere */
    &oomkit_unknown_leaves_rule, /* after a failure; anywhere */
    &oomkit_host_grads_rule,     /* around the next one, as while split */
    &oomkit_gradients_rule, /* last before the engine: from here on they are moved */
    &oomkit_recompute_rule, /* after a failure; anywhere */
    NULL};

_Static_assert(sizeof(when_whole) / sizeof(*when_whole) <= OOMKIT_HANDLERS,
               "there is room for them");

/* Whose word is asked before an update of one that runs to see whether it does the same
 * again: none is made. */
static const oomkit_rule *const when_repeated[] = {&oomkit_proof_of_split_rule, NULL};

/* What has no word beside it may stand anywhere. */
static const oomkit_rule *const when_split[] = {
    &oomkit_sequence_rule,    /* first: what others refuse is then known by its line */
    &oomkit_hyperparams_rule, /* before the proof, which counts updates */
    &oomkit_plain_alike_rule, /* before the step's effects are told */
    &oomkit_switches_rule,    /* before anything is made of the graph */
    &oomkit_earlier_grads_shown_rule, /* before anything looks at gradients */
    &oomkit_stray_grads_rule,         /* before anything accumulates */
    &oomkit_earlier_grads_rule,       /* when it has marked those that are there */
    &oomkit_grad_hooks_rule,          /* before anything accumulates: it refuses */
    &oomkit_loss_value_rule,          /* before it is weighed */
    &oomkit_weights_rule, /* weight= is the user's: while gradients are the caller's */
    &oomkit_rank_weights_rule, /* beside them */
    &oomkit_ranks_rule,        /* refuses a loss that is returned: before it is taken */
    &oomkit_deferred_rule,     /* takes it */
    &oomkit_unknown_leaves_rule, /* may begin the attempt again: before marks are taken
                                  */
    &oomkit_moved_early_rule,    /* notes what has moved: before others explain it */
    &oomkit_stray_grads_at_end_rule, /* after what has moved, which explains them */
    &oomkit_side_effects_rule, /* looks at what the caller sees: before gradients go */
    &oomkit_empty_mean_rule,   /* looks at gradients: before they are parked */
    &oomkit_host_grads_rule,   /* they leave the device before they are parked */
    &oomkit_gradients_rule,    /* last but the proof: from here on they are moved */
    &oomkit_held_update_rule,  /* after what refuses an update by its gradients */
    &oomkit_scheduler_args_rule,
    &oomkit_stale_forward_rule, /* after the sequence: its last line is the update's */
    &oomkit_recompute_rule,
    &oomkit_proof_of_split_rule, /* last: it sees what the others have made */
    NULL};

static oomkit_wiring wiring = {.when_whole = when_whole,
                               .when_split = when_split,
                               .when_repeated = when_repeated,
                               .outside = &oomkit_backward_outside_calls,
                               .part_runs_backward = oomkit_chunks_backward_begins,
                               .part_call = oomkit_chunks_call,
                               .gradients_are_gone = oomkit_earlier_make,
                               .step_repeats = oomkit_proof_repeats,
                               .step_of_object = oomkit_step_of_instance,
                               .make_step = oomkit_step_make};

void
oomkit_wire(oomkit_state *st)
{
    oomkit_handlers_fill(&wiring);
    st->wiring = &wiring;
}
