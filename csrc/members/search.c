/* Finding participants: arguments, the attributes of a bound object, closure and
 * globals that the code names, and the functions that it calls in turn. */
#include "search.h"
#include "../py/errors.h"
#include "../py/tensor.h"

#include <structmember.h>

#define CALLED_DEPTH 3     /* functions called by functions of the step */
#define OBJECT_LIMIT 10000 /* attributes looked at, whatever they lead to */
#define ITEM_LIMIT 64      /* elements of a list or a dictionary that are looked at */

static int
search_source(oomkit_search *s, PyObject *container, PyObject *key, PyObject *object,
              Py_ssize_t argument, Py_ssize_t item)
{
    oomkit_participants *parts = s->parts;
    oomkit_source *source;

    if (ARRAY_GROW(parts->sources, parts->source_count, parts->source_room) < 0) {
        return -1;
    }
    source = &parts->sources[parts->source_count++];
    source->container = Py_XNewRef(container);
    source->key = Py_XNewRef(key);
    source->object = object;
    source->argument = argument;
    source->item = item;
    return 0;
}

/* Is anything behind it: did adding it add something? */
static Py_ssize_t
search_total(const oomkit_participants *parts)
{
    return parts->param_count + parts->owner_count + parts->buffered_count +
           PyList_GET_SIZE(parts->roots);
}

static int
is_module_object(const oomkit_search *s, PyObject *object)
{
    return PyObject_TypeCheck(object, (PyTypeObject *)s->st->Module);
}

static int
name_is_private(PyObject *name)
{
    return PyUnicode_Check(name) && PyUnicode_GET_LENGTH(name) > 0 &&
           PyUnicode_READ_CHAR(name, 0) == '_';
}

static int
search_function(oomkit_search *s, PyObject *func, int depth);

/* A function or a method that has another name here than its own: what it leads to.
 * 1, 0 for anything else, or -1. */
static int
search_renamed(oomkit_search *s, PyObject *value, int depth)
{
    if (PyMethod_Check(value)) { /* its object may be the one that leads here */
        if (oomkit_search_value(s, PyMethod_GET_SELF(value), depth) < 0) {
            return -1;
        }
        value = PyMethod_GET_FUNCTION(value);
    }
    return !PyFunction_Check(value) ? 0 : search_function(s, value, 1) < 0 ? -1 : 1;
}

static int
search_attribute(oomkit_search *s, PyObject *object, PyObject *value, int depth)
{
    return !PyType_Check(object) && search_renamed(s, value, depth) < 0
               ? -1
               : oomkit_search_value(s, value, depth);
}

/* Those in an object's dictionary. 0 or -1. */
static int
search_own(oomkit_search *s, PyObject *object, int depth)
{
    OWNED PyObject *own = oomkit_own_attributes(object), *ref = NULL;
    Py_ssize_t i;
    int is_module = is_module_object(s, object);

    if (own == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear(); /* no dictionary: nothing to look at */
        return 0;
    }
    ref = PyWeakref_NewRef(object, NULL);
    if (ref == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) {
            return -1;
        }
        PyErr_Clear(); /* cannot be watched: its attributes are taken as they are now */
    }
    for (i = 0; i < PyTuple_GET_SIZE(own); i += 2) {
        PyObject *name = PyTuple_GET_ITEM(own, i);      /* borrowed */
        PyObject *value = PyTuple_GET_ITEM(own, i + 1); /* borrowed */
        Py_ssize_t before = search_total(s->parts);
        if ((is_module || PyType_Check(object)) && name_is_private(name)) {
            continue; /* parameters, modules, hooks, __doc__: of torch and of Python */
        }
        if (value == Py_None && ref != NULL && !PyType_Check(object) &&
            search_source(s, ref, name, value, -1, -1) < 0) {
            return -1; /* None at first: watched, so that what comes later is seen */
        }
        if (oomkit_is_plain(value) && !PyType_Check(value)) {
            continue;
        }
        if (s->looked_at++ >= OBJECT_LIMIT) {
            break;
        }
        if (search_attribute(s, object, value, depth - 1) < 0 ||
            (ref != NULL && search_total(s->parts) != before &&
             search_source(s, ref, name, value, -1, -1) < 0)) {
            return -1;
        }
    }
    return 0;
}

