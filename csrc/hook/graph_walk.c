/* Walking an autograd graph: every node once, as deep as is safe.
 *
 * torch frees a graph without recursion, but not one that was looked through: a node
 * that has been a Python object keeps that object, and one such node frees the next
 * from inside its own deallocation, some 200 bytes of stack for each. So a walk does
 * not follow a chain for longer than the stack can take: it makes no more objects, and
 * says so. */
#define _GNU_SOURCE /* pthread_getattr_np */
#include "graph.h"
#include "../device/device.h"
#include "../py/errors.h"
#include "../py/tensor.h"

#include <pthread.h>

enum {
    STACK_PER_NODE = 512, /* a chain that is refused may be twice as long */
    STACK_LEAST = 64 << 10,
    STACK_MOST = 8 << 20 /* whatever this thread has: another one may free the graph */
};

/* A node on the way from the roots to where the walk is. */
typedef struct walk_frame {
    PyObject *node; /* borrowed from the nodes that were met; NULL for the roots */
    PyObject
        *edges; /* owned tuple as in next_functions; of the roots a list of nodes */
    Py_ssize_t next;      /* edges that are left: from the last to the first */
    Py_ssize_t height;    /* nodes of the longest chain that begins here, so far */
    uint64_t kind, place; /* where edges are watched: see oomkit_edge */
} walk_frame;

/* A node that was met. */
typedef struct walk_met {
    PyObject *node;    /* owned, hence its identity; NULL: a free place */
    Py_ssize_t height; /* nodes of the longest chain that begins here */
} walk_met;

#define LEAST 256 /* places for nodes */
#define TYPES 8
#define ARGUMENTS 3 /* that are told apart: a stack has any number */

typedef struct graph_walk {
    oomkit_state *st;
    oomkit_node_visitor visit;
    oomkit_edge_watcher edge; /* or NULL */
    void *context;
    walk_met *met; /* owned: an open table of a power of two of places */
    size_t met_count, met_room;
    walk_frame *frames; /* the roots, then a chain of nodes */
    Py_ssize_t count, room, limit;
    oomkit_node_type types[TYPES]; /* that may go away, of nodes that were met last */
} graph_walk;

/* Nodes that may follow one another. */
static Py_ssize_t
walk_limit(void)
{
    static _Thread_local Py_ssize_t limit;
    size_t size = STACK_MOST;

    if (limit == 0) {
#ifdef __linux__
        pthread_attr_t attributes;
        void *lowest;
        if (pthread_getattr_np(pthread_self(), &attributes) == 0) {
            if (pthread_attr_getstack(&attributes, &lowest, &size) != 0) {
                size = STACK_LEAST;
            }
            pthread_attr_destroy(&attributes);
        }
#endif
        size = size < STACK_LEAST ? STACK_LEAST : size > STACK_MOST ? STACK_MOST : size;
        limit = (Py_ssize_t)(size / STACK_PER_NODE);
    }
    return limit;
}

static int
walk_refuse(const graph_walk *w)
{
    oomkit_raise(
        w->st->SplitError,
        "auto_batch cannot split this step: more than %zd operations follow one "
        "another in the graph of a backward(), and torch would crash when it frees a "
        "graph that deep after auto_batch has looked through it; run backward() over "
        "fewer operations at once (fewer time steps, torch.utils.checkpoint)" SEE(
            "deep-graph"),
        w->limit);
    return -1;
}

int
oomkit_graph_too_deep(const oomkit_state *st)
{
    if (PyErr_Occurred() == NULL || !PyErr_ExceptionMatches(st->SplitError)) {
        return 0;
    }
    PyErr_Clear();
    return 1;
}

static const oomkit_node_type *
walk_type(graph_walk *w, PyObject *node)
{
    PyTypeObject *type = Py_TYPE(node);
    return oomkit_node_type_of(w->st, type, &w->types[((uintptr_t)type >> 5) % TYPES]);
}

/* What classes weigh: by their numbers, since a step may make that tensor anew. */
static uint64_t
walk_weights(oomkit_state *st, PyObject *node, const oomkit_node_type *type)
{
    OWNED PyObject *weights = oomkit_node_get(node, &type->weights);
    OWNED PyObject *list = NULL, *numbers = NULL;
    Py_hash_t hash = 0;

    if (weights != NULL && weights != Py_None) {
        EXEMPT (st) { /* a device waits */
            list = PyObject_CallMethod(weights, "tolist", NULL);
            numbers = list == NULL ? NULL : PySequence_Tuple(list);
        }
        hash = numbers == NULL ? (Py_hash_t)weights : PyObject_Hash(numbers);
    }
    if (PyErr_Occurred()) {
        oomkit_error_dismiss();
    }
    return (uint64_t)hash;
}

