/* Sums hold what has left the ring: a record may be written once more while it is
 * there. Who asks for them gets those of the ring's own records added. */
#include "history.h"
#include "../core/status.h"

#include <stdlib.h>
#include <string.h>

struct oomkit_history {
    oomkit_ring *ring;
    uint64_t first;       /* the oldest of the ring that has not been forgotten */
    oomkit_totals gone;   /* of records that have left the ring */
    oomkit_record before; /* the last of those; step 0: none */
    uint64_t events;      /* kept ever, of which the last `room` are there */
    uint64_t room;
    oomkit_record *kept;
    /* Beside the ring's records and beside `kept`; NULL until phases are noted. One in
     * which no phase was entered is none. */
    oomkit_phases *phases, *kept_phases;
};

oomkit_history *
oomkit_history_create(uint64_t records)
{
    oomkit_history *history = calloc(1, sizeof(*history));

    if (history == NULL) {
        return NULL;
    }
    history->room = records;
    history->ring = oomkit_ring_create(records);
    history->kept = history->ring == NULL
                        ? NULL /* so many bytes there are not */
                        : calloc((size_t)records, sizeof(*history->kept));
    if (history->kept == NULL) {
        oomkit_history_destroy(history);
        return NULL;
    }
    return history;
}

void
oomkit_history_destroy(oomkit_history *history)
{
    if (history != NULL) {
        oomkit_ring_destroy(history->ring);
        free(history->kept);
        free(history->phases);
        free(history->kept_phases);
        free(history);
    }
}

/* Was it cut in another way than the call before, which had as many rows? */
static int
is_change(const oomkit_record *before, const oomkit_record *record)
{
    return before->step != 0 && before->batch_size == record->batch_size &&
           (before->micro_batch_size != record->micro_batch_size ||
            before->accumulation_steps != record->accumulation_steps ||
            before->rung != record->rung);
}

void
oomkit_totals_add(oomkit_totals *totals, const oomkit_record *before,
                  const oomkit_record *record)
{
    totals->steps++;
    totals->ooms += record->ooms;
    totals->retries += record->attempts > 0 ? record->attempts - 1 : 0;
    totals->changes += before != NULL && is_change(before, record);
    totals->unfinished += record->outcome != 0;
    if (record->time_ns != OOMKIT_UNKNOWN) {
        totals->time_ns += record->time_ns;
        oomkit_sketch_add(&totals->times, record->time_ns);
    }
    totals->lost_ns += record->lost_ns == OOMKIT_UNKNOWN ? 0 : record->lost_ns;
    if (record->peak_allocated_bytes != OOMKIT_UNKNOWN) {
        oomkit_sketch_add(&totals->peaks, record->peak_allocated_bytes);
    }
    if (record->peak_reserved_bytes != OOMKIT_UNKNOWN &&
        record->peak_reserved_bytes > totals->peak_reserved_bytes) {
        totals->peak_reserved_bytes = record->peak_reserved_bytes;
    }
}

/* The oldest record of the ring is about to be overwritten. */
static void
leave(oomkit_history *history, const oomkit_record *record)
{
    if (record->ooms > 0 || record->outcome != 0 ||
        is_change(&history->before, record)) {
        const uint64_t at = history->events++ % history->room;
        history->kept[at] = *record;
        if (history->phases != NULL) {
            history->kept_phases[at] = history->phases[history->first % history->room];
        }
    }
    oomkit_totals_add(&history->gone, &history->before, record);
    history->before = *record;
}

void
oomkit_history_push(oomkit_history *history, const oomkit_record *record)
{
    const uint64_t count = oomkit_ring_count(history->ring);
    oomkit_record oldest;

    if (count - history->first == history->room) {
        oomkit_ring_read_own(history->ring, history->first, &oldest);
        leave(history, &oldest);
        history->first++;
    }
    if (history->phases != NULL) {
        memset(&history->phases[count % history->room], 0, sizeof(*history->phases));
    }
    oomkit_ring_push(history->ring, record);
}

static int
is_noted(const oomkit_phases *phases)
{
    int i, noted = 0;

    for (i = 0; i < OOMKIT_PHASE_FIGURES; i++) {
        noted |= phases->of[i].entered > 0;
    }
    return noted;
}

const oomkit_phases *
oomkit_history_phases(const oomkit_history *history, uint64_t index)
{
    const oomkit_phases *phases;

    if (history->phases == NULL || index < history->first ||
        index >= oomkit_ring_count(history->ring)) {
        return NULL;
    }
    phases = &history->phases[index % history->room];
    return is_noted(phases) ? phases : NULL;
}

