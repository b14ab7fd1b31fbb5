/* PyTorch gives an out-of-memory error no code and no fields, and half of the libraries
 * below it have a type of their own or none. So: the type where it says enough, then
 * the error code, then fragments of messages. A fragment is as long as its author kept
 * it stable and no longer: messages gain and lose hints from release to release. */
#include "classify.h"

#include <string.h>

typedef struct fragment {
    const char *text;
    const char *also; /* a second part that must be there too, or NULL; or see below */
    oomkit_class class_;
} fragment;

/* In place of a second part: what has to follow the first one. */
static const char AT_END_OF_WORD[] = "no letter";
static const char BEFORE_A_SIZE[] = "2.00 GiB";

/* The first row that matches decides. Classes of rows stand in the order in which they
 * have to be tried: what only looks like OOM before what is. */
static const fragment fragments[] = {
    /* A kernel that wants more shared memory than a multiprocessor has; a wrong size.
     */
    {"out of resource: shared memory", NULL, OOMKIT_CLASS_OTHER},
    {"seems to have been called with negative number", NULL, OOMKIT_CLASS_OTHER},

    /* A worker process is short of memory or of /dev/shm: the step's size is not why.
     */
    {"DataLoader worker (pid", "killed by signal: Killed", OOMKIT_CLASS_NEVER},
    {"DataLoader worker (pid", "killed by signal: Bus error", OOMKIT_CLASS_NEVER},
    {"insufficient shared memory (shm)", NULL, OOMKIT_CLASS_NEVER},
    {"unable to allocate shared memory(shm)", NULL, OOMKIT_CLASS_NEVER},
    {"unable to mmap", "Cannot allocate memory", OOMKIT_CLASS_NEVER},

    /* The communicator is dead, the peers would wait for ever. */
    {"Cuda failure", "'out of memory'", OOMKIT_CLASS_NEVER},
    {"HIP failure", "'out of memory'", OOMKIT_CLASS_NEVER},

    /* The texts of the sticky codes, for errors that arrive without one. */
    {"CUDA error: an illegal memory access", NULL, OOMKIT_CLASS_STICKY},
    {"CUDA error: device-side assert triggered", NULL, OOMKIT_CLASS_STICKY},
    {"CUDA error: an illegal instruction", NULL, OOMKIT_CLASS_STICKY},
    {"CUDA error: misaligned address", NULL, OOMKIT_CLASS_STICKY},
    {"CUDA error: invalid program counter", NULL, OOMKIT_CLASS_STICKY},
    {"CUDA error: unspecified launch failure", NULL, OOMKIT_CLASS_STICKY},
    {"HIP error: an illegal memory access", NULL, OOMKIT_CLASS_STICKY},
    {"HIP error: device-side assert triggered", NULL, OOMKIT_CLASS_STICKY},
    {"HIP error: unspecified launch failure", NULL, OOMKIT_CLASS_STICKY},

    /* Allocators of devices. */
    {"CUDA out of memory. ", "Tried to allocate ", OOMKIT_CLASS_CERTAIN},
    {"HIP out of memory. ", "Tried to allocate ", OOMKIT_CLASS_CERTAIN},
    {"XPU out of memory. ", "Tried to allocate ", OOMKIT_CLASS_CERTAIN},
    {"MPS backend out of memory", NULL, OOMKIT_CLASS_CERTAIN},
    {"would exceed allowed memory. (out of memory)", NULL, OOMKIT_CLASS_CERTAIN},
    {"CUDA error: out of memory", NULL, OOMKIT_CLASS_CERTAIN},
    {"HIP error: out of memory", NULL, OOMKIT_CLASS_CERTAIN},
    {"CUDA driver error: out of memory", NULL, OOMKIT_CLASS_CERTAIN},
    {"HIP driver error: out of memory", NULL, OOMKIT_CLASS_CERTAIN},
    {"UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY", NULL, OOMKIT_CLASS_CERTAIN},
    {"Triton Error [CUDA]: out of memory", NULL, OOMKIT_CLASS_CERTAIN},
    {"Triton Error [HIP]", "out of memory", OOMKIT_CLASS_CERTAIN},

    /* Libraries with workspaces of their own. */
    {"CUBLAS_STATUS_ALLOC_FAILED", NULL, OOMKIT_CLASS_CERTAIN},
    {"CUDNN_STATUS_ALLOC_FAILED", NULL, OOMKIT_CLASS_CERTAIN},
    {"CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", NULL,
     OOMKIT_CLASS_CERTAIN},
    {"CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", NULL, OOMKIT_CLASS_CERTAIN},
    {"CUSOLVER_STATUS_ALLOC_FAILED", NULL, OOMKIT_CLASS_CERTAIN},
    {"CUSPARSE_STATUS_ALLOC_FAILED", NULL, OOMKIT_CLASS_CERTAIN},
    {"CUSPARSE_STATUS_INSUFFICIENT_RESOURCES", NULL, OOMKIT_CLASS_CERTAIN},
    {"insufficient resources when calling `cusparse", NULL, OOMKIT_CLASS_CERTAIN},
    {"CUFFT_ALLOC_FAILED", NULL, OOMKIT_CLASS_CERTAIN},
    {"HIPBLAS_STATUS_ALLOC_FAILED", NULL, OOMKIT_CLASS_CERTAIN},
    {"HIPSOLVER_STATUS_ALLOC_FAILED", NULL, OOMKIT_CLASS_CERTAIN},
    {"HIPSPARSE_STATUS_ALLOC_FAILED", NULL, OOMKIT_CLASS_CERTAIN},
    {"HIPFFT_ALLOC_FAILED", NULL, OOMKIT_CLASS_CERTAIN},
    {"miopenStatusAllocFailed", NULL, OOMKIT_CLASS_CERTAIN},

    /* The host. */
    {"CPU out of memory. Tried to allocate ", NULL, OOMKIT_CLASS_CERTAIN},
    {"DefaultCPUAllocator: can't allocate memory", NULL, OOMKIT_CLASS_CERTAIN},
    {"DefaultCPUAllocator: not enough memory", NULL, OOMKIT_CLASS_CERTAIN},
    {"std::bad_alloc", AT_END_OF_WORD, OOMKIT_CLASS_CERTAIN},

    /* Errors that swallowed an OOM, limits that a smaller size respects, and allocators
     * that are wedged after an OOM: worth a try or two, not more. */
    {"unable to find an engine to execute this computation", NULL, OOMKIT_CLASS_MASKED},
    {"CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
     "non-contiguous input",
     NULL, OOMKIT_CLASS_MASKED},
    {"nonzero is not supported for tensors with more than INT_MAX elements", NULL,
     OOMKIT_CLASS_MASKED},
    {"Invalid buffer size: ", BEFORE_A_SIZE, OOMKIT_CLASS_MASKED},
    {"canUse32BitIndexMath", NULL, OOMKIT_CLASS_MASKED},
    {"CUDA error: invalid configuration argument", NULL, OOMKIT_CLASS_MASKED},
    {"HIP error: invalid configuration argument", NULL, OOMKIT_CLASS_MASKED},
    {"UR_RESULT_ERROR_OUT_OF_RESOURCES", NULL, OOMKIT_CLASS_MASKED},
    {"!handles_.at(i) INTERNAL ASSERT FAILED", "CUDACachingAllocator.cpp",
     OOMKIT_CLASS_MASKED},
    {"CUDA driver error: device not ready", NULL, OOMKIT_CLASS_MASKED},
    {"NVML_SUCCESS == ", "INTERNAL ASSERT FAILED", OOMKIT_CLASS_MASKED},
};

