/* What a failed call leaves with the CUDA or HIP runtime.
 *
 * The runtime keeps the last error of each thread until somebody takes it, and torch
 * looks for it before each allocation from the driver: an error of memory that somebody
 * else's library left there would come out of the retry. One that comes back after it
 * was taken is sticky: the context is lost. An error of another kind is nobody's to
 * swallow: it stays, and the retry reports it. The runtime is neither linked nor loaded
 * here, it is found where torch has loaded it. */
#include "device.h"
#include "../py/tensor.h"
#include "../core/classify.h"

#include <dlfcn.h>

#define OUT_OF_MEMORY 2 /* cudaErrorMemoryAllocation, hipErrorOutOfMemory */

typedef int (*error_function)(void);

/* The runtime's two ways to the last error of the calling thread. */
typedef struct error_functions {
    error_function take, peek;
} error_functions;

/* A function's address comes out of dlsym as that of an object. 1 or 0. */
static int
symbol_get(void *library, const char *name, error_function *function)
{
    void *symbol = dlsym(library, name);

    memcpy(function, &symbol, sizeof(symbol));
    return symbol != NULL;
}

/* 1 or 0. */
static int
find_functions(error_functions *found)
{
    static const char *const names[][3] = {
        {"libcudart.so.13", "cudaGetLastError", "cudaPeekAtLastError"},
        {"libcudart.so.12", "cudaGetLastError", "cudaPeekAtLastError"},
        {"libamdhip64.so.7", "hipGetLastError", "hipPeekAtLastError"},
        {"libamdhip64.so.6", "hipGetLastError", "hipPeekAtLastError"}};
    size_t i;

    for (i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        void *library = dlopen(names[i][0], RTLD_NOLOAD | RTLD_LAZY);
        if (library == NULL) {
            continue;
        }
        if (symbol_get(library, names[i][1], &found->take) &&
            symbol_get(library, names[i][2], &found->peek)) {
            return 1; /* it stays: torch needs it as long as there is a device */
        }
        dlclose(library);
    }
    return 0;
}

int
oomkit_device_is_lost(oomkit_state *st, oomkit_device device)
{
    error_functions last;
    int error;

    if (device.type != OOMKIT_DEVICE_CUDA || !oomkit_device_ready(st, device)) {
        return 0;
    }
    if (!find_functions(
            &last)) { /* linked statically into torch, which takes its own */
        return 0;
    }
    error = last.peek();
    if (error != OUT_OF_MEMORY) {
        return oomkit_classify_sticky(error);
    }
    (void)last.take();
    return last.peek() != 0;
}
