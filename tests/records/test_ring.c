#include "check.h"
#include "wrap.h"

#include "ring.h"
#include "status.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

/* Every field is a function of the step, so that a torn record cannot look whole. */
static oomkit_record
make(uint64_t step)
{
    uint32_t low = (uint32_t)step;
    return (oomkit_record){.step = step,
                           .batch_size = step * 3,
                           .micro_batch_size = step * 5,
                           .requested_bytes = step * 7,
                           .baseline_bytes = step * 11,
                           .peak_allocated_bytes = step * 13,
                           .peak_reserved_bytes = ~step,
                           .device_free_bytes = step << 32,
                           .budget_bytes = OOMKIT_UNKNOWN - step,
                           .began_ns = step * 23,
                           .time_ns = step * 17,
                           .lost_ns = step * 19,
                           .accumulation_steps = low,
                           .attempts = low * 3,
                           .ooms = low * 5,
                           .rung = low * 7,
                           .reason = ~low,
                           .outcome = low * 11,
                           .rank = low * 13};
}

static int
whole(const oomkit_record *record)
{
    oomkit_record expected = make(record->step);
    return memcmp(record, &expected, sizeof(expected)) == 0;
}

static void
test_creation(void)
{
    oomkit_ring *ring = oomkit_ring_create(3);

    CHECK(oomkit_ring_capacity(ring) == 3);
    CHECK(oomkit_ring_count(ring) == 0);
    oomkit_ring_destroy(ring);
    CHECK(oomkit_ring_create(0) == NULL);
    CHECK(oomkit_ring_create(UINT64_MAX) == NULL);
    CHECK(oomkit_ring_create(UINT64_MAX / sizeof(oomkit_record)) == NULL);
    CHECK_FAILS_WITHOUT_MEMORY(oomkit_ring_create(8));
    oomkit_ring_destroy(NULL);
}

/* After each push exactly the youngest `capacity` records can be read, in order. */
static void
test_the_oldest_gives_way(void)
{
    uint64_t capacity, pushed, index;

    for (capacity = 1; capacity <= 5; capacity++) {
        oomkit_ring *ring = oomkit_ring_create(capacity);
        for (pushed = 0; pushed <= 13; pushed++) {
            oomkit_record record = make(1000);
            CHECK(oomkit_ring_count(ring) == pushed);
            for (index = 0; index < pushed + 2; index++) {
                int status = oomkit_ring_read(ring, index, &record);
                if (index >= pushed) {
                    CHECK(status == OOMKIT_EINVAL);
                } else if (index + capacity < pushed) {
                    CHECK(status == OOMKIT_EREFUSED);
                } else {
                    CHECK(status == OOMKIT_OK);
                    CHECK(record.step == index + 1 && whole(&record));
                }
            }
            record = make(pushed + 1);
            oomkit_ring_push(ring, &record);
        }
        CHECK(oomkit_ring_read(ring, UINT64_MAX, &(oomkit_record){0}) == OOMKIT_EINVAL);
        oomkit_ring_destroy(ring);
    }
}

static void
test_a_failed_read_leaves_the_record_alone(void)
{
    oomkit_ring *ring = oomkit_ring_create(1);
    oomkit_record record = make(1);

    oomkit_ring_push(ring, &record);
    record = make(2);
    oomkit_ring_push(ring, &record);
    record = make(77);
    CHECK(oomkit_ring_read(ring, 0, &record) == OOMKIT_EREFUSED);
    CHECK(oomkit_ring_read(ring, 2, &record) == OOMKIT_EINVAL);
    CHECK(record.step == 77 && whole(&record));
    oomkit_ring_destroy(ring);
}

/* A record may be written once more while it is there, and no other is touched. */
static void
test_amend(void)
{
    oomkit_ring *ring = oomkit_ring_create(2);
    oomkit_record record = make(1);
    uint64_t times;

    oomkit_ring_amend(ring, 0, &record);
    CHECK(oomkit_ring_count(ring) == 0);
    oomkit_ring_push(ring, &record);
    record = make(2);
    oomkit_ring_push(ring, &record);
    for (times = 0; times < 3; times++) {
        record = make(100 + times);
        oomkit_ring_amend(ring, 0, &record);
        CHECK(oomkit_ring_count(ring) == 2);
        CHECK(oomkit_ring_read(ring, 0, &record) == OOMKIT_OK);
        CHECK(record.step == 100 + times && whole(&record));
        CHECK(oomkit_ring_read(ring, 1, &record) == OOMKIT_OK);
        CHECK(record.step == 2 && whole(&record));
    }
    record = make(3);
    oomkit_ring_push(ring, &record); /* over the amended one */
    CHECK(oomkit_ring_read(ring, 2, &record) == OOMKIT_OK);
    CHECK(record.step == 3 && whole(&record));
    record = make(77);
    oomkit_ring_amend(ring, 0, &record); /* it is gone */
    CHECK(oomkit_ring_read(ring, 0, &record) == OOMKIT_EREFUSED);
    CHECK(oomkit_ring_read(ring, 2, &record) == OOMKIT_OK);
    CHECK(record.step == 3);
    oomkit_ring_destroy(ring);
}

/* Readers against a writer that laps them all the time: in a ring of one record it is
 * always at the record that they read. */
enum { READERS = 2, PUSHES = 200000, CAPACITY = 1 };

typedef struct reader {
    oomkit_ring *ring;
    atomic_int *done;
    uint64_t good, torn, wrong;
} reader;

static void *
read_all(void *argument)
{
    reader *self = argument;

    while (!atomic_load(self->done) || self->good == 0) {
        uint64_t count = oomkit_ring_count(self->ring);
        uint64_t back = count < CAPACITY ? count : CAPACITY, i;
        for (i = count - back; i < count; i++) {
            oomkit_record record;
            int status = oomkit_ring_read(self->ring, i, &record);
            if (status == OOMKIT_OK) {
                self->good++;
                self->torn += !whole(&record);
                self->wrong += record.step != i + 1 && record.step != i + 1 + PUSHES;
            } else {
                self->wrong += status != OOMKIT_EREFUSED;
            }
        }
    }
    return NULL;
}

static void
test_no_torn_record_is_seen(void)
{
    oomkit_ring *ring = oomkit_ring_create(CAPACITY);
    pthread_t threads[READERS];
    reader readers[READERS];
    atomic_int done = 0;
    uint64_t step;
    int i;

    for (i = 0; i < READERS; i++) {
        readers[i] = (reader){ring, &done, 0, 0, 0};
        CHECK(pthread_create(&threads[i], NULL, read_all, &readers[i]) == 0);
    }
    for (step = 1; step <= PUSHES; step++) {
        oomkit_record record = make(step);
        oomkit_ring_push(ring, &record);
        if (step % 3 == 0) { /* what a backward added to its call's record */
            record = make(step + PUSHES);
            oomkit_ring_amend(ring, step - 1, &record);
        }
    }
    atomic_store(&done, 1);
    for (i = 0; i < READERS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        CHECK(readers[i].good > 0);
        CHECK(readers[i].torn == 0);
        CHECK(readers[i].wrong == 0);
    }
    CHECK(oomkit_ring_count(ring) == PUSHES);
    oomkit_ring_destroy(ring);
}

int
main(void)
{
    test_creation();
    test_the_oldest_gives_way();
    test_a_failed_read_leaves_the_record_alone();
    test_amend();
    test_no_torn_record_is_seen();
    return check_report();
}