/* 1: there is room for phases now. */
static int
phases_room(oomkit_history *history)
{
    if (history->phases == NULL) {
        oomkit_phases *phases = calloc((size_t)history->room, sizeof(*phases));
        oomkit_phases *kept = calloc((size_t)history->room, sizeof(*kept));
        if (phases == NULL || kept == NULL) {
            free(phases);
            free(kept);
            return 0;
        }
        history->phases = phases;
        history->kept_phases = kept;
    }
    return 1;
}

void
oomkit_history_phases_add(oomkit_history *history, uint64_t index,
                          const oomkit_phases *phases)
{
    if (phases != NULL && index >= history->first &&
        index < oomkit_ring_count(history->ring) && phases_room(history)) {
        oomkit_phases_add(&history->phases[index % history->room], phases);
    }
}

uint64_t
oomkit_history_count(const oomkit_history *history)
{
    return oomkit_ring_count(history->ring);
}

int
oomkit_history_read(const oomkit_history *history, uint64_t index,
                    oomkit_record *record)
{
    return index < history->first ? OOMKIT_EREFUSED
                                  : oomkit_ring_read(history->ring, index, record);
}

void
oomkit_history_amend(oomkit_history *history, uint64_t index,
                     const oomkit_record *record)
{
    if (index >= history->first) {
        oomkit_ring_amend(history->ring, index, record);
    }
}

int
oomkit_history_kept(const oomkit_history *history, uint64_t at, oomkit_record *record)
{
    const uint64_t events =
        history->events < history->room ? history->events : history->room;

    if (at < events) {
        *record = history->kept[(history->events - events + at) % history->room];
        return OOMKIT_OK;
    }
    return oomkit_ring_read(history->ring, history->first + (at - events), record);
}

const oomkit_phases *
oomkit_history_kept_phases(const oomkit_history *history, uint64_t at)
{
    const uint64_t events =
        history->events < history->room ? history->events : history->room;
    const oomkit_phases *phases;

    if (at >= events) {
        return oomkit_history_phases(history, history->first + (at - events));
    }
    phases =
        history->kept_phases == NULL
            ? NULL
            : &history->kept_phases[(history->events - events + at) % history->room];
    return phases != NULL && is_noted(phases) ? phases : NULL;
}

void
oomkit_history_total(const oomkit_history *history, oomkit_totals *totals)
{
    const uint64_t count = oomkit_ring_count(history->ring);
    oomkit_record before = history->before, record;
    uint64_t at;

    *totals = history->gone;
    for (at = history->first; at < count; at++) {
        if (oomkit_ring_read(history->ring, at, &record) == OOMKIT_OK) {
            oomkit_totals_add(totals, &before, &record);
            before = record;
        }
    }
}

void
oomkit_totals_merge(oomkit_totals *into, const oomkit_totals *from)
{
    into->steps += from->steps;
    into->ooms += from->ooms;
    into->retries += from->retries;
    into->changes += from->changes;
    into->unfinished += from->unfinished;
    into->time_ns += from->time_ns;
    into->lost_ns += from->lost_ns;
    if (from->peak_reserved_bytes > into->peak_reserved_bytes) {
        into->peak_reserved_bytes = from->peak_reserved_bytes;
    }
    oomkit_sketch_merge(&into->peaks, &from->peaks);
    oomkit_sketch_merge(&into->times, &from->times);
}

void
oomkit_history_merge(oomkit_history *into, const oomkit_history *from)
{
    const uint64_t events = from->events < from->room ? from->events : from->room;
    const uint64_t count = oomkit_ring_count(from->ring);
    oomkit_record record;
    uint64_t at;

    for (at = from->events - events; at < from->events; at++) {
        const uint64_t to = into->events++ % into->room;
        into->kept[to] = from->kept[at % from->room];
        if (from->kept_phases != NULL && phases_room(into)) {
            into->kept_phases[to] = from->kept_phases[at % from->room];
        } else if (into->kept_phases != NULL) {
            memset(&into->kept_phases[to], 0, sizeof(*into->kept_phases));
        }
    }
    oomkit_totals_merge(&into->gone, &from->gone);
    for (at = from->first; at < count; at++) {
        if (oomkit_ring_read(from->ring, at, &record) == OOMKIT_OK) {
            oomkit_history_push(into, &record);
            oomkit_history_phases_add(into, oomkit_ring_count(into->ring) - 1,
                                      oomkit_history_phases(from, at));
        }
    }
}

void
oomkit_history_forget(oomkit_history *history)
{
    history->first = oomkit_ring_count(history->ring);
    history->events = 0;
    memset(&history->gone, 0, sizeof(history->gone));
    memset(&history->before, 0, sizeof(history->before));
}
