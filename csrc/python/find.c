/* Which arguments are the batch, how many rows it has, which leaves are sliced. Runs
 * once in a call that is split or repeated, never in a healthy one. */
#include "find.h"
#include "tensor.h"

#define TRIES 64 /* different sizes that are tried as the number of rows */

/* The first node of the subtree that capture left closed and that holds a tensor of
 * `rows` (any when -1). 1 and *where, 0, or -1. */
static int
find_closed(const oomkit_find *f, Py_ssize_t index, int64_t rows, Py_ssize_t *where)
{
    Py_ssize_t end = oomkit_node_end(f->batch, index);
    for (; index < end; index++) {
        const oomkit_node *node = &f->batch->nodes[index];
        int holds;
        if (node->kind != OOMKIT_NODE_OTHER) {
            continue;
        }
        holds = oomkit_object_holds_tensor(f->st, node->object, f->options->dim, rows);
        if (holds != 0) {
            *where = index;
            return holds;
        }
    }
    return 0;
}

/* Without batch=: the first argument that holds a tensor with a dimension `dim`. */
static int
find_first(oomkit_find *f)
{
    Py_ssize_t argument, index, where;
    int holds;

    EACH_ARGUMENT(f, argument, index)
    {
        if (f->roles[argument] != OOMKIT_ROLE_OTHER) {
            continue;
        }
        holds = oomkit_node_first_tensor(f->batch, index, -1, 0) >= 0
                    ? 1
                    : find_closed(f, index, -1, &where);
        if (holds != 0) {
            f->roles[argument] = OOMKIT_ROLE_BATCH;
            f->first = index;
            return holds;
        }
    }
    return 0;
}

/* --- the number of rows --- */

/* Do all batch arguments allow this number? 1, or 0 and *where, the first that does
 * not. */
static int
find_all_fit(const oomkit_find *f, int64_t rows, Py_ssize_t *where)
{
    Py_ssize_t argument, index;

    EACH_ARGUMENT(f, argument, index)
    {
        if (f->roles[argument] == OOMKIT_ROLE_BATCH &&
            !oomkit_node_fits(f->batch, index, rows)) {
            *where = index;
            return 0;
        }
    }
    return 1;
}

/* Dictionaries, or tensors that differ in size: samples rather than columns. */
static int
find_holds_samples(const oomkit_batch *batch, Py_ssize_t index)
{
    Py_ssize_t tensor = oomkit_node_first_tensor(batch, index, 1, 0);
    if (!oomkit_node_may_be_items(batch, index)) {
        return 0;
    }
    return oomkit_node_holds_dicts(batch, index) ||
           (tensor >= 0 && oomkit_node_is_ragged(batch, index) &&
            !oomkit_node_fits(batch, index, batch->nodes[tensor].rows));
}

/* Images in one list and targets in another one as long: their common leading size (the
 * channels) is not the rows. */
static int
find_is_per_sample(const oomkit_find *f)
{
    const oomkit_batch *batch = f->batch;
    const Py_ssize_t length = batch->nodes[f->first].children;
    Py_ssize_t argument, index, tensor;

    if (length < 2 || !oomkit_node_may_be_items(batch, f->first)) {
        return 0;
    }
    tensor = oomkit_node_first_tensor(batch, f->first, length, 0);
    if (tensor < 0) {
        return 0;
    }
    EACH_ARGUMENT(f, argument, index)
    {
        if (index != f->first && f->roles[argument] != OOMKIT_ROLE_STATIC &&
            batch->nodes[index].children == length &&
            find_holds_samples(batch, index) &&
            !oomkit_node_fits(batch, index, batch->nodes[tensor].rows)) {
            return 1;
        }
    }
    return 0;
}

/* The rows that every batch argument agrees on: a size of a tensor, else the length of
 * a ragged list, else 1. -1 when there is none. */
static int64_t
find_common(const oomkit_find *f)
{
    const oomkit_batch *batch = f->batch;
    int64_t tried[TRIES];
    int tries = 0, ones = 0, t;
    Py_ssize_t argument, index, i, where;

    EACH_ARGUMENT(f, argument, index)
    {
        Py_ssize_t end = oomkit_node_end(batch, index);
        for (i = index; f->roles[argument] == OOMKIT_ROLE_BATCH && i < end; i++) {
            int64_t rows = batch->nodes[i].rows;
            ones |= rows == 1;
            for (t = 0; t < tries && tried[t] != rows; t++) {
            }
            if (rows < 2 || t < tries || tries == TRIES) {
                continue;
            }
            if (find_all_fit(f, rows, &where)) {
                return rows;
            }
            tried[tries++] = rows;
        }
    }
    EACH_ARGUMENT(f, argument, index)
    {
        Py_ssize_t end = oomkit_node_end(batch, index);
        for (i = index; f->roles[argument] == OOMKIT_ROLE_BATCH && i < end; i++) {
            if (oomkit_node_is_ragged(batch, i) &&
                find_all_fit(f, batch->nodes[i].children, &where)) {
                return batch->nodes[i].children;
            }
        }
    }
    return ones && find_all_fit(f, 1, &where) ? 1 : -1;
}

