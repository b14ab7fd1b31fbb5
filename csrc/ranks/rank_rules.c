/* What a call of a process group tells the other ranks as it goes along (agree.c is
 * what it asks them). */
#include "agree.h"
#include "ranks.h"
#include "../call/call.h"
#include "../result/result.h"

/* Slices are there: no collective may overlap with their backwards. */
static int
ranks_attempt_begins(oomkit_call *call)
{
    return oomkit_ranks_agreed(call) ? oomkit_ranks_ask(call, "attempt_begins") : 0;
}

static int
ranks_micro_returns(oomkit_call *call, PyObject *result)
{
    oomkit_tensor_facts facts;
    int wanted = 0;

    if (oomkit_ranks_agreed(call) && call->backward.done == 0 && call->proof == NULL) {
        wanted = oomkit_result_wants_backward(call->st, result, NULL, &facts);
    }
    return wanted <= 0
               ? wanted
               : oomkit_refuse_step(
                     call,
                     "it returns its loss to a caller that runs backward(), which "
                     "several ranks cannot repeat; call backward() inside the step" SEE(
                         "distributed"));
}

static int
ranks_micro_begins(oomkit_call *call)
{
    return oomkit_ranks_agreed(call) ? oomkit_ranks_ask(call, "micro_begins") : 0;
}

/* A rule wants another attempt: of a model that is sharded all ranks make it, and of
 * another one where they may have seen anything of this one. */
static int
ranks_before_restart(oomkit_call *call, int why)
{
    return why == OOMKIT_RESTART_ROWS ||
                   (call->ranks.sharded && why != OOMKIT_RESTART_RANKS)
               ? oomkit_ranks_failed(call)
               : 0;
}

/* global_weight=: beside what the micro-batch counts among those of this rank. */
static int
ranks_backward_weight(oomkit_call *call, oomkit_backward *backward)
{
    const oomkit_ranked *ranks = &call->ranks;

    if (ranks->shares == NULL) {
        return 0;
    }
    if (ranks->share_count > 1 && call->backward.done >= ranks->share_count) {
        return oomkit_refuse(
            call,
            "auto_batch(weight=...) must return one weight for each backward() of the "
            "step: got %zd, expected at least %d" SEE("weight"),
            ranks->share_count, call->backward.done + 1);
    }
    backward->weight *= ranks->shares[ranks->share_count > 1 ? call->backward.done : 0];
    return 0;
}

const oomkit_rule oomkit_rank_weights_rule = {.backward_begins = ranks_backward_weight};

const oomkit_rule oomkit_ranks_rule = {.attempt_begins = ranks_attempt_begins,
                                       .micro_begins = ranks_micro_begins,
                                       .micro_returns = ranks_micro_returns,
                                       .before_retry = oomkit_ranks_failed,
                                       .before_restart = ranks_before_restart};
