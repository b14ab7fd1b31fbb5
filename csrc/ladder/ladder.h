/* The rungs of the ladder, in the order in which they are climbed. */
#ifndef OOMKIT_LADDER_LADDER_H
#define OOMKIT_LADDER_LADDER_H

#include "../call/call.h"

/* A plan's `rung`, and a record's: the highest that was used. Each allows those below
 * it, which act where they are needed. */
typedef enum oomkit_rung {
    OOMKIT_RUNG_SPLIT = 0,   /* smaller micro-batches, and nothing else */
    OOMKIT_RUNG_UPDATE,      /* "update": an optimizer's step() in parts */
    OOMKIT_RUNG_STATE,       /* "state": optimizer state on the host */
    OOMKIT_RUNG_ACTIVATIONS, /* "activations": saved tensors on the host */
    OOMKIT_RUNG_RECOMPUTE    /* "recompute": modules that repeat, checkpointed */
} oomkit_rung;

#define OOMKIT_RUNGS 5

#endif
