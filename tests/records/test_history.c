#include "check.h"
#include "wrap.h"

#include "history.h"
#include "status.h"

#include <string.h>

static oomkit_record
quiet(uint64_t step)
{
    return (oomkit_record){.step = step,
                           .batch_size = 64,
                           .micro_batch_size = 64,
                           .peak_allocated_bytes = 1000 + step,
                           .peak_reserved_bytes = OOMKIT_UNKNOWN,
                           .time_ns = 10,
                           .accumulation_steps = 1,
                           .attempts = 1};
}

static oomkit_record
hard(uint64_t step)
{
    oomkit_record record = quiet(step);
    record.ooms = 1;
    record.attempts = 2;
    record.lost_ns = 4;
    return record;
}

static void
push(oomkit_history *history, oomkit_record record)
{
    oomkit_history_push(history, &record);
}

static oomkit_totals
total(const oomkit_history *history)
{
    oomkit_totals totals;
    oomkit_history_total(history, &totals);
    return totals;
}

/* The numbers of the kept records in one figure: 1, 2, 13 is 10213. */
static uint64_t
kept(const oomkit_history *history)
{
    oomkit_record record;
    uint64_t at, all = 0;

    for (at = 0; oomkit_history_kept(history, at, &record) == OOMKIT_OK; at++) {
        all = all * 100 + record.step;
    }
    return all;
}

static void
test_creation(void)
{
    oomkit_history *history = oomkit_history_create(3);

    CHECK(total(history).steps == 0 && kept(history) == 0);
    oomkit_history_destroy(history);
    oomkit_history_destroy(NULL);
    CHECK(oomkit_history_create(0) == NULL);
    CHECK(oomkit_history_create(UINT64_MAX) == NULL);
    CHECK_FAILS_WITHOUT_MEMORY(oomkit_history_create(8));
}

/* Counts and sums are those of all records, those that gave way included. */
static void
test_nothing_is_forgotten(void)
{
    oomkit_history *history = oomkit_history_create(4);
    uint64_t i, ooms = 0;
    oomkit_totals totals;

    for (i = 1; i <= 3005; i++) {
        int fails = i == 2 || i == 1500;
        push(history, fails ? hard(i) : quiet(i));
        ooms += (uint64_t)fails;
        totals = total(history);
        CHECK(totals.steps == i && totals.ooms == ooms && totals.retries == ooms);
        CHECK(totals.time_ns == 10 * i && totals.lost_ns == 4 * ooms);
        CHECK(totals.peaks.most == 1000 + i && totals.peaks.least == 1001);
    }
    CHECK(totals.peaks.count == 3005 && totals.times.count == 3005);
    CHECK(totals.peak_reserved_bytes == 0 && totals.unfinished == 0);
    oomkit_history_destroy(history);
}

static void
test_records_with_events_stay(void)
{
    oomkit_history *history = oomkit_history_create(2);
    oomkit_record record;
    uint64_t i;

    for (i = 1; i <= 9; i++) {
        push(history, i == 3 || i == 5 ? hard(i) : quiet(i));
    }
    CHECK(kept(history) == 3050809);
    push(history, hard(10));
    CHECK(kept(history) == 3050910); /* no record is there twice */
    push(history, quiet(11));
    push(history, quiet(12)); /* the oldest event gives way to the latest */
    CHECK(kept(history) == 5101112);
    CHECK(total(history).ooms == 3 && total(history).steps == 12);
    record = quiet(13);
    record.outcome = 2;
    push(history, record);
    push(history, quiet(14));
    push(history, quiet(15));
    CHECK(kept(history) == 10131415);
    CHECK(total(history).unfinished == 1);
    oomkit_history_destroy(history);
}

/* Another plan for as many rows is an event; another batch is none. */
static void
test_changes_of_plan(void)
{
    oomkit_history *history = oomkit_history_create(1);
    oomkit_record record = quiet(2);

    push(history, quiet(1));
    record.batch_size = record.micro_batch_size = 10; /* the last of an epoch */
    push(history, record);
    push(history, quiet(3));
    CHECK(total(history).changes == 0);
    record = quiet(4);
    record.micro_batch_size = 32;
    record.accumulation_steps = 2;
    push(history, record);
    CHECK(total(history).changes == 1);
    record.step = 5;
    push(history, record);
    CHECK(total(history).changes == 1 && kept(history) == 405);
    record.step = 6;
    record.rung = 1;
    push(history, record);
    push(history, quiet(7));
    CHECK(total(history).changes == 3 && kept(history) == 607);
    push(history, quiet(8));
    CHECK(kept(history) == 708); /* back to the whole batch was one, too */
    oomkit_history_destroy(history);
}

static void
test_amended_records_count_as_they_are(void)
{
    oomkit_history *history = oomkit_history_create(2);
    oomkit_record record = quiet(1);

    push(history, record);
    record.ooms = 2;
    record.attempts = 3;
    oomkit_history_amend(history, 0, &record);
    CHECK(total(history).ooms == 2 && total(history).retries == 2);
    push(history, quiet(2));
    push(history, quiet(3));
    CHECK(total(history).ooms == 2 && kept(history) == 10203);
    record.ooms = 7;
    oomkit_history_amend(history, 0, &record); /* it has left */
    CHECK(total(history).ooms == 2);
    CHECK(oomkit_history_read(history, 0, &record) == OOMKIT_EREFUSED);
    CHECK(oomkit_history_read(history, 1, &record) == OOMKIT_OK && record.step == 2);
    CHECK(oomkit_history_count(history) == 3);
    oomkit_history_destroy(history);
}

