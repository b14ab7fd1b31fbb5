/* Torch's own device-generic calls (torch.accelerator's, below the Python of it), for a
 * process without a bridge and for devices that the bridge cannot ask. They go through
 * Python and take microseconds. */
#include "device_calls.h"
#include "tensor.h"

#include "../core/status.h"

#define PRIVATE_USE 20 /* DeviceType::PrivateUse1: whatever name it gave itself */

/* Drops whatever is in flight: the callers promise figures or "unknown", never an
 * error, and torch's calls may raise anything (an assertion on some backends). They
 * have put the caller's own exception aside before. */
static void
drop_error(void)
{
    Py_XDECREF(oomkit_exception_take());
}

/* torch._C.<name>(), with `index` as its argument unless that is negative. New
 * reference, or NULL with an exception. */
static PyObject *
torch_call(const char *name, int index)
{
    PyObject *module, *answer; /* owned */

    module = PyImport_ImportModule("torch._C");
    if (module == NULL) {
        return NULL;
    }
    answer = index < 0 ? PyObject_CallMethod(module, name, NULL)
                       : PyObject_CallMethod(module, name, "i", index);
    Py_DECREF(module);
    return answer;
}

/* Steals `answer`: 1, 0, or 0 after any error. */
static int
says_yes(PyObject *answer)
{
    int truth = answer == NULL ? -1 : PyObject_IsTrue(answer);

    Py_XDECREF(answer);
    if (truth < 0) {
        drop_error();
    }
    return truth == 1;
}

/* torch.cuda, torch.xpu ... of a device type. New reference; NULL without an exception
 * when torch has none. */
static PyObject *
device_module(oomkit_state *st, int type)
{
    const char *name = oomkit_device_type_name(type);
    PyObject *text = NULL, *torch = NULL, *module = NULL; /* owned */

    if (type == OOMKIT_DEVICE_CUDA) {
        return Py_NewRef(st->cuda_module);
    }
    text = type == PRIVATE_USE ? torch_call("_get_privateuse1_backend_name", -1)
           : name != NULL      ? PyUnicode_FromString(name)
                               : NULL;
    torch = text == NULL ? NULL : PyImport_ImportModule("torch");
    if (torch != NULL && PyUnicode_Check(text)) {
        module = PyObject_GetAttr(torch, text);
    }
    Py_XDECREF(torch);
    Py_XDECREF(text);
    drop_error();
    return module;
}

/* Is this the type of torch's accelerator? torch has one, and its calls mean that one.
 */
static int
is_the_accelerator(int type)
{
    const char *name = oomkit_device_type_name(type);
    PyObject *device = torch_call("_accelerator_getAccelerator", -1); /* owned */
    PyObject *found = device ? PyObject_GetAttrString(device, "type") : NULL;
    PyObject *text = type == PRIVATE_USE
                         ? torch_call("_get_privateuse1_backend_name", -1)
                         : NULL; /* owned */
    int same = 0;

    if (found != NULL && PyUnicode_Check(found)) {
        same = name != NULL   ? PyUnicode_CompareWithASCIIString(found, name) == 0
               : text != NULL ? PyObject_RichCompareBool(found, text, Py_EQ) == 1
                              : 0;
    }
    Py_XDECREF(text);
    Py_XDECREF(found);
    Py_XDECREF(device);
    drop_error();
    return same;
}

/* Was this process forked from one that had the device in use? It must not be touched
 * any more, though its allocator still has figures. */
static int
is_in_bad_fork(oomkit_state *st, int type)
{
    PyObject *module = device_module(st, type); /* owned */
    PyObject *answer = NULL;                    /* owned */

    if (module != NULL && PyObject_HasAttrString(module, "_is_in_bad_fork")) {
        answer = PyObject_CallMethod(module, "_is_in_bad_fork", NULL);
    }
    Py_XDECREF(module);
    return answer != NULL && says_yes(answer);
}

