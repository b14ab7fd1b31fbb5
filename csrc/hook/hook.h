/* Where oomkit stands in torch's way: backwards, methods of participants, hooks. */
#ifndef OOMKIT_HOOK_HOOK_H
#define OOMKIT_HOOK_HOOK_H

#include "method.h"

typedef struct oomkit_deferred oomkit_deferred;

extern PyType_Spec oomkit_interceptor_spec, oomkit_backward_spec;

/* --- accelerate.c --- */
/* Before each micro-batch: accumulate() has not been entered in it. */
static inline void
oomkit_accelerate_micro_begins(oomkit_call *call)
{
    call->hooked.syncs = 0;
}
/* Before the first split attempt of a call. 0 or -1. */
int
oomkit_accelerate_split(oomkit_call *call);

/* --- backward.c --- */
int
oomkit_backward_install(oomkit_state *st);
int
oomkit_backward_nesting(void);
/* How many that write to .grad this thread has begun. */
uint64_t
oomkit_backward_runs(void);
/* Those outside every protected call. */
int
oomkit_backward_outside(void);
int
oomkit_backward_run(oomkit_call *call, PyObject *result);

/* --- forwards.c --- */
/* In a call that has not failed: until one with its list of participants has ended
 * well, for some of the lists of a step (a model that is another one in each call). */
static inline int
oomkit_forwards_wanted(const oomkit_call *call)
{
    return !call->parts->watched && call->parts->watches < 8;
}
/* From here on modules are seen that run and that nothing leads to. 0 or -1. */
int
oomkit_forwards_watch(oomkit_call *call);
void
oomkit_forwards_end(oomkit_call *call, int finished);
/* The call is left; keeps an exception in flight. */
static inline void
oomkit_forwards_leave(oomkit_call *call, int finished)
{
    if (call->hooked.watched != NULL) {
        oomkit_forwards_end(call, finished);
    }
}
/* The forward of a watched module is about to run. 0 or -1. */
int
oomkit_forwards_see(PyObject *module);

/* --- graph_free.c --- */
/* Frees what the graph behind `roots` has saved, as a finished backward does. */
int
oomkit_graph_free(oomkit_state *st, PyObject *roots);

/* --- install.c --- */
int
oomkit_intercept_install(oomkit_call *call);
void
oomkit_intercept_remove(oomkit_call *call);
/* Before any attempt but the caller's own one: also the schedulers that were left alone
 * in that one. 0 or -1. */
int
oomkit_intercept_schedulers(oomkit_call *call);
int
oomkit_intercept_split(oomkit_call *call);
/* What is intercepted of one participant of this kind. 0 or -1. */
int
oomkit_intercept_owner(oomkit_call *call, PyObject *target, oomkit_owner_kind kind);
/* A plain interceptor in a copy of a participant, until the call ends. New reference.
 */
PyObject *
oomkit_intercept_copy(oomkit_call *call, PyObject *copy, PyObject *name);
int
oomkit_intercept_zero_grad(oomkit_call *call, Py_ssize_t r);

/* --- hidden.c --- */
/* A scheduler or an averaged model was made. 0 or -1. */
int
oomkit_hidden_made(oomkit_state *st, PyObject *object);
/* A module gets its first buffer. */
void
oomkit_hidden_buffered(const oomkit_state *st, PyObject *module);
/* Those that nothing leads to, and that were made since the participants of this call
 * were found, take part. 0 or -1. */
int
oomkit_hidden_look(oomkit_call *call);

/* --- nested.c --- */
/* Backwards inside backwards */
int
oomkit_nested_any(void);
/* Is this backward a custom Function's (reentrant checkpoint), no hook's? 1, 0, -1. */
int
oomkit_nested_is_functions(void);
/* Is this thread one of the engine's, or its caller's, at work on a graph? */
int
oomkit_nested_in_engine(const oomkit_state *st);
int
oomkit_nested_refuse(oomkit_state *st, oomkit_call *call);
void *
oomkit_nested_enter(const oomkit_call *call);
void
oomkit_nested_leave(const oomkit_call *call, void *outer);

/* --- step_arguments.c --- */
/* Is argument i of step() a closure? */
int
oomkit_interceptor_is_closure(PyObject *const *args, Py_ssize_t positional,
                              PyObject *kwnames, Py_ssize_t i);
int
oomkit_interceptor_has_closure(PyObject *const *args, size_t nargsf, PyObject *kwnames);

/* --- torch_hooks.c --- */
/* Has torch tell us when a module gains a parameter, a buffer or a child, when
 * one is switched to training or back, and when an optimizer steps. 0 or -1. */
int
oomkit_watch_structure(oomkit_state *st);

/* --- held_update.c --- */
/* The optimizer that this step() updates, by itself or through a scaler; borrowed, or
 * NULL. */
PyObject *
oomkit_interceptor_optimizer(interceptor_object *self, PyObject *const *args,
                             size_t nargsf, PyObject *kwnames);

#endif
