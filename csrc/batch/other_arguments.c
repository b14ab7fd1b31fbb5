/* Arguments beside the batch: which of them are sliced with it. */
#include "layout.h"
#include "../py/tensor.h"

#include <string.h>

const oomkit_seen *
oomkit_find_seen(const oomkit_find *f, Py_ssize_t argument)
{
    const oomkit_batch *batch = f->batch;
    const int keyword = argument >= batch->positional;
    return oomkit_site_seen(
        f->site, argument,
        keyword ? PyTuple_GET_ITEM(batch->kwnames, argument - batch->positional)
                : NULL);
}

/* --- lists without tensors --- */

static int
other_plain_list(const oomkit_find *f, const oomkit_seen *seen, Py_ssize_t index)
{
    if (seen != NULL && seen->length_stays) {
        return 0;
    }
    if (seen != NULL && seen->length_moves) {
        f->batch->nodes[index].split = OOMKIT_SPLIT_ITEMS;
        return 0;
    }
    return oomkit_find_refuse(
        f, index, " as long as the batch, without tensors",
        "name it in batch=... when it has one element per sample, else in "
        "static=...");
}

/* Lists inside of an argument without tensors: {"captions": [...]}. 0 or -1. */
static int
other_inner_lists(const oomkit_find *f, Py_ssize_t index)
{
    Py_ssize_t end = oomkit_node_end(f->batch, index);

    while (index < end) {
        if ((f->batch->nodes[index].flags & OOMKIT_NODE_STATIC) != 0) {
            index = oomkit_node_end(f->batch, index);
        } else if (oomkit_node_is_plain_list(f->batch, index, f->batch->rows)) {
            return other_plain_list(f, NULL, index);
        } else {
            index++;
        }
    }
    return 0;
}

/* --- tensors of another size --- */

/* SplitError: the tensor `index` is `what`. -1 always. */
static int
other_refuse(const oomkit_find *f, Py_ssize_t index, const char *what,
             const char *advice)
{
    OWNED PyObject *shape = oomkit_find_describe(f, index);

    if (shape == NULL) {
        return -1;
    }
    return oomkit_find_raise(
        f, index,
        PyUnicode_FromFormat("%U next to a batch of %lld rows, %s; %s", shape,
                             (long long)f->batch->rows, what, advice));
}

/* A tensor without the dimension of the samples, which is not the first: labels of the
 * rows, or targets that were flattened. 0 or -1. */
static int
other_flat(const oomkit_find *f, Py_ssize_t index)
{
    const int64_t rows = f->batch->rows;
    oomkit_tensor_facts facts;
    int step;

    if (f->batch->nodes[index].kind != OOMKIT_NODE_TENSOR) {
        return 0;
    }
    if (oomkit_tensor_facts_get(f->st, f->batch->nodes[index].object, 0, &facts) < 0) {
        return -1;
    }
    if (facts.ndim <= 0) {
        return 0;
    }
    if (facts.size == rows) {
        return other_refuse(
            f, index, "but not in the dimension of dim=",
            "give each argument its own, dim={'x': 1, 'y': 0}, or pass it whole with "
            "static=...");
    }
    step = facts.size % rows == 0 ? oomkit_find_has_size(f, facts.size / rows) : 0;
    if (step == 0 || facts.size == 0) {
        return step;
    }
    return step < 0
               ? -1
               : other_refuse(
                     f, index,
                     "which looks like its rows flattened with another dimension",
                     "pass it unflattened and flatten it in the step, or pass it whole "
                     "with static=...");
}

