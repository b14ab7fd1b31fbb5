/* Hugging Face's Accelerator inside a step. Its accumulate() counts batches on entry
 * and decides from the count whether the optimizer steps: while the batch is split it
 * must count once, not once per micro-batch, and a roll-back must take the count back.
 * Known by name, so that nothing is imported. */
#include "hook.h"
#include "../call/call.h"
#include "../optim/optim.h"

/* What accumulate() calls on entry, in a split call: 1 it is to run (the first
 * micro-batch), 0 it has run for this batch, -1 with SplitError. */
int
oomkit_accelerator_counts(interceptor_object *self)
{
    oomkit_call *call = self->call;
    const char *what = NULL;

    if (self->name != call->st->str_do_sync) {
        what = "its counter of batches cannot be restored; pass "
               "participants=[accelerator] to auto_batch, or enter accumulate() around "
               "the decorated step";
    } else if (call->hooked.syncs++ > 0) {
        what = "it is entered twice in one step; make two decorated steps of it";
    }
    if (what == NULL) {
        return call->cut->at == 0;
    }
    return oomkit_refuse_step(
        call, "accelerator.accumulate() is entered inside it, and %s" SEE("accelerate"),
        what);
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
    OWNED PyObject *module = NULL, *type = NULL, *shared = NULL;

    if (accelerate_module(st->str_accelerate_module) == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    module = Py_XNewRef(accelerate_module(st->str_accelerate_state));
    if (module == NULL && PyErr_Occurred()) {
        return -1;
    }
    type = module ? PyObject_GetAttrString(module, "AcceleratorState") : NULL;
    shared = type ? PyObject_GetAttrString(type, "_shared_state") : NULL;
    if (shared != NULL) {
        return PyObject_IsTrue(shared);
    }
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return -1;
    }
    PyErr_Clear(); /* another version of accelerate */
    return 1;
}

/* Accelerators that the search did not find, looked for through the collector once per
 * list of participants. 0 or -1. */
static int
accelerate_hidden(oomkit_call *call)
{
    OWNED PyObject *objects = NULL;
    Py_ssize_t i;
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
        if (!oomkit_accelerate_is(object, "Accelerator")) {
            continue;
        }
        EACH_OWNER (owner, call->parts, OWNERS_ALL) {
            if (owner.object == object) {
                known = 1;
                break;
            }
        }
        if (known) {
            continue;
        }
        result = oomkit_participants_add_hidden(call->parts, object,
                                                OOMKIT_OWNER_ACCELERATOR);
        if (result >= 0 &&
            call->tries.ooms == 0) { /* it has not counted this batch yet */
            result = oomkit_accelerator_mark(call, object);
        }
        if (result >= 0) {
            result = accelerate_intercept(call, object, call->tries.ooms > 0);
        }
    }
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
        OWNED PyObject *accelerator = NULL;
        if (call->parts->owners[i].kind != OOMKIT_OWNER_ACCELERATOR) {
            continue;
        }
        accelerator = oomkit_reference_get(call->parts->owners[i].ref);
        if (accelerator != NULL && accelerate_intercept(call, accelerator, 0) < 0) {
            return -1;
        }
    }
    return 0;
}
