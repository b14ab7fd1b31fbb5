/* Looking through the graph of a backward that failed, or that must not run: which
 * waiting losses it reaches, and what it has saved. Never done in a healthy step, but
 * for the one or two nodes between a root and its loss. */
#include "pending.h"
#include "errors.h"

#define NEAR 16    /* nodes between a root and its losses whose bytes are few */
#define WATCHED 96 /* nodes in which oomkit_graph_watch looks for waiting losses */

/* The waiting loss that this node made, or NULL. Borrowed; *failed on an error. */
static oomkit_pending *
node_pending(oomkit_state *st, PyObject *node, int *failed)
{
    PyObject *metadata = PyObject_GetAttr(node, st->str_metadata); /* owned */
    PyObject *found;                                               /* borrowed */

    if (metadata == NULL) {
        *failed = 1;
        return NULL;
    }
    found = PyDict_Check(metadata) ? PyDict_GetItemWithError(metadata, st->str_oomkit)
                                   : NULL;
    *failed = found == NULL && PyErr_Occurred() != NULL;
    Py_DECREF(metadata);
    return found != NULL && Py_IS_TYPE(found, (PyTypeObject *)st->pending_type)
               ? pending_CAST(found)
               : NULL;
}

/* Appends the nodes that `node` leads to. 0 or -1. */
static int
node_follow(oomkit_state *st, PyObject *node, PyObject *work)
{
    PyObject *edges = PyObject_GetAttr(node, st->str_next_functions); /* owned */
    Py_ssize_t i;
    int result = 0;

    if (edges == NULL) {
        return -1;
    }
    for (i = 0; PyTuple_Check(edges) && i < PyTuple_GET_SIZE(edges) && result == 0;
         i++) {
        PyObject *edge = PyTuple_GET_ITEM(edges, i); /* borrowed */
        PyObject *next = PyTuple_Check(edge) && PyTuple_GET_SIZE(edge) > 0
                             ? PyTuple_GET_ITEM(edge, 0)
                             : Py_None; /* borrowed */
        result = next == Py_None ? 0 : PyList_Append(work, next);
    }
    Py_DECREF(edges);
    return result;
}

/* The nodes of the roots (tensors; of a GradientEdge its node) into `work`. *leaves is
 * set when a root is a leaf itself. 0 or -1. */
static int
roots_nodes(oomkit_state *st, PyObject *roots, PyObject *work, int *leaves)
{
    PyObject *list, *node; /* owned */
    Py_ssize_t i;
    int result = 0;

    list = oomkit_tensor_check(st, roots) ? PyTuple_Pack(1, roots)
                                          : PySequence_Tuple(roots);
    if (list == NULL) {
        return -1;
    }
    for (i = 0; i < PyTuple_GET_SIZE(list) && result == 0; i++) {
        PyObject *root = PyTuple_GET_ITEM(list, i); /* borrowed */
        if (oomkit_tensor_check(st, root)) {
            node = PyObject_GetAttr(root, st->str_grad_fn);
        } else {
            node = PySequence_GetItem(root, 0); /* GradientEdge(node, output_nr) */
        }
        if (node == NULL) {
            result = -1;
        } else if (node == Py_None) {
            *leaves = 1;
        } else {
            result = PyList_Append(work, node);
        }
        Py_XDECREF(node);
    }
    Py_DECREF(list);
    return result;
}

static int
node_is_leaf(PyObject *node)
{
    const char *name = strrchr(Py_TYPE(node)->tp_name, '.');
    name = name == NULL ? Py_TYPE(node)->tp_name : name + 1;
    return strcmp(name, "AccumulateGrad") == 0;
}

/* What to do at a node: 1 go on behind it, 0 do not, -1 with an exception. */
typedef int (*node_visitor)(oomkit_state *st, PyObject *node, void *context);