/* [layers, rows, size], as hidden states are? 0, or -1 with SplitError. */
static int
other_second(const oomkit_find *f, Py_ssize_t index)
{
    oomkit_tensor_facts facts;
    OWNED PyObject *name = NULL, *shape = NULL;

    if (f->batch->nodes[index].kind != OOMKIT_NODE_TENSOR) {
        return 0;
    }
    if (oomkit_tensor_facts_get(f->st, f->batch->nodes[index].object, 1, &facts) < 0) {
        return -1;
    }
    if (facts.ndim < 3 || facts.size != f->batch->rows ||
        f->batch->nodes[index].rows == facts.size) {
        return 0;
    }
    name = oomkit_find_name(f, index);
    shape = oomkit_find_describe(f, index);
    if (name == NULL || shape == NULL) {
        return -1;
    }
    return oomkit_find_raise(
        f, index,
        PyUnicode_FromFormat(
            "%U next to a batch of %lld rows, which it has in dimension 1 like a "
            "hidden "
            "state; give dim={'%U': 1}, or pass it whole with static=...",
            shape, (long long)f->batch->rows, name));
}

/* A tensor whose size in the dimension of the samples is neither that of the batch nor
 * 1: passed whole, unless it shows that it belongs to the rows in a way that no slice
 * keeps. 0 or -1. */
static int
other_number_of_rows(const oomkit_find *f, const oomkit_seen *seen, Py_ssize_t index)
{
    const oomkit_node *node = &f->batch->nodes[index];
    const int64_t rows = f->batch->rows;
    int dimensions, known;

    if (f->options->dim == 0 && other_second(f, index) < 0) {
        return -1;
    }
    if (seen != NULL && seen->size_stays && !seen->size_wanders) {
        return 0; /* class weights, a table */
    }
    known = oomkit_find_has_size(f, node->rows);
    if (known != 0) {
        return known < 0 ? -1 : 0; /* positions, a mask: of a dimension of the batch */
    }
    if (seen != NULL && seen->size_wanders) {
        return other_refuse(
            f, index, "and its size has changed while the batch's stayed",
            "if it belongs to the samples (boxes of all images in one tensor) pass a "
            "list with one element per sample, else pass it whole with static=...");
    }
    dimensions = oomkit_find_dimensions(f, index);
    known = dimensions == 1 && node->rows % rows == 0
                ? oomkit_find_has_size(f, node->rows / rows)
                : 0;
    if (dimensions < -1 || known <= 0) {
        return dimensions < -1 ? -1 : known;
    }
    return other_refuse(
        f, index, "which looks like its rows flattened with another dimension",
        "pass it unflattened and flatten it in the step, or pass it whole with "
        "static=...");
}

/* All leaves of the argument that are not of the batch's size. 0 or -1. */
static int
other_sizes(const oomkit_find *f, const oomkit_seen *seen, Py_ssize_t index)
{
    Py_ssize_t end = oomkit_node_end(f->batch, index);
    int64_t rows = f->batch->rows;
    int result = 0;

    for (; result == 0 && index < end; index++) {
        const oomkit_node *node = &f->batch->nodes[index];
        if ((node->flags & OOMKIT_NODE_CUSTOM) != 0 && node->rows != rows) {
            result = other_refuse(f, index, "which does not go with it",
                                  "name what is to be split with batch=... or pass it "
                                  "whole with static=...");
        } else if (node->split == OOMKIT_SPLIT_ITEMS ||
                   (node->flags & (OOMKIT_NODE_CUSTOM | OOMKIT_NODE_STATIC)) != 0) {
            index = oomkit_node_end(f->batch, index) - 1;
        } else if (node->rows > 1 && node->rows != rows) {
            result = other_number_of_rows(f, seen, index);
        } else if (node->rows < 0) {
            result = other_flat(f, index);
        }
    }
    return result;
}

/* --- tensors of the batch's size --- */

/* "weight" in the name: of classes as often as of samples. */
static int
other_is_weight(const oomkit_find *f, Py_ssize_t argument, Py_ssize_t index)
{
    OWNED PyObject *name = oomkit_argument_name(f->batch, f->names, argument);
    const char *text; /* borrowed from name */
    int found = 0;

    if (name == NULL) {
        return -1;
    }
    text = PyUnicode_AsUTF8(name);
    if (text == NULL) {
        if (PyErr_ExceptionMatches(PyExc_UnicodeError)) {
            PyErr_Clear(); /* not a name that can be written: not this one */
        }
    } else if (strstr(text, "weight") != NULL && strstr(text, "sample") == NULL) {
        found = oomkit_find_dimensions(f, index) == 1;
    }
    return PyErr_Occurred() ? -1 : found;
}

