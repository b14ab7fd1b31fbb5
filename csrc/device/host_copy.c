/* Copies in host memory. */
#include "device.h"
#include "../py/half_made.h"
#include "../py/tensor.h"

PyObject *
oomkit_host_copy(oomkit_state *st, PyObject *tensor)
{
    oomkit_tensor_facts facts;
    OWNED PyObject *plain = NULL;
    PyObject *copy = NULL; /* owned, returned */

    if (oomkit_tensor_facts_get(st, tensor, 0, &facts) < 0 ||
        (!facts.is_strided && oomkit_half_made_refuse(st, tensor) < 0)) {
        return NULL;
    }
    plain = PyObject_CallMethodNoArgs(tensor, st->str_detach);
    if (plain == NULL) {
        return NULL;
    }
    EXEMPT (st) {
        copy = PyObject_CallMethodNoArgs(plain, facts.device_type == 0 ? st->str_clone
                                                                       : st->str_cpu);
    }
    return copy;
}
