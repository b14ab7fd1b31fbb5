/* Schedulers and averaged models that no name and no argument of a step leads to: in a
 * deque, in a callback far away, behind a weak reference. They are found among all
 * objects that the collector knows, which takes milliseconds: once for the optimizers
 * of a list of participants, for a scheduler may be stepped before the loss and has to
 * be marked at entry; and before a split, in which it would be stepped once for each
 * micro-batch. */
#include "hook.h"
#include "../py/errors.h"

static int
is_scheduler(const oomkit_state *st, PyObject *object)
{
    return PyType_IsSubtype(Py_TYPE(object), (PyTypeObject *)st->LRScheduler);
}

static int
is_averaged(const oomkit_state *st, PyObject *object)
{
    return st->AveragedModel != NULL &&
           PyType_IsSubtype(Py_TYPE(object), (PyTypeObject *)st->AveragedModel);
}

/* The optimizer of a scheduler. New reference; NULL, perhaps with an exception. */
static PyObject *
optimizer_of(const oomkit_state *st, PyObject *scheduler)
{
    PyObject *optimizer = PyObject_GetAttr(scheduler, st->str_optimizer);

    if (optimizer == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear(); /* one of somebody's own, or half made */
    }
    return optimizer;
}

/* Is an object among weak references? */
static int
is_among(PyObject *refs, const PyObject *object)
{
    Py_ssize_t i;

    for (i = 0; refs != NULL && i < PyList_GET_SIZE(refs); i++) {
        if (PyWeakref_GET_OBJECT(PyList_GET_ITEM(refs, i)) == object) {
            return 1;
        }
    }
    return 0;
}

/* Optimizers whose schedulers have been looked for: this call's, and those that were
 * noted before. 0 or -1. */
static int
hidden_note(const oomkit_call *call, PyObject *found)
{
    PyObject *optimizers = (PyObject *)call->st->Optimizer; /* borrowed */
    OWNED PyObject *before = Py_XNewRef(call->st->schedulers_found);
    Py_ssize_t i;

    for (i = 0; before != NULL && i < PyList_GET_SIZE(before); i++) {
        PyObject *ref = PyList_GET_ITEM(before, i); /* borrowed */
        if (PyObject_TypeCheck(PyWeakref_GET_OBJECT(ref), (PyTypeObject *)optimizers) &&
            PyList_Append(found, ref) < 0) {
            return -1;
        }
    }
    EACH_OWNER (one, call->parts, OWNERS_OF(OOMKIT_OWNER_OPTIMIZER)) {
        OWNED PyObject *ref =
            is_among(found, one.object) ? NULL : PyWeakref_NewRef(one.object, NULL);
        if (PyErr_Occurred() || (ref != NULL && PyList_Append(found, ref) < 0)) {
            return -1;
        }
    }
    return 0;
}

/* Weak references to all that there are take the place of those that were found last. 0
 * or -1. */
static int
hidden_scan(const oomkit_call *call)
{
    oomkit_state *st = call->st;
    OWNED PyObject *objects = PyObject_CallNoArgs(st->gc_get_objects);
    OWNED PyObject *found = objects == NULL ? NULL : PyList_New(0);
    int averaged = 0;
    Py_ssize_t i;

    for (i = 0; found != NULL && i < PyList_GET_SIZE(objects); i++) {
        PyObject *object = PyList_GET_ITEM(objects, i); /* borrowed */
        OWNED PyObject *ref = NULL;
        if ((Py_TYPE(object)->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0 ||
            !(is_scheduler(st, object) || is_averaged(st, object))) {
            continue; /* nearly all */
        }
        averaged |= is_averaged(st, object);
        ref = PyWeakref_NewRef(object, NULL);
        if (ref == NULL || PyList_Append(found, ref) < 0) {
            return -1;
        }
    }
    if (found == NULL || hidden_note(call, found) < 0) {
        return -1;
    }
    st->averaged_any = averaged;
    Py_XSETREF(st->schedulers_found, STEAL(found));
    return 0;
}

/* Is it one that the search did not find, of an optimizer that takes part? 1, 0 or -1.
 */
static int
is_hidden(const oomkit_call *call, PyObject *object)
{
    OWNED PyObject *optimizer = NULL;

    if (PyObject_TypeCheck(object, (PyTypeObject *)call->st->Optimizer) ||
        oomkit_participants_have(call->parts, object)) {
        return 0;
    }
    if (is_averaged(call->st, object)) {
        return 1;
    }
    optimizer = optimizer_of(call->st, object);
    return optimizer != NULL  ? oomkit_participants_have(call->parts, optimizer)
           : PyErr_Occurred() ? -1
                              : 0;
}

/* Those that were found last and are this call's take part. 0 or -1. */
static int
hidden_take(oomkit_call *call)
{
    OWNED PyObject *found = Py_XNewRef(call->st->schedulers_found);
    Py_ssize_t i;

    for (i = 0; found != NULL && i < PyList_GET_SIZE(found); i++) {
        OWNED PyObject *object = oomkit_reference_get(PyList_GET_ITEM(found, i));
        int result = object == NULL ? 0 : is_hidden(call, object);
        if (result == 1) {
            oomkit_owner_kind kind = is_scheduler(call->st, object)
                                         ? OOMKIT_OWNER_SCHEDULER
                                         : OOMKIT_OWNER_AVERAGED;
            result = oomkit_participants_add_hidden(call->parts, object, kind);
            if (result >= 0) {
                result = oomkit_intercept_owner(call, object, kind);
            }
        }
        if (result < 0) {
            return -1;
        }
    }
    return 0;
}

/* Was a scheduler ever made for an intercepted optimizer? Each one wraps the
 * optimizer's step() and marks the wrapper. 2: they were not looked for; 1, 0 or -1. */
static int
has_scheduler(const oomkit_call *call)
{
    int i, result = 0;

    for (i = 0; i < call->hooked.count && result < 2; i++) {
        const interceptor_object *self =
            interceptor_CAST(call->hooked.items[i].interceptor);
        int has = 0;
        if (self->kind == OOMKIT_OWNER_OPTIMIZER && self->original != NULL) {
            has = oomkit_has_attribute_string(self->original, "_wrapped_by_lr_sched");
        }
        if (has < 0) {
            return -1;
        }
        if (has > 0) {
            result = is_among(call->st->schedulers_found, self->target) ? 1 : 2;
        }
    }
    return result;
}

int
oomkit_hidden_at_entry(oomkit_call *call)
{
    const int result = call->parts->looked_for_hidden ? 0 : has_scheduler(call);

    if (result <= 0) {
        return result;
    }
    if ((result == 2 && hidden_scan(call) < 0) || hidden_take(call) < 0) {
        return -1;
    }
    call->parts->looked_for_hidden = 1;
    return 0;
}

int
oomkit_hidden_at_split(oomkit_call *call)
{
    const int known = call->parts->looked_for_split && call->tries.ooms == 0;
    const int result = known ? 0 : has_scheduler(call);

    if (known || result < 0 || (result == 0 && !call->st->averaged_any)) {
        return result < 0 ? -1 : 0;
    }
    if (hidden_scan(call) < 0 || hidden_take(call) < 0) {
        return -1;
    }
    call->parts->looked_for_hidden = call->parts->looked_for_split = 1;
    return 0;
}
