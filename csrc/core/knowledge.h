/* What is known about the memory of one shape of batch, and what follows from it for a
 * micro-batch of another size. Plain numbers: nothing here allocates or asks a device.
 *
 * Two roles, because gradients accumulate: the first micro-batch of a step finds none
 * (unless the caller had some), the later ones find those of the whole model. Where
 * gradients rival activations a size that fits first does not fit later. */
#ifndef OOMKIT_CORE_KNOWLEDGE_H
#define OOMKIT_CORE_KNOWLEDGE_H

#include "status.h"

#include <stdint.h>

#define OOMKIT_POINTS 4
#define OOMKIT_ROLES 2

typedef enum oomkit_role { OOMKIT_FIRST = 0, OOMKIT_LATER = 1 } oomkit_role;

/* Highest allocation of forward and backward above what was there before the step. The
 * optimizer's is kept apart: it does not grow with rows. */
typedef struct oomkit_point {
    int64_t rows;
    uint64_t bytes; /* > 0 */
} oomkit_point;

/* Of micro-batches of one role. Room: bytes between what was allocated before the step
 * and the budget, OOMKIT_UNKNOWN without one. */
typedef struct oomkit_sizes {
    int64_t largest_ok;      /* rows; 0 = none */
    int64_t smallest_failed; /* rows; 0 = none */
    uint64_t ok_room, failed_room;
    oomkit_point points[OOMKIT_POINTS]; /* by rows, smallest first */
    int64_t count;                      /* of points */
} oomkit_sizes;

/* The highest rung of the ladder: what accumulates takes no room of a micro-batch's. */
#define OOMKIT_RUNG_NONE_BESIDE 5

/* What the updates of a call have come to, so that another run begins there. All zeros:
 * they were plain, or it is not known. */
typedef struct oomkit_update_known {
    uint32_t rung;   /* OOMKIT_RUNG_UPDATE, or that of state on the host */
    uint32_t failed; /* one ran out of memory where it was to fit: so many in parts */
    uint32_t grads;  /* gradients go to the host as well */
    int64_t most;    /* parameters of a part; 0: any */
    uint64_t slice_bytes;  /* what is larger goes by rows, so many bytes; 0: nothing */
    uint64_t budget_bytes; /* in which all this was so; OOMKIT_UNKNOWN */
} oomkit_update_known;

/* Per shape of batch. All zeros is a valid beginning; may be written to a file. */
typedef struct oomkit_knowledge {
    oomkit_sizes roles[OOMKIT_ROLES];
    uint32_t successes; /* calls that worked */
    uint32_t failures;  /* OOMs before the first of them */
    uint32_t missed;    /* OOMs since, of sizes that had never worked */
    uint32_t fooled;    /* of those the ones that were predicted to fit */
    uint32_t late;      /* the same of sizes that had; and thrashing */
    uint32_t healthy;   /* calls that worked since the plan last changed */
    uint32_t retried; /* calls in a row in which the device's allocator had to retry */
    int64_t batch, k; /* rows and micro-batches of the last call that worked */
    uint64_t optimizer_bytes; /* highest above the baseline; 0 = not measured */
    int32_t borrowed; /* bounds and points are those of a neighbour, made to fit */
    int32_t recalled; /* of an earlier run: nothing of this one has borne it out yet */
    double margin;    /* share of a peak by which predictions were too low; fades */
    uint32_t rung;    /* of the ladder, that all of this is of; 0 = split alone */
    uint64_t climb_room;        /* between baseline and budget when it was climbed to */
    oomkit_update_known update; /* of the last call that worked */
} oomkit_knowledge;

/* What one finished call has shown. Rows 0 = no such micro-batch; bytes above the
 * baseline, 0 = not measured. */
typedef struct oomkit_measured {
    int64_t batch, k;
    int64_t rows[OOMKIT_ROLES];
    uint64_t bytes[OOMKIT_ROLES];
    uint64_t optimizer_bytes;
    uint64_t baseline_bytes, budget_bytes; /* OOMKIT_UNKNOWN where they are */
    uint64_t gradient_bytes;               /* of all parameters; 0 = not known */
    uint32_t alloc_retries;                /* of the allocator during the call */
    oomkit_update_known update;
} oomkit_measured;

/* Are the numbers in range? What comes out of a file may be anything. */
int
oomkit_knowledge_valid(const oomkit_knowledge *known);

/* Bytes between baseline and budget; OOMKIT_UNKNOWN without a budget. */
uint64_t
oomkit_room(uint64_t baseline_bytes, uint64_t budget_bytes);

/* Is there as much room as there was then, but for what changes from step to step? Room
 * that was not known then says nothing about one that is. */
int
oomkit_room_enough(uint64_t room, uint64_t then);

/* Bytes above the baseline that a micro-batch of `rows` rows will need: a ray through
 * the baseline and one point, a secant through the two largest. OOMKIT_UNKNOWN without
 * points. */
uint64_t
oomkit_predict(const oomkit_knowledge *known, oomkit_role role, int64_t rows,
               uint64_t gradient_bytes);

/* Begins with what is known of a shape whose rows take `ratio` times what rows of
 * `neighbour` take (bytes of the batch itself): a larger neighbour's sizes and peaks as
 * they are, a smaller one's scaled up. */
void
oomkit_know_neighbour(oomkit_knowledge *known, const oomkit_knowledge *neighbour,
                      double ratio);

/* A micro-batch has finished, whatever became of its call. Bytes 0: not measured. */
void
oomkit_know_measured(oomkit_knowledge *known, oomkit_role role, int64_t rows,
                     uint64_t bytes, uint64_t baseline_bytes, uint64_t budget_bytes,
                     uint64_t gradient_bytes);

/* Another rung: the search for sizes begins again. `room` in bytes, OOMKIT_UNKNOWN. */
void
oomkit_know_rung(oomkit_knowledge *known, uint32_t rung, uint64_t room);

/* Is there so much more room than when its rung was climbed to that it is worth trying
 * without? */
int
oomkit_rung_is_roomy(const oomkit_knowledge *known, uint64_t room);

/* Does what an earlier run has found of updates hold in this budget? With so much more
 * that it is worth trying without it does not. */
int
oomkit_update_known_holds(const oomkit_knowledge *known, uint64_t budget_bytes);

/* A call has finished. */
void
oomkit_know_worked(oomkit_knowledge *known, const oomkit_measured *measured);

/* A micro-batch of `rows` rows ran out of memory (or thrashed). */
void
oomkit_know_failed(oomkit_knowledge *known, oomkit_role role, int64_t rows,
                   uint64_t baseline_bytes, uint64_t budget_bytes,
                   uint64_t gradient_bytes);

#endif
