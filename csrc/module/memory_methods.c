/* Memory figures, limits and planned faults as private functions of oomkit._C.
 *
 * Arguments come from oomkit/memory.py and oomkit/testing.py, which check them first
 * and own the messages that users see. */
#include "memory_methods.h"
#include "../device/device.h"
#include "../device/nvml.h"
#include "../core/status.h"

/* The bridge with its CPU allocator in place, or NULL with RuntimeError. */
static const oomkit_bridge *
cpu_bridge(oomkit_state *st, const char *what)
{
    int status = st->bridge->cpu_install();

    if (status == OOMKIT_OK) {
        return st->bridge;
    }
    if (status == OOMKIT_EOOM) {
        PyErr_NoMemory();
    } else if (status == OOMKIT_EUNSUPPORTED) {
        PyErr_Format(
            PyExc_RuntimeError,
            "%s needs oomkit._bridge, which is not there for this PyTorch; "
            "rebuild oomkit with: pip install --no-build-isolation ." SEE("bridge"),
            what);
    } else {
        PyErr_Format(PyExc_RuntimeError,
                     "%s needs oomkit's CPU allocator, but another library has "
                     "installed its own" SEE("bridge"),
                     what);
    }
    return NULL;
}

/* Bytes as an int, None where unknown. New reference or NULL. */
static PyObject *
bytes_or_none(uint64_t bytes)
{
    return bytes == OOMKIT_UNKNOWN ? Py_NewRef(Py_None)
                                   : PyLong_FromUnsignedLongLong(bytes);
}

