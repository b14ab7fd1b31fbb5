/* Values taken apart: a node for each, those of a container behind it. */
#ifndef OOMKIT_TREE_NODES_H
#define OOMKIT_TREE_NODES_H

#include "../py/state.h"

typedef enum {
    OOMKIT_NODE_OTHER = 0, /* passed whole, as it is */
    OOMKIT_NODE_TENSOR,
    OOMKIT_NODE_TUPLE, /* named tuples too */
    OOMKIT_NODE_LIST,
    OOMKIT_NODE_DICT,
    OOMKIT_NODE_OBJECT, /* a subclass of dict, a UserDict, a data class */
    OOMKIT_NODE_ARRAY   /* of numpy */
} oomkit_node_kind;

enum {                            /* oomkit_node.flags */
       OOMKIT_NODE_ATTRIBUTE = 1, /* an attribute of the object that it is in */
       OOMKIT_NODE_SLOT = 2,      /* which lies in a slot */
       OOMKIT_NODE_MIRRORED = 4,  /* an entry that is an attribute as well */
       OOMKIT_NODE_OWN_DICT = 8,  /* `self.__dict__ = self` */
       OOMKIT_NODE_CUSTOM = 16,   /* sliced by what was registered for its type */
       OOMKIT_NODE_STATIC = 32,   /* static= names it: gives no rows, passed whole */
       OOMKIT_NODE_DATA = 64      /* a UserDict: its entries lie in its `data` */
};

/* One value; containers are followed by their children (pre-order). What is known of a
 * leaf of the arguments (rows and below) is written by the rules' leaf(), csrc/batch.
 */
typedef struct oomkit_node {
    PyObject *object;      /* owned */
    PyObject *key;         /* owned: the key in the parent dict, or the name of the
                              attribute, else NULL */
    Py_ssize_t children;   /* direct children of a container */
    int64_t rows;          /* size of dimension `dim` of a tensor or array, -1 if it has
                              none, and inside what a registered splitter slices */
    uint64_t shape_hash;   /* of a tensor: dtype and the other sizes; of a list that was
                              too long or too deep to be opened: its length */
    uint32_t version;      /* of a tensor, at capture; of an array a hash of values */
    int32_t entries;       /* of an object: its first children are those of a mapping */
    int32_t same;          /* set by oomkit_batch_find: an earlier node with the same
                              object, built alike; else -1 */
    uint8_t requires_grad; /* of a tensor, at capture */
    uint8_t kind;          /* oomkit_node_kind */
    uint8_t split;         /* decided by oomkit_batch_find: this leaf is sliced */
    uint8_t flags;
    int8_t device_type, device_index; /* of a tensor */
} oomkit_node;

#define OOMKIT_TREE_INLINE 12

/* A value taken apart, or several one after the other. One that is all zero is empty
 * and may be cleared. Nothing may point to its inline nodes from outside. */
typedef struct oomkit_tree {
    oomkit_node *nodes; /* pre-order */
    Py_ssize_t count, room;
    oomkit_node inline_nodes[OOMKIT_TREE_INLINE];
} oomkit_tree;

#endif
