/* Private functions of oomkit._C by which tests drive batch.h with invented inputs. */
#ifndef OOMKIT_MODULE_SPLIT_METHODS_H
#define OOMKIT_MODULE_SPLIT_METHODS_H

#include "../py/state.h"

/* _batch_probe, _join_probe. Ends with an empty entry. */
extern PyMethodDef oomkit_split_methods[];

#endif
