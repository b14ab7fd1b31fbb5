/* is_oom_error(exc), classify(exc) and see(kind). */
#include "error_methods.h"
#include "../py/errors.h"

/* The class of an argument, or -1 with an exception. */
static int
argument_class(PyObject *module, PyObject *exception, const char *function)
{
    oomkit_state *st = oomkit_state_of_module(module);

    if (!st->bound) {
        PyErr_Format(PyExc_RuntimeError,
                     "%s() needs `import oomkit` first" SEE("internal-error"),
                     function);
        return -1;
    }
    if (!PyExceptionInstance_Check(exception)) {
        PyErr_Format(PyExc_TypeError,
                     "%s() expected an exception, got '%s'" SEE("options"), function,
                     Py_TYPE(exception)->tp_name);
        return -1;
    }
    return (int)oomkit_exception_classify(st, exception);
}

PyDoc_STRVAR(
    is_oom_error_doc,
    "is_oom_error($module, exc, /)\n"
    "--\n"
    "\n"
    "Whether an exception means that memory ran out, of a device or of the host.\n"
    "\n"
    "It is judged by type first, then by error code, then by message; errors of\n"
    "torch.compile and exception groups are looked through. oomkit.OutOfMemory\n"
    "counts, oomkit.PartialUpdate does not; nor does an error after which the\n"
    "device is lost.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "exc : BaseException\n"
    "    An exception object.\n"
    "\n"
    "Returns\n"
    "-------\n"
    "bool");

static PyObject *
method_is_oom_error(PyObject *module, PyObject *exception)
{
    int class_ = argument_class(module, exception, "is_oom_error");
    if (class_ < 0) {
        return NULL;
    }
    return PyBool_FromLong(class_ == OOMKIT_CLASS_CERTAIN ||
                           class_ == OOMKIT_CLASS_MASKED ||
                           class_ == OOMKIT_CLASS_NEVER);
}

PyDoc_STRVAR(
    classify_doc,
    "classify($module, exc, /)\n"
    "--\n"
    "\n"
    "What kind of memory error an exception is.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "exc : BaseException\n"
    "    An exception object.\n"
    "\n"
    "Returns\n"
    "-------\n"
    "str\n"
    "    'certain': out of memory, a smaller micro-batch may help. 'masked':\n"
    "    probably out of memory under another name. 'never': out of memory, but\n"
    "    nothing that a smaller micro-batch would cure. 'sticky': the device is\n"
    "    lost for this process. 'other': not out of memory.");

static PyObject *
method_classify(PyObject *module, PyObject *exception)
{
    int class_ = argument_class(module, exception, "classify");
    return class_ < 0 ? NULL
                      : PyUnicode_FromString(oomkit_class_name((oomkit_class)class_));
}

PyDoc_STRVAR(see_doc, "see(kind, /)\n"
                      "--\n"
                      "\n"
                      "The end of a message: how to read the entry of its kind (str).");

static PyObject *
method_see(PyObject *Py_UNUSED(module), PyObject *kind)
{
    return PyUnicode_FromFormat(SEE("%S"), kind);
}

PyMethodDef oomkit_error_methods[] = {
    {"is_oom_error", method_is_oom_error, METH_O, is_oom_error_doc},
    {"classify", method_classify, METH_O, classify_doc},
    {"see", method_see, METH_O, see_doc},
    {NULL, NULL, 0, NULL},
};
