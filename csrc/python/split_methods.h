/* Private functions of oomkit._C by which tests drive split.h with invented inputs. */
#ifndef OOMKIT_PYTHON_SPLIT_METHODS_H
#define OOMKIT_PYTHON_SPLIT_METHODS_H

#include "state.h"

/* _batch_probe, _join_probe. Ends with an empty entry. */
extern PyMethodDef oomkit_split_methods[];

#endif
