/* What the two forms of a guard share: measure a stretch of code, and clean up after it
 * when memory ran out in it. */
#ifndef OOMKIT_LOOP_GUARD_H
#define OOMKIT_LOOP_GUARD_H

#include "../device/device.h"
#include "../records/history.h"

#define OOMKIT_GUARD_RECORDS 1024

typedef struct oomkit_guard {
    oomkit_state *st; /* borrowed from the module, which the type keeps alive */
    PyObject *label;  /* owned: str, or NULL */
    int skip;         /* on_oom="skip" */
    int reset_peaks;
    int prepared;            /* the CPU allocator has been asked for */
    uint64_t calls;          /* begun */
    uint64_t recorded;       /* ended */
    oomkit_record first;     /* many guards have no other, and need no history */
    oomkit_history *history; /* NULL until the second record */
} oomkit_guard;

/* One stretch. Its address must not change between begin and end. */
typedef struct oomkit_guard_window {
    oomkit_peak_window peak;
    oomkit_phase_meter *meter; /* owned, or NULL */
    uint64_t step, started_ns;
    int alone; /* a block in no loop that would run it again */
} oomkit_guard_window;

enum { /* oomkit_record.outcome of a guard */
       OOMKIT_GUARD_FINISHED = 0,
       OOMKIT_GUARD_OOM = 1,
       OOMKIT_GUARD_ERROR = 2
};

/* Takes the label (borrowed, NULL for none) and the options. */
void
oomkit_guard_init(oomkit_guard *guard, oomkit_state *st, PyObject *label, int skip,
                  int reset_peaks);
void
oomkit_guard_clear(oomkit_guard *guard);

/* 0, or -1 with an exception when a flush that was put off fails. */
int
oomkit_guard_begin(oomkit_guard *guard, oomkit_guard_window *window);

/* Ends the measurement; nothing is recorded. */
void
oomkit_guard_abandon(oomkit_guard *guard, oomkit_guard_window *window);

/* Ends the measurement and records it. Keeps an exception in flight. */
void
oomkit_guard_end(oomkit_guard *guard, oomkit_guard_window *window, int outcome);

/* Is it out of memory? Keeps an exception in flight. */
int
oomkit_guard_is_oom(oomkit_guard *guard, PyObject *exception);

/* Ends a stretch in which memory ran out: records it, clears the frames below, attaches
 * report and note to `exception` (borrowed), logs one line and drains the autograd
 * queue. `keep`, borrowed, is what the caller was handling at the beginning, or NULL.
 * Never fails; must be called without an exception in flight. Runs Python code
 * (finalisers, logging). */
void
oomkit_guard_failed(oomkit_guard *guard, oomkit_guard_window *window,
                    PyObject *exception, PyObject *keep);

/* A failed backward on the CPU leaves its graph queued on this thread: run a trivial
 * one. 0 or -1 with an exception. */
int
oomkit_guard_drain(oomkit_state *st, oomkit_device device);

/* Returns cached memory now, and once more at the next protected call when `again`: as
 * long as the exception lives it may hold frames that still run. What goes wrong is
 * reported as unraisable. Must be called without an exception in flight. */
void
oomkit_guard_flush(oomkit_guard *guard, const oomkit_guard_window *window, int again);

/* Records a stretch in which memory ran out, and nothing else. */
void
oomkit_guard_record_oom(oomkit_guard *guard, oomkit_guard_window *window,
                        PyObject *exception);

/* handout.c. The loop over oomkit.chunks() in whose body the running frame is,
 * with the number of its part and of the guards that were entered for it. New
 * reference, or NULL (without an exception) when there is none. */
PyObject *
oomkit_chunks_guard_enter(oomkit_state *st, uint64_t *part, int *order);
/* The block has ended without an out-of-memory error. Never fails. */
void
oomkit_chunks_guard_passed(PyObject *chunks, uint64_t part, int order,
                           const oomkit_peak_window *peak);
/* Memory ran out in it. 1: the loop hands the rows out again, and everything is as
 * before them; 0 it is to go on, perhaps with a note; -1 with another exception. Must
 * be called without an exception in flight. `handled` is borrowed and may be NULL. */
int
oomkit_chunks_guard_failed(PyObject *chunks, uint64_t part, int order,
                           PyObject *exception, PyObject *handled);

/* The records, oldest first, as a tuple of StepRecord; a StepSummary of all there ever
 * were. New reference or NULL. */
PyObject *
oomkit_guard_records(const oomkit_guard *guard);
PyObject *
oomkit_guard_summary(const oomkit_guard *guard);

/* Is it one of those? */
static inline int
oomkit_guarded_check(const oomkit_state *st, const PyObject *object)
{
    return Py_TYPE(object) == (PyTypeObject *)st->guarded_type ||
           Py_TYPE(object) == (PyTypeObject *)st->guarded_object_type;
}

#endif
