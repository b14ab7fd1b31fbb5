#include "check.h"

#include "classify.h"

#include <stdlib.h>
#include <string.h>

enum { NO_CODE = -12345 };

static oomkit_class
classify(oomkit_exception_kind kind, long code, const char *text)
{
    oomkit_exception_facts facts = {kind, code != NO_CODE, code, text,
                                    text == NULL ? 0 : strlen(text)};
    if (code == NO_CODE) {
        facts.error_code = 2; /* must not be looked at */
    }
    return oomkit_classify(&facts);
}

static oomkit_class
runtime(const char *text)
{
    return classify(OOMKIT_EXCEPTION_RUNTIME, NO_CODE, text);
}

/* --- whole messages, as recorded --- */

static const char *const certain[] = {
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    "23.68 "
    "GiB of which 1.12 GiB is free. Including non-PyTorch memory, this process has "
    "22.54 "
    "GiB memory in use.",
    "HIP out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of "
    "63.98 "
    "GiB of which 12.00 MiB is free.",
    "XPU out of memory. Tried to allocate 48.00 GiB. GPU 0 has a total capacity of "
    "15.91 "
    "GiB.",
    "MPS backend out of memory (MPS allocated: 8.93 GB, other allocations: 1.20 GB, "
    "max "
    "allowed: 9.07 GB). Tried to allocate 256 bytes on shared pool. Use "
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory "
    "allocations "
    "(may cause system failure).",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at "
    "some "
    "other API call, so the stacktrace below might be incorrect.",
    "HIP error: out of memory",
    "CUDA driver error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling "
    "`cusolverDnCreate(handle)`",
    "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`",
    "CUDA error: insufficient resources when calling `cusparseSpMM(handle)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "miopenStatusAllocFailed",
    "CUDA error: HIPSOLVER_STATUS_ALLOC_FAILED when calling "
    "`hipsolverDnCreate(handle)`",
    "CUDA error: HIPSPARSE_STATUS_ALLOC_FAILED when calling `hipsparseCreate(handle)`",
    "cuFFT error: HIPFFT_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUDA error: CUSPARSE_STATUS_INSUFFICIENT_RESOURCES when calling `cusparseSpSM(x)`",
    "HIP driver error: out of memory",
    "Triton Error [HIP]:  Code: 2, Message: out of memory",
    "CPU out of memory. Tried to allocate 4.00 MiB.",
    "Triton Error [CUDA]: out of memory",
    "Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate "
    "memory: you tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate "
    "memory)",
    "[enforce fail at alloc_cpu.cpp:75] . DefaultCPUAllocator: not enough memory: you "
    "tried to allocate 4000000000000 bytes.",
    "CPU out of memory. Tried to allocate 4.00 MiB. DefaultCPUAllocator: can't "
    "allocate "
    "memory: you tried to allocate 4194304 bytes. The CPU memory budget is 1.00 MiB.",
    "std::bad_alloc",
    /* as a compiler's wrapper quotes it */
    "Dynamo failed to run FX node with fake tensors: got OutOfMemoryError('CUDA out of "
    "memory. Tried to allocate 20.00 MiB.')",
};

static const char *const masked[] = {
    "GET was unable to find an engine to execute this computation",
    "FIND was unable to find an engine to execute this computation",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
    "non-contiguous input.",
    "nonzero is not supported for tensors with more than INT_MAX elements, file a "
    "support "
    "request",
    "Invalid buffer size: 17.38 GiB",
    "Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true, "
    "but "
    "got false.",
    "CUDA error: invalid configuration argument",
    "HIP error: invalid configuration argument",
    "!handles_.at(i) INTERNAL ASSERT FAILED at "
    "\"/pytorch/c10/cuda/CUDACachingAllocator.cpp\":432, please report a bug to "
    "PyTorch.",
    "CUDA driver error: device not ready",
    "NVML_SUCCESS == r INTERNAL ASSERT FAILED at "
    "\"/pytorch/c10/cuda/CUDACachingAllocator.cpp\":1131, please report a bug",
    "Native API returns: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
};

static const char *const sticky[] = {
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be",
    "CUDA error: misaligned address",
    "CUDA error: unspecified launch failure",
    "CUDA error: an illegal instruction was encountered",
    "CUDA error: invalid program counter",
    "HIP error: unspecified launch failure",
    "HIP error: an illegal memory access was encountered",
    "HIP error: device-side assert triggered",
};