/* Tensors that cannot be sliced in dimension `dim` although they are part of a batch:
 * nested ones, and those with fewer dimensions. 0 or -1. */
static int
find_check_dims(const oomkit_find *f, Py_ssize_t index)
{
    Py_ssize_t end = oomkit_node_end(f->batch, index);
    for (; index < end; index++) {
        const oomkit_node *node = &f->batch->nodes[index];
        oomkit_tensor_facts facts;
        if (node->kind != OOMKIT_NODE_TENSOR || node->rows >= 0) {
            continue;
        }
        if (oomkit_tensor_facts_get(f->st, node->object, f->options->dim, &facts) < 0) {
            return -1;
        }
        if (facts.ndim < 0) {
            return oomkit_find_refuse(
                f, index, " that is nested",
                "give split=... or pass it whole with static=...");
        }
        if (facts.ndim > 0) {
            return oomkit_find_disagree(f, -1, index);
        }
    }
    return 0;
}

/* The rows of a batch that split= slices: of its first tensor, else its len(). */
static int64_t
find_called_rows(const oomkit_find *f)
{
    PyObject *object = f->batch->nodes[f->first].object; /* borrowed from the node */
    Py_ssize_t tensor = oomkit_node_first_tensor(f->batch, f->first, -1, 0);
    Py_ssize_t length;

    if (tensor >= 0) {
        return f->batch->nodes[tensor].rows;
    }
    length = PyObject_Size(object);
    if (length < 0 && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear(); /* no len(): said below in our words */
        oomkit_find_refuse(
            f, f->first, " without a len()",
            "split=... needs a tensor in it, or a len(), to know its rows");
    }
    return length;
}

/* -1 always: says why the batch arguments have no common number of rows. */
static int
find_report(const oomkit_find *f)
{
    const oomkit_batch *batch = f->batch;
    Py_ssize_t argument, index, one = -1, other;

    EACH_ARGUMENT(f, argument, index)
    {
        if (f->roles[argument] == OOMKIT_ROLE_BATCH && one < 0) {
            one = oomkit_node_first_tensor(batch, index, 1, 0);
        }
    }
    EACH_ARGUMENT(f, argument, index)
    {
        Py_ssize_t end = oomkit_node_end(batch, index);
        for (other = index; f->roles[argument] == OOMKIT_ROLE_BATCH && other < end;
             other++) {
            int64_t rows = batch->nodes[other].rows;
            if (one >= 0 && rows >= 0 && rows != 1 && rows != batch->nodes[one].rows) {
                return oomkit_find_disagree(f, one, other);
            }
        }
    }
    return one < 0 ? oomkit_find_refuse(f, f->first, " without a tensor that has rows",
                                        "name another argument with batch=...")
                   : oomkit_find_refuse(f, one, " of 0 rows",
                                        "pass a batch that is not empty");
}

/* The arguments of batch= that are neither split nor hold a tensor are a mistake. */
static int
find_check_named(const oomkit_find *f)
{
    Py_ssize_t argument, index;

    EACH_ARGUMENT(f, argument, index)
    {
        if (f->roles[argument] == OOMKIT_ROLE_BATCH &&
            !oomkit_node_is_split(f->batch, index) &&
            !oomkit_node_holds_tensor(f->batch, index)) {
            return oomkit_find_refuse(f, index, " without a tensor that has rows",
                                      "name another argument with batch=...");
        }
    }
    return 0;
}

