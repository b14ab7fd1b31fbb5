/* The function of oomkit._C that looks at the plain attributes of a model's modules. */
#ifndef OOMKIT_PYTHON_SCAN_H
#define OOMKIT_PYTHON_SCAN_H

#include "state.h"

/* _scan_modules. Ends with an empty entry. */
extern PyMethodDef oomkit_scan_methods[];

#endif
