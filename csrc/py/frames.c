/* Where in the code of the user. */
#include "errors.h"

/* Does the module of a frame lie in one of these packages? 1 or 0; never fails. */
static int
frame_is_of(PyFrameObject *frame, const char *const *packages, size_t count)
{
    OWNED PyObject *globals = PyFrame_GetGlobals(frame);
    PyObject *name = oomkit_item(globals, "__name__"); /* borrowed */
    Py_ssize_t length = 0;
    const char *text = name != NULL && PyUnicode_Check(name)
                           ? PyUnicode_AsUTF8AndSize(name, &length)
                           : NULL;
    size_t i;
    int found = 0;

    for (i = 0; text != NULL && i < count; i++) {
        size_t n = strlen(packages[i]);
        found |= strncmp(text, packages[i], n) == 0 && (text[n] == 0 || text[n] == '.');
    }
    if (PyErr_Occurred()) {
        oomkit_error_dismiss(); /* a name that cannot be read is nobody's we know */
    }
    return found;
}

/* Nobody can change a line of theirs. */
int
oomkit_frame_is_library(PyFrameObject *frame)
{
    static const char *const packages[] = {"torch", "accelerate", "contextlib",
                                           "oomkit"};

    return frame_is_of(frame, packages, sizeof(packages) / sizeof(*packages));
}

int
oomkit_frame_is_backward(PyFrameObject *frame)
{
    static const char *const packages[] = {"torch.autograd", "torch._tensor"};
    static const char *const names[] = {"backward", "grad", "_engine_run_backward"};
    PyCodeObject *code; /* owned */
    size_t i;
    int found = 0;

    if (!frame_is_of(frame, packages, sizeof(packages) / sizeof(*packages))) {
        return 0;
    }
    code = PyFrame_GetCode(frame);
    for (i = 0; i < sizeof(names) / sizeof(*names); i++) {
        found |= PyUnicode_CompareWithASCIIString(code->co_name, names[i]) == 0;
    }
    Py_DECREF(code);
    return found;
}

/* "file:line" of the innermost Python frame that is the user's. New reference, or NULL
 * with an exception. */
PyObject *
oomkit_where(void)
{
    PyFrameObject *innermost = PyEval_GetFrame();                  /* borrowed */
    PyFrameObject *frame = (PyFrameObject *)Py_XNewRef(innermost); /* owned */
    PyCodeObject *code;                                            /* owned */
    PyObject *where;                                               /* owned, returned */

    while (frame != NULL && oomkit_frame_is_library(frame)) {
        if (oomkit_frame_back(&frame) < 0) {
            return NULL;
        }
    }
    if (frame == NULL) {
        frame = (PyFrameObject *)Py_XNewRef(innermost);
    }
    if (frame == NULL) {
        return PyUnicode_FromString("native code");
    }
    code = PyFrame_GetCode(frame);
    where =
        PyUnicode_FromFormat("%U:%d", code->co_filename, PyFrame_GetLineNumber(frame));
    Py_DECREF(code);
    Py_DECREF(frame);
    return where;
}
