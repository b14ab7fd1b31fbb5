/* Measuring a stretch of code, and cleaning up after it when memory ran out. */
#include "guard.h"
#include "../call/records.h"
#include "../py/tensor.h"
#include "../core/plan.h"
#include "../core/status.h"

#include <string.h>

/* --- records --- */

void
oomkit_guard_init(oomkit_guard *guard, oomkit_state *st, PyObject *label, int skip,
                  int reset_peaks)
{
    memset(guard, 0, sizeof(*guard));
    guard->st = st;
    guard->label = Py_XNewRef(label);
    guard->skip = skip;
    guard->reset_peaks = reset_peaks;
}

void
oomkit_guard_clear(oomkit_guard *guard)
{
    Py_CLEAR(guard->label);
    oomkit_history_destroy(guard->history);
    guard->history = NULL;
}

/* Without memory for a history the latest record takes the place of the first. */
static void
guard_push(oomkit_guard *guard, const oomkit_record *record,
           const oomkit_phases *phases)
{
    if (guard->history == NULL && (guard->recorded > 0 || phases != NULL)) {
        guard->history = oomkit_history_create(OOMKIT_GUARD_RECORDS);
        if (guard->history != NULL && guard->recorded > 0) {
            oomkit_history_push(guard->history, &guard->first);
        }
    }
    if (guard->history != NULL) {
        oomkit_history_push(guard->history, record);
        oomkit_history_phases_add(guard->history,
                                  oomkit_history_count(guard->history) - 1, phases);
    } else {
        guard->first = *record;
    }
    guard->recorded++;
}

PyObject *
oomkit_guard_records(const oomkit_guard *guard)
{
    OWNED PyObject *item = NULL;

    if (guard->history != NULL) {
        return oomkit_history_records(guard->st, guard->history, guard->label);
    }
    if (guard->recorded == 0) {
        return PyTuple_New(0);
    }
    item = oomkit_record_new(guard->st, &guard->first, NULL, guard->label);
    return item == NULL ? NULL : PyTuple_Pack(1, item);
}

PyObject *
oomkit_guard_summary(const oomkit_guard *guard)
{
    OWNED_MEMORY oomkit_totals *totals = PyMem_Calloc(1, sizeof(*totals));

    if (totals == NULL) {
        return PyErr_NoMemory();
    }
    if (guard->history != NULL) {
        oomkit_history_total(guard->history, totals);
    } else if (guard->recorded > 0) {
        oomkit_totals_add(totals, NULL, &guard->first);
    }
    return oomkit_summary_new(guard->st, totals, guard->label);
}

/* --- measuring --- */

int
oomkit_guard_begin(oomkit_guard *guard, oomkit_guard_window *window)
{
    oomkit_state *st = guard->st;
    oomkit_device device = oomkit_device_default(st);

    if (st->flush_pending && oomkit_device_flush_pending(st, device) < 0) {
        return -1;
    }
    if (!guard->prepared) {
        oomkit_device_prepare(st, device);
        guard->prepared = device.type == OOMKIT_DEVICE_CPU;
    }
    window->step = ++guard->calls;
    window->alone = 0;
    oomkit_device_begin(st, device, guard->reset_peaks, &window->peak);
    window->started_ns = oomkit_now_ns();
    window->meter =
        st->phases_wanted ? oomkit_meter_open(st, device, guard->reset_peaks) : NULL;
    return 0;
}

void
oomkit_guard_abandon(oomkit_guard *guard, oomkit_guard_window *window)
{
    if (window->meter != NULL) {
        oomkit_meter_close(guard->st, window->meter);
        MEMORY_CLEAR(window->meter);
    }
    oomkit_device_end(guard->st, &window->peak);
}

