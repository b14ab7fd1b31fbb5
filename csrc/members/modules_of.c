/* The modules that have given parameters, wherever they are: among all objects that the
 * collector knows. */
#include "members.h"
#include "../py/errors.h"
#include "../py/tensor.h"

PyObject *
oomkit_modules_alive(oomkit_state *st)
{
    OWNED PyObject *objects = PyObject_CallNoArgs(st->gc_get_objects);
    OWNED PyObject *modules = objects ? PyList_New(0) : NULL;
    Py_ssize_t i;

    for (i = 0; modules != NULL && i < PyList_GET_SIZE(objects); i++) {
        PyObject *object = PyList_GET_ITEM(objects, i); /* borrowed */
        int made;                                       /* has Module.__init__ run? */
        if (!PyType_IsSubtype(Py_TYPE(object), (PyTypeObject *)st->Module)) {
            continue;
        }
        made = oomkit_has_attribute(object, st->str_modules);
        if (made < 0 || (made && PyList_Append(modules, object) < 0)) {
            return NULL;
        }
    }
    return STEAL(modules);
}

/* Does a value of this dictionary attribute stand in `values` (a set of addresses)? */
static int
module_has(PyObject *module, PyObject *name, PyObject *values)
{
    PyObject *key, *value; /* borrowed from the dict */
    Py_ssize_t at = 0;
    int result = 0;
    OWNED PyObject *dict = PyObject_GetAttr(module, name);

    if (dict == NULL) {
        return -1;
    }
    while (result == 0 && PyDict_Check(dict) && PyDict_Next(dict, &at, &key, &value)) {
        OWNED PyObject *address = PyLong_FromVoidPtr(value);
        result = address == NULL ? -1 : PySet_Contains(values, address);
    }
    return result;
}

/* Adds to `reached` (a set of addresses) and to `found` the module if something of it
 * is reached. 1 it is new, 0, or -1. */
static int
module_reach(oomkit_state *st, PyObject *module, PyObject *reached, PyObject *found)
{
    OWNED PyObject *address = PyLong_FromVoidPtr(module);
    int has = address == NULL ? -1 : PySet_Contains(reached, address);

    if (has != 0) {
        return has < 0 ? -1 : 0;
    }
    has = module_has(module, st->str_parameters, reached);
    has = has == 0 ? module_has(module, st->str_modules, reached) : has;
    if (has == 1 &&
        (PySet_Add(reached, address) < 0 || PyList_Append(found, module) < 0)) {
        return -1;
    }
    return has;
}

PyObject *
oomkit_modules_of(oomkit_state *st, PyObject *reached, PyObject *all)
{
    OWNED PyObject *found = PyList_New(0);
    int more = found != NULL;
    Py_ssize_t i;

    while (more) { /* one level further out each time */
        more = 0;
        for (i = 0; i < PyList_GET_SIZE(all); i++) {
            int has = module_reach(st, PyList_GET_ITEM(all, i), reached, found);
            if (has < 0) {
                return NULL;
            }
            more |= has;
        }
    }
    return STEAL(found);
}

/* Takes the parameters of a module out of a set of addresses. 0 or -1. */
static int
module_discard(oomkit_state *st, PyObject *module, PyObject *addresses)
{
    PyObject *key, *value; /* borrowed from the dict */
    Py_ssize_t at = 0;
    OWNED PyObject *dict = PyObject_GetAttr(module, st->str_parameters);

    while (dict != NULL && PyDict_Check(dict) && PyDict_Next(dict, &at, &key, &value)) {
        OWNED PyObject *address = PyLong_FromVoidPtr(value);
        if (address == NULL || PySet_Discard(addresses, address) < 0) {
            return -1;
        }
    }
    return dict == NULL ? -1 : 0;
}

/* The addresses of parameters that no module which was found has. New set or NULL. */
static PyObject *
parameters_alone(oomkit_state *st, const oomkit_participants *parts)
{
    OWNED PyObject *alone = PySet_New(NULL);
    Py_ssize_t i;

    for (i = 0; alone != NULL && i < parts->param_count; i++) {
        OWNED PyObject *address = oomkit_tensor_is_parameter(st, parts->params[i])
                                      ? PyLong_FromVoidPtr(parts->params[i])
                                      : NULL;
        if (PyErr_Occurred() || (address != NULL && PySet_Add(alone, address) < 0)) {
            return NULL;
        }
    }
    for (i = 0; alone != NULL && i < PyList_GET_SIZE(parts->roots); i++) {
        OWNED PyObject *root = oomkit_reference_get(PyList_GET_ITEM(parts->roots, i));
        if (root != NULL && module_discard(st, root, alone) < 0) {
            return NULL;
        }
    }
    return STEAL(alone);
}

int
oomkit_participants_add_modules(oomkit_state *st, oomkit_participants *parts)
{
    OWNED PyObject *alone = parameters_alone(st, parts), *all = NULL, *found = NULL;
    Py_ssize_t i;

    if (alone == NULL || PySet_GET_SIZE(alone) == 0) {
        return alone == NULL ? -1 : 0;
    }
    all = oomkit_modules_alive(st);
    found = all == NULL ? NULL : oomkit_modules_of(st, alone, all);
    for (i = found == NULL ? 0 : PyList_GET_SIZE(found); i-- > 0;) {
        if (oomkit_participants_add(st, parts, PyList_GET_ITEM(found, i), 0) < 0) {
            return -1;
        }
    }
    return found == NULL ? -1 : 0;
}
