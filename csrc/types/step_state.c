/* state_dict() and load_state_dict() of a step: its sizes in a user's checkpoint, as
 * plain values. */
#include "types.h"
#include "../sizes/remember.h"
#include "../sizes/sizes.h"

#define STATE_VERSION 1

static const char *const state_names[] = {"version", "torch", "device", "parameters",
                                          "signatures"};
enum { STATE_NAMES = sizeof(state_names) / sizeof(state_names[0]) };

/* The step whose knowledge is meant: of a method, that of the object that it was last
 * called with. Borrowed. */
static oomkit_step *
state_step(PyObject *op)
{
    return step_CAST(op)->recent;
}

static PyObject *
state_signatures(const oomkit_step *step)
{
    OWNED PyObject *list = PyList_New(0);
    int i;

    for (i = 0; list != NULL && i < step->signature_count; i++) {
        OWNED PyObject *dict = NULL;
        if (!oomkit_signature_can_go(&step->signatures[i])) {
            continue;
        }
        dict = oomkit_signature_dict(&step->signatures[i]);
        if (dict == NULL || PyList_Append(list, dict) < 0) {
            return NULL;
        }
    }
    return STEAL(list);
}

PyObject *
oomkit_step_state(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    oomkit_step *step = state_step(op);
    OWNED PyObject *place = NULL, *list = NULL;
    PyObject *torch, *device; /* borrowed from place */
    unsigned long long count, bytes;

    place = step->origin != NULL ? Py_NewRef(step->origin) : oomkit_recall_place(step);
    list = place == NULL ? NULL
           : step->surveyed || step->origin != NULL
               ? state_signatures(step)
               : PyList_New(0); /* nothing was learned: no call was split */
    if (list == NULL ||
        !PyArg_ParseTuple(place, "UUKK:place", &torch, &device, &count, &bytes)) {
        return NULL;
    }
    return Py_BuildValue("{sisOsOs[KK]sO}", "version", STATE_VERSION, "torch", torch,
                         "device", device, "parameters", count, bytes, "signatures",
                         list);
}

/* --- loading --- */

static void *
load_wrong(PyObject *type, const char *wanted, PyObject *got)
{
    return PyErr_Format(type,
                        "load_state_dict() expected %s, got %R" SEE("load-state-dict"),
                        wanted, got);
}

/* The values by state_names, borrowed from `state`. 0 or -1. */
static int
load_names(PyObject *state, PyObject *values[STATE_NAMES])
{
    int i;

    if (!PyDict_Check(state)) {
        PyErr_Format(
            PyExc_TypeError,
            "load_state_dict() expected the dict that state_dict() gave, got %s" SEE(
                "load-state-dict"),
            Py_TYPE(state)->tp_name);
        return -1;
    }
    for (i = 0; i < STATE_NAMES; i++) {
        values[i] = oomkit_item(state, state_names[i]);
        if (values[i] == NULL) {
            PyErr_Format(PyExc_ValueError,
                         "load_state_dict() expected the dict of a step's "
                         "state_dict(), got one without '%s'" SEE("load-state-dict"),
                         state_names[i]);
            return -1;
        }
        if (i == 0) { /* what else is in it only that version knows */
            long version = PyLong_CheckExact(values[0]) ? PyLong_AsLong(values[0]) : -1;
            if (version == -1 && PyErr_Occurred()) {
                PyErr_Clear(); /* a huge number: no version of ours */
            }
            if (version != STATE_VERSION) {
                PyErr_Format(PyExc_ValueError,
                             "load_state_dict() expected version %d, got %R: it was "
                             "saved by another version of oomkit; leave it out, and "
                             "oomkit finds the sizes again" SEE("load-state-dict"),
                             STATE_VERSION, values[0]);
                return -1;
            }
        }
    }
    if (PyDict_GET_SIZE(state) != STATE_NAMES) {
        PyErr_Format(PyExc_ValueError,
                     "load_state_dict() expected the dict of a step's state_dict(), "
                     "got one with %zd entries instead of %d" SEE("load-state-dict"),
                     PyDict_GET_SIZE(state), STATE_NAMES);
        return -1;
    }
    return 0;
}

/* (torch, device, number of parameters, bytes): new tuple, or NULL with an error. */
static PyObject *
load_origin(PyObject *values[STATE_NAMES])
{
    PyObject *figures = values[3], *numbers[2]; /* borrowed */
    int i;

    if (!PyUnicode_Check(values[1]) || !PyUnicode_Check(values[2])) {
        return load_wrong(PyExc_ValueError, "names of torch and device",
                          PyUnicode_Check(values[1]) ? values[2] : values[1]);
    }
    if (!(PyList_Check(figures) || PyTuple_Check(figures)) ||
        PySequence_Fast_GET_SIZE(figures) != 2) {
        return load_wrong(PyExc_ValueError, "two numbers in 'parameters'", figures);
    }
    for (i = 0; i < 2; i++) {
        numbers[i] = PySequence_Fast_GET_ITEM(figures, i);
        if (!PyLong_CheckExact(numbers[i])) {
            return load_wrong(PyExc_ValueError, "two numbers in 'parameters'", figures);
        }
    }
    return PyTuple_Pack(4, values[1], values[2], numbers[0], numbers[1]);
}

