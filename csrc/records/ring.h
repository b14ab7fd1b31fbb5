/* A fixed ring of step records: one writer, any number of readers.
 *
 * A reader never blocks the writer. Each slot carries a sequence number that is odd
 * while the slot is written, so that a reader can tell a torn record and reads again.
 */
#ifndef OOMKIT_RECORDS_RING_H
#define OOMKIT_RECORDS_RING_H

#include "../core/status.h"

#include <stdint.h>

/* Bytes are bytes, times are nanoseconds; OOMKIT_UNKNOWN where nothing was measured. */
typedef struct oomkit_record {
    uint64_t step;             /* number of the call at its site, from 1 */
    uint64_t batch_size;       /* rows; OOMKIT_UNKNOWN where no batch was found */
    uint64_t micro_batch_size; /* rows of the largest slice that was executed */
    uint64_t requested_bytes;  /* of the last OOM */
    uint64_t baseline_bytes;   /* allocated at entry */
    uint64_t peak_allocated_bytes;
    uint64_t peak_reserved_bytes;
    uint64_t device_free_bytes;
    uint64_t budget_bytes; /* in force at entry; OOMKIT_UNKNOWN without a limit */
    uint64_t began_ns;     /* of a clock that only goes forward */
    uint64_t time_ns;      /* the whole call, failed attempts and recovery included */
    uint64_t lost_ns;      /* failed attempts and recovery */
    uint32_t accumulation_steps;
    uint32_t attempts;
    uint32_t ooms;
    uint32_t rung;
    uint32_t reason;  /* oomkit_plan_reason of the plan that ended the call */
    uint32_t outcome; /* 0 finished, 1 gave up, 2 another error, 3 committed */
    uint32_t rank;    /* of the process in the default group, from 1; 0: not known */
    uint32_t unused;  /* whole words are copied */
} oomkit_record;

typedef struct oomkit_ring oomkit_ring;

/* NULL when memory cannot be had or capacity is 0. The caller owns the result. */
oomkit_ring *
oomkit_ring_create(uint64_t capacity);

void
oomkit_ring_destroy(oomkit_ring *ring);

/* Appends a copy; the oldest record gives way. Writer only. */
void
oomkit_ring_push(oomkit_ring *ring, const oomkit_record *record);

/* Writes the record of that absolute index once more: what a step did after its call.
 * Nothing when it has been overwritten or was never written. Writer only. */
void
oomkit_ring_amend(oomkit_ring *ring, uint64_t index, const oomkit_record *record);

/* Records ever pushed. Those with index count - capacity .. count - 1 can be read. */
uint64_t
oomkit_ring_count(const oomkit_ring *ring);

uint64_t
oomkit_ring_capacity(const oomkit_ring *ring);

/* Copies the record of that absolute index (0 = the first ever). OOMKIT_OK;
 * OOMKIT_EINVAL for one not yet written; OOMKIT_EREFUSED for one overwritten. */
int
oomkit_ring_read(const oomkit_ring *ring, uint64_t index, oomkit_record *record);

/* The same for the writer, of one that is still there: nobody else writes it. Its
 * successor, which is read next, is fetched. */
void
oomkit_ring_read_own(const oomkit_ring *ring, uint64_t index, oomkit_record *record);

#endif
