/* Finding, slicing and joining as functions of Python values, for tests. */
#include "split_methods.h"
#include "../batch/batch.h"
#include "../py/errors.h"
#include "../result/result.h"

/* An item of a dictionary of options; a borrowed reference or NULL (None counts as
 * missing). */
static PyObject *
probe_option(PyObject *options, const char *name)
{
    PyObject *value = oomkit_item(options, name); /* borrowed from options */
    return value == Py_None ? NULL : value;
}

/* Fields borrowed from `given`, which the caller keeps. 0 or -1. */
static int
probe_options(oomkit_state *st, PyObject *given, oomkit_options *options)
{
    PyObject *dim = probe_option(given, "dim"); /* borrowed from given */
    int several = dim != NULL && PyDict_Check(dim);
    PyObject *reduction = probe_option(given, "reduction"); /* borrowed from given */

    if (!st->bound) {
        PyErr_SetString(PyExc_RuntimeError,
                        "oomkit is not imported" SEE("internal-error"));
        return -1;
    }
    *options =
        (oomkit_options){.batch = probe_option(given, "batch"),
                         .statics = probe_option(given, "static"),
                         .split = probe_option(given, "split"),
                         .join = probe_option(given, "join"),
                         .restore_batch = probe_option(given, "restore_batch") != NULL};
    options->statics = options->statics == NULL ? st->empty_tuple : options->statics;
    options->dims = several ? dim : NULL;
    options->dim = dim == NULL || several ? 0 : PyLong_AsLongLong(dim);
    if (reduction != NULL && PyUnicode_CompareWithASCIIString(reduction, "sum") == 0) {
        options->reduction = OOMKIT_REDUCTION_SUM;
    }
    if (!PyTuple_Check(options->statics) ||
        (options->batch != NULL && !PyTuple_Check(options->batch))) {
        PyErr_SetString(PyExc_TypeError,
                        "batch and static are tuples here" SEE("internal-error"));
        return -1;
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* A call in vectorcall layout. */
typedef struct probe_call {
    PyObject **vector; /* owned array of references borrowed from args and kwargs */
    PyObject *kwnames; /* owned tuple, or NULL */
    Py_ssize_t positional;
} probe_call;

static int
probe_call_make(PyObject *args, PyObject *kwargs, probe_call *call)
{
    PyObject *key, *value; /* borrowed from kwargs */
    Py_ssize_t position = 0, i;

    call->positional = PyTuple_GET_SIZE(args);
    call->kwnames = PyTuple_New(PyDict_GET_SIZE(kwargs));
    call->vector =
        PyMem_New(PyObject *, (size_t)(call->positional + PyDict_GET_SIZE(kwargs) + 1));
    if (call->kwnames == NULL || call->vector == NULL) {
        Py_CLEAR(call->kwnames);
        PyMem_Free(call->vector);
        PyErr_NoMemory();
        return -1;
    }
    for (i = 0; i < call->positional; i++) {
        call->vector[i] = PyTuple_GET_ITEM(args, i);
    }
    for (; PyDict_Next(kwargs, &position, &key, &value); i++) {
        PyTuple_SET_ITEM(call->kwnames, i - call->positional, Py_NewRef(key));
        call->vector[i] = value;
    }
    return 0;
}

static void
probe_call_clear(probe_call *call)
{
    Py_CLEAR(call->kwnames);
    PyMem_Free(call->vector);
}

/* What calls before this one taught the site. */
static int
probe_learn(oomkit_state *st, const oomkit_options *options, PyObject *earlier,
            PyObject *names, oomkit_batch_site **site)
{
    Py_ssize_t i;

    for (i = 0; earlier != NULL && i < PyList_GET_SIZE(earlier); i++) {
        PyObject *args, *kwargs; /* borrowed from earlier */
        oomkit_batch batch = {0};
        probe_call call;
        int captured;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(earlier, i), "O!O!", &PyTuple_Type, &args,
                              &PyDict_Type, &kwargs) ||
            probe_call_make(args, kwargs, &call) < 0) {
            return -1;
        }
        captured = oomkit_batch_capture(st, options, call.vector, call.positional,
                                        call.kwnames, 0, names, &batch);
        if (captured == 0) {
            oomkit_batch_learn(site, &batch);
            oomkit_batch_release(&batch);
        }
        probe_call_clear(&call);
        if (captured < 0) {
            return -1;
        }
    }
    return 0;
}

