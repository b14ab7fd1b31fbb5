/* Values taken apart and made anew: the containers in them, whatever they are for. */
#ifndef OOMKIT_TREE_TREE_H
#define OOMKIT_TREE_TREE_H

#include "nodes.h"

/* What is opened, and who looks at the leaves. */
typedef struct oomkit_tree_rules {
    int depth;          /* deeper containers stay closed */
    Py_ssize_t longest; /* longer ones too */
    int outputs; /* of a function: every object with named parts is opened, not only
                    what could be data, and tuples like torch.return_types; what a
                    registered splitter slices is not */
    /* Looks at the node of a tensor or an array, or of what a registered splitter
     * slices when all that is in it is there (OOMKIT_KIND_*). 0 or -1. May be NULL. */
    int (*leaf)(void *context, Py_ssize_t at, int kind);
    void *context;
} oomkit_tree_rules;

/* --- flatten.c --- */

/* Appends the nodes of a value: of exact containers, named tuples, and of objects with
 * named parts (subclasses of dict, UserDict, data classes). Runs no Python code of its
 * own, but `outputs` may ask a tuple's type for an attribute. 0, or -1 with what the
 * tree then has to be cleared of. */
int
oomkit_tree_flatten(oomkit_state *st, oomkit_tree *tree, PyObject *value,
                    const oomkit_tree_rules *rules);

/* A result and what it directly consists of, its child `number` in node `number` + 1.
 * Whatever `tree` was, it is written over. 0, or -1 and the tree is empty. */
int
oomkit_tree_open(oomkit_state *st, oomkit_tree *tree, PyObject *value);

void
oomkit_tree_clear(oomkit_tree *tree);

/* `from` is empty afterwards. */
void
oomkit_tree_move(oomkit_tree *to, oomkit_tree *from);

/* Index of the node after the subtree that starts at `index`. */
Py_ssize_t
oomkit_tree_end(const oomkit_tree *tree, Py_ssize_t index);

/* --- build.c --- */

/* What stands in place of the node `at`, which is child `number` of its container. New
 * reference or NULL. */
typedef PyObject *(*oomkit_tree_maker)(void *context, Py_ssize_t at, Py_ssize_t number);

/* Is it a container that was opened? */
int
oomkit_node_is_open(const oomkit_node *node);

/* The open container at `at` anew, as its own type, of what `maker` makes of each of
 * its children. New reference or NULL. */
PyObject *
oomkit_tree_build(oomkit_state *st, const oomkit_tree *tree, Py_ssize_t at,
                  oomkit_tree_maker maker, void *context);

/* The same of children `from` .. `to` of a list or tuple. */
PyObject *
oomkit_tree_build_part(oomkit_state *st, const oomkit_tree *tree, Py_ssize_t at,
                       Py_ssize_t from, Py_ssize_t to, oomkit_tree_maker maker,
                       void *context);

/* A tuple, named tuple or the tuple that torch.max() returns, of the type of `like`.
 * Steals `list`; new reference or NULL. */
PyObject *
oomkit_output_tuple(oomkit_state *st, PyObject *like, PyObject *list);

/* --- splitters.c --- */

/* What was registered for the type or one that it comes from: (split, size, join).
 * Borrowed from the state, NULL when nothing was. */
PyObject *
oomkit_splitter_of(const oomkit_state *st, PyTypeObject *type);

/* The number of rows of `value`. 0; 1 when that cannot be known (no size= and no
 * len()); -1 with an exception of the user's function, which has a note. */
int
oomkit_splitter_rows(oomkit_state *st, PyObject *value, int64_t *rows);

/* Rows start .. start + length of `value`, checked. New reference or NULL. */
PyObject *
oomkit_splitter_cut(oomkit_state *st, PyObject *value, int64_t start, int64_t length);

#endif
