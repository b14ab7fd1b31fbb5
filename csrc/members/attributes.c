/* An object's own attributes, read where the interpreter keeps them: in an array that
 * goes with the names of the type, or in a dictionary. Asking for the dictionary of an
 * object makes one, and all code that reads its attributes misses from then on what the
 * interpreter has learned: a step of a small model with AdamW took 4 us longer. */
#define Py_BUILD_CORE 1 /* the array is no public interface */
#include "members.h"

#if OOMKIT_DICT_SLOWS_READING
#include <internal/pycore_object.h>
#include <internal/pycore_dict.h>

#define PERTURB_SHIFT 5 /* as in dictobject.c */

/* The array, or NULL where the object has none. */
static PyObject **
own_values(PyObject *object)
{
    if ((Py_TYPE(object)->tp_flags & Py_TPFLAGS_MANAGED_DICT) == 0) {
        return NULL;
    }
#if OOMKIT_DICT_OR_VALUES
    PyDictOrValues found = *_PyObject_DictOrValuesPointer(object);
    return _PyDictOrValues_IsValues(found) ? _PyDictOrValues_GetValues(found)->values
                                           : NULL;
#else
    PyDictValues *found = *_PyObject_ValuesPointer(object);
    return found != NULL ? found->values : NULL;
#endif
}

/* Where a type, which only ever gains names, has this one (a str, of no class of its
 * own), found as a dictionary finds it; -1: nowhere. */
static Py_ssize_t
type_index(PyTypeObject *type, PyObject *name)
{
    const PyDictKeysObject *keys = ((PyHeapTypeObject *)type)->ht_cached_keys;
    const int8_t *indices = (const int8_t *)keys->dk_indices; /* few: a byte each */
    const PyDictUnicodeEntry *names = DK_UNICODE_ENTRIES(keys);
    const Py_hash_t known = ((PyASCIIObject *)name)->hash;
    const Py_hash_t hash = known != -1 ? known : PyObject_Hash(name); /* cannot fail */
    const size_t mask = ((size_t)1 << keys->dk_log2_size) - 1;
    size_t perturb = (size_t)hash, i = perturb & mask;

    for (; indices[i] != DKIX_EMPTY; i = (i * 5 + perturb + 1) & mask) {
        PyObject *one = indices[i] < 0 ? NULL : names[indices[i]].me_key; /* borrowed */
        if (one == name || /* names are interned, but by chance */
            (one != NULL && ((PyASCIIObject *)one)->hash == hash &&
             PyUnicode_Compare(one, name) == 0)) {
            return indices[i];
        }
        perturb >>= PERTURB_SHIFT;
    }
    return -1;
}

static Py_ssize_t
type_count(PyTypeObject *type)
{
    return ((PyHeapTypeObject *)type)->ht_cached_keys->dk_nentries;
}

/* Borrowed. */
static PyObject *
type_name(PyTypeObject *type, Py_ssize_t i)
{
    return DK_UNICODE_ENTRIES(((PyHeapTypeObject *)type)->ht_cached_keys)[i].me_key;
}
#else
static PyObject **
own_values(PyObject *object)
{
    (void)object;
    return NULL;
}

static Py_ssize_t
type_index(PyTypeObject *type, PyObject *name)
{
    (void)type, (void)name;
    return -1;
}

static Py_ssize_t
type_count(PyTypeObject *type)
{
    (void)type;
    return 0;
}

static PyObject *
type_name(PyTypeObject *type, Py_ssize_t i)
{
    (void)type, (void)i;
    return NULL;
}
#endif

/* Where it is in the array; NULL: not there, or there is none. */
static PyObject **
own_place(PyObject *object, PyObject *name)
{
    PyObject **values = own_values(object);
    Py_ssize_t at = values != NULL && PyUnicode_CheckExact(name)
                        ? type_index(Py_TYPE(object), name)
                        : -1;

    return at < 0 ? NULL : &values[at];
}

PyObject *
oomkit_own_attribute(PyObject *object, PyObject *name)
{
    PyObject **values = own_values(object);
    OWNED PyObject *dict = NULL;

    if (values != NULL && PyUnicode_CheckExact(name)) {
        Py_ssize_t at = type_index(Py_TYPE(object), name);
        return at < 0 ? NULL : Py_XNewRef(values[at]);
    }
    dict = PyObject_GenericGetDict(object, NULL);
    return dict == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(dict, name));
}

int
oomkit_own_attribute_set(PyObject *object, PyObject *name, PyObject *value)
{
    PyObject **place = value == NULL ? NULL : own_place(object, name);
    PyObject *inherited; /* borrowed */
    OWNED PyObject *dict = NULL;

    if (place != NULL && *place != NULL) { /* one in the place of another */
        Py_SETREF(*place, Py_NewRef(value));
        return 0;
    }
    inherited = PyUnicode_Check(name) ? _PyType_Lookup(Py_TYPE(object), name) : NULL;
    if (PyUnicode_Check(name) &&
        (inherited == NULL || Py_TYPE(inherited)->tp_descr_set == NULL)) {
        return PyObject_GenericSetAttr(object, name, value);
    }
    dict = PyObject_GenericGetDict(object, NULL); /* a property must not be set */
    return dict == NULL    ? -1
           : value == NULL ? PyDict_DelItem(dict, name)
                           : PyDict_SetItem(dict, name, value);
}