static void
guard_record(oomkit_guard *guard, oomkit_guard_window *window, int outcome,
             uint64_t requested_bytes)
{
    uint64_t spent_ns = oomkit_now_ns() - window->started_ns;
    const oomkit_phases *phases = NULL;
    oomkit_record record;

    if (window->meter != NULL) {
        oomkit_meter_close(guard->st, window->meter);
        window->meter->seen.of[window->meter->phase].ooms +=
            outcome == OOMKIT_GUARD_OOM;
        if (outcome == OOMKIT_GUARD_OOM) {
            oomkit_phases_lost(&window->meter->seen);
        }
        phases = &window->meter->seen;
    }
    if (outcome == OOMKIT_GUARD_OOM) {
        oomkit_device_look(guard->st, window->peak.device);
    }
    oomkit_device_end(guard->st, &window->peak);
    record = (oomkit_record){
        .step = window->step,
        .batch_size = OOMKIT_UNKNOWN,
        .micro_batch_size = OOMKIT_UNKNOWN,
        .requested_bytes = requested_bytes,
        .baseline_bytes = window->peak.baseline_bytes,
        .peak_allocated_bytes = window->peak.peak_allocated_bytes,
        .peak_reserved_bytes = window->peak.peak_reserved_bytes,
        .device_free_bytes = window->peak.free_bytes,
        .budget_bytes = window->peak.budget_bytes,
        .began_ns = window->started_ns,
        .time_ns = spent_ns,
        .lost_ns = outcome == OOMKIT_GUARD_OOM ? spent_ns : 0,
        .accumulation_steps = 1,
        .attempts = 1,
        .ooms = outcome == OOMKIT_GUARD_OOM,
        .reason = OOMKIT_REASON_WHOLE,
        .outcome = (uint32_t)outcome,
        .rank = guard->st->rank,
    };
    guard_push(guard, &record, phases);
    oomkit_sinks_tell(guard->st, &record, phases, guard->label, NULL);
    MEMORY_CLEAR(window->meter);
}

void
oomkit_guard_end(oomkit_guard *guard, oomkit_guard_window *window, int outcome)
{
    guard_record(guard, window, outcome, OOMKIT_UNKNOWN);
}

void
oomkit_guard_record_oom(oomkit_guard *guard, oomkit_guard_window *window,
                        PyObject *exception)
{
    OWNED PyObject *message = NULL, *location = NULL;
    uint64_t requested;

    oomkit_exception_describe(guard->st, exception, &requested, &message, &location);
    guard_record(guard, window, OOMKIT_GUARD_OOM, requested);
}

int
oomkit_guard_is_oom(oomkit_guard *guard, PyObject *exception)
{
    oomkit_class class_ = oomkit_exception_classify(guard->st, exception);
    int is_oom = class_ == OOMKIT_CLASS_CERTAIN || class_ == OOMKIT_CLASS_MASKED ||
                 class_ == OOMKIT_CLASS_NEVER;
    return is_oom &&
           !oomkit_device_is_lost(guard->st, oomkit_device_default(guard->st));
}

/* --- after a failure --- */

/* Who holds the memory, as far as a guard can tell. New reference or NULL. */
static PyObject *
failed_holders(const oomkit_guard_window *window, uint64_t allocated_bytes)
{
    uint64_t before = window->peak.baseline_bytes;

    if (before == OOMKIT_UNKNOWN || allocated_bytes == OOMKIT_UNKNOWN) {
        return PyDict_New();
    }
    return Py_BuildValue(
        "{sKsK}", "before the guard", (unsigned long long)before, "inside the guard",
        (unsigned long long)(allocated_bytes > before ? allocated_bytes - before : 0));
}

/* New reference or NULL. */
static PyObject *
failed_report(oomkit_guard *guard, const oomkit_guard_window *window,
              const oomkit_attempt *attempt)
{
    char device[OOMKIT_DEVICE_TEXT];
    OWNED PyObject *holders = failed_holders(window, attempt->allocated_bytes);
    OWNED PyObject *advice = NULL;

    if (holders == NULL) {
        return NULL;
    }
    oomkit_device_text(window->peak.device, device);
    advice = Py_BuildValue(
        "(sss)",
        "pass fewer rows at a time, or decorate the function with "
        "@oomkit.auto_batch, which splits its batch by itself",
        "evaluate under torch.inference_mode(), so that nothing is kept for a "
        "backward",
        "move what is finished off the device, and free what else is on it: other "
        "models, cached batches, stored outputs");
    if (advice == NULL) {
        return NULL;
    }
    return oomkit_report_new(guard->st, guard->label, device, attempt, 1, attempt,
                             holders, advice);
}

/* Forgets that an exception takes no attributes, which is no failure of ours. 0 or -1.
 */
static int
failed_forgive(void)
{
    if (!PyErr_ExceptionMatches(PyExc_AttributeError) &&
        !PyErr_ExceptionMatches(PyExc_TypeError)) {
        return -1;
    }
    PyErr_Clear();
    return 0;
}

/* Sets exception.report, unless an inner guard or auto_batch has said more already. 0
 * or -1. */
static int
failed_attach(oomkit_state *st, PyObject *exception, PyObject *report)
{
    OWNED PyObject *there = PyObject_GetAttr(exception, st->str_report);

    if (there == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear();
    } else if (Py_IS_TYPE(there, (PyTypeObject *)st->report_type)) {
        return 0;
    }
    return PyObject_SetAttr(exception, st->str_report, report) < 0 ? failed_forgive()
                                                                   : 0;
}

