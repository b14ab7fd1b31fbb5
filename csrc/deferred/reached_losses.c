/* Looking through the graph of a backward that failed, or that must not run: which
 * waiting losses it reaches, and what it has saved. Never done in a healthy step, but
 * for the one or two nodes between a root and its loss. */
#include "deferred.h"
#include "../hook/graph.h"
#include "../py/tensor.h"

/* The waiting loss that this node made, or NULL. Borrowed; *failed on an error. */
oomkit_deferred *
oomkit_node_deferred(oomkit_state *st, PyObject *node, int *failed)
{
    OWNED PyObject *metadata = PyObject_GetAttr(node, st->str_metadata);
    PyObject *found; /* borrowed: the node has it in the same dictionary */

    if (metadata == NULL) {
        *failed = 1;
        return NULL;
    }
    found = PyDict_Check(metadata) ? PyDict_GetItemWithError(metadata, st->str_oomkit)
                                   : NULL;
    *failed = found == NULL && PyErr_Occurred() != NULL;

    if (found == NULL || !Py_IS_TYPE(found, (PyTypeObject *)st->deferred_type)) {
        return NULL;
    }
    /* Of a whole call whose backward is done the node is a node like any other. */
    return deferred_CAST(found)->kind == OOMKIT_RETURNED_WHOLE &&
                   deferred_CAST(found)->retired
               ? NULL
               : deferred_CAST(found);
}

/* --- reach --- */

typedef struct reach_context {
    PyObject *reached; /* borrowed list */
    PyObject *nodes;   /* borrowed list, or NULL */
    int paths;
} reach_context;

/* Is this output of the node another one than the waiting loss that the node made? What
 * comes that way is no part of the loss's gradient. 1, 0 or -1. */
static int
output_is_beside(oomkit_state *st, PyObject *node, PyObject *number,
                 void *Py_UNUSED(context))
{
    int failed = 0;
    const oomkit_deferred *p = oomkit_node_deferred(st, node, &failed);
    Py_ssize_t output = p == NULL ? 0 : PyLong_AsSsize_t(number);

    if (failed || (output == -1 && PyErr_Occurred())) {
        return -1;
    }
    return p != NULL && p->kind == OOMKIT_RETURNED_WHOLE && output != p->output;
}

/* The same of the roots: tensors, or GradientEdges. */
static int
roots_lead_beside(oomkit_state *st, PyObject *roots)
{
    OWNED PyObject *list = oomkit_tensor_check(st, roots) ? PyTuple_Pack(1, roots)
                                                          : PySequence_Tuple(roots);
    Py_ssize_t i;
    int result = 0;
    for (i = 0; list != NULL && i < PyTuple_GET_SIZE(list) && result == 0; i++) {
        PyObject *root = PyTuple_GET_ITEM(list, i); /* borrowed */
        int tensor = oomkit_tensor_check(st, root);
        OWNED PyObject *node = tensor ? PyObject_GetAttr(root, st->str_grad_fn)
                                      : PySequence_GetItem(root, 0);
        OWNED PyObject *number = tensor ? PyObject_GetAttr(root, st->str_output_nr)
                                        : PySequence_GetItem(root, 1);
        result = node == NULL || number == NULL ? -1
                 : node == Py_None ? 0
                                   : output_is_beside(st, node, number, NULL);
    }
    return list == NULL ? -1 : result;
}

static int
reach_visit(oomkit_state *st, PyObject *node, const oomkit_node_type *type,
            void *context)
{
    reach_context *c = context;
    int failed = 0, beside;
    oomkit_deferred *p = oomkit_node_deferred(st, node, &failed);

    if (failed) {
        return -1;
    }
    if (p != NULL && p->retired) { /* it raises when a gradient reaches it */
        return 0;
    }
    if (p != NULL) {
        return PyList_Append(c->reached, (PyObject *)p) < 0 ||
                       PyList_Append(c->nodes, node) < 0
                   ? -1
                   : 0;
    }
    beside = oomkit_node_edges(st, node, output_is_beside, NULL);
    c->paths |= beside > 0 || type->is_leaf;
    return beside < 0 ? -1 : 1;
}

int
oomkit_graph_reach(oomkit_state *st, PyObject *roots, PyObject *reached,
                   PyObject *nodes, int *paths)
{
    reach_context context = {reached, nodes, 0};
    int beside = roots_lead_beside(st, roots);
    int result =
        beside < 0 ? -1 : oomkit_graph_walk(st, roots, reach_visit, &context, paths);

    *paths |= context.paths || beside > 0;
    return result;
}

