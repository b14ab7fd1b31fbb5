/* What torch tells of modules and optimizers: hooks that are registered once. */
#include "hook.h"

int
oomkit_watch_structure(oomkit_state *st)
{
    PyObject *module = PyType_GetModule((PyTypeObject *)st->step_type); /* borrowed */
    PyObject *changed, *buffer, *begins = NULL, *ends = NULL;           /* owned */
    PyObject *done = NULL;                                              /* owned */

    if (st->structure_hooked) {
        return 0;
    }
    changed = oomkit_hook_new(st, module, "_structure_changed");
    buffer = changed ? oomkit_hook_new(st, module, "_buffer_changed") : NULL;
    begins = buffer ? oomkit_hook_new(st, module, "_optimizer_begins") : NULL;
    ends = begins ? oomkit_hook_new(st, module, "_optimizer_ends") : NULL;
    if (ends != NULL) {
        done = PyObject_CallOneArg(st->parameter_hook, changed);
    }
    if (done != NULL) {
        Py_SETREF(done, PyObject_CallOneArg(st->module_hook, changed));
    }
    if (done != NULL) {
        Py_SETREF(done, PyObject_CallOneArg(st->buffer_hook, buffer));
    }
    if (done != NULL) {
        Py_SETREF(done, PyObject_CallOneArg(st->step_pre_hook, begins));
    }
    if (done != NULL) {
        Py_SETREF(done, PyObject_CallOneArg(st->step_post_hook, ends));
    }
    if (done != NULL) {
        Py_SETREF(done, PyObject_CallNoArgs(st->watch_train));
    }
    st->structure_hooked = done != NULL;
    Py_XDECREF(begins);
    Py_XDECREF(ends);
    Py_XDECREF(changed);
    Py_XDECREF(buffer);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}
