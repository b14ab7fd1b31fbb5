/* Standing for somebody else's callable: binding, attributes, copies, names. */
#include "binding.h"
#include "../py/errors.h"

/* The function inside a static or class method, wrapped, in an object of that kind. */
static PyObject *
wrap_method_kind(oomkit_state *st, PyObject *given, oomkit_wrap wrap, void *how)
{
    OWNED PyObject *inner = PyObject_GetAttr(given, st->str_func_attr);
    OWNED PyObject *made = inner == NULL ? NULL : wrap(st, inner, how);

    return made == NULL ? NULL : PyObject_CallOneArg((PyObject *)Py_TYPE(given), made);
}

static PyObject *
wrap_partialmethod(oomkit_state *st, PyObject *given, oomkit_wrap wrap, void *how)
{
    OWNED PyObject *inner = PyObject_GetAttr(given, st->str_func);
    OWNED PyObject *args = inner ? PyObject_GetAttr(given, st->str_args) : NULL;
    OWNED PyObject *keywords = args ? PyObject_GetAttr(given, st->str_keywords) : NULL;
    OWNED PyObject *made = keywords ? wrap(st, inner, how) : NULL;
    OWNED PyObject *head = made ? PyTuple_Pack(1, made) : NULL;
    OWNED PyObject *all = head ? PySequence_Concat(head, args) : NULL;

    return all == NULL
               ? NULL
               : oomkit_call_function((PyObject *)Py_TYPE(given), all, keywords);
}

PyObject *
oomkit_wrap_descriptor(oomkit_state *st, PyObject *given, oomkit_wrap wrap, void *how)
{
    if (PyObject_TypeCheck(given, &PyClassMethod_Type) ||
        PyObject_TypeCheck(given, &PyStaticMethod_Type)) {
        return wrap_method_kind(st, given, wrap, how);
    }
    if (PyObject_TypeCheck(given, (PyTypeObject *)st->partialmethod)) {
        return wrap_partialmethod(st, given, wrap, how);
    }
    return NULL;
}

int
oomkit_wrap_binds(PyObject *func)
{
    return Py_TYPE(func)->tp_descr_get != NULL && !PyMethod_Check(func);
}

int
oomkit_wrap_update(oomkit_state *st, PyObject *op, PyObject *func)
{
    OWNED PyObject *args = PyTuple_Pack(2, op, func);
    OWNED PyObject *names = args == NULL ? NULL : PyDict_New();
    OWNED PyObject *done = NULL;

    if (names != NULL &&
        (PyFunction_Check(func) ||
         PyDict_SetItemString(names, "updated", st->empty_tuple) == 0)) {
        done = oomkit_call_function(st->update_wrapper, args, names);
    }
    return done == NULL ? -1 : 0;
}

PyObject *
oomkit_wrap_getattr(oomkit_state *st, PyObject *op, PyObject *func, PyObject *name)
{
    PyObject *value = PyObject_GenericGetAttr(op, name); /* owned */

    if (value != NULL || func == NULL ||
        !PyErr_ExceptionMatches(PyExc_AttributeError) ||
        PyUnicode_Compare(name, st->str_func_attr) == 0 ||
        PyUnicode_Compare(name, st->str_self_attr) == 0) {
        return value;
    }
    PyErr_Clear(); /* not its own: the callable's, or that one's error */
    return PyObject_GetAttr(func, name);
}

int
oomkit_wrap_is_named(oomkit_state *st, PyObject *op)
{
    OWNED PyObject *module = PyObject_GetAttr(op, st->str_module);
    OWNED PyObject *path = module ? PyObject_GetAttr(op, st->str_qualname) : NULL;
    OWNED PyObject *dot = path ? PyUnicode_FromString(".") : NULL;
    OWNED PyObject *names =
        dot && PyUnicode_Check(path) ? PyUnicode_Split(path, dot, -1) : NULL;
    OWNED PyObject *at = names ? PyImport_GetModule(module) : NULL;
    Py_ssize_t i;

    for (i = 0; at != NULL && i < PyList_GET_SIZE(names); i++) {
        Py_SETREF(at, PyObject_GetAttr(at, PyList_GET_ITEM(names, i)));
    }
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear(); /* no name, or one that leads nowhere: a local function's */
    }
    return at == op;
}

PyObject *
oomkit_wrap_deepcopy(oomkit_state *st, PyObject *op, PyObject *func, PyObject *memo,
                     PyObject **known)
{
    OWNED PyObject *copied = NULL, *address = NULL;

    *known = NULL;
    if (PyFunction_Check(func)) {
        return Py_NewRef(func); /* what it closes over is not the copy's business */
    }
    copied = PyObject_CallFunctionObjArgs(st->deepcopy, func, memo, NULL);
    address = copied == NULL ? NULL : PyLong_FromVoidPtr(op);
    if (address != NULL && PyDict_Check(memo)) {
        *known = Py_XNewRef(PyDict_GetItemWithError(memo, address));
    }
    return *known == NULL && PyErr_Occurred() ? NULL : STEAL(copied);
}
