// oomkit._bridge: the module that hands out the table of bridge.h, and nothing else.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "internal.h"

namespace {

const oomkit_bridge table = {
    .version = OOMKIT_BRIDGE_VERSION,
    .size = sizeof(oomkit_bridge),
    .torch_major = TORCH_VERSION_MAJOR,
    .torch_minor = TORCH_VERSION_MINOR,
    .tensor_facts = oomkit::tensor_facts,
    .versions = oomkit::versions,
    .grads_mark = oomkit::grads_mark,
    .grads_compare = oomkit::grads_compare,
    .grads_release = oomkit::grads_release,
    .bytes_get = oomkit::bytes_get,
    .bytes_set = oomkit::bytes_set,
    .sample = oomkit::sample,
    .storage_facts = oomkit::storage_facts,
    .storages_hold = oomkit::storages_hold,
    .storages_release = oomkit::storages_release,
    .storage_bytes = oomkit::storage_bytes,
    .tensor_alias = oomkit::tensor_alias,
    .form_make = oomkit::form_make,
    .form_release = oomkit::form_release,
    .form_versions = oomkit::form_versions,
    .restored_make = oomkit::restored_make,
    .restored_release = oomkit::restored_release,
    .restored_apply = oomkit::restored_apply,
    .unseen_enter = oomkit::unseen_enter,
    .unseen_leave = oomkit::unseen_leave,
    .modes_get = oomkit::modes_get,
    .modes_set = oomkit::modes_set,
    .generator_read = oomkit::generator_read,
    .generator_same = oomkit::generator_same,
    .cpu_install = oomkit::cpu_install,
    .cpu_installed = oomkit::cpu_installed,
    .cpu_set_limit = oomkit::cpu_set_limit,
    .cpu_stats = oomkit::cpu_stats,
    .cpu_counted = oomkit::cpu_counted,
    .cpu_peak_push = oomkit::cpu_peak_push,
    .cpu_peak_pop = oomkit::cpu_peak_pop,
    .cpu_peak_read = oomkit::cpu_peak_read,
    .exempt_enter = oomkit::exempt_enter,
    .exempt_leave = oomkit::exempt_leave,
    .exempt_all = oomkit::exempt_all,
    .fault_arm = oomkit::fault_arm,
    .fault_disarm = oomkit::fault_disarm,
    .fault_stats = oomkit::fault_stats,
    .set_phase = oomkit::set_phase,
    .device_initialized = oomkit::device_initialized,
    .device_stats = oomkit::device_stats,
    .device_reset_peak = oomkit::device_reset_peak,
    .device_empty_cache = oomkit::device_empty_cache,
    .device_expandable = oomkit::device_expandable,
};

int
add_capsule(PyObject *module)
{
    // The table is constant; a capsule has no other way to say so.
    void *pointer = const_cast<oomkit_bridge *>(&table);
    PyObject *capsule = nullptr; // owned
    capsule = PyCapsule_New(pointer, OOMKIT_BRIDGE_CAPSULE, nullptr);
    if (capsule == nullptr) {
        return -1;
    }
    const int rc = PyModule_AddObjectRef(module, "api", capsule);
    Py_DECREF(capsule);
    return rc;
}

int
add_version(PyObject *module)
{
    PyObject *version = nullptr; // owned
    version = PyUnicode_FromFormat("%d.%d", TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR);
    if (version == nullptr) {
        return -1;
    }
    const int rc = PyModule_AddObjectRef(module, "torch_version", version);
    Py_DECREF(version);
    return rc;
}

int
bridge_exec(PyObject *module)
{
    if (oomkit::allocator_init() != OOMKIT_OK || oomkit::device_init() != OOMKIT_OK) {
        PyErr_NoMemory();
        return -1;
    }
    if (add_capsule(module) < 0) {
        return -1;
    }
    return add_version(module);
}

PyModuleDef_Slot bridge_slots[] = {
    {Py_mod_exec, reinterpret_cast<void *>(bridge_exec)},
    {0, nullptr},
};

PyModuleDef bridge_module = {
    PyModuleDef_HEAD_INIT,
    "oomkit._bridge",
    "The door between oomkit and libc10. Import torch first; use oomkit instead.",
    0,
    nullptr,
    bridge_slots,
    nullptr,
    nullptr,
    nullptr,
};

} // namespace

PyMODINIT_FUNC
PyInit__bridge(void)
{
    return PyModuleDef_Init(&bridge_module);
}
