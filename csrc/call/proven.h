/* What was proven at a site. */
#ifndef OOMKIT_CALL_PROVEN_H
#define OOMKIT_CALL_PROVEN_H

#include "../py/state.h"

#define OOMKIT_PROVEN 8    /* structures of batches for each site */
#define OOMKIT_SEQUENCES 4 /* courses of a step for each of them */

typedef enum {
    OOMKIT_PROVEN_NOT = 0,
    OOMKIT_PROVEN_WEAKLY, /* by losses alone: one row fits and no more */
    OOMKIT_PROVEN_HERE,   /* of gradients that say nothing of another call */
    OOMKIT_PROVEN_FULLY
} oomkit_proof_level;

/* Which operations followed which in the graphs of calls that were proven: hashes, in
 * an open table of a power of two of places, at most half of them taken. */
typedef struct oomkit_edge_kinds {
    uint64_t *hashes; /* owned; 0: free; NULL: none yet */
    uint32_t count, room;
} oomkit_edge_kinds;

/* What was proven at a site, for batches of one structure. */
typedef struct oomkit_proven {
    uint64_t key;
    PyObject *rule; /* owned: the weights that were found (_weights.Weigher), or NULL */
    PyObject
        *tried; /* owned: what was learnt of others (_weights.Tried); NULL before */
    uint64_t sequences[OOMKIT_SEQUENCES]; /* that were proven, 0 for none */
    uint64_t calls;                       /* since then, and that one */
    uint64_t call;                        /* the last of them that was counted */
    uint8_t missed; /* how often losses were to be compared and could not be */
    uint8_t level;
    uint8_t sequence_next;
    uint8_t labels; /* among them ignored ones, not as many in each micro-batch */
    uint8_t unseen; /* this call's graph has edges of kinds that no proven one had */
    uint64_t shown; /* the call in which gradients were compared last */
    oomkit_edge_kinds kinds;
} oomkit_proven;

#endif
