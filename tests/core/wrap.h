/* calloc() that fails when told to. Link with -Wl,--wrap=calloc,--wrap=malloc. */
#ifndef OOMKIT_TESTS_WRAP_H
#define OOMKIT_TESTS_WRAP_H

#include <stdlib.h>

static int wrap_fails;
static int wrap_refused;

void *
__real_calloc(size_t count, size_t size);
void *
__wrap_calloc(size_t count, size_t size);
void *
__real_malloc(size_t size);
void *
__wrap_malloc(size_t size);

void *
__wrap_calloc(size_t count, size_t size)
{
    wrap_refused += wrap_fails;
    return wrap_fails ? NULL : __real_calloc(count, size);
}

void *
__wrap_malloc(size_t size)
{
    wrap_refused += wrap_fails;
    return wrap_fails ? NULL : __real_malloc(size);
}

/* Does `create` (an expression) give NULL when it gets no memory, and did it ask? */
#define CHECK_FAILS_WITHOUT_MEMORY(create)                                             \
    do {                                                                               \
        void *made;                                                                    \
        wrap_refused = 0;                                                              \
        wrap_fails = 1;                                                                \
        made = (create);                                                               \
        wrap_fails = 0;                                                                \
        CHECK(made == NULL);                                                           \
        CHECK(wrap_refused > 0);                                                       \
    } while (0)

#endif
