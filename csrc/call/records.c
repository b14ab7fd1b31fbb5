/* StepRecord and OOMReport, and the words of a report. */
#include "records.h"
#include "../core/plan.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

uint64_t
oomkit_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

enum { RECORD_FIELDS = 21, REPORT_FIELDS = 9 };

static PyStructSequence_Field record_fields[] = {
    {"step", "number of the call at its site, from 1"},
    {"label", "name of the site"},
    {"batch_size", "rows of the batch, None where no batch was found"},
    {"micro_batch_size", "rows of the largest slice that was executed"},
    {"accumulation_steps", "number of micro-batches"},
    {"attempts", "plans that were tried"},
    {"ooms", "attempts that ran out of memory"},
    {"requested_bytes", "last request that failed"},
    {"baseline", "bytes allocated at entry"},
    {"peak_allocated", "highest number of allocated bytes"},
    {"peak_reserved", "highest number of reserved bytes"},
    {"device_free", "bytes free at the end"},
    {"budget", "limit in force, in bytes"},
    {"started", "when it began, in seconds of time.monotonic()"},
    {"time", "seconds, failed attempts included"},
    {"time_lost", "seconds of failed attempts and of recovery"},
    {"rung", "position on the escalation ladder"},
    {"reason", "why the plan was what it was"},
    {"outcome", "'finished', 'gave up', 'error' or 'committed'"},
    {"phases", "dict of phase to its figures, None without auto_batch(phases=True)"},
    {"rank", "of this process in the default process group, None before its ranks met"},
    {NULL, NULL},
};

static PyStructSequence_Desc record_desc = {
    .name = "oomkit.StepRecord",
    .doc = "What one protected call was: sizes in rows, memory in bytes, times in "
           "seconds.\n\nFields that could not be measured are None.",
    .fields = record_fields,
    .n_in_sequence = RECORD_FIELDS,
};

static PyStructSequence_Field report_fields[] = {
    {"label", "name of the site"},
    {"device", "the device that ran out of memory"},
    {"attempts", "tuple of dict, one for each attempt that failed"},
    {"requested_bytes", "last request that failed"},
    {"allocated", "bytes allocated when it failed"},
    {"budget", "limit in force, in bytes"},
    {"holders", "dict of kind to bytes: who held the memory when it failed"},
    {"advice", "tuple of str: what to do"},
    {"text", "all of it, for people"},
    {NULL, NULL},
};

static PyStructSequence_Desc report_desc = {
    .name = "oomkit.OOMReport",
    .doc = "What was tried before the step gave up, and what to do about it.",
    .fields = report_fields,
    .n_in_sequence = REPORT_FIELDS,
};

int
oomkit_records_init(oomkit_state *st)
{
    Py_XSETREF(st->record_type, oomkit_sequence_type(&record_desc));
    if (st->record_type == NULL) {
        return -1;
    }
    Py_XSETREF(st->report_type, oomkit_sequence_type(&report_desc));
    return st->report_type == NULL ? -1 : oomkit_summary_init(st);
}

const char *
oomkit_format_bytes(uint64_t bytes, char *buffer)
{
    static const char *const units[] = {"KiB", "MiB", "GiB"};
    double value = (double)bytes / 1024.0;
    int unit = 0;

    if (bytes == OOMKIT_UNKNOWN) {
        strcpy(buffer, "unknown");
    } else if (bytes < 1024) {
        snprintf(buffer, 32, "%d %s", (int)bytes, bytes == 1 ? "byte" : "bytes");
    } else {
        for (; unit < 2 && value >= 1024.0; unit++) {
            value /= 1024.0;
        }
        snprintf(buffer, 32, "%.2f %s", value, units[unit]);
    }
    return buffer;
}

/* --- values: each gives a new reference or NULL --- */

static PyObject *
number_or_none(uint64_t number)
{
    return number == OOMKIT_UNKNOWN ? Py_NewRef(Py_None)
                                    : PyLong_FromUnsignedLongLong(number);
}

static PyObject *
rows_or_none(int64_t rows)
{
    return rows <= 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(rows);
}

static PyObject *
seconds_or_none(uint64_t nanoseconds)
{
    return nanoseconds == OOMKIT_UNKNOWN
               ? Py_NewRef(Py_None)
               : PyFloat_FromDouble((double)nanoseconds / 1e9);
}

static PyObject *
object_or_none(PyObject *object)
{
    return Py_NewRef(object == NULL ? Py_None : object);
}

