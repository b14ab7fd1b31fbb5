/* Hugging Face's Accelerator inside a step. Its accumulate() counts batches on entry
 * and decides from the count whether the optimizer steps: while the batch is split it
 * must count once, not once per micro-batch, and a roll-back must take the count back.
 * Known by name, so that nothing is imported. */
#include "optim.h"
#include "../hook/method.h"
#include "../py/refs.h"

/* An object of a class of this name (or derived from it) in accelerate. */
static int
accelerate_is(PyObject *object, const char *name)
{
    PyObject *mro = Py_TYPE(object)->tp_mro; /* borrowed */
    Py_ssize_t i;

    for (i = 0; mro != NULL && i < PyTuple_GET_SIZE(mro); i++) {
        PyTypeObject *type = (PyTypeObject *)PyTuple_GET_ITEM(mro, i); /* borrowed */
        PyObject *module; /* borrowed from the type */
        if ((type->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0 ||
            strcmp(type->tp_name, name) != 0) {
            continue;
        }
        module = oomkit_item(type->tp_dict, "__module__");
        if (module != NULL && PyUnicode_Check(module) &&
            PyUnicode_GET_LENGTH(module) >= 10 &&
            PyUnicode_1BYTE_KIND == PyUnicode_KIND(module) &&
            memcmp(PyUnicode_1BYTE_DATA(module), "accelerate", 10) == 0) {
            return 1;
        }
    }
    return 0;
}

/* Which kind of participant this object of accelerate's is, or -1. */
int
oomkit_accelerate_kind(PyObject *object)
{
    return accelerate_is(object, "Accelerator") ? (int)OOMKIT_OWNER_ACCELERATOR
           : accelerate_is(object, "AcceleratedScheduler") ? (int)OOMKIT_OWNER_SCHEDULER
                                                           : -1;
}

/* (step, sync_gradients). New reference or NULL. */
PyObject *
oomkit_accelerator_save(PyObject *accelerator)
{
    PyObject *step = PyObject_GetAttrString(accelerator, "step"); /* owned */
    PyObject *sync =                                              /* owned */
        step ? PyObject_GetAttrString(accelerator, "sync_gradients") : NULL;
    PyObject *saved = sync ? PyTuple_Pack(2, step, sync) : NULL; /* owned, returned */

    Py_XDECREF(step);
    Py_XDECREF(sync);
    return saved;
}

/* 0 or -1. */
int
oomkit_accelerator_restore(PyObject *accelerator, PyObject *saved)
{
    return PyObject_SetAttrString(accelerator, "step", PyTuple_GET_ITEM(saved, 0)) <
                       0 ||
                   PyObject_SetAttrString(accelerator, "sync_gradients",
                                          PyTuple_GET_ITEM(saved, 1)) < 0
               ? -1
               : 0;
}

/* What accumulate() calls on entry, in a split call: 1 it is to run (the first
 * micro-batch), 0 it has run for this batch, -1 with SplitError. */
int
oomkit_accelerator_counts(interceptor_object *self)
{
    oomkit_call *call = self->call;
    const char *what = NULL;

    if (self->name != call->st->str_do_sync) {
        what = "its count of batches cannot be taken back; pass "
               "participants=[accelerator] to auto_batch, or enter accumulate() around "
               "the decorated step";
    } else if (call->hooked.syncs++ > 0) {
        what = "it is entered twice in one step; make two decorated steps of it";
    }
    if (what == NULL) {
        return call->cut->at == 0;
    }
    call->refused.raised = 1;
    oomkit_raise(
        call->st->SplitError,
        "auto_batch cannot split this step: accelerator.accumulate() is entered "
        "inside it, and %s",
        what);
    return -1;
}

/* Puts the interceptor of one accelerator in place: accumulate() itself where it is to
 * be refused. 0 or -1. */
static int
accelerate_intercept(oomkit_call *call, PyObject *accelerator, int refuse)
{
    oomkit_state *st = call->st;
    PyObject *type = (PyObject *)Py_TYPE(accelerator); /* borrowed */

    int known = oomkit_has_attribute(type, st->str_do_sync);

    if (known < 0) {
        return -1;
    }
    refuse |= !known;
    return oomkit_intercept_one(call, accelerator, OOMKIT_OWNER_ACCELERATOR,
                                refuse ? st->str_accumulate : st->str_do_sync);
}

/* The module of this name, if it is imported. Looked up by hash: going through all of
 * sys.modules at each split call took as long as some micro-batches. Borrowed, or NULL
 * with or without an exception. */
static PyObject *
accelerate_module(PyObject *name)
{
    PyObject *modules = PyImport_GetModuleDict(); /* borrowed */

    return PyDict_Check(modules) ? PyDict_GetItemWithError(modules, name) : NULL;
}

/* Was an Accelerator ever made? Each one fills the state that all of them share. Where
 * that cannot be told the answer is yes. 1, 0 or -1. */
static int
accelerate_in_use(oomkit_state *st)
{
    PyObject *module;               /* borrowed, then owned */
    PyObject *type, *shared = NULL; /* owned */
    int result = 1;

    if (accelerate_module(st->str_accelerate_module) == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    module = Py_XNewRef(accelerate_module(st->str_accelerate_state));
    if (module == NULL && PyErr_Occurred()) {
        return -1;
    }
    type = module ? PyObject_GetAttrString(module, "AcceleratorState") : NULL;
    Py_XDECREF(module);
    shared = type ? PyObject_GetAttrString(type, "_shared_state") : NULL;
    if (shared != NULL) {
        result = PyObject_IsTrue(shared);
    } else if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_AttributeError)) {
        result = -1;
    } else {
        PyErr_Clear(); /* another version of accelerate */
    }
    Py_XDECREF(type);
    Py_XDECREF(shared);
    return result;
}