PyObject *
oomkit_own_attribute_swap(PyObject *object, PyObject *name, PyObject *value)
{
    PyObject **place = own_place(object, name);
    PyObject *before; /* owned, returned */

    if (place != NULL && *place != NULL) {
        before = *place;
        *place = Py_NewRef(value);
        return before;
    }
    before = oomkit_own_attribute(object, name);
    if ((before != NULL || !PyErr_Occurred()) &&
        oomkit_own_attribute_set(object, name, value) < 0) {
        Py_CLEAR(before);
    }
    return before;
}

int
oomkit_own_attribute_replace(PyObject *object, PyObject *name, const PyObject *was,
                             PyObject *value)
{
    PyObject **place = value == NULL ? NULL : own_place(object, name);
    OWNED PyObject *now = NULL;

    if (place != NULL) {
        if (*place == was) {
            Py_SETREF(*place, Py_NewRef(value));
        }
        return 0;
    }
    now = oomkit_own_attribute(object, name);
    return now == was ? oomkit_own_attribute_set(object, name, value)
           : now == NULL && PyErr_Occurred() ? -1
                                             : 0;
}

/* Stands where an object has no value: nobody else has it. */
static struct {
    PyObject_HEAD
} no_value = {PyObject_HEAD_INIT(&PyBaseObject_Type)};
static PyObject *const nothing = (PyObject *)&no_value;

/* The type and the value of each of its names. No names: nobody else reads those in the
 * course of a step, and each would have to come from memory to be counted. */
static PyObject *
values_taken(PyObject *object, PyTypeObject *but)
{
    PyTypeObject *type = Py_TYPE(object);
    const Py_ssize_t count = type_count(type);
    OWNED PyObject *made = PyTuple_New(count + 1); /* may run the collector */
    PyObject **values = own_values(object);
    Py_ssize_t i;

    if (made == NULL) {
        return NULL;
    }
    PyTuple_SET_ITEM(made, 0, Py_NewRef(type));
    for (i = 0; i < count; i++) {
        PyObject *value = values == NULL ? NULL : values[i]; /* borrowed */
        if (value == NULL || Py_IS_TYPE(value, but)) {
            value = nothing;
        }
        PyTuple_SET_ITEM(made, i + 1, Py_NewRef(value));
    }
    if (values == NULL || type != Py_TYPE(object) || type_count(type) != count) {
        return oomkit_own_taken(object, but); /* what it freed has run code */
    }
    return STEAL(made);
}

PyObject *
oomkit_own_taken(PyObject *object, PyTypeObject *but)
{
    OWNED PyObject *dict = NULL;

    if (own_values(object) != NULL) {
        return values_taken(object, but);
    }
    dict = PyObject_GenericGetDict(object, NULL);
    return dict == NULL ? NULL : PyDict_Copy(dict);
}

/* The next name and its value, both borrowed; *at begins with 0. */
static int
taken_next(PyObject *taken, Py_ssize_t *at, PyObject **name, PyObject **value)
{
    if (PyDict_Check(taken)) {
        return PyDict_Next(taken, at, name, value);
    }
    while (++*at < PyTuple_GET_SIZE(taken)) {
        *value = PyTuple_GET_ITEM(taken, *at);
        if (*value != nothing) {
            *name = type_name((PyTypeObject *)PyTuple_GET_ITEM(taken, 0), *at - 1);
            return 1;
        }
    }
    return 0;
}

PyObject *
oomkit_own_pairs(PyObject *taken)
{
    PyObject *name, *value; /* borrowed */
    Py_ssize_t count = 0, at = 0;
    PyObject *made; /* owned, returned */

    while (taken_next(taken, &at, &name, &value)) {
        count++;
    }
    made = PyTuple_New(2 * count);
    for (count = at = 0; made != NULL && taken_next(taken, &at, &name, &value);) {
        PyTuple_SET_ITEM(made, count++, Py_NewRef(name));
        PyTuple_SET_ITEM(made, count++, Py_NewRef(value));
    }
    return made;
}

PyObject *
oomkit_own_attributes(PyObject *object)
{
    OWNED PyObject *taken = oomkit_own_taken(object, NULL);

    return taken == NULL ? NULL : oomkit_own_pairs(taken);
}

PyObject *
oomkit_own_among(PyObject *taken, PyObject *name)
{
    PyObject *one, *value; /* borrowed */
    Py_ssize_t at = 0;

    if (PyTuple_Check(taken) && PyUnicode_CheckExact(name)) {
        at = type_index((PyTypeObject *)PyTuple_GET_ITEM(taken, 0), name) + 1;
        value = at == 0 || at >= PyTuple_GET_SIZE(taken) ? nothing
                                                         : PyTuple_GET_ITEM(taken, at);
        return value == nothing ? NULL : value;
    }
    while (taken_next(taken, &at, &one, &value)) { /* a key may have an == of its own */
        if (one == name || (PyUnicode_Check(one) && PyUnicode_Check(name) &&
                            PyUnicode_Compare(one, name) == 0)) {
            return value;
        }
    }
    return NULL;
}