/* Every node once. 0 or -1. *leaves as in roots_nodes. */
static int
graph_walk(oomkit_state *st, PyObject *roots, node_visitor visit, void *context,
           int *leaves)
{
    PyObject *work = PyList_New(0);   /* owned */
    PyObject *seen = PySet_New(NULL); /* owned: keeps the nodes, hence their identity */
    int result = work == NULL || seen == NULL ? -1 : 0;

    if (result == 0) {
        result = roots_nodes(st, roots, work, leaves);
    }
    while (result == 0 && PyList_GET_SIZE(work) > 0) {
        Py_ssize_t last = PyList_GET_SIZE(work) - 1;
        PyObject *node = Py_NewRef(PyList_GET_ITEM(work, last)); /* owned */
        int known = PySet_Contains(seen, node);
        if (known < 0 || PyList_SetSlice(work, last, last + 1, NULL) < 0 ||
            (known == 0 && PySet_Add(seen, node) < 0)) {
            result = -1;
        } else if (known == 0) {
            int on = visit(st, node, context);
            result = on > 0 ? node_follow(st, node, work) : on;
        }
        Py_DECREF(node);
    }
    Py_XDECREF(work);
    Py_XDECREF(seen);
    return result;
}

/* --- reach --- */

typedef struct reach_context {
    PyObject *reached; /* borrowed list */
    PyObject *nodes;   /* borrowed list, or NULL */
    int paths;
} reach_context;

static int
reach_visit(oomkit_state *st, PyObject *node, void *context)
{
    reach_context *c = context;
    int failed = 0;
    oomkit_pending *p = node_pending(st, node, &failed);

    if (failed) {
        return -1;
    }
    if (p != NULL) {
        return PyList_Append(c->reached, (PyObject *)p) < 0 ||
                       (c->nodes != NULL && PyList_Append(c->nodes, node) < 0)
                   ? -1
                   : 0;
    }
    if (node_is_leaf(node)) {
        c->paths = 1;
    }
    return 1;
}

int
oomkit_graph_reach(oomkit_state *st, PyObject *roots, PyObject *reached, int *paths)
{
    reach_context context = {reached, NULL, 0};
    int result = graph_walk(st, roots, reach_visit, &context, paths);

    *paths |= context.paths;
    return result;
}

/* A waiting loss that a backward will pass: its node is to tell the gradient. */
static int
watch_hook(oomkit_pending *p, PyObject *node)
{
    PyObject *handle; /* owned */

    if (p->kind != OOMKIT_RETURNED_WHOLE || p->hooked) {
        return 0; /* a node of ours tells it anyway */
    }
    handle =
        PyObject_CallMethodOneArg(node, p->st->str_register_prehook, (PyObject *)p);
    p->hooked = handle != NULL;
    Py_XDECREF(handle);
    return p->hooked ? 0 : -1;
}

/* The root is a waiting loss itself: its gradient is among the arguments. 1 done, 0 it
 * is not so, -1. */
static int
watch_root(oomkit_state *st, PyObject *root, PyObject *gradients)
{
    PyObject *node = PyObject_GetAttr(root, st->str_grad_fn); /* owned */
    PyObject *hooks;                                          /* owned */
    oomkit_pending *p;
    int failed = 0, result = 0;

    if (node == NULL || node == Py_None) {
        Py_XDECREF(node);
        return node == NULL ? -1 : 0;
    }
    p = node_pending(st, node, &failed);
    if (p != NULL && p->kind == OOMKIT_RETURNED_WHOLE) {
        hooks = PyObject_GetAttr(root, st->str_backward_hooks);
        if (hooks == Py_None && p->second != NULL && PyTuple_Check(gradients) &&
            PyTuple_GET_SIZE(gradients) == 1) {
            Py_XSETREF(p->gradient, Py_NewRef(PyTuple_GET_ITEM(gradients, 0)));
            p->fired = result = 1;
        }
        result = hooks == NULL ? -1 : result;
        Py_XDECREF(hooks);
    } else if (p != NULL) {
        result = 1;
    }
    Py_DECREF(node);
    return failed ? -1 : result;
}

