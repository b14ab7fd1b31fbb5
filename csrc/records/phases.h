/* What the phases of a call were: forward, backward, optimizer, recovery, by their
 * numbers in core/fault.h. */
#ifndef OOMKIT_RECORDS_PHASES_H
#define OOMKIT_RECORDS_PHASES_H

#include <stdint.h>

#define OOMKIT_PHASE_FIGURES 4

/* Bytes are bytes, times are nanoseconds; OOMKIT_UNKNOWN where nothing was measured. */
typedef struct oomkit_phase_figures {
    uint64_t entered;        /* so often; 0: the rest says nothing */
    uint64_t baseline_bytes; /* allocated when it was entered first */
    uint64_t peak_allocated_bytes;
    uint64_t peak_reserved_bytes;
    uint64_t time_ns;
    uint64_t ooms;
} oomkit_phase_figures;

typedef struct oomkit_phases {
    oomkit_phase_figures of[OOMKIT_PHASE_FIGURES];
} oomkit_phases;

/* Of two stretches, `later` the second: times and counts are added, peaks compared. */
void
oomkit_phases_add(oomkit_phases *phases, const oomkit_phases *later);

#endif
