/* Figures of phases, added. */
#include "phases.h"
#include "../core/status.h"

static void
raise_known(uint64_t *seen, uint64_t value)
{
    if (value != OOMKIT_UNKNOWN && (*seen == OOMKIT_UNKNOWN || *seen < value)) {
        *seen = value;
    }
}

void
oomkit_phases_add(oomkit_phases *phases, const oomkit_phases *later)
{
    int i;

    for (i = 0; i < OOMKIT_PHASE_FIGURES; i++) {
        oomkit_phase_figures *into = &phases->of[i];
        const oomkit_phase_figures *from = &later->of[i];
        if (into->entered == 0) {
            *into = *from;
        } else if (from->entered > 0) {
            into->entered += from->entered;
            raise_known(&into->peak_allocated_bytes, from->peak_allocated_bytes);
            raise_known(&into->peak_reserved_bytes, from->peak_reserved_bytes);
            into->time_ns += from->time_ns;
            into->ooms += from->ooms;
        }
    }
}
