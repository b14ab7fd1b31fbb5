/* An update in parts: which values of a mark belong to one parameter, and copies of
 * them to go back to. */
#ifndef OOMKIT_OPTIM_UPDATE_PART_H
#define OOMKIT_OPTIM_UPDATE_PART_H

#include "updating.h"

/* One parameter of an optimizer. */
typedef struct oomkit_part_param {
    PyObject *param;         /* borrowed from the mark */
    Py_ssize_t group;        /* number of its group */
    uint64_t bytes;          /* of the parameter itself; 0 where it has no gradient */
    uint64_t all_bytes;      /* the same, with a gradient or without */
    Py_ssize_t item;         /* its own place among the values of the mark */
    Py_ssize_t first, count; /* those of its state; 0: it had none */
} oomkit_part_param;

/* How many values mark number `index` has. */
static inline Py_ssize_t
oomkit_part_items(const oomkit_call *call, int index)
{
    return call->updating.marks[index].count;
}

/* Has somebody kept copies for the whole call? */
static inline int
oomkit_part_is_copied(const oomkit_call *call, int index)
{
    return call->updating.marks[index].copies != NULL;
}

/* All parameters of its groups, in order; *list is memory of PyMem_Malloc(). 0 or -1.
 */
int
oomkit_part_list(oomkit_call *call, int index, oomkit_part_param **list,
                 Py_ssize_t *count);
/* --- host memory for copies --- */

/* From here on copies may take so many bytes; OOMKIT_UNKNOWN: as many as they do. */
void
oomkit_host_share_begin(oomkit_call *call, uint64_t bytes);
/* They may take what they need again. */
void
oomkit_host_share_end(oomkit_call *call);
/* What copies of so many bytes take, at most: torch rounds pinned memory up to a power
 * of two. */
uint64_t
oomkit_host_share_of(const oomkit_call *call, uint64_t bytes);
/* Is there so much left? Then it is taken. 1, or 0 and is noted. */
int
oomkit_host_share_take(oomkit_call *call, uint64_t bytes);
/* A copy of so many bytes is gone. */
void
oomkit_host_share_give(oomkit_call *call, uint64_t bytes);
/* Was something not copied for want of it? */
static inline int
oomkit_host_share_is_short(const oomkit_call *call)
{
    return call->updating.host.short_of;
}
/* Bytes left; OOMKIT_UNKNOWN. */
static inline uint64_t
oomkit_host_share_left(const oomkit_call *call)
{
    return call->updating.host.limited ? call->updating.host.left : OOMKIT_UNKNOWN;
}
/* An update needs more: oomkit.OutOfMemory, which no smaller batch helps against. -1.
 */
int
oomkit_host_share_refuse(oomkit_call *call, PyObject *optimizer);

/* --- copies --- */

/* Host copies of one parameter and its state; of state that is in `hosted` (dict of
 * address to tensor, or NULL) the memory itself. 0 or -1, also where the host has no
 * room for them. */
int
oomkit_part_keep(oomkit_call *call, int index, const oomkit_part_param *param,
                 PyObject *hosted);
/* All that its update did is undone. Gradient recording must be off. 0 or -1. */
int
oomkit_part_put_back(oomkit_call *call, int index, const oomkit_part_param *param,
                     PyObject *hosted, oomkit_param_is_back told);
/* Those of one parameter go. */
void
oomkit_part_unkeep(oomkit_call *call, int index, const oomkit_part_param *param);
/* The copies go: nothing will be put back. */
void
oomkit_part_forget(oomkit_call *call, int index);

#endif
