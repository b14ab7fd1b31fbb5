/* What was proven at a site. */
#ifndef OOMKIT_CALL_PROVEN_H
#define OOMKIT_CALL_PROVEN_H

#include "../py/state.h"

#define OOMKIT_PROVEN 8    /* structures of batches for each site */
#define OOMKIT_SEQUENCES 4 /* courses of a step for each of them */

/* Rows of the batch. */
typedef struct oomkit_slice {
    int64_t start, length;
} oomkit_slice;

typedef enum {
    OOMKIT_PROVEN_NOT = 0,
    OOMKIT_PROVEN_WEAKLY, /* by losses alone: one row fits and no more */
    OOMKIT_PROVEN_HERE,   /* of gradients that say nothing of another call */
    OOMKIT_PROVEN_FULLY
} oomkit_proof_level;

/* A set of numbers that are not 0: an open table of a power of two of places, at most
 * half of them taken. */
#define OOMKIT_HASHES 4096
#define OOMKIT_PLACES 65536 /* that are kept when another proof is learnt from */

typedef struct oomkit_hashes {
    uint64_t *items; /* owned; 0: free; NULL: none yet */
    uint32_t count, room;
} oomkit_hashes;

int
oomkit_hashes_have(const oomkit_hashes *hashes, uint64_t hash);
/* 1: it was not there and is now; 0; -1 with MemoryError. A set that has OOMKIT_HASHES
 * of them forgets them before: where a number that is not there is a proof more. */
int
oomkit_hashes_add(oomkit_hashes *hashes, uint64_t hash);
/* The same, and forgets nothing: where one that is not there would be believed. */
int
oomkit_hashes_keep(oomkit_hashes *hashes, uint64_t hash);
void
oomkit_hashes_clear(oomkit_hashes *hashes);

/* What was proven at a site, for batches of one structure. */
typedef struct oomkit_proven {
    uint64_t key;
    PyObject *rule; /* owned: the weights that were found (_weights.Weigher), or NULL */
    PyObject
        *tried; /* owned: what was learnt of others (_weights.Tried); NULL before */
    uint64_t sequences[OOMKIT_SEQUENCES]; /* that were proven, 0 for none */
    uint64_t calls;                       /* since then, and that one */
    uint64_t call;                        /* the last of them that was counted */
    int64_t pieces; /* micro-batches of a call, the most whose losses were compared */
    uint8_t missed; /* how often losses were to be compared and could not be */
    uint8_t level;
    uint8_t sequence_next;
    uint8_t draws;           /* random numbers that parts of a proof can be given */
    uint8_t unseen;          /* a call does what no proof has shown: see oomkit_paths */
    uint64_t hooks;          /* that were registered by the end of the last call */
    uint64_t hooks_at;       /* that call */
    uint64_t hooks_of_micro; /* by its first micro-batch */
    oomkit_hashes kinds;     /* which operations followed which in graphs of proofs */
    oomkit_hashes silent;    /* places in them that no gradient but 0 has come to */
    oomkit_hashes heard;     /* and places among those that one has come to later */
} oomkit_proven;

/* What the graphs of a call's micro-batches have that no proof has shown. */
typedef struct oomkit_paths {
    oomkit_hashes kinds;  /* of edges, in the runs of a proof */
    PyObject *flows;      /* owned: _proof.graphs.flows.Flows, or NULL */
    uint64_t since;       /* a kind: hooks that were registered since the last call */
    uint64_t graphs;      /* of the present micro-batch, so far */
    uint64_t hooks;       /* that were registered before the first micro-batch */
    uint64_t left;        /* by the last backward: a sample of gradients, or 0 */
    oomkit_slice *proven; /* owned: rows that were proven in this call */
    Py_ssize_t count, room;
    int64_t anchor; /* where rows begin that are to be proven next, and one */
} oomkit_paths;

#endif
