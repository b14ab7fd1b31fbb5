/* Defects on purpose, in the place of a function of the core: linked with
 * -Wl,--wrap=<function>, chosen by OOMKIT_PLANT, "ring:leak" for one. Without it nothing is
 * wrong. Only builds of their own have this file; what runs them checks that each defect is
 * found. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static volatile int64_t planted;

#ifdef PLANT_IN_RING
#define WHERE "ring:"
#else
#define WHERE "budget:"
#endif

/* A list of them, separated by commas. */
static int
plant_is(const char *name)
{
    const char *wanted = getenv("OOMKIT_PLANT");
    const size_t length = strlen(name);

    for (wanted = wanted == NULL ? NULL : strstr(wanted, WHERE); wanted != NULL;
         wanted = strstr(wanted, WHERE)) {
        wanted += sizeof(WHERE) - 1;
        if (strncmp(wanted, name, length) == 0 &&
            (wanted[length] == 0 || wanted[length] == ',')) {
            return 1;
        }
    }
    return 0;
}

/* Nothing of this may happen without a plant: the core's tests count calls of malloc(). */
static inline void
plant_memory(void)
{
    if (plant_is("use-after-free")) {
        char *volatile block = malloc(16);
        free(block);
        planted = block[3];
    }
    if (plant_is("overflow-of-heap")) {
        char *volatile block = malloc(16);
        planted = block[16];
        free(block);
    }
    if (plant_is("signed-overflow")) {
        volatile int large = INT32_MAX;
        planted = large + 1;
    }
    if (plant_is("misaligned")) {
        int64_t pair[2] = {1, 2};
        char *volatile first = (char *)pair;
        planted = *(volatile int64_t *)(void *)(first + 1);
    }
}

/* Once: some callers come a hundred thousand times. */
static inline void
plant_leaks(void)
{
    static atomic_flag done = ATOMIC_FLAG_INIT;
    int i;
    if (!plant_is("leak") || atomic_flag_test_and_set(&done)) {
        return;
    }
    for (i = 0; i < 8; i++) {
        char *volatile block = malloc(1234);
        block = NULL;
        (void)block;
    }
}

#ifdef PLANT_IN_RING

#include "ring.h"

static void *
plant_count(void *argument)
{
    int i;
    for (i = 0; i < 1000; i++) {
        planted++;
    }
    return argument;
}

/* Whatever lock the caller holds, this thread does not know of it. */
static void
plant_race(void)
{
    pthread_t thread;
    if (plant_is("race") && pthread_create(&thread, NULL, plant_count, NULL) == 0) {
        (void)plant_count(NULL);
        (void)pthread_join(thread, NULL);
    }
}

#ifdef PLANT_OBJECTS
#include <Python.h>

static void
plant_objects(void)
{
    int i;
    for (i = 0; i < 8 && plant_is("object-leak"); i++) {
        PyObject *volatile lost = PyBytes_FromStringAndSize(NULL, 4321); /* nobody's */
        lost = NULL;
        (void)lost;
    }
}
#else
static void
plant_objects(void)
{
}
#endif

void
__real_oomkit_ring_push(oomkit_ring *ring, const oomkit_record *record);
void
__wrap_oomkit_ring_push(oomkit_ring *ring, const oomkit_record *record);

void
__wrap_oomkit_ring_push(oomkit_ring *ring, const oomkit_record *record)
{
    plant_memory();
    plant_leaks();
    plant_objects();
    plant_race();
    __real_oomkit_ring_push(ring, record);
}

#else

#include "budget.h"

int
__real_oomkit_budget_reserve(oomkit_budget *budget, uint64_t bytes, uint64_t *after);
int
__wrap_oomkit_budget_reserve(oomkit_budget *budget, uint64_t bytes, uint64_t *after);

int
__wrap_oomkit_budget_reserve(oomkit_budget *budget, uint64_t bytes, uint64_t *after)
{
    plant_memory();
    plant_leaks();
    if (plant_is("race")) {
        planted++; /* from any thread, without a lock */
    }
    return __real_oomkit_budget_reserve(budget, bytes, after);
}

#endif
