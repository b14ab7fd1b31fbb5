/* Arbitrary text through the classifier, and text that is put together from its own
 * table, whose class is known. Arguments: seed and rounds. Every text ends where its
 * block of memory ends, so that a byte read too many is seen by AddressSanitizer. */
#include "../check.h"

#include "../../../csrc/core/classify.c"

#include <stdlib.h>

#define ROWS (sizeof(fragments) / sizeof(fragments[0]))
#define LONGEST 4096

static uint64_t state;

/* xorshift64*: the same everywhere */
static uint64_t
next(void)
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * UINT64_C(2685821657736338717);
}

static size_t
below(size_t bound)
{
    return (size_t)(next() % bound);
}

typedef struct text {
    char bytes[LONGEST];
    size_t length;
} text;

static void
add(text *to, const char *bytes, size_t length)
{
    if (length <= LONGEST - to->length) {
        memcpy(to->bytes + to->length, bytes, length);
        to->length += length;
    }
}

/* Of an alphabet in which no fragment and no number can be written. */
static void
add_noise(text *to)
{
    static const char alphabet[] = "xyz \n\t{}%~\xc3\xa9";
    size_t n = below(24);

    while (n-- > 0) {
        add(to, &alphabet[below(sizeof(alphabet) - 1)], 1);
    }
}

static void
add_bytes(text *to)
{
    size_t n = below(64);

    while (n-- > 0) {
        const char byte = (char)next(); /* NUL too */
        add(to, &byte, 1);
    }
}

static void
add_also(text *to, const fragment *row)
{
    if (row->also == BEFORE_A_SIZE) {
        add(to, "12.50 GB", 8);
    } else if (row->also == NULL || row->also == AT_END_OF_WORD) {
        add(to, " ", 1);
    } else {
        add(to, " ", 1);
        add_noise(to);
        add(to, row->also, strlen(row->also));
    }
}

/* The class of a copy that is exactly as long as the text. */
static oomkit_class
classify(const text *t, oomkit_exception_kind kind, int has_code, long code)
{
    oomkit_exception_facts facts = {kind, has_code, code, NULL, t->length};
    char *copy = malloc(t->length == 0 ? 1 : t->length);
    oomkit_class first, second;

    if (copy == NULL) {
        exit(2);
    }
    memcpy(copy, t->bytes, t->length);
    facts.text = t->length == 0 && below(2) ? NULL : copy;
    first = oomkit_classify(&facts);
    second = oomkit_classify(&facts);
    free(copy);
    CHECK(first == second);
    CHECK(first <= OOMKIT_CLASS_NEVER);
    CHECK(oomkit_class_name(first)[0] != '\0');
    return first;
}

/* Noise, one row of the table, noise: the row's class, unless a row before it is in it.
 */
static void
fuzz_row(void)
{
    const fragment *row = &fragments[below(ROWS)];
    text t = {.length = 0};
    oomkit_class expected = row->class_;
    oomkit_exception_facts facts;
    size_t i;

    add_noise(&t);
    add(&t, row->text, strlen(row->text));
    add_also(&t, row);
    add_noise(&t);
    facts = (oomkit_exception_facts){OOMKIT_EXCEPTION_RUNTIME, 0, 0, t.bytes, t.length};
    for (i = 0; &fragments[i] != row; i++) {
        if (matches(&facts, &fragments[i])) {
            expected = fragments[i].class_;
            break;
        }
    }
    if (strstr(row->text, "DataLoader worker") != NULL) {
        expected = OOMKIT_CLASS_NEVER;
    }
    CHECK(classify(&t, OOMKIT_EXCEPTION_RUNTIME, 0, 0) == expected);
    CHECK(classify(&t, OOMKIT_EXCEPTION_OTHER, 0, 0) == OOMKIT_CLASS_OTHER);
    CHECK(
        classify(&t, OOMKIT_EXCEPTION_ACCELERATOR, 1, 700) ==
        (has(&facts, "DataLoader worker") ? OOMKIT_CLASS_OTHER : OOMKIT_CLASS_STICKY));
    CHECK(classify(&t, OOMKIT_EXCEPTION_DISTRIBUTED, 0, 0) ==
          (has(&facts, "out of memory") ? OOMKIT_CLASS_NEVER : OOMKIT_CLASS_OTHER));
}