/* batch->rows and the marks of the batch arguments. 0 or -1. */
static int
find_batch(oomkit_find *f)
{
    oomkit_batch *batch = f->batch;
    Py_ssize_t argument, index, where;

    if (f->options->split != NULL) {
        batch->rows = find_called_rows(f);
    } else {
        f->per_sample = f->options->batch == NULL && find_is_per_sample(f);
        batch->rows = f->per_sample ? batch->nodes[f->first].children : find_common(f);
    }
    EACH_ARGUMENT(f, argument, index)
    {
        int holds;
        if (f->roles[argument] != OOMKIT_ROLE_BATCH) {
            continue;
        }
        if (f->options->split != NULL) {
            batch->nodes[index].split = OOMKIT_SPLIT_CALL;
            continue;
        }
        holds = find_closed(f, index, -1, &where);
        if (holds != 0) {
            return holds < 0 ? -1
                             : oomkit_find_refuse(
                                   f, where, ", which holds tensors",
                                   "only dict, list, tuple and named tuples are "
                                   "opened; give split=... or pass it whole with "
                                   "static=...");
        }
        if (find_check_dims(f, index) < 0) {
            return -1;
        }
        if (f->per_sample && index == f->first) {
            batch->nodes[index].split = OOMKIT_SPLIT_ITEMS;
        } else if (batch->rows >= 0) {
            oomkit_node_mark(batch, index, batch->rows, f->first);
        }
    }
    if (batch->rows < 0) {
        return PyErr_Occurred() ? -1 : find_report(f);
    }
    return find_check_named(f);
}

/* An argument beside the batch: joins when all its tensors have the rows in front. */
static int
find_other(const oomkit_find *f, Py_ssize_t argument, Py_ssize_t index)
{
    oomkit_batch *batch = f->batch;
    const int64_t rows = batch->rows;
    const int keyword = argument >= batch->positional;
    const oomkit_seen *seen = oomkit_site_seen(
        f->site, argument,
        keyword ? PyTuple_GET_ITEM(batch->kwnames, argument - batch->positional)
                : NULL);
    Py_ssize_t with, where;
    int holds;

    if (oomkit_node_is_plain_list(batch, index, rows)) {
        if (seen != NULL && seen->length_stays) {
            return 0;
        }
        if (seen != NULL && seen->length_moves) {
            batch->nodes[index].split = OOMKIT_SPLIT_ITEMS;
            return 0;
        }
        return oomkit_find_refuse(
            f, index, " as long as the batch, without tensors",
            "name it in batch=... when it has one element per sample, else "
            "in static=...");
    }
    holds = find_closed(f, index, rows, &where);
    if (holds != 0) {
        return holds < 0 ? -1
                         : oomkit_find_refuse(
                               f, where, ", which holds tensors as long as the batch",
                               "only dict, list, tuple and named tuples are opened; "
                               "pass one of these, or pass it whole with static=...");
    }
    with = oomkit_node_first_tensor(batch, index, rows, 1);
    if (!oomkit_node_fits(batch, index, rows)) {
        Py_ssize_t end = oomkit_node_end(batch, index), other = index;
        if (with < 0 || (seen != NULL && seen->size_stays)) {
            return 0;
        }
        while (other < end &&
               (batch->nodes[other].rows < 0 || batch->nodes[other].rows == 1 ||
                batch->nodes[other].rows == rows)) {
            other++;
        }
        return oomkit_find_disagree(f, with, other);
    }
    oomkit_node_mark(batch, index, rows, -1);
    if (seen != NULL &&
        (batch->nodes[index].split == OOMKIT_SPLIT_ITEMS ? seen->length_stays
                                                         : seen->size_stays)) {
        oomkit_node_unmark(batch, index);
    }
    return 0;
}

static int
find_run(oomkit_find *f)
{
    Py_ssize_t argument, index;
    int found;

    if (oomkit_find_check_names(f, f->options->batch, "batch") < 0 ||
        oomkit_find_check_names(f, f->options->statics, "static") < 0 ||
        oomkit_find_roles(f) < 0) {
        return -1;
    }
    if (f->first < 0) {
        found = f->options->batch == NULL ? find_first(f) : 0;
        if (found <= 0) {
            return found;
        }
    }
    if (find_batch(f) < 0) {
        return -1;
    }
    EACH_ARGUMENT(f, argument, index)
    {
        /* One row cannot be split further: nothing to decide. */
        if (f->roles[argument] == OOMKIT_ROLE_OTHER && f->batch->rows > 1 &&
            find_other(f, argument, index) < 0) {
            return -1;
        }
    }
    return 1;
}

int
oomkit_batch_find(oomkit_state *st, const oomkit_options *options,
                  const oomkit_batch_site *site, PyObject *names, oomkit_batch *batch)
{
    oomkit_find f = {st, options, site, names, batch, NULL, -1, 0};
    int found;

    if (batch->searched) {
        return batch->rows >= 0;
    }
    f.roles = PyMem_Calloc((size_t)batch->total + 1, 1);
    if (f.roles == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    found = find_run(&f);
    PyMem_Free(f.roles);
    if (found < 0) {
        Py_ssize_t i;
        batch->rows = -1;
        for (i = 0; i < batch->count; i++) {
            batch->nodes[i].split = OOMKIT_SPLIT_WHOLE;
        }
        return -1;
    }
    batch->searched = 1;
    return found;
}
