/* Gradients of a call: what is asked and told of them, and arrays of one object per
 * parameter. */
#ifndef OOMKIT_UNDO_GRADIENTS_H
#define OOMKIT_UNDO_GRADIENTS_H

#include "../call/call_types.h"

/* --- asked --- */

/* Were they marked, at the first backward of this attempt? */
static inline int
oomkit_grads_marked(const oomkit_call *call)
{
    return call->grads.marked;
}

/* Had some parameter one when they were marked? */
static inline int
oomkit_grads_at_entry(const oomkit_call *call)
{
    return call->grads.at_entry;
}

/* Are those of finished micro-batches, or of this one's backward, out of sight? */
static inline int
oomkit_grads_parked(const oomkit_call *call)
{
    return call->grads.is_parked;
}

/* Were those of this attempt computed before the caller's backward, and wait for it? */
static inline int
oomkit_grads_are_eager(const oomkit_call *call)
{
    return call->grads.eager;
}

/* Does the call hold copies of them? */
static inline int
oomkit_grads_copied(const oomkit_call *call)
{
    return call->grads.copies != NULL;
}

/* Were some set aside, which hold the whole contribution of a failed attempt? And that
 * of parameter i (borrowed), or NULL. */
static inline int
oomkit_grads_any_aside(const oomkit_call *call)
{
    return call->grads.aside != NULL;
}

static inline PyObject *
oomkit_grads_aside_of(const oomkit_call *call, Py_ssize_t i)
{
    return call->grads.aside[i];
}

/* Are some kept by the number of their parameter? And over the end of an attempt? */
static inline int
oomkit_grads_by_number(const oomkit_call *call)
{
    const oomkit_grads *g = &call->grads;
    return g->copies != NULL || g->aside != NULL || g->entry != NULL ||
           g->parked != NULL;
}

static inline int
oomkit_grads_outlive(const oomkit_call *call)
{
    return call->grads.copies != NULL || call->grads.aside != NULL;
}

/* How far is taking off again what was set aside and holds too much? */
static inline oomkit_owed
oomkit_grads_owed(const oomkit_call *call)
{
    return call->grads.owed;
}

/* --- told --- */

static inline void
oomkit_grads_owe(oomkit_call *call, oomkit_owed owed)
{
    call->grads.owed = owed;
}

/* Another attempt follows, or not: some that hold too much may be set aside. */
static inline void
oomkit_grads_allow_owing(oomkit_call *call, int allowed)
{
    call->grads.may_owe = allowed;
}

/* Another attempt follows, or not: those that cannot go back may go, to be made again.
 */
static inline void
oomkit_grads_allow_going(oomkit_call *call, int allowed)
{
    call->grads.may_go = allowed;
}

static inline void
oomkit_grads_allow_no_remaking(oomkit_call *call)
{
    call->grads.remade = -1;
}

/* Have they gone? And there they are again. */
static inline int
oomkit_grads_gone(const oomkit_call *call)
{
    return call->grads.gone;
}

static inline void
oomkit_grads_are_back(oomkit_call *call)
{
    call->grads.gone = 0;
}

/* gradients.c: can the window of the call (a private option) make the gradients again
 * that were there at its marks? 1, 0 or -1. */
int
oomkit_grads_can_be_remade(oomkit_call *call);

/* None may be set aside in this call. */
static inline void
oomkit_grads_allow_no_aside(oomkit_call *call)
{
    call->grads.no_aside = 1;
}

/* The error that ends the call tells of those that are aside, or does not. */
static inline void
oomkit_grads_aside_said(oomkit_call *call, int said)
{
    call->grads.aside_said = said;
}

/* Copies are taken whatever the options say. */
static inline void
oomkit_grads_force_copies(oomkit_call *call)
{
    call->grads.force_copies = 1;
}

/* What accumulates from here on waits for the caller's backward: .grad stays the
 * caller's. */
static inline void
oomkit_grads_begin_eager(oomkit_call *call)
{
    call->grads.eager = 1;
}

