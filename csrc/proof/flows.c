/* What gradients come to places of a graph: in C, for torch.compile would compile a
 * function of Python that the backward calls. */
#include "proof.h"
#include "../device/device.h"

/* Is it something else than 0? Of what cannot be looked into (sparse gradients), or
 * only with all ranks (sharded ones), it is taken to be. */
static int
flow_tells(oomkit_state *st, PyObject *gradient)
{
    OWNED PyObject *some = NULL;
    int tells = -1;

    if (gradient == Py_None) {
        return 0;
    }
    if (Py_TYPE(gradient) == (PyTypeObject *)st->Tensor) {
        EXEMPT (st) {
            some = PyObject_CallMethod(gradient, "any", NULL); /* nan is, too */
            tells = some == NULL ? -1 : PyObject_IsTrue(some);
        }
    }
    if (PyErr_Occurred()) {
        oomkit_error_dismiss();
    }
    return tells != 0;
}

/* `self`: (dict, place, module). A prehook of a node; changes nothing. */
static PyObject *
flow_look(PyObject *self, PyObject *gradients)
{
    PyObject *came = PyTuple_GET_ITEM(self, 0); /* borrowed, as the next one is */
    PyObject *place = PyTuple_GET_ITEM(self, 1);
    oomkit_state *st = oomkit_state_of_module(PyTuple_GET_ITEM(self, 2));
    Py_ssize_t i;
    int tells = PyDict_GetItemWithError(came, place) == Py_True;

    if (PyErr_Occurred()) {
        return NULL;
    }
    for (i = 0; PyTuple_Check(gradients) && i < PyTuple_GET_SIZE(gradients) && !tells;
         i++) {
        tells = flow_tells(st, PyTuple_GET_ITEM(gradients, i));
    }
    if (PyDict_SetItem(came, place, tells ? Py_True : Py_False) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef flow_method = {"flow", flow_look, METH_O, NULL};

/* flow_hook(came, place): see oomkit._proof.graphs.flows. */
PyObject *
oomkit_proof_flow_hook(PyObject *module, PyObject *args)
{
    OWNED PyObject *bound = NULL;
    PyObject *came, *place; /* borrowed */

    if (!PyArg_ParseTuple(args, "O!O:flow_hook", &PyDict_Type, &came, &place)) {
        return NULL;
    }
    bound = PyTuple_Pack(3, came, place, module);
    return bound == NULL ? NULL : PyCFunction_New(&flow_method, bound);
}

/* own_hooks(count): so many handles of torch's hooks were made by oomkit itself. */
PyObject *
oomkit_proof_own_hooks(PyObject *module, PyObject *count)
{
    const uint64_t made = PyLong_AsUnsignedLongLong(count);

    if (PyErr_Occurred()) {
        return NULL;
    }
    oomkit_state_of_module(module)->own_hooks += made;
    Py_RETURN_NONE;
}
