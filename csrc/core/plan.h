/* The planner: a pure function of what is known (knowledge.h) to the next plan. It
 * keeps no state, allocates nothing and always ends: every refusal of a plan makes the
 * next micro-batch smaller, until the smallest allowed one is refused too.
 *
 * It searches over k, the number of micro-batches, for sizes with the same k cost the
 * same; slices are as equal as they can be, but where a larger first one saves a whole
 * micro-batch, and of two distinct sizes at most. */
#ifndef OOMKIT_CORE_PLAN_H
#define OOMKIT_CORE_PLAN_H

#include "knowledge.h"

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
    OOMKIT_REASON_REMEMBERED, /* what an earlier call of this signature worked with */
    OOMKIT_REASON_OOM,        /* smaller after an OOM */
    OOMKIT_REASON_FLUSHED,    /* the same plan again after the cache was emptied */
    OOMKIT_REASON_EXHAUSTED,  /* nothing smaller is allowed */
    OOMKIT_REASON_PREDICTED,  /* measured peaks say what fits */
    OOMKIT_REASON_GROWN,      /* the same, and it is more than the last call had */
    OOMKIT_REASON_CLIMBED,    /* the smallest did not fit: the next rung */
    OOMKIT_REASON_ERROR,      /* the step itself raised an error for the size before */
    OOMKIT_REASON_REFUSED     /* the whole batch again: it cannot be split exactly */
} oomkit_plan_reason;

/* What a decision depends on beside what is known. */
typedef struct oomkit_plan_request {
    int64_t batch;              /* rows of this call */
    int64_t min_micro_batch;    /* >= 1 */
    int64_t multiple_of;        /* >= 1 */
    int64_t start_accumulation; /* k asked for by the caller, >= 1 */
    uint64_t baseline_bytes;    /* allocated before the step; OOMKIT_UNKNOWN */
    uint64_t budget_bytes;      /* usable now; OOMKIT_UNKNOWN */
    uint64_t gradient_bytes;    /* of all parameters; 0 = not known */
    uint64_t largest_gradient;  /* bytes of the largest of them; 0 = not known */
    int32_t may_be_whole; /* the whole batch was not tried as a way out, and may be */
    double margin; /* share of the budget to leave free however well predictions hold */
} oomkit_plan_request;

/* The plan to begin a call with: the smallest number of micro-batches that what is
 * known does not speak against. OOMKIT_OK, or OOMKIT_EINVAL for numbers out of range.
 */
int
oomkit_plan_choose(const oomkit_knowledge *known, const oomkit_plan_request *request,
                   oomkit_plan *plan, oomkit_plan_reason *reason);

/* The plan after `failed` ran out of memory and oomkit_know_failed was told. Before
 * anything has worked: twice as many micro-batches the first time, then four times; as
 * soon as peaks are known, what they say. In the end, where the request allows it, the
 * whole batch at once, which finds no gradients that accumulated. OOMKIT_OK;
 * OOMKIT_EREFUSED (reason EXHAUSTED) when `failed` already used the smallest allowed
 * micro-batch; OOMKIT_EINVAL. */
int
oomkit_plan_next(const oomkit_knowledge *known, const oomkit_plan_request *request,
                 const oomkit_plan *failed, oomkit_plan *plan,
                 oomkit_plan_reason *reason);

/* Did an OOM come from memory that the allocator holds in pieces rather than from too
 * large a micro-batch? Then the same plan may pass once the cache has been emptied: it
 * is tried again once (`flushed`: it was). All in bytes at the failure; OOMKIT_UNKNOWN.
 */
int
oomkit_plan_fragmented(uint64_t reserved_bytes, uint64_t allocated_bytes,
                       uint64_t budget_bytes, int flushed);

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

/* "whole", "asked", "remembered", "oom", "flushed", "exhausted", "predicted", "grown",
 * "climbed", "error", "refused". */
const char *
oomkit_plan_reason_name(oomkit_plan_reason reason);

#endif