int
oomkit_torch_ready(oomkit_state *st, oomkit_device device)
{
    return is_the_accelerator(device.type) && !is_in_bad_fork(st, device.type) &&
           says_yes(torch_call("_accelerator_isAllocatorInitialized", -1));
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

/* module.<name>(), a number of bytes; OOMKIT_UNKNOWN. Never leaves an exception. */
static uint64_t
module_bytes(PyObject *module, const char *name)
{
    PyObject *number = PyObject_CallMethod(module, name, NULL); /* owned */
    uint64_t bytes = OOMKIT_UNKNOWN;

    if (number != NULL) {
        bytes = PyLong_AsUnsignedLongLong(number);
        Py_DECREF(number);
    }
    if (PyErr_Occurred()) {
        drop_error();
        return OOMKIT_UNKNOWN;
    }
    return bytes;
}

/* An MPS allocator that torch does not count among the others: what it has in use, no
 * peaks. */
static int
mps_stats(oomkit_state *st, oomkit_memory_stats *stats)
{
    PyObject *module = device_module(st, OOMKIT_DEVICE_MPS); /* owned */

    if (module == NULL) {
        return OOMKIT_EUNSUPPORTED;
    }
    stats->allocated = module_bytes(module, "current_allocated_memory");
    stats->reserved = module_bytes(module, "driver_allocated_memory");
    Py_DECREF(module);
    return stats->allocated == OOMKIT_UNKNOWN ? OOMKIT_EFAILED : OOMKIT_OK;
}

int
oomkit_torch_stats(oomkit_state *st, oomkit_device device, oomkit_memory_stats *stats)
{
    PyObject *all; /* owned */

    if (st->accelerator_get_stats == NULL || !oomkit_torch_ready(st, device)) {
        return device.type == OOMKIT_DEVICE_MPS && is_the_accelerator(device.type)
                   ? mps_stats(st, stats)
                   : OOMKIT_EUNSUPPORTED;
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

/* Steals the answer of a call that frees or waits: 0, also after an OOM of its own
 * (what it could not do is an optimisation); else -1 with the exception. */
static int
unless_oom(oomkit_state *st, PyObject *none)
{
    if (none == NULL) {
        if (PyErr_ExceptionMatches(st->TorchOutOfMemoryError)) {
            PyErr_Clear(); /* matched: its own OOM */
            return 0;
        }
        return -1;
    }
    Py_DECREF(none);
    return 0;
}

int
oomkit_torch_empty_cache(oomkit_state *st, oomkit_device device)
{
    PyObject *module, *none = NULL; /* owned */

    if (st->accelerator_empty_cache != NULL && oomkit_torch_ready(st, device)) {
        return unless_oom(st, PyObject_CallNoArgs(st->accelerator_empty_cache));
    }
    if (device.type != OOMKIT_DEVICE_MPS || !is_the_accelerator(device.type)) {
        return 0;
    }
    module = device_module(st, device.type);
    if (module != NULL) {
        none = PyObject_CallMethod(module, "empty_cache", NULL);
        Py_DECREF(module);
    }
    return module == NULL ? 0 : unless_oom(st, none);
}

int
oomkit_torch_synchronize(oomkit_state *st, oomkit_device device)
{
    if (device.index < 0) {
        return 0;
    }
    return unless_oom(st, torch_call("_accelerator_synchronizeDevice", device.index));
}

/* A RuntimeError (or none at all) means that the figure cannot be had: 0. Else -1. */
static int
unless_unknown(void)
{
    if (!PyErr_Occurred()) {
        return 0;
    }
    if (PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear(); /* matched: torch has no such figure */
        return 0;
    }
    return -1;
}

int
oomkit_torch_free_and_total(oomkit_device device, oomkit_memory_stats *stats)
{
    PyObject *pair; /* owned */
    unsigned long long available, total;
    int parsed;

    pair =
        torch_call("_accelerator_getMemoryInfo", device.index < 0 ? 0 : device.index);
    if (pair == NULL) {
        return unless_unknown();
    }
    parsed = PyArg_Parse(pair, "(KK)", &available, &total);
    Py_DECREF(pair);
    if (!parsed) {
        return -1;
    }
    stats->free = available;
    stats->total = total;
    return 0;
}

int
oomkit_torch_fraction(oomkit_state *st, oomkit_device device, double *fraction)
{
    static const char name[] = "get_per_process_memory_fraction";
    PyObject *module = device_module(st, device.type); /* owned */
    PyObject *number = NULL;                           /* owned */

    *fraction = 1.0;
    if (module != NULL && PyObject_HasAttrString(module, name)) {
        number = PyObject_CallMethod(module, name, "i", device.index);
        if (number == NULL) {
            Py_DECREF(module);
            return unless_unknown();
        }
        *fraction = PyFloat_AsDouble(number);
        Py_DECREF(number);
    }
    Py_XDECREF(module);
    return PyErr_Occurred() ? -1 : 0;
}

int
oomkit_torch_expandable(void)
{
    PyObject *torch = PyImport_ImportModule("torch._C"); /* owned */
    PyObject *settings = NULL;                           /* owned */
    const char *text;
    int on = 0;

    if (torch != NULL &&
        PyObject_HasAttrString(torch, "_accelerator_getAllocatorSettings")) {
        settings =
            PyObject_CallMethod(torch, "_accelerator_getAllocatorSettings", NULL);
    }
    text = settings != NULL && PyUnicode_Check(settings) ? PyUnicode_AsUTF8(settings)
                                                         : NULL;
    if (text != NULL) {
        on = strstr(text, "expandable_segments:True") != NULL ||
             strstr(text, "expandable_segments:true") != NULL;
    }
    Py_XDECREF(settings);
    Py_XDECREF(torch);
    drop_error();
    return on;
}

PyObject *
oomkit_torch_generators(oomkit_state *st, int type)
{
    PyObject *module = device_module(st, type); /* owned */
    PyObject *all = NULL, *one;                 /* owned */

    if (module == NULL) {
        return PyTuple_New(0);
    }
    if (type == OOMKIT_DEVICE_MPS) {
        one = PyObject_CallMethod(module, "_get_default_mps_generator", NULL);
        all = one == NULL ? NULL : PyTuple_Pack(1, one);
        Py_XDECREF(one);
    } else if (PyObject_HasAttr(module, st->str_default_generators)) {
        all = PyObject_GetAttr(module, st->str_default_generators);
    } else {
        all = PyTuple_New(0);
    }
    Py_DECREF(module);
    return all;
}