/* What a node does. */
static uint64_t
walk_kind(oomkit_state *st, PyObject *node, const oomkit_node_type *type)
{
    uint64_t hash = type->hash;
    unsigned i;

    for (i = 0; i < type->saved_count; i++) {
        OWNED PyObject *value = oomkit_node_get(node, &type->saved[i]);
        const Py_hash_t number = value == NULL ? -1 : PyObject_Hash(value);
        if (PyErr_Occurred()) {
            oomkit_error_dismiss(); /* then it is not told from others of its type */
        }
        hash = oomkit_hash_mix(hash, (uint64_t)number);
    }
    return type->weighs ? oomkit_hash_mix(hash, walk_weights(st, node, type)) : hash;
}

/* --- nodes that were met --- */

/* The place of a node, or the free one where it belongs. */
static walk_met *
met_place(const graph_walk *w, const PyObject *node)
{
    const uint64_t spread = oomkit_hash_mix(0, (uint64_t)(uintptr_t)node);
    size_t at = (size_t)spread & (w->met_room - 1);

    while (w->met[at].node != NULL && w->met[at].node != node) {
        at = (at + 1) & (w->met_room - 1);
    }
    return &w->met[at];
}

/* Twice the places, or the first ones. 0 or -1. */
static int
met_grow(graph_walk *w)
{
    walk_met *old = w->met;
    const size_t room = w->met_room;
    size_t i;

    w->met = PyMem_Calloc(room == 0 ? LEAST : room * 2, sizeof(*w->met));
    if (w->met == NULL) {
        w->met = old;
        PyErr_NoMemory();
        return -1;
    }
    w->met_room = room == 0 ? LEAST : room * 2;
    for (i = 0; i < room; i++) {
        if (old[i].node != NULL) {
            *met_place(w, old[i].node) = old[i];
        }
    }
    PyMem_Free(old);
    return 0;
}

/* A node that was not met before. 0 or -1. */
static int
met_add(graph_walk *w, PyObject *node)
{
    if (w->met_count >= w->met_room / 4 * 3 && met_grow(w) < 0) {
        return -1;
    }
    *met_place(w, node) = (walk_met){Py_NewRef(node), 1};
    w->met_count++;
    return 0;
}

static void
met_free(graph_walk *w)
{
    size_t i;

    for (i = 0; i < w->met_room; i++) {
        Py_XDECREF(w->met[i].node);
    }
    PyMem_Free(w->met);
}

/* --- the walk --- */

/* One more frame; steals `edges`, which may be NULL after an error. 0 or -1. */
static int
walk_push(graph_walk *w, PyObject *node, PyObject *edges, const oomkit_edge *by)
{
    walk_frame *frame;

    if (edges == NULL) {
        return -1;
    }
    if (ARRAY_GROW(w->frames, w->count, w->room) < 0) {
        Py_DECREF(edges);
        return -1;
    }
    frame = &w->frames[w->count++];
    frame->node = node;
    frame->edges = edges;
    frame->next = PySequence_Fast_GET_SIZE(edges);
    frame->height = 1;
    frame->kind = by == NULL ? 1 : by->kind;
    frame->place = by == NULL ? 1 : by->place;
    return 0;
}

/* Of the chain that ends with `height` nodes here: what is known of the last frame. 0
 * or -1. */
static int
walk_reaches(const graph_walk *w, Py_ssize_t height)
{
    walk_frame *frame = &w->frames[w->count - 1];

    if (w->count - 1 + height > w->limit) {
        return walk_refuse(w);
    }
    frame->height = height + 1 > frame->height ? height + 1 : frame->height;
    return 0;
}

/* Who watches is told of the edge from the last frame. 0 or -1. */
static int
walk_tell(graph_walk *w, PyObject *node, const oomkit_node_type *type, int first,
          oomkit_edge *edge)
{
    const walk_frame *frame = &w->frames[w->count - 1];
    uint64_t place;

    *edge = (oomkit_edge){
        .to = node, .before = frame->place, .first = first, .is_leaf = type->is_leaf};
    if (w->edge == NULL) {
        return 0;
    }
    /* `k * loss`: of mul the second argument is a number, or the first a tensor */
    edge->from = oomkit_hash_mix(
        frame->kind, (uint64_t)(frame->next < ARGUMENTS ? frame->next : ARGUMENTS));
    edge->kind = walk_kind(w->st, node, type);
    place = oomkit_hash_mix(frame->place, (uint64_t)frame->next);
    edge->place = oomkit_hash_mix(place, edge->kind) | 1;
    return w->edge(w->st, edge, w->context);
}

/* A node that the last frame leads to. 0 or -1. */
static int
walk_enter(graph_walk *w, PyObject *node)
{
    const Py_ssize_t known = met_place(w, node)->height; /* 0: not met before */
    const oomkit_node_type *type = walk_type(w, node);
    PyObject *edges; /* owned */
    oomkit_edge edge;
    int on;

    if (walk_tell(w, node, type, known == 0, &edge) < 0) {
        return -1;
    }
    if (known != 0) {
        return walk_reaches(w, known);
    }
    if (walk_reaches(w, 1) < 0 || met_add(w, node) < 0) {
        return -1;
    }
    on = w->visit(w->st, node, type, w->context);
    if (on <= 0) {
        return on;
    }
    edges = oomkit_node_get(node, &type->edges);
    if (edges != NULL && !PyTuple_Check(edges)) {
        Py_SETREF(edges, Py_NewRef(w->st->empty_tuple));
    }
    return walk_push(w, node, edges, &edge);
}

