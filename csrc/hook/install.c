/* Putting interceptors among the participants' own attributes, and taking them out. */
#include "hook.h"
#include "../optim/step_attributes.h"
#include "../py/errors.h"
#include "../undo/undo.h"

#define SPARES 16

/* One that no call uses any more, or a new one. New reference or NULL. */
static PyObject *
interceptor_make(oomkit_state *st)
{
    PyTypeObject *type = (PyTypeObject *)st->interceptor_type;
    PyObject *made = st->spare_interceptor; /* owned, returned */

    if (made == NULL) {
        return type->tp_alloc(type, 0);
    }
    st->spare_interceptor = interceptor_CAST(made)->original;
    interceptor_CAST(made)->original = NULL;
    PyObject_GC_Track(made);
    return made;
}

/* Calls do not ask for memory where others have left one: they lie in a row, each the
 * `original` of the one before it, out of the collector's sight. Steals one that nobody
 * else has. */
static void
interceptor_spare(oomkit_state *st, PyObject *op)
{
    interceptor_object *self = interceptor_CAST(op);
    const interceptor_object *next; /* borrowed */
    int spares = 1;

    oomkit_interceptor_clear(op); /* may run code of anybody's */
    Py_CLEAR(self->name);
    next = interceptor_CAST(st->spare_interceptor);
    for (; next != NULL && spares < SPARES; spares++) {
        next = interceptor_CAST(next->original);
    }
    if (Py_REFCNT(op) > 1 || self->weakrefs != NULL || spares == SPARES) {
        Py_DECREF(op);
        return;
    }
    PyObject_GC_UnTrack(op);
    self->has_cleared = 0;
    self->original = st->spare_interceptor;
    st->spare_interceptor = op;
}

/* Puts one interceptor among an instance's own attributes. */
int
oomkit_intercept_one(oomkit_call *call, PyObject *target, oomkit_owner_kind kind,
                     PyObject *name)
{
    oomkit_hooked *hooked = &call->hooked;
    oomkit_interception *entry;
    interceptor_object *self; /* borrowed from made */
    OWNED PyObject *made = NULL;

    if (ARRAY_GROW_FIRST(hooked->items, hooked->count, hooked->room, hooked->first) <
        0) {
        return -1;
    }
    made = interceptor_make(call->st);
    if (made == NULL) {
        return -1;
    }
    self = interceptor_CAST(made);
    self->call = call;
    self->kind = kind;
    self->vectorcall = oomkit_interceptor_call;
    self->is_state_dict = name == call->st->str_state_dict;
    self->target = Py_NewRef(target);
    self->name = Py_NewRef(name);
    self->original = oomkit_own_attribute_swap(target, name, made);
    if (self->original == NULL && PyErr_Occurred()) {
        return -1;
    }
    if (self->original != NULL &&
        Py_IS_TYPE(self->original, (PyTypeObject *)call->st->interceptor_type)) {
        /* Another thread's call has one there: what it stands for is what to put back.
         */
        Py_XSETREF(self->original,
                   Py_XNewRef(interceptor_CAST(self->original)->original));
    }
    entry = &hooked->items[hooked->count++];
    entry->target = Py_NewRef(target);
    entry->name = name;
    entry->kind = kind;
    entry->interceptor = STEAL(made);
    return 0;
}

PyObject *
oomkit_intercept_copy(oomkit_call *call, PyObject *copy, PyObject *name)
{
    PyObject *interceptor; /* borrowed from the entry */

    if (oomkit_intercept_one(call, copy, OOMKIT_OWNER_USER, name) < 0) {
        return NULL;
    }
    interceptor = call->hooked.items[call->hooked.count - 1].interceptor;
    interceptor_CAST(interceptor)->call = NULL; /* nothing of it is held back */
    return Py_NewRef(interceptor);
}

static int
is_intercepted(const oomkit_call *call, const PyObject *target, const PyObject *name)
{
    int i;
    for (i = 0; i < call->hooked.count; i++) {
        if (call->hooked.items[i].target == target &&
            (name == NULL || call->hooked.items[i].name == name)) {
            return 1;
        }
    }
    return 0;
}

