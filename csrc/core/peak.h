/* Peak counters that nest: an inner measurement never destroys an outer one.
 *
 * A window is open from push to pop and sees the largest value noted meanwhile. Windows
 * are independent slots, so those of several threads may interleave in any order. All
 * functions may be called from any thread without a lock. `thread` is an address that
 * only the calling thread has (of a variable of its own). */
#ifndef OOMKIT_CORE_PEAK_H
#define OOMKIT_CORE_PEAK_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define OOMKIT_PEAK_WINDOWS 64

typedef struct oomkit_peak oomkit_peak;

/* NULL when memory for it cannot be had. The caller owns the result. */
oomkit_peak *
oomkit_peak_create(void);

void
oomkit_peak_destroy(oomkit_peak *peak);

/* Raises the maximum of the run and of every open window to at least value_bytes. */
void
oomkit_peak_note(oomkit_peak *peak, uint64_t value_bytes, const void *thread);

/* Opens a window that starts at value_bytes. OOMKIT_OK and *window, or OOMKIT_EREFUSED
 * when all OOMKIT_PEAK_WINDOWS are open. */
int
oomkit_peak_push(oomkit_peak *peak, uint64_t value_bytes, const void *thread,
                 int *window);

/* Closes a window, once, and returns the largest value that it saw. Any thread may. */
uint64_t
oomkit_peak_pop(oomkit_peak *peak, int window, const void *thread);

/* The largest value so far in an open window. */
uint64_t
oomkit_peak_read(const oomkit_peak *peak, int window);

/* The largest value ever noted. */
uint64_t
oomkit_peak_maximum(const oomkit_peak *peak);

#ifdef __cplusplus
}
#endif

#endif
