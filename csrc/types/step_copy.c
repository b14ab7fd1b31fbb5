/* Copies and pickles of steps. A step of a function is what the function is: one, found
 * by its name. A step that is bound to an object (`model.forward =
 * auto_batch(model.forward)`) has to go with a copy of that object: what stayed bound
 * to the original would compute with the original's parameters. */
#include "binding.h"
#include "types.h"

/* participants= for a copy. New list, or NULL. */
static PyObject *
copy_participants(const oomkit_step *step, PyObject *memo)
{
    PyObject *given = step->options.participants; /* borrowed from the step */
    OWNED PyObject *list = PyList_New(0);
    Py_ssize_t i;

    for (i = 0; list != NULL && given != NULL && i < PyTuple_GET_SIZE(given); i++) {
        OWNED PyObject *object = oomkit_reference_get(PyTuple_GET_ITEM(given, i));
        PyObject *copied = NULL; /* borrowed from memo */
        if (object == NULL) {
            continue; /* it is gone, as it is for the step */
        }
        if (memo != NULL && PyDict_Check(memo)) {
            OWNED PyObject *address = PyLong_FromVoidPtr(object);
            copied = address ? PyDict_GetItemWithError(memo, address) : NULL;
            if (copied == NULL && PyErr_Occurred()) {
                return NULL;
            }
        }
        if (PyList_Append(list, copied != NULL ? copied : object) < 0) {
            return NULL;
        }
    }
    return STEAL(list);
}

PyObject *
oomkit_step_options(const oomkit_step *step, PyObject *memo)
{
    OWNED PyObject *options =
        step->given == NULL ? PyDict_New() : PyDict_Copy(step->given);
    OWNED PyObject *list = options ? copy_participants(step, memo) : NULL;

    if (list == NULL || (PyList_GET_SIZE(list) > 0 &&
                         PyDict_SetItemString(options, "participants", list) < 0)) {
        return NULL;
    }
    return STEAL(options);
}

/* Is a cloudpickle at work, whoever ships it? It sends what `__main__` defines by
 * value, to processes that have another `__main__`. 1, 0 or -1. */
static int
copy_by_cloudpickle(void)
{
    PyFrameObject *frame = PyEval_GetFrame(); /* borrowed, then owned */
    int found = 0;

    Py_XINCREF(frame);
    while (frame != NULL && found == 0) {
        PyCodeObject *code = PyFrame_GetCode(frame); /* owned */
        const char *file = PyUnicode_AsUTF8(code->co_filename);
        found = file == NULL ? -1 : strstr(file, "cloudpickle") != NULL;
        Py_DECREF(code);
        if (found == 0 && oomkit_frame_back(&frame) < 0) {
            found = -1;
        }
    }
    Py_XDECREF(frame);
    return found;
}

/* Is a name enough for whoever reads the pickle? 1, 0 or -1. */
static int
copy_by_name(oomkit_state *st, PyObject *op)
{
    OWNED PyObject *module = NULL;
    int named = oomkit_wrap_is_named(st, op), is_main;

    if (named <= 0) {
        return named;
    }
    module = PyObject_GetAttr(op, st->str_module);
    if (module == NULL) {
        return -1;
    }
    is_main = PyUnicode_Check(module) &&
              PyUnicode_CompareWithASCIIString(module, "__main__") == 0;
    named = is_main ? copy_by_cloudpickle() : 0;
    return named < 0 ? -1 : !named;
}

/* By reference where its name leads to it. Else as auto_batch of what it decorates: a
 * bound method, a partial, a function that has another name than the step. */
PyObject *
oomkit_step_reduce(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    oomkit_step *self = step_CAST(op);
    int named = copy_by_name(self->st, op);
    OWNED PyObject *options = NULL, *make = NULL, *head = NULL, *partial = NULL;
    PyObject *module; /* borrowed from the type */

    if (named != 0) {
        return named < 0 ? NULL : PyObject_GetAttr(op, self->st->str_qualname);
    }
    options = oomkit_step_options(self, NULL);
    module = PyType_GetModule(Py_TYPE(op));
    make = options && module ? PyObject_GetAttrString(module, "auto_batch") : NULL;
    head = make == NULL ? NULL : PyTuple_Pack(1, make);
    partial = head == NULL ? NULL : PyObject_Call(self->st->partial, head, options);
    return partial == NULL ? NULL : Py_BuildValue("O(O)", partial, self->func);
}

PyObject *
oomkit_step_copy(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    return Py_NewRef(op);
}

PyObject *
oomkit_step_deepcopy(PyObject *op, PyObject *memo)
{
    oomkit_step *self = step_CAST(op);
    PyObject *known; /* owned */
    OWNED PyObject *func = oomkit_wrap_deepcopy(self->st, op, self->func, memo, &known);
    OWNED PyObject *options = NULL;

    if (func == NULL || known != NULL) {
        return known;
    }
    if (func == self->func) {
        return Py_NewRef(op);
    }
    options = oomkit_step_options(self, memo);
    return options ? oomkit_step_make(self->st, func, options) : NULL;
}
