/* What a decorated method knows, object by object. One function serves every object of
 * its class, and those may be a teacher and a student, or two trainers: the sizes that
 * the one has found, the losses that it returned and the checks that it has passed say
 * nothing about the other. The step itself knows about the object that it met first;
 * each later one gets a step of its own, out of sight, that writes to the same records.
 */
#include "types.h"

static int
instance_is_alive(const oomkit_step *step)
{
    return step->owner != NULL && PyWeakref_GET_OBJECT(step->owner) != Py_None;
}

/* Takes out the steps of objects that are gone. 0 or -1. */
static int
instances_sweep(oomkit_step *step)
{
    PyObject *key, *value; /* borrowed from the dict */
    OWNED PyObject *dead = PyList_New(0);
    Py_ssize_t at = 0, i;

    if (dead == NULL) {
        return -1;
    }
    while (PyDict_Next(step->instances, &at, &key, &value)) {
        if (!instance_is_alive(step_CAST(value)) && PyList_Append(dead, key) < 0) {
            return -1;
        }
    }
    step->recent = step;
    for (i = 0; i < PyList_GET_SIZE(dead); i++) {
        if (PyDict_DelItem(step->instances, PyList_GET_ITEM(dead, i)) < 0) {
            if (!PyErr_ExceptionMatches(PyExc_KeyError)) {
                return -1;
            }
            PyErr_Clear(); /* a finaliser has called the step and swept, too */
        }
    }
    return 0;
}

/* A step for one object more. New reference or NULL. */
static oomkit_step *
instance_new(oomkit_step *parent, PyObject *owner)
{
    PyTypeObject *type = Py_TYPE(parent);
    OWNED PyObject *made = type->tp_alloc(type, 0);
    OWNED PyObject *options = oomkit_step_options(parent, NULL);
    oomkit_step *self = step_CAST(made); /* borrowed from made */

    if (made == NULL || options == NULL) {
        return NULL;
    }
    self->st = parent->st;
    self->vectorcall = parent->vectorcall;
    self->updates = -1;
    self->recent = self;
    self->parent = step_CAST(Py_NewRef(parent));
    self->history = parent->history;
    self->func = Py_NewRef(parent->func);
    self->names = Py_XNewRef(parent->names);
    self->skip = parent->skip;
    self->owner = Py_NewRef(owner);
    if (oomkit_options_parse(self->st, options, &self->options) < 0) {
        return NULL;
    }
    Py_XSETREF(self->options.label, Py_XNewRef(parent->options.label));
    self->recall = self->seen_oom = self->options.remember;
    return step_CAST(STEAL(made));
}

oomkit_step *
oomkit_step_of_instance(oomkit_step *step, PyObject *object)
{
    OWNED PyObject *address = NULL, *ref = NULL, *made = NULL;
    oomkit_step *known = NULL; /* borrowed from the dictionary */

    if (!PyType_SUPPORTS_WEAKREFS(Py_TYPE(object))) {
        return step; /* such objects share what is known: one cannot be told from the
                        next that has its address */
    }
    if (step->owner != NULL && PyWeakref_GET_OBJECT(step->owner) == object) {
        return step->recent = step;
    }
    address = PyLong_FromVoidPtr(object);
    if (address == NULL) {
        return NULL;
    }
    if (step->instances != NULL) {
        known = (oomkit_step *)PyDict_GetItemWithError(step->instances, address);
    }
    if (known != NULL && PyWeakref_GET_OBJECT(known->owner) == object) {
        return step->recent = known;
    }
    ref = PyErr_Occurred() ? NULL : PyWeakref_NewRef(object, NULL);
    if (ref == NULL) {
        return NULL; /* what is known is still its owner's */
    }
    if (step->owner == NULL) {
        step->owner = STEAL(ref);
        return step;
    }
    if (step->instances == NULL) {
        step->instances = PyDict_New();
    }
    if (step->instances != NULL && instances_sweep(step) == 0) {
        made = (PyObject *)instance_new(step, ref);
    }
    if (made == NULL || PyDict_SetItem(step->instances, address, made) < 0) {
        return NULL;
    }
    return step->recent = step_CAST(made); /* the dictionary's now */
}

void
oomkit_step_drop_instances(oomkit_step *step)
{
    step->recent = step;
    Py_CLEAR(step->instances);
}