/* Everything fits and is marked: what earlier calls showed decides. */
static int
other_fits(const oomkit_find *f, const oomkit_seen *seen, Py_ssize_t argument,
           Py_ssize_t index)
{
    oomkit_batch *batch = f->batch;
    int items = batch->nodes[index].split == OOMKIT_SPLIT_ITEMS, weight;

    if (items ? seen != NULL && seen->length_stays
              : seen != NULL && (seen->size_stays || seen->size_other)) {
        oomkit_node_unmark(batch, index);
        if (!items && seen->size_wanders) {
            int known = oomkit_find_has_size(f, batch->rows);
            if (known == 0) {
                return other_refuse(
                    f, oomkit_node_first_tensor(batch, index, batch->rows, 1),
                    "but its size was another one in earlier calls",
                    "name it in batch=... when it has one row per sample, else in "
                    "static=...");
            }
            return known < 0 ? -1 : 0;
        }
        return 0;
    }
    if (items || (seen != NULL && seen->size_moves) ||
        batch->nodes[index].split != OOMKIT_SPLIT_NARROW) {
        return 0;
    }
    weight = other_is_weight(f, argument, index);
    if (weight > 0) {
        return other_refuse(
            f, index, "which may be a weight per sample or one per class",
            "name it in batch=... when it has one row per sample, else in static=...");
    }
    return weight;
}

int
oomkit_find_beside(const oomkit_find *f, Py_ssize_t argument, Py_ssize_t index)
{
    oomkit_batch *batch = f->batch;
    const int64_t rows = batch->rows;
    const oomkit_seen *seen = oomkit_find_seen(f, argument);
    Py_ssize_t with, where;
    int holds;

    if (oomkit_node_is_plain_list(batch, index, rows)) {
        return other_plain_list(f, seen, index);
    }
    holds = oomkit_find_closed(f, argument, index, rows, &where);
    if (holds != 0) {
        return holds < 0 ? -1
                         : oomkit_find_refuse(
                               f, where, ", which holds tensors as long as the batch",
                               "tell how to split it with "
                               "oomkit.register_splitter(type, split=...), or pass it "
                               "whole with static=...");
    }
    if (oomkit_node_fits(batch, index, rows)) {
        with = oomkit_node_first_tensor(batch, index, rows, 1);
        oomkit_node_mark(batch, index, rows, with >= 0 ? f->first : -1);
        if (!oomkit_node_holds_tensor(batch, index) &&
            other_inner_lists(f, index) < 0) {
            return -1;
        }
        return other_fits(f, seen, argument, index) < 0 ? -1
                                                        : other_sizes(f, seen, index);
    }
    with = oomkit_node_first_tensor(batch, index, rows, 1);
    if (with >= 0 && (seen == NULL || !seen->size_stays)) {
        Py_ssize_t end = oomkit_node_end(batch, index), other = index;
        while (other < end &&
               (batch->nodes[other].rows < 0 || batch->nodes[other].rows == 1 ||
                batch->nodes[other].rows == rows)) {
            other++;
        }
        return oomkit_find_disagree(f, with, other);
    }
    return with >= 0 ? 0 : other_sizes(f, seen, index);
}

void
oomkit_find_beside_one_row(const oomkit_find *f, Py_ssize_t argument, Py_ssize_t index)
{
    const oomkit_seen *seen = oomkit_find_seen(f, argument);

    if (oomkit_node_first_tensor(f->batch, index, 1, 1) >= 0 &&
        oomkit_node_fits(f->batch, index, 1) && (seen == NULL || !seen->size_stays)) {
        oomkit_node_mark(f->batch, index, 1, f->first);
    }
}
