/* Torch's own device-generic calls (torch.accelerator's, below the Python of it), for a
 * process without a bridge and for devices that the bridge cannot ask. They go through
 * Python and take microseconds.
 *
 * The callers are promised figures or "unknown", and torch's calls may raise anything
 * (an assertion on some backends), so that it is dismissed; an interrupt comes again.
 * The caller's own exception has been put aside before. */
#include "torch_calls.h"
#include "../py/errors.h"
#include "../py/tensor.h"
#include "../core/status.h"

/* torch._C.<name>(), with `index` as its argument unless that is negative. New
 * reference, or NULL with an exception. */
static PyObject *
torch_call(const char *name, int index)
{
    OWNED PyObject *module = PyImport_ImportModule("torch._C");

    if (module == NULL) {
        return NULL;
    }
    return index < 0 ? PyObject_CallMethod(module, name, NULL)
                     : PyObject_CallMethod(module, name, "i", index);
}

/* Steals `answer`: 1, 0, or 0 after any error. */
static int
says_yes(PyObject *answer)
{
    int truth = answer == NULL ? -1 : PyObject_IsTrue(answer);

    Py_XDECREF(answer);
    if (truth < 0) {
        oomkit_error_dismiss();
    }
    return truth == 1;
}

PyObject *
oomkit_torch_type_name(int type)
{
    const char *name = oomkit_device_type_name(type);
    PyObject *text = /* owned */
        type == OOMKIT_DEVICE_PRIVATE_USE
            ? torch_call("_get_privateuse1_backend_name", -1)
        : name != NULL ? PyUnicode_FromString(name)
                       : NULL;

    if (text != NULL && !PyUnicode_Check(text)) {
        Py_CLEAR(text);
    }
    oomkit_error_dismiss();
    return text;
}

PyObject *
oomkit_torch_module(oomkit_state *st, int type)
{
    OWNED PyObject *text = NULL, *torch = NULL;
    PyObject *module = NULL; /* owned, returned */

    if (type == OOMKIT_DEVICE_CUDA) {
        return Py_NewRef(st->cuda_module);
    }
    text = oomkit_torch_type_name(type);
    torch = text == NULL ? NULL : PyImport_ImportModule("torch");
    if (torch != NULL) {
        module = PyObject_GetAttr(torch, text);
    }
    oomkit_error_dismiss();
    return module;
}

/* Is this the type of torch's accelerator? torch has one, and its calls mean that one.
 */
static int
is_the_accelerator(int type)
{
    OWNED PyObject *device = torch_call("_accelerator_getAccelerator", -1);
    OWNED PyObject *found = device == NULL || device == Py_None
                                ? NULL
                                : PyObject_GetAttrString(device, "type");
    OWNED PyObject *text = found ? oomkit_torch_type_name(type) : NULL;
    int same =
        text != NULL && PyUnicode_Check(found) && PyUnicode_Compare(found, text) == 0;

    oomkit_error_dismiss();
    return same;
}

/* Was this process forked from one that had the device in use? It must not be touched
 * any more, though its allocator still has figures. */
static int
is_in_bad_fork(oomkit_state *st, int type)
{
    OWNED PyObject *module = oomkit_torch_module(st, type);
    PyObject *answer = NULL; /* owned, stolen */

    if (module != NULL && PyObject_HasAttrString(module, "_is_in_bad_fork")) {
        answer = PyObject_CallMethod(module, "_is_in_bad_fork", NULL);
    }
    /* What raised is dismissed: as where there is no such call. */
    return says_yes(answer);
}

/* torch._C._cuda_hasPrimaryContext, where a build has it. */
int
oomkit_torch_has_context(oomkit_device device)
{
    static const char name[] = "_cuda_hasPrimaryContext";
    OWNED PyObject *torch = NULL;
    int has = 1;

    if (device.type != OOMKIT_DEVICE_CUDA) {
        return 1;
    }
    torch = PyImport_ImportModule("torch._C");
    if (torch != NULL && PyObject_HasAttrString(torch, name)) {
        has = says_yes(PyObject_CallMethod(torch, name, "i", device.index));
    }
    oomkit_error_dismiss();
    return has;
}

/* Is the allocator that torch's generic calls mean there to be asked? That of a device
 * that is ready may be a pluggable one. */
static int
allocator_ready(oomkit_state *st, oomkit_device device)
{
    return is_the_accelerator(device.type) && !is_in_bad_fork(st, device.type) &&
           says_yes(torch_call("_accelerator_isAllocatorInitialized", -1));
}