/* --- searching: no locale, no terminator needed --- */

/* Where the fragment begins in the text, or NULL. */
static const char *
find(const char *text, size_t length, const char *wanted)
{
    const size_t size = strlen(wanted);
    const char *end = text + length;
    const char *at = text;

    while ((size_t)(end - at) >= size) {
        at = memchr(at, wanted[0], (size_t)(end - at) - size + 1);
        if (at == NULL) {
            return NULL;
        }
        if (memcmp(at, wanted, size) == 0) {
            return at;
        }
        at++;
    }
    return NULL;
}

static int
has(const oomkit_exception_facts *facts, const char *wanted)
{
    return facts->text != NULL && find(facts->text, facts->length, wanted) != NULL;
}

static int
starts(const oomkit_exception_facts *facts, const char *wanted)
{
    const size_t size = strlen(wanted);
    return facts->text != NULL && facts->length >= size &&
           memcmp(facts->text, wanted, size) == 0;
}

/* --- sizes --- */

typedef struct number {
    uint64_t whole;
    uint64_t fraction; /* of 10^6 */
} number;

/* Reads digits, or digits.digits, and moves *at behind them. 1, or 0 where there is no
 * number or it does not fit. */
static int
read_number(const char **at, const char *end, number *value)
{
    const char *p = *at;
    uint64_t scale = 100000;

    *value = (number){0, 0};
    if (p == end || *p < '0' || *p > '9') {
        return 0;
    }
    for (; p < end && *p >= '0' && *p <= '9'; p++) {
        uint64_t digit = (uint64_t)(*p - '0');
        if (value->whole > (UINT64_MAX - digit) / 10) {
            return 0;
        }
        value->whole = 10 * value->whole + digit;
    }
    if (end - p >= 2 && *p == '.' && p[1] >= '0' && p[1] <= '9') {
        for (p++; p < end && *p >= '0' && *p <= '9'; p++, scale /= 10) {
            value->fraction += (uint64_t)(*p - '0') * scale;
        }
    }
    *at = p;
    return 1;
}