/* 0 or -1. The texts are of oomkit_format_bytes. */
static int
failed_note(oomkit_guard *guard, const oomkit_guard_window *window, PyObject *exception,
            const char *requested, const char *peak)
{
    PyObject *label = guard->label == NULL ? Py_None : guard->label; /* borrowed */
    OWNED PyObject *note =
        PyUnicode_FromFormat("oomkit: memory ran out in guard(label=%R): "
                             "requested %s, peak allocated %s%s" SEE("guard"),
                             label, requested, peak,
                             window->alone ? "; a guard runs nothing again: put the "
                                             "block into `for part in "
                                             "oomkit.chunks(batch):`, which does, in "
                                             "parts that fit"
                                           : "");
    OWNED PyObject *done = NULL;

    if (note == NULL) {
        return -1;
    }
    done = PyObject_CallMethod(exception, "add_note", "O", note);
    return done == NULL ? failed_forgive() : 0;
}

/* 0 or -1. */
static int
failed_log(oomkit_guard *guard, const char *requested, const char *peak)
{
    return oomkit_say(guard->st, "warning", "sOsss",
                      "guard=%s requested=%s peak_allocated=%s outcome=%s",
                      guard->label == NULL ? Py_None : guard->label, requested, peak,
                      guard->skip ? "skipped" : "raised");
}

int
oomkit_guard_drain(oomkit_state *st, oomkit_device device)
{
    OWNED PyObject *inference = NULL;

    if (device.type != OOMKIT_DEVICE_CPU) {
        return 0;
    }
    inference = PyObject_CallNoArgs(st->is_inference_mode);
    if (inference == NULL) {
        return -1;
    }
    /* Nothing runs backward there. */
    return inference == Py_True ? 0 : oomkit_backward_drain(st);
}

void
oomkit_guard_failed(oomkit_guard *guard, oomkit_guard_window *window,
                    PyObject *exception, PyObject *keep)
{
    oomkit_state *st = guard->st;
    oomkit_attempt attempt;
    OWNED PyObject *report = NULL;
    char requested[32], peak[32];

    memset(&attempt, 0, sizeof(attempt));
    attempt.phase = -1; /* a guard does not know */
    oomkit_exception_describe(st, exception, &attempt.requested_bytes, &attempt.message,
                              &attempt.location);
    attempt.inner = oomkit_exception_inner(st, exception);
    oomkit_device_held(st, window->peak.device, &attempt.allocated_bytes,
                       &attempt.reserved_bytes);
    guard_record(guard, window, OOMKIT_GUARD_OOM, attempt.requested_bytes);
    attempt.budget_bytes = window->peak.budget_bytes;
    attempt.free_bytes = window->peak.free_bytes;
    oomkit_exception_clear_frames(st, exception, keep);
    /* The exception of the guarded code is the one to see: what goes wrong from here on
     * is said, not raised. */
    if (oomkit_guard_drain(st, window->peak.device) < 0) {
        oomkit_error_unraised(guard->label);
    }
    report = failed_report(guard, window, &attempt);
    if (report == NULL || failed_attach(st, exception, report) < 0) {
        oomkit_error_unraised(guard->label);
    }
    oomkit_format_bytes(attempt.requested_bytes, requested);
    oomkit_format_bytes(window->peak.peak_allocated_bytes, peak);
    if (failed_note(guard, window, exception, requested, peak) < 0) {
        oomkit_error_unraised(guard->label);
    }
    if (failed_log(guard, requested, peak) < 0) {
        oomkit_error_unraised(guard->label);
    }
    Py_XDECREF(attempt.message);
    Py_XDECREF(attempt.location);
    Py_XDECREF(attempt.inner);
}

void
oomkit_guard_flush(oomkit_guard *guard, const oomkit_guard_window *window, int again)
{
    int capturing =
        window->peak.device.type == OOMKIT_DEVICE_CPU ? 0 : oomkit_is_capturing();

    if (capturing > 0) { /* nothing may be freed there: at the next call outside */
        guard->st->flush_pending = 1;
        return;
    }
    if (capturing < 0 ||
        oomkit_device_empty_cache(guard->st, window->peak.device) < 0) {
        oomkit_error_unraised(guard->label);
    }
    if (again && window->peak.device.type != OOMKIT_DEVICE_CPU) {
        guard->st->flush_pending = 1;
    }
}
