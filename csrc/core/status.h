/* Every outcome of the core and of the bridge, as one enumeration. */
#ifndef OOMKIT_CORE_STATUS_H
#define OOMKIT_CORE_STATUS_H

#include <stdint.h>

#define OOMKIT_UNKNOWN UINT64_MAX /* bytes, rows: nothing was measured */

enum {
    OOMKIT_OK = 0,
    OOMKIT_EREFUSED = -1, /* a bound was reached: budget, slots, attempts */
    OOMKIT_EOOM = -2,     /* an allocation of ours failed, or a planned fault fired */
    OOMKIT_EINVAL = -3,   /* an argument is out of range */
    OOMKIT_EUNSUPPORTED = -4, /* not available on this build, device or allocator */
    OOMKIT_EFAILED = -5       /* the library below reported an error of its own */
};

#endif