/* The unit at `at`, as a power of two; -1 for none. */
static int
read_unit(const char *at, const char *end)
{
    static const struct {
        const char *name;
        int shift;
    } units[] = {{" bytes", 0}, {" KiB", 10}, {" MiB", 20}, {" GiB", 30}, {" TiB", 40},
                 {" KB", 10},   {" MB", 20},  {" GB", 30}}; /* MPS writes these */
    size_t i;

    for (i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
        size_t size = strlen(units[i].name);
        if ((size_t)(end - at) >= size && memcmp(at, units[i].name, size) == 0) {
            return units[i].shift;
        }
    }
    return -1;
}

/* "2.00 GiB" at the beginning of [at, end). 1 and *bytes, or 0. */
static int
read_size(const char *at, const char *end, uint64_t *bytes)
{
    number value;
    uint64_t rest;
    int shift;

    if (!read_number(&at, end, &value)) {
        return 0;
    }
    shift = read_unit(at, end);
    if (shift < 0 || value.whole > UINT64_MAX >> shift) {
        return 0;
    }
    rest = (value.fraction << shift) / 1000000; /* below 2^20 << 40 */
    *bytes = (value.whole << shift) + rest; /* rest is less than one unit: it fits */
    return 1;
}

/* --- classes --- */

static int
is_letter(char c)
{
    return c == '_' || (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') ||
           (c >= 'a' && c <= 'z');
}

/* Does what has to follow `row->text` follow it somewhere? */
static int
is_followed(const oomkit_exception_facts *facts, const fragment *row)
{
    const char *end = facts->text + facts->length, *at = facts->text;
    uint64_t bytes;

    while ((at = find(at, (size_t)(end - at), row->text)) != NULL) {
        at += strlen(row->text);
        if (row->also == AT_END_OF_WORD ? at == end || !is_letter(*at)
                                        : read_size(at, end, &bytes)) {
            return 1;
        }
    }
    return 0;
}

static int
matches(const oomkit_exception_facts *facts, const fragment *row)
{
    if (!has(facts, row->text)) {
        return 0;
    }
    if (row->also == AT_END_OF_WORD || row->also == BEFORE_A_SIZE) {
        return is_followed(facts, row);
    }
    return row->also == NULL || has(facts, row->also);
}

static oomkit_class
by_text(const oomkit_exception_facts *facts)
{
    size_t i;

    for (i = 0; i < sizeof(fragments) / sizeof(fragments[0]); i++) {
        if (matches(facts, &fragments[i])) {
            return fragments[i].class_;
        }
    }
    return OOMKIT_CLASS_OTHER;
}

int
oomkit_classify_sticky(long code)
{
    /* Beside faults of a kernel: memory or a link that could not be corrected (214,
     * 220), a kernel that ran too long (702), and tensor memory that leaked (721). */
    return code == 46 || code == 214 || code == 220 || code == 700 || code == 702 ||
           code == 709 || code == 710 || (code >= 714 && code <= 719) || code == 721;
}

static oomkit_class
by_code(const oomkit_exception_facts *facts)
{
    if (!facts->has_error_code) {
        return by_text(facts);
    }
    if (oomkit_classify_sticky(facts->error_code)) {
        return OOMKIT_CLASS_STICKY;
    }
    /* Other backends number their errors differently and raise the same type. */
    if (facts->error_code == 2 &&
        (starts(facts, "CUDA error") || starts(facts, "HIP error"))) {
        return OOMKIT_CLASS_CERTAIN;
    }
    return by_text(facts);
}

/* What a worker could not allocate is not for the step to save on, and what its device
 * lost is not lost here. */
static oomkit_class
in_worker(oomkit_class class_)
{
    if (class_ == OOMKIT_CLASS_CERTAIN || class_ == OOMKIT_CLASS_MASKED) {
        return OOMKIT_CLASS_NEVER;
    }
    return class_ == OOMKIT_CLASS_STICKY ? OOMKIT_CLASS_OTHER : class_;
}

oomkit_class
oomkit_classify(const oomkit_exception_facts *facts)
{
    oomkit_class class_ = OOMKIT_CLASS_OTHER;

    switch (facts->kind) {
    case OOMKIT_EXCEPTION_TORCH_OOM:
    case OOMKIT_EXCEPTION_MEMORY:
        class_ = OOMKIT_CLASS_CERTAIN;
        break;
    case OOMKIT_EXCEPTION_ACCELERATOR:
        class_ = by_code(facts);
        break;
    case OOMKIT_EXCEPTION_RUNTIME:
        class_ = by_text(facts);
        break;
    case OOMKIT_EXCEPTION_DISTRIBUTED:
        return has(facts, "out of memory") ? OOMKIT_CLASS_NEVER : OOMKIT_CLASS_OTHER;
    case OOMKIT_EXCEPTION_OTHER:
        return OOMKIT_CLASS_OTHER;
    }
    return has(facts, "DataLoader worker") ? in_worker(class_) : class_;
}

const char *
oomkit_class_name(oomkit_class class_)
{
    switch (class_) {
    case OOMKIT_CLASS_CERTAIN:
        return "certain";
    case OOMKIT_CLASS_MASKED:
        return "masked";
    case OOMKIT_CLASS_STICKY:
        return "sticky";
    case OOMKIT_CLASS_NEVER:
        return "never";
    case OOMKIT_CLASS_OTHER:
        break;
    }
    return "other";
}

int
oomkit_classify_restarts(const char *text, size_t length)
{
    /* What accelerate 1.15 looks for, word by word. */
    static const char *const statements[] = {
        " out of memory.", "MPS backend out of memory",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
        "DefaultCPUAllocator: can't allocate memory",
        "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed"};
    size_t i;

    for (i = 0; text != NULL && i < sizeof(statements) / sizeof(statements[0]); i++) {
        if (find(text, length, statements[i]) != NULL) {
            return 1;
        }
    }
    return 0;
}

/* --- sizes in a message --- */

/* The first size that follows one of the leads, in the order of the leads. */
static int
follows(const char *text, size_t length, const char *const *leads, size_t count,
        uint64_t *bytes)
{
    const char *end, *at;
    size_t i;

    if (text == NULL) {
        return 0;
    }
    end = text + length;
    for (i = 0; i < count; i++) {
        at = text;
        while ((at = find(at, (size_t)(end - at), leads[i])) != NULL) {
            at += strlen(leads[i]);
            if (read_size(at, end, bytes)) {
                return 1;
            }
        }
    }
    return 0;
}

int
oomkit_classify_requested(const char *text, size_t length, uint64_t *bytes)
{
    /* The first has bytes, the others are rounded to two decimals. The last is numpy's.
     */
    static const char *const leads[] = {"you tried to allocate ", "Tried to allocate ",
                                        "Unable to allocate "};

    return follows(text, length, leads, sizeof(leads) / sizeof(leads[0]), bytes);
}

int
oomkit_classify_allocated(const char *text, size_t length, uint64_t *bytes)
{
    /* The CUDA allocator's, and that of oomkit's own for the CPU. */
    static const char *const leads[] = {"Of the allocated memory ",
                                        " bytes), of which "};

    return follows(text, length, leads, sizeof(leads) / sizeof(leads[0]), bytes);
}