/* Breadth first, so that a loss beside a large other term is found soon. */
static int
watch_walk(oomkit_state *st, PyObject *work, int *losses, int *far)
{
    PyObject *seen = PySet_New(NULL); /* owned */
    Py_ssize_t at;
    int result = seen == NULL ? -1 : 0, failed = 0;

    for (at = 0; result == 0 && at < PyList_GET_SIZE(work) && at < WATCHED; at++) {
        PyObject *node = PyList_GET_ITEM(work, at); /* borrowed */
        oomkit_pending *p;
        int known = PySet_Contains(seen, node);
        if (known != 0 || PySet_Add(seen, node) < 0) {
            result = known == 1 ? 0 : -1;
            continue;
        }
        p = node_pending(st, node, &failed);
        if (p != NULL) {
            ++*losses;
            *far |= !p->small;
            result = watch_hook(p, node);
            continue;
        }
        *far |= node_is_leaf(node);
        result = failed ? -1 : node_follow(st, node, work);
    }
    *far |= at > NEAR + *losses || at < PyList_GET_SIZE(work);
    Py_XDECREF(seen);
    return result;
}

int
oomkit_graph_watch(oomkit_state *st, PyObject *const *args)
{
    PyObject *work; /* owned */
    int losses = 0, far = 0, result = 0;

    if (PyTuple_Check(args[0]) && PyTuple_GET_SIZE(args[0]) == 1 &&
        oomkit_tensor_check(st, PyTuple_GET_ITEM(args[0], 0))) {
        result = watch_root(st, PyTuple_GET_ITEM(args[0], 0), args[1]);
        if (result != 0) {
            return result < 0 ? -1 : 0;
        }
    }
    work = PyList_New(0);
    if (work == NULL || roots_nodes(st, args[0], work, &far) < 0 ||
        watch_walk(st, work, &losses, &far) < 0) {
        result = -1;
    }
    Py_XDECREF(work);
    return result < 0 || far ? result : losses;
}

/* The gradients at the losses by a run of the engine that stops there. New reference to
 * a tuple, or NULL. */
static PyObject *
gradients_at(oomkit_state *st, PyObject *const *args, PyObject *nodes,
             PyObject *reached)
{
    Py_ssize_t i, n = PyList_GET_SIZE(nodes);
    PyObject *edges = PyTuple_New(n), *result = NULL; /* owned */

    for (i = 0; edges != NULL && i < n; i++) {
        PyObject *edge =
            PyObject_CallFunction(/* owned, then by edges */
                                  st->GradientEdge, "On", PyList_GET_ITEM(nodes, i),
                                  pending_CAST(PyList_GET_ITEM(reached, i))->output);
        if (edge == NULL) {
            Py_CLEAR(edges);
            break;
        }
        PyTuple_SET_ITEM(edges, i, edge);
    }
    if (edges != NULL) {
        result = PyObject_CallFunction(st->run_backward, "OOOOOOO", args[0], args[1],
                                       Py_True, Py_False, edges, Py_True, Py_False);
        Py_DECREF(edges);
    }
    if (result != NULL && (!PyTuple_Check(result) || PyTuple_GET_SIZE(result) != n)) {
        Py_CLEAR(result);
        PyErr_SetString(PyExc_RuntimeError,
                        "oomkit: the engine gave no gradient for each loss");
    }
    return result;
}

int
oomkit_graph_gradients(oomkit_state *st, PyObject *const *args)
{
    PyObject *reached = PyList_New(0), *nodes = PyList_New(0); /* owned */
    PyObject *gradients = NULL;                                /* owned */
    reach_context context = {reached, nodes, 0};
    int leaves = 0, result = -1;
    Py_ssize_t i;

    if (reached != NULL && nodes != NULL &&
        graph_walk(st, args[0], reach_visit, &context, &leaves) == 0) {
        oomkit_exempt_enter(st);
        gradients = gradients_at(st, args, nodes, reached);
        oomkit_exempt_leave(st);
    }
    for (i = 0; gradients != NULL && i < PyTuple_GET_SIZE(gradients); i++) {
        oomkit_pending *p = pending_CAST(PyList_GET_ITEM(reached, i));
        PyObject *gradient = PyTuple_GET_ITEM(gradients, i); /* borrowed */
        if (p->second != NULL && gradient != Py_None) {
            Py_XSETREF(p->gradient, Py_NewRef(gradient));
        }
    }
    result = gradients == NULL ? -1 : 0;
    Py_XDECREF(gradients);
    Py_XDECREF(reached);
    Py_XDECREF(nodes);
    return result;
}

