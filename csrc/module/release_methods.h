/* The functions of oomkit._C with which Python lets go of what errors keep alive. */
#ifndef OOMKIT_MODULE_RELEASE_METHODS_H
#define OOMKIT_MODULE_RELEASE_METHODS_H

#include "../py/state.h"

/* _attempt, _let_go and _drain. Ends with an empty entry. */
extern PyMethodDef oomkit_release_methods[];

#endif