/* A method of a scheduler, once. */
static int
intercept_method(oomkit_call *call, PyObject *scheduler, PyObject *name)
{
    return is_intercepted(call, scheduler, name)
               ? 0
               : oomkit_intercept_one(call, scheduler, OOMKIT_OWNER_SCHEDULER, name);
}

/* In the caller's own try those are left alone that can be taken back without anybody
 * having seen their step(): two attributes to set and to take out cost a tenth of what
 * a small step takes longer. */
static int
intercept_scheduler(oomkit_call *call, PyObject *scheduler, int leaves_alone)
{
    int marked = 0;

    if (leaves_alone && !oomkit_call_is_replay(call) && !oomkit_ranks_agreed(call) &&
        !call->options->optimizer_copy) {
        marked = oomkit_scheduler_mark(call, scheduler);
    }
    if (marked != 0) {
        return marked < 0 ? -1 : 0;
    }
    return intercept_method(call, scheduler, call->st->str_step) < 0 ||
                   intercept_method(call, scheduler, call->st->str_state_dict) < 0
               ? -1
               : 0;
}

int
oomkit_intercept_owner(oomkit_call *call, PyObject *target, oomkit_owner_kind kind)
{
    oomkit_state *st = call->st;

    switch (kind) {
    case OOMKIT_OWNER_OPTIMIZER:
        return oomkit_intercept_one(call, target, kind, st->str_step);
    case OOMKIT_OWNER_SCHEDULER:
        return intercept_scheduler(call, target, !call->hooked.schedulers);
    case OOMKIT_OWNER_SCALER:
        return oomkit_intercept_one(call, target, kind, st->str_step) < 0 ||
                       oomkit_intercept_one(call, target, kind, st->str_update) < 0 ||
                       oomkit_intercept_one(call, target, kind, st->str_unscale) < 0
                   ? -1
                   : 0;
    case OOMKIT_OWNER_AVERAGED:
        return oomkit_intercept_one(call, target, kind, st->str_update_parameters);
    default:
        return 0;
    }
}

/* At entry of a call. What could be installed before an error is taken out by remove.
 */
int
oomkit_intercept_install(oomkit_call *call)
{
    const unsigned kinds = OWNERS_OF(OOMKIT_OWNER_GENERATOR) - 1; /* those before it */

    EACH_OWNER (owner, call->parts, kinds) {
        if (oomkit_intercept_owner(call, owner.object, owner.kind) < 0) {
            return -1;
        }
    }
    return oomkit_hidden_look(call);
}

/* Puts back what stood there. Keeps the exception in flight. An entry that the step
 * itself replaced meanwhile (a scheduler made inside it) is left alone. */
void
oomkit_intercept_remove(oomkit_call *call)
{
    int i = call->hooked.count;
    PyObject *exception; /* owned, given back */

    if (call->hooked.items == NULL) {
        return;
    }
    exception = PyErr_Occurred() ? oomkit_exception_take() : NULL;
    while (i-- > 0) {
        oomkit_interception *entry = &call->hooked.items[i];
        interceptor_object *self = interceptor_CAST(entry->interceptor);

        self->call = NULL;
        if (oomkit_own_attribute_replace(entry->target, entry->name, entry->interceptor,
                                         self->original) < 0) {
            oomkit_error_unraised(entry->target);
        }
        entry->interceptor = NULL;
        if (Py_REFCNT(self) == 1) {
            interceptor_spare(call->st, (PyObject *)self);
        } else {
            Py_DECREF(self); /* somebody kept it: it goes on as the original */
        }
        Py_CLEAR(entry->target);
    }
    ARRAY_FREE_FIRST(call->hooked.items, call->hooked.room, call->hooked.first);
    call->hooked.count = 0;
    if (exception != NULL) {
        oomkit_exception_give(exception);
    }
}

/* --- while the call is split --- */

