/* The allocator's settings in effect, by torch's own calls. */
#include "torch_calls.h"
#include "../py/errors.h"

/* What the last call that set any has given. New reference or NULL. */
static PyObject *
last_settings(void)
{
    static const char name[] = "_accelerator_getAllocatorSettings";
    OWNED PyObject *torch = PyImport_ImportModule("torch._C");
    OWNED PyObject *text = NULL;

    if (torch != NULL && PyObject_HasAttrString(torch, name)) {
        text = PyObject_CallMethod(torch, name, NULL);
    }
    oomkit_error_dismiss();
    return text != NULL && PyUnicode_Check(text) ? STEAL(text) : NULL;
}

/* memory._snapshot()["allocator_settings"]["expandable_segments"] of the type's module:
 * a list of all that is allocated comes with it. 1 or 0, which is also "unknown". */
static int
snapshot_expandable(oomkit_state *st, int type)
{
    OWNED PyObject *module = oomkit_torch_module(st, type);
    OWNED PyObject *memory = NULL, *all = NULL;
    PyObject *settings = NULL, *on = NULL; /* borrowed from all */

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
    oomkit_error_dismiss();
    return on == Py_True;
}

int
oomkit_torch_expandable(oomkit_state *st, int type)
{
    OWNED PyObject *text = last_settings();

    if (text == NULL) {
        text = Py_NewRef(Py_None);
    }
    if (st->settings_seen == NULL ||
        PyObject_RichCompareBool(st->settings_seen, text, Py_EQ) != 1) {
        Py_XSETREF(st->settings_seen, Py_NewRef(text));
        st->settings_expandable = snapshot_expandable(st, type);
    }
    return st->settings_expandable;
}
