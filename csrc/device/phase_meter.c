/* Memory and time of each phase of a call that asks for it: a window from one change of
 * phase to the next, of this thread. */
#include "slot.h"
#include "../core/status.h"

#include <time.h>

static uint64_t
meter_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void
stretch_begin(oomkit_state *st, oomkit_phase_meter *meter, int phase)
{
    meter->phase = phase;
    oomkit_device_begin(st, meter->device, meter->reset, &meter->window);
    meter->began_ns = meter_now();
}

static void
stretch_end(oomkit_state *st, oomkit_phase_meter *meter)
{
    oomkit_phases seen = {0};
    oomkit_phase_figures *figures = &seen.of[meter->phase];

    figures->entered = 1;
    figures->time_ns = meter_now() - meter->began_ns;
    oomkit_device_end(st, &meter->window);
    figures->baseline_bytes = meter->window.baseline_bytes;
    figures->peak_allocated_bytes = meter->window.peak_allocated_bytes;
    figures->peak_reserved_bytes = meter->window.peak_reserved_bytes;
    oomkit_phases_add(&meter->seen, &seen);
}

oomkit_phase_meter *
oomkit_meter_open(oomkit_state *st, oomkit_device device, int reset)
{
    oomkit_phase_meter *meter = PyMem_Calloc(1, sizeof(*meter));

    if (meter != NULL) { /* else the call has no such figures */
        meter->device = device;
        meter->reset = reset;
        meter->thread = PyThread_get_thread_ident();
        meter->outer = st->meters;
        st->meters = meter;
        stretch_begin(st, meter, OOMKIT_PHASE_FORWARD);
    }
    return meter;
}

void
oomkit_meter_close(oomkit_state *st, oomkit_phase_meter *meter)
{
    oomkit_phase_meter **link = &st->meters;

    while (*link != NULL && *link != meter) {
        link = &(*link)->outer;
    }
    if (*link != NULL) {
        *link = meter->outer;
        stretch_end(st, meter);
    }
}

void
oomkit_meter_lost(oomkit_state *st, oomkit_phase_meter *meter)
{
    stretch_end(st, meter);
    oomkit_phases_lost(&meter->seen);
    stretch_begin(st, meter, meter->phase);
}

void
oomkit_meters_switch(oomkit_state *st, int phase)
{
    const unsigned long thread = PyThread_get_thread_ident();
    oomkit_phase_meter *meter;

    for (meter = st->meters; meter != NULL; meter = meter->outer) {
        if (meter->thread == thread && meter->phase != phase) {
            stretch_end(st, meter);
            stretch_begin(st, meter, phase);
        }
    }
}
