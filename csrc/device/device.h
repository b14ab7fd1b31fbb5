/* One interface to memory figures: the bridge where it is present, else torch's own
 * calls.
 *
 * Nothing here initialises a device. Figures that cannot be had are OOMKIT_UNKNOWN. */
#ifndef OOMKIT_DEVICE_DEVICE_H
#define OOMKIT_DEVICE_DEVICE_H

#include "../py/state.h"
#include "../records/phases.h"
#include "../records/ring.h"

typedef struct oomkit_device {
    int type;  /* c10::DeviceType */
    int index; /* -1 for the CPU */
} oomkit_device;

/* A measurement that is open from begin to end. They nest (also a guard inside a step);
 * on an accelerator the inner reset of the peak is merged back into the outer window.
 */
typedef struct oomkit_peak_window {
    struct oomkit_peak_window *outer; /* borrowed: the enclosing one of this device */
    oomkit_device device;
    int cpu_window; /* the bridge's window, or -1 */
    int open;
    int reset;               /* whether the device's peak was reset at begin */
    uint64_t baseline_bytes; /* allocated at begin */
    uint64_t alloc_retries;  /* of the device's allocator: its count at begin, how often
                                since then after end; OOMKIT_UNKNOWN */
    uint64_t peak_allocated_bytes, peak_reserved_bytes; /* seen so far (accelerator) */
    uint64_t free_bytes, budget_bytes;                  /* filled by end */
} oomkit_peak_window;

/* Installs the CPU allocator when `device` is the CPU and the bridge is there: done by
 * the first protected call. Never fails; without it CPU figures are unknown. */
void
oomkit_device_prepare(oomkit_state *st, oomkit_device device);

/* Never fail: what cannot be measured is OOMKIT_UNKNOWN. begin and end may be called
 * with an exception set; they keep it. */
void
oomkit_device_begin(oomkit_state *st, oomkit_device device, int reset,
                    oomkit_peak_window *window);
void
oomkit_device_end(oomkit_state *st, oomkit_peak_window *window);

/* The peak of a window so far. Never fails; keeps an exception. */
uint64_t
oomkit_device_peak(oomkit_state *st, const oomkit_peak_window *window);

/* Bytes allocated now; OOMKIT_UNKNOWN when not known. */
uint64_t
oomkit_device_allocated(oomkit_state *st, oomkit_device device);

/* The same, with what the allocator holds beside it. Never raises. */
void
oomkit_device_held(oomkit_state *st, oomkit_device device, uint64_t *allocated_bytes,
                   uint64_t *reserved_bytes);

/* All figures of a device; every field may be OOMKIT_UNKNOWN. *budget_bytes is the
 * limit in force. -1 with an exception only when torch's own calls raise something
 * unexpected. */
int
oomkit_device_figures(oomkit_state *st, oomkit_device device,
                      oomkit_memory_stats *stats, uint64_t *budget_bytes);

/* The limit that oomkit.limit_memory put on an accelerator, for later figures;
 * OOMKIT_UNKNOWN takes it away. OOMKIT_OK, or OOMKIT_EREFUSED when more devices are in
 * use than the table has room for. The CPU's limit is the bridge's own. */
int
oomkit_device_budget_set(oomkit_device device, uint64_t budget_bytes);

/* The limit in force: that of limit_memory, else on an accelerator a share that the
 * program has asked torch for, as it was when the device was last looked at: by its
 * first window, at failures, by all figures. OOMKIT_UNKNOWN without one. Asks no
 * driver. */
uint64_t
oomkit_device_budget(oomkit_state *st, oomkit_device device);

/* What oomkit_device_budget_set has noted, and nothing else. */
uint64_t
oomkit_device_budget_noted(oomkit_device device);

/* Looks at the program's share of an accelerator anew. Never raises; may be called with
 * an exception set. */
void
oomkit_device_look(oomkit_state *st, oomkit_device device);

/* Bytes of an accelerator that are free or ours, by its driver; OOMKIT_UNKNOWN where
 * that cannot be had. Never raises. Takes long: for failures, not for steps. */
uint64_t
oomkit_device_usable(oomkit_state *st, oomkit_device device);

/* The highest peak of the run so far, resets of the device's own counter bridged over;
 * OOMKIT_UNKNOWN when not known. May be called with an exception set. */
uint64_t
oomkit_device_run_peak(oomkit_state *st, oomkit_device device);

/* --- default_device.c --- */

/* Is the device initialised, and this process not forked from one that had it in use?
 * 1 or 0; initialises nothing. May be called with an exception set. */
int
oomkit_device_ready(oomkit_state *st, oomkit_device device);

/* Do segments of its caching allocator grow, by the settings in effect? Then blocks fit
 * better into what is left. 1 or 0. May be called with an exception set. */
int
oomkit_device_expandable(oomkit_state *st, oomkit_device device);

/* The accelerator that is in use in this process, whichever it is, else the CPU.
 * Initialises nothing and never fails. May be called with an exception set. */
oomkit_device
oomkit_device_default(oomkit_state *st);

/* Its type alone, cheap enough for each step of a CPU: without the bridge CUDA's or
 * none.
 */
int
oomkit_device_type_beside(oomkit_state *st);

#define OOMKIT_DEVICE_TEXT 64

/* "cpu", "cuda:0", "xpu:1", or by the name that a backend has given itself. */
void
oomkit_device_text(oomkit_device device, char text[OOMKIT_DEVICE_TEXT]);

