/* A device that is numbers alone: what a micro-batch needs, and calls that are planned
 * against it until they fit. */
#ifndef OOMKIT_TESTS_MEMORY_MODEL_H
#define OOMKIT_TESTS_MEMORY_MODEL_H

#include "check.h"
#include "knowledge.h"
#include "plan.h"

#define MIB (UINT64_C(1) << 20)

typedef struct device_model { /* MiB; peaks above the baseline */
    double baseline, constant, row, gradients;
} device_model;

/* A first one ends with the gradients that it made itself, its activations gone. */
static double
model_peak(const device_model *model, int role, int64_t rows)
{
    double with_activations = model->constant + model->row * (double)rows;
    double with_gradients = model->constant + model->gradients;

    if (role == OOMKIT_LATER) {
        return with_activations + model->gradients;
    }
    return with_activations > with_gradients ? with_activations : with_gradients;
}

static int
model_fits(const device_model *model, int role, int64_t rows, uint64_t budget)
{
    return (model->baseline + model_peak(model, role, rows)) * (double)MIB <=
           (double)budget;
}

/* The fewest micro-batches that fit, the first one larger where that helps; 0 = none.
 */
static int64_t
best_k(const device_model *model, int64_t batch, uint64_t budget)
{
    int64_t first = batch, later = batch;
    while (first > 0 && !model_fits(model, OOMKIT_FIRST, first, budget)) {
        first--;
    }
    while (later > 0 && !model_fits(model, OOMKIT_LATER, later, budget)) {
        later--;
    }
    if (first == batch) {
        return 1;
    }
    return first < 1 || later < 1 ? 0 : 1 + (batch - first + later - 1) / later;
}

/* Runs the plan as far as it fits. 1 when all of it does; else what failed was told. */
static int
run_plan(const device_model *model, oomkit_knowledge *known, const oomkit_plan *plan,
         uint64_t baseline, uint64_t budget, oomkit_measured *m)
{
    uint64_t gradients = (uint64_t)(model->gradients * (double)MIB);
    int64_t i, start, rows;

    *m = (oomkit_measured){.batch = plan->batch, .k = oomkit_plan_count(plan)};
    m->baseline_bytes = baseline;
    m->budget_bytes = budget;
    m->gradient_bytes = gradients;
    for (i = 0; i < m->k; i++) {
        int role = i > 0 ? OOMKIT_LATER : OOMKIT_FIRST;
        CHECK(oomkit_plan_slice(plan, i, &start, &rows) == OOMKIT_OK);
        if (!model_fits(model, role, rows, budget)) {
            if (i > 0) {
                oomkit_know_measured(known, OOMKIT_FIRST, m->rows[0], m->bytes[0],
                                     baseline, budget, gradients);
            }
            oomkit_know_failed(known, role, rows, baseline, budget, gradients);
            return 0;
        }
        if (rows > m->rows[role]) {
            m->rows[role] = rows;
            m->bytes[role] = (uint64_t)(model_peak(model, role, rows) * (double)MIB);
        }
    }
    return 1;
}

/* One call that was asked to begin with `asked` micro-batches. OOMs until it works, *k
 * micro-batches in the end; -1 when it never does. */
static int
run_asked(const device_model *model, oomkit_knowledge *known, int64_t batch,
          int64_t asked, uint64_t budget, int64_t *k)
{
    oomkit_plan_request request = {.batch = batch,
                                   .min_micro_batch = 1,
                                   .multiple_of = 1,
                                   .start_accumulation = asked};
    oomkit_plan_reason reason;
    oomkit_plan plan;
    oomkit_measured m;
    int ooms = 0;

    request.baseline_bytes = (uint64_t)(model->baseline * (double)MIB);
    request.budget_bytes = budget;
    request.gradient_bytes = (uint64_t)(model->gradients * (double)MIB);
    CHECK(oomkit_plan_choose(known, &request, &plan, &reason) == OOMKIT_OK);
    while (!run_plan(model, known, &plan, request.baseline_bytes, budget, &m)) {
        ooms++;
        CHECK(oomkit_knowledge_valid(known) && ooms < 200);
        if (oomkit_plan_next(known, &request, &plan, &plan, &reason) != OOMKIT_OK) {
            return -1;
        }
    }
    oomkit_know_worked(known, &m);
    *k = m.k;
    return ooms;
}

static inline int
run_call(const device_model *model, oomkit_knowledge *known, int64_t batch,
         uint64_t budget, int64_t *k)
{
    return run_asked(model, known, batch, 1, budget, k);
}

#endif
