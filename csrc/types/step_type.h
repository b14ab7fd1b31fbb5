/* auto_batch() itself. */
#ifndef OOMKIT_TYPES_STEP_TYPE_H
#define OOMKIT_TYPES_STEP_TYPE_H

#include "../py/state.h"

/* auto_batch(fn=None, /, **options): a Step, or a decorator that makes one. */
PyObject *
oomkit_auto_batch(PyObject *module, PyObject *args, PyObject *kwargs);

extern PyType_Spec oomkit_step_spec;
extern PyType_Spec oomkit_step_object_spec;
extern PyType_Spec oomkit_bound_spec;

#endif
