/* Modules that nothing but their forward has led to (hook/forwards.c). With their
 * buffers go numbers, names and flags among their own attributes: one that makes its
 * buffers ready when it first runs notes that it has. Of participants that the step
 * names the code shows such places (plain state); here nobody has seen the code. */
#include "undo.h"
#include "../py/compat.h"
#include "../py/errors.h"

/* Leads to nothing else, and takes no room to speak of. */
static int
late_is_plain(const PyObject *value)
{
    return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) ||
           PyFloat_CheckExact(value) || PyUnicode_CheckExact(value) ||
           PyBytes_CheckExact(value);
}

PyObject *
oomkit_late_attributes(PyObject *module)
{
    OWNED PyObject *own = oomkit_own_attributes(module);
    OWNED PyObject *noted = own == NULL ? NULL : PyDict_New();
    Py_ssize_t i;

    for (i = 0; noted != NULL && i < PyTuple_GET_SIZE(own); i += 2) {
        PyObject *name = PyTuple_GET_ITEM(own, i);      /* borrowed */
        PyObject *value = PyTuple_GET_ITEM(own, i + 1); /* borrowed */
        if (PyUnicode_CheckExact(name) &&
            PyDict_SetItem(noted, name, late_is_plain(value) ? value : Py_Ellipsis) <
                0) {
            return NULL;
        }
    }
    return STEAL(noted);
}

int
oomkit_late_module_mark(oomkit_call *call, oomkit_buffered *entry, PyObject *module)
{
    OWNED PyObject *dict = PyObject_GenericGetDict(module, NULL);
    const uint64_t tag = dict == NULL ? 0 : oomkit_dict_tag(dict);

    if (dict == NULL) {
        return -1;
    }
    if (entry->noted == NULL || entry->noted_of.dict != dict || tag == 0 ||
        entry->noted_of.tag != tag) {
        Py_XSETREF(entry->noted, oomkit_late_attributes(module));
        entry->noted_of = (oomkit_seen_dict){dict, tag};
    }
    return oomkit_memo_add(&call->entry.buffers.attributes, module,
                           Py_XNewRef(entry->noted));
}

int
oomkit_late_modules_now(const oomkit_call *call, oomkit_memo **now)
{
    const oomkit_memo *notes = call->entry.buffers.attributes;
    Py_ssize_t i;

    for (i = 0; notes != NULL && i < notes->count; i++) {
        PyObject *module = notes->items[i].object; /* borrowed */
        if (oomkit_memo_add(now, module, oomkit_late_attributes(module)) < 0) {
            return -1;
        }
    }
    return 0;
}

/* One module: what was plain has its value again, what is new and plain goes. 0 or -1.
 */
static int
late_put(PyObject *module, PyObject *noted)
{
    OWNED PyObject *now = oomkit_late_attributes(module);
    OWNED PyObject *names = now == NULL ? NULL : PyDict_Keys(now);
    PyObject *name, *value; /* borrowed from the dicts, which nobody else has */
    Py_ssize_t i, at = 0;

    for (i = 0; names != NULL && i < PyList_GET_SIZE(names); i++) {
        name = PyList_GET_ITEM(names, i);
        if (PyDict_GetItemWithError(noted, name) == NULL &&
            PyDict_GetItemWithError(now, name) != Py_Ellipsis &&
            oomkit_own_attribute_set(module, name, NULL) < 0) {
            return -1;
        }
    }
    while (names != NULL && PyDict_Next(noted, &at, &name, &value)) {
        if (value != Py_Ellipsis && PyDict_GetItemWithError(now, name) != value &&
            oomkit_own_attribute_set(module, name, value) < 0) {
            return -1;
        }
    }
    return names == NULL || PyErr_Occurred() ? -1 : 0;
}

int
oomkit_late_modules_put(oomkit_memo *notes)
{
    EACH_MEMO (one, notes) {
        if (late_put(one.object, one.saved) < 0) {
            return -1;
        }
    }
    return 0;
}
