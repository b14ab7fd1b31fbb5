/* Modules that normalise. */
#include "members.h"

int
oomkit_module_is_training(oomkit_state *st, PyObject *module)
{
    int training = 0;
    PyObject *value = PyObject_GetAttr(module, st->str_training); /* owned */
    if (value == NULL) {
        return -1;
    }
    training = value == Py_True;
    Py_DECREF(value);
    return training;
}

int
oomkit_norm_kind(oomkit_state *st, PyObject *module)
{
    int norm = PyObject_IsInstance(module, st->BatchNorm), of_samples = 0;

    if (norm > 0 && st->InstanceNorm != NULL) {
        of_samples = PyObject_IsInstance(module, st->InstanceNorm);
    }
    return of_samples < 0 ? -1 : of_samples > 0 ? OOMKIT_NORM_SAMPLE : norm;
}