static const char *const never[] = {
    "ncclUnhandledCudaError: Call to CUDA function failed.\nHIP failure 'out of "
    "memory'",
    "DataLoader worker (pid 4242) is killed by signal: Killed. ",
    "DataLoader worker (pid 4242) is killed by signal: Bus error. It is possible that "
    "dataloader's workers are out of shared memory. Please try to raise your shared "
    "memory limit.",
    "unable to mmap 4096 bytes from file </torch_99_1>: Cannot allocate memory (12)",
    "unable to allocate shared memory(shm) for file </torch_1_2>: No space left on "
    "device "
    "(28)",
    "Unexpected bus error encountered in worker. This might be caused by insufficient "
    "shared memory (shm).",
    "Caught RuntimeError in DataLoader worker process 1.\nOriginal Traceback (most "
    "recent "
    "call last):\n[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: "
    "can't "
    "allocate memory: you tried to allocate 8 bytes.",
    "NCCL error in: ProcessGroupNCCL.cpp:3384, ncclUnhandledCudaError: Call to CUDA "
    "function failed.\nLast error:\nCuda failure 2 'out of memory'",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 'out of "
    "memory'",
};

static const char *const other[] = {
    "",
    "the user ran out of memory for ideas",
    "out of memory",
    "Out of Memory",
    "cuda OUT OF MEMORY",
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "CUDA error: invalid device ordinal",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "out of resource: shared memory, Required: 147456, Hardware limit: 101376. "
    "Reducing "
    "block sizes or `num_stages` may help.",
    "triton.runtime.errors.OutOfResources: out of resource: shared memory; earlier: "
    "CUDA "
    "out of memory. Tried to allocate 1.00 GiB",
    "Storage size calculation overflowed with sizes=[4611686018427387904, 4]",
    "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: "
    "alloc_cpu() seems to have been called with negative number: 18446744073709551615",
    "Caught RuntimeError in DataLoader worker process 0.\nstack expects each tensor to "
    "be "
    "equal size",
    "Caught RuntimeError in DataLoader worker process 0.\nCUDA error: device-side "
    "assert "
    "triggered",
    "DataLoader worker (pid 4242) is killed by signal: Segmentation fault. ",
    "DataLoader worker (pid(s) 17, 18) exited unexpectedly",
    "unable to mmap 4096 bytes from file <weights.pt>: Permission denied (13)",
    "x INTERNAL ASSERT FAILED at \"CUDACachingAllocator.cpp\":1, please report a bug",
    "NVML_SUCCESS == 0",
    "trying to allocate 12 seats",
    "the buffer's size is invalid",
};

#define CHECK_ALL(list, class_)                                                        \
    do {                                                                               \
        size_t i_;                                                                     \
        for (i_ = 0; i_ < sizeof(list) / sizeof((list)[0]); i_++) {                    \
            if (runtime((list)[i_]) != (class_)) {                                     \
                printf("message: %s\n", (list)[i_]);                                   \
            }                                                                          \
            CHECK(runtime((list)[i_]) == (class_));                                    \
        }                                                                              \
    } while (0)

static void
test_messages(void)
{
    size_t i;

    CHECK_ALL(certain, OOMKIT_CLASS_CERTAIN);
    CHECK_ALL(masked, OOMKIT_CLASS_MASKED);
    CHECK_ALL(sticky, OOMKIT_CLASS_STICKY);
    CHECK_ALL(never, OOMKIT_CLASS_NEVER);
    CHECK_ALL(other, OOMKIT_CLASS_OTHER);
    for (i = 0; i < sizeof(certain) / sizeof(certain[0]); i++) {
        /* The type comes first: a ValueError is no OOM, whatever it quotes. */
        CHECK(classify(OOMKIT_EXCEPTION_OTHER, NO_CODE, certain[i]) ==
              OOMKIT_CLASS_OTHER);
        CHECK(classify(OOMKIT_EXCEPTION_OTHER, 2, certain[i]) == OOMKIT_CLASS_OTHER);
        CHECK(classify(OOMKIT_EXCEPTION_ACCELERATOR, NO_CODE, certain[i]) ==
              OOMKIT_CLASS_CERTAIN);
    }
}

