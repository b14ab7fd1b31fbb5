/* What a waiting call holds: its arguments, and an eye on what it has returned.
 *
 * It is owned by the graph of the loss, which the collector does not see: whatever
 * leads back to that loss must not be held by a strong reference, or both stay for
 * ever. */
#include "deferred.h"
#include "../accum/accum.h"
#include "../call/step.h"
#include "../py/tensor.h"
#include "../batch/batch.h"

#define WEAK_ARGUMENTS 64 /* bits in pending->weak */

/* --- arguments --- */

/* Is one of the values of a dictionary `loss` or `result`? */
static int
dict_leads_to(PyObject *dict, PyObject *loss, PyObject *result, int depth)
{
    PyObject *key, *value; /* borrowed from dict */
    Py_ssize_t at = 0;

    while (PyDict_Next(dict, &at, &key, &value)) {
        if (value == loss || value == result ||
            (depth > 0 && PyDict_CheckExact(value) &&
             dict_leads_to(value, loss, result, depth - 1))) {
            return 1;
        }
    }
    return 0;
}

/* Did the step put its loss into this argument (batch.loss = loss)? 1, 0 or -1. */
static int
argument_leads_to(oomkit_state *st, PyObject *argument, PyObject *loss,
                  PyObject *result)
{
    OWNED PyObject *dict = NULL;

    if (loss == NULL || oomkit_is_plain(argument) ||
        oomkit_tensor_check(st, argument) || PyDict_CheckExact(argument) ||
        PyList_CheckExact(argument) || PyTuple_CheckExact(argument) ||
        PyFunction_Check(argument) ||
        (Py_TYPE(argument)->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0) {
        return 0;
    }
    dict = PyObject_GenericGetDict(argument, NULL);
    if (dict == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear(); /* no dictionary: nothing was put into it */
        return 0;
    }
    return dict_leads_to(dict, loss, result, 1);
}

/* Argument i by a weak reference. 1, 0 where its type has none, or -1. */
static int
argument_weakly(oomkit_deferred *p, Py_ssize_t i, PyObject *argument)
{
    p->args[i] = PyWeakref_NewRef(argument, NULL);
    if (p->args[i] != NULL) {
        p->weak |= UINT64_C(1) << i;
        return 1;
    }
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) {
        return -1;
    }
    PyErr_Clear(); /* no weak references to it: held as it is */
    return 0;
}

