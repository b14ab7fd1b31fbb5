/* Is this error out-of-memory, and may it be retried? The only place that knows the
 * messages of PyTorch and of the libraries below it. */
#ifndef OOMKIT_CORE_CLASSIFY_H
#define OOMKIT_CORE_CLASSIFY_H

#include <stddef.h>
#include <stdint.h>

typedef enum oomkit_class {
    OOMKIT_CLASS_OTHER = 0, /* not OOM: passes through untouched */
    OOMKIT_CLASS_CERTAIN,   /* OOM: recover and retry */
    OOMKIT_CLASS_MASKED,    /* probably OOM under another name: retry twice at most */
    OOMKIT_CLASS_STICKY,    /* the device context is lost: never retry */
    OOMKIT_CLASS_NEVER      /* OOM, but a smaller micro-batch cannot help */
} oomkit_class;

/* What kind of Python exception it is; chosen by type, before any text is read. */
typedef enum oomkit_exception_kind {
    OOMKIT_EXCEPTION_OTHER = 0,   /* never OOM, whatever it says */
    OOMKIT_EXCEPTION_TORCH_OOM,   /* torch.OutOfMemoryError */
    OOMKIT_EXCEPTION_ACCELERATOR, /* torch.AcceleratorError: see error_code */
    OOMKIT_EXCEPTION_RUNTIME,     /* RuntimeError and its other subclasses */
    OOMKIT_EXCEPTION_MEMORY,      /* MemoryError, numpy's included */
    OOMKIT_EXCEPTION_DISTRIBUTED  /* torch.distributed.DistBackendError */
} oomkit_exception_kind;

typedef struct oomkit_exception_facts {
    oomkit_exception_kind kind;
    int has_error_code;
    long error_code;
    const char *text; /* UTF-8, need not be terminated; may be NULL */
    size_t length;    /* bytes */
} oomkit_exception_facts;

oomkit_class
oomkit_classify(const oomkit_exception_facts *facts);

/* Does the text of a RuntimeError make accelerate's find_executable_batch_size try a
 * smaller size? Looser than oomkit_classify: for what replaces that decorator alone,
 * which starts its function anew and has nothing to put back. */
int
oomkit_classify_restarts(const char *text, size_t length);

/* Is this a code of CUDA and HIP after which every later call fails? */
int
oomkit_classify_sticky(long code);

/* "certain", "masked", "sticky", "never", "other". */
const char *
oomkit_class_name(oomkit_class class_);

/* The request in bytes out of a message: exact where the text has bytes ("you tried to
 * allocate N bytes"), else from "Tried to allocate 2.00 GiB". 1 found, 0 not. */
int
oomkit_classify_requested(const char *text, size_t length, uint64_t *bytes);

/* What was allocated when the request failed, rounded to two decimals of its unit. What
 * can be measured later is less: temporaries die with the frames. 1 found, 0 not. */
int
oomkit_classify_allocated(const char *text, size_t length, uint64_t *bytes);

#endif
