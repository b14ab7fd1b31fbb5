/* Schedulers, scalers and the user's own participants: what must be saved of them, and
 * when.
 *
 * A GradScaler's per-optimizer states are saved before its first method runs in a call
 * (its state_dict does not hold them). The user's objects are saved at entry.
 * Everything else only with optimizer_safety="copy". */
#include "optim.h"
#include "step_attributes.h"

/* A copy of {id: {"stage": ..., "found_inf_per_device": {...}}}, two levels deep. */
static PyObject *
scaler_states_copy(PyObject *states)
{
    PyObject *key, *value, *inner_key, *inner_value; /* borrowed */
    OWNED PyObject *copy = PyDict_New();
    Py_ssize_t at = 0;

    if (copy == NULL || !PyDict_Check(states)) {
        return STEAL(copy);
    }
    while (PyDict_Next(states, &at, &key, &value)) {
        Py_ssize_t in = 0;
        OWNED PyObject *inner = NULL;
        if (!PyDict_Check(value)) {
            continue;
        }
        inner = PyDict_New();
        if (inner == NULL || PyDict_SetItem(copy, key, inner) < 0) {
            return NULL;
        }
        while (PyDict_Next(value, &in, &inner_key, &inner_value)) {
            OWNED PyObject *kept = PyDict_CheckExact(inner_value)
                                       ? PyDict_Copy(inner_value)
                                       : Py_NewRef(inner_value);
            if (kept == NULL || PyDict_SetItem(inner, inner_key, kept) < 0) {
                return NULL;
            }
        }
    }
    return STEAL(copy);
}

int
oomkit_scaler_mark(oomkit_call *call, PyObject *scaler)
{
    OWNED PyObject *states = NULL;

    if (oomkit_memo_find(call->entry.owners.scalers, scaler) != NULL) {
        return 0;
    }
    states = PyObject_GetAttr(scaler, call->st->str_per_optimizer_states);
    if (states == NULL) {
        return -1;
    }
    return oomkit_memo_add(&call->entry.owners.scalers, scaler,
                           scaler_states_copy(states));
}

int
oomkit_scaler_marked(const oomkit_call *call)
{
    return call->entry.owners.scalers != NULL;
}

/* A deep copy of object.state_dict(), outside the budget. New reference or NULL. */
static PyObject *
owner_state(oomkit_state *st, PyObject *object)
{
    OWNED PyObject *state = NULL;
    PyObject *copy = NULL; /* owned, returned */

    EXEMPT (st) {
        state = PyObject_CallMethodNoArgs(object, st->str_state_dict);
        copy = state ? PyObject_CallOneArg(st->deepcopy, state) : NULL;
    }
    return copy;
}

/* What a user's own participant gives to be put back. New reference or NULL. */
static PyObject *
owner_user_state(oomkit_state *st, PyObject *object)
{
    int saves = oomkit_has_attribute(object, st->str_save);
    PyObject *saved = NULL; /* owned, returned */

    if (saves <= 0) {
        return saves < 0 ? NULL : owner_state(st, object);
    }
    EXEMPT (st) { /* marks are outside the budget, save() too */
        saved = PyObject_CallMethodNoArgs(object, st->str_save);
    }
    return saved;
}

/* optimizer_safety="copy": before a scheduler or scaler moves for the first time. */
int
oomkit_owner_copy(oomkit_call *call, PyObject *owner)
{
    if (oomkit_memo_find(call->entry.owners.copied, owner) != NULL ||
        PyObject_TypeCheck(owner, (PyTypeObject *)call->st->Module)) {
        return 0; /* an averaged model's parameters are compared instead */
    }
    return oomkit_memo_add(&call->entry.owners.copied, owner,
                           owner_state(call->st, owner));
}

static const char *const scaler_names[] = {"_scale", "_growth_tracker"};

/* The two tensors that a GradScaler makes when it is first used, one after the other:
 * an OOM between them leaves it half made. */
static PyObject *
scaler_tensors(PyObject *scaler)
{
    OWNED PyObject *one = PyObject_GetAttrString(scaler, scaler_names[0]);
    OWNED PyObject *two =
        one == NULL ? NULL : PyObject_GetAttrString(scaler, scaler_names[1]);

    return two != NULL ? PyTuple_Pack(2, one, two) : NULL;
}

static int
scaler_tensors_restore(PyObject *scaler, PyObject *both)
{
    int i;
    for (i = 0; i < 2; i++) {
        if (PyObject_SetAttrString(scaler, scaler_names[i], PyTuple_GET_ITEM(both, i)) <
            0) {
            return -1;
        }
    }
    return 0;
}

/* The count of batches of accelerate's Accelerator: (step, sync_gradients). New
 * reference or NULL. */
