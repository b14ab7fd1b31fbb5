/* Fault schedules without a lock: each number of one is an atomic of its own. */
#include "fault.h"
#include "status.h"

#include <stdatomic.h>
#include <stdlib.h>

enum { FAULT_IDLE = 0, FAULT_ARMING, FAULT_ARMED };

typedef struct fault_stage {
    _Atomic uint64_t nth;
    _Atomic uint64_t times;
    _Atomic uint64_t min_bytes;
    _Atomic uint32_t phases;
} fault_stage;

/* The schedule is atomic field by field: a thread that was inside a check while another
 * disarmed and armed again, or fired the last of a stage, may mix the two, but it is no
 * data race. */
struct oomkit_fault {
    _Atomic int armed;
    _Atomic int stage; /* the one in force */
    _Atomic int stages;
    fault_stage plan[OOMKIT_FAULT_STAGES];
    _Atomic uint64_t seen;
    _Atomic uint64_t fired;
};

/* The phase of this thread plus one; 0 where none was ever set. */
static _Thread_local int thread_phase;

/* How many threads are in each phase but forward. */
static _Atomic int phase_threads[OOMKIT_PHASES];

oomkit_fault *
oomkit_fault_create(void)
{
    oomkit_fault *fault = calloc(1, sizeof(*fault));
    int i;
    if (fault == NULL) {
        return NULL;
    }
    atomic_init(&fault->armed, FAULT_IDLE);
    atomic_init(&fault->stage, 0);
    atomic_init(&fault->stages, 0);
    for (i = 0; i < OOMKIT_FAULT_STAGES; i++) {
        atomic_init(&fault->plan[i].nth, 0);
        atomic_init(&fault->plan[i].times, 0);
        atomic_init(&fault->plan[i].min_bytes, 0);
        atomic_init(&fault->plan[i].phases, 0);
    }
    atomic_init(&fault->seen, 0);
    atomic_init(&fault->fired, 0);
    return fault;
}

void
oomkit_fault_destroy(oomkit_fault *fault)
{
    free(fault);
}

/* How many schedules follow one another, or 0 where they make no sense. */
static int
fault_stages(const oomkit_fault_schedule *schedule)
{
    int count = 0;

    for (; schedule != NULL; schedule = schedule->next) {
        if (count == OOMKIT_FAULT_STAGES || schedule->nth == 0 ||
            (schedule->times == 0 && schedule->next != NULL)) {
            return 0;
        }
        count++;
    }
    return count;
}

int
oomkit_fault_arm(oomkit_fault *fault, const oomkit_fault_schedule *schedule)
{
    const int count = fault_stages(schedule);
    int expected = FAULT_IDLE, i;

    if (count == 0) {
        return OOMKIT_EINVAL;
    }
    if (!atomic_compare_exchange_strong_explicit(&fault->armed, &expected, FAULT_ARMING,
                                                 memory_order_acquire,
                                                 memory_order_relaxed)) {
        return OOMKIT_EREFUSED;
    }
    for (i = 0; i < count; i++, schedule = schedule->next) {
        fault_stage *stage = &fault->plan[i];
        atomic_store_explicit(&stage->nth, schedule->nth, memory_order_relaxed);
        atomic_store_explicit(&stage->times, schedule->times, memory_order_relaxed);
        atomic_store_explicit(&stage->min_bytes, schedule->min_bytes,
                              memory_order_relaxed);
        atomic_store_explicit(&stage->phases, schedule->phases, memory_order_relaxed);
    }
    atomic_store_explicit(&fault->stages, count, memory_order_relaxed);
    atomic_store_explicit(&fault->stage, 0, memory_order_relaxed);
    atomic_store_explicit(&fault->seen, 0, memory_order_relaxed);
    atomic_store_explicit(&fault->fired, 0, memory_order_relaxed);
    /* Not a store: a disarm that came in between wins. */
    expected = FAULT_ARMING;
    atomic_compare_exchange_strong_explicit(&fault->armed, &expected, FAULT_ARMED,
                                            memory_order_release, memory_order_relaxed);
    return OOMKIT_OK;
}

/* Also out of FAULT_ARMING: a process forked in that moment has no thread that would
 * finish the arming. */
void
oomkit_fault_disarm(oomkit_fault *fault)
{
    atomic_store_explicit(&fault->armed, FAULT_IDLE, memory_order_release);
}