/* Paths of the leaves that are split. New list or NULL. */
static PyObject *
probe_split_paths(const oomkit_batch *batch, PyObject *names)
{
    OWNED PyObject *paths = PyList_New(0);
    Py_ssize_t i;

    for (i = 0; paths != NULL && i < batch->count; i++) {
        OWNED PyObject *path = NULL;
        if (batch->nodes[i].split == OOMKIT_SPLIT_WHOLE) {
            continue;
        }
        path = oomkit_node_path(batch, names, i);
        if (path == NULL || PyList_Append(paths, path) < 0) {
            return NULL;
        }
    }
    return STEAL(paths);
}

/* The answer of _batch_probe out of the built vector. New dictionary or NULL. */
static PyObject *
probe_answer(const oomkit_batch *batch, PyObject *names, PyObject *const *vector)
{
    OWNED PyObject *args = PyTuple_New(batch->positional);
    OWNED PyObject *kwargs = PyDict_New();
    OWNED PyObject *paths = probe_split_paths(batch, names);
    OWNED PyObject *argument = oomkit_batch_argument(batch, vector);
    Py_ssize_t i;

    if (args == NULL || kwargs == NULL || paths == NULL || argument == NULL) {
        return NULL;
    }
    for (i = 0; i < batch->total; i++) {
        if (i < batch->positional) {
            PyTuple_SET_ITEM(args, i, Py_NewRef(vector[i]));
        } else if (PyDict_SetItem(
                       kwargs, PyTuple_GET_ITEM(batch->kwnames, i - batch->positional),
                       vector[i]) < 0) {
            return NULL;
        }
    }
    return Py_BuildValue("{sLsOsOsOsOsKs(ii)}", "rows", (long long)batch->rows, "args",
                         args, "kwargs", kwargs, "split", paths, "argument", argument,
                         "signature", (unsigned long long)oomkit_batch_signature(batch),
                         "device", batch->device_type, batch->device_index);
}

/* Everything after capture: what the step does to its arguments ("between"), then what
 * the engine does before a repeat. */
static PyObject *
probe_run(oomkit_state *st, const oomkit_options *options, oomkit_batch_site *site,
          PyObject *given, PyObject *names, oomkit_batch *batch, long long start,
          long long length)
{
    PyObject *between = probe_option(given, "between"); /* borrowed from given */
    PyObject *answer = NULL;                            /* owned */
    OWNED_MEMORY PyObject **vector = NULL;              /* of owned values */
    Py_ssize_t i;

    if (options->restore_batch && oomkit_batch_save(st, batch) < 0) {
        return NULL;
    }
    if (between != NULL) {
        OWNED PyObject *done = PyObject_CallNoArgs(between);
        if (done == NULL) {
            return NULL;
        }
    }
    if (oomkit_batch_find(st, options, site, names, batch) < 0 ||
        oomkit_batch_check(st, batch, names) < 0) {
        return NULL;
    }
    vector = PyMem_Calloc((size_t)batch->total + 1, sizeof(PyObject *));
    if (vector == NULL) {
        return PyErr_NoMemory();
    }
    length = length < 0 ? batch->rows : length;
    if (oomkit_batch_build(st, options, batch, start, length, vector) == 0) {
        answer = probe_answer(batch, names, vector);
    }
    for (i = 0; i < batch->total; i++) {
        Py_XDECREF(vector[i]);
    }
    return answer;
}