/* Accelerators that the search did not find, looked for through the collector once per
 * list of participants. 0 or -1. */
static int
accelerate_hidden(oomkit_call *call)
{
    PyObject *objects; /* owned */
    Py_ssize_t i, j;
    int result = call->parts->looked_for_accelerators ? 0 : accelerate_in_use(call->st);

    if (result <= 0) {
        return result;
    }
    objects = PyObject_CallNoArgs(call->st->gc_get_objects);
    if (objects == NULL) {
        return -1;
    }
    for (i = 0; i < PyList_GET_SIZE(objects) && result >= 0; i++) {
        PyObject *object = PyList_GET_ITEM(objects, i); /* borrowed */
        int known = 0;
        if (!accelerate_is(object, "Accelerator")) {
            continue;
        }
        for (j = 0; j < call->parts->owner_count && !known; j++) {
            PyObject *owner = oomkit_reference_get(call->parts->owners[j].ref);
            known = owner == object;
            Py_XDECREF(owner);
        }
        if (known) {
            continue;
        }
        result = oomkit_participants_add_hidden(call->parts, object,
                                                OOMKIT_OWNER_ACCELERATOR);
        if (result >= 0 &&
            call->tries.ooms == 0) { /* it has not counted this batch yet */
            result = oomkit_pairs_add(&call->entry.owners.user, object,
                                      oomkit_accelerator_save(object));
        }
        if (result >= 0) {
            result = accelerate_intercept(call, object, call->tries.ooms > 0);
        }
    }
    Py_DECREF(objects);
    call->parts->looked_for_accelerators = result >= 0;
    return result < 0 ? -1 : 0;
}

/* Before the first split attempt of a call. 0 or -1. */
int
oomkit_accelerate_split(oomkit_call *call)
{
    Py_ssize_t i, known = call->parts->owner_count;

    if (accelerate_hidden(call) < 0) {
        return -1;
    }
    for (i = 0; i < known; i++) {
        PyObject *accelerator; /* owned */
        int result;
        if (call->parts->owners[i].kind != OOMKIT_OWNER_ACCELERATOR) {
            continue;
        }
        accelerator = oomkit_reference_get(call->parts->owners[i].ref);
        if (accelerator == NULL) {
            continue;
        }
        result = accelerate_intercept(call, accelerator, 0);
        Py_DECREF(accelerator);
        if (result < 0) {
            return -1;
        }
    }
    return 0;
}
