/* Attributes of optimizers and schedulers that their step() sets, beside all state that
 * torch would save: `_opt_called` (by the wrapper of a scheduler), the count and the
 * epoch of a scheduler, `grad_scale` and `found_inf` of a fused update, whatever a
 * class of the user's counts. A GradScaler takes those two away when step() has
 * returned, and multiplies by a `grad_scale` that it finds: one that a failure has left
 * would make the next update wrong without a word. So they go back where an update has
 * failed, also where the update cannot: the checkpoint that is asked for then has none
 * of them. */
#include "attributes.h"
#include "errors.h"
#include "pairs.h"

/* Where interceptors stand: install.c puts them there and takes them out. */
static int
attributes_ours(const oomkit_state *st, const PyObject *name)
{
    return name == st->str_step || name == st->str_zero_grad ||
           name == st->str_state_dict;
}

/* The schedulers that a ChainedScheduler or a SequentialLR steps. 0 or -1. */
static int
attributes_mark_inner(oomkit_call *call, PyObject *object)
{
    PyObject *dict = PyObject_GenericGetDict(object, NULL); /* owned */
    PyObject *inner = dict == NULL ? NULL : oomkit_item(dict, "_schedulers");
    /* borrowed from dict */
    Py_ssize_t i;
    int result = dict == NULL ? -1 : 0;

    for (i = 0; result == 0 && inner != NULL && PyList_Check(inner) &&
                i < PyList_GET_SIZE(inner);
         i++) {
        PyObject *scheduler = PyList_GET_ITEM(inner, i); /* borrowed */
        if (PyObject_TypeCheck(scheduler, (PyTypeObject *)call->st->LRScheduler)) {
            result = oomkit_attributes_mark(call, scheduler);
        }
    }
    Py_XDECREF(dict);
    return result;
}

/* Its place in the list, or -1. */
static Py_ssize_t
attributes_find(const oomkit_call *call, const PyObject *object)
{
    PyObject *list = call->attributes; /* borrowed from call */
    Py_ssize_t i = list == NULL ? 0 : PyList_GET_SIZE(list);

    while (i-- > 0 && PyTuple_GET_ITEM(PyList_GET_ITEM(list, i), 0) != object) {
    }
    return i;
}

/* Do the marks of an object's earlier step() in this call hold for another? Inside a
 * scaler's they do, and while the call can go back to its entry. 1, 0 or -1. */
static int
attributes_hold(oomkit_call *call)
{
    int committed;

    if (call->intercept_depth > 1 || call->options->optimizer_copy) {
        return 1;
    }
    committed = oomkit_tx_committed(call);
    return committed < 0 ? -1 : !committed;
}

int
oomkit_attributes_mark(oomkit_call *call, PyObject *object)
{
    Py_ssize_t at = attributes_find(call, object);
    PyObject *dict, *saved, *pair; /* owned */
    int hold = at < 0 ? 0 : attributes_hold(call);

    if (hold != 0) {
        return hold < 0 ? -1 : 0;
    }
    dict = PyObject_GenericGetDict(object, NULL);
    saved = dict == NULL ? NULL : PyDict_Copy(dict);
    Py_XDECREF(dict);
    if (at < 0) {
        return oomkit_pairs_add(&call->attributes, object, saved) < 0
                   ? -1
                   : attributes_mark_inner(call, object);
    }
    pair = saved == NULL ? NULL : PyTuple_Pack(2, object, saved);
    Py_XDECREF(saved);
    return pair == NULL || PyList_SetItem(call->attributes, at, pair) < 0 ? -1 : 0;
}

/* One attribute as `saved` has it. 0 or -1. */
static int
attributes_put(PyObject *dict, PyObject *saved, PyObject *name)
{
    PyObject *was = PyDict_GetItemWithError(saved, name); /* borrowed */
    PyObject *now = PyDict_GetItemWithError(dict, name);  /* borrowed */

    if (PyErr_Occurred()) {
        return -1;
    }
    return was == now    ? 0
           : was == NULL ? PyDict_DelItem(dict, name)
                         : PyDict_SetItem(dict, name, was);
}

static int
attributes_put_all(const oomkit_state *st, PyObject *dict, PyObject *saved)
{
    PyObject *names = PyDict_Keys(dict); /* owned */
    PyObject *name;                      /* borrowed */
    Py_ssize_t i, at = 0;
    int result = names == NULL ? -1 : 0;

    for (i = 0; result == 0 && i < PyList_GET_SIZE(names); i++) {
        name = PyList_GET_ITEM(names, i);
        if (!attributes_ours(st, name)) {
            result = attributes_put(dict, saved, name);
        }
    }
    Py_XDECREF(names);
    while (result == 0 && PyDict_Next(saved, &at, &name, NULL)) {
        if (!attributes_ours(st, name)) {
            result = attributes_put(dict, saved, name);
        }
    }
    return result;
}

static int
attributes_back(const oomkit_call *call, Py_ssize_t at)
{
    PyObject *pair = Py_NewRef(PyList_GET_ITEM(call->attributes, at)); /* owned */
    PyObject *dict =                                                   /* owned */
        PyObject_GenericGetDict(PyTuple_GET_ITEM(pair, 0), NULL);
    int result = dict == NULL
                     ? -1
                     : attributes_put_all(call->st, dict, PyTuple_GET_ITEM(pair, 1));

    Py_XDECREF(dict);
    Py_DECREF(pair); /* finalisers of what went have run */
    return result;
}

int
oomkit_attributes_restore(oomkit_call *call)
{
    Py_ssize_t i;
    int result = 0;

    for (i = 0; result == 0 && call->attributes != NULL &&
                i < PyList_GET_SIZE(call->attributes);
         i++) {
        result = attributes_back(call, i);
    }
    return result;
}

int
oomkit_attributes_undo(oomkit_call *call, PyObject *optimizer)
{
    PyObject *exception = oomkit_exception_take(); /* owned, given back */
    Py_ssize_t at = attributes_find(call, optimizer);

    if (at >= 0 && attributes_back(call, at) < 0) {
        Py_XDECREF(exception);
        return -1;
    }
    oomkit_exception_give(exception);
    return 0;
}
