/* Attributes of optimizers and schedulers that their step() sets, beside all state that
 * torch would save: `_opt_called` (by the wrapper of a scheduler), the count and the
 * epoch of a scheduler, `grad_scale` and `found_inf` of a fused update, whatever a
 * class of the user's counts. A GradScaler takes those two away when step() has
 * returned, and multiplies by a `grad_scale` that it finds: one that a failure has left
 * would make the next update wrong without a word. So they go back where an update has
 * failed, also where the update cannot: the checkpoint that is asked for then has none
 * of them. */
#include "optim.h"
#include "step_attributes.h"

/* Where interceptors stand: install.c puts them there and takes them out. */
static int
attributes_ours(const oomkit_state *st, PyObject *name)
{
    return PyUnicode_Check(name) && (PyUnicode_Compare(name, st->str_step) == 0 ||
                                     PyUnicode_Compare(name, st->str_zero_grad) == 0 ||
                                     PyUnicode_Compare(name, st->str_state_dict) == 0);
}

/* Do the marks of an object's earlier step() in this call hold for another? Inside a
 * scaler's they do, and while the call can go back to its entry. 1, 0 or -1. */
static int
attributes_hold(oomkit_call *call)
{
    int committed;

    if (oomkit_update_is_nested(call) || call->options->optimizer_copy) {
        return 1;
    }
    committed = oomkit_update_committed(call);
    return committed < 0 ? -1 : !committed;
}

/* Is there a mark of it that holds? 1, 0 or -1. */
static int
attributes_are_held(oomkit_call *call, const PyObject *object)
{
    return oomkit_memo_at(call->entry.owners.attributes, object) < 0
               ? 0
               : attributes_hold(call);
}

/* In place of one that does not. 0 or -1. */
static int
attributes_keep(oomkit_call *call, PyObject *object, PyObject *saved)
{
    oomkit_memo **memo = &call->entry.owners.attributes;
    const Py_ssize_t at = oomkit_memo_at(*memo, object);

    if (at < 0) {
        return oomkit_memo_add(memo, object, Py_NewRef(saved));
    }
    Py_SETREF((*memo)->items[at].saved, Py_NewRef(saved));
    return 0;
}

int
oomkit_attributes_note(oomkit_call *call, PyObject *object, PyObject *saved)
{
    const int held = attributes_are_held(call, object);

    return held < 0 ? -1 : held ? 0 : attributes_keep(call, object, saved);
}

/* The mark of an object's attributes, *anew where there was none that holds. New
 * reference or NULL. */
static PyObject *
attributes_take(oomkit_call *call, PyObject *object, int *anew)
{
    const int held = attributes_are_held(call, object);
    OWNED PyObject *saved = NULL;

    *anew = held == 0;
    if (held != 0) {
        return held < 0
                   ? NULL
                   : Py_NewRef(oomkit_memo_find(call->entry.owners.attributes, object));
    }
    saved = oomkit_own_taken(object, (PyTypeObject *)call->st->interceptor_type);
    return saved == NULL || attributes_keep(call, object, saved) < 0 ? NULL
                                                                     : STEAL(saved);
}

