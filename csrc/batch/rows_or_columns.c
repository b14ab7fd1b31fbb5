/* Lists of as many tensors as rows, each of which has the rows: three images [3, H, W]
 * are samples, though they can be read as columns of three rows. */
#include "layout.h"
#include "../py/tensor.h"

/* What the list or tuple would be as columns: every element a tensor that is sliced,
 * all of one dtype and number of dimensions. 1 with *facts of one of them, 0 or -1. */
static int
columns_alike(const oomkit_find *f, Py_ssize_t index, oomkit_tensor_facts *facts)
{
    const oomkit_batch *batch = f->batch;
    const oomkit_node *node = &batch->nodes[index], *child = node + 1;
    Py_ssize_t i;

    if (node->split == OOMKIT_SPLIT_ITEMS || node->children != batch->rows ||
        (node->flags & (OOMKIT_NODE_CUSTOM | OOMKIT_NODE_STATIC)) != 0 ||
        !oomkit_node_may_be_items(batch, index)) {
        return 0;
    }
    for (i = 0; i < node->children; i++, child++) {
        oomkit_tensor_facts each = {.dtype = -1};
        if ((child->kind != OOMKIT_NODE_TENSOR && child->kind != OOMKIT_NODE_ARRAY) ||
            child->split != OOMKIT_SPLIT_NARROW) {
            return 0;
        }
        each.ndim = oomkit_find_dimensions(f, child - batch->nodes);
        if (each.ndim < -1) {
            return -1;
        }
        if (child->kind == OOMKIT_NODE_TENSOR &&
            oomkit_tensor_facts_get(f->st, child->object, 0, &each) < 0) {
            return -1;
        }
        if (i > 0 && (each.ndim != facts->ndim || each.dtype != facts->dtype)) {
            return 0;
        }
        *facts = each;
    }
    return 1;
}

int
oomkit_find_one_row(const oomkit_find *f, Py_ssize_t index)
{
    const oomkit_node *node = &f->batch->nodes[index], *child = node + 1;
    int dimensions = 0;

    if (child->kind == OOMKIT_NODE_TENSOR || child->kind == OOMKIT_NODE_ARRAY) {
        dimensions = oomkit_find_dimensions(f, index + 1);
    }
    if (dimensions <= 0 || !oomkit_node_fits(f->batch, index, 1)) {
        return dimensions < -1 ? -1 : 0;
    }
    return node->children < 4 || dimensions != 3;
}

/* Is another list read as one of samples that hold tensors? */
static int
columns_have_samples(const oomkit_batch *batch)
{
    Py_ssize_t i;
    for (i = 0; i < batch->count; i++) {
        if (batch->nodes[i].split == OOMKIT_SPLIT_ITEMS &&
            oomkit_node_holds_tensor(batch, i)) {
            return 1;
        }
    }
    return 0;
}

static int
columns_refuse(const oomkit_find *f, Py_ssize_t index)
{
    const oomkit_node *node = &f->batch->nodes[index];
    OWNED PyObject *path = oomkit_node_path(f->batch, f->names, index);

    if (path == NULL) {
        return -1;
    }
    return oomkit_find_raise(
        f, index,
        PyUnicode_FromFormat(
            "%U is a '%.200s' of %zd similar tensors next to a batch of %lld rows, "
            "which "
            "may be as many samples, or columns of as many rows; for samples wrap each "
            "in a dict, for columns put them into one dict",
            path, Py_TYPE(node->object)->tp_name, node->children,
            (long long)f->batch->rows));
}

/* Sequences as long as the batch of types that are not opened: one element per sample,
 * as likely as not. 0 or -1 with SplitError. */
static int
columns_closed(const oomkit_find *f)
{
    const oomkit_batch *batch = f->batch;
    Py_ssize_t argument, index;

    EACH_ARGUMENT (f, argument, index) {
        Py_ssize_t i = index, end = oomkit_node_end(batch, index), length = -1;
        while (f->roles[argument] != OOMKIT_ROLE_STATIC && i < end) {
            const oomkit_node *node = &batch->nodes[i];
            int closed;
            if (node->split == OOMKIT_SPLIT_ITEMS ||
                (node->flags & (OOMKIT_NODE_CUSTOM | OOMKIT_NODE_STATIC)) != 0) {
                i = oomkit_node_end(batch, i);
                continue;
            }
            closed = node->kind == OOMKIT_NODE_OTHER &&
                             !PyList_CheckExact(node->object) &&
                             !PyTuple_CheckExact(node->object) &&
                             !Py_IS_TYPE(node->object, (PyTypeObject *)f->st->Size)
                         ? oomkit_closed_length(node->object, &length)
                         : 0;
            if (closed < 0) {
                return -1;
            }
            if (closed > 0 && length == batch->rows) {
                return oomkit_find_refuse(f, i, " as long as the batch",
                                          "pass a list when it has one element per "
                                          "sample, else name it in static=...");
            }
            i++;
        }
    }
    return 0;
}

int
oomkit_find_columns(const oomkit_find *f)
{
    oomkit_batch *batch = f->batch;
    int samples = columns_have_samples(batch);
    Py_ssize_t i, doubtful = -1;

    for (i = 0; i < batch->count; i++) {
        oomkit_tensor_facts facts = {0};
        int alike = columns_alike(f, i, &facts);
        if (alike < 0) {
            return -1;
        }
        if (alike > 0 && samples) {
            oomkit_node_unmark(batch, i);
            batch->nodes[i].split = OOMKIT_SPLIT_ITEMS;
        } else if (alike > 0 &&
                   (oomkit_is_floating(facts.dtype) || facts.dtype < 0 ||
                    batch->nodes[i].children > 3)) { /* ids, mask, types: columns */
            /* Two or three views, all that the batch is, are columns by experience. */
            int image = facts.ndim == 3 && (batch->rows == 3 || batch->rows == 4);
            doubtful = i != f->first || image ? i : doubtful;
        }
    }
    return doubtful >= 0 ? columns_refuse(f, doubtful) : columns_closed(f);
}
