/* StepSummary: what all calls of a site were. And the steps that are gone: a trial of a
 * search, a deleted trainer; what their functions did stays, by label, in constant
 * memory. */
#include "call.h"
#include "step.h"

enum { SUMMARY_FIELDS = 15 };

static PyStructSequence_Field summary_fields[] = {
    {"label", "name of the site"},
    {"steps", "calls that ended"},
    {"ooms", "attempts that ran out of memory"},
    {"retries", "attempts after the first of their call"},
    {"plan_changes", "calls cut in another way than the one before"},
    {"unfinished", "calls that ended with an error"},
    {"time", "seconds of all calls"},
    {"time_lost", "seconds of failed attempts and of recovery"},
    {"time_p50", "seconds that half of the calls took at most"},
    {"time_p95", "seconds that 95 % of the calls took at most"},
    {"time_max", "seconds of the longest call"},
    {"peak_p50", "bytes allocated at most by half of the calls"},
    {"peak_p95", "bytes allocated at most by 95 % of the calls"},
    {"peak_allocated", "highest number of allocated bytes"},
    {"peak_reserved", "highest number of reserved bytes"},
    {NULL, NULL},
};

static PyStructSequence_Desc summary_desc = {
    .name = "oomkit.StepSummary",
    .doc = "All calls of a site, also those whose records are no longer there: memory "
           "in bytes, times in seconds.\n\nQuantiles are right to 2 %. What could not "
           "be measured is None.",
    .fields = summary_fields,
    .n_in_sequence = SUMMARY_FIELDS,
};

int
oomkit_summary_init(oomkit_state *st)
{
    Py_XSETREF(st->summary_type, oomkit_sequence_type(&summary_desc));
    return st->summary_type == NULL ? -1 : 0;
}

static PyObject *
seconds(uint64_t nanoseconds)
{
    return PyFloat_FromDouble((double)nanoseconds / 1e9);
}

/* A quantile of what may never have been measured. New reference or NULL. */
static PyObject *
quantile_seconds(const oomkit_sketch *sketch, double share)
{
    return sketch->count == 0 ? Py_NewRef(Py_None)
                              : seconds(oomkit_sketch_quantile(sketch, share));
}

static PyObject *
quantile_bytes(const oomkit_sketch *sketch, double share)
{
    return sketch->count == 0
               ? Py_NewRef(Py_None)
               : PyLong_FromUnsignedLongLong(oomkit_sketch_quantile(sketch, share));
}

PyObject *
oomkit_summary_new(oomkit_state *st, const oomkit_totals *totals, PyObject *label)
{
    PyObject *values[] = {
        /* owned, stolen by oomkit_sequence_of() */
        Py_NewRef(label == NULL ? Py_None : label),
        PyLong_FromUnsignedLongLong(totals->steps),
        PyLong_FromUnsignedLongLong(totals->ooms),
        PyLong_FromUnsignedLongLong(totals->retries),
        PyLong_FromUnsignedLongLong(totals->changes),
        PyLong_FromUnsignedLongLong(totals->unfinished),
        seconds(totals->time_ns),
        seconds(totals->lost_ns),
        quantile_seconds(&totals->times, 0.5),
        quantile_seconds(&totals->times, 0.95),
        totals->times.count == 0 ? Py_NewRef(Py_None) : seconds(totals->times.most),
        quantile_bytes(&totals->peaks, 0.5),
        quantile_bytes(&totals->peaks, 0.95),
        totals->peaks.count == 0 ? Py_NewRef(Py_None)
                                 : PyLong_FromUnsignedLongLong(totals->peaks.most),
        totals->peak_reserved_bytes == 0
            ? Py_NewRef(Py_None)
            : PyLong_FromUnsignedLongLong(totals->peak_reserved_bytes),
    };

    _Static_assert(sizeof(values) / sizeof(values[0]) == SUMMARY_FIELDS, "all fields");
    return oomkit_sequence_of(st->summary_type, values, SUMMARY_FIELDS);
}

/* Appends them to a list. 0 or -1. */
static int
records_append(oomkit_state *st, const oomkit_history *history, PyObject *label,
               PyObject *list)
{
    oomkit_record record;
    uint64_t at;
    int status;

    for (at = 0; (status = oomkit_history_kept(history, at, &record)) != OOMKIT_EINVAL;
         at++) {
        OWNED PyObject *item = NULL;
        if (status != OOMKIT_OK) {
            continue; /* overwritten meanwhile by another thread's step */
        }
        item = oomkit_record_new(st, &record, oomkit_history_kept_phases(history, at),
                                 label);
        if (item == NULL || PyList_Append(list, item) < 0) {
            return -1;
        }
    }
    return 0;
}

PyObject *
oomkit_history_records(oomkit_state *st, const oomkit_history *history, PyObject *label)
{
    OWNED PyObject *list = PyList_New(0);

    return list == NULL || records_append(st, history, label, list) < 0
               ? NULL
               : PyList_AsTuple(list);
}

/* --- the steps that are gone --- */

#define GONE_LABELS 256 /* of later ones nothing is kept */

static const char capsule_name[] = "oomkit._C.history";

static void
capsule_free(PyObject *capsule)
{
    oomkit_history_destroy(PyCapsule_GetPointer(capsule, capsule_name));
}

