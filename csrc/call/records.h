/* StepRecord and OOMReport: immutable records as Python sees them (struct sequences).
 */
#ifndef OOMKIT_CALL_RECORDS_H
#define OOMKIT_CALL_RECORDS_H

#include "../py/errors.h"
#include "../records/history.h"

/* A struct sequence type that outlives the collector. New reference or NULL. CPython
 * reads a sequence's length from its type's dictionary when it frees one; at exit the
 * collector may have emptied that dictionary before the last record goes, which then is
 * a SystemError nobody can catch. The reference leaked here (one a type) keeps the
 * collector away from the type. */
static inline PyObject *
oomkit_sequence_type(PyStructSequence_Desc *description)
{
    PyObject *type = (PyObject *)PyStructSequence_NewType(description);
    if (type == NULL) {
        oomkit_error_insure();
    }
    return Py_XNewRef(type); /* the second reference, on purpose never given back */
}

/* Makes st->record_type, st->report_type and st->summary_type. 0 or -1. */
int
oomkit_records_init(oomkit_state *st);

/* Puts values[0..count) into a new struct sequence. Steals all of them, NULL included:
 * one NULL makes the result NULL, with the exception that made it. */
PyObject *
oomkit_sequence_of(PyObject *type, PyObject **values, Py_ssize_t count);

/* A StepRecord: step, label, batch_size, micro_batch_size, accumulation_steps,
 * attempts, ooms, requested_bytes, baseline, peak_allocated, peak_reserved,
 * device_free, budget, started, time, time_lost (seconds), rung, reason (str), outcome
 * (str), phases (dict of phase -> dict, None without `phases`), rank. None where
 * unknown. `label` is borrowed. New reference or NULL. */
PyObject *
oomkit_record_new(oomkit_state *st, const oomkit_record *record,
                  const oomkit_phases *phases, PyObject *label);

/* --- summary.c --- */

/* Makes st->summary_type. 0 or -1. */
int
oomkit_summary_init(oomkit_state *st);

/* A StepSummary of the totals. `label` is borrowed and may be NULL. New reference or
 * NULL. */
PyObject *
oomkit_summary_new(oomkit_state *st, const oomkit_totals *totals, PyObject *label);

/* The records that are kept, oldest first, as a tuple of StepRecord. */
PyObject *
oomkit_history_records(oomkit_state *st, const oomkit_history *history,
                       PyObject *label);

/* Hands a record to the sinks that are attached and to `own` (borrowed: a tuple, or
 * NULL), where there are any. Never fails; keeps an exception in flight. Runs Python
 * code. */
void
oomkit_sinks_told(oomkit_state *st, const oomkit_record *record,
                  const oomkit_phases *phases, PyObject *label, PyObject *own);

static inline void
oomkit_sinks_tell(oomkit_state *st, const oomkit_record *record,
                  const oomkit_phases *phases, PyObject *label, PyObject *own)
{
    if (st->sinks_attached || own != NULL) {
        oomkit_sinks_told(st, record, phases, label, own);
    }
}

/* Takes over the history of a step that goes: what its function did stays in reports.
 * Never fails; keeps an exception. */
void
oomkit_gone_put(oomkit_state *st, PyObject *label, oomkit_history *history);

/* Everything by label: list of (label, StepSummary, tuple of StepRecord), of those
 * steps that are gone and of `live` (borrowed: a list). New reference or NULL. */
PyObject *
oomkit_histories(oomkit_state *st, PyObject *live);

/* Bytes on the device of a call, by holder. */
typedef struct oomkit_holding {
    uint64_t params, gradients;
    uint64_t state;   /* of optimizers; OOMKIT_UNKNOWN: not looked at */
    uint64_t outside; /* more of all three, in memory that the device's figures do not
                         count */
} oomkit_holding;

/* What one failed attempt was, for the report. Plain values: nothing of the attempt
 * lives in it. */
typedef struct oomkit_attempt {
    int64_t micro_batch_size, accumulation_steps;
    uint64_t requested_bytes, allocated_bytes;
    uint64_t reserved_bytes; /* OOMKIT_UNKNOWN on the CPU */
    uint64_t budget_bytes, free_bytes;
    oomkit_holding held;
    int accumulated;    /* gradients of earlier micro-batches were there */
    const char *rung;   /* static: of the ladder, or NULL */
    int phase;          /* OOMKIT_PHASE_* */
    int in_update;      /* an optimizer's step() was not finished */
    PyObject *location; /* owned: "file:line in name" of the user's innermost frame, or
                           NULL */
    PyObject *inner;    /* owned: the same of torch's frame below it, or NULL */
    PyObject *message;  /* owned: str, first line of the error, or NULL */
} oomkit_attempt;

/* Its plain values as a tuple of dict, one for each attempt. New reference or NULL. */
PyObject *
oomkit_attempts_tuple(const oomkit_attempt *attempts, Py_ssize_t count);

/* An OOMReport: label, device, attempts (tuple of dict), requested_bytes, allocated,
 * budget (all three of `last`, the last attempt, or the present where there is none),
 * holders (dict of kind -> bytes), advice (tuple of str), text (str, what the exception
 * says). `holders` and `advice` are borrowed. New reference or NULL. */
PyObject *
oomkit_report_new(oomkit_state *st, PyObject *label, const char *device,
                  const oomkit_attempt *attempts, Py_ssize_t count,
                  const oomkit_attempt *last, PyObject *holders, PyObject *advice);

/* "2.00 GiB", "12.50 MiB", "512 bytes", "unknown". buffer needs 32 bytes. */
const char *
oomkit_format_bytes(uint64_t bytes, char *buffer);

/* Nanoseconds of a clock that only goes forward. */
uint64_t
oomkit_now_ns(void);

#endif
