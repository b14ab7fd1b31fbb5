/* A byte budget: reserve before allocating, release after freeing.
 *
 * The used counter runs whether or not a limit is set, so that it is also the figure
 * "bytes allocated". All functions may be called from any thread without a lock. The
 * type is opaque so that no _Atomic reaches the C++ that includes this header. */
#ifndef OOMKIT_CORE_BUDGET_H
#define OOMKIT_CORE_BUDGET_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define OOMKIT_BUDGET_UNLIMITED UINT64_MAX

typedef struct oomkit_budget oomkit_budget;

/* NULL when memory for it cannot be had. The caller owns the result. */
oomkit_budget *
oomkit_budget_create(void);

void
oomkit_budget_destroy(oomkit_budget *budget);

/* OOMKIT_OK and *used_after, or OOMKIT_EREFUSED with nothing changed. The overflow of
 * used + bytes is tested before it is computed; a doomed request is never visible to
 * other threads (compare-exchange, not add and roll back). */
int
oomkit_budget_reserve(oomkit_budget *budget, uint64_t bytes, uint64_t *used_after);

/* Gives back what a successful reserve took. */
void
oomkit_budget_release(oomkit_budget *budget, uint64_t bytes);

/* A limit below what is used is allowed: it refuses until enough is released. */
void
oomkit_budget_set_limit(oomkit_budget *budget, uint64_t limit_bytes);

uint64_t
oomkit_budget_limit(const oomkit_budget *budget);

uint64_t
oomkit_budget_used(const oomkit_budget *budget);

#ifdef __cplusplus
}
#endif

#endif
