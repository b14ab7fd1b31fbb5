/* Who holds the memory of an NVIDIA device, by NVML where the driver brings it.
 *
 * Optional: the library is neither linked nor needed, and every answer may be missing
 * (a container hides processes, a MIG slice or WDDM their bytes). It is asked for
 * reports, never in a step. Devices go by their UUID: CUDA_VISIBLE_DEVICES and MIG give
 * them other numbers. */
#include "nvml.h"

#include <dlfcn.h>
#include <stdint.h>

#define NVML_OK 0
#define NVML_TOO_SMALL 7
#define PROCESSES_MOST 4096
#define PROCESSES_FIRST 64u

/* nvmlProcessInfo_t of interface 3. */
typedef struct nvml_process {
    unsigned int pid;
    unsigned long long bytes; /* all ones: not available */
    unsigned int gpu_instance, compute_instance;
} nvml_process;

typedef struct nvml_library {
    void *handle;
    int (*init)(void);
    int (*shutdown)(void);
    int (*by_uuid)(const char *uuid, void **device);
    int (*processes)(void *device, unsigned int *count, nvml_process *infos);
} nvml_library;

/* A function's address comes out of dlsym as that of an object. 1 or 0. */
static int
symbol_get(void *handle, const char *name, void *function)
{
    void *symbol = dlsym(handle, name);

    memcpy(function, &symbol, sizeof(symbol));
    return symbol != NULL;
}

/* 1 with the library open and initialised, else 0. */
static int
nvml_open(nvml_library *nvml)
{
    nvml->handle = dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (nvml->handle == NULL) {
        return 0;
    }
    if (symbol_get(nvml->handle, "nvmlInit_v2", &nvml->init) &&
        symbol_get(nvml->handle, "nvmlShutdown", &nvml->shutdown) &&
        symbol_get(nvml->handle, "nvmlDeviceGetHandleByUUID", &nvml->by_uuid) &&
        symbol_get(nvml->handle, "nvmlDeviceGetComputeRunningProcesses_v3",
                   &nvml->processes) &&
        nvml->init() == NVML_OK) {
        return 1;
    }
    dlclose(nvml->handle);
    return 0;
}

static void
nvml_close(nvml_library *nvml)
{
    (void)nvml->shutdown(); /* init and shutdown are counted: a failure is theirs */
    dlclose(nvml->handle);
}

/* The processes of a device, which PyMem_Free frees: *count of them; NULL when they
 * cannot be had (or no memory, without an exception: it is a hint). */
static nvml_process *
processes_get(const nvml_library *nvml, const char *uuid, unsigned int *count)
{
    unsigned int room = PROCESSES_FIRST;
    nvml_process *infos = NULL, *grown;
    void *device;
    int status = NVML_TOO_SMALL;

    if (nvml->by_uuid(uuid, &device) != NVML_OK) {
        return NULL;
    }
    while (status == NVML_TOO_SMALL && room <= PROCESSES_MOST) {
        grown = PyMem_Realloc(infos, room * sizeof(*infos));
        if (grown == NULL) {
            break;
        }
        infos = grown;
        *count = room;
        status = nvml->processes(device, count, infos);
        room *= 4;
    }
    if (status != NVML_OK) {
        PyMem_Free(infos);
        return NULL;
    }
    return infos;
}

/* [(pid, bytes or None)]. New reference or NULL. */
static PyObject *
processes_list(const nvml_process *infos, unsigned int count)
{
    OWNED PyObject *list = PyList_New(0);
    unsigned int i;

    for (i = 0; list != NULL && i < count; i++) {
        int known = infos[i].bytes != (unsigned long long)-1;
        PyObject *bytes = known ? PyLong_FromUnsignedLongLong(infos[i].bytes)
                                : Py_NewRef(Py_None); /* owned, stolen by "N" */
        OWNED PyObject *pair = Py_BuildValue("(IN)", infos[i].pid, bytes);
        if (pair == NULL || PyList_Append(list, pair) < 0) {
            return NULL;
        }
    }
    return STEAL(list);
}

PyObject *
oomkit_nvml_processes(PyObject *Py_UNUSED(module), PyObject *uuid)
{
    const char *text = PyUnicode_AsUTF8(uuid); /* borrowed from uuid */
    nvml_library nvml;
    OWNED_MEMORY nvml_process *infos = NULL;
    unsigned int count = 0;

    if (text == NULL) {
        return NULL;
    }
    if (!nvml_open(&nvml)) {
        Py_RETURN_NONE;
    }
    infos = processes_get(&nvml, text, &count);
    nvml_close(&nvml);
    if (infos == NULL) {
        Py_RETURN_NONE;
    }
    return processes_list(infos, count);
}