/* All entries of a list into *entries (to be freed). Their number, or -1. */
static int
load_signatures(PyObject *list, oomkit_signature **entries)
{
    Py_ssize_t i, j;

    *entries = NULL;
    if (!PyList_Check(list) || PyList_GET_SIZE(list) > OOMKIT_SIGNATURES) {
        PyErr_Format(
            PyExc_ValueError,
            "load_state_dict() expected a list of at most %d 'signatures', got %s" SEE(
                "load-state-dict"),
            OOMKIT_SIGNATURES, PyList_Check(list) ? "more" : Py_TYPE(list)->tp_name);
        return -1;
    }
    *entries = PyMem_Calloc(OOMKIT_SIGNATURES, sizeof(**entries));
    if (*entries == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (i = 0; i < PyList_GET_SIZE(list); i++) {
        if (oomkit_signature_parse(PyList_GET_ITEM(list, i), &(*entries)[i]) < 0) {
            return -1;
        }
        for (j = 0; j < i; j++) {
            if ((*entries)[j].hash == (*entries)[i].hash) {
                char text[17];
                PyOS_snprintf(text, sizeof(text), "%016llx",
                              (unsigned long long)(*entries)[j].hash);
                PyErr_Format(PyExc_ValueError,
                             "signature %s is there twice" SEE("load-state-dict"),
                             text);
                return -1;
            }
        }
    }
    return (int)PyList_GET_SIZE(list);
}

/* Everything is read before anything changes. */
PyObject *
oomkit_step_load(PyObject *op, PyObject *state)
{
    oomkit_step *step = state_step(op);
    PyObject *values[STATE_NAMES]; /* borrowed from state */
    OWNED PyObject *origin = NULL;
    OWNED_MEMORY oomkit_signature *entries = NULL;
    int count = -1, i;

    if (load_names(state, values) == 0 && (origin = load_origin(values)) != NULL) {
        count = load_signatures(values[4], &entries);
    }
    if (count < 0) {
        return NULL;
    }
    for (i = 0; i < OOMKIT_SIGNATURES; i++) {
        entries[i].used = step->calls;
    }
    memcpy(step->signatures, entries, OOMKIT_SIGNATURES * sizeof(*entries));
    step->signature_count = count;
    step->recall = 1;
    step->seen_oom = 1; /* until the next call has looked */
    Py_XSETREF(step->origin, STEAL(origin));
    Py_RETURN_NONE;
}

/* --- for steps over something that has a state_dict() of its own, and for files --- */

static PyObject *
methods_step(PyObject *module, PyObject *given)
{
    if (PyMethod_Check(given)) {
        given = PyMethod_GET_FUNCTION(given);
    } else if (Py_TYPE(given) ==
               (PyTypeObject *)oomkit_state_of_module(module)->bound_type) {
        given = oomkit_bound_step(given);
    }
    if (!oomkit_step_check(oomkit_state_of_module(module), given)) {
        return oomkit_raise(
            PyExc_TypeError,
            "expected a step that auto_batch has decorated, got %s" SEE("options"),
            Py_TYPE(given)->tp_name);
    }
    return given;
}

static PyObject *
methods_state(PyObject *module, PyObject *given)
{
    PyObject *step = methods_step(module, given); /* borrowed */
    return step == NULL ? NULL : oomkit_step_state(step, NULL);
}

static PyObject *
methods_options(PyObject *module, PyObject *given)
{
    PyObject *step = methods_step(module, given); /* borrowed */
    return step == NULL ? NULL : oomkit_step_options(step_CAST(step), NULL);
}

static PyObject *
methods_load(PyObject *module, PyObject *args)
{
    PyObject *given, *state, *step; /* borrowed */

    if (!PyArg_ParseTuple(args, "OO:_step_load", &given, &state)) {
        return NULL;
    }
    step = methods_step(module, given);
    return step == NULL ? NULL : oomkit_step_load(step, state);
}

static PyObject *
methods_check(PyObject *Py_UNUSED(module), PyObject *dict)
{
    oomkit_signature entry;

    if (oomkit_signature_parse(dict, &entry) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* What the planner expects a micro-batch to need, for those who compare. */
static PyObject *
methods_predict(PyObject *Py_UNUSED(module), PyObject *args)
{
    oomkit_signature entry;
    unsigned long long gradient_bytes;
    PyObject *sizes; /* borrowed from args */
    long long rows;
    uint64_t bytes;
    int later;

    if (!PyArg_ParseTuple(args, "OpLK:_predict_sizes", &sizes, &later, &rows,
                          &gradient_bytes) ||
        oomkit_signature_parse(sizes, &entry) < 0) {
        return NULL;
    }
    bytes = oomkit_predict(&entry.known, later ? OOMKIT_LATER : OOMKIT_FIRST, rows,
                           gradient_bytes);
    return bytes == OOMKIT_UNKNOWN ? Py_NewRef(Py_None)
                                   : PyLong_FromUnsignedLongLong(bytes);
}

PyMethodDef oomkit_state_methods[] = {
    {"_step_state", methods_state, METH_O,
     "_step_state(step, /)\n--\n\nIts state_dict(), whatever it decorates."},
    {"_step_options", methods_options, METH_O,
     "_step_options(step, /)\n--\n\nWhat auto_batch was given for it (dict)."},
    {"_step_load", methods_load, METH_VARARGS,
     "_step_load(step, state, /)\n--\n\nIts load_state_dict(), whatever it decorates."},
    {"_check_sizes", methods_check, METH_O,
     "_check_sizes(sizes, /)\n--\n\nValueError when it is no entry of 'signatures'."},
    {"_predict_sizes", methods_predict, METH_VARARGS,
     "_predict_sizes(sizes, later, rows, gradient_bytes, /)\n--\n\n"
     "Bytes above the baseline that the planner expects of a micro-batch, the first of "
     "its call or a later one, by an entry of 'signatures'; None where it cannot."},
    {NULL, NULL, 0, NULL},
};
