/* Memory figures by torch's own calls, for a process without a bridge. They go through
 * Python and take microseconds. */
#include "device_calls.h"

#include "../core/status.h"

/* Drops whatever is in flight: the callers promise figures or "unknown", never an
 * error, and torch's calls may raise anything (an assertion on some backends). They
 * have put the caller's own exception aside before. */
static void
drop_error(void)
{
    Py_XDECREF(oomkit_exception_take());
}

/* A torch._C function that takes no argument and returns a bool: 1, 0, or 0 after any
 * error. */
static int
torch_says(const char *name)
{
    PyObject *module;        /* owned */
    PyObject *answer = NULL; /* owned */
    int truth = 0;

    module = PyImport_ImportModule("torch._C");
    if (module != NULL) {
        answer = PyObject_CallMethod(module, name, NULL);
    }
    if (answer != NULL) {
        truth = PyObject_IsTrue(answer);
    }
    Py_XDECREF(answer);
    Py_XDECREF(module);
    if (truth < 0 || PyErr_Occurred()) {
        drop_error();
        return 0;
    }
    return truth;
}

/* stats[group]["all"][field], or stats[group] where field is NULL. OOMKIT_UNKNOWN when
 * it is not there. Never leaves an exception. */
static uint64_t
stats_entry(PyObject *stats, const char *group, const char *field)
{
    PyObject *found; /* borrowed from stats, which the caller holds */
    uint64_t value;

    found = PyDict_GetItemString(stats, group);
    if (found != NULL && field != NULL) {
        found = PyDict_Check(found) ? PyDict_GetItemString(found, "all") : NULL;
        found = found != NULL && PyDict_Check(found)
                    ? PyDict_GetItemString(found, field)
                    : NULL;
    }
    if (found == NULL) {
        return OOMKIT_UNKNOWN;
    }
    value = PyLong_AsUnsignedLongLong(found);
    if (value == (uint64_t)-1 && PyErr_Occurred()) {
        drop_error();
        return OOMKIT_UNKNOWN;
    }
    return value;
}

int
oomkit_torch_stats(oomkit_state *st, oomkit_device device, oomkit_memory_stats *stats)
{
    PyObject *all; /* owned */

    if (st->accelerator_get_stats == NULL ||
        !torch_says("_accelerator_isAllocatorInitialized")) {
        return OOMKIT_EUNSUPPORTED;
    }
    all = PyObject_CallFunction(st->accelerator_get_stats, "i", device.index);
    if (all == NULL || !PyDict_Check(all)) {
        Py_XDECREF(all);
        drop_error();
        return OOMKIT_EFAILED;
    }
    stats->allocated = stats_entry(all, "allocated_bytes", "current");
    stats->reserved = stats_entry(all, "reserved_bytes", "current");
    stats->peak_allocated = stats_entry(all, "allocated_bytes", "peak");
    stats->peak_reserved = stats_entry(all, "reserved_bytes", "peak");
    stats->num_alloc_retries = stats_entry(all, "num_alloc_retries", NULL);
    stats->num_ooms = stats_entry(all, "num_ooms", NULL);
    Py_DECREF(all);
    return OOMKIT_OK;
}

int
oomkit_torch_reset_peak(oomkit_state *st, oomkit_device device)
{
    PyObject *none; /* owned */

    if (st->accelerator_reset_peak == NULL) {
        return OOMKIT_EUNSUPPORTED;
    }
    none = PyObject_CallFunction(st->accelerator_reset_peak, "i", device.index);
    if (none == NULL) {
        drop_error();
        return OOMKIT_EFAILED;
    }
    Py_DECREF(none);
    return OOMKIT_OK;
}

int
oomkit_torch_empty_cache(oomkit_state *st)
{
    PyObject *none; /* owned */

    if (st->accelerator_empty_cache == NULL ||
        !torch_says("_accelerator_isAllocatorInitialized")) {
        return 0;
    }
    none = PyObject_CallNoArgs(st->accelerator_empty_cache);
    if (none == NULL) {
        if (PyErr_ExceptionMatches(st->TorchOutOfMemoryError)) {
            PyErr_Clear();
            return 0;
        }
        return -1;
    }
    Py_DECREF(none);
    return 0;
}
