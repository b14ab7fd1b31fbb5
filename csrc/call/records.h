/* StepRecord and OOMReport: immutable records as Python sees them (struct sequences).
 */
#ifndef OOMKIT_CALL_RECORDS_H
#define OOMKIT_CALL_RECORDS_H

#include "../py/errors.h"
#include "../core/ring.h"

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

/* Makes st->record_type and st->report_type. 0 or -1. */
int
oomkit_records_init(oomkit_state *st);

/* A StepRecord: step, label, batch_size, micro_batch_size, accumulation_steps,
 * attempts, ooms, requested_bytes, baseline, peak_allocated, peak_reserved,
 * device_free, budget, time, time_lost (seconds), rung, reason (str), outcome (str).
 * None where unknown. `label` is borrowed. New reference or NULL. */
PyObject *
oomkit_record_new(oomkit_state *st, const oomkit_record *record, PyObject *label);

/* What one failed attempt was, for the report. Plain values: nothing of the attempt
 * lives in it. */
typedef struct oomkit_attempt {
    int64_t micro_batch_size, accumulation_steps;
    uint64_t requested_bytes, allocated_bytes;
    uint64_t reserved_bytes; /* OOMKIT_UNKNOWN on the CPU */
    int phase;               /* OOMKIT_PHASE_* */
    int in_update;           /* an optimizer's step() was not finished */
    PyObject *location; /* owned: "file:line in name" of the innermost frame, or NULL */
    PyObject *message;  /* owned: str, first line of the error, or NULL */
} oomkit_attempt;

/* An OOMReport: label, device, attempts (tuple of dict with micro_batch_size,
 * accumulation_steps, requested_bytes, allocated_bytes, phase, location, message),
 * requested_bytes, allocated, budget, holders (dict of kind -> bytes), advice (tuple of
 * three str), text (str, what the exception says). `holders` and `advice` are borrowed.
 * New reference or NULL. */
PyObject *
oomkit_report_new(oomkit_state *st, PyObject *label, const char *device,
                  const oomkit_attempt *attempts, Py_ssize_t count,
                  uint64_t allocated_bytes, uint64_t budget_bytes, PyObject *holders,
                  PyObject *advice);

/* "2.00 GiB", "12.50 MiB", "512 bytes", "unknown". buffer needs 32 bytes. */
const char *
oomkit_format_bytes(uint64_t bytes, char *buffer);

/* Nanoseconds of a clock that only goes forward. */
uint64_t
oomkit_now_ns(void);

#endif
