/* Participants that are bound before the call: by partials, default arguments and
 * classes. What partials and defaults hold outlives every call and is not watched. */
#include "search.h"

int
oomkit_search_bound(oomkit_search *s, PyObject *args, PyObject *keywords)
{
    OWNED PyObject *values = NULL;
    Py_ssize_t i;

    for (i = 0; args != NULL && i < PyTuple_GET_SIZE(args); i++) {
        if (oomkit_search_value(s, PyTuple_GET_ITEM(args, i), OOMKIT_OBJECT_DEPTH) <
            0) {
            return -1;
        }
    }
    if (keywords == NULL || !PyDict_Check(keywords)) {
        return 0;
    }
    values = PyDict_Values(keywords);
    if (values == NULL) {
        return -1;
    }
    for (i = 0; i < PyList_GET_SIZE(values); i++) {
        if (oomkit_search_value(s, PyList_GET_ITEM(values, i), OOMKIT_OBJECT_DEPTH) <
            0) {
            return -1;
        }
    }
    return 0;
}

int
oomkit_search_partial(oomkit_search *s, PyObject *func)
{
    OWNED PyObject *args = NULL, *keywords = NULL;

    if (!PyObject_TypeCheck(func, (PyTypeObject *)s->st->partial)) {
        return 0;
    }
    args = PyObject_GetAttrString(func, "args");
    keywords = args == NULL ? NULL : PyObject_GetAttrString(func, "keywords");
    if (keywords == NULL) {
        return -1;
    }
    return PyTuple_Check(args) ? oomkit_search_bound(s, args, keywords) : 0;
}

int
oomkit_search_class(oomkit_search *s, PyTypeObject *type, int depth)
{
    OWNED PyObject *mro = Py_XNewRef(type->tp_mro);
    Py_ssize_t i;

    for (i = 0; mro != NULL && i < PyTuple_GET_SIZE(mro); i++) {
        PyObject *base = PyTuple_GET_ITEM(mro, i); /* borrowed from mro */
        if (PyType_HasFeature((PyTypeObject *)base, Py_TPFLAGS_HEAPTYPE) &&
            oomkit_search_attributes(s, base, depth) < 0) {
            return -1;
        }
    }
    return 0;
}