int
oomkit_fault_armed(const oomkit_fault *fault)
{
    return atomic_load_explicit(&fault->armed, memory_order_relaxed) == FAULT_ARMED;
}

/* After a fault: was it the last of its stage, and does another one follow? */
static void
fault_advance(oomkit_fault *fault, int at, uint64_t times, uint64_t nth, uint64_t seen)
{
    if (times != 0 && seen - nth + 1 == times &&
        at + 1 < atomic_load_explicit(&fault->stages, memory_order_relaxed)) {
        atomic_store_explicit(&fault->seen, 0, memory_order_relaxed);
        atomic_store_explicit(&fault->stage, at + 1, memory_order_relaxed);
    }
}

/* The whole of a check but its fast path. */
static int
fault_match(oomkit_fault *fault, uint64_t bytes, int own)
{
    const fault_stage *stage;
    uint32_t phases;
    uint64_t nth, times, seen;
    int at, phase;

    if (atomic_load_explicit(&fault->armed, memory_order_acquire) != FAULT_ARMED) {
        return OOMKIT_OK;
    }
    at = atomic_load_explicit(&fault->stage, memory_order_relaxed);
    stage = &fault->plan[at];
    phases = atomic_load_explicit(&stage->phases, memory_order_relaxed);
    phase = own ? OOMKIT_PHASE_RECOVERY : oomkit_fault_phase();
    if (bytes == 0 || (phases & UINT32_C(1) << phase) == 0 ||
        (own && phases == OOMKIT_PHASE_ANY) ||
        bytes < atomic_load_explicit(&stage->min_bytes, memory_order_relaxed)) {
        return OOMKIT_OK;
    }
    seen = atomic_fetch_add_explicit(&fault->seen, 1, memory_order_relaxed) + 1;
    nth = atomic_load_explicit(&stage->nth, memory_order_relaxed);
    times = atomic_load_explicit(&stage->times, memory_order_relaxed);
    if (seen < nth || (times != 0 && seen - nth >= times)) {
        return OOMKIT_OK;
    }
    atomic_fetch_add_explicit(&fault->fired, 1, memory_order_relaxed);
    fault_advance(fault, at, times, nth, seen);
    oomkit_fault_fires(seen);
    return OOMKIT_EOOM;
}

int
oomkit_fault_check(oomkit_fault *fault, uint64_t bytes)
{
    if (!oomkit_fault_armed(fault)) {
        return OOMKIT_OK;
    }
    return fault_match(fault, bytes, 0);
}

int
oomkit_fault_check_own(oomkit_fault *fault, uint64_t bytes)
{
    if (!oomkit_fault_armed(fault)) {
        return OOMKIT_OK;
    }
    return fault_match(fault, bytes, 1);
}

uint64_t
oomkit_fault_seen(const oomkit_fault *fault)
{
    return atomic_load_explicit(&fault->seen, memory_order_relaxed);
}

uint64_t
oomkit_fault_fired(const oomkit_fault *fault)
{
    return atomic_load_explicit(&fault->fired, memory_order_relaxed);
}

/* A number that is no phase changes nothing. */
int
oomkit_fault_set_phase(int phase)
{
    int *const place = &thread_phase;
    const int before = *place == 0 ? OOMKIT_PHASE_FORWARD : *place - 1;

    if (phase < 0 || phase >= OOMKIT_PHASES || *place == phase + 1) {
        return before;
    }
    *place = phase + 1;
    if (before != OOMKIT_PHASE_FORWARD) {
        atomic_fetch_sub_explicit(&phase_threads[before], 1, memory_order_relaxed);
    }
    if (phase != OOMKIT_PHASE_FORWARD) {
        atomic_fetch_add_explicit(&phase_threads[phase], 1, memory_order_relaxed);
    }
    return before;
}

int
oomkit_fault_phase(void)
{
    int phase;

    if (thread_phase != 0) {
        return thread_phase - 1;
    }
    for (phase = OOMKIT_PHASE_BACKWARD; phase < OOMKIT_PHASES; phase++) {
        if (atomic_load_explicit(&phase_threads[phase], memory_order_relaxed) > 0) {
            return phase;
        }
    }
    return OOMKIT_PHASE_FORWARD;
}

/* Neither inlined nor dropped: a breakpoint needs the call. */
__attribute__((noinline)) void
oomkit_fault_fires(uint64_t seen)
{
    __asm__ volatile("" : : "r"(&seen) : "memory");
}
