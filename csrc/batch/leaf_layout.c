/* Reading the nodes as samples: can a subtree be the data of so many rows, and which of
 * its leaves are sliced then? Pure functions of the nodes. */
#include "batch.h"

#define LONGEST_SIZE 4 /* of a tuple of numbers that is taken for one */

#define EACH_CHILD(batch, index, number, child)                                        \
    for (number = 0, child = (index) + 1; number < (batch)->nodes[index].children;     \
         child = oomkit_node_end(batch, child), number++)

/* --- how many rows a subtree can be read with --- */

static int
node_is_sequence(const oomkit_node *node)
{
    return Py_IS_TYPE(node->object, &PyList_Type) ||
           Py_IS_TYPE(node->object, &PyTuple_Type);
}

int
oomkit_node_holds_dicts(const oomkit_batch *batch, Py_ssize_t index)
{
    Py_ssize_t number, child;
    EACH_CHILD(batch, index, number, child)
    {
        if (batch->nodes[child].kind != OOMKIT_NODE_DICT &&
            batch->nodes[child].kind != OOMKIT_NODE_OBJECT) {
            return 0;
        }
    }
    return batch->nodes[index].children > 0;
}

static int
node_is_root(const oomkit_batch *batch, Py_ssize_t index)
{
    Py_ssize_t at = 0;
    while (at < index) {
        at = oomkit_node_end(batch, at);
    }
    return at == index;
}

/* Lists or tuples as long as each other, two or more, and nothing else. */
static int
node_holds_lists_alike(const oomkit_batch *batch, Py_ssize_t index)
{
    Py_ssize_t number, child;

    if (!node_is_sequence(&batch->nodes[index]) || batch->nodes[index].children < 2) {
        return 0;
    }
    EACH_CHILD(batch, index, number, child)
    {
        if (!node_is_sequence(&batch->nodes[child]) ||
            batch->nodes[child].children < 2 ||
            batch->nodes[child].children != batch->nodes[index + 1].children) {
            return 0;
        }
    }
    return 1;
}

/* One of the lists or tuples as long as each other that are all that an argument is:
 * tuple(zip(*samples)). */
int
oomkit_node_is_zipped(const oomkit_batch *batch, Py_ssize_t index)
{
    Py_ssize_t root = 0, number, child;

    while (oomkit_node_end(batch, root) <= index) {
        root = oomkit_node_end(batch, root);
    }
    if (node_holds_lists_alike(batch, root)) {
        EACH_CHILD(batch, root, number, child)
        {
            if (child == index) {
                return 1;
            }
        }
    }
    return 0;
}

/* Two subtrees of one structure; tensors of the same dtype and other sizes too, unless
 * they are in dictionaries (masks differ in height and width). */
static int
nodes_alike(const oomkit_batch *batch, Py_ssize_t a, Py_ssize_t b)
{
    Py_ssize_t end = oomkit_node_end(batch, a);
    int exact = batch->nodes[a].kind != OOMKIT_NODE_DICT;

    if (end - a != oomkit_node_end(batch, b) - b) {
        return 0;
    }
    for (; a < end; a++, b++) {
        const oomkit_node *one = &batch->nodes[a], *two = &batch->nodes[b];
        if (one->kind != two->kind || one->children != two->children ||
            (exact && one->shape_hash != two->shape_hash)) {
            return 0;
        }
    }
    return 1;
}

/* Are the elements of one structure? */
static int
node_holds_alike(const oomkit_batch *batch, Py_ssize_t index)
{
    Py_ssize_t number, child;

    EACH_CHILD(batch, index, number, child)
    {
        if (!nodes_alike(batch, index + 1, child)) {
            return 0;
        }
    }
    return 1;
}

/* A list whose elements each hold a tensor; a tuple only as an argument of its own or
 * of dictionaries, for a tuple of tensors is more often (hidden, cell). What zip(*...)
 * makes of samples, lists alike of different things, has them inside. */
int
oomkit_node_may_be_items(const oomkit_batch *batch, Py_ssize_t index)
{
    const oomkit_node *node = &batch->nodes[index];
    Py_ssize_t number, child;

    if (!node_is_sequence(node) || node->children == 0 ||
        (node_is_root(batch, index) && node_holds_lists_alike(batch, index) &&
         !node_holds_alike(batch, index))) {
        return 0;
    }
    if (node->kind == OOMKIT_NODE_TUPLE && !oomkit_node_holds_dicts(batch, index) &&
        !node_is_root(batch, index) && !oomkit_node_is_zipped(batch, index)) {
        return 0;
    }
    EACH_CHILD(batch, index, number, child)
    {
        if (!oomkit_node_holds_tensor(batch, child)) {
            return 0;
        }
    }
    return 1;
}

/* Can the subtree be the data of `rows` samples? */
int
oomkit_node_fits(const oomkit_batch *batch, Py_ssize_t index, int64_t rows)
{
    const oomkit_node *node = &batch->nodes[index];
    Py_ssize_t number, child;

    if ((node->flags & OOMKIT_NODE_STATIC) != 0) {
        return 1;
    }
    if (oomkit_node_is_cut(node)) {
        int custom = (node->flags & OOMKIT_NODE_CUSTOM) != 0;
        return node->rows == rows || (!custom && (node->rows == -1 || node->rows == 1));
    }
    EACH_CHILD(batch, index, number, child)
    {
        if (!oomkit_node_fits(batch, child, rows)) {
            return node->children == rows && oomkit_node_may_be_items(batch, index);
        }
    }
    return 1;
}