/* The schedulers that a ChainedScheduler or a SequentialLR steps. 0 or -1. */
static int
attributes_mark_inner(oomkit_call *call, PyObject *inner)
{
    Py_ssize_t i;

    for (i = 0; inner != NULL && PyList_Check(inner) && i < PyList_GET_SIZE(inner);
         i++) {
        OWNED PyObject *one = Py_NewRef(PyList_GET_ITEM(inner, i));
        if (PyObject_TypeCheck(one, (PyTypeObject *)call->st->LRScheduler) &&
            oomkit_attributes_mark(call, one) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Does a scheduler of a class of torch call a function of the user's for its rates: one
 * that it was given, or one in the place of a method? 1, 0 or -1. */
static int
calls_a_function(const oomkit_state *st, PyObject *scheduler, PyObject *saved)
{
    PyObject *scale = oomkit_own_among(saved, st->str__scale_fn_custom); /* borrowed */
    OWNED PyObject *own = oomkit_own_pairs(saved);
    Py_ssize_t i;

    if (own == NULL || (scale != NULL && scale != Py_None) ||
        oomkit_own_among(saved, st->str_lr_lambdas) != NULL) {
        return own == NULL ? -1 : 1;
    }
    for (i = 0; i < PyTuple_GET_SIZE(own); i += 2) {
        PyObject *name = PyTuple_GET_ITEM(own, i); /* borrowed */
        PyObject *method =                         /* borrowed from the type */
            PyUnicode_Check(name) ? _PyType_Lookup(Py_TYPE(scheduler), name) : NULL;
        if (method != NULL && PyFunction_Check(method)) {
            return 1;
        }
    }
    return 0;
}

int
oomkit_scheduler_is_final(const oomkit_call *call)
{
    const oomkit_state *st = call->st;

    EACH_OWNER (one, call->parts, OWNERS_OF(OOMKIT_OWNER_SCHEDULER)) {
        PyObject *saved = /* borrowed from the memo */
            oomkit_memo_find(call->entry.owners.attributes, one.object);
        const int calls = saved == NULL ? 0 : calls_a_function(st, one.object, saved);
        if (calls < 0) {
            return -1;
        }
        if (calls) {
            OWNED PyObject *now = oomkit_own_attribute(one.object, st->str__last_lr);
            if (now == NULL && PyErr_Occurred()) {
                return -1;
            }
            if (now != oomkit_own_among(saved, st->str__last_lr)) {
                return 1;
            }
        }
    }
    return 0;
}

/* A class of torch, with torch's methods: all that it moves are its attributes and the
 * values of param_groups, unless it steps others, which may be anybody's. */
int
oomkit_scheduler_mark(oomkit_call *call, PyObject *scheduler)
{
    const oomkit_state *st = call->st;
    OWNED PyObject *saved = NULL;
    PyObject *inner; /* borrowed from it */
    int anew;

    if (!oomkit_owner_is_torchs(st, call->parts, scheduler)) {
        return 0;
    }
    saved = attributes_take(call, scheduler, &anew);
    if (saved == NULL) {
        return -1;
    }
    inner = oomkit_own_among(saved, st->str__schedulers);
    if (anew && attributes_mark_inner(call, inner) < 0) {
        return -1;
    }
    return inner == NULL && oomkit_own_among(saved, st->str_step) == NULL;
}

int
oomkit_attributes_mark(oomkit_call *call, PyObject *object)
{
    int anew;
    OWNED PyObject *saved = attributes_take(call, object, &anew);

    if (saved == NULL) {
        return -1;
    }
    return anew && PyObject_TypeCheck(object, (PyTypeObject *)call->st->LRScheduler)
               ? attributes_mark_inner(
                     call, oomkit_own_among(saved, call->st->str__schedulers))
               : 0;
}

/* One attribute as it was; NULL: it was not there. 0 or -1. */
static int
attribute_put(const oomkit_state *st, PyObject *object, PyObject *name, PyObject *was)
{
    OWNED PyObject *now = NULL;

    if (attributes_ours(st, name)) {
        return 0;
    }
    now = oomkit_own_attribute(object, name);
    if (PyErr_Occurred()) {
        return -1;
    }
    return was == now ? 0 : oomkit_own_attribute_set(object, name, was);
}

int
oomkit_attributes_put(const oomkit_state *st, PyObject *object, PyObject *saved)
{
    OWNED PyObject *now = oomkit_own_attributes(object);
    OWNED PyObject *were = now == NULL ? NULL : oomkit_own_pairs(saved);
    Py_ssize_t i;

    for (i = 0; were != NULL && i < PyTuple_GET_SIZE(now); i += 2) {
        PyObject *name = PyTuple_GET_ITEM(now, i); /* borrowed */
        if (oomkit_own_among(saved, name) == NULL &&
            attribute_put(st, object, name, NULL) < 0) {
            return -1;
        }
    }
    for (i = 0; were != NULL && i < PyTuple_GET_SIZE(were); i += 2) {
        if (attribute_put(st, object, PyTuple_GET_ITEM(were, i),
                          PyTuple_GET_ITEM(were, i + 1)) < 0) {
            return -1;
        }
    }
    return were == NULL ? -1 : 0;
}

int
oomkit_attributes_restore(oomkit_call *call)
{
    EACH_MEMO (mark, call->entry.owners.attributes) {
        if (oomkit_attributes_put(call->st, mark.object, mark.saved) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Those of one object. 0 or -1. */
static int
attributes_back(const oomkit_call *call, const PyObject *object)
{
    EACH_MEMO (mark, call->entry.owners.attributes) {
        if (mark.object == object) {
            return oomkit_attributes_put(call->st, mark.object, mark.saved);
        }
    }
    return 0;
}

void
oomkit_attributes_undo(oomkit_call *call)
{
    const PyObject *failed = call->entry.owners.failed_step; /* borrowed, as there */
    PyObject *exception;                                     /* owned, given back */

    if (failed == NULL) {
        return;
    }
    exception = oomkit_exception_take();
    call->entry.owners.failed_step = NULL;
    if (attributes_back(call, failed) < 0) {
        if (exception == NULL ||
            !PyErr_GivenExceptionMatches(exception, call->st->PartialUpdate)) {
            Py_XDECREF(exception);
            return;
        }
        oomkit_error_dismiss(); /* an update that is half done must be said */
    }
    oomkit_exception_give(exception);
}
