/* Participants that are bound before the call: by partials, default arguments and
 * classes. What partials and defaults hold outlives every call and is not watched. */
#include "search.h"

int
oomkit_search_bound(oomkit_search *s, PyObject *args, PyObject *keywords)
{
    PyObject *values = NULL; /* owned */
    Py_ssize_t i;
    int result = 0;

    for (i = 0; args != NULL && result == 0 && i < PyTuple_GET_SIZE(args); i++) {
        result = oomkit_search_value(s, PyTuple_GET_ITEM(args, i), OOMKIT_OBJECT_DEPTH);
    }
    if (result == 0 && keywords != NULL && PyDict_Check(keywords)) {
        values = PyDict_Values(keywords);
        result = values == NULL ? -1 : 0;
    }
    for (i = 0; values != NULL && result == 0 && i < PyList_GET_SIZE(values); i++) {
        result =
            oomkit_search_value(s, PyList_GET_ITEM(values, i), OOMKIT_OBJECT_DEPTH);
    }
    Py_XDECREF(values);
    return result;
}

int
oomkit_search_partial(oomkit_search *s, PyObject *func)
{
    PyObject *args, *keywords; /* owned */
    int result = -1;

    if (!PyObject_TypeCheck(func, (PyTypeObject *)s->st->partial)) {
        return 0;
    }
    args = PyObject_GetAttrString(func, "args");
    keywords = args == NULL ? NULL : PyObject_GetAttrString(func, "keywords");
    if (keywords != NULL) {
        result = PyTuple_Check(args) ? oomkit_search_bound(s, args, keywords) : 0;
    }
    Py_XDECREF(keywords);
    Py_XDECREF(args);
    return result;
}

int
oomkit_search_class(oomkit_search *s, PyTypeObject *type, int depth)
{
    PyObject *mro = Py_XNewRef(type->tp_mro); /* owned */
    Py_ssize_t i;
    int result = 0;

    for (i = 0; mro != NULL && result == 0 && i < PyTuple_GET_SIZE(mro); i++) {
        PyObject *base = PyTuple_GET_ITEM(mro, i); /* borrowed from mro */
        if (PyType_HasFeature((PyTypeObject *)base, Py_TPFLAGS_HEAPTYPE)) {
            result = oomkit_search_attributes(s, base, depth);
        }
    }
    Py_XDECREF(mro);
    return result;
}
