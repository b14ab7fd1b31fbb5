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

static void
changes_add(oomkit_phase_figures *into, const oomkit_phase_figures *from)
{
    uint64_t i;

    for (i = 0; i < from->retries && i < OOMKIT_PHASE_CHANGES &&
                into->retries + i < OOMKIT_PHASE_CHANGES;
         i++) {
        into->changes[into->retries + i] = from->changes[i];
    }
    into->retries += from->retries;
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
            into->lost_ns += from->lost_ns;
            into->ooms += from->ooms;
            changes_add(into, from);
        }
    }
}

void
oomkit_phases_lost(oomkit_phases *phases)
{
    int i;

    for (i = 0; i < OOMKIT_PHASE_FIGURES; i++) {
        phases->of[i].lost_ns = phases->of[i].time_ns;
    }
}

void
oomkit_phases_retry(oomkit_phases *phases, int phase, const oomkit_plan_change *change)
{
    oomkit_phase_figures *figures = &phases->of[phase];

    if (figures->retries < OOMKIT_PHASE_CHANGES) {
        figures->changes[figures->retries] = *change;
    }
    figures->retries++;
}