static void
test_types_that_say_it_all(void)
{
    const oomkit_exception_kind kinds[] = {OOMKIT_EXCEPTION_TORCH_OOM,
                                           OOMKIT_EXCEPTION_MEMORY};
    size_t i;

    for (i = 0; i < 2; i++) {
        CHECK(classify(kinds[i], NO_CODE, NULL) == OOMKIT_CLASS_CERTAIN);
        CHECK(classify(kinds[i], NO_CODE, "") == OOMKIT_CLASS_CERTAIN);
        CHECK(classify(kinds[i], NO_CODE, "whatever") == OOMKIT_CLASS_CERTAIN);
        CHECK(classify(kinds[i], NO_CODE, certain[0]) == OOMKIT_CLASS_CERTAIN);
        CHECK(classify(
                  kinds[i], NO_CODE,
                  "Caught OutOfMemoryError in DataLoader worker process 0.\nCUDA out "
                  "of memory. Tried to allocate 1.00 GiB") == OOMKIT_CLASS_NEVER);
    }
    CHECK(runtime(NULL) == OOMKIT_CLASS_OTHER);
    CHECK(classify(OOMKIT_EXCEPTION_ACCELERATOR, NO_CODE, NULL) == OOMKIT_CLASS_OTHER);
    CHECK(classify(OOMKIT_EXCEPTION_OTHER, NO_CODE, NULL) == OOMKIT_CLASS_OTHER);
}

static void
test_distributed(void)
{
    const oomkit_exception_kind kind = OOMKIT_EXCEPTION_DISTRIBUTED;

    CHECK(classify(kind, NO_CODE,
                   "NCCL error: ncclUnhandledCudaError: Call to CUDA function "
                   "failed.\nCuda failure 2 'out of memory'") == OOMKIT_CLASS_NEVER);
    CHECK(classify(kind, NO_CODE, certain[0]) == OOMKIT_CLASS_NEVER);
    CHECK(classify(kind, NO_CODE, "Watchdog caught collective operation timeout") ==
          OOMKIT_CLASS_OTHER);
    CHECK(classify(kind, NO_CODE, NULL) == OOMKIT_CLASS_OTHER);
}

static void
test_error_codes(void)
{
    const oomkit_exception_kind kind = OOMKIT_EXCEPTION_ACCELERATOR;
    const long lost[] = {46,  214, 220, 700, 702, 709, 710,
                         714, 715, 716, 717, 718, 719, 721};
    const long kept[] = {0,   1,   3,   9,   45,  47,  213, 215, 219, 221,
                         699, 701, 703, 708, 711, 713, 720, 722, -1};
    size_t i;

    for (i = 0; i < sizeof(lost) / sizeof(lost[0]); i++) {
        CHECK(classify(kind, lost[i], NULL) == OOMKIT_CLASS_STICKY);
        CHECK(classify(kind, lost[i], "CUDA error: x") == OOMKIT_CLASS_STICKY);
        CHECK(classify(kind, lost[i], certain[0]) == OOMKIT_CLASS_STICKY);
        CHECK(classify(OOMKIT_EXCEPTION_RUNTIME, lost[i], "x") == OOMKIT_CLASS_OTHER);
    }
    for (i = 0; i < sizeof(kept) / sizeof(kept[0]); i++) {
        CHECK(classify(kind, kept[i], "CUDA error: x") == OOMKIT_CLASS_OTHER);
    }
    CHECK(classify(kind, 2, "CUDA error: Speicher voll") == OOMKIT_CLASS_CERTAIN);
    CHECK(classify(kind, 2, "HIP error: Speicher voll") == OOMKIT_CLASS_CERTAIN);
    CHECK(classify(kind, 2, "index out of range") == OOMKIT_CLASS_OTHER);
    CHECK(classify(kind, 2, "about CUDA error handling") == OOMKIT_CLASS_OTHER);
    CHECK(classify(kind, 2, "CUDA err") == OOMKIT_CLASS_OTHER);
    CHECK(classify(kind, 2, NULL) == OOMKIT_CLASS_OTHER);
    CHECK(classify(kind, NO_CODE, "CUDA error: x") == OOMKIT_CLASS_OTHER);
    CHECK(classify(kind, 9, "CUDA error: invalid configuration argument") ==
          OOMKIT_CLASS_MASKED);
    CHECK(classify(kind, 1, "CUDA error: out of memory") == OOMKIT_CLASS_CERTAIN);
}

