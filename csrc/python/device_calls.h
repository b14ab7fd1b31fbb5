/* Memory figures by torch's own calls. Only device.c uses this. */
#ifndef OOMKIT_PYTHON_DEVICE_CALLS_H
#define OOMKIT_PYTHON_DEVICE_CALLS_H

#include "device.h"

/* OOMKIT_OK with everything filled but free and total, OOMKIT_EUNSUPPORTED when the
 * device is not initialised, OOMKIT_EFAILED. Leaves no exception and must not be called
 * with one in flight. */
int
oomkit_torch_stats(oomkit_state *st, oomkit_device device, oomkit_memory_stats *stats);

/* The same contract. */
int
oomkit_torch_reset_peak(oomkit_state *st, oomkit_device device);

/* 0, or -1 with an exception that is not OOM. */
int
oomkit_torch_empty_cache(oomkit_state *st);

#endif
