/* What a copy of a participant gets in place of our interceptor: the copy is an
 * ordinary module, optimizer or scheduler.
 *
 * copy.deepcopy(model) inside a step copies the instance dictionary, and our entry in
 * it. The entry of the copy is taken out with the others when the call ends; until then
 * it is the plain method of the copy. A pickle cannot be told apart from the object it
 * becomes: it gets the bound method. */
#include "hook.h"
#include "../undo/undo.h"

/* The class's own method bound to `object`. New reference or NULL. */
static PyObject *
bound_method(const interceptor_object *self, PyObject *object)
{
    PyObject *method = PyObject_GetAttr((PyObject *)Py_TYPE(object), self->name);

    if (method != NULL && PyFunction_Check(method)) {
        Py_SETREF(method, PyMethod_New(method, object));
    }
    return method;
}

PyObject *
oomkit_interceptor_deepcopy(PyObject *op, PyObject *memo)
{
    interceptor_object *self = interceptor_CAST(op);
    oomkit_state *st = oomkit_state_of_type(Py_TYPE(op));
    OWNED PyObject *address = NULL, *copy = NULL;

    if (self->original != NULL || self->target == NULL) {
        return PyObject_CallFunctionObjArgs(
            st->deepcopy, self->original == NULL ? Py_None : self->original, memo,
            NULL);
    }
    address = PyLong_FromVoidPtr(self->target);
    copy = address ? PyObject_GetItem(memo, address) : NULL;
    if (copy == NULL && PyErr_ExceptionMatches(PyExc_KeyError)) {
        PyErr_Clear(); /* the method alone is copied: with what it is bound to */
        copy = PyObject_CallFunctionObjArgs(st->deepcopy, self->target, memo, NULL);
        return copy ? bound_method(self, copy) : NULL;
    }
    if (copy == NULL) {
        return NULL;
    }
    return self->call != NULL && self->call == oomkit_call_current()
               ? oomkit_intercept_copy(self->call, copy, self->name)
               : bound_method(self, copy);
}

PyObject *
oomkit_interceptor_reduce(PyObject *op, PyObject *Py_UNUSED(protocol))
{
    interceptor_object *self = interceptor_CAST(op);
    OWNED PyObject *module = NULL, *function = NULL;

    module = PyImport_ImportModule(self->original != NULL ? "operator" : "builtins");
    function =
        module ? PyObject_GetAttrString(module, self->original ? "getitem" : "getattr")
               : NULL;
    if (function == NULL) {
        return NULL;
    }
    return self->original != NULL
               ? Py_BuildValue("O((O)i)", function, self->original, 0)
               : Py_BuildValue("O(OO)", function,
                               self->target == NULL ? Py_None : self->target,
                               self->name);
}

/* A scheduler's state_dict() is its instance dictionary: our own entries are not in it.
 */
PyObject *
oomkit_interceptor_state_dict(interceptor_object *self, PyObject *const *args,
                              size_t nargsf, PyObject *kwnames)
{
    PyObject *key, *value; /* borrowed */
    OWNED PyObject *clean = NULL;
    OWNED PyObject *state = oomkit_interceptor_original(self, args, nargsf, kwnames);
    Py_ssize_t at = 0;

    if (state == NULL || !PyDict_CheckExact(state)) {
        return STEAL(state);
    }
    clean = PyDict_New();
    while (clean != NULL && PyDict_Next(state, &at, &key, &value)) {
        if (Py_TYPE(value) != Py_TYPE(self) && PyDict_SetItem(clean, key, value) < 0) {
            return NULL;
        }
    }
    return STEAL(clean);
}