int
oomkit_torch_ready(oomkit_state *st, oomkit_device device)
{
    return allocator_ready(st, device) ||
           (device.type == OOMKIT_DEVICE_CUDA && is_the_accelerator(device.type) &&
            oomkit_cuda_in_use(st));
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
        oomkit_error_dismiss();
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
        oomkit_error_dismiss();
        return OOMKIT_UNKNOWN;
    }
    return bytes;
}

/* An MPS allocator that torch does not count among the others: what it has in use, no
 * peaks. */
static int
mps_stats(oomkit_state *st, oomkit_memory_stats *stats)
{
    OWNED PyObject *module = oomkit_torch_module(st, OOMKIT_DEVICE_MPS);

    if (module == NULL) {
        return OOMKIT_EUNSUPPORTED;
    }
    stats->allocated = module_bytes(module, "current_allocated_memory");
    stats->reserved = module_bytes(module, "driver_allocated_memory");
    return stats->allocated == OOMKIT_UNKNOWN ? OOMKIT_EFAILED : OOMKIT_OK;
}

int
oomkit_torch_stats(oomkit_state *st, oomkit_device device, oomkit_memory_stats *stats)
{
    OWNED PyObject *all = NULL;
    int status;

    if (st->accelerator_get_stats == NULL || !allocator_ready(st, device)) {
        return device.type == OOMKIT_DEVICE_MPS && is_the_accelerator(device.type)
                   ? mps_stats(st, stats)
                   : OOMKIT_EUNSUPPORTED;
    }
    all = PyObject_CallFunction(st->accelerator_get_stats, "i", device.index);
    if (all == NULL || !PyDict_Check(all)) {
        /* No memory for the answer, or an interrupt, says nothing of the allocator. */
        status = all != NULL || PyErr_ExceptionMatches(PyExc_RuntimeError)
                     ? OOMKIT_EFAILED
                     : OOMKIT_EOOM;
        oomkit_error_dismiss();
        return status;
    }
    stats->allocated = stats_entry(all, "allocated_bytes", "current");
    stats->reserved = stats_entry(all, "reserved_bytes", "current");
    stats->peak_allocated = stats_entry(all, "allocated_bytes", "peak");
    stats->peak_reserved = stats_entry(all, "reserved_bytes", "peak");
    stats->num_alloc_retries = stats_entry(all, "num_alloc_retries", NULL);
    stats->num_ooms = stats_entry(all, "num_ooms", NULL);
    return OOMKIT_OK;
}

int
oomkit_torch_reset_peak(oomkit_state *st, oomkit_device device)
{
    OWNED PyObject *none = NULL;

    if (st->accelerator_reset_peak == NULL) {
        return OOMKIT_EUNSUPPORTED;
    }
    none = PyObject_CallFunction(st->accelerator_reset_peak, "i", device.index);
    if (none == NULL) {
        oomkit_error_dismiss();
        return OOMKIT_EFAILED;
    }
    return OOMKIT_OK;
}

/* Steals the answer of a call that frees or waits: 0, also after an OOM of its own
 * (what it could not do is an optimisation); else -1 with the exception. That of a
 * context that is lost is none of memory, whatever it says. */
static int
unless_oom(oomkit_state *st, oomkit_device device, PyObject *none)
{
    PyObject *exception; /* owned, given back or dropped */

    if (none != NULL) {
        Py_DECREF(none);
        return 0;
    }
    if (!oomkit_exception_is_oom(st)) {
        return -1;
    }
    exception = oomkit_exception_take();
    if (oomkit_device_is_lost(st, device)) {
        oomkit_exception_give(exception);
        return -1;
    }
    Py_DECREF(exception);
    return 0;
}

/* The call of the type's own module, for a device that is not torch's accelerator (a
 * backend out of its tree takes that place beside CUDA). New reference; NULL, without
 * an exception where there is no such call. */
static PyObject *
module_call(oomkit_state *st, oomkit_device device, const char *name)
{
    OWNED PyObject *module = oomkit_torch_module(st, device.type);

    return module != NULL && PyObject_HasAttrString(module, name)
               ? PyObject_CallMethod(module, name, "i", device.index)
               : NULL;
}

int
oomkit_torch_can_flush(oomkit_state *st, oomkit_device device)
{
    return st->accelerator_empty_cache != NULL && allocator_ready(st, device);
}

