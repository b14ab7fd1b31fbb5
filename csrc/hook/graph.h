/* Walking an autograd graph. */
#ifndef OOMKIT_HOOK_GRAPH_H
#define OOMKIT_HOOK_GRAPH_H

#include "../py/state.h"

/* An attribute of the nodes of a type. */
typedef struct oomkit_node_attribute {
    PyObject *name; /* borrowed from the state */
    getter get;     /* or NULL: it is read by its name */
    void *closure;
} oomkit_node_attribute;

#define OOMKIT_COUNT_SAVED(field, text) +1

/* What is the same of all nodes of a type. */
typedef struct oomkit_node_type {
    PyTypeObject *type; /* borrowed */
    uint64_t hash;      /* of its name */
    int is_leaf;
    unsigned saved_count;
    int weighs;                            /* classes, as a cross entropy may */
    oomkit_node_attribute edges, variable; /* next_functions; of a leaf its tensor */
    oomkit_node_attribute weights;         /* of those classes: a tensor or None */
    oomkit_node_attribute
        saved[OOMKIT_STATE_SAVED(OOMKIT_COUNT_SAVED)]; /* that it has */
} oomkit_node_type;

/* node_types.c. Of a type that may go away (a custom Function) it is filled into `own`,
 * and found there again: nodes of it must be alive until then. */
const oomkit_node_type *
oomkit_node_type_of(oomkit_state *st, PyTypeObject *type, oomkit_node_type *own);
/* That attribute of a node. New reference or NULL. */
PyObject *
oomkit_node_get(PyObject *node, const oomkit_node_attribute *attribute);
int
oomkit_node_is_leaf(oomkit_state *st, PyObject *node);

/* What to do with a node that another one leads to, and the number of its output there
 * (borrowed): 0 go on, else the answer. */
typedef int (*oomkit_edge_visitor)(oomkit_state *st, PyObject *next, PyObject *number,
                                   void *context);

/* What to do at a node: 1 go on behind it, 0 do not, -1 with an exception. */
typedef int (*oomkit_node_visitor)(oomkit_state *st, PyObject *node,
                                   const oomkit_node_type *type, void *context);

/* An edge, as a walk comes to it. What a node does is a hash of its type and of what
 * it has saved: the dimensions that it works along, how it reduces, whether a norm
 * takes statistics of the batch, what classes weigh. A place is a hash of all nodes on
 * the way there. */
typedef struct oomkit_edge {
    PyObject *to;           /* borrowed */
    uint64_t from;          /* what the first node does, and with which argument */
    uint64_t kind;          /* what `to` does; 1 where `from` is a root's */
    uint64_t before, place; /* of its nodes, never 0 */
    int first;              /* the walk has not been at `to` before */
    int is_leaf;            /* that one */
} oomkit_edge;

/* 0, or -1 with an exception. */
typedef int (*oomkit_edge_watcher)(oomkit_state *st, const oomkit_edge *edge,
                                   void *context);

static inline uint64_t
oomkit_hash_mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0xff51afd7ed558ccdu;
    return hash ^ (hash >> 32);
}

/* graph_walk.c: every node once, one edge after another from the last to the first. 0
 * or -1: SplitError where the graph is too deep. *leaves as in oomkit_roots_nodes. */
int
oomkit_graph_walk(oomkit_state *st, PyObject *roots, oomkit_node_visitor visit,
                  void *context, int *leaves);
/* The same, and each edge on the way. */
int
oomkit_graph_walk_edges(oomkit_state *st, PyObject *roots, oomkit_node_visitor visit,
                        oomkit_edge_watcher edge, void *context, int *leaves);

#define OOMKIT_TOO_DEEP                                                                \
    "so many operations follow one another in the graph of its backward() that "       \
    "it could not be looked through for parameters that auto_batch did not find: "     \
    "run backward() over fewer operations at once (fewer time steps, "                 \
    "torch.utils.checkpoint)"

/* Did a walk that failed end because the graph is too deep? Then its SplitError is
 * dropped. */
int
oomkit_graph_too_deep(const oomkit_state *st);

/* The nodes of the roots (tensors; of a GradientEdge its node) into `work`. *leaves is
 * set when a root is a leaf itself. 0 or -1. */
int
oomkit_roots_nodes(oomkit_state *st, PyObject *roots, PyObject *work, int *leaves);

/* Every node that `node` leads to: 0, or what the visitor has answered first, or -1. */
int
oomkit_node_edges(oomkit_state *st, PyObject *node, oomkit_edge_visitor visit,
                  void *context);
/* Appends the nodes that `node` leads to. 0 or -1. */
int
oomkit_node_follow(oomkit_state *st, PyObject *node, PyObject *work);

#endif
