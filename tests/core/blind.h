/* A device without figures: calls are planned by what worked and what failed alone. */
#ifndef OOMKIT_TESTS_BLIND_H
#define OOMKIT_TESTS_BLIND_H

#include "check.h"
#include "knowledge.h"
#include "plan.h"

/* Rows that fit in a first micro-batch, and in a later one. */
typedef struct blind_device {
    int64_t most[OOMKIT_ROLES];
} blind_device;

/* The fewest equal micro-batches that fit. */
static inline int64_t
blind_best_k(const blind_device *device, int64_t batch)
{
    int64_t k;

    for (k = 1; k < batch; k++) {
        oomkit_plan plan = {.batch = batch, .accumulation = k, .multiple_of = 1};
        int64_t start, rows = 0;
        if (k > 1) {
            CHECK(oomkit_plan_slice(&plan, 1, &start, &rows) == OOMKIT_OK);
        }
        if (oomkit_plan_micro_batch(&plan) <= device->most[OOMKIT_FIRST] &&
            rows <= device->most[OOMKIT_LATER]) {
            break;
        }
    }
    return k;
}

/* Runs the plan as far as it fits. 1 when all of it does; else what failed was told. */
static inline int
blind_plan(const blind_device *device, oomkit_knowledge *known, const oomkit_plan *plan)
{
    const uint64_t no = OOMKIT_UNKNOWN;
    oomkit_measured m = {.batch = plan->batch, .k = oomkit_plan_count(plan)};
    int64_t i, start, rows;

    m.baseline_bytes = m.budget_bytes = no;
    for (i = 0; i < m.k; i++) {
        oomkit_role role = i > 0 ? OOMKIT_LATER : OOMKIT_FIRST;
        CHECK(oomkit_plan_slice(plan, i, &start, &rows) == OOMKIT_OK);
        if (rows > device->most[role]) {
            if (i > 0) {
                oomkit_know_measured(known, OOMKIT_FIRST, m.rows[0], 0, no, no, 0);
            }
            oomkit_know_failed(known, role, rows, no, no, 0);
            return 0;
        }
        m.rows[role] = rows > m.rows[role] ? rows : m.rows[role];
    }
    oomkit_know_worked(known, &m);
    return 1;
}

/* One call. OOMs until it works, *k micro-batches in the end; -1 when it never does. */
static inline int
blind_call(const blind_device *device, oomkit_knowledge *known, int64_t batch,
           int64_t *k)
{
    oomkit_plan_request request = {.batch = batch,
                                   .min_micro_batch = 1,
                                   .multiple_of = 1,
                                   .start_accumulation = 1,
                                   .baseline_bytes = OOMKIT_UNKNOWN,
                                   .budget_bytes = OOMKIT_UNKNOWN};
    oomkit_plan_reason reason;
    oomkit_plan plan;
    int ooms = 0;

    CHECK(oomkit_plan_choose(known, &request, &plan, &reason) == OOMKIT_OK);
    while (!blind_plan(device, known, &plan)) {
        CHECK(oomkit_knowledge_valid(known) && ++ooms < 100);
        if (oomkit_plan_next(known, &request, &plan, &plan, &reason) != OOMKIT_OK) {
            return -1;
        }
    }
    *k = oomkit_plan_count(&plan);
    return ooms;
}

#endif
