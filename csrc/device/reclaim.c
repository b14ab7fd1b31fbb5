/* Memory back to the device between a failure and its retry.
 *
 * The order matters. What a side stream was given (record_stream) is free only when its
 * kernels are done and the allocator has looked, which it does while it flushes: so
 * wait first, flush, and only then believe that what is alive is kept by a cycle, for
 * the collector takes long. cuBLAS keeps a workspace for each stream in torch's
 * allocator; cleared before the flush they go with it. */
#include "torch_calls.h"
#include "../py/tensor.h"
#include "../core/status.h"

int
oomkit_device_empty_cache(oomkit_state *st, oomkit_device device)
{
    int status;

    if (device.type == OOMKIT_DEVICE_CPU) {
        return 0;
    }
    if (oomkit_device_by_bridge(st, device.type)) {
        /* The flush waits for the device, and no entry of the bridge needs the GIL. */
        Py_BEGIN_ALLOW_THREADS
        status = st->bridge->device_empty_cache(device.type);
        Py_END_ALLOW_THREADS
        if (status == OOMKIT_EFAILED && oomkit_torch_can_flush(st, device)) {
            /* Torch's own call says what it is, by type and code; or it was but once.
             */
            return oomkit_torch_empty_cache(st, device);
        }
        if (status == OOMKIT_EUNSUPPORTED && oomkit_device_ready(st, device)) {
            return oomkit_torch_empty_cache(st, device); /* a pluggable allocator's */
        }
        if (status == OOMKIT_EFAILED) {
            PyErr_Format(PyExc_RuntimeError,
                         "oomkit: emptying the cache of device type %d failed" SEE(
                             "internal-error"),
                         device.type);
            return -1;
        }
        return 0;
    }
    return oomkit_torch_empty_cache(st, device);
}

int
oomkit_device_flush_pending(oomkit_state *st, oomkit_device device)
{
    int capturing = oomkit_is_capturing();

    if (capturing != 0) {
        return capturing < 0 ? -1 : 0;
    }
    st->flush_pending = 0;
    return oomkit_device_empty_cache(st, device);
}

/* Has the program hidden objects from the collector (gc.freeze)? 1, 0 or -1. */
static int
objects_are_frozen(oomkit_state *st)
{
    OWNED PyObject *count = PyObject_CallNoArgs(st->gc_get_freeze_count);

    return count == NULL ? -1 : PyObject_IsTrue(count);
}

/* A captured graph has the addresses of its workspaces in it: with one alive they must
 * stay; frozen objects are not listed, and one of them may be a graph. 1, 0 or -1. */
static int
a_graph_is_alive(oomkit_state *st)
{
    OWNED PyObject *objects = NULL;
    Py_ssize_t i;
    int found;

    if (st->cuda_graph == NULL || !PyType_Check(st->cuda_graph)) {
        return 0;
    }
    found = objects_are_frozen(st);
    if (found != 0) {
        return found;
    }
    objects = PyObject_CallNoArgs(st->gc_get_objects);
    if (objects == NULL || !PyList_Check(objects)) {
        return PyErr_Occurred() ? -1 : 0;
    }
    for (i = 0; !found && i < PyList_GET_SIZE(objects); i++) {
        found = PyObject_TypeCheck(PyList_GET_ITEM(objects, i),
                                   (PyTypeObject *)st->cuda_graph);
    }
    return found;
}

/* Are more bytes allocated than there were? */
static int
something_is_alive(uint64_t now, uint64_t before)
{
    return now != OOMKIT_UNKNOWN && before != OOMKIT_UNKNOWN && now > before;
}

/* 0 or -1. They are made again at the next product, so only where halving once was not
 * enough, and *freed_bytes are no room that the retry has. */
static int
clear_workspaces(oomkit_state *st, oomkit_device device, uint64_t *freed_bytes)
{
    static const char name[] = "_cuda_clearCublasWorkspaces";
    OWNED PyObject *torch = NULL, *done = NULL;
    const uint64_t before = oomkit_device_allocated(st, device);
    uint64_t now;
    int alive = a_graph_is_alive(st);

    if (alive != 0) {
        return alive < 0 ? -1 : 0;
    }
    torch = PyImport_ImportModule("torch._C");
    if (torch == NULL) {
        return -1;
    }
    done = PyObject_HasAttrString(torch, name) ? PyObject_CallMethod(torch, name, NULL)
                                               : Py_NewRef(Py_None);
    now = oomkit_device_allocated(st, device);
    *freed_bytes = something_is_alive(before, now) ? before - now : 0;
    return done == NULL ? -1 : 0;
}

static int
collect(oomkit_state *st)
{
    OWNED PyObject *done = PyObject_CallNoArgs(st->gc_collect);

    return done == NULL ? -1 : 0;
}

int
oomkit_device_reclaim(oomkit_state *st, oomkit_device device, uint64_t baseline_bytes,
                      int failures, uint64_t *allocated_bytes)
{
    const int ready =
        device.type != OOMKIT_DEVICE_CPU && oomkit_device_ready(st, device);
    uint64_t now = oomkit_device_allocated(st, device), workspaces = 0;

    if (ready && (now == OOMKIT_UNKNOWN || something_is_alive(now, baseline_bytes)) &&
        oomkit_torch_synchronize(st, device) < 0) {
        return -1;
    }
    if ((ready && device.type == OOMKIT_DEVICE_CUDA && failures > 1 &&
         clear_workspaces(st, device, &workspaces) < 0) ||
        oomkit_device_empty_cache(st, device) < 0) {
        return -1;
    }
    now = oomkit_device_allocated(st, device);
    if (something_is_alive(now, baseline_bytes)) {
        const uint64_t before = now;
        if (collect(st) < 0) {
            return -1;
        }
        now = oomkit_device_allocated(st, device);
        if (now < before && oomkit_device_empty_cache(st, device) < 0) {
            return -1;
        }
    }
    *allocated_bytes = now == OOMKIT_UNKNOWN ? now : now + workspaces;
    return 0;
}
