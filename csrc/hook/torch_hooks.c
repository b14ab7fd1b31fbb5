/* What torch tells of modules and optimizers: hooks that are registered once. */
#include "hook.h"

int
oomkit_watch_structure(oomkit_state *st)
{
    PyObject *module = PyType_GetModule((PyTypeObject *)st->step_type); /* borrowed */
    OWNED PyObject *changed = NULL, *buffer = NULL, *begins = NULL, *ends = NULL;
    OWNED PyObject *done = NULL;

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
    if (done != NULL) {
        Py_SETREF(done, PyObject_CallNoArgs(st->watch_schedulers));
    }
    if (done != NULL) {
        Py_SETREF(done, PyObject_CallNoArgs(st->watch_hooks));
    }
    st->structure_hooked = done != NULL;
    return done == NULL ? -1 : 0;
}
