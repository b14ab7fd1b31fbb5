/* accum: what a call and a site know of losses. */
#ifndef OOMKIT_CALL_LOSS_TYPES_H
#define OOMKIT_CALL_LOSS_TYPES_H

#include "../py/state.h"

/* The value of a loss as it was: bytes of a scalar on the CPU, else a copy of the
 * tensor. */
typedef struct oomkit_loss {
    unsigned char bytes[8];
    uint32_t size;    /* of the bytes; 0 without */
    PyObject *tensor; /* owned, or NULL */
    uint32_t version; /* of the tensor, where it is no copy */
} oomkit_loss;

/* What a site knows of its losses, and what it has said. */
typedef struct oomkit_loss_site {
    oomkit_loss whole;  /* of the last whole call (on a device: of one of the last) */
    oomkit_loss before; /* and of the one before */
    int64_t rows;       /* of that call */
    uint32_t size;      /* bytes of the last loss that was read: tried first */
    uint8_t compared, labels_said, groups_said;
} oomkit_loss_site;

/* Of one call. */
typedef struct oomkit_losses {
    double sum, mean;      /* of the micro-batches' losses: plain, and by rows */
    double largest;        /* share of the mean, by absolute value */
    double *group_weights; /* owned: slices x groups where weight= returns several */
    Py_ssize_t groups;     /* how many; 0: one number for all backwards */
    int64_t seen;          /* micro-batches in `sum` */
    int counts_items;      /* num_items_in_batch was passed, so the loss is a sum */
    int is_sum;            /* micro-batches weigh 1 */
    int said;              /* that they are of another kind */
    int is_nan;            /* the one whose backward runs now, in a split call */
    double made, scale;    /* of a replay: the losses by their weights, the largest */
    double tolerance;      /* what rounding explains there */
    int64_t replayed;      /* micro-batches in `made` */
    int32_t dtype;         /* of their losses */
    PyObject *rows;        /* owned: what compares those of a replay, or NULL */
    PyObject *const *on_trial; /* borrowed: of the proof that runs, where it has its
                                  weights; NULL without one */
} oomkit_losses;

#endif
