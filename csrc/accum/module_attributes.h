/* The function of oomkit._C that looks at the plain attributes of a model's modules. */
#ifndef OOMKIT_ACCUM_MODULE_ATTRIBUTES_H
#define OOMKIT_ACCUM_MODULE_ATTRIBUTES_H

#include "../py/state.h"

/* _scan_modules. Ends with an empty entry. */
extern PyMethodDef oomkit_scan_methods[];

#endif