int
oomkit_intercept_schedulers(oomkit_call *call)
{
    if (oomkit_hidden_look(call) < 0) { /* those that the attempt before has made */
        return -1;
    }
    if (call->hooked.schedulers) {
        return 0;
    }
    EACH_OWNER (one, call->parts, OWNERS_OF(OOMKIT_OWNER_SCHEDULER)) {
        if (intercept_scheduler(call, one.object, 0) < 0) {
            return -1;
        }
    }
    call->hooked.schedulers = 1;
    return 0;
}

int
oomkit_intercept_zero_grad_begins(PyObject *module)
{
    oomkit_call *call = oomkit_call_current();

    if (call == NULL || !call->hooked.for_split || call->backward.done == 0 ||
        call->backward.cleared != NULL || !oomkit_call_has_module(call, module)) {
        return 0;
    }
    call->backward.cleared = oomkit_where();
    return call->backward.cleared == NULL ? -1 : 0;
}

/* Does zero_grad() of this module lead to our function in the class? *last (borrowed,
 * compared alone) is the type that did so last. 1, 0 or -1. */
static int
zero_grad_is_watched(const oomkit_state *st, PyObject *module, PyTypeObject **last)
{
    OWNED PyObject *own = NULL;
    int watched = 1;

    if (Py_TYPE(module) != *last) {
        OWNED PyObject *method =
            PyObject_GetAttr((PyObject *)Py_TYPE(module), st->str_zero_grad);
        if (method == NULL) {
            return -1;
        }
        watched = method == st->zero_grad_hook;
        *last = watched ? Py_TYPE(module) : NULL;
    }
    own = watched ? oomkit_own_attribute(module, st->str_zero_grad) : NULL;
    return PyErr_Occurred() ? -1 : watched && own == NULL;
}

/* zero_grad() of optimizers, and of modules that have one of their own, to see one
 * between two backwards; of the roots from number `r` on. */
int
oomkit_intercept_zero_grad(oomkit_call *call, Py_ssize_t r)
{
    int i, count = r > 0 ? 0 : call->hooked.count;
    PyObject *roots = call->parts->roots; /* borrowed */
    PyTypeObject *last = NULL;

    for (i = 0; i < count; i++) {
        if (call->hooked.items[i].kind == OOMKIT_OWNER_OPTIMIZER &&
            oomkit_intercept_one(call, call->hooked.items[i].target, OOMKIT_OWNER_USER,
                                 call->st->str_zero_grad) < 0) {
            return -1;
        }
    }
    for (; roots != NULL && r < PyList_GET_SIZE(roots); r++) {
        OWNED PyObject *root = oomkit_reference_get(PyList_GET_ITEM(roots, r));
        int result;
        if (root == NULL ||
            !PyObject_TypeCheck(root, (PyTypeObject *)call->st->Module)) {
            continue;
        }
        result = zero_grad_is_watched(call->st, root, &last);
        if (result == 0) {
            result = oomkit_intercept_one(call, root, OOMKIT_OWNER_USER,
                                          call->st->str_zero_grad);
        }
        if (result < 0) {
            return -1;
        }
    }
    return 0;
}

/* Before the first split attempt of a call. 0 or -1. */
int
oomkit_intercept_split(oomkit_call *call)
{
    if (call->hooked.for_split) {
        return 0;
    }
    call->hooked.for_split = 1;
    if (!call->st->withheld_ready) {
        OWNED PyObject *done = PyObject_CallNoArgs(call->st->accept_no_gradients);
        if (done == NULL) {
            return -1;
        }
        Py_XSETREF(call->st->plain_zero_grad,
                   PyObject_CallNoArgs(call->st->find_zero_grad));
        if (call->st->plain_zero_grad == NULL) {
            return -1;
        }
        Py_XSETREF(call->st->zero_grad_hook, /* last: it changes torch, once */
                   PyObject_CallNoArgs(call->st->watch_zero_grad));
        if (call->st->zero_grad_hook == NULL) {
            return -1;
        }
        call->st->withheld_ready = 1;
    }
    return oomkit_accelerate_split(call) < 0 || oomkit_intercept_zero_grad(call, 0) < 0
               ? -1
               : 0;
}