/* Those that are parked, one for each parameter or NULL: borrowed, or NULL where none
 * are out of sight; owned by who takes them. */
static inline PyObject *const *
oomkit_grads_parked_ones(const oomkit_call *call)
{
    return call->grads.is_parked ? call->grads.parked : NULL;
}

static inline PyObject **
oomkit_grads_take_parked(oomkit_call *call)
{
    PyObject **parked = call->grads.parked; /* owned by the caller now */
    call->grads.parked = NULL;
    return parked;
}

/* The sum so far of parameter i where that is on the host: borrowed, or NULL. */
static inline PyObject *
oomkit_grads_hosted_of(const oomkit_call *call, Py_ssize_t i)
{
    return call->grads.hosted == NULL ? NULL : call->grads.hosted[i];
}

/* That sum is another one, or none (NULL). Steals it. There must be an array. */
static inline void
oomkit_grads_host(oomkit_call *call, Py_ssize_t i, PyObject *sum)
{
    Py_XSETREF(call->grads.hosted[i], sum);
}

/* Is .grad of a parameter the caller's, to be put back as it was? */
static inline int
oomkit_grads_are_callers(const oomkit_call *call)
{
    return call->grads.at_entry && !call->grads.apart;
}

/* The attempt is over: they accumulate in .grad again. */
static inline void
oomkit_grads_forget(oomkit_call *call)
{
    call->grads.eager = call->grads.apart = 0;
}

/* gradients.c: an array for sums on the host, one for each parameter. 0 or -1. */
int
oomkit_grads_host_begin(oomkit_call *call);

/* --- gradients.c: since a micro-batch began --- */
/* Marks at the start of a micro-batch of a split call. 0 or -1. */
int
oomkit_grads_micro_begins(oomkit_call *call);
/* OOMKIT_GRAD_* of every parameter against those. 0 or -1. */
int
oomkit_grads_since_micro(oomkit_call *call, uint8_t *states);

static inline int
oomkit_grads_micro_marked(const oomkit_call *call)
{
    return call->grads.began != NULL;
}

/* --- arrays --- */

static inline PyObject **
grads_array(oomkit_call *call)
{
    PyObject **array =
        PyMem_Calloc((size_t)call->parts->param_count + 1, sizeof(PyObject *));
    if (array == NULL) {
        PyErr_NoMemory();
    }
    return array;
}

static inline void
grads_array_free(oomkit_call *call, PyObject ***array)
{
    PyObject **items = *array;
    Py_ssize_t i;
    if (items == NULL) {
        return;
    }
    *array = NULL;
    for (i = 0; i < call->parts->param_count; i++) {
        Py_XDECREF(items[i]);
    }
    PyMem_Free(items);
}

/* The gradient of parameter i, None included. New reference or NULL. */
static inline PyObject *
grads_get(oomkit_call *call, Py_ssize_t i)
{
    return PyObject_GetAttr(call->parts->params[i], call->st->str_grad);
}

static inline int
grads_set(oomkit_call *call, Py_ssize_t i, PyObject *gradient)
{
    return PyObject_SetAttr(call->parts->params[i], call->st->str_grad, gradient);
}

/* gradients.c: marks every gradient, in an array that is made where *marks is NULL. 0,
 * or -1 with an exception, and *marks is NULL again. */
int
oomkit_grads_marks_take(oomkit_call *call, oomkit_grad_mark **marks);

/* Lets go of the array and of what is marked in it; *marks may be NULL. */
void
oomkit_grads_marks_drop(oomkit_call *call, oomkit_grad_mark **marks);

/* states[i] and, unless `steps` is NULL, steps[i] of every parameter against the marks;
 * how many are not as they were. -1 with an exception. */
Py_ssize_t
oomkit_grads_marks_compare(oomkit_call *call, const oomkit_grad_mark *marks,
                           uint8_t *states, uint32_t *steps);

#endif