/* The text in a block of exactly its length, where the sanitizer sees one byte more. */
static void
test_text_without_an_end(void)
{
    const char *lists[] = {certain[0], certain[3],      masked[0],
                           never[0],   "CUDA error",    "you tried to allocate 12",
                           "C",        "std::bad_alloc"};
    size_t i, length;

    for (i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
        for (length = 1; length <= strlen(lists[i]); length++) {
            char *copy = malloc(length);
            oomkit_exception_facts facts = {OOMKIT_EXCEPTION_ACCELERATOR, 1, 2, copy,
                                            length};
            uint64_t bytes;
            CHECK(copy != NULL);
            if (copy == NULL) {
                return;
            }
            memcpy(copy, lists[i], length);
            (void)oomkit_classify(&facts);
            (void)oomkit_classify_requested(copy, length, &bytes);
            free(copy);
        }
    }
    CHECK(oomkit_classify(&(oomkit_exception_facts){OOMKIT_EXCEPTION_RUNTIME, 0, 0,
                                                    "std::bad_alloc", 13}) ==
          OOMKIT_CLASS_OTHER);
}

/* A zero byte does not end the text, and a near miss does not hide a hit behind it. */
static void
test_text_is_searched_to_its_end(void)
{
    static const char zeros[] = "a\0b\0std::bad_alloc";
    oomkit_exception_facts facts = {OOMKIT_EXCEPTION_RUNTIME, 0, 0, zeros,
                                    sizeof(zeros) - 1};

    CHECK(oomkit_classify(&facts) == OOMKIT_CLASS_CERTAIN);
    CHECK(runtime("sstd::bad_std::bad_alloc") == OOMKIT_CLASS_CERTAIN);
    CHECK(runtime("no member std::bad_allocator") == OOMKIT_CLASS_OTHER);
    CHECK(runtime("CUDA error: CUDA error: out of memory") == OOMKIT_CLASS_CERTAIN);
}

static void
test_names(void)
{
    CHECK(strcmp(oomkit_class_name(OOMKIT_CLASS_OTHER), "other") == 0);
    CHECK(strcmp(oomkit_class_name(OOMKIT_CLASS_CERTAIN), "certain") == 0);
    CHECK(strcmp(oomkit_class_name(OOMKIT_CLASS_MASKED), "masked") == 0);
    CHECK(strcmp(oomkit_class_name(OOMKIT_CLASS_STICKY), "sticky") == 0);
    CHECK(strcmp(oomkit_class_name(OOMKIT_CLASS_NEVER), "never") == 0);
}

/* --- the size of the request --- */

static int
requests(const char *text, uint64_t expected)
{
    uint64_t bytes = 1;
    return oomkit_classify_requested(text, strlen(text), &bytes) == 1 &&
           bytes == expected;
}

static int
says_nothing(const char *text)
{
    uint64_t bytes = 77;
    return oomkit_classify_requested(text, text == NULL ? 0 : strlen(text), &bytes) ==
               0 &&
           bytes == 77;
}

static void
test_requested(void)
{
    const uint64_t mib = UINT64_C(1) << 20, gib = UINT64_C(1) << 30;

    CHECK(requests(certain[0], 2 * gib));
    CHECK(requests("Tried to allocate 20.50 MiB.", 20 * mib + mib / 2));
    CHECK(requests("Tried to allocate 1.50 KiB.", 1536));
    CHECK(requests("Tried to allocate 512 bytes on private pool", 512));
    CHECK(requests("Tried to allocate 3.25 GB on shared pool", 3 * gib + gib / 4));
    CHECK(requests("Tried to allocate 1.00 TiB", 1024 * gib));
    CHECK(requests("Tried to allocate 7 GiB", 7 * gib));
    CHECK(
        requests("Unable to allocate 2.00 GiB for an array with shape (1,)", 2 * gib));
    CHECK(requests("you tried to allocate 4000000000001 bytes.",
                   UINT64_C(4000000000001)));
    CHECK(requests("you tried to allocate 0 bytes.", 0));
    /* exact before rounded, wherever it stands */
    CHECK(requests(
        "CPU out of memory. Tried to allocate 4.00 MiB. DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 4194305 bytes. The budget",
        4 * mib + 1));
    CHECK(requests("Tried to allocate 4.00 MiB. you tried to allocate 4194305 bytes",
                   4194305));
    /* the first that can be read */
    CHECK(requests("Tried to allocate much. Tried to allocate 2.00 MiB", 2 * mib));
    CHECK(requests("you tried to allocate it; Tried to allocate 2.00 MiB", 2 * mib));
    CHECK(requests("Tried to allocate 1.00 MiB, Tried to allocate 2.00 MiB", mib));
    CHECK(requests("Tried to allocate 0.1234567899999 MiB", 129452));
}