/* The last frame is done: its height is known. 0 or -1. */
static int
walk_leave(graph_walk *w)
{
    const walk_frame frame = w->frames[--w->count];

    Py_DECREF(frame.edges);
    if (frame.node == NULL || frame.height <= 1) {
        return 0;
    }
    met_place(w, frame.node)->height = frame.height;
    return walk_reaches(w, frame.height);
}

/* The node of an entry of a frame's edges. Borrowed; NULL for none. */
static PyObject *
walk_target(PyObject *edge)
{
    if (PyTuple_Check(edge)) {
        edge = PyTuple_GET_SIZE(edge) == 2 ? PyTuple_GET_ITEM(edge, 0) : Py_None;
    }
    return edge == Py_None ? NULL : edge;
}

int
oomkit_graph_walk(oomkit_state *st, PyObject *roots, oomkit_node_visitor visit,
                  void *context, int *leaves)
{
    return oomkit_graph_walk_edges(st, roots, visit, NULL, context, leaves);
}

int
oomkit_graph_walk_edges(oomkit_state *st, PyObject *roots, oomkit_node_visitor visit,
                        oomkit_edge_watcher edge, void *context, int *leaves)
{
    graph_walk w = {.st = st, .visit = visit, .edge = edge, .context = context};
    OWNED PyObject *list = PyList_New(0);
    int result;

    w.limit = walk_limit();
    if (list == NULL || oomkit_roots_nodes(st, roots, list, leaves) < 0 ||
        met_grow(&w) < 0) {
        return -1;
    }
    result = walk_push(&w, NULL, STEAL(list), NULL);
    while (result == 0 && w.count > 0) {
        walk_frame *frame = &w.frames[w.count - 1];
        PyObject *node = NULL; /* borrowed from the frame */
        while (node == NULL && frame->next > 0) {
            frame->next--;
            node = walk_target(PySequence_Fast_GET_ITEM(frame->edges, frame->next));
        }
        result = node == NULL ? walk_leave(&w) : walk_enter(&w, node);
    }
    while (w.count > 0) {
        Py_DECREF(w.frames[--w.count].edges);
    }
    PyMem_Free(w.frames);
    met_free(&w);
    return result;
}

/* The nodes of the roots (tensors; of a GradientEdge its node) into `work`. *leaves is
 * set when a root is a leaf itself. 0 or -1. */
int
oomkit_roots_nodes(oomkit_state *st, PyObject *roots, PyObject *work, int *leaves)
{
    OWNED PyObject *list = oomkit_tensor_check(st, roots) ? PyTuple_Pack(1, roots)
                                                          : PySequence_Tuple(roots);
    Py_ssize_t i;

    if (list == NULL) {
        return -1;
    }
    for (i = 0; i < PyTuple_GET_SIZE(list); i++) {
        PyObject *root = PyTuple_GET_ITEM(list, i); /* borrowed */
        OWNED PyObject *node =
            oomkit_tensor_check(st, root)
                ? PyObject_GetAttr(root, st->str_grad_fn)
                : PySequence_GetItem(root, 0); /* GradientEdge(node, output_nr) */
        if (node == NULL) {
            return -1;
        }
        if (node == Py_None) {
            *leaves = 1;
        } else if (PyList_Append(work, node) < 0) {
            return -1;
        }
    }
    return 0;
}

int
oomkit_node_edges(oomkit_state *st, PyObject *node, oomkit_edge_visitor visit,
                  void *context)
{
    OWNED PyObject *edges = PyObject_GetAttr(node, st->str_next_functions);
    Py_ssize_t i;
    int result = edges == NULL ? -1 : 0;

    for (i = 0; result == 0 && PyTuple_Check(edges) && i < PyTuple_GET_SIZE(edges);
         i++) {
        PyObject *edge = PyTuple_GET_ITEM(edges, i); /* borrowed */
        if (PyTuple_Check(edge) && PyTuple_GET_SIZE(edge) == 2 &&
            PyTuple_GET_ITEM(edge, 0) != Py_None) {
            result = visit(st, PyTuple_GET_ITEM(edge, 0), PyTuple_GET_ITEM(edge, 1),
                           context);
        }
    }
    return result;
}

static int
follow_edge(oomkit_state *Py_UNUSED(st), PyObject *next, PyObject *Py_UNUSED(number),
            void *work)
{
    return PyList_Append(work, next);
}

int
oomkit_node_follow(oomkit_state *st, PyObject *node, PyObject *work)
{
    return oomkit_node_edges(st, node, follow_edge, work);
}