static PyObject *
batch_probe(PyObject *module, PyObject *arguments)
{
    oomkit_state *st = oomkit_state_of_module(module);
    PyObject *args, *kwargs, *names, *given; /* borrowed from arguments */
    PyObject *answer = NULL;                 /* owned */
    long long start, length;
    oomkit_options options;
    oomkit_batch_site *site = NULL;
    oomkit_batch batch = {0};
    probe_call call;

    if (!PyArg_ParseTuple(arguments, "O!O!OO!LL:_batch_probe", &PyTuple_Type, &args,
                          &PyDict_Type, &kwargs, &names, &PyDict_Type, &given, &start,
                          &length) ||
        probe_options(st, given, &options) < 0 ||
        probe_call_make(args, kwargs, &call) < 0) {
        return NULL;
    }
    names = names == Py_None ? NULL : names;
    if (probe_learn(st, &options, probe_option(given, "earlier"), names, &site) == 0 &&
        oomkit_batch_capture(st, &options, call.vector, call.positional, call.kwnames,
                             probe_option(given, "skip") != NULL, names, &batch) == 0) {
        answer = probe_run(st, &options, site, given, names, &batch, start, length);
        oomkit_batch_release(&batch);
    }
    oomkit_batch_site_clear(&site);
    probe_call_clear(&call);
    return answer;
}

static PyObject *
join_probe(PyObject *module, PyObject *arguments)
{
    oomkit_state *st = oomkit_state_of_module(module);
    PyObject *results, *rows, *weights, *given; /* borrowed from arguments */
    PyObject *joined = NULL;                    /* owned */
    PyObject *keep;                             /* borrowed from given */
    oomkit_options options;
    oomkit_join join = {0};
    Py_ssize_t i;

    if (!PyArg_ParseTuple(arguments, "O!O!O!O!:_join_probe", &PyList_Type, &results,
                          &PyList_Type, &rows, &PyList_Type, &weights, &PyDict_Type,
                          &given) ||
        probe_options(st, given, &options) < 0) {
        return NULL;
    }
    oomkit_join_is_of(
        &join, (oomkit_join_of){.parked = probe_option(given, "parked") != NULL});
    for (i = 0; i < PyList_GET_SIZE(results); i++) {
        long long count = PyLong_AsLongLong(PyList_GetItem(rows, i));
        double weight = PyFloat_AsDouble(PyList_GetItem(weights, i));
        if (PyErr_Occurred() ||
            oomkit_join_add(st, &options, &join, PyList_GET_ITEM(results, i), count,
                            weight) < 0) {
            goto done;
        }
    }
    keep = probe_option(given, "keep");
    if (keep == NULL || oomkit_join_truncate(&join, PyLong_AsSsize_t(keep)) == 0) {
        joined = oomkit_join_finish(st, &options, &join);
    }
done:
    oomkit_join_clear(&join);
    return joined;
}

static PyObject *
loss_probe(PyObject *module, PyObject *result)
{
    PyObject *loss =
        oomkit_result_loss(oomkit_state_of_module(module), result); /* owned */
    return loss != NULL || PyErr_Occurred() ? loss : Py_NewRef(Py_None);
}

PyMethodDef oomkit_split_methods[] = {
    {"_batch_probe", batch_probe, METH_VARARGS,
     "_batch_probe(args, kwargs, names, options, start, length, /)\n--\n\n"
     "Finds, checks and slices the batch of an invented call. For tests."},
    {"_join_probe", join_probe, METH_VARARGS,
     "_join_probe(results, rows, weights, options, /)\n--\n\n"
     "Joins invented results of micro-batches. For tests."},
    {"_loss_probe", loss_probe, METH_O,
     "_loss_probe(result, /)\n--\n\nThe loss in a result, or None. For tests."},
    {NULL, NULL, 0, NULL},
};