static const char *
phase_name(int phase)
{
    static const char *const names[OOMKIT_PHASES] = {"forward", "backward", "optimizer",
                                                     "recovery"};
    return phase >= 0 && phase < OOMKIT_PHASES ? names[phase] : NULL;
}

static const char *
outcome_name(uint32_t outcome)
{
    static const char *const names[] = {"finished", "gave up", "error", "committed"};
    return outcome < sizeof(names) / sizeof(names[0]) ? names[outcome] : "unknown";
}

PyObject *
oomkit_sequence_of(PyObject *type, PyObject **values, Py_ssize_t count)
{
    PyObject *sequence = PyStructSequence_New((PyTypeObject *)type); /* owned */
    int complete = sequence != NULL;
    Py_ssize_t i;

    for (i = 0; i < count; i++) {
        complete = complete && values[i] != NULL;
        if (sequence != NULL) {
            PyStructSequence_SetItem(sequence, i, values[i]);
        } else {
            Py_XDECREF(values[i]);
        }
    }
    if (!complete) {
        Py_CLEAR(sequence);
    }
    return sequence;
}

/* New reference or NULL. */
static PyObject *
changes_list(const oomkit_phase_figures *figures)
{
    OWNED PyObject *list = PyList_New(0);
    uint64_t i;

    for (i = 0; list != NULL && i < figures->retries && i < OOMKIT_PHASE_CHANGES; i++) {
        const oomkit_plan_change *change = &figures->changes[i];
        OWNED PyObject *entry =
            Py_BuildValue("{ss sI sK}", "reason",
                          oomkit_plan_reason_name((oomkit_plan_reason)change->reason),
                          "rung", (unsigned int)change->rung, "accumulation_steps",
                          (unsigned long long)change->accumulation_steps);
        if (entry == NULL || PyList_Append(list, entry) < 0) {
            return NULL;
        }
    }
    return STEAL(list);
}

/* {"forward": {...}, ...} of those that were entered, or None. New reference or NULL.
 */
static PyObject *
phases_or_none(const oomkit_phases *phases)
{
    OWNED PyObject *dict = phases == NULL ? Py_NewRef(Py_None) : PyDict_New();
    int i;

    for (i = 0; phases != NULL && dict != NULL && i < OOMKIT_PHASE_FIGURES; i++) {
        const oomkit_phase_figures *figures = &phases->of[i];
        OWNED PyObject *entry = NULL;
        if (figures->entered == 0) {
            continue;
        }
        entry = Py_BuildValue(
            "{sN sN sN sN sN sK sK sN}", "baseline",
            number_or_none(figures->baseline_bytes), "peak_allocated",
            number_or_none(figures->peak_allocated_bytes), "peak_reserved",
            number_or_none(figures->peak_reserved_bytes), "time",
            seconds_or_none(figures->time_ns), "time_lost",
            seconds_or_none(figures->lost_ns), "ooms",
            (unsigned long long)figures->ooms, "retries",
            (unsigned long long)figures->retries, "changes", changes_list(figures));
        if (entry == NULL || PyDict_SetItemString(dict, phase_name(i), entry) < 0) {
            return NULL;
        }
    }
    return STEAL(dict);
}

static PyObject *
rank_or_none(uint32_t from_one)
{
    return from_one == 0 ? Py_NewRef(Py_None) : PyLong_FromUnsignedLong(from_one - 1);
}

PyObject *
oomkit_record_new(oomkit_state *st, const oomkit_record *record,
                  const oomkit_phases *phases, PyObject *label)
{
    PyObject *values[] = {
        /* owned, stolen by oomkit_sequence_of() */
        PyLong_FromUnsignedLongLong(record->step),
        object_or_none(label),
        number_or_none(record->batch_size),
        number_or_none(record->micro_batch_size),
        PyLong_FromUnsignedLong(record->accumulation_steps),
        PyLong_FromUnsignedLong(record->attempts),
        PyLong_FromUnsignedLong(record->ooms),
        number_or_none(record->requested_bytes),
        number_or_none(record->baseline_bytes),
        number_or_none(record->peak_allocated_bytes),
        number_or_none(record->peak_reserved_bytes),
        number_or_none(record->device_free_bytes),
        number_or_none(record->budget_bytes),
        seconds_or_none(record->began_ns),
        seconds_or_none(record->time_ns),
        seconds_or_none(record->lost_ns),
        PyLong_FromUnsignedLong(record->rung),
        PyUnicode_FromString(
            oomkit_plan_reason_name((oomkit_plan_reason)record->reason)),
        PyUnicode_FromString(outcome_name(record->outcome)),
        phases_or_none(phases),
        rank_or_none(record->rank),
    };

    _Static_assert(sizeof(values) / sizeof(values[0]) == RECORD_FIELDS, "all fields");
    return oomkit_sequence_of(st->record_type, values, RECORD_FIELDS);
}

