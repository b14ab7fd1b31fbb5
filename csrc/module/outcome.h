/* A call whose out-of-memory error never reaches Python. */
#ifndef OOMKIT_MODULE_OUTCOME_H
#define OOMKIT_MODULE_OUTCOME_H

#include "../py/state.h"

/* _trial. Ends with an empty entry. */
extern PyMethodDef oomkit_trial_methods[];

#endif