typedef struct beneath_context {
    PyObject *reached; /* borrowed list */
    int found;
} beneath_context;

static int
beneath_visit(oomkit_state *st, PyObject *node, const oomkit_node_type *Py_UNUSED(type),
              void *context)
{
    beneath_context *c = context;
    int failed = 0, known = 1;
    oomkit_deferred *p = oomkit_node_deferred(st, node, &failed);

    if (failed) {
        return -1;
    }
    if (p != NULL) {
        known = PySequence_Contains(c->reached, (PyObject *)p);
        c->found |= known == 0;
    }
    return known < 0 ? -1 : !c->found;
}

int
oomkit_graph_beneath(oomkit_state *st, PyObject *roots, PyObject *reached)
{
    beneath_context context = {reached, 0};
    int leaves = 0;

    return oomkit_graph_walk(st, roots, beneath_visit, &context, &leaves) < 0
               ? -1
               : context.found;
}

static int
waiting_visit(oomkit_state *st, PyObject *node, const oomkit_node_type *Py_UNUSED(type),
              void *context)
{
    int failed = 0;
    oomkit_deferred **found = context, *p = oomkit_node_deferred(st, node, &failed);

    if (*found == NULL) {
        *found = p;
    }
    return failed ? -1 : *found == NULL;
}

oomkit_deferred *
oomkit_graph_waiting(oomkit_state *st, PyObject *roots, int *failed)
{
    oomkit_deferred *found = NULL;
    int leaves = 0;

    *failed = oomkit_graph_walk(st, roots, waiting_visit, &found, &leaves) < 0;
    return found;
}

static int
split_visit(oomkit_state *st, PyObject *node, const oomkit_node_type *Py_UNUSED(type),
            void *context)
{
    int failed = 0;
    oomkit_deferred *p = oomkit_node_deferred(st, node, &failed);

    if (failed) {
        return -1;
    }
    if (p != NULL && p->kind != OOMKIT_RETURNED_WHOLE) {
        *(int *)context = 1;
    }
    return !*(int *)context;
}

/* Does any loss wait that was split? */
static int
split_waits(const oomkit_state *st)
{
    const oomkit_participants *parts;
    const oomkit_deferred *p;

    for (parts = st->waiting; parts != NULL; parts = parts->waiting_next) {
        for (p = parts->deferred; p != NULL; p = p->next) {
            if (p->kind != OOMKIT_RETURNED_WHOLE) {
                return 1;
            }
        }
    }
    return 0;
}

int
oomkit_graph_has_split(oomkit_state *st, PyObject *roots)
{
    int leaves = 0, found = 0;

    if (oomkit_graph_walk(st, roots, split_visit, &found, &leaves) == 0) {
        return found;
    }
    return !split_waits(st) && oomkit_graph_too_deep(st) ? 0 : -1;
}

static int
half_visit(oomkit_state *st, PyObject *node, const oomkit_node_type *Py_UNUSED(type),
           void *context)
{
    OWNED PyObject *outputs = PyObject_GetAttr(node, st->str_input_metadata);
    Py_ssize_t i;

    if (outputs == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear(); /* this release does not tell: counts as fp16 */
        *(int *)context = 1;
        return 0;
    }
    for (i = 0; PyTuple_Check(outputs) && i < PyTuple_GET_SIZE(outputs); i++) {
        OWNED PyObject *dtype =
            PyObject_GetAttr(PyTuple_GET_ITEM(outputs, i), st->str_dtype);
        if (dtype == NULL) {
            oomkit_error_dismiss(); /* an output that nobody used */
        }
        *(int *)context |= dtype == st->float16;
    }
    return !*(int *)context;
}

int
oomkit_graph_has_half(oomkit_state *st, PyObject *root)
{
    int leaves = 0, found = 0;

    /* One that is too deep is refused when its backward begins. */
    return oomkit_graph_walk(st, root, half_visit, &found, &leaves) < 0 &&
                   !oomkit_graph_too_deep(st)
               ? -1
               : found;
}

static int
leaves_visit(oomkit_state *Py_UNUSED(st), PyObject *node, const oomkit_node_type *type,
             void *context)
{
    OWNED PyObject *variable = NULL;

    if (!type->is_leaf) {
        return 1;
    }
    variable = oomkit_node_get(node, &type->variable);
    return variable == NULL ? -1 : PyList_Append(context, variable);
}

int
oomkit_graph_leaves(oomkit_state *st, PyObject *roots, PyObject *leaves)
{
    int ignored = 0;
    return oomkit_graph_walk(st, roots, leaves_visit, leaves, &ignored);
}