/* --- the report --- */

static PyObject *
attempt_dict(const oomkit_attempt *attempt)
{
    const oomkit_holding *held = &attempt->held;

    return Py_BuildValue(
        "{sN sN sz sN sN sN sN sN sN sN sN sN sz sN sN sN}", "micro_batch_size",
        rows_or_none(attempt->micro_batch_size), "accumulation_steps",
        rows_or_none(attempt->accumulation_steps), "rung", attempt->rung,
        "requested_bytes", number_or_none(attempt->requested_bytes), "allocated_bytes",
        number_or_none(attempt->allocated_bytes), "reserved_bytes",
        number_or_none(attempt->reserved_bytes), "budget_bytes",
        number_or_none(attempt->budget_bytes), "free_bytes",
        number_or_none(attempt->free_bytes), "parameters_bytes",
        number_or_none(held->params), "gradients_bytes",
        number_or_none(held->gradients), "state_bytes", number_or_none(held->state),
        "outside_bytes", number_or_none(held->outside), "phase",
        phase_name(attempt->phase), "location", object_or_none(attempt->location),
        "inner_location", object_or_none(attempt->inner), "message",
        object_or_none(attempt->message));
}

PyObject *
oomkit_attempts_tuple(const oomkit_attempt *attempts, Py_ssize_t count)
{
    OWNED PyObject *tuple = PyTuple_New(count);
    Py_ssize_t i;

    for (i = 0; tuple != NULL && i < count; i++) {
        PyObject *entry = attempt_dict(&attempts[i]); /* stolen by PyTuple_SET_ITEM() */
        if (entry == NULL) {
            return NULL;
        }
        PyTuple_SET_ITEM(tuple, i, entry);
    }
    return STEAL(tuple);
}

/* Appends a line. Steals `line`, which may be NULL with an exception. 0 or -1. */
static int
lines_add(PyObject *lines, PyObject *line)
{
    int result = line == NULL ? -1 : PyList_Append(lines, line);
    Py_XDECREF(line);
    return result;
}

/* ", reserved 2.00 GiB", or nothing of a figure that is not known. */
static const char *
figure_text(const char *name, uint64_t bytes, char text[64])
{
    char figure[32];

    text[0] = 0;
    if (bytes != OOMKIT_UNKNOWN) {
        snprintf(text, 64, ", %s %s", name, oomkit_format_bytes(bytes, figure));
    }
    return text;
}

/* New reference or NULL. */
static PyObject *
attempt_line(const oomkit_attempt *attempt, Py_ssize_t number)
{
    char requested[32], allocated[64], reserved[64], budget[64], free_[64], sizes[96];
    const char *phase = phase_name(attempt->phase);

    if (attempt->micro_batch_size > 0) {
        snprintf(sizes, sizeof(sizes), "micro-batch %lld, accumulation steps %lld",
                 (long long)attempt->micro_batch_size,
                 (long long)attempt->accumulation_steps);
    } else {
        strcpy(sizes, "the whole call");
    }
    return PyUnicode_FromFormat(
        "  %zd. %s%s%s: requested %s%s%s%s%s%s%s%s%V%s%V%s", number, sizes,
        attempt->rung == NULL ? "" : ", rung ",
        attempt->rung == NULL ? "" : attempt->rung,
        oomkit_format_bytes(attempt->requested_bytes, requested),
        figure_text("allocated", attempt->allocated_bytes, allocated),
        figure_text("reserved", attempt->reserved_bytes, reserved),
        figure_text("budget", attempt->budget_bytes, budget),
        figure_text("free", attempt->free_bytes, free_),
        phase == NULL ? "" : ", phase ", phase == NULL ? "" : phase,
        attempt->location == NULL ? "" : ", at ", attempt->location, "",
        attempt->inner == NULL ? "" : " (", attempt->inner, "",
        attempt->inner == NULL ? "" : ")");
}