/* A fragment that lacks its last byte, or has another one somewhere, is none. */
static void
fuzz_almost(void)
{
    const fragment *row = &fragments[below(ROWS)];
    size_t length = strlen(row->text), at = below(length), i;
    text t = {.length = 0};
    oomkit_exception_facts facts;

    add_noise(&t);
    i = t.length;
    add(&t, row->text, length);
    if (below(2)) {
        t.length--;
    } else {
        t.bytes[i + at] = '\x01';
    }
    facts = (oomkit_exception_facts){OOMKIT_EXCEPTION_RUNTIME, 0, 0, t.bytes, t.length};
    for (i = 0; i < ROWS && !matches(&facts, &fragments[i]); i++) {
    }
    CHECK(classify(&t, OOMKIT_EXCEPTION_RUNTIME, 0, 0) ==
          (i < ROWS ? fragments[i].class_ : OOMKIT_CLASS_OTHER));
    CHECK(i == ROWS || &fragments[i] != row);
}

/* Whatever bytes: an answer, and nothing read beyond them. */
static void
fuzz_bytes(void)
{
    text t = {.length = 0};
    size_t pieces = below(6);
    uint64_t bytes = 0;
    char *copy;

    while (pieces-- > 0) {
        const fragment *row = &fragments[below(ROWS)];
        switch (below(4)) {
        case 0:
            add(&t, row->text, below(strlen(row->text) + 1));
            break;
        case 1:
            add(&t, "Tried to allocate 99999999999999999999.999999999 TiB", below(53));
            break;
        case 2:
            add_noise(&t);
            break;
        default:
            add_bytes(&t);
        }
    }
    classify(&t, (oomkit_exception_kind)below(OOMKIT_EXCEPTION_DISTRIBUTED + 1),
             (int)below(2), (long)next());
    copy = malloc(t.length == 0 ? 1 : t.length);
    if (copy == NULL) {
        exit(2);
    }
    memcpy(copy, t.bytes, t.length);
    (void)oomkit_classify_requested(copy, t.length, &bytes);
    (void)oomkit_classify_allocated(copy, t.length, &bytes);
    free(copy);
}

/* A size that was written is the size that is read. */
static void
fuzz_size(void)
{
    static const char *const names[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    const unsigned unit = (unsigned)below(5);
    const uint64_t whole = next() >> (24 + below(40)), hundredth = below(100);
    uint64_t expected = whole << (10 * unit), bytes = 0;
    const int fits = whole <= UINT64_MAX >> (10 * unit);
    char line[128];
    int n;

    if (unit == 0) {
        n = snprintf(line, sizeof(line), "you tried to allocate %llu bytes. Error 12",
                     (unsigned long long)whole);
    } else {
        n = snprintf(line, sizeof(line), "Tried to allocate %llu.%02u %s. GPU 0",
                     (unsigned long long)whole, (unsigned)hundredth, names[unit]);
        expected += ((hundredth * 10000) << (10 * unit)) / 1000000;
    }
    CHECK(oomkit_classify_requested(line, (size_t)n, &bytes) == fits);
    CHECK(!fits || bytes == expected);
}

int
main(int argc, char **argv)
{
    const uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    uint64_t rounds = argc > 2 ? strtoull(argv[2], NULL, 10) : 1000;

    state = seed * UINT64_C(0x9e3779b97f4a7c15) | 1;
    printf("seed %llu, %llu rounds\n", (unsigned long long)seed,
           (unsigned long long)rounds);
    while (rounds-- > 0 && check_failures == 0) {
        fuzz_row();
        fuzz_almost();
        fuzz_bytes();
        fuzz_size();
    }
    return check_report();
}
