/* An object's own attributes, read where the interpreter keeps them: in an array that
 * goes with the names of the type, or in a dictionary. Asking for the dictionary of an
 * object makes one, and all code that reads its attributes misses from then on what the
 * interpreter has learned: a step of a small model with AdamW took 4 us longer. */
#define Py_BUILD_CORE 1 /* the array is no public interface */
#include "members.h"

#if OOMKIT_DICT_SLOWS_READING
#include <internal/pycore_object.h>
#include <internal/pycore_dict.h>

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

/* Where the array has the value of a name, or NULL: its type has no such name. */
static PyObject **
own_place(PyObject *object, PyObject **values, PyObject *name)
{
    PyDictKeysObject *keys = ((PyHeapTypeObject *)Py_TYPE(object))->ht_cached_keys;
    const PyDictUnicodeEntry *names = DK_UNICODE_ENTRIES(keys);
    const Py_ssize_t count = keys->dk_nentries;
    Py_ssize_t i = count;
    Py_hash_t hash;

    while (i > 0) { /* from the last one: those that we set are */
        if (names[--i].me_key == name) {
            return &values[i];
        }
    }
    hash = PyObject_Hash(name);   /* a str: it cannot fail */
    for (i = 0; i < count; i++) { /* names are interned, but by chance */
        if (((PyASCIIObject *)names[i].me_key)->hash == hash &&
            PyUnicode_Compare(names[i].me_key, name) == 0) {
            return &values[i];
        }
    }
    return NULL;
}

/* Each of its names, with the value, in `pairs`: both borrowed. How many. */
static int
own_pairs(PyObject *object, PyObject **values, PyTypeObject *but,
          PyObject *pairs[2 * SHARED_KEYS_MAX_SIZE])
{
    PyDictKeysObject *keys = ((PyHeapTypeObject *)Py_TYPE(object))->ht_cached_keys;
    const PyDictUnicodeEntry *names = DK_UNICODE_ENTRIES(keys);
    int i, count = 0;

    for (i = 0; i < keys->dk_nentries && i < SHARED_KEYS_MAX_SIZE; i++) {
        if (values[i] != NULL && !Py_IS_TYPE(values[i], but)) {
            pairs[2 * count] = names[i].me_key;
            pairs[2 * count++ + 1] = values[i];
        }
    }
    return count;
}
#else
#define SHARED_KEYS_MAX_SIZE 1

static PyObject **
own_values(PyObject *object)
{
    (void)object;
    return NULL;
}

static PyObject **
own_place(PyObject *object, PyObject **values, PyObject *name)
{
    (void)object, (void)values, (void)name;
    return NULL;
}

static int
own_pairs(PyObject *object, PyObject **values, PyTypeObject *but, PyObject *pairs[2])
{
    (void)object, (void)values, (void)but, (void)pairs;
    return 0;
}
#endif

/* The value that goes with a name among `count` pairs, borrowed; NULL. */
static PyObject *
pairs_find(PyObject *const *pairs, Py_ssize_t count, PyObject *name)
{
    Py_ssize_t i;

    for (i = 0; i < count; i++) {
        if (pairs[2 * i] == name ||
            (PyUnicode_Check(pairs[2 * i]) && PyUnicode_Check(name) &&
             PyUnicode_Compare(pairs[2 * i], name) == 0)) {
            return pairs[2 * i + 1];
        }
    }
    return NULL;
}

PyObject *
oomkit_own_attribute(PyObject *object, PyObject *name)
{
    PyObject **values = own_values(object);
    OWNED PyObject *dict = NULL;

    if (values != NULL) {
        PyObject **place = own_place(object, values, name);
        return place == NULL ? NULL : Py_XNewRef(*place);
    }
    dict = PyObject_GenericGetDict(object, NULL);
    return dict == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(dict, name));
}

int
oomkit_own_attribute_set(PyObject *object, PyObject *name, PyObject *value)
{
    PyObject **values = own_values(object);
    PyObject **place =
        values != NULL && value != NULL ? own_place(object, values, name) : NULL;
    PyObject *inherited; /* borrowed */
    OWNED PyObject *dict = NULL;

    if (place != NULL && *place != NULL) { /* one in the place of another */
        Py_SETREF(*place, Py_NewRef(value));
        return 0;
    }
    inherited = _PyType_Lookup(Py_TYPE(object), name);
    if (inherited == NULL || Py_TYPE(inherited)->tp_descr_set == NULL) {
        return PyObject_GenericSetAttr(object, name, value);
    }
    dict = PyObject_GenericGetDict(object, NULL); /* a property must not be set */
    return dict == NULL    ? -1
           : value == NULL ? PyDict_DelItem(dict, name)
                           : PyDict_SetItem(dict, name, value);
}

PyObject *
oomkit_own_attributes(PyObject *object, PyTypeObject *but)
{
    PyObject *pairs[2 * SHARED_KEYS_MAX_SIZE]; /* owned, then by the tuple */
    PyObject **values = own_values(object);
    PyObject *made, *name, *value; /* owned, returned; the others borrowed */
    Py_ssize_t i, count, at = 0;
    OWNED PyObject *dict = NULL, *copy = NULL;

    if (values != NULL) {
        count = own_pairs(object, values, but, pairs);
        for (i = 0; i < 2 * count; i++) {
            Py_INCREF(pairs[i]); /* the collector may run, and what it frees */
        }
        made = PyTuple_New(2 * count);
        for (i = 0; i < 2 * count; i++) {
            if (made != NULL) {
                PyTuple_SET_ITEM(made, i, pairs[i]);
            } else {
                Py_DECREF(pairs[i]);
            }
        }
        return made;
    }
    dict = PyObject_GenericGetDict(object, NULL);
    copy = dict == NULL ? NULL : PyDict_Copy(dict);
    made = copy == NULL ? NULL : PyTuple_New(2 * PyDict_GET_SIZE(copy));
    for (i = 0; made != NULL && PyDict_Next(copy, &at, &name, &value); i += 2) {
        PyTuple_SET_ITEM(made, i, Py_NewRef(name));
        PyTuple_SET_ITEM(made, i + 1, Py_NewRef(value));
    }
    return made;
}

PyObject *
oomkit_own_among(PyObject *attributes, PyObject *name)
{
    return pairs_find(((PyTupleObject *)attributes)->ob_item,
                      PyTuple_GET_SIZE(attributes) / 2, name);
}
