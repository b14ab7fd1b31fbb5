/* Walking an autograd graph: every node once, as deep as is safe.
 *
 * torch frees a graph without recursion, but not one that was looked through: a node
 * that has been a Python object keeps that object, and one such node frees the next
 * from inside its own deallocation, some 200 bytes of stack for each. So a walk does
 * not follow a chain for longer than the stack can take: it makes no more objects, and
 * says so. */
#define _GNU_SOURCE /* pthread_getattr_np */
#include "graph.h"
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
    PyObject *node; /* owned; NULL for the roots */
    PyObject
        *edges; /* owned tuple as in next_functions; of the roots a list of nodes */
    Py_ssize_t next;      /* edges that are left: from the last to the first */
    Py_ssize_t height;    /* nodes of the longest chain that begins here, so far */
    uint64_t kind, place; /* where edges are watched: see oomkit_edge */
} walk_frame;

#define TYPES 64

/* What is the same of all nodes of a type. */
typedef struct walk_type {
    PyTypeObject *type; /* borrowed: nodes of it are kept */
    uint64_t hash;
    unsigned saved; /* which of OOMKIT_STATE_SAVED they have */
} walk_type;

typedef struct graph_walk {
    oomkit_state *st;
    oomkit_node_visitor visit;
    oomkit_edge_watcher edge; /* or NULL */
    void *context;
    PyObject *seen; /* dict: node to height; keeps the nodes, hence their identity */
    walk_frame *frames; /* the roots, then a chain of nodes */
    Py_ssize_t count, room, limit;
    walk_type types[TYPES]; /* that were met last */
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

static walk_type
walk_type_of(const oomkit_state *st, PyTypeObject *type)
{
    const char *name = type->tp_name;
    walk_type known = {.type = type};
    unsigned bit = 1;

    /* Each graph that torch.compile has compiled is a type of its own, all of one name.
     */
    known.hash = strstr(name, "CompiledFunction") != NULL ? (uintptr_t)type : 0;
    for (; *name != '\0'; name++) {
        known.hash = (known.hash ^ (unsigned char)*name) * 0x100000001b3u;
    }
#define HAS(field, text)                                                               \
    if (type->tp_dict != NULL && PyDict_Contains(type->tp_dict, st->field) > 0) {      \
        known.saved |= bit;                                                            \
    }                                                                                  \
    bit <<= 1;
    OOMKIT_STATE_SAVED(HAS)
#undef HAS
    return known;
}

/* `hash`, and what a node has saved under that name. */
static uint64_t
walk_saved(PyObject *node, PyObject *name, uint64_t hash)
{
    OWNED PyObject *value = PyObject_GetAttr(node, name);
    const Py_hash_t number = value == NULL ? -1 : PyObject_Hash(value);

    if (PyErr_Occurred()) {
        oomkit_error_dismiss(); /* then it is not told from others of its type */
    }
    return oomkit_hash_mix(hash, (uint64_t)number);
}

/* What a node does. */
static uint64_t
walk_kind(graph_walk *w, PyObject *node)
{
    PyTypeObject *type = Py_TYPE(node);
    walk_type *known = &w->types[((uintptr_t)type >> 4) % TYPES];
    uint64_t hash;
    unsigned bit = 1;

    if (known->type != type) {
        *known = walk_type_of(w->st, type);
    }
    hash = known->hash;
#define SAVED(field, text)                                                             \
    if (known->saved & bit) {                                                          \
        hash = walk_saved(node, w->st->field, hash);                                   \
    }                                                                                  \
    bit <<= 1;
    OOMKIT_STATE_SAVED(SAVED)
#undef SAVED
    return hash;
}

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
    frame->node = Py_XNewRef(node);
    frame->edges = edges;
    frame->next = PySequence_Fast_GET_SIZE(edges);
    frame->height = 1;
    frame->kind = by == NULL ? 1 : by->kind;
    frame->place = by == NULL ? 1 : by->place;
    return 0;
}

static int
walk_note(const graph_walk *w, PyObject *node, Py_ssize_t height)
{
    OWNED PyObject *number = PyLong_FromSsize_t(height);
    return number == NULL ? -1 : PyDict_SetItem(w->seen, node, number);
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
walk_tell(graph_walk *w, PyObject *node, int first, oomkit_edge *edge)
{
    const walk_frame *frame = &w->frames[w->count - 1];
    uint64_t place;

    *edge = (oomkit_edge){.to = node, .before = frame->place, .first = first};
    if (w->edge == NULL) {
        return 0;
    }
    edge->from = frame->kind;
    edge->kind = walk_kind(w, node);
    place = oomkit_hash_mix(frame->place, (uint64_t)frame->next);
    edge->place = oomkit_hash_mix(place, edge->kind) | 1;
    return w->edge(w->st, edge, w->context);
}

/* A node that the last frame leads to. 0 or -1. */
static int
walk_enter(graph_walk *w, PyObject *node)
{
    PyObject *known = PyDict_GetItemWithError(w->seen, node); /* borrowed from seen */
    PyObject *edges;                                          /* owned */
    oomkit_edge edge;
    int on;

    if (PyErr_Occurred() || walk_tell(w, node, known == NULL, &edge) < 0) {
        return -1;
    }
    if (known != NULL) {
        return walk_reaches(w, PyLong_AsSsize_t(known));
    }
    if (walk_reaches(w, 1) < 0 || walk_note(w, node, 1) < 0) {
        return -1;
    }
    on = w->visit(w->st, node, w->context);
    if (on <= 0) {
        return on;
    }
    edges = PyObject_GetAttr(node, w->st->str_next_functions);
    if (edges != NULL && !PyTuple_Check(edges)) {
        Py_SETREF(edges, Py_NewRef(w->st->empty_tuple));
    }
    return walk_push(w, node, edges, &edge);
}

/* The last frame is done: its height is known. 0 or -1. */
static int
walk_leave(graph_walk *w)
{
    walk_frame frame = w->frames[--w->count];
    int result = 0;

    if (frame.node != NULL && frame.height > 1) {
        result = walk_note(w, frame.node, frame.height);
        if (result == 0) {
            result = walk_reaches(w, frame.height);
        }
    }
    Py_XDECREF(frame.node);
    Py_DECREF(frame.edges);
    return result;
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
    OWNED PyObject *seen = PyDict_New(), *list = PyList_New(0);
    int result;

    w.limit = walk_limit();
    w.seen = seen;
    if (list == NULL || seen == NULL ||
        oomkit_roots_nodes(st, roots, list, leaves) < 0) {
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
        w.count--;
        Py_XDECREF(w.frames[w.count].node);
        Py_DECREF(w.frames[w.count].edges);
    }
    PyMem_Free(w.frames);
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
oomkit_node_is_leaf(PyObject *node)
{
    const char *name = strrchr(Py_TYPE(node)->tp_name, '.');
    name = name == NULL ? Py_TYPE(node)->tp_name : name + 1;
    return strcmp(name, "AccumulateGrad") == 0;
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