int
oomkit_torch_empty_cache(oomkit_state *st, oomkit_device device)
{
    OWNED PyObject *module = NULL;

    if (oomkit_torch_can_flush(st, device)) {
        return unless_oom(st, device, PyObject_CallNoArgs(st->accelerator_empty_cache));
    }
    if (device.type == OOMKIT_DEVICE_CUDA
            ? !oomkit_cuda_in_use(st)
            : device.type != OOMKIT_DEVICE_MPS || !is_the_accelerator(device.type)) {
        return 0;
    }
    module = oomkit_torch_module(st, device.type);
    return module == NULL
               ? 0
               : unless_oom(st, device,
                            PyObject_CallMethod(module, "empty_cache", NULL));
}

int
oomkit_torch_synchronize(oomkit_state *st, oomkit_device device)
{
    PyObject *none; /* owned, stolen */

    if (device.index < 0 || !oomkit_torch_has_context(device)) {
        return 0;
    }
    none = is_the_accelerator(device.type)
               ? torch_call("_accelerator_synchronizeDevice", device.index)
               : module_call(st, device, "synchronize");
    return none == NULL && !PyErr_Occurred() ? 0 : unless_oom(st, device, none);
}

/* A RuntimeError (or none at all) means that the figure cannot be had, and so does that
 * torch has no such call: 0. Else -1. */
static int
unless_unknown(void)
{
    if (!PyErr_Occurred()) {
        return 0;
    }
    if (PyErr_ExceptionMatches(PyExc_RuntimeError) ||
        PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear(); /* matched: torch has no such figure */
        return 0;
    }
    return -1;
}

int
oomkit_torch_free_and_total(oomkit_state *st, oomkit_device device,
                            oomkit_memory_stats *stats)
{
    OWNED PyObject *pair = NULL;
    unsigned long long available, total;

    if (is_the_accelerator(device.type)) {
        pair = torch_call("_accelerator_getMemoryInfo",
                          device.index < 0 ? 0 : device.index);
        if (pair == NULL && unless_unknown() < 0) {
            return -1;
        }
    }
    if (pair == NULL) { /* also of a torch from before that call */
        pair = module_call(st, device, "mem_get_info");
    }
    if (pair == NULL) {
        return unless_unknown();
    }
    if (!PyArg_Parse(pair, "(KK)", &available, &total)) {
        return -1;
    }
    stats->free = available;
    stats->total = total;
    return 0;
}

int
oomkit_torch_fraction(oomkit_state *st, oomkit_device device, double *fraction)
{
    OWNED PyObject *number = module_call(st, device, "get_per_process_memory_fraction");

    *fraction = 1.0;
    if (number == NULL) {
        return unless_unknown();
    }
    *fraction = PyFloat_AsDouble(number);
    return PyErr_Occurred() ? -1 : 0;
}

int
oomkit_torch_type_in_use(oomkit_state *st)
{
    static const int types[] = {OOMKIT_DEVICE_CUDA, OOMKIT_DEVICE_XPU,
                                OOMKIT_DEVICE_MPS, OOMKIT_DEVICE_PRIVATE_USE};
    size_t i;

    if (says_yes(torch_call("_accelerator_isAllocatorInitialized", -1))) {
        for (i = 0; i < sizeof(types) / sizeof(*types); i++) {
            if (is_the_accelerator(types[i])) {
                return is_in_bad_fork(st, types[i]) ? OOMKIT_DEVICE_CPU : types[i];
            }
        }
    }
    return oomkit_cuda_in_use(st) && is_the_accelerator(OOMKIT_DEVICE_CUDA)
               ? OOMKIT_DEVICE_CUDA
               : OOMKIT_DEVICE_CPU;
}

PyObject *
oomkit_torch_generators(oomkit_state *st, int type)
{
    OWNED PyObject *module = oomkit_torch_module(st, type);
    OWNED PyObject *one = NULL;

    if (module == NULL) {
        return PyTuple_New(0);
    }
    if (type == OOMKIT_DEVICE_MPS) {
        one = PyObject_CallMethod(module, "_get_default_mps_generator", NULL);
        return one == NULL ? NULL : PyTuple_Pack(1, one);
    }
    return PyObject_HasAttr(module, st->str_default_generators)
               ? PyObject_GetAttr(module, st->str_default_generators)
               : PyTuple_New(0);
}
