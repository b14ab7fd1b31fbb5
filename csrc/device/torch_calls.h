/* Devices by torch's own calls. Only what is about devices uses this. */
#ifndef OOMKIT_DEVICE_TORCH_CALLS_H
#define OOMKIT_DEVICE_TORCH_CALLS_H

#include "device.h"

/* Is this type of device asked through the bridge? Up to some release of torch MPS has
 * an allocator of its own kind. */
int
oomkit_device_by_bridge(const oomkit_state *st, int type);

/* Is the device of torch's accelerator, initialised, and this process not forked from
 * one that had it in use? Initialises nothing. Leaves no exception and must not be
 * called with one in flight. */
int
oomkit_torch_ready(oomkit_state *st, oomkit_device device);

/* Is CUDA in use, by torch.cuda's own word? A pluggable allocator stands where c10 does
 * not look: what c10 has then is the native one, never initialised. Nothing is called
 * before there are generators, which torch makes while it initialises CUDA. May be
 * called with an exception in flight. */
int
oomkit_cuda_in_use(oomkit_state *st);

/* Has the process a context on this very device? Ready means that it has one on some
 * device of the type. 1, also where that cannot be told, or 0. Leaves no exception and
 * must not be called with one in flight. */
int
oomkit_torch_has_context(oomkit_device device);

/* OOMKIT_OK with everything filled but free and total, OOMKIT_EUNSUPPORTED when the
 * device is not initialised, OOMKIT_EFAILED. Leaves no exception and must not be called
 * with one in flight. */
int
oomkit_torch_stats(oomkit_state *st, oomkit_device device, oomkit_memory_stats *stats);

/* The same contract. */
int
oomkit_torch_reset_peak(oomkit_state *st, oomkit_device device);

/* Can the flush of torch's own be asked for what it has failed with? */
int
oomkit_torch_can_flush(oomkit_state *st, oomkit_device device);

/* 0, or -1 with an exception that is not OOM (or of a context that is lost). */
int
oomkit_torch_empty_cache(oomkit_state *st, oomkit_device device);

/* Waits until the device has done all work that is queued. The device must be ready.
 * The same contract. */
int
oomkit_torch_synchronize(oomkit_state *st, oomkit_device device);

/* Free and total of a device that is ready, by its driver, which takes long: for
 * reports and failures, not for steps. Both stay as they are where they cannot be had.
 * 0, or -1 with an exception that is no RuntimeError. */
int
oomkit_torch_free_and_total(oomkit_state *st, oomkit_device device,
                            oomkit_memory_stats *stats);

/* The share of a ready device that torch lets this process have
 * (set_per_process_memory_fraction); 1.0 where there is no such limit. The same
 * contract. */
int
oomkit_torch_fraction(oomkit_state *st, oomkit_device device, double *fraction);

/* Do segments of the caching allocator grow, by what its snapshot says is in effect? 1,
 * or 0 also where that cannot be had. Asked again when the settings last given to torch
 * are others. Leaves no exception. */
int
oomkit_torch_expandable(oomkit_state *st, int type);

/* The type of torch's accelerator where it is in use in this process, else the CPU's.
 * Initialises nothing. Leaves no exception. */
int
oomkit_torch_type_in_use(oomkit_state *st);

/* "cuda" of a type, the name that a backend out of torch's tree has given itself
 * included. New reference; NULL without an exception. */
PyObject *
oomkit_torch_type_name(int type);

/* torch.cuda, torch.xpu ... of a type. New reference; NULL without an exception when
 * torch has none. */
PyObject *
oomkit_torch_module(oomkit_state *st, int type);

/* The default generators of all devices of a type, as a tuple: empty before the first
 * is initialised and where there are none. New reference or NULL. */
PyObject *
oomkit_torch_generators(oomkit_state *st, int type);

#endif
