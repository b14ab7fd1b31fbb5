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
        OWNED PyObject *parts = NULL;
        if (!PyType_IsSubtype(Py_TYPE(object), (PyTypeObject *)st->Module)) {
            continue;
        }
        parts = oomkit_own_attribute(object, st->str_modules);
        if (PyErr_Occurred() || /* without them Module.__init__ has not run */
            (parts != NULL && PyList_Append(modules, object) < 0)) {
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
    OWNED PyObject *dict = oomkit_own_attribute(module, name);

    if (dict == NULL) {
        return PyErr_Occurred() ? -1 : 0;
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
    OWNED PyObject *dict = oomkit_own_attribute(module, st->str_parameters);

    while (dict != NULL && PyDict_Check(dict) && PyDict_Next(dict, &at, &key, &value)) {
        OWNED PyObject *address = PyLong_FromVoidPtr(value);
        if (address == NULL || PySet_Discard(addresses, address) < 0) {
            return -1;
        }
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Is it known that no module has it? `address` is its. 1, 0 or -1. */
static int
is_known_alone(const oomkit_state *st, const PyObject *param, PyObject *address)
{
    PyObject *ref = st->params_alone == NULL /* borrowed */
                        ? NULL
                        : PyDict_GetItemWithError(st->params_alone, address);

    return ref == NULL ? (PyErr_Occurred() ? -1 : 0)
                       : PyWeakref_GET_OBJECT(ref) == param;
}

/* The addresses of parameters that no module which was found has, but for those of
 * which that is known. New set or NULL. */
static PyObject *
parameters_alone(oomkit_state *st, const oomkit_participants *parts)
{
    OWNED PyObject *alone = PySet_New(NULL);
    Py_ssize_t i;

    for (i = 0; alone != NULL && i < parts->param_count; i++) {
        OWNED PyObject *address = NULL;
        int known;
        if (!oomkit_tensor_is_parameter(st, parts->params[i])) {
            continue;
        }
        address = PyLong_FromVoidPtr(parts->params[i]);
        known = address == NULL ? -1 : is_known_alone(st, parts->params[i], address);
        if (known < 0 || (!known && PySet_Add(alone, address) < 0)) {
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

/* Those of `all` that have what is `alone` take part, and are noted where `noted` (a
 * list, or NULL). 0 or -1. */
static int
add_modules_of(oomkit_state *st, oomkit_participants *parts, PyObject *alone,
               PyObject *all, PyObject *noted)
{
    OWNED PyObject *reached = PySet_New(alone);
    OWNED PyObject *found = reached ? oomkit_modules_of(st, reached, all) : NULL;
    Py_ssize_t i;

    for (i = found == NULL ? 0 : PyList_GET_SIZE(found); i-- > 0;) {
        PyObject *module = PyList_GET_ITEM(found, i); /* borrowed */
        OWNED PyObject *ref = noted == NULL ? NULL : PyWeakref_NewRef(module, NULL);
        if ((noted != NULL && (ref == NULL || PyList_Append(noted, ref) < 0)) ||
            oomkit_participants_add(st, parts, module, 0) < 0) {
            return -1;
        }
    }
    return found == NULL ? -1 : 0;
}

/* What is alone still has no module, which is remembered. 0 or -1. */
static int
note_alone(oomkit_state *st, const oomkit_participants *parts)
{
    OWNED PyObject *alone = parameters_alone(st, parts);
    Py_ssize_t i;

    if (alone == NULL ||
        (st->params_alone == NULL && (st->params_alone = PyDict_New()) == NULL)) {
        return -1;
    }
    for (i = 0; PySet_GET_SIZE(alone) > 0 && i < parts->param_count; i++) {
        OWNED PyObject *address = PyLong_FromVoidPtr(parts->params[i]), *ref = NULL;
        const int is = address == NULL ? -1 : PySet_Contains(alone, address);
        if (is > 0) {
            ref = PyWeakref_NewRef(parts->params[i], NULL);
        }
        if (is < 0 || (is && (ref == NULL ||
                              PyDict_SetItem(st->params_alone, address, ref) < 0))) {
            return -1;
        }
    }
    return 0;
}

/* Those that are alive of the modules that were found before. New list or NULL. */
static PyObject *
modules_before(const oomkit_state *st)
{
    OWNED PyObject *modules = PyList_New(0), *refs = Py_XNewRef(st->modules_found);
    Py_ssize_t i;

    for (i = 0; modules && refs && i < PyList_GET_SIZE(refs); i++) {
        OWNED PyObject *module = oomkit_reference_get(PyList_GET_ITEM(refs, i));
        if (module != NULL && PyList_Append(modules, module) < 0) {
            return NULL;
        }
    }
    return STEAL(modules);
}

int
oomkit_participants_add_modules(oomkit_state *st, oomkit_participants *parts)
{
    OWNED PyObject *alone = parameters_alone(st, parts), *all = NULL, *noted = NULL;

    if (alone == NULL || PySet_GET_SIZE(alone) == 0) {
        return alone == NULL ? -1 : 0;
    }
    all = modules_before(st);
    if (all == NULL || add_modules_of(st, parts, alone, all, NULL) < 0) {
        return -1;
    }
    Py_SETREF(alone, parameters_alone(st, parts));
    if (alone == NULL || PySet_GET_SIZE(alone) == 0) {
        return alone == NULL ? -1 : 0;
    }
    Py_SETREF(all, oomkit_modules_alive(st));
    noted = all == NULL ? NULL : PyList_New(0);
    if (noted == NULL || add_modules_of(st, parts, alone, all, noted) < 0) {
        return -1;
    }
    Py_XSETREF(st->modules_found, STEAL(noted));
    return note_alone(st, parts);
}

int
oomkit_parameter_joins(oomkit_state *st, PyObject *param)
{
    OWNED PyObject *address =
        st->params_alone == NULL ? NULL : PyLong_FromVoidPtr(param);
    const int known = address == NULL ? 0 : PyDict_Contains(st->params_alone, address);

    if (known > 0) {
        return PyDict_DelItem(st->params_alone, address);
    }
    return known < 0 || PyErr_Occurred() ? -1 : 0;
}