/* Those in the slots that a class has made. They are not watched: taken as they are
 * now. 0 or -1. */
static int
search_slots_of(oomkit_search *s, PyObject *object, PyTypeObject *base, int depth)
{
    OWNED PyObject *names = Py_XNewRef(((PyHeapTypeObject *)base)->ht_slots);
    Py_ssize_t i;

    for (i = 0; names != NULL && i < PyTuple_GET_SIZE(names); i++) {
        PyObject *slot = /* borrowed */
            PyDict_GetItemWithError(base->tp_dict, PyTuple_GET_ITEM(names, i));
        OWNED PyObject *value = NULL;
        if (slot == NULL && PyErr_Occurred()) {
            return -1;
        }
        if (slot == NULL || !Py_IS_TYPE(slot, &PyMemberDescr_Type) ||
            PyDescr_TYPE(slot) != base || s->looked_at++ >= OBJECT_LIMIT) {
            continue; /* somebody has put another there */
        }
        value =
            PyMember_GetOne((char *)object, ((PyMemberDescrObject *)slot)->d_member);
        if (value == NULL && !PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        if (value == NULL) {
            PyErr_Clear(); /* empty */
        } else if (search_attribute(s, object, value, depth - 1) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
search_slots(oomkit_search *s, PyObject *object, int depth)
{
    OWNED PyObject *mro = Py_NewRef(Py_TYPE(object)->tp_mro);
    Py_ssize_t i;

    for (i = 0; i < PyTuple_GET_SIZE(mro); i++) {
        PyTypeObject *base = (PyTypeObject *)PyTuple_GET_ITEM(mro, i);
        if (PyType_HasFeature(base, Py_TPFLAGS_HEAPTYPE) &&
            search_slots_of(s, object, base, depth) < 0) {
            return -1;
        }
    }
    return 0;
}

int
oomkit_search_attributes(oomkit_search *s, PyObject *object, int depth)
{
    if (search_own(s, object, depth) < 0) {
        return -1;
    }
    return PyType_Check(object) ? 0 : search_slots(s, object, depth);
}

/* What a functools.partial binds, and the function behind it. 0 or -1. */
static int
search_partial(oomkit_search *s, PyObject *value)
{
    OWNED PyObject *inner = NULL;
    int result = oomkit_participants_first_time(s->parts, value);

    if (result <= 0) {
        return result;
    }
    inner = PyObject_GetAttr(value, s->st->str_func);
    return inner == NULL || oomkit_search_partial(s, value) < 0
               ? -1
               : search_function(s, inner, 1);
}

/* What is called by another name than its own: elements of a list or a dictionary that
 * are functions or objects of the user's own. What containers among them hold is
 * oomkit_participants_add()'s. 0 or -1. */
static int
search_items(oomkit_search *s, PyObject *container, int depth)
{
    OWNED PyObject *values =
        PyDict_Check(container) ? PyDict_Values(container) : Py_NewRef(container);
    OWNED PyObject *items = values == NULL ? NULL : PySequence_Tuple(values);
    Py_ssize_t i;

    for (i = 0; items != NULL && i < PyTuple_GET_SIZE(items) && i < ITEM_LIMIT; i++) {
        PyObject *item = PyTuple_GET_ITEM(items, i); /* borrowed from items */
        int result = search_renamed(s, item, depth);
        if (result == 0 && !PyDict_CheckExact(item) && !PyList_CheckExact(item) &&
            !PyTuple_CheckExact(item)) {
            result = oomkit_search_value(s, item, depth);
        }
        if (result < 0) {
            return -1;
        }
    }
    return items == NULL ? -1 : 0;
}

int
oomkit_search_value(oomkit_search *s, PyObject *value, int depth)
{
    Py_ssize_t before = search_total(s->parts);
    int kind;
    if (PyType_Check(value)) {
        return depth > 0 ? oomkit_search_class(s, (PyTypeObject *)value, depth - 1) : 0;
    }
    if (oomkit_is_plain(value)) {
        return 0;
    }
    if (oomkit_participants_add(s->st, s->parts, value, 2) < 0) {
        return -1;
    }
    if (is_module_object(s, value)) {
        return depth > 0 ? oomkit_search_attributes(s, value, 1) : 0;
    }
    if (PyDict_CheckExact(value) || PyList_CheckExact(value) ||
        PyTuple_CheckExact(value)) {
        return depth > 0 ? search_items(s, value, depth - 1) : 0;
    }
    if (PyObject_TypeCheck(value, (PyTypeObject *)s->st->partial)) {
        return depth > 0 ? search_partial(s, value) : 0;
    }
    if (search_total(s->parts) != before || oomkit_tensor_check(s->st, value) ||
        PyModule_Check(value) || PyFunction_Check(value) || PyDict_Check(value) ||
        PyList_Check(value) || PyTuple_Check(value) ||
        (Py_TYPE(value)->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0) {
        return 0;
    }
    if (PyObject_TypeCheck(value, (PyTypeObject *)s->st->Optimizer)) {
        return 0; /* known already: its insides were walked */
    }
    kind = oomkit_accelerate_kind(value);
    if (kind >= 0 &&
        oomkit_participants_add_owner(s->parts, value, (oomkit_owner_kind)kind) < 0) {
        return -1;
    }
    if (oomkit_pipeline_is(value) &&
        oomkit_participants_add_owner(s->parts, value, OOMKIT_OWNER_PIPELINE) < 0) {
        return -1;
    }
    if (depth == OOMKIT_OBJECT_DEPTH && oomkit_search_class(s, Py_TYPE(value), 1) < 0) {
        return -1;
    }
    return depth > 0 ? oomkit_search_attributes(s, value, depth) : 0;
}

/* A module named by the code: attributes of it that the code names too. */
static int
search_module(oomkit_search *s, PyObject *module, PyObject *names)
{
    Py_ssize_t i;
    PyObject *dict = PyModule_GetDict(module); /* borrowed from module */
    const char *name = PyModule_GetName(module);

    if (name == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_SystemError)) {
            return -1;
        }
        PyErr_Clear(); /* a module without a name */
        return 0;
    }
    if (strcmp(name, "random") == 0) {
        s->parts->uses_random = 1;
        return 0;
    }
    if (strncmp(name, "numpy", 5) == 0) {
        s->parts->uses_numpy = 1;
        return 0;
    }
    if (strncmp(name, "torch", 5) == 0 || strncmp(name, "oomkit", 6) == 0) {
        return 0;
    }
    for (i = 0; i < PyTuple_GET_SIZE(names); i++) {
        PyObject *key = PyTuple_GET_ITEM(names, i);           /* borrowed */
        PyObject *value = PyDict_GetItemWithError(dict, key); /* borrowed */
        Py_ssize_t before = search_total(s->parts);
        if (value == NULL || oomkit_is_plain(value)) {
            continue;
        }
        if (oomkit_participants_add(s->st, s->parts, value, 1) < 0 ||
            (search_total(s->parts) != before &&
             search_source(s, dict, key, value, -1, -1) < 0)) {
            return -1;
        }
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* One value that the code names, found in a dict of globals or in a closure cell. */
static int
search_named(oomkit_search *s, PyObject *container, PyObject *key, PyObject *value,
             PyObject *names, int depth)
{
    Py_ssize_t before = search_total(s->parts);
    int result;

    if (oomkit_is_plain(value) && !PyType_Check(value)) {
        /* `model = None` at first: watched, so that a later model is seen. */
        return value == Py_None ? search_source(s, container, key, value, -1, -1) : 0;
    }
    if (PyModule_Check(value)) {
        return search_module(s, value, names);
    }
    if (PyFunction_Check(value) || PyMethod_Check(value)) {
        return depth > 0 ? search_function(s, value, depth - 1) : 0;
    }
    if (oomkit_step_check(s->st, value) ||
        Py_TYPE(value) == (PyTypeObject *)s->st->bound_type) {
        /* Called inside this one, another decorated step is a function like any other.
         */
        return depth > 0 ? search_function(s, value, depth - 1) : 0;
    }
    Py_INCREF(value);
    result = oomkit_search_value(s, value, OOMKIT_OBJECT_DEPTH);
    if (result == 0 && (search_total(s->parts) != before ||
                        PyObject_TypeCheck(value, (PyTypeObject *)s->st->Module))) {
        result = search_source(s, container, key, value, -1, -1);
    }
    Py_DECREF(value);
    return result;
}

static int
search_code(oomkit_search *s, PyObject *code, PyObject *globals, int depth)
{
    OWNED PyObject *names = PyObject_GetAttr(code, s->st->str_co_names);
    OWNED PyObject *consts = PyObject_GetAttr(code, s->st->str_co_consts);
    Py_ssize_t i;

    if (names == NULL || consts == NULL) {
        return -1;
    }
    for (i = 0; i < PyTuple_GET_SIZE(names); i++) {
        PyObject *key = PyTuple_GET_ITEM(names, i);              /* borrowed */
        PyObject *value = PyDict_GetItemWithError(globals, key); /* borrowed */
        if (value == NULL && PyErr_Occurred()) {
            return -1;
        }
        if (value != NULL && search_named(s, globals, key, value, names, depth) < 0) {
            return -1;
        }
    }
    for (i = 0; i < PyTuple_GET_SIZE(consts); i++) {
        PyObject *inner = PyTuple_GET_ITEM(consts, i); /* borrowed */
        if (PyCode_Check(inner) && search_code(s, inner, globals, depth) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
search_closure(oomkit_search *s, PyObject *closure, PyObject *names, int depth)
{
    Py_ssize_t i;
    for (i = 0; closure != NULL && i < PyTuple_GET_SIZE(closure); i++) {
        PyObject *cell = PyTuple_GET_ITEM(closure, i); /* borrowed */
        PyObject *value = PyCell_GET(cell);            /* borrowed */
        if (value != NULL && search_named(s, cell, NULL, value, names, depth) < 0) {
            return -1;
        }
    }
    return 0;
}

/* What calls an object of a class of the program's: `__call__`. 0 or -1. */
static int
search_call(oomkit_search *s, PyObject *object, int depth)
{
    PyTypeObject *type = Py_TYPE(object);
    OWNED PyObject *call = PyObject_TypeCheck(object, (PyTypeObject *)s->st->Module)
                               ? NULL
                               : Py_XNewRef(_PyType_Lookup(type, s->st->str_call));

    return call != NULL && PyFunction_Check(call) ? search_function(s, call, depth) : 0;
}

/* A Python function, a method (its object too), a partial, or any callable object. */
static int
search_function(oomkit_search *s, PyObject *func, int depth)
{
    OWNED PyObject *code = NULL, *names = NULL;
    int result;

    if (PyMethod_Check(func)) {
        return oomkit_search_value(s, PyMethod_GET_SELF(func), OOMKIT_OBJECT_DEPTH) < 0
                   ? -1
                   : search_function(s, PyMethod_GET_FUNCTION(func), depth);
    }
    if (oomkit_step_check(s->st, func)) {
        return search_function(s, ((oomkit_callable *)func)->func, depth);
    }
    if (Py_TYPE(func) == (PyTypeObject *)s->st->bound_type) {
        OWNED PyObject *inner = PyObject_GetAttr(func, s->st->str_wrapped);
        return inner == NULL ? -1 : search_function(s, inner, depth);
    }
    if (!PyFunction_Check(func)) {
        OWNED PyObject *inner = NULL;
        if (oomkit_search_value(s, func, OOMKIT_OBJECT_DEPTH) < 0 ||
            oomkit_search_partial(s, func) < 0) {
            return -1;
        }
        result = oomkit_has_attribute(func, s->st->str_func);
        if (result <= 0) {
            return result < 0 ? -1 : search_call(s, func, depth);
        }
        inner = PyObject_GetAttr(func, s->st->str_func);
        return inner == NULL ? -1 : search_function(s, inner, depth);
    }
    result = oomkit_participants_first_time(s->parts, func);
    if (result <= 0) {
        return result;
    }
    code = Py_NewRef(PyFunction_GET_CODE(func));
    names = PyObject_GetAttr(code, s->st->str_co_names);
    return names == NULL ||
                   oomkit_search_bound(s, PyFunction_GET_DEFAULTS(func),
                                       PyFunction_GET_KW_DEFAULTS(func)) < 0 ||
                   search_closure(s, PyFunction_GET_CLOSURE(func), names, depth) < 0 ||
                   search_code(s, code, PyFunction_GET_GLOBALS(func), depth) < 0
               ? -1
               : 0;
}

static int
search_arguments(oomkit_search *s, PyObject *const *args, Py_ssize_t total)
{
    Py_ssize_t i, j;
    oomkit_participants *parts = s->parts;

    for (i = 0; i < total; i++) {
        PyObject *value = args[i]; /* borrowed from the caller */
        Py_ssize_t before = search_total(parts);
        if ((oomkit_is_plain(value) && !PyType_Check(value)) ||
            oomkit_tensor_check(s->st, value) || PyDict_CheckExact(value)) {
            continue;
        }
        if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
            for (j = 0; j < PySequence_Fast_GET_SIZE(value); j++) {
                PyObject *item = PySequence_Fast_GET_ITEM(value, j); /* borrowed */
                before = search_total(parts);
                if (!oomkit_tensor_check(s->st, item) &&
                    (oomkit_participants_add(s->st, parts, item, 0) < 0 ||
                     (search_total(parts) != before &&
                      search_source(s, NULL, NULL, item, i, j) < 0))) {
                    return -1;
                }
            }
            continue;
        }
        if (oomkit_search_value(s, value, OOMKIT_OBJECT_DEPTH) < 0) {
            return -1;
        }
        if (search_total(parts) != before) {
            if (search_source(s, NULL, NULL, value, i, -1) < 0) {
                return -1;
            }
        } else if (parts->plain_count < OOMKIT_ARGUMENT_TYPES) {
            parts->plain_types[parts->plain_count++] = Py_TYPE(value);
        }
    }
    return 0;
}

/* Kinds that the engine knows how to save; anything else is the user's own. */
static int
search_is_known_kind(oomkit_state *st, PyObject *object)
{
    return oomkit_tensor_check(st, object) ||
           PyObject_TypeCheck(object, (PyTypeObject *)st->Module) ||
           PyObject_TypeCheck(object, (PyTypeObject *)st->Optimizer) ||
           PyObject_TypeCheck(object, (PyTypeObject *)st->LRScheduler) ||
           PyObject_TypeCheck(object, (PyTypeObject *)st->GradScaler) ||
           PyObject_TypeCheck(object, (PyTypeObject *)st->Generator);
}

static int
search_explicit(oomkit_search *s)
{
    Py_ssize_t i;
    PyObject *given = s->options->participants; /* borrowed from options */

    for (i = 0; given != NULL && i < PyTuple_GET_SIZE(given); i++) {
        OWNED PyObject *object = oomkit_reference_get(PyTuple_GET_ITEM(given, i));
        int result, kind;
        if (object == NULL) {
            continue; /* it is gone: nothing of it can take part */
        }
        kind = oomkit_accelerate_kind(object);
        result = search_is_known_kind(s->st, object)
                     ? oomkit_participants_add(s->st, s->parts, object, 2)
                     : oomkit_participants_add_owner(
                           s->parts, object,
                           kind < 0 ? OOMKIT_OWNER_USER : (oomkit_owner_kind)kind);
        if (result < 0) {
            return -1;
        }
    }
    return 0;
}

oomkit_participants *
oomkit_participants_find(oomkit_state *st, const oomkit_options *options,
                         PyObject *func, PyObject *const *args, Py_ssize_t positional,
                         Py_ssize_t total)
{
    oomkit_search s = {.st = st, .options = options};
    oomkit_participants *parts = PyMem_Calloc(1, sizeof(*parts));

    (void)positional;
    if (parts == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    parts->refs = 1;
    parts->generation = st->structure_generation;
    parts->device_index = -1;
    s.parts = parts;
    parts->roots = PyList_New(0);
    parts->seen = PySet_New(NULL);
    if (parts->roots == NULL || parts->seen == NULL || search_explicit(&s) < 0) {
        goto error;
    }
    if (search_arguments(&s, args, total) < 0 ||
        search_function(&s, func, CALLED_DEPTH) < 0 ||
        (parts->optimizer_led && oomkit_participants_add_modules(st, parts) < 0)) {
        goto error;
    }
    if (options->rng == OOMKIT_RNG_ALL) {
        parts->uses_random = parts->uses_numpy = 1;
    }
    Py_CLEAR(parts->seen);
    return parts;
error:
    oomkit_participants_release(parts);
    return NULL;
}
