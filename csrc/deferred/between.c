/* Several waiting losses under one root: the engine may run the whole graph of one
 * before the gradient of the next has come. What passes the few nodes between the root
 * and the losses is noted by hooks of ours on them, so that after a failure the engine
 * can go on where it stopped, as far as the losses. Nothing that had run, a hook of the
 * caller's least of all, runs a second time. */
#include "callers_backward.h"
#include "../py/tensor.h"

#include <structmember.h>

/* Pre-hook and hook of one node; the node owns it, and `second` while that runs. */
typedef struct oomkit_node_hook {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    oomkit_state *st;               /* borrowed from the module */
    struct oomkit_callers *callers; /* borrowed: NULL when it has ended */
    PyObject *outputs;              /* owned tuple: what it passed on, or NULL */
    PyObject *next; /* owned tuple: where to, as in the node's next_functions */
    uint32_t *versions;
    int ran;
} oomkit_node_hook;

#define node_hook_CAST(op) ((oomkit_node_hook *)(op))

static void
between_forget(oomkit_node_hook *r)
{
    Py_CLEAR(r->outputs);
    Py_CLEAR(r->next);
    PyMem_Free(r->versions);
    r->versions = NULL;
}

/* --- what passes --- */

/* The gradients that the node passes on. 0 or -1. */
static int
between_note(oomkit_node_hook *r, PyObject *outputs)
{
    Py_ssize_t i, n = PyTuple_GET_SIZE(outputs);
    uint32_t *versions =
        PyMem_Calloc((size_t)n + 1, sizeof(*versions)); /* owned by r */

    if (versions == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (i = 0; i < n; i++) {
        PyObject *gradient = PyTuple_GET_ITEM(outputs, i); /* borrowed */
        if (gradient != Py_None &&
            oomkit_tensor_version(r->st, gradient, &versions[i]) < 0) {
            PyMem_Free(versions);
            return -1;
        }
    }
    PyMem_Free(r->versions);
    r->versions = versions;
    Py_XSETREF(r->outputs, Py_NewRef(outputs));
    return 0;
}

/* Called by the engine with the gradients that reach the node, and when it has run with
 * those that it passes on before them. Answers None: nothing is changed. */
static PyObject *
between_vectorcall(PyObject *op, PyObject *const *args, size_t nargsf,
                   PyObject *Py_UNUSED(kwnames))
{
    oomkit_node_hook *r = node_hook_CAST(op);
    int after = PyVectorcall_NARGS(nargsf) > 1;

    if (r->callers == NULL) {
        Py_RETURN_NONE;
    }
    if (after) {
        if (PyTuple_Check(args[0]) && r->callers->unreached > 0 &&
            between_note(r, args[0]) < 0) {
            return NULL;
        }
        r->ran = 1;
        if (r->callers == NULL || PyList_Append(r->callers->hooks_ran, op) < 0) {
            return r->callers == NULL ? Py_NewRef(Py_None) : NULL;
        }
    }
    oomkit_callers_between(r->callers, !after);
    Py_RETURN_NONE;
}

/* --- hanging --- */

static int
between_sequence(PyObject *node, long long *number)
{
    OWNED PyObject *answer = PyObject_CallMethod(node, "_sequence_nr", NULL);

    *number = answer == NULL ? -1 : PyLong_AsLongLong(answer);

    return *number == -1 && PyErr_Occurred() ? -1 : 0;
}

/* 0 or -1. */
static int
between_register(oomkit_node_hook *r, PyObject *node, const char *method)
{
    OWNED PyObject *handle = PyObject_CallMethod(node, method, "O", r);

    r->st->own_hooks += handle != NULL;
    return handle == NULL ? -1 : 0;
}

/* One node. Those that are younger than every loss run before any of them does, where
 * nothing can fail. 0 or -1. */
static int
between_hang(oomkit_callers *s, PyObject *node, long long newest)
{
    PyTypeObject *type = (PyTypeObject *)s->st->between_type;
    OWNED PyObject *made = type->tp_alloc(type, 0); /* then by both */
    oomkit_node_hook *r = node_hook_CAST(made);
    long long number;

    if (r == NULL) {
        return -1;
    }
    r->vectorcall = between_vectorcall;
    r->st = s->st;
    r->callers = s;
    r->next = PyObject_GetAttr(node, s->st->str_next_functions);
    if (r->next == NULL || PyDict_SetItem(s->node_hooks, node, made) < 0 ||
        between_sequence(node, &number) < 0 ||
        (number <= newest && between_register(r, node, "register_prehook") < 0)) {
        return -1;
    }
    return between_register(r, node, "register_hook");
}

int
oomkit_between_hang(oomkit_callers *s, PyObject *nodes, PyObject *gradients, int losses)
{
    long long newest = -1, number;
    Py_ssize_t i;
    int result = 0, failed = 0;

    s->node_hooks = PyDict_New();
    s->hooks_ran = PyList_New(0);
    s->root_gradients = Py_NewRef(gradients);
    s->unreached = losses;
    if (s->node_hooks == NULL || s->hooks_ran == NULL) {
        return -1;
    }
    for (i = 0; result == 0 && i < PyList_GET_SIZE(nodes); i++) {
        PyObject *node = PyList_GET_ITEM(nodes, i); /* borrowed */
        if (oomkit_node_deferred(s->st, node, &failed) != NULL) {
            result = between_sequence(node, &number);
            newest = number > newest ? number : newest;
        }
        result = failed ? -1 : result;
    }
    for (i = 0; result == 0 && i < PyList_GET_SIZE(nodes); i++) {
        PyObject *node = PyList_GET_ITEM(nodes, i); /* borrowed */
        int known = PyDict_Contains(s->node_hooks, node);
        if (known == 0 && oomkit_node_deferred(s->st, node, &failed) == NULL) {
            result = failed ? -1 : between_hang(s, node, newest);
        }
        result = known < 0 ? -1 : result;
    }
    return result;
}

void
oomkit_between_arrived(oomkit_callers *s)
{
    Py_ssize_t i;

    if (s->unreached > 0 && --s->unreached == 0) { /* what they passed is known */
        for (i = 0; i < PyList_GET_SIZE(s->hooks_ran); i++) {
            between_forget(node_hook_CAST(PyList_GET_ITEM(s->hooks_ran, i)));
        }
    }
}

void
oomkit_between_end(oomkit_callers *s)
{
    PyObject *hooks = s->node_hooks; /* owned */
    PyObject *node, *hook;           /* borrowed from hooks */
    Py_ssize_t at = 0;

    s->node_hooks = NULL;
    while (hooks != NULL && PyDict_Next(hooks, &at, &node, &hook)) {
        node_hook_CAST(hook)->callers = NULL;
        between_forget(node_hook_CAST(hook));
    }
    Py_XDECREF(hooks);
    Py_CLEAR(s->hooks_ran);
    Py_CLEAR(s->root_gradients);
}

/* --- going on after a failure --- */

/* Where the engine goes on: edges, and the gradients that wait there. */
typedef struct frontier {
    PyObject *edges;     /* borrowed list */
    PyObject *gradients; /* borrowed list */
    PyObject *targets;   /* borrowed list: edges of the losses to be reached */
    PyObject *losses;    /* borrowed list: these */
} frontier;

static int
frontier_append(oomkit_state *st, PyObject *list, PyObject *node, PyObject *output)
{
    OWNED PyObject *edge =
        PyObject_CallFunctionObjArgs(st->GradientEdge, node, output, NULL);

    return edge == NULL ? -1 : PyList_Append(list, edge);
}

/* A gradient on its way into `node`, unless that has run. 1 added, 0, or -1. */
static int
frontier_add(const oomkit_callers *s, frontier *f, PyObject *node, PyObject *output,
             PyObject *gradient)
{
    PyObject *hook; /* borrowed */
    const oomkit_deferred *p;
    int failed = 0;

    if (node == Py_None || gradient == Py_None) {
        return 0;
    }
    hook = PyDict_GetItemWithError(s->node_hooks, node);
    if (hook == NULL && PyErr_Occurred()) {
        return -1;
    }
    p = oomkit_node_deferred(s->st, node, &failed);
    if (failed || (hook != NULL && node_hook_CAST(hook)->ran) ||
        (p != NULL && (p->callers != s || p->gradient != NULL))) {
        return failed ? -1 : 0;
    }
    return frontier_append(s->st, f->edges, node, output) < 0 ||
                   PyList_Append(f->gradients, gradient) < 0
               ? -1
               : 1;
}

/* What a node that has run passed on. 0 or -1. */
static int
frontier_passed(oomkit_callers *s, frontier *f, const oomkit_node_hook *r)
{
    Py_ssize_t i, n = r->outputs == NULL ? 0 : PyTuple_GET_SIZE(r->outputs);
    int result = 0;

    for (i = 0; result == 0 && i < n && i < PyTuple_GET_SIZE(r->next); i++) {
        PyObject *gradient = PyTuple_GET_ITEM(r->outputs, i); /* borrowed */
        PyObject *edge = PyTuple_GET_ITEM(r->next, i);        /* borrowed */
        uint32_t version = 0;
        int added = frontier_add(s, f, PyTuple_GET_ITEM(edge, 0),
                                 PyTuple_GET_ITEM(edge, 1), gradient);
        if (added > 0) {
            result = oomkit_tensor_version(s->st, gradient, &version);
            s->changed |= version != r->versions[i];
        }
        result = added < 0 ? -1 : result;
    }
    return result;
}

/* What the engine was given. 0 or -1. */
static int
frontier_roots(oomkit_callers *s, frontier *f)
{
    OWNED PyObject *roots = PySequence_Tuple(s->roots);
    OWNED PyObject *gradients = PySequence_Tuple(s->root_gradients);
    Py_ssize_t i;

    if (roots == NULL || gradients == NULL) {
        return -1;
    }
    for (i = 0; i < PyTuple_GET_SIZE(roots) && i < PyTuple_GET_SIZE(gradients); i++) {
        PyObject *root = PyTuple_GET_ITEM(roots, i); /* borrowed */
        int tensor = oomkit_tensor_check(s->st, root);
        OWNED PyObject *node = tensor ? PyObject_GetAttr(root, s->st->str_grad_fn)
                                      : PySequence_GetItem(root, 0);
        OWNED PyObject *output = tensor ? PyObject_GetAttr(root, s->st->str_output_nr)
                                        : PySequence_GetItem(root, 1);
        if (node == NULL || output == NULL ||
            frontier_add(s, f, node, output, PyTuple_GET_ITEM(gradients, i)) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
frontier_find(oomkit_callers *s, frontier *f, PyObject *reached, PyObject *nodes)
{
    int result = frontier_roots(s, f);
    Py_ssize_t i;

    for (i = 0; result == 0 && i < PyList_GET_SIZE(s->hooks_ran); i++) {
        result =
            frontier_passed(s, f, node_hook_CAST(PyList_GET_ITEM(s->hooks_ran, i)));
    }
    for (i = 0; result == 0 && i < PyList_GET_SIZE(reached); i++) {
        const oomkit_deferred *p = deferred_CAST(PyList_GET_ITEM(reached, i));
        OWNED PyObject *output = NULL;
        if (p->callers != s || p->gradient != NULL) {
            continue;
        }
        output = PyLong_FromSsize_t(p->output);
        result =
            output == NULL || frontier_append(s->st, f->targets,
                                              PyList_GET_ITEM(nodes, i), output) < 0
                ? -1
                : PyList_Append(f->losses, (PyObject *)p);
    }
    return result;
}

/* The engine, from there to the losses and no further: of a loss's own node it runs the
 * tensor hooks alone. 0 or -1. */
static int
frontier_run(oomkit_callers *s, const frontier *f)
{
    OWNED PyObject *edges = PyList_AsTuple(f->edges);
    OWNED PyObject *gradients = PyList_AsTuple(f->gradients);
    OWNED PyObject *targets = PyList_AsTuple(f->targets);
    OWNED PyObject *found = NULL;
    Py_ssize_t i;

    if (edges == NULL || gradients == NULL || targets == NULL) {
        return -1;
    }
    EXEMPT (s->st) {
        found = PyObject_CallFunction(s->st->run_backward, "OOOOOOO", edges, gradients,
                                      Py_True, Py_False, targets, Py_True, Py_False);
    }
    if (found == NULL) {
        return -1;
    }
    if (!PyTuple_Check(found) ||
        PyTuple_GET_SIZE(found) != PyList_GET_SIZE(f->losses)) {
        PyErr_SetString(
            PyExc_RuntimeError,
            "oomkit: the engine gave no gradient for each loss" SEE("internal-error"));
        return -1;
    }
    for (i = 0; i < PyTuple_GET_SIZE(found); i++) {
        PyObject *gradient = PyTuple_GET_ITEM(found, i); /* borrowed */
        if (gradient != Py_None &&
            oomkit_deferred_gradient(deferred_CAST(PyList_GET_ITEM(f->losses, i)),
                                     gradient) < 0) {
            return -1;
        }
    }
    return 0;
}

int
oomkit_between_resume(oomkit_callers *s, PyObject *reached, PyObject *nodes)
{
    OWNED PyObject *edges = PyList_New(0), *gradients = PyList_New(0);
    OWNED PyObject *targets = PyList_New(0), *losses = PyList_New(0);
    frontier f = {edges, gradients, targets, losses};

    if (edges == NULL || gradients == NULL || targets == NULL || losses == NULL ||
        frontier_find(s, &f, reached, nodes) < 0) {
        return -1;
    }
    return s->changed || PyList_GET_SIZE(edges) == 0 || PyList_GET_SIZE(targets) == 0
               ? 0
               : frontier_run(s, &f);
}

/* --- the type --- */

static void
between_dealloc(PyObject *op)
{
    PyTypeObject *tp = Py_TYPE(op);

    between_forget(node_hook_CAST(op));
    tp->tp_free(op);
    Py_DECREF(tp);
}

static PyMemberDef between_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(oomkit_node_hook, vectorcall),
     READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot between_slots[] = {
    {Py_tp_dealloc, between_dealloc},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, between_members},
    {0, NULL},
};

/* No part in collections: what it holds of a graph it lets go of when the backward
 * ends.
 */
PyType_Spec oomkit_between_spec = {
    .name = "oomkit._C._NodeHook",
    .basicsize = sizeof(oomkit_node_hook),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = between_slots,
};
