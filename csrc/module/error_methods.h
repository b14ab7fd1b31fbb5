/* The functions of oomkit._C that judge other people's exceptions. */
#ifndef OOMKIT_MODULE_ERROR_METHODS_H
#define OOMKIT_MODULE_ERROR_METHODS_H

#include "../py/state.h"

/* is_oom_error and classify. Ends with an empty entry. */
extern PyMethodDef oomkit_error_methods[];

#endif
