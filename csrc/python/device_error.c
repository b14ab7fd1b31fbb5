/* What a failed call leaves with the CUDA or HIP runtime.
 *
 * The runtime keeps the last error until somebody takes it, and torch looks for it
 * before each allocation from the driver: an error that somebody else's library left
 * there would come out of the retry. One that comes back after it was taken is sticky:
 * the context is lost. The runtime is neither linked nor loaded here, it is found where
 * torch has loaded it. */
#include "device.h"

#include <dlfcn.h>

typedef int (*last_error_function)(void);

static last_error_function
find_last_error(void)
{
    static const char *const names[][2] = {{"libcudart.so.13", "cudaGetLastError"},
                                           {"libcudart.so.12", "cudaGetLastError"},
                                           {"libamdhip64.so.7", "hipGetLastError"},
                                           {"libamdhip64.so.6", "hipGetLastError"}};
    size_t i;

    for (i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        void *library = dlopen(names[i][0], RTLD_NOLOAD | RTLD_LAZY);
        void *symbol = library == NULL ? NULL : dlsym(library, names[i][1]);
        last_error_function found;
        if (symbol != NULL) {
            /* The library stays: torch needs it as long as there is a device. A
             * function's address comes out of dlsym as that of an object. */
            memcpy(&found, &symbol, sizeof(found));
            return found;
        }
        if (library != NULL) {
            dlclose(library);
        }
    }
    return NULL;
}

int
oomkit_device_is_lost(oomkit_state *st, oomkit_device device)
{
    last_error_function last_error;
    int first, again;

    if (device.type != OOMKIT_DEVICE_CUDA || !oomkit_device_ready(st, device)) {
        return 0;
    }
    last_error = find_last_error();
    if (last_error == NULL) { /* linked statically into torch, which takes its own */
        return 0;
    }
    first = last_error();
    again = first != 0 ? last_error() : 0;
    return again != 0;
}
