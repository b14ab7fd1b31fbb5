/* The planner asked with bounds alone. */
#ifndef OOMKIT_TESTS_OBSERVED_H
#define OOMKIT_TESTS_OBSERVED_H

#include "plan.h"

#include <string.h>

/* Bounds alone, the same for both roles, and no peaks: without a budget. */
typedef struct observed {
    int64_t batch, min_micro_batch, multiple_of, start_accumulation;
    int64_t largest_ok, smallest_failed;
} observed;

static observed
observations(int64_t batch)
{
    return (observed){batch, 1, 1, 1, 0, 0};
}

static oomkit_plan_request
request_of(const observed *seen)
{
    return (oomkit_plan_request){
        .batch = seen->batch,
        .min_micro_batch = seen->min_micro_batch,
        .multiple_of = seen->multiple_of,
        .start_accumulation = seen->start_accumulation,
        .baseline_bytes = OOMKIT_UNKNOWN,
        .budget_bytes = OOMKIT_UNKNOWN,
    };
}

static oomkit_knowledge
knowledge_of(const observed *seen)
{
    oomkit_knowledge known;
    memset(&known, 0, sizeof(known));
    for (int role = 0; role < OOMKIT_ROLES; role++) {
        known.roles[role] = (oomkit_sizes){.largest_ok = seen->largest_ok,
                                           .smallest_failed = seen->smallest_failed,
                                           .ok_room = OOMKIT_UNKNOWN,
                                           .failed_room = OOMKIT_UNKNOWN};
    }
    known.successes = seen->largest_ok > 0;
    known.failures = seen->smallest_failed > 0;
    return known;
}

static int
choose(const observed *seen, oomkit_plan *plan, oomkit_plan_reason *reason)
{
    const oomkit_plan_request request = request_of(seen);
    const oomkit_knowledge known = knowledge_of(seen);
    return oomkit_plan_choose(&known, &request, plan, reason);
}

static int
next_after(const observed *seen, const oomkit_plan *failed, oomkit_plan *plan,
           oomkit_plan_reason *reason)
{
    const oomkit_plan_request request = request_of(seen);
    const oomkit_knowledge known = knowledge_of(seen);
    return oomkit_plan_next(&known, &request, failed, plan, reason);
}

#endif
