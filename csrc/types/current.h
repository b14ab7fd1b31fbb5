/* oomkit.current() and its record. */
#ifndef OOMKIT_ACCUM_CURRENT_H
#define OOMKIT_ACCUM_CURRENT_H

#include "../py/state.h"

extern PyMethodDef oomkit_current_methods[];

/* Makes st->current_type. 0 or -1. */
int
oomkit_current_init(oomkit_state *st);

#endif
