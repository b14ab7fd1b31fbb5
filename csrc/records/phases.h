/* What the phases of a call were: forward, backward, optimizer, recovery, by their
 * numbers in core/fault.h. */
#ifndef OOMKIT_RECORDS_PHASES_H
#define OOMKIT_RECORDS_PHASES_H

#include <stdint.h>

#define OOMKIT_PHASE_FIGURES 4
#define OOMKIT_PHASE_CHANGES 6 /* of one phase that are kept, the first ones */

/* The plan that a call went on with after a failure. */
typedef struct oomkit_plan_change {
    uint64_t accumulation_steps;
    uint32_t rung;
    uint32_t reason; /* oomkit_plan_reason */
} oomkit_plan_change;

/* Bytes are bytes, times are nanoseconds; OOMKIT_UNKNOWN where nothing was measured. */
typedef struct oomkit_phase_figures {
    uint64_t entered;        /* so often; 0: the rest says nothing */
    uint64_t baseline_bytes; /* allocated when it was entered first */
    uint64_t peak_allocated_bytes;
    uint64_t peak_reserved_bytes;
    uint64_t time_ns;
    uint64_t lost_ns; /* of time_ns: in attempts that failed */
    uint64_t ooms;
    uint64_t retries; /* attempts after one that failed in this phase */
    oomkit_plan_change changes[OOMKIT_PHASE_CHANGES]; /* of those, the first ones */
} oomkit_phase_figures;

typedef struct oomkit_phases {
    oomkit_phase_figures of[OOMKIT_PHASE_FIGURES];
} oomkit_phases;

/* Of two stretches, `later` the second: times and counts are added, peaks compared. */
void
oomkit_phases_add(oomkit_phases *phases, const oomkit_phases *later);

/* All that was measured so far belongs to attempts that failed. */
void
oomkit_phases_lost(oomkit_phases *phases);

/* The call goes on with this plan after a failure in that phase. */
void
oomkit_phases_retry(oomkit_phases *phases, int phase, const oomkit_plan_change *change);

#endif
