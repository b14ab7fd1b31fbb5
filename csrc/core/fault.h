/* A fault schedule: fail the n-th matching allocation, a number of times or for good.
 *
 * Compiled always: an unarmed schedule costs one relaxed load per allocation. All
 * functions may be called from any thread without a lock; arming while another thread
 * allocates is allowed, the count then starts somewhere in that thread's work. */
#ifndef OOMKIT_CORE_FAULT_H
#define OOMKIT_CORE_FAULT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    OOMKIT_PHASE_FORWARD = 0, /* also everything outside a protected call */
    OOMKIT_PHASE_BACKWARD = 1,
    OOMKIT_PHASE_OPTIMIZER = 2,
    OOMKIT_PHASE_RECOVERY = 3,
    OOMKIT_PHASES = 4
};

#define OOMKIT_PHASE_ANY UINT32_MAX
#define OOMKIT_FAULT_STAGES 4 /* schedules that can follow one another */

typedef struct oomkit_fault oomkit_fault;

typedef struct oomkit_fault_schedule {
    uint64_t nth;   /* 1 = the first matching allocation */
    uint64_t times; /* how many consecutive ones fail from there; 0 = until disarmed */
    uint64_t min_bytes; /* smaller requests do not match (and are not counted) */
    uint32_t phases;    /* bit mask of 1u << OOMKIT_PHASE_*, or OOMKIT_PHASE_ANY */
    const struct oomkit_fault_schedule *next; /* in force once this one has fired for
                                                 the last time, or NULL */
} oomkit_fault_schedule;

/* NULL when memory for it cannot be had. The caller owns the result. */
oomkit_fault *
oomkit_fault_create(void);

void
oomkit_fault_destroy(oomkit_fault *fault);

/* OOMKIT_OK; OOMKIT_EINVAL for nth == 0, for one that never ends before the last and
 * for more than OOMKIT_FAULT_STAGES; OOMKIT_EREFUSED when one is armed already. Resets
 * the counters. */
int
oomkit_fault_arm(oomkit_fault *fault, const oomkit_fault_schedule *schedule);

void
oomkit_fault_disarm(oomkit_fault *fault);

int
oomkit_fault_armed(const oomkit_fault *fault);

/* OOMKIT_OK, or OOMKIT_EOOM when the schedule says that this allocation fails.
 * Zero-byte requests never match. */
int
oomkit_fault_check(oomkit_fault *fault, uint64_t bytes);

/* The same for an allocation that oomkit makes for itself, in whatever phase: it
 * matches only a schedule that names OOMKIT_PHASE_RECOVERY. */
int
oomkit_fault_check_own(oomkit_fault *fault, uint64_t bytes);

/* Matching allocations that the present schedule has seen, and faults that all of them
 * have fired, since the last arming. */
uint64_t
oomkit_fault_seen(const oomkit_fault *fault);

uint64_t
oomkit_fault_fired(const oomkit_fault *fault);

/* Sets the phase of this thread and returns the one before. */
int
oomkit_fault_set_phase(int phase);

/* The phase of this thread. One that never set any (a thread of autograd's own) works
 * for another: backward while any thread is in it, then optimizer, then recovery. */
int
oomkit_fault_phase(void);

/* Called once for every fault that fires. It does nothing: it is a place for a
 * breakpoint. */
void
oomkit_fault_fires(uint64_t seen);

#ifdef __cplusplus
}
#endif

#endif