/* Samples of different sizes in a list, with nothing else that tells the rows. */
int
oomkit_node_is_ragged(const oomkit_batch *batch, Py_ssize_t index)
{
    return batch->nodes[index].children >= 2 &&
           oomkit_node_may_be_items(batch, index) && node_holds_alike(batch, index);
}

int
oomkit_node_holds_samples(const oomkit_batch *batch, Py_ssize_t index)
{
    Py_ssize_t tensor = oomkit_node_first_tensor(batch, index, 1, 0);
    if (!oomkit_node_may_be_items(batch, index)) {
        return 0;
    }
    return oomkit_node_holds_dicts(batch, index) ||
           (tensor >= 0 && oomkit_node_is_ragged(batch, index) &&
            !oomkit_node_fits(batch, index, batch->nodes[tensor].rows));
}

Py_ssize_t
oomkit_node_first_tensor(const oomkit_batch *batch, Py_ssize_t index, int64_t rows,
                         int equal)
{
    Py_ssize_t end = oomkit_node_end(batch, index);
    for (; index < end; index++) {
        const oomkit_node *node = &batch->nodes[index];
        if (node->rows >= 0 && (node->rows == rows) == equal) {
            return index;
        }
    }
    return -1;
}

/* A list as long as the batch whose elements are samples. Read as columns only when
 * every tensor allows it and one shows it, and never when the elements are dictionaries
 * beside another argument that gives the rows: two images with two boxes each are no
 * columns. */
static int
node_reads_as_items(const oomkit_batch *batch, Py_ssize_t index, int64_t rows,
                    Py_ssize_t first)
{
    Py_ssize_t number, child;

    if (rows < 2 || batch->nodes[index].children != rows ||
        !oomkit_node_may_be_items(batch, index)) {
        return 0;
    }
    if ((index != first && oomkit_node_holds_dicts(batch, index)) ||
        oomkit_node_first_tensor(batch, index, rows, 1) < 0) {
        return 1;
    }
    EACH_CHILD(batch, index, number, child)
    {
        if (!oomkit_node_fits(batch, child, rows)) {
            return 1;
        }
    }
    return 0;
}

/* A tuple that is no size: longer than any, or of strings, dictionaries, objects. */
static int
node_is_no_size(const oomkit_batch *batch, Py_ssize_t index)
{
    Py_ssize_t number, child;
    EACH_CHILD(batch, index, number, child)
    {
        PyObject *object = batch->nodes[child].object; /* borrowed from the node */
        if (object != Py_None && !PyNumber_Check(object) && !PyTuple_Check(object)) {
            return 1;
        }
    }
    return batch->nodes[index].children > LONGEST_SIZE;
}

/* A list as long as the batch that holds no tensor at all: captions, lengths. A tuple
 * inside of something else is more often a size where it may be one. */
int
oomkit_node_is_plain_list(const oomkit_batch *batch, Py_ssize_t index, int64_t rows)
{
    const oomkit_node *node = &batch->nodes[index];
    if (!node_is_sequence(node) || rows < 2 || oomkit_node_holds_tensor(batch, index) ||
        (PyTuple_CheckExact(node->object) && !node_is_root(batch, index) &&
         !oomkit_node_is_zipped(batch, index) && !node_is_no_size(batch, index))) {
        return 0;
    }
    return node->kind != OOMKIT_NODE_OTHER ? node->children == rows
                                           : node->shape_hash == (uint64_t)rows;
}

void
oomkit_node_mark(oomkit_batch *batch, Py_ssize_t index, int64_t rows, Py_ssize_t first)
{
    oomkit_node *node = &batch->nodes[index];
    Py_ssize_t number, child;

    if ((node->flags & OOMKIT_NODE_STATIC) != 0) {
        return;
    }
    if (oomkit_node_is_cut(node)) {
        int how = (node->flags & OOMKIT_NODE_CUSTOM) != 0 ? OOMKIT_SPLIT_CUSTOM
                                                          : OOMKIT_SPLIT_NARROW;
        node->split = (uint8_t)(node->rows == rows ? how : OOMKIT_SPLIT_WHOLE);
        return;
    }
    if (node_reads_as_items(batch, index, rows, first) ||
        (first >= 0 && oomkit_node_is_plain_list(batch, index, rows))) {
        node->split = OOMKIT_SPLIT_ITEMS;
        return;
    }
    EACH_CHILD(batch, index, number, child)
    {
        oomkit_node_mark(batch, child, rows, first);
    }
}

void
oomkit_node_unmark(oomkit_batch *batch, Py_ssize_t index)
{
    Py_ssize_t end = oomkit_node_end(batch, index);
    for (; index < end; index++) {
        batch->nodes[index].split = OOMKIT_SPLIT_WHOLE;
    }
}
