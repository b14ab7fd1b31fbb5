/* A test program of the core: CHECK() what must hold, return check_report() from main.
 * Only the main thread may CHECK(); other threads count for themselves. */
#ifndef OOMKIT_TESTS_CHECK_H
#define OOMKIT_TESTS_CHECK_H

#include <stdio.h>

static unsigned long check_count;
static unsigned long check_failures;

#define CHECK(condition)                                                               \
    do {                                                                               \
        check_count++;                                                                 \
        if (!(condition) && check_failures++ < 50) {                                   \
            printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);                     \
        }                                                                              \
    } while (0)

static inline int
check_report(void)
{
    printf("%lu checks, %lu failures\n", check_count, check_failures);
    return check_failures == 0 ? 0 : 1;
}

#endif