static PyObject *
accelerator_save(PyObject *accelerator)
{
    OWNED PyObject *step = PyObject_GetAttrString(accelerator, "step");
    OWNED PyObject *sync =
        step ? PyObject_GetAttrString(accelerator, "sync_gradients") : NULL;

    return sync ? PyTuple_Pack(2, step, sync) : NULL;
}

/* 0 or -1. */
static int
accelerator_restore(PyObject *accelerator, PyObject *saved)
{
    return PyObject_SetAttrString(accelerator, "step", PyTuple_GET_ITEM(saved, 0)) <
                       0 ||
                   PyObject_SetAttrString(accelerator, "sync_gradients",
                                          PyTuple_GET_ITEM(saved, 1)) < 0
               ? -1
               : 0;
}

int
oomkit_accelerator_mark(oomkit_call *call, PyObject *accelerator)
{
    return oomkit_memo_add(&call->entry.owners.user, accelerator,
                           accelerator_save(accelerator));
}

/* The user's own participants, scalers and learning rates, at entry of an attempt. */
int
oomkit_owners_mark(oomkit_call *call)
{
    const unsigned kinds =
        OWNERS_OF(OOMKIT_OWNER_USER) | OWNERS_OF(OOMKIT_OWNER_SCALER) |
        OWNERS_OF(OOMKIT_OWNER_OPTIMIZER) | OWNERS_OF(OOMKIT_OWNER_ACCELERATOR);

    EACH_OWNER (one, call->parts, kinds) {
        PyObject *saved; /* owned, then by the memo */
        if (one.kind == OOMKIT_OWNER_OPTIMIZER) {
            saved = oomkit_hyperparams_mark(call, one.object);
        } else if (one.kind == OOMKIT_OWNER_ACCELERATOR) {
            saved = accelerator_save(one.object);
        } else if (one.kind == OOMKIT_OWNER_SCALER) {
            saved = scaler_tensors(one.object);
        } else {
            saved = owner_user_state(call->st, one.object);
        }
        if (oomkit_memo_add(&call->entry.owners.user, one.object, saved) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Before a later micro-batch: values as at entry, so that a line that changes one
 * (`lr *= 0.9`) does so once in the end. 0 or -1. */
int
oomkit_owners_again(oomkit_call *call)
{
    if (call->cut->at == 0) {
        return 0;
    }
    EACH_MEMO (mark, call->entry.owners.user) {
        if (PyObject_TypeCheck(mark.object, (PyTypeObject *)call->st->Optimizer) &&
            oomkit_hyperparams_again(call->st, mark.object, mark.saved) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
scaler_restore(oomkit_call *call, PyObject *scaler, PyObject *saved)
{
    OWNED PyObject *states =
        PyObject_GetAttr(scaler, call->st->str_per_optimizer_states);
    OWNED PyObject *fresh = NULL;

    if (states == NULL) {
        return -1;
    }
    if (!PyDict_Check(states)) {
        oomkit_raise(PyExc_TypeError,
                     "auto_batch expected _per_optimizer_states of %s to be a "
                     "dictionary, got %s" SEE("options"),
                     Py_TYPE(scaler)->tp_name, Py_TYPE(states)->tp_name);
        return -1;
    }
    fresh = scaler_states_copy(saved);
    if (fresh == NULL) {
        return -1;
    }
    PyDict_Clear(states);
    return PyDict_Update(states, fresh);
}

/* optimizer_safety="copy": schedulers and scalers back to their pre-image. */
static int
owners_restore_copies(oomkit_call *call)
{
    const oomkit_state *st = call->st;

    EACH_MEMO (mark, call->entry.owners.copied) {
        OWNED PyObject *done = NULL, *state = NULL;
        EXEMPT (call->st) {
            state = PyObject_CallOneArg(st->deepcopy, mark.saved);
            done = state == NULL ? NULL
                                 : PyObject_CallMethodOneArg(
                                       mark.object, st->str_load_state_dict, state);
        }
        if (done == NULL) {
            return -1;
        }
    }
    return 0;
}

/* One of those that were marked at entry. 0 or -1. */
static int
owner_restore(oomkit_state *st, PyObject *object, PyObject *saved)
{
    OWNED PyObject *done = NULL;
    int saves;

    if (oomkit_accelerate_kind(object) >= 0) {
        return accelerator_restore(object, saved);
    }
    if (PyObject_TypeCheck(object, (PyTypeObject *)st->Optimizer)) {
        return oomkit_hyperparams_restore(st, object, saved);
    }
    if (PyObject_TypeCheck(object, (PyTypeObject *)st->GradScaler)) {
        return scaler_tensors_restore(object, saved);
    }
    saves = oomkit_has_attribute(object, st->str_save);
    done = saves < 0
               ? NULL
               : PyObject_CallMethodOneArg(
                     object, saves ? st->str_restore : st->str_load_state_dict, saved);
    return done == NULL ? -1 : 0;
}

/* Scalers' bookkeeping and the user's participants as they were. 0 or -1. */
int
oomkit_owners_restore(oomkit_call *call)
{
    /* Attributes first: what they name may have changed in place, and a copy has it. */
    if (oomkit_attributes_restore(call) < 0 || owners_restore_copies(call) < 0) {
        return -1;
    }
    EACH_MEMO (mark, call->entry.owners.scalers) {
        if (scaler_restore(call, mark.object, mark.saved) < 0) {
            return -1;
        }
    }
    EACH_MEMO (mark, call->entry.owners.user) {
        call->tries.groups_went |=
            oomkit_groups_grew(call->st, mark.object, mark.saved);
        if (owner_restore(call->st, mark.object, mark.saved) < 0) {
            return -1;
        }
    }
    return 0;
}

void
oomkit_owners_release(oomkit_savepoint *savepoint)
{
    oomkit_owner_marks *marks = &savepoint->owners;

    oomkit_memo_drop(&marks->scalers);
    oomkit_memo_drop(&marks->copied);
    oomkit_memo_drop(&marks->user);
    marks->failed_step = NULL;
    oomkit_memo_drop(&marks->attributes);
    oomkit_memo_drop(&marks->groups_after);
    oomkit_memo_drop(&marks->groups_end);
    oomkit_memo_drop(&marks->groups_made);
    oomkit_memo_drop(&marks->epochs);
    oomkit_memo_drop(&marks->scales);
}

int
oomkit_owners_now(oomkit_call *call, const oomkit_after *Py_UNUSED(after),
                  oomkit_savepoint *now)
{
    if (oomkit_owners_mark(call) < 0) {
        return -1;
    }
    now->owners.user = oomkit_memo_hold(call->entry.owners.user);
    return 0;
}

int
oomkit_owners_back(oomkit_call *call, const oomkit_savepoint *now,
                   int Py_UNUSED(finished))
{
    oomkit_memo_drop(&call->entry.owners.user);
    call->entry.owners.user = oomkit_memo_hold(now->owners.user);
    return oomkit_owners_restore(call);
}

int
oomkit_owners_visit(const oomkit_savepoint *savepoint, visitproc visit, void *arg)
{
    int seen = oomkit_memo_visit(savepoint->owners.user, visit, arg);

    return seen != 0 ? seen
                     : oomkit_memo_visit(savepoint->owners.attributes, visit, arg);
}

/* --- schedulers, while split --- */

/* Where a scheduler is: (its epoch, and how far in it with warm restarts by fractions
 * of one), None for what it has not. New reference or NULL. */
static PyObject *
epoch_of(PyObject *scheduler)
{
    OWNED PyObject *name = PyUnicode_FromString("T_cur"), *epoch = NULL, *in_it = NULL;
    int has = oomkit_has_attribute_string(scheduler, "last_epoch");

    if (name == NULL || has < 0) {
        return NULL;
    }
    epoch = has ? PyObject_GetAttrString(scheduler, "last_epoch") : Py_NewRef(Py_None);
    in_it = epoch == NULL ? NULL : oomkit_own_attribute(scheduler, name);
    if (epoch == NULL || (in_it == NULL && PyErr_Occurred())) {
        return NULL;
    }
    /* What is no plain number may be another one at each read. */
    return PyTuple_Pack(2, epoch,
                        in_it != NULL &&
                                (PyLong_CheckExact(in_it) || PyFloat_CheckExact(in_it))
                            ? in_it
                            : Py_None);
}

/* Before a split attempt: where every scheduler is. 0 or -1. */
int
oomkit_owners_epochs_note(oomkit_call *call)
{
    oomkit_memo_drop(&call->entry.owners.epochs);
    EACH_OWNER (scheduler, call->parts, OWNERS_OF(OOMKIT_OWNER_SCHEDULER)) {
        if (oomkit_memo_add(&call->entry.owners.epochs, scheduler.object,
                            epoch_of(scheduler.object)) < 0) {
            return -1;
        }
    }
    return 0;
}

/* A scheduler that moved although its step is held back (its bound step() was kept in a
 * variable): 1 with *scheduler (borrowed), 0, -1. */
int
oomkit_owners_epochs_moved(oomkit_call *call, PyObject **scheduler)
{
    EACH_MEMO (mark, call->entry.owners.epochs) {
        OWNED PyObject *epoch = epoch_of(mark.object);
        int same =
            epoch == NULL ? -1 : PyObject_RichCompareBool(epoch, mark.saved, Py_EQ);
        if (same != 1) {
            *scheduler = mark.object;
            return same < 0 ? -1 : 1;
        }
    }
    return 0;
}
