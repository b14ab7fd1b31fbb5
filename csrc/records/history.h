/* What a site's calls were over a whole run, in constant memory: sums and
 * distributions of all, the last records in a ring, and beside it those older ones in
 * which something happened.
 *
 * One writer. The ring has any number of readers; all else is read where the writer
 * does not run (the interpreter's lock sees to that). */
#ifndef OOMKIT_RECORDS_HISTORY_H
#define OOMKIT_RECORDS_HISTORY_H

#include "phases.h"
#include "ring.h"
#include "sketch.h"

typedef struct oomkit_totals {
    uint64_t steps, ooms, retries;
    uint64_t changes; /* of plan: other parts than the call before, of as many rows */
    uint64_t unfinished; /* calls that ended with an error */
    uint64_t time_ns, lost_ns;
    uint64_t peak_reserved_bytes; /* highest; 0: never known */
    oomkit_sketch peaks, times;   /* of allocated bytes, where known; of nanoseconds */
} oomkit_totals;

/* Adds a record; `before` is the one before it at its site, or NULL. */
void
oomkit_totals_add(oomkit_totals *totals, const oomkit_record *before,
                  const oomkit_record *record);

void
oomkit_totals_merge(oomkit_totals *into, const oomkit_totals *from);

typedef struct oomkit_history oomkit_history;

/* NULL when memory cannot be had or `records` is 0. Keeps that many records, and as
 * many older ones with events. The caller owns the result. */
oomkit_history *
oomkit_history_create(uint64_t records);

void
oomkit_history_destroy(oomkit_history *history);

/* Appends a copy. What gives way goes into the sums, and is kept if it had an event;
 * of those the oldest gives way. Writer only. */
void
oomkit_history_push(oomkit_history *history, const oomkit_record *record);

/* As of the ring: number of the next record; the record of that number; once more. */
uint64_t
oomkit_history_count(const oomkit_history *history);
int
oomkit_history_read(const oomkit_history *history, uint64_t index,
                    oomkit_record *record);
void
oomkit_history_amend(oomkit_history *history, uint64_t index,
                     const oomkit_record *record);

/* Copies record number `at` of those kept (0 the oldest): first those with events that
 * have left the ring, then the ring. OOMKIT_OK, OOMKIT_EINVAL behind the last, or
 * OOMKIT_EREFUSED for one overwritten meanwhile. */
int
oomkit_history_kept(const oomkit_history *history, uint64_t at, oomkit_record *record);

/* What the phases of that record took, and those of number `at` of the kept ones; NULL
 * where nobody has noted them. Borrowed until the next push. */
const oomkit_phases *
oomkit_history_phases(const oomkit_history *history, uint64_t index);
const oomkit_phases *
oomkit_history_kept_phases(const oomkit_history *history, uint64_t at);

/* Adds to those of that record, where it is in the ring still; NULL adds nothing, and
 * so does a want of memory. Writer only. */
void
oomkit_history_phases_add(oomkit_history *history, uint64_t index,
                          const oomkit_phases *phases);

/* Sums over every record that was ever pushed. */
void
oomkit_history_total(const oomkit_history *history, oomkit_totals *totals);

/* Everything that `from` has, behind what `into` has. Writer only. */
void
oomkit_history_merge(oomkit_history *into, const oomkit_history *from);

/* Forgets all records; the next one's number stays. Writer only. */
void
oomkit_history_forget(oomkit_history *history);

#endif
