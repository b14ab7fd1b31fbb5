/* Tensors as plain C sees them: type check, identity, facts. */
#ifndef OOMKIT_PY_TENSOR_H
#define OOMKIT_PY_TENSOR_H

#include "state.h"

/* c10::DeviceType numbers. */
enum {
    OOMKIT_DEVICE_CPU = 0,
    OOMKIT_DEVICE_CUDA = 1, /* ROCm's, too */
    OOMKIT_DEVICE_XPU = 12,
    OOMKIT_DEVICE_MPS = 13,
    OOMKIT_DEVICE_PRIVATE_USE = 20 /* a backend out of torch's tree, by any name */
};

/* 1 when `object` is a torch.Tensor or of a subclass. Runs no Python code. Both are
 * classes made in Python: numbers, strings and None are told by a flag. */
static inline int
oomkit_tensor_check(const oomkit_state *st, PyObject *object)
{
    return Py_IS_TYPE(object, (PyTypeObject *)st->Tensor) ||
           Py_IS_TYPE(object, (PyTypeObject *)st->Parameter) ||
           (PyType_HasFeature(Py_TYPE(object), Py_TPFLAGS_HEAPTYPE) &&
            PyType_IsSubtype(Py_TYPE(object), (PyTypeObject *)st->Tensor));
}

/* plain_bridge.c: stands in for the bridge where there is none. */
extern const oomkit_bridge oomkit_plain_bridge;

/* Takes what its entries need out of the state. */
void
oomkit_plain_bridge_bind(const oomkit_state *st);

/* An entry of the table has failed: -1, and RuntimeError "oomkit could not {what}"
 * where no exception says more. */
int
oomkit_bridge_failed(const char *what);

/* "cuda" of a c10::DeviceType; NULL for a number without a name. Static. */
const char *
oomkit_device_type_name(int type);

/* The facts of a tensor, `dim` counted from the end when negative. By the bridge where
 * it can, else by attributes (then the dtype is -1 where its name is not known; shape
 * hashes of the two ways are not comparable, but a tensor always goes the same way). A
 * nested tensor has ndim and size -1. For is_leaf see below. 0, or -1 with an
 * exception. May run Python code (attributes of tensor subclasses). */
int
oomkit_tensor_facts_get(oomkit_state *st, PyObject *tensor, int64_t dim,
                        oomkit_tensor_facts *facts);

/* Does it require grad? 1, 0 or -1; may run Python code likewise. */
int
oomkit_tensor_wants_grad(oomkit_state *st, PyObject *tensor);

/* The same facts by attributes alone. */
int
oomkit_attribute_facts(PyObject *tensor, int64_t dim, oomkit_tensor_facts *facts);

/* Known only by asking torch where it requires grad: 1, 0 or -1 with an exception. */
int
oomkit_tensor_is_leaf(PyObject *tensor, const oomkit_tensor_facts *facts);

/* Is it a parameter, as torch asks: also one whose class is another, as that of a
 * DTensor? May run Python code likewise. */
int
oomkit_tensor_is_parameter(const oomkit_state *st, PyObject *tensor);

/* The tensor in which a DTensor has its values, or the tensor itself. New reference.
 * May run Python code likewise. */
PyObject *
oomkit_tensor_local(const oomkit_state *st, PyObject *tensor);

/* What 64 of its values are, or 0. May run Python code likewise. */
uint64_t
oomkit_tensor_sample(const oomkit_state *st, PyObject *tensor);

/* The version alone: what marks need, at a fraction of the cost. 0 or -1. */
static inline int
oomkit_tensor_version(oomkit_state *st, PyObject *tensor, uint32_t *version)
{
    const void *holder = tensor;

    return st->bridge->versions(&holder, st->impl_offset, 1, version, NULL, NULL) == 0
               ? 0
               : oomkit_bridge_failed("read a tensor");
}

/* What tells whether a tensor has changed: its version; an inference tensor has none,
 * then a hash of some of its values (0 on a device). */
static inline uint32_t
oomkit_tensor_mark(oomkit_state *st, PyObject *tensor, const oomkit_tensor_facts *facts)
{
    uint64_t hash;

    if (facts->has_version) {
        return facts->version;
    }
    hash = st->bridge->sample(tensor, st->impl_offset);
    return (uint32_t)(hash ^ (hash >> 32));
}

/* Finds st->impl_offset by looking for the value of `_cdata` in several tensors and a
 * Parameter, then compares the bridge's answers on them with torch's. 1; 0 when they do
 * not agree: the bridge must not be used then; -1 with an exception that says nothing
 * of the bridge (oomkit_state_passes). */
int
oomkit_tensor_calibrate(oomkit_state *st);

/* The number that a value stands for, a tensor of one element too: 1 and *value; 0 when
 * it is none; -1. */
int
oomkit_number_of(oomkit_state *st, PyObject *value, double *number);

#endif