/* Is a graph being captured on the current stream of a device that is in use? 1, 0 or
 * -1. */
int
oomkit_device_is_capturing(oomkit_state *st, oomkit_device device);

/* --- reclaim.c --- */

/* Returns cached blocks to the driver, once. What it raises is dropped when it is OOM
 * (the flush is an optimisation), else -1. Nothing to do on the CPU. */
int
oomkit_device_empty_cache(oomkit_state *st, oomkit_device device);

/* After the failed attempt is dropped and rolled back: whatever of it is still alive
 * above `baseline_bytes` (may be OOMKIT_UNKNOWN) is freed as far as that is possible,
 * and the allocator's cache is returned. `failures` of this call so far. What is left
 * is in *allocated_bytes, workspaces that the next product makes again included. 0 or
 * -1. Can run Python code (finalisers). */
int
oomkit_device_reclaim(oomkit_state *st, oomkit_device device, uint64_t baseline_bytes,
                      int failures, uint64_t *allocated_bytes);

/* The flush that a guard has put off, if there is one: not into a graph that is being
 * captured, where nothing may be freed. 0 or -1. */
int
oomkit_device_flush_pending(oomkit_state *st, oomkit_device device);

/* --- runtime_error.c --- */

/* Takes the error of memory that a failed call may have left with the CUDA or HIP
 * runtime on this thread, for the next allocation would report it as its own; one of
 * another kind stays for whoever looks for it. 1 when the context is lost, nothing may
 * be retried; else 0. */
int
oomkit_device_is_lost(oomkit_state *st, oomkit_device device);

/* Allocations of ours that must never count, be refused or be failed: those of the
 * block `EXEMPT(st) { ... }`, whichever way it is left. They nest. */
void
oomkit_exempt_enter(oomkit_state *st);
void
oomkit_exempt_leave(oomkit_state *st);

typedef struct oomkit_exempt {
    oomkit_state *st;
    int once;
} oomkit_exempt;

static inline oomkit_exempt
oomkit_exempt_begin(oomkit_state *st)
{
    oomkit_exempt_enter(st);
    return (oomkit_exempt){st, 1};
}

static inline void
oomkit_exempt_end(oomkit_exempt *exempt)
{
    oomkit_exempt_leave(exempt->st);
}

#define EXEMPT(state)                                                                  \
    for (oomkit_exempt OOMKIT_JOINED(exempt_, __LINE__)                                \
             OOMKIT_AT_END(oomkit_exempt_end) = oomkit_exempt_begin(state);            \
         OOMKIT_JOINED(exempt_, __LINE__).once;                                        \
         OOMKIT_JOINED(exempt_, __LINE__).once = 0)

/* Sets the phase that fault filters see and returns the one before. */
int
oomkit_phase_set(oomkit_state *st, int phase);

/* --- phase_meter.c --- */
/* What the phases of a call of this thread take, from open to close. */
typedef struct oomkit_phase_meter {
    struct oomkit_phase_meter *outer; /* borrowed: one that was opened before */
    unsigned long thread;
    oomkit_device device;
    int reset;   /* of the device's peak, as of a window */
    int phase;   /* that runs now */
    int changed; /* in that one the plan changed last */
    uint64_t began_ns;
    oomkit_peak_window window;
    oomkit_phases seen;
} oomkit_phase_meter;

/* In the forward phase. NULL without an exception where there is no memory. The caller
 * owns the result, closes it and frees it by PyMem_Free(). */
oomkit_phase_meter *
oomkit_meter_open(oomkit_state *st, oomkit_device device, int reset);
/* Nothing where it is closed already. May be called with an exception set. */
void
oomkit_meter_close(oomkit_state *st, oomkit_phase_meter *meter);
/* What was measured until now was in vain: the call is tried again. */
void
oomkit_meter_lost(oomkit_state *st, oomkit_phase_meter *meter);
/* This thread has come to another phase. */
void
oomkit_meters_switch(oomkit_state *st, int phase);

/* --- autograd_queue.c --- */
int
oomkit_backward_drain(oomkit_state *st);

/* --- host_copy.c --- */
/* A host copy of a tensor outside the budget. New reference or NULL. */
PyObject *
oomkit_host_copy(oomkit_state *st, PyObject *tensor);
/* The same, of CUDA in pinned memory where that is to be had. */
PyObject *
oomkit_host_copy_pinned(oomkit_state *st, PyObject *tensor);
/* An error of torch's that may be one of pinning: is it gone, so that other host memory
 * can be tried? 1, or 0 with the exception. */
int
oomkit_pinning_failed(void);
/* A tensor like it on the device, inside its budget, without its values. New reference
 * or NULL. */
PyObject *
oomkit_device_like(oomkit_state *st, oomkit_device device, PyObject *tensor);
/* Its values there, which may be on their way: in the order of the present stream. 0 or
 * -1. */
int
oomkit_device_fill(oomkit_state *st, oomkit_device device, PyObject *there,
                   PyObject *tensor);
/* torch keeps pinned memory for later; ours is not wanted any more. Never fails; keeps
 * an exception. */
void
oomkit_host_unpin(oomkit_state *st);

/* --- surroundings.c --- */
/* Is a CUDA graph (or XPU's kind of it) being captured on the current stream? 1, 0 or
 * -1. Initialises nothing. */
int
oomkit_is_capturing(void);
/* The question of a device other than CUDA has raised: 0 where that is what torch puts
 * in the place of a function that the build has not, else -1. */
int
oomkit_no_captures(void);

#endif
