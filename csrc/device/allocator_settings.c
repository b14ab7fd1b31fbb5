/* The allocator's settings in effect, by torch's own calls. */
#include "torch_calls.h"
#include "../py/errors.h"

/* What the last call that set any has given. New reference or NULL. */
static PyObject *
last_settings(void)
{
    static const char name[] = "_accelerator_getAllocatorSettings";
    PyObject *torch = PyImport_ImportModule("torch._C"); /* owned */
    PyObject *text = NULL;                               /* owned */

    if (torch != NULL && PyObject_HasAttrString(torch, name)) {
        text = PyObject_CallMethod(torch, name, NULL);
    }
    Py_XDECREF(torch);
    oomkit_error_dismiss();
    return text != NULL && PyUnicode_Check(text) ? text : (Py_XDECREF(text), NULL);
}

/* memory._snapshot()["allocator_settings"]["expandable_segments"] of the type's module:
 * a list of all that is allocated comes with it. 1 or 0, which is also "unknown". */
static int
snapshot_expandable(oomkit_state *st, int type)
{
    PyObject *module = oomkit_torch_module(st, type); /* owned */
    PyObject *memory = NULL, *all = NULL;             /* owned */
    PyObject *settings = NULL, *on = NULL;            /* borrowed from all */
    int expandable;

    if (module != NULL && PyObject_HasAttrString(module, "memory")) {
        memory = PyObject_GetAttrString(module, "memory");
    }
    if (memory != NULL && PyObject_HasAttrString(memory, "_snapshot")) {
        all = PyObject_CallMethod(memory, "_snapshot", NULL);
    }
    if (all != NULL && PyDict_Check(all)) {
        settings = oomkit_item(all, "allocator_settings");
    }
    if (settings != NULL && PyDict_Check(settings)) {
        on = oomkit_item(settings, "expandable_segments");
    }
    expandable = on == Py_True;
    Py_XDECREF(all);
    Py_XDECREF(memory);
    Py_XDECREF(module);
    oomkit_error_dismiss();
    return expandable;
}

int
oomkit_torch_expandable(oomkit_state *st, int type)
{
    PyObject *text = last_settings(); /* owned, stolen by the state */

    if (text == NULL) {
        text = Py_NewRef(Py_None);
    }
    if (st->settings_seen == NULL ||
        PyObject_RichCompareBool(st->settings_seen, text, Py_EQ) != 1) {
        Py_XSETREF(st->settings_seen, Py_NewRef(text));
        st->settings_expandable = snapshot_expandable(st, type);
    }
    Py_DECREF(text);
    return st->settings_expandable;
}