static int
allocates(const char *text, uint64_t expected)
{
    uint64_t bytes = 0;
    return oomkit_classify_allocated(text, strlen(text), &bytes) == 1 &&
           bytes == expected;
}

static void
test_allocated(void)
{
    const uint64_t mib = UINT64_C(1) << 20;
    uint64_t bytes = 77;

    CHECK(
        allocates("CUDA out of memory. Tried to allocate 360.00 MiB. GPU 0 has a total "
                  "capacity of 23.56 GiB of which 88.00 MiB is free. Including "
                  "non-PyTorch memory, this process has 23.00 GiB memory in use. Of "
                  "the allocated memory 22.50 GiB is allocated by PyTorch, and 100.00 "
                  "MiB is reserved by PyTorch but unallocated.",
                  23040 * mib));
    CHECK(allocates("CPU out of memory. Tried to allocate 38.15 MiB. The CPU memory "
                    "budget is 9.54 MiB (10000000 bytes), of which 3.50 MiB are "
                    "allocated and 5.72 MiB are free.",
                    3 * mib + mib / 2));
    CHECK(oomkit_classify_allocated(certain[0], strlen(certain[0]), &bytes) == 0);
    CHECK(oomkit_classify_allocated(NULL, 0, &bytes) == 0 && bytes == 77);
}

static void
test_requests_that_cannot_be_read(void)
{
    uint64_t bytes;

    CHECK(says_nothing(NULL));
    CHECK(says_nothing(""));
    CHECK(says_nothing("out of memory"));
    CHECK(says_nothing("Tried to allocate "));
    CHECK(says_nothing("Tried to allocate 12"));
    CHECK(says_nothing("Tried to allocate 12."));
    CHECK(says_nothing("Tried to allocate .5 MiB"));
    CHECK(says_nothing("Tried to allocate -1 bytes"));
    CHECK(says_nothing("Tried to allocate 12 apples"));
    CHECK(says_nothing("Tried to allocate 2.00GiB"));
    CHECK(says_nothing("Tried to allocate 2,00 GiB"));
    CHECK(oomkit_classify_requested("you tried to allocate 12 bytes", 29, &bytes) == 0);

    CHECK(requests("you tried to allocate 18446744073709551615 bytes", UINT64_MAX));
    CHECK(says_nothing("you tried to allocate 18446744073709551616 bytes"));
    CHECK(says_nothing("you tried to allocate 99999999999999999999999999 bytes"));
    CHECK(
        requests("Tried to allocate 17179869183.00 GiB", UINT64_C(17179869183) << 30));
    CHECK(requests("Tried to allocate 17179869183.999999 GiB",
                   (UINT64_C(17179869183) << 30) + 1073740750));
    CHECK(says_nothing("Tried to allocate 17179869184.00 GiB"));
}

static int
restarts(const char *text)
{
    return oomkit_classify_restarts(text, text == NULL ? 0 : strlen(text));
}

static void
test_what_accelerate_would_start_anew_for(void)
{
    CHECK(restarts("CUDA out of memory."));
    CHECK(restarts("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This may"));
    CHECK(!restarts("out of memory"));
    CHECK(!restarts("The loss is out of memory"));
    CHECK(!restarts(""));
    CHECK(!restarts(NULL));
    CHECK(!oomkit_classify_restarts("CUDA out of memory.", 18));
}

int
main(void)
{
    test_messages();
    test_types_that_say_it_all();
    test_distributed();
    test_error_codes();
    test_text_without_an_end();
    test_text_is_searched_to_its_end();
    test_names();
    test_requested();
    test_allocated();
    test_requests_that_cannot_be_read();
    test_what_accelerate_would_start_anew_for();
    return check_report();
}
