/* Results of the parts of a loop, kept and joined by auto_batch's rules: for
 * oomkit.map.
 */
#include "chunks.h"
#include "parts_join.h"
#include "../batch/batch.h"
#include "../result/result.h"

PyObject *
oomkit_chunks_keep(PyObject *op, PyObject *const *args, Py_ssize_t nargs)
{
    oomkit_chunks *self = chunks_CAST(op);
    oomkit_call *call = &self->call;
    const oomkit_slice *slice;

    if (nargs != 2 || !self->out) {
        return oomkit_raise(PyExc_RuntimeError,
                            "_keep() expected the result of the part that is out" SEE(
                                "internal-error"));
    }
    slice = &call->cut->slices[call->cut->at];
    oomkit_join_of_loop(&self->join, &self->site->results,
                        oomkit_batch_rows_sure(&call->batch),
                        args[1] == Py_None ? NULL : args[1]);
    if (oomkit_join_add(self->st, &self->options, &self->join, args[0], slice->length,
                        (double)slice->length / (double)call->batch.rows) < 0) {
        return NULL;
    }
    if (slice->length == call->batch.rows) {
        /* as it is joined: converted, where a row may have become several */
        oomkit_result_learn(self->st, &self->site->results,
                            oomkit_join_last(&self->join), slice->length,
                            self->options.dim);
    }
    Py_RETURN_NONE;
}

PyObject *
oomkit_chunks_join(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    oomkit_chunks *self = chunks_CAST(op);
    return oomkit_join_finish(self->st, &self->options, &self->join);
}

PyObject *
oomkit_chunks_results(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    PyObject *results = oomkit_join_results(&chunks_CAST(op)->join); /* borrowed */
    return results == NULL ? PyList_New(0) : Py_NewRef(results);
}

/* The results of several loops, each over the rows given, as those of one. */
PyObject *
oomkit_chunks_join_items(PyObject *op, PyObject *const *args, Py_ssize_t nargs)
{
    oomkit_chunks *self = chunks_CAST(op);
    oomkit_join join = {0};
    PyObject *joined = NULL; /* owned */
    int64_t total = 0;
    Py_ssize_t i, n;

    if (nargs != 2 || !PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1]) ||
        PyList_GET_SIZE(args[0]) != PyList_GET_SIZE(args[1])) {
        return oomkit_raise(PyExc_TypeError,
                            "_join_items() expected two lists" SEE("internal-error"));
    }
    oomkit_join_of_loop(&join, &self->site->results, 0, NULL);
    n = PyList_GET_SIZE(args[0]);
    for (i = 0; i < n; i++) {
        total += PyLong_AsLongLong(PyList_GET_ITEM(args[1], i));
    }
    for (i = 0; i < n && !PyErr_Occurred(); i++) {
        long long rows = PyLong_AsLongLong(PyList_GET_ITEM(args[1], i));
        OWNED PyObject *result = Py_NewRef(PyList_GET_ITEM(args[0], i));
        (void)oomkit_join_add(self->st, &self->options, &join, result, rows,
                              total > 0 ? (double)rows / (double)total : 0.0);
    }
    if (!PyErr_Occurred()) {
        joined = oomkit_join_finish(self->st, &self->options, &join);
    }
    oomkit_join_clear(&join);
    return joined;
}

/* A result with function(tensor) in place of each tensor, containers made anew. */
static PyObject *
map_tensors(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    oomkit_state *st = oomkit_state_of_module(module);
    oomkit_options options = {.join = Py_None}; /* nothing is left out */

    if (nargs != 2) {
        return oomkit_raise(
            PyExc_TypeError,
            "_map_tensors() expected a result and a function" SEE("internal-error"));
    }
    return oomkit_keep_converted(st, &options, args[0], args[1]);
}

PyMethodDef oomkit_chunks_join_methods[] = {
    {"_map_tensors", (PyCFunction)(void (*)(void))map_tensors, METH_FASTCALL,
     "_map_tensors(result, function, /)\n--\n\n"
     "The result with function(tensor) in place of each tensor."},
    {NULL, NULL, 0, NULL},
};
