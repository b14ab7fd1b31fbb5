/* The object that stands in an instance dictionary while a call runs. */
#ifndef OOMKIT_PYTHON_INTERCEPTOR_H
#define OOMKIT_PYTHON_INTERCEPTOR_H

#include "call.h"

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

/* intercept.c: what a call of it does. */
PyObject *
oomkit_interceptor_call(PyObject *op, PyObject *const *args, size_t nargsf,
                        PyObject *kwnames);
/* Calls what stood there before, as the attribute look-up would have done. */
PyObject *
oomkit_interceptor_original(interceptor_object *self, PyObject *const *args,
                            size_t nargsf, PyObject *kwnames);
int
oomkit_interceptor_clear(PyObject *op);

/* clearing.c: a call of zero_grad(). */
PyObject *
oomkit_interceptor_clears(interceptor_object *self, PyObject *const *args,
                          size_t nargsf, PyObject *kwnames);

/* interceptor_copy.c: what a scheduler saves. */
PyObject *
oomkit_interceptor_state_dict(interceptor_object *self, PyObject *const *args,
                              size_t nargsf, PyObject *kwnames);
/* hold.c: had an optimizer's step() begun to make its state, and nothing else? */
int
oomkit_optimizer_failed_in_init(oomkit_state *st, PyObject *exception);

/* interceptor_copy.c: __deepcopy__ and __reduce_ex__. */
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

/* accelerate.c */
int
oomkit_accelerator_counts(interceptor_object *self);

/* hold.c. Is argument i of step() a closure? */
int
oomkit_interceptor_is_closure(PyObject *const *args, Py_ssize_t positional,
                              PyObject *kwnames, Py_ssize_t i);
int
oomkit_interceptor_has_closure(PyObject *const *args, size_t nargsf, PyObject *kwnames);
/* The optimizer that this step() updates, by itself or through a scaler; borrowed, or
 * NULL. */
PyObject *
oomkit_interceptor_optimizer(interceptor_object *self, PyObject *const *args,
                             size_t nargsf, PyObject *kwnames);
int
oomkit_interceptor_hold(interceptor_object *self, PyObject *const *args, size_t nargsf,
                        PyObject *kwnames);

#endif