typedef struct beneath_context {
    PyObject *reached; /* borrowed list */
    int found;
} beneath_context;

static int
beneath_visit(oomkit_state *st, PyObject *node, void *context)
{
    beneath_context *c = context;
    int failed = 0, known = 1;
    oomkit_pending *p = node_pending(st, node, &failed);

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

    return graph_walk(st, roots, beneath_visit, &context, &leaves) < 0 ? -1
                                                                       : context.found;
}

static int
split_visit(oomkit_state *st, PyObject *node, void *context)
{
    int failed = 0;
    oomkit_pending *p = node_pending(st, node, &failed);

    if (failed) {
        return -1;
    }
    if (p != NULL && p->kind != OOMKIT_RETURNED_WHOLE) {
        *(int *)context = 1;
    }
    return !*(int *)context;
}

int
oomkit_graph_has_split(oomkit_state *st, PyObject *roots)
{
    int leaves = 0, found = 0;

    return graph_walk(st, roots, split_visit, &found, &leaves) < 0 ? -1 : found;
}

static int
leaves_visit(oomkit_state *Py_UNUSED(st), PyObject *node, void *context)
{
    PyObject *variable; /* owned */
    int result;

    if (!node_is_leaf(node)) {
        return 1;
    }
    variable = PyObject_GetAttrString(node, "variable");
    result = variable == NULL ? -1 : PyList_Append(context, variable);
    Py_XDECREF(variable);
    return result;
}

int
oomkit_graph_leaves(oomkit_state *st, PyObject *roots, PyObject *leaves)
{
    int ignored = 0;
    return graph_walk(st, roots, leaves_visit, leaves, &ignored);
}

/* --- free --- */

/* Takes what one SavedTensor holds out of it: torch packs the tensor with our hook,
 * which keeps nothing, and drops its own reference. */
static void
saved_drop(oomkit_state *st, PyObject *saved)
{
    PyObject *done = PyObject_CallMethod(/* owned */
                                         saved, "register_hooks", "OO", st->saved_pack,
                                         st->saved_unpack);
    if (done == NULL) {
        PyErr_Clear(); /* freed already, or packed by somebody's hooks: not ours */
    }
    Py_XDECREF(done);
}

static int
free_visit(oomkit_state *st, PyObject *node, void *Py_UNUSED(context))
{
    PyObject *names = PyObject_Dir((PyObject *)Py_TYPE(node)); /* owned */
    Py_ssize_t i, k;

    for (i = 0; names != NULL && i < PyList_GET_SIZE(names); i++) {
        PyObject *name = PyList_GET_ITEM(names, i); /* borrowed */
        PyObject *saved;                            /* owned */
        const char *text = PyUnicode_AsUTF8(name);
        if (text == NULL) {
            Py_DECREF(names);
            return -1;
        }
        if (strncmp(text, "_raw_saved_", 11) != 0) {
            continue;
        }
        saved = PyObject_GetAttr(node, name);
        if (saved == NULL) {
            PyErr_Clear(); /* freed already: the node has been executed */
        } else if (PyTuple_Check(saved) || PyList_Check(saved)) {
            for (k = 0; k < PySequence_Fast_GET_SIZE(saved); k++) {
                saved_drop(st, PySequence_Fast_GET_ITEM(saved, k));
            }
        } else if (saved != Py_None) {
            saved_drop(st, saved);
        }
        Py_XDECREF(saved);
    }
    Py_XDECREF(names);
    return names == NULL ? -1 : 1;
}

int
oomkit_graph_free(oomkit_state *st, PyObject *roots)
{
    int leaves = 0;
    return graph_walk(st, roots, free_visit, NULL, &leaves);
}
