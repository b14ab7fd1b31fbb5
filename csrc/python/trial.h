/* A call whose out-of-memory error never reaches Python. */
#ifndef OOMKIT_PYTHON_TRIAL_H
#define OOMKIT_PYTHON_TRIAL_H

#include "state.h"

/* _trial. Ends with an empty entry. */
extern PyMethodDef oomkit_trial_methods[];

#endif
