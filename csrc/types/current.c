/* oomkit.current(): where in a split call this code runs. */
#include "current.h"
#include "../loop/chunks.h"
#include "../optim/optim.h"
#include "../optim/updating.h"
#include "../ranks/agree.h"
#include "../undo/undo.h"

static PyStructSequence_Field current_fields[] = {
    {"index", "number of this micro-batch, from 0"},
    {"count", "how many micro-batches the batch is split into; 1 while it is whole"},
    {"is_last", "whether this is the last micro-batch: what must happen once per batch "
                "belongs here"},
    {"weight", "share of the loss that this micro-batch carries"},
    {NULL, NULL},
};

static PyStructSequence_Desc current_desc = {
    "oomkit.Current",
    "Position inside a protected call, as oomkit.current() returns it.",
    current_fields,
    4,
};

int
oomkit_current_init(oomkit_state *st)
{
    st->current_type = oomkit_sequence_type(&current_desc);
    return st->current_type == NULL ? -1 : 0;
}

static PyObject *
current_get(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    oomkit_state *st = oomkit_state_of_module(module);
    oomkit_call *call = oomkit_call_current();
    PyObject *values[4]; /* owned, stolen by the sequence */
    PyObject *current;   /* owned */
    int split = call != NULL && call->split && call->running, i;

    if (call != NULL && call->running) {
        call->sequence_waived = 1; /* the function decides for itself what runs when */
    }
    current = PyStructSequence_New((PyTypeObject *)st->current_type);
    if (current == NULL) {
        return NULL;
    }
    values[0] = PyLong_FromLongLong(split ? (long long)call->cut->at : 0);
    values[1] = PyLong_FromLongLong(split ? (long long)call->cut->count : 1);
    values[2] = PyBool_FromLong(!split || call->is_last);
    values[3] = PyFloat_FromDouble(split ? call->cut->weights[call->cut->at] : 1.0);
    for (i = 0; i < 4; i++) {
        if (values[i] == NULL) {
            Py_CLEAR(current);
        }
    }
    for (i = 0; i < 4; i++) {
        if (current == NULL) {
            Py_XDECREF(values[i]);
        } else {
            PyStructSequence_SET_ITEM(current, i, values[i]);
        }
    }
    return current;
}

/* The same for what oomkit itself collects, and the rows of the micro-batch; nothing is
 * waived. */
static PyObject *
current_micro(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    const oomkit_call *call = oomkit_call_current();
    const oomkit_cut *cut;

    if (call == NULL || !call->split || !call->running) {
        return Py_BuildValue("iiLdO", 0, 1,
                             call == NULL ? -1LL : (long long)call->batch.rows, 1.0,
                             Py_False);
    }
    cut = call->cut;
    return Py_BuildValue("LLLdO", (long long)cut->at, (long long)cut->count,
                         (long long)cut->slices[cut->at].length, cut->weights[cut->at],
                         call->proof == NULL ? Py_False : Py_True);
}

/* Where code runs that asks, without what current() means for the step. */
static PyObject *
current_where(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    const oomkit_call *call = oomkit_call_current();

    if (call != NULL) {
        return PyLong_FromLong(!call->running || !call->split ? 0 : 2 + call->is_last);
    }
    return PyLong_FromLong(oomkit_chunks_of_thread(oomkit_state_of_module(module)) !=
                           NULL);
}

/* Is an optimizer's step(), or what goes with it, under way? */
static PyObject *
current_updates(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    const oomkit_call *call = oomkit_call_current();

    return PyBool_FromLong(call != NULL && oomkit_update_runs(call));
}

/* The vote before an update, in a closure that has computed its gradients. */
static PyObject *
current_commits(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    oomkit_call *call = oomkit_call_current();

    if (call != NULL && oomkit_ranks_commit(call, OOMKIT_UPDATE_ROOMY) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* An update makes a collective now. Is it its first one? False where none runs. */
static PyObject *
current_shares_update(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    oomkit_call *call = oomkit_call_current();
    const int first =
        call != NULL && oomkit_update_runs(call) && !oomkit_update_is_shared(call);

    if (first) {
        oomkit_update_becomes_shared(call);
    }
    return PyBool_FromLong(first);
}

/* testing.force_slices: a tuple of positive lengths, or None. */
static PyObject *
current_force_slices(PyObject *module, PyObject *lengths)
{
    oomkit_state *st = oomkit_state_of_module(module);
    PyObject *before = st->forced_slices; /* owned, handed to the caller */

    if (lengths != Py_None && !PyTuple_CheckExact(lengths)) {
        PyErr_Format(
            PyExc_TypeError,
            "_force_slices() expected a tuple or None, got %s" SEE("internal-error"),
            Py_TYPE(lengths)->tp_name);
        return NULL;
    }
    st->forced_slices = lengths == Py_None ? NULL : Py_NewRef(lengths);
    if (before == NULL) {
        Py_RETURN_NONE;
    }
    return before;
}

PyMethodDef oomkit_current_methods[] = {
    {"current", current_get, METH_NOARGS,
     "current()\n--\n\n"
     "Where in a split call this code runs.\n\n"
     "Returns a record with ``index`` (from 0), ``count``, ``is_last`` and "
     "``weight``;\n"
     "outside a protected call, and while the batch is whole, (0, 1, True, 1.0). Code\n"
     "that must run once per batch is written\n"
     "``if oomkit.current().is_last: ema.update(model)``. A step that asks is no "
     "longer\n"
     "checked for micro-batches that run different code."},
    {"_micro", current_micro, METH_NOARGS,
     "_micro()\n--\n\n"
     "Number of this micro-batch, how many there are, its rows, its weight, and\n"
     "whether a proof runs it."},
    {"_where", current_where, METH_NOARGS,
     "_where()\n--\n\n"
     "0; 1 in a part of a loop; 2 in a micro-batch of a call, 3 in its last."},
    {"_updates", current_updates, METH_NOARGS,
     "_updates()\n--\n\nDoes an optimizer's step(), or what goes with it, run?"},
    {"_commits", current_commits, METH_NOARGS,
     "_commits()\n--\n\nA closure has computed the gradients of an update."},
    {"_shares_update", current_shares_update, METH_NOARGS,
     "_shares_update()\n--\n\nAn update makes a collective: is it its first one?"},
    {"_force_slices", current_force_slices, METH_O,
     "_force_slices(lengths, /)\n--\n\nSet the forced slices; returns those before."},
    {NULL, NULL, 0, NULL},
};