static int
lines_add_attempts(PyObject *lines, const oomkit_attempt *attempts, Py_ssize_t count)
{
    Py_ssize_t i;

    if (lines_add(lines, PyUnicode_FromString("what was tried:")) < 0) {
        return -1;
    }
    for (i = 0; i < count; i++) {
        if (lines_add(lines, attempt_line(&attempts[i], i + 1)) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
lines_add_holders(PyObject *lines, PyObject *holders)
{
    PyObject *kind, *number; /* borrowed from holders */
    Py_ssize_t at = 0;
    char buffer[32];

    if (PyDict_GET_SIZE(holders) == 0) {
        return 0;
    }
    if (lines_add(lines, PyUnicode_FromString("who held the memory:")) < 0) {
        return -1;
    }
    while (PyDict_Next(holders, &at, &kind, &number)) {
        unsigned long long bytes = PyLong_AsUnsignedLongLong(number);
        if (bytes == (unsigned long long)-1 && PyErr_Occurred()) {
            return -1;
        }
        if (lines_add(lines, PyUnicode_FromFormat("  %S: %s", kind,
                                                  oomkit_format_bytes(bytes, buffer))) <
            0) {
            return -1;
        }
    }
    return 0;
}

static int
lines_add_advice(PyObject *lines, PyObject *advice)
{
    Py_ssize_t i;

    if (PyTuple_GET_SIZE(advice) == 0) {
        return 0;
    }
    if (lines_add(lines, PyUnicode_FromString("what to do:")) < 0) {
        return -1;
    }
    for (i = 0; i < PyTuple_GET_SIZE(advice); i++) {
        if (lines_add(lines, PyUnicode_FromFormat("  %zd. %S", i + 1,
                                                  PyTuple_GET_ITEM(advice, i))) < 0) {
            return -1;
        }
    }
    return 0;
}

/* "step ran out of memory on cpu: requested ..., allocated ..., budget ...". */
static PyObject *
report_head(PyObject *label, const char *device, const oomkit_attempt *last)
{
    char requested[64], allocated[64], budget[64], figures[192];

    snprintf(figures, sizeof(figures), "%s%s%s",
             figure_text("requested", last->requested_bytes, requested),
             figure_text("allocated", last->allocated_bytes, allocated),
             figure_text("budget", last->budget_bytes, budget));
    if (figures[0] != 0) {
        figures[0] = ':'; /* in place of the first comma */
    }
    return PyUnicode_FromFormat("%V ran out of memory on %s%s",
                                label == NULL || label == Py_None ? NULL : label,
                                "the call", device, figures);
}

/* What the figures of the device do not count. 0 or -1. */
static int
lines_add_outside(PyObject *lines, const oomkit_attempt *last)
{
    char bytes[32];

    return last->held.outside == 0
               ? 0
               : lines_add(
                     lines,
                     PyUnicode_FromFormat(
                         "  not counted: %s of parameters, gradients and state that "
                         "were there before the limit was first set",
                         oomkit_format_bytes(last->held.outside, bytes)));
}

/* The lines of a report, joined. New reference or NULL. */
static PyObject *
report_text(PyObject *label, const char *device, const oomkit_attempt *attempts,
            Py_ssize_t count, const oomkit_attempt *last, PyObject *holders,
            PyObject *advice)
{
    OWNED PyObject *newline = PyUnicode_FromString("\n");
    OWNED PyObject *lines = newline ? PyList_New(0) : NULL;

    if (lines == NULL || lines_add(lines, report_head(label, device, last)) < 0 ||
        (count > 0 && lines_add_attempts(lines, attempts, count) < 0) ||
        lines_add_holders(lines, holders) < 0 || lines_add_outside(lines, last) < 0 ||
        lines_add_advice(lines, advice) < 0) {
        return NULL;
    }
    return PyUnicode_Join(newline, lines);
}

PyObject *
oomkit_report_new(oomkit_state *st, PyObject *label, const char *device,
                  const oomkit_attempt *attempts, Py_ssize_t count,
                  const oomkit_attempt *last, PyObject *holders, PyObject *advice)
{
    PyObject *values[] = {
        /* owned, stolen by oomkit_sequence_of() */
        object_or_none(label),
        PyUnicode_FromString(device),
        oomkit_attempts_tuple(attempts, count),
        number_or_none(last->requested_bytes),
        number_or_none(last->allocated_bytes),
        number_or_none(last->budget_bytes),
        Py_NewRef(holders),
        Py_NewRef(advice),
        NULL,
    };

    _Static_assert(sizeof(values) / sizeof(values[0]) == REPORT_FIELDS, "all fields");
    if (!PyErr_Occurred()) {
        values[REPORT_FIELDS - 1] =
            report_text(label, device, attempts, count, last, holders, advice);
    }
    return oomkit_sequence_of(st->report_type, values, REPORT_FIELDS);
}
