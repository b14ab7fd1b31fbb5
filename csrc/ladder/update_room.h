/* What an update needs, and what is left for it. */
#ifndef OOMKIT_LADDER_UPDATE_ROOM_H
#define OOMKIT_LADDER_UPDATE_ROOM_H

#include "ladder.h"

/* A part that failed may be repeated by itself: nothing but parameters and state is
 * written to. */
#define OOMKIT_PARTS_REPEAT 2

/* Bytes. */
typedef struct oomkit_update_figures {
    int independent; /* it may go in parts; OOMKIT_PARTS_REPEAT */
    uint64_t state;  /* that it makes */
    uint64_t fixed;  /* temporaries of one parameter after the other: the largest's */
    uint64_t key;    /* of updates that take the same; 0: one says nothing of others */
    uint64_t together; /* temporaries of all parameters at once */
    uint64_t left;     /* to be had; OOMKIT_UNKNOWN */
} oomkit_update_figures;

/* What there is, the limit or of an accelerator what its driver said when it was last
 * asked; OOMKIT_UNKNOWN. */
uint64_t
oomkit_update_budget(const oomkit_call *call);
/* Bytes still to be had, as far as that is known without asking a driver. */
uint64_t
oomkit_update_left(const oomkit_call *call);

/* 0 or -1. Runs Python code, which looks at every parameter. */
int
oomkit_update_room(oomkit_call *call, PyObject *optimizer, oomkit_update_figures *f);

#endif
