#include "check.h"

#include "phases.h"
#include "status.h"

int
main(void)
{
    oomkit_phases seen = {0}, later = {0};

    later.of[1] = (oomkit_phase_figures){.entered = 1,
                                         .baseline_bytes = 5,
                                         .peak_allocated_bytes = 10,
                                         .peak_reserved_bytes = OOMKIT_UNKNOWN,
                                         .time_ns = 7};
    oomkit_phases_add(&seen, &later);
    CHECK(seen.of[1].entered == 1 && seen.of[1].baseline_bytes == 5);
    CHECK(seen.of[1].peak_reserved_bytes == OOMKIT_UNKNOWN && seen.of[0].entered == 0);
    later.of[1] = (oomkit_phase_figures){.entered = 2,
                                         .baseline_bytes = 9,
                                         .peak_allocated_bytes = OOMKIT_UNKNOWN,
                                         .peak_reserved_bytes = 50,
                                         .time_ns = 3,
                                         .ooms = 1};
    later.of[2].entered = 1;
    oomkit_phases_add(&seen, &later);
    CHECK(seen.of[1].entered == 3 && seen.of[1].baseline_bytes == 5);
    CHECK(seen.of[1].peak_allocated_bytes == 10 &&
          seen.of[1].peak_reserved_bytes == 50);
    CHECK(seen.of[1].time_ns == 10 && seen.of[1].ooms == 1);
    CHECK(seen.of[2].entered == 1 && seen.of[0].entered == 0);
    later.of[1].peak_reserved_bytes = 40;
    oomkit_phases_add(&seen, &later);
    CHECK(seen.of[1].peak_reserved_bytes == 50);
    return check_report();
}