/* The reverse. 0 or -1 with an exception. */
static int
bytes_from(PyObject *object, uint64_t *bytes)
{
    if (object == Py_None) {
        *bytes = OOMKIT_UNKNOWN;
        return 0;
    }
    *bytes = PyLong_AsUnsignedLongLong(object);
    return *bytes == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

static PyObject *
cpu_set_limit(PyObject *module, PyObject *limit)
{
    const oomkit_bridge *bridge;
    uint64_t bytes;

    bridge = cpu_bridge(oomkit_state_of_module(module), "a CPU memory limit");
    if (bridge == NULL || bytes_from(limit, &bytes) < 0) {
        return NULL;
    }
    bridge->cpu_set_limit(bytes);
    Py_RETURN_NONE;
}

static PyObject *
cpu_stats(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    const oomkit_state *st = oomkit_state_of_module(module);
    oomkit_cpu_stats stats;
    int installed = st->bridge->cpu_installed();

    st->bridge->cpu_stats(&stats);
    return Py_BuildValue("{sNsNsNsKsKsK}", "installed", PyBool_FromLong(installed),
                         "limit", bytes_or_none(stats.limit), "bridge",
                         PyBool_FromLong(oomkit_has_bridge(st)), "allocated",
                         (unsigned long long)stats.allocated, "peak_allocated",
                         (unsigned long long)stats.peak_allocated, "allocations",
                         (unsigned long long)stats.allocations);
}

static PyObject *
memory_figures(PyObject *module, PyObject *args)
{
    oomkit_device device;
    oomkit_memory_stats stats;
    uint64_t budget;

    if (!PyArg_ParseTuple(args, "ii:memory_figures", &device.type, &device.index) ||
        oomkit_device_figures(oomkit_state_of_module(module), device, &stats, &budget) <
            0) {
        return NULL;
    }
    return Py_BuildValue(
        "(NNNNNNN)", bytes_or_none(stats.allocated), bytes_or_none(stats.reserved),
        bytes_or_none(stats.peak_allocated), bytes_or_none(stats.peak_reserved),
        bytes_or_none(stats.free), bytes_or_none(stats.total), bytes_or_none(budget));
}

static PyObject *
device_held(PyObject *module, PyObject *args)
{
    oomkit_device device;
    uint64_t allocated, reserved;

    if (!PyArg_ParseTuple(args, "ii:device_held", &device.type, &device.index)) {
        return NULL;
    }
    oomkit_device_held(oomkit_state_of_module(module), device, &allocated, &reserved);
    return Py_BuildValue("(NN)", bytes_or_none(allocated), bytes_or_none(reserved));
}

static PyObject *
run_peak(PyObject *module, PyObject *args)
{
    oomkit_device device;

    if (!PyArg_ParseTuple(args, "ii:run_peak", &device.type, &device.index)) {
        return NULL;
    }
    return bytes_or_none(
        oomkit_device_run_peak(oomkit_state_of_module(module), device));
}

static PyObject *
device_budget_set(PyObject *Py_UNUSED(module), PyObject *args)
{
    oomkit_device device;
    PyObject *budget; /* borrowed from args */
    uint64_t bytes;

    if (!PyArg_ParseTuple(args, "iiO:device_budget_set", &device.type, &device.index,
                          &budget) ||
        bytes_from(budget, &bytes) < 0) {
        return NULL;
    }
    if (oomkit_device_budget_set(device, bytes) != OOMKIT_OK) {
        PyErr_SetString(PyExc_RuntimeError, "too many devices" SEE("limit-memory"));
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
device_budget(PyObject *Py_UNUSED(module), PyObject *args)
{
    oomkit_device device;

    if (!PyArg_ParseTuple(args, "ii:device_budget", &device.type, &device.index)) {
        return NULL;
    }
    return bytes_or_none(oomkit_device_budget_noted(device));
}

static PyObject *
device_expandable(PyObject *module, PyObject *args)
{
    oomkit_device device;

    if (!PyArg_ParseTuple(args, "ii:device_expandable", &device.type, &device.index)) {
        return NULL;
    }
    return PyBool_FromLong(
        oomkit_device_expandable(oomkit_state_of_module(module), device));
}

/* One (nth, times, min_bytes, phases). 0 or -1. */
static int
fault_schedule_of(PyObject *numbers, oomkit_fault_schedule *schedule)
{
    unsigned long long nth, times, min_bytes;
    unsigned int phases;

    if (!PyArg_Parse(numbers, "(KKKI):fault_arm", &nth, &times, &min_bytes, &phases)) {
        return -1;
    }
    schedule->nth = nth;
    schedule->times = times;
    schedule->min_bytes = min_bytes;
    schedule->phases = phases == 0 ? OOMKIT_PHASE_ANY : phases;
    schedule->next = NULL;
    return 0;
}

static PyObject *
fault_arm(PyObject *module, PyObject *args)
{
    oomkit_fault_schedule stages[OOMKIT_FAULT_STAGES];
    const oomkit_bridge *bridge;
    Py_ssize_t i, n = PyTuple_GET_SIZE(args);
    int status = OOMKIT_EINVAL;

    for (i = 0; i < n && i < OOMKIT_FAULT_STAGES; i++) {
        if (fault_schedule_of(PyTuple_GET_ITEM(args, i), &stages[i]) < 0) {
            return NULL;
        }
        if (i > 0) {
            stages[i - 1].next = &stages[i];
        }
    }
    bridge = cpu_bridge(oomkit_state_of_module(module), "fault injection");
    if (bridge == NULL) {
        return NULL;
    }
    if (n > 0 && n <= OOMKIT_FAULT_STAGES) {
        status = bridge->fault_arm(&stages[0]);
    }
    if (status == OOMKIT_EREFUSED) {
        PyErr_SetString(
            PyExc_RuntimeError,
            "inject_oom() is already active: fault schedules do not nest" SEE(
                "options"));
        return NULL;
    }
    if (status != OOMKIT_OK) {
        PyErr_Format(PyExc_ValueError,
                     "inject_oom() expected at most %d schedules in a row, of which "
                     "only the last may have times=None" SEE("options"),
                     OOMKIT_FAULT_STAGES);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
fault_disarm(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    oomkit_state_of_module(module)->bridge->fault_disarm();
    Py_RETURN_NONE;
}

static PyObject *
fault_stats(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    uint64_t seen, fired;
    int armed;

    oomkit_state_of_module(module)->bridge->fault_stats(&seen, &fired, &armed);
    return Py_BuildValue("(KKN)", (unsigned long long)seen, (unsigned long long)fired,
                         PyBool_FromLong(armed));
}

static PyObject *
phase_set(PyObject *module, PyObject *phase)
{
    long number = PyLong_AsLong(phase);

    if (number == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (number < 0 || number >= OOMKIT_PHASES) {
        PyErr_Format(PyExc_ValueError, "no such phase: %ld" SEE("internal-error"),
                     number);
        return NULL;
    }
    return PyLong_FromLong(
        oomkit_phase_set(oomkit_state_of_module(module), (int)number));
}

static PyObject *
exempt(PyObject *module, PyObject *function)
{
    PyObject *result; /* owned */
    oomkit_state *st = oomkit_state_of_module(module);

    st->bridge->exempt_all(1);
    result = PyObject_CallNoArgs(function);
    st->bridge->exempt_all(-1);
    return result;
}

PyMethodDef oomkit_memory_methods[] = {
    {"exempt", exempt, METH_O,
     PyDoc_STR("exempt($module, function, /)\n--\n\n"
               "function(), while no allocation of any thread is counted, refused or "
               "failed.")},
    {"cpu_set_limit", cpu_set_limit, METH_O,
     PyDoc_STR("cpu_set_limit($module, limit, /)\n--\n\n"
               "Limit the tensor bytes of the CPU; None removes the limit.")},
    {"cpu_stats", cpu_stats, METH_NOARGS,
     PyDoc_STR("cpu_stats($module, /)\n--\n\n"
               "Counters of the CPU allocator as a dict.")},
    {"memory_figures", memory_figures, METH_VARARGS,
     PyDoc_STR("memory_figures($module, type, index, /)\n--\n\n"
               "allocated, reserved, peak_allocated, peak_reserved, free, total, "
               "budget; None where unknown.")},
    {"device_held", device_held, METH_VARARGS,
     PyDoc_STR("device_held($module, type, index, /)\n--\n\n"
               "allocated, reserved, by the statistics alone; None where unknown.")},
    {"run_peak", run_peak, METH_VARARGS,
     PyDoc_STR("run_peak($module, type, index, /)\n--\n\n"
               "Highest number of allocated bytes of the run, or None.")},
    {"device_budget_set", device_budget_set, METH_VARARGS,
     PyDoc_STR("device_budget_set($module, type, index, budget, /)\n--\n\n"
               "Note the limit that was put on an accelerator; None removes it.")},
    {"device_budget", device_budget, METH_VARARGS,
     PyDoc_STR("device_budget($module, type, index, /)\n--\n\n"
               "The limit that was noted for an accelerator, or None.")},
    {"device_expandable", device_expandable, METH_VARARGS,
     PyDoc_STR("device_expandable($module, type, index, /)\n--\n\n"
               "Do the segments of an accelerator in use grow, by the settings in "
               "effect? False where that cannot be told.")},
    {"nvml_processes", oomkit_nvml_processes, METH_O,
     PyDoc_STR("nvml_processes($module, uuid, /)\n--\n\n"
               "[(pid, bytes or None)] of an NVIDIA device; None where that cannot be "
               "had.")},
    {"fault_arm", fault_arm, METH_VARARGS,
     PyDoc_STR("fault_arm($module, /, *schedules)\n--\n\n"
               "Arm fault schedules (nth, times, min_bytes, phases), one after the "
               "other; times 0 is for good, phases 0 is any.")},
    {"fault_disarm", fault_disarm, METH_NOARGS,
     PyDoc_STR("fault_disarm($module, /)\n--\n\nDisarm the fault schedule.")},
    {"fault_stats", fault_stats, METH_NOARGS,
     PyDoc_STR("fault_stats($module, /)\n--\n\n"
               "(seen, fired, armed) of the fault schedule.")},
    {"phase_set", phase_set, METH_O,
     PyDoc_STR("phase_set($module, phase, /)\n--\n\n"
               "Set the phase that fault filters see; return the one before.")},
    {NULL, NULL, 0, NULL},
};
