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
    PyObject *key, *value;          /* borrowed from the dict */
    PyObject *dead = PyList_New(0); /* owned */
    Py_ssize_t at = 0, i;

    while (dead != NULL && PyDict_Next(step->instances, &at, &key, &value)) {
        if (!instance_is_alive(step_CAST(value)) && PyList_Append(dead, key) < 0) {
            Py_CLEAR(dead);
        }
    }
    if (dead == NULL) {
        return -1;
    }
    step->recent = step;
    for (i = 0; i < PyList_GET_SIZE(dead); i++) {
        if (PyDict_DelItem(step->instances, PyList_GET_ITEM(dead, i)) < 0) {
            if (!PyErr_ExceptionMatches(PyExc_KeyError)) {
                Py_DECREF(dead);
                return -1;
            }
            PyErr_Clear(); /* a finaliser has called the step and swept, too */
        }
    }
    Py_DECREF(dead);
    return 0;
}

/* A step for one object more. New reference or NULL. */
static oomkit_step *
instance_new(oomkit_step *parent, PyObject *owner)
{
    PyTypeObject *type = Py_TYPE(parent);
    oomkit_step *self = step_CAST(type->tp_alloc(type, 0)); /* owned */
    PyObject *options = oomkit_step_options(parent, NULL);  /* owned */

    if (self == NULL || options == NULL) {
        goto error;
    }
    self->st = parent->st;
    self->vectorcall = parent->vectorcall;
    self->updates = -1;
    self->recent = self;
    self->parent = step_CAST(Py_NewRef(parent));
    self->ring = parent->ring; /* borrowed from parent */
    self->func = Py_NewRef(parent->func);
    self->names = Py_XNewRef(parent->names);
    self->skip = parent->skip;
    self->owner = Py_NewRef(owner);
    if (oomkit_options_parse(self->st, options, &self->options) < 0) {
        goto error;
    }
    Py_XSETREF(self->options.label, Py_XNewRef(parent->options.label));
    self->recall = self->seen_oom = self->options.remember;
    Py_DECREF(options);
    return self;
error:
    Py_XDECREF(options);
    Py_XDECREF(self);
    return NULL;
}

oomkit_step *
oomkit_step_of_instance(oomkit_step *step, PyObject *object)
{
    PyObject *ref, *address;                 /* owned */
    oomkit_step *known = NULL, *made = NULL; /* borrowed; owned */

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
        Py_DECREF(address);
        return step->recent = known;
    }
    ref = PyErr_Occurred() ? NULL : PyWeakref_NewRef(object, NULL);
    if (ref == NULL || step->owner == NULL) {
        Py_DECREF(address);
        Py_XSETREF(step->owner, ref);
        return ref == NULL ? NULL : step;
    }
    if (step->instances == NULL) {
        step->instances = PyDict_New();
    }
    if (step->instances != NULL && instances_sweep(step) == 0) {
        made = instance_new(step, ref);
    }
    if (made != NULL &&
        PyDict_SetItem(step->instances, address, (PyObject *)made) == 0) {
        step->recent = made;
    }
    Py_XDECREF(made); /* the dictionary's now */
    Py_DECREF(ref);
    Py_DECREF(address);
    return PyErr_Occurred() ? NULL : made;
}

void
oomkit_step_drop_instances(oomkit_step *step)
{
    step->recent = step;
    Py_CLEAR(step->instances);
}
