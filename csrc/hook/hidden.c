/* Schedulers and averaged models that no name and no argument of a step leads to: in a
 * deque, in a callback far away, behind a weak reference. All that there are are known:
 * those from before by a look at all objects that the collector knows, once per
 * process, the others when they are made (oomkit._engine.patches). They have to be
 * marked before a step begins, for a scheduler may be stepped before the loss. So are
 * modules with buffers, which torch's hook tells of; copies that are made later are
 * not. */
#include "hook.h"
#include "../py/errors.h"

#define FEW 64

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

static int
hidden_append(PyObject *list, PyObject *object)
{
    OWNED PyObject *ref = PyWeakref_NewRef(object, NULL);

    return ref == NULL ? -1 : PyList_Append(list, ref);
}

/* Has a module, whose class this may be, buffers? 1, 0 or -1. */
static int
has_buffers(const oomkit_state *st, PyObject *object)
{
    OWNED PyObject *buffers =
        PyType_IsSubtype(Py_TYPE(object), (PyTypeObject *)st->Module)
            ? oomkit_own_attribute(object, st->str_buffers)
            : NULL;

    return buffers != NULL    ? PyDict_Check(buffers) && PyDict_GET_SIZE(buffers) > 0
           : PyErr_Occurred() ? -1
                              : 0;
}

/* One whose class gives it no hash is not known. */
static void
buffered_add(PyObject *all, PyObject *module)
{
    OWNED PyObject *done = PyObject_CallMethod(all, "add", "O", module);

    if (done == NULL) {
        oomkit_error_dismiss(); /* as one that has been copied */
    }
}

void
oomkit_hidden_buffered(const oomkit_state *st, PyObject *module)
{
    if (st->buffered_all != NULL) { /* else all are looked for, later */
        buffered_add(st->buffered_all, module);
    }
}

/* All that there are. 0 or -1. */
static int
hidden_scan(oomkit_state *st)
{
    OWNED PyObject *objects = PyObject_CallNoArgs(st->gc_get_objects);
    OWNED PyObject *found = objects == NULL ? NULL : PyList_New(0);
    OWNED PyObject *buffered = found == NULL ? NULL : PyObject_CallNoArgs(st->weak_set);
    Py_ssize_t i;

    for (i = 0; buffered != NULL && i < PyList_GET_SIZE(objects); i++) {
        PyObject *object = PyList_GET_ITEM(objects, i); /* borrowed */
        int has;
        if ((Py_TYPE(object)->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0) {
            continue;
        }
        has = has_buffers(st, object);
        if (has > 0) {
            buffered_add(buffered, object);
        }
        if (has < 0 || ((is_scheduler(st, object) || is_averaged(st, object)) &&
                        hidden_append(found, object) < 0)) {
            return -1;
        }
    }
    if (buffered == NULL) {
        return -1;
    }
    Py_XSETREF(st->hidden_all, STEAL(found));
    Py_XSETREF(st->buffered_all, STEAL(buffered));
    return 0;
}

/* Takes out those that are gone, which no call may be reading: a new list. 0 or -1. */
static int
hidden_tidy(oomkit_state *st)
{
    OWNED PyObject *alive = PyList_New(0);
    Py_ssize_t i;

    for (i = 0; alive != NULL && i < PyList_GET_SIZE(st->hidden_all); i++) {
        PyObject *ref = PyList_GET_ITEM(st->hidden_all, i); /* borrowed */
        if (PyWeakref_GET_OBJECT(ref) != Py_None && PyList_Append(alive, ref) < 0) {
            return -1;
        }
    }
    if (alive == NULL) {
        return -1;
    }
    st->hidden_few = 2 * PyList_GET_SIZE(alive) + FEW;
    Py_XSETREF(st->hidden_all, STEAL(alive));
    return 0;
}

int
oomkit_hidden_made(oomkit_state *st, PyObject *object)
{
    st->hidden_made++;
    if (st->hidden_all == NULL) {
        return 0; /* nobody has looked yet */
    }
    if (PyList_GET_SIZE(st->hidden_all) > st->hidden_few && hidden_tidy(st) < 0) {
        return -1;
    }
    return hidden_append(st->hidden_all, object);
}

/* Is it one that the search did not find, of an optimizer that takes part? 1, 0 or -1.
 */
static int
is_hidden(const oomkit_call *call, PyObject *object)
{
    OWNED PyObject *optimizer = NULL;

    if (oomkit_participants_have(call->parts, object)) {
        return 0;
    }
    if (is_averaged(call->st, object)) {
        return 1;
    }
    optimizer = oomkit_own_attribute(object, call->st->str_optimizer);
    return optimizer != NULL  ? oomkit_participants_have(call->parts, optimizer)
           : PyErr_Occurred() ? -1
                              : 0;
}

static int
hidden_take(oomkit_call *call, PyObject *object)
{
    const oomkit_owner_kind kind =
        is_scheduler(call->st, object) ? OOMKIT_OWNER_SCHEDULER : OOMKIT_OWNER_AVERAGED;

    return oomkit_participants_add_hidden(call->parts, object, kind) < 0
               ? -1
               : oomkit_intercept_owner(call, object, kind);
}

int
oomkit_hidden_look(oomkit_call *call)
{
    oomkit_state *st = call->st;
    const uint64_t made = st->hidden_made;
    OWNED PyObject *all = NULL;
    Py_ssize_t i;

    if (call->parts->hidden_taken == made + 1) {
        return 0;
    }
    if (st->hidden_all == NULL && hidden_scan(st) < 0) {
        return -1;
    }
    all = Py_NewRef(st->hidden_all);
    for (i = 0; i < PyList_GET_SIZE(all); i++) {
        OWNED PyObject *object = oomkit_reference_get(PyList_GET_ITEM(all, i));
        const int hidden = object == NULL ? 0 : is_hidden(call, object);
        if (hidden < 0 || (hidden && hidden_take(call, object) < 0)) {
            return -1;
        }
    }
    call->parts->hidden_taken = made + 1;
    return 0;
}
