/* Who is told of what happens in a call. */
#ifndef OOMKIT_MODULE_WIRING_H
#define OOMKIT_MODULE_WIRING_H

#include "../py/state.h"

/* Before the first call. */
void
oomkit_wire(oomkit_state *st);

#endif
