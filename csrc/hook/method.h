/* The object that stands in an instance dictionary while a call runs. */
#ifndef OOMKIT_HOOK_METHOD_H
#define OOMKIT_HOOK_METHOD_H

#include "../call/call_types.h"

typedef struct interceptor_object {
    PyObject_HEAD
    oomkit_call *call;  /* borrowed; NULL once the call has ended */
    PyObject *target;   /* owned: optimizer, scheduler, scaler, averaged model */
    PyObject *original; /* owned: what stood in the instance dictionary, or NULL */
    PyObject *name;     /* owned */
    oomkit_owner_kind kind;
    int is_state_dict;
    int has_cleared;    /* zero_grad(): it ran in this call */
    PyObject *weakrefs; /* torch.compile holds what it looks at weakly */
    vectorcallfunc vectorcall;
} interceptor_object;

#define interceptor_CAST(op) ((interceptor_object *)(op))

/* method.c: what a call of it does. */
PyObject *
oomkit_interceptor_call(PyObject *op, PyObject *const *args, size_t nargsf,
                        PyObject *kwnames);
/* Calls what stood there before, as the attribute look-up would have done. */
PyObject *
oomkit_interceptor_original(interceptor_object *self, PyObject *const *args,
                            size_t nargsf, PyObject *kwnames);
int
oomkit_interceptor_clear(PyObject *op);

/* accelerate.c: what accumulate() calls on entry, in a split call. */
int
oomkit_accelerator_counts(interceptor_object *self);

/* zero_grad.c: a call of zero_grad(). */
PyObject *
oomkit_interceptor_clears(interceptor_object *self, PyObject *const *args,
                          size_t nargsf, PyObject *kwnames);

/* method_copy.c: what a scheduler saves. */
PyObject *
oomkit_interceptor_state_dict(interceptor_object *self, PyObject *const *args,
                              size_t nargsf, PyObject *kwnames);

/* method_copy.c: __deepcopy__ and __reduce_ex__. */
PyObject *
oomkit_interceptor_deepcopy(PyObject *op, PyObject *memo);
PyObject *
oomkit_interceptor_reduce(PyObject *op, PyObject *protocol);

/* install.c: puts an interceptor into an instance's dictionary. 0 or -1. */
int
oomkit_intercept_one(oomkit_call *call, PyObject *target, oomkit_owner_kind kind,
                     PyObject *name);

/* torch.nn.Module.zero_grad() begins, of any module. 0 or -1. */
int
oomkit_intercept_zero_grad_begins(PyObject *module);

#endif