static void
test_merged(void)
{
    oomkit_history *into = oomkit_history_create(2), *from = oomkit_history_create(2);
    uint64_t i;

    for (i = 1; i <= 5; i++) {
        push(into, i == 2 ? hard(i) : quiet(i));
        push(from, i == 1 ? hard(10 + i) : quiet(10 + i));
    }
    oomkit_history_merge(into, from);
    CHECK(total(into).steps == 10 && total(into).ooms == 2);
    CHECK(total(into).time_ns == 100 && total(into).peaks.most == 1015);
    CHECK(kept(into) == 2111415);
    CHECK(total(from).steps == 5);
    oomkit_history_destroy(from);
    oomkit_history_destroy(into);
}

static void
test_forgotten(void)
{
    oomkit_history *history = oomkit_history_create(2);
    oomkit_record record;
    uint64_t i;

    for (i = 1; i <= 4; i++) {
        push(history, hard(i));
    }
    oomkit_history_forget(history);
    CHECK(total(history).steps == 0 && kept(history) == 0);
    record = hard(4);
    oomkit_history_amend(history, 3, &record); /* a backward of before */
    CHECK(oomkit_history_read(history, 3, &record) == OOMKIT_EREFUSED);
    CHECK(oomkit_history_count(history) == 4);
    push(history, quiet(5));
    CHECK(total(history).steps == 1 && total(history).ooms == 0 && kept(history) == 5);
    push(history, quiet(6));
    push(history, quiet(7));
    CHECK(total(history).steps == 3 && kept(history) == 607);
    oomkit_history_destroy(history);
}

/* A record whose backward took so many bytes at most. */
static void
push_measured(oomkit_history *history, oomkit_record record, uint64_t bytes)
{
    oomkit_phases phases = {0};

    phases.of[1] = (oomkit_phase_figures){.entered = 1,
                                          .baseline_bytes = 5,
                                          .peak_allocated_bytes = bytes,
                                          .peak_reserved_bytes = OOMKIT_UNKNOWN,
                                          .time_ns = 7};
    push(history, record);
    oomkit_history_phases_add(history, oomkit_history_count(history) - 1, &phases);
}

static uint64_t
backward_peak(const oomkit_history *history, uint64_t at)
{
    const oomkit_phases *phases = oomkit_history_kept_phases(history, at);

    return phases == NULL ? 0 : phases->of[1].peak_allocated_bytes;
}

static void
test_phases_go_with_their_record(void)
{
    oomkit_history *into = oomkit_history_create(2), *from = oomkit_history_create(2);

    push_measured(from, hard(1), 10);
    CHECK(oomkit_history_kept_phases(from, 1) == NULL); /* behind the last */
    push(from, quiet(2));
    push_measured(from, quiet(3), 30);
    push_measured(from, quiet(4), 40);
    CHECK(kept(from) == 10304);
    CHECK(backward_peak(from, 0) == 10 && backward_peak(from, 1) == 30 &&
          backward_peak(from, 2) == 40);
    push(from, quiet(5)); /* in the place of one that has some */
    CHECK(backward_peak(from, 1) == 40 && backward_peak(from, 2) == 0);
    push(into, hard(11));
    push(into, quiet(12));
    oomkit_history_merge(into, from); /* has none itself */
    CHECK(kept(into) == 1110405);
    CHECK(backward_peak(into, 0) == 10 && backward_peak(into, 1) == 0 &&
          backward_peak(into, 2) == 40 && backward_peak(into, 3) == 0);
    oomkit_history_destroy(from);
    oomkit_history_destroy(into);
}

static void
test_phases_are_added(void)
{
    oomkit_history *history = oomkit_history_create(2);
    oomkit_phases later = {0};

    later.of[1].entered = 1;
    later.of[1].peak_allocated_bytes = 20;
    push_measured(history, quiet(1), 10);
    oomkit_history_phases_add(history, 0, &later);
    oomkit_history_phases_add(history, 0, NULL);
    oomkit_history_phases_add(history, 1, &later); /* no such record */
    CHECK(oomkit_history_phases(history, 0)->of[1].entered == 2);
    CHECK(backward_peak(history, 0) == 20);
    CHECK(oomkit_history_phases(history, 1) == NULL);
    oomkit_history_forget(history);
    CHECK(oomkit_history_phases(history, 0) == NULL);
    oomkit_history_destroy(history);
}

int
main(void)
{
    test_creation();
    test_nothing_is_forgotten();
    test_records_with_events_stay();
    test_changes_of_plan();
    test_amended_records_count_as_they_are();
    test_merged();
    test_forgotten();
    test_phases_go_with_their_record();
    test_phases_are_added();
    return check_report();
}
