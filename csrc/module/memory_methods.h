/* The private functions of oomkit._C behind oomkit/memory.py and oomkit/testing.py. */
#ifndef OOMKIT_MODULE_MEMORY_METHODS_H
#define OOMKIT_MODULE_MEMORY_METHODS_H

#include "../py/state.h"

/* Ends with an empty entry. */
extern PyMethodDef oomkit_memory_methods[];

#endif
