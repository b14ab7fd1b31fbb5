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
    {
        oomkit_phases first = {0}, second = {0};
        oomkit_plan_change change = {.accumulation_steps = 2, .reason = 3};
        first.of[1].entered = second.of[1].entered = 1;
        first.of[1].time_ns = second.of[1].time_ns = 5;
        oomkit_phases_lost(&first);
        CHECK(first.of[1].lost_ns == 5 && first.of[0].lost_ns == 0);
        oomkit_phases_retry(&first, 1, &change);
        for (int i = 0; i < 2 * OOMKIT_PHASE_CHANGES; i++) {
            change.accumulation_steps = 10 + (uint64_t)i;
            oomkit_phases_retry(&second, 1, &change);
        }
        oomkit_phases_add(&first, &second);
        CHECK(first.of[1].lost_ns == 5 && first.of[1].time_ns == 10);
        CHECK(first.of[1].retries == 1 + 2 * OOMKIT_PHASE_CHANGES);
        CHECK(first.of[1].changes[0].accumulation_steps == 2);
        CHECK(first.of[1].changes[1].accumulation_steps == 10);
        CHECK(first.of[1].changes[OOMKIT_PHASE_CHANGES - 1].accumulation_steps ==
              10 + OOMKIT_PHASE_CHANGES - 2);
    }
    return check_report();
}
