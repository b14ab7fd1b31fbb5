/* Who holds the memory of an NVIDIA device: oomkit._C.nvml_processes(). */
#ifndef OOMKIT_DEVICE_NVML_H
#define OOMKIT_DEVICE_NVML_H

#include "../py/state.h"

/* [(pid, bytes or None)] of the device with this UUID ("GPU-..." or "MIG-..."); None
 * where NVML or the device is not there. Pids are the host's, which a container does
 * not show its processes. New reference, or NULL with an exception. */
PyObject *
oomkit_nvml_processes(PyObject *module, PyObject *uuid);

#endif
