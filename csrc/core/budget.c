/* The counters are the only thing that threads share here, and the memory that is
 * counted is handed over by the allocator itself: relaxed order is enough everywhere.
 */
#include "budget.h"
#include "status.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>

struct oomkit_budget {
    _Atomic uint64_t used_bytes;
    _Atomic uint64_t limit_bytes;
};

oomkit_budget *
oomkit_budget_create(void)
{
    oomkit_budget *budget = calloc(1, sizeof(*budget));
    if (budget == NULL) {
        return NULL;
    }
    atomic_init(&budget->used_bytes, 0);
    atomic_init(&budget->limit_bytes, OOMKIT_BUDGET_UNLIMITED);
    return budget;
}

void
oomkit_budget_destroy(oomkit_budget *budget)
{
    free(budget);
}

int
oomkit_budget_reserve(oomkit_budget *budget, uint64_t bytes, uint64_t *used_after)
{
    uint64_t used = atomic_load_explicit(&budget->used_bytes, memory_order_relaxed);

    do {
        /* Read again in every round: the limit may have been lowered meanwhile. */
        uint64_t limit =
            atomic_load_explicit(&budget->limit_bytes, memory_order_relaxed);
        if (bytes > limit || used > limit - bytes) { /* used + bytes could overflow */
            return OOMKIT_EREFUSED;
        }
    } while (!atomic_compare_exchange_weak_explicit(&budget->used_bytes, &used,
                                                    used + bytes, memory_order_relaxed,
                                                    memory_order_relaxed));
    *used_after = used + bytes;
    return OOMKIT_OK;
}

void
oomkit_budget_release(oomkit_budget *budget, uint64_t bytes)
{
    uint64_t before =
        atomic_fetch_sub_explicit(&budget->used_bytes, bytes, memory_order_relaxed);
    assert(before >= bytes);
    (void)before;
}

void
oomkit_budget_set_limit(oomkit_budget *budget, uint64_t limit_bytes)
{
    atomic_store_explicit(&budget->limit_bytes, limit_bytes, memory_order_relaxed);
}

uint64_t
oomkit_budget_limit(const oomkit_budget *budget)
{
    return atomic_load_explicit(&budget->limit_bytes, memory_order_relaxed);
}

uint64_t
oomkit_budget_used(const oomkit_budget *budget)
{
    return atomic_load_explicit(&budget->used_bytes, memory_order_relaxed);
}
