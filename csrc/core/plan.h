/* The planner: a pure function of observations to the next plan. It keeps no state,
 * allocates nothing and always ends: every refusal of a plan makes the next micro-batch
 * smaller, until the smallest allowed one is refused too. */
#ifndef OOMKIT_CORE_PLAN_H
#define OOMKIT_CORE_PLAN_H

#include <stdint.h>

/* How a batch is cut. `accumulation` micro-batches: batch mod k slices of ceil(batch/k)
 * rows, then slices of floor(batch/k) (7 in 3: 3, 2, 2); or, when `first` is not 0, one
 * first slice of `first` rows and equal others. With multiple_of > 1 every slice but
 * the last is a multiple of it. */
typedef struct oomkit_plan {
    int64_t batch;        /* rows, >= 1 */
    int64_t accumulation; /* k, >= 1 */
    int64_t first;        /* rows of a larger first slice, or 0 */
    int64_t multiple_of;  /* >= 1 */
    uint32_t rung;        /* position on the escalation ladder; 0 = split only */
} oomkit_plan;

typedef enum oomkit_plan_reason {
    OOMKIT_REASON_WHOLE = 0, /* nothing known against the whole batch */
    OOMKIT_REASON_ASKED, /* accumulation_steps= of the caller, or forced by a test */
    OOMKIT_REASON_REMEMBERED, /* a size that an earlier call of this signature found */
    OOMKIT_REASON_OOM,        /* the micro-batch was halved after an OOM */
    OOMKIT_REASON_FLUSHED,    /* the same plan again after the cache was emptied */
    OOMKIT_REASON_EXHAUSTED   /* nothing smaller is allowed */
} oomkit_plan_reason;

/* Everything a decision may depend on. Rows unless said; 0 = not known. */
typedef struct oomkit_plan_observations {
    int64_t batch;              /* rows of this call */
    int64_t min_micro_batch;    /* >= 1 */
    int64_t multiple_of;        /* >= 1 */
    int64_t start_accumulation; /* k asked for by the caller, >= 1 */
    int64_t largest_ok;         /* largest micro-batch of this signature that worked */
    int64_t smallest_failed;    /* smallest micro-batch that ran out of memory */
    uint32_t ooms_in_call;      /* OOMs since this call began */
    uint32_t successes;         /* finished calls of this signature */
    uint64_t baseline_bytes;    /* allocated before the step */
    uint64_t peak_bytes;        /* highest measured peak at largest_ok */
    uint64_t budget_bytes;      /* usable now */
    uint64_t requested_bytes;   /* of the last OOM */
} oomkit_plan_observations;

/* The plan to begin a call with. OOMKIT_OK, or OOMKIT_EINVAL for numbers out of range.
 */
int
oomkit_plan_choose(const oomkit_plan_observations *seen, oomkit_plan *plan,
                   oomkit_plan_reason *reason);

/* The plan after `failed` ran out of memory: micro-batch halved, k doubled. OOMKIT_OK;
 * OOMKIT_EREFUSED (reason EXHAUSTED) when `failed` already used the smallest allowed
 * micro-batch; OOMKIT_EINVAL. */
int
oomkit_plan_next(const oomkit_plan_observations *seen, const oomkit_plan *failed,
                 oomkit_plan *plan, oomkit_plan_reason *reason);

/* Number of slices that the plan really has (multiple_of may leave fewer than k). */
int64_t
oomkit_plan_count(const oomkit_plan *plan);

/* Rows of the largest slice: the micro-batch size. */
int64_t
oomkit_plan_micro_batch(const oomkit_plan *plan);

/* Slice number `index`, 0 <= index < count: *start and *length in rows. */
int
oomkit_plan_slice(const oomkit_plan *plan, int64_t index, int64_t *start,
                  int64_t *length);

/* "whole", "asked", "remembered", "oom", "flushed", "exhausted". */
const char *
oomkit_plan_reason_name(oomkit_plan_reason reason);

#endif