int
oomkit_deferred_arguments(oomkit_deferred *p, const oomkit_call *call, PyObject *loss,
                          PyObject *result)
{
    Py_ssize_t i, total = call->batch.total, skip = call->step->skip;

    p->args = PyMem_Calloc((size_t)total + 1, sizeof(PyObject *));
    if (p->args == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    p->total = total;
    for (i = 0; i < total; i++) {
        int weakly =
            i < skip ? 1
                     : argument_leads_to(call->st, call->given.args[i], loss, result);
        if (weakly > 0 && i < WEAK_ARGUMENTS) {
            weakly = argument_weakly(p, i, call->given.args[i]);
        }
        if (weakly < 0) {
            return -1;
        }
        if (p->args[i] == NULL) {
            p->args[i] = Py_NewRef(call->given.args[i]);
        }
    }
    p->nargsf = call->given.nargsf & ~PY_VECTORCALL_ARGUMENTS_OFFSET;
    p->kwnames = Py_XNewRef(call->given.kwnames);
    return 0;
}

int
oomkit_deferred_strong(oomkit_deferred *p)
{
    Py_ssize_t i, at = 0;

    for (i = 0; i < p->total && p->weak != 0; i++) {
        PyObject *object; /* owned, then by p */
        if ((p->weak & UINT64_C(1) << i) != 0) {
            object = oomkit_reference_get(p->args[i]);
            if (object == NULL) {
                return 1;
            }
            p->weak &= ~(UINT64_C(1) << i);
            Py_SETREF(p->args[i], object);
            if (i >= p->step->skip) {
                Py_SETREF(p->batch.nodes[at].object, Py_NewRef(object));
            }
        }
        at = oomkit_node_end(&p->batch, at);
    }
    return 0;
}

/* --- views --- */

/* tensor.numel() == 1? 1, 0 or -1. */
static int
has_one_element(oomkit_state *st, PyObject *tensor)
{
    OWNED PyObject *number = PyObject_CallMethodNoArgs(tensor, st->str_numel);
    Py_ssize_t elements = number == NULL ? -1 : PyLong_AsSsize_t(number);
    return elements == -1 && PyErr_Occurred() ? -1 : elements == 1;
}

/* The node that made the base of the view; None where another call waits at it. New
 * reference or NULL. */
static PyObject *
base_node(oomkit_state *st, PyObject *base)
{
    OWNED PyObject *node = PyObject_GetAttr(base, st->str_grad_fn), *metadata = NULL;
    int taken;

    if (node == NULL || node == Py_None) {
        return STEAL(node);
    }
    metadata = PyObject_GetAttr(node, st->str_metadata);
    taken = metadata == NULL ? -1 : PySequence_Contains(metadata, st->str_oomkit);
    return taken < 0 ? NULL : taken ? Py_NewRef(Py_None) : STEAL(node);
}

int
oomkit_deferred_base(oomkit_deferred *p, PyObject *loss, PyObject **node)
{
    oomkit_state *st = p->st;
    OWNED PyObject *base = PyObject_GetAttr(loss, st->str_base);
    OWNED PyObject *made = NULL, *number = NULL;
    int one;

    if (base == Py_None) {
        p->step->plain_node = Py_TYPE(*node);
    }
    if (base == NULL || base == Py_None) {
        return base == NULL ? -1 : 0;
    }
    one = has_one_element(st, loss);
    one = one > 0 ? has_one_element(st, base) : one;
    made = one > 0 ? base_node(st, base) : NULL;
    number = made ? PyObject_GetAttr(base, st->str_output_nr) : NULL;
    if (number != NULL && made != Py_None) {
        p->output = PyLong_AsSsize_t(number);
        p->hooks_inside |= oomkit_hooks_of(base, st->str_backward_hooks);
        Py_SETREF(*node, Py_NewRef(made));
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* --- containers --- */

/* The maker: containers as they were at the call; the node holds that one from here. */
static PyObject *
copy_node(void *context, Py_ssize_t at, Py_ssize_t Py_UNUSED(number))
{
    oomkit_deferred *p = context;
    oomkit_node *node = &p->batch.nodes[at];
    PyObject *made; /* owned */

    if (!oomkit_node_is_open(node)) {
        return Py_NewRef(node->object);
    }
    made = oomkit_tree_build(p->st, &p->batch.tree, at, copy_node, p);
    if (made != NULL) {
        Py_SETREF(node->object, Py_NewRef(made));
    }
    return made;
}

/* Likewise of the attributes of an object of named parts. */
static int
object_leads_to(PyObject *object, PyObject *loss, PyObject *result)
{
    OWNED PyObject *dict = PyObject_GenericGetDict(object, NULL);

    if (dict == NULL || !PyDict_Check(dict)) {
        PyErr_Clear(); /* slots only, or short of memory: only a leak is at stake */
        return 0;
    }
    return dict_leads_to(dict, loss, result, 1);
}

/* Did the step put its loss into one of the dictionaries and lists of an argument? */
static int
node_leads_to(const oomkit_batch *batch, Py_ssize_t at, PyObject *loss,
              PyObject *result)
{
    Py_ssize_t i, end = oomkit_node_end(batch, at);

    for (; at < end; at++) {
        PyObject *object = batch->nodes[at].object; /* borrowed from the node */
        int opened = batch->nodes[at].kind == OOMKIT_NODE_OBJECT;
        if (opened && object_leads_to(object, loss, result)) {
            return 1;
        }
        if ((PyDict_CheckExact(object) || (opened && PyDict_Check(object))) &&
            dict_leads_to(object, loss, result, 0)) {
            return 1;
        }
        for (i = 0; PyList_CheckExact(object) && i < PyList_GET_SIZE(object); i++) {
            if (PyList_GET_ITEM(object, i) == loss ||
                PyList_GET_ITEM(object, i) == result) {
                return 1;
            }
        }
    }
    return 0;
}

/* The containers in an object that is held weakly: they would hold the loss. 0 or -1.
 */
static int
contents_let_go(oomkit_deferred *p, Py_ssize_t at, PyObject *loss, PyObject *result)
{
    Py_ssize_t i, child = at + 1;

    for (i = 0; i < p->batch.nodes[at].children; i++) {
        Py_ssize_t next = oomkit_node_end(&p->batch, child);
        if (node_leads_to(&p->batch, child, loss, result)) {
            OWNED PyObject *made = copy_node(p, child, 0); /* the node's as well */
            if (made == NULL) {
                return -1;
            }
        }
        child = next;
    }
    return 0;
}

int
oomkit_deferred_containers(oomkit_deferred *p, PyObject *loss, PyObject *result)
{
    Py_ssize_t i, at = 0;

    for (i = 0; i < p->total && loss != NULL; i++) {
        Py_ssize_t next = oomkit_node_end(&p->batch, at);
        if (i < WEAK_ARGUMENTS && (p->weak & UINT64_C(1) << i) != 0) {
            if (contents_let_go(p, at, loss, result) < 0) {
                return -1;
            }
            Py_SETREF(p->batch.nodes[at].object, Py_NewRef(Py_None)); /* meanwhile */
        } else if (node_leads_to(&p->batch, at, loss, result)) {
            PyObject *made = copy_node(p, at, 0); /* owned, then by p */
            if (made == NULL) {
                return -1;
            }
            Py_SETREF(p->args[i], made);
        }
        at = next;
    }
    return 0;
}

/* --- results --- */

/* Has the tensor a hook, or retain_grad()? 1, 0 or -1. */
static int
other_is_watched(oomkit_state *st, PyObject *tensor)
{
    int hooks = oomkit_hooks_of(tensor, st->str_backward_hooks);
    OWNED PyObject *retains = NULL;

    if (hooks != 0) {
        return hooks;
    }
    retains = PyObject_GetAttr(tensor, st->str_retains_grad);
    return retains == NULL ? -1 : retains == Py_True;
}

/* One value beside the loss. 0 or -1. */
static int
others_add(oomkit_deferred *p, PyObject *value, PyObject *loss)
{
    oomkit_tensor_facts facts;
    OWNED PyObject *ref = NULL;
    int watched, leaf;

    if (value == loss || !oomkit_tensor_check(p->st, value)) {
        return 0;
    }
    if (oomkit_tensor_facts_get(p->st, value, 0, &facts) < 0) {
        return -1;
    }
    leaf = facts.requires_grad ? oomkit_tensor_is_leaf(value, &facts) : 1;
    if (leaf != 0) {
        return leaf < 0 ? -1 : 0;
    }
    watched = other_is_watched(p->st, value);
    if (watched != 0) { /* by the step itself, which would do so again */
        return watched < 0 ? -1 : 0;
    }
    if (p->others == NULL && (p->others = PyList_New(0)) == NULL) {
        return -1;
    }
    ref = PyWeakref_NewRef(value, NULL);
    return ref == NULL ? -1 : PyList_Append(p->others, ref);
}

int
oomkit_deferred_others(oomkit_deferred *p, PyObject *result, PyObject *loss)
{
    PyObject *key, *value; /* borrowed from result */
    Py_ssize_t i, at = 0;
    int status = 0;

    if (PyTuple_Check(result) || PyList_Check(result)) {
        for (i = 0; status == 0 && i < PySequence_Fast_GET_SIZE(result); i++) {
            value = PySequence_Fast_GET_ITEM(result, i);
            status = PyDict_Check(value) ? oomkit_deferred_others(p, value, loss)
                                         : others_add(p, value, loss);
        }
        return status;
    }
    while (status == 0 && PyDict_Check(result) &&
           PyDict_Next(result, &at, &key, &value)) {
        status = others_add(p, value, loss);
    }
    return status;
}

int
oomkit_deferred_watched(const oomkit_deferred *p)
{
    Py_ssize_t i;
    int watched = 0;

    for (i = 0; p->others != NULL && i < PyList_GET_SIZE(p->others) && watched == 0;
         i++) {
        OWNED PyObject *tensor = oomkit_reference_get(PyList_GET_ITEM(p->others, i));
        if (tensor != NULL) {
            watched = other_is_watched(p->st, tensor);
        }
    }
    return watched;
}