static oomkit_history *
capsule_history(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, capsule_name);
}

/* Gives the dictionary a history that has no entry there. 0: it has it now; -1. */
static int
entry_new(PyObject *entries, PyObject *label, oomkit_history *history)
{
    OWNED PyObject *capsule = PyCapsule_New(history, capsule_name, NULL);

    return capsule == NULL || PyDict_SetItem(entries, label, capsule) < 0
               ? -1
               : PyCapsule_SetDestructor(capsule, capsule_free);
}

/* 1 the dictionary has the history now, 0 it has not, -1 with an exception. */
static int
gone_take(oomkit_state *st, PyObject *label, oomkit_history *history)
{
    PyObject *there; /* borrowed from st->gone */

    if (st->gone == NULL) {
        st->gone = PyDict_New();
        if (st->gone == NULL) {
            return -1;
        }
    }
    there = PyDict_GetItemWithError(st->gone, label);
    if (there != NULL) {
        oomkit_history_merge(capsule_history(there), history);
        return 0;
    }
    if (PyErr_Occurred() || PyDict_GET_SIZE(st->gone) >= GONE_LABELS) {
        return PyErr_Occurred() ? -1 : 0;
    }
    return entry_new(st->gone, label, history) < 0 ? -1 : 1;
}

void
oomkit_gone_put(oomkit_state *st, PyObject *label, oomkit_history *history)
{
    int taken = 0;

    if (history == NULL) {
        return; /* of a step that was never made */
    }
    /* At exit the state is empty already, and nobody will ask. */
    if (oomkit_history_count(history) > 0 && label != NULL && st->live_steps != NULL) {
        KEEPING_EXCEPTION {
            taken = gone_take(st, label, history);
            if (taken < 0) {
                oomkit_error_dismiss(); /* no memory: a report lacks what is gone */
            }
        }
    }
    if (taken <= 0) {
        oomkit_history_destroy(history);
    }
}

/* --- everything, by label --- */

/* Adds what a history has to the entry of its label. 0 or -1. */
static int
entries_add(PyObject *entries, PyObject *label, const oomkit_history *history)
{
    PyObject *there = PyDict_GetItemWithError(entries, label); /* borrowed */
    oomkit_history *made;

    if (there == NULL) {
        made = PyErr_Occurred() ? NULL : oomkit_history_create(OOMKIT_RECORDS);
        if (made == NULL) {
            return PyErr_Occurred() ? -1 : (PyErr_NoMemory(), -1);
        }
        if (entry_new(entries, label, made) < 0) {
            oomkit_history_destroy(made);
            return -1;
        }
        oomkit_history_merge(made, history);
        return 0;
    }
    oomkit_history_merge(capsule_history(there), history);
    return 0;
}

/* (label, StepSummary, records). New reference or NULL. */
static PyObject *
entry_tuple(oomkit_state *st, PyObject *label, const oomkit_history *history)
{
    OWNED_MEMORY oomkit_totals *totals = PyMem_Malloc(sizeof(*totals));
    OWNED PyObject *summary = NULL, *records = NULL;

    if (totals == NULL) {
        return PyErr_NoMemory();
    }
    oomkit_history_total(history, totals);
    summary = oomkit_summary_new(st, totals, label);
    records = summary == NULL ? NULL : oomkit_history_records(st, history, label);
    return records == NULL ? NULL : PyTuple_Pack(3, label, summary, records);
}

PyObject *
oomkit_histories(oomkit_state *st, PyObject *live)
{
    OWNED PyObject *entries = PyDict_New(), *list = PyList_New(0);
    PyObject *label, *capsule; /* borrowed from a dictionary */
    Py_ssize_t at = 0, i;

    if (entries == NULL || list == NULL) {
        return NULL;
    }
    while (st->gone != NULL && PyDict_Next(st->gone, &at, &label, &capsule)) {
        if (entries_add(entries, label, capsule_history(capsule)) < 0) {
            return NULL;
        }
    }
    for (i = 0; i < PyList_GET_SIZE(live); i++) {
        const oomkit_step *step = step_CAST(PyList_GET_ITEM(live, i));
        if (oomkit_history_count(step->history) > 0 &&
            entries_add(entries, step->options.label, step->history) < 0) {
            return NULL;
        }
    }
    for (at = 0; PyDict_Next(entries, &at, &label, &capsule);) {
        OWNED PyObject *entry = entry_tuple(st, label, capsule_history(capsule));
        if (entry == NULL || PyList_Append(list, entry) < 0) {
            return NULL;
        }
    }
    return STEAL(list);
}

/* --- records as they come --- */

void
oomkit_sinks_told(oomkit_state *st, const oomkit_record *record,
                  const oomkit_phases *phases, PyObject *label, PyObject *own)
{
    KEEPING_EXCEPTION {
        OWNED PyObject *item = oomkit_record_new(st, record, phases, label);
        OWNED PyObject *done = NULL;
        if (item != NULL) {
            done = PyObject_CallFunctionObjArgs(st->tell_sinks, item,
                                                own == NULL ? Py_None : own, NULL);
        }
        if (done == NULL) {
            oomkit_error_dismiss(); /* training never hears of it */
        }
    }
}
