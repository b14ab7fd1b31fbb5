/* Which arguments are the batch, how many rows it has, which leaves are sliced. Runs
 * once in a call that is split or repeated, never in a healthy one. */
#include "layout.h"
#include "../py/tensor.h"

#define TRIES 64 /* different sizes that are tried as the number of rows */

int
oomkit_find_closed(const oomkit_find *f, Py_ssize_t argument, Py_ssize_t index,
                   int64_t rows, Py_ssize_t *where)
{
    const oomkit_batch *batch = f->batch;
    Py_ssize_t end = oomkit_node_end(batch, index);
    int64_t dim = oomkit_argument_dim(f->options, batch, argument);

    if (dim == INT64_MIN) {
        return -1;
    }
    while (index < end) {
        const oomkit_node *node = &batch->nodes[index];
        int holds;
        if (node->split == OOMKIT_SPLIT_ITEMS ||
            (node->flags & (OOMKIT_NODE_CUSTOM | OOMKIT_NODE_STATIC)) != 0) {
            index = oomkit_node_end(batch, index); /* need not be opened */
            continue;
        }
        holds = node->kind == OOMKIT_NODE_OTHER
                    ? oomkit_object_holds_tensor(f->st, node->object, dim, rows, 0)
                    : 0;
        if (holds != 0) {
            *where = index;
            return holds;
        }
        index++;
    }
    return 0;
}

/* A nested tensor, which has no sizes that can be asked for? 1, 0 or -1. */
static int
find_nested(const oomkit_find *f, Py_ssize_t index)
{
    Py_ssize_t end = oomkit_node_end(f->batch, index);

    for (; index < end; index++) {
        const oomkit_node *node = &f->batch->nodes[index];
        if (node->kind == OOMKIT_NODE_TENSOR && node->rows < 0 &&
            (node->flags & OOMKIT_NODE_STATIC) == 0) {
            int dimensions = oomkit_find_dimensions(f, index);
            if (dimensions < 0) {
                return dimensions == -1 ? 1 : -1;
            }
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

    EACH_ARGUMENT (f, argument, index) {
        if (f->roles[argument] != OOMKIT_ROLE_OTHER) {
            continue;
        }
        holds = oomkit_node_first_tensor(f->batch, index, -1, 0) >= 0 ||
                        (f->batch->nodes[index].flags & OOMKIT_NODE_CUSTOM) != 0
                    ? 1
                    : oomkit_find_closed(f, argument, index, -1, &where);
        holds = holds != 0 ? holds : find_nested(f, index);
        if (holds != 0) {
            f->roles[argument] = OOMKIT_ROLE_BATCH;
            f->first = index;
            return holds;
        }
    }
    return 0;
}

/* What registered splitters say about rows. 0 or -1. */
static int
find_custom_rows(const oomkit_find *f)
{
    Py_ssize_t i;

    for (i = 0; i < f->batch->count; i++) {
        oomkit_node *node = &f->batch->nodes[i];
        OWNED PyObject *value = NULL;
        int known;
        if ((node->flags & OOMKIT_NODE_CUSTOM) == 0 ||
            (node->flags & OOMKIT_NODE_STATIC) != 0) {
            continue;
        }
        value = oomkit_node_whole(f->st, f->batch, i);
        known = value == NULL ? -1 : oomkit_splitter_rows(f->st, value, &node->rows);
        if (known < 0) {
            return -1;
        }
        if (known > 0) {
            return oomkit_find_refuse(f, i, " without a len()",
                                      "give size=... to register_splitter()");
        }
        i = oomkit_node_end(f->batch, i) - 1;
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

    EACH_ARGUMENT (f, argument, index) {
        if (f->roles[argument] == OOMKIT_ROLE_BATCH &&
            !oomkit_node_fits(f->batch, index, rows)) {
            *where = index;
            return 0;
        }
    }
    return 1;
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
    EACH_ARGUMENT (f, argument, index) {
        if (index != f->first && f->roles[argument] != OOMKIT_ROLE_STATIC &&
            batch->nodes[index].children == length &&
            oomkit_node_holds_samples(batch, index) &&
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

    EACH_ARGUMENT (f, argument, index) {
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
    EACH_ARGUMENT (f, argument, index) {
        Py_ssize_t end = oomkit_node_end(batch, index);
        for (i = index; f->roles[argument] == OOMKIT_ROLE_BATCH && i < end; i++) {
            int one_row;
            if (!oomkit_node_is_ragged(batch, i) ||
                !find_all_fit(f, batch->nodes[i].children, &where)) {
                continue;
            }
            one_row = oomkit_find_one_row(f, i);
            if (one_row <= 0) {
                return one_row < 0 ? -1 : batch->nodes[i].children;
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
    const oomkit_batch *batch = f->batch;
    Py_ssize_t end = oomkit_node_end(batch, index);

    while (index < end) {
        const oomkit_node *node = &batch->nodes[index];
        int dimensions;
        if (node->split == OOMKIT_SPLIT_ITEMS ||
            (node->flags & (OOMKIT_NODE_CUSTOM | OOMKIT_NODE_STATIC)) != 0) {
            index = oomkit_node_end(batch, index);
            continue;
        }
        if (node->rows < 0 &&
            (node->kind == OOMKIT_NODE_TENSOR || node->kind == OOMKIT_NODE_ARRAY)) {
            dimensions = oomkit_find_dimensions(f, index);
            if (dimensions == -1) {
                return oomkit_find_refuse(
                    f, index, ", which is nested",
                    "give split=... or pass it whole with static=...");
            }
            if (dimensions != 0) {
                return dimensions < 0 ? -1 : oomkit_find_disagree(f, -1, index);
            }
        }
        index++;
    }
    return 0;
}

/* Of torch.sparse_coo, which narrow_copy() slices? 1, 0 or -1. */
static int
leaf_is_coo(PyObject *tensor)
{
    OWNED PyObject *sparse = PyObject_GetAttrString(tensor, "is_sparse");

    return sparse == NULL ? -1 : PyObject_IsTrue(sparse);
}

/* Leaves that are to be sliced and have no slices: CSR and its like. 0 or -1. */
static int
find_check_layouts(const oomkit_find *f)
{
    Py_ssize_t i;

    for (i = 0; i < f->batch->count; i++) {
        const oomkit_node *node = &f->batch->nodes[i];
        oomkit_tensor_facts facts;
        int sliced;
        if (node->kind != OOMKIT_NODE_TENSOR || node->split != OOMKIT_SPLIT_NARROW) {
            continue;
        }
        if (oomkit_tensor_facts_get(f->st, node->object, 0, &facts) < 0) {
            return -1;
        }
        sliced = facts.is_strided ? 1 : leaf_is_coo(node->object);
        if (sliced <= 0) {
            return sliced < 0 ? -1
                              : oomkit_find_refuse(
                                    f, i, ", whose layout has no slices",
                                    "make it dense or torch.sparse_coo, give split=... "
                                    "or pass it whole with static=...");
        }
    }
    return 0;
}

/* -1 always: says why the batch arguments have no common number of rows. */
static int
find_report(const oomkit_find *f)
{
    const oomkit_batch *batch = f->batch;
    Py_ssize_t argument, index, one = -1, other;

    EACH_ARGUMENT (f, argument, index) {
        if (f->roles[argument] == OOMKIT_ROLE_BATCH && one < 0) {
            one = oomkit_node_first_tensor(batch, index, 1, 0);
        }
    }
    EACH_ARGUMENT (f, argument, index) {
        Py_ssize_t end = oomkit_node_end(batch, index);
        for (other = index; f->roles[argument] == OOMKIT_ROLE_BATCH && other < end;
             other++) {
            int64_t rows = batch->nodes[other].rows;
            if (one >= 0 && rows >= 0 && rows != 1 && rows != batch->nodes[one].rows) {
                return oomkit_find_disagree(f, one, other);
            }
        }
    }
    if (one < 0) {
        return oomkit_find_refuse(f, f->first, " without a tensor that has rows",
                                  "name another argument with batch=...");
    }
    f->batch->empty = 1;
    return oomkit_find_refuse(f, one, ", which has no rows",
                              "pass a batch that is not empty");
}

/* The arguments of batch= that are neither split nor hold a tensor are a mistake. */
static int
find_check_named(const oomkit_find *f)
{
    Py_ssize_t argument, index;

    EACH_ARGUMENT (f, argument, index) {
        if (f->roles[argument] == OOMKIT_ROLE_BATCH &&
            !oomkit_node_is_split(f->batch, index) &&
            !oomkit_node_holds_tensor(f->batch, index)) {
            return oomkit_find_refuse(f, index, " without a tensor that has rows",
                                      "name another argument with batch=...");
        }
    }
    return 0;
}

/* -1 always: the node holds tensors and was not opened. */
static int
find_refuse_closed(const oomkit_find *f, Py_ssize_t index)
{
    PyObject *object = f->batch->nodes[index].object; /* borrowed from the node */

    if (PyDict_CheckExact(object) || PyList_CheckExact(object) ||
        PyTuple_CheckExact(object)) {
        return oomkit_find_refuse(f, index, " too long or too deep to be opened",
                                  "give split=... or pass it whole with static=...");
    }
    return oomkit_find_refuse(f, index, ", which holds tensors",
                              "tell how with oomkit.register_splitter(type, split=...) "
                              "or split=..., or pass it whole with static=...");
}

/* batch->rows and the marks of the batch arguments. 0 or -1. */
static int
find_batch(oomkit_find *f)
{
    oomkit_batch *batch = f->batch;
    Py_ssize_t argument, index, where;

    if (f->options->split != NULL) {
        batch->rows = oomkit_find_called_rows(f);
    } else {
        f->per_sample = f->options->batch == NULL && find_is_per_sample(f);
        batch->rows = f->per_sample ? batch->nodes[f->first].children : find_common(f);
        if (batch->rows < 0 && PyErr_Occurred()) {
            return -1;
        }
    }
    EACH_ARGUMENT (f, argument, index) {
        int holds;
        if (f->roles[argument] != OOMKIT_ROLE_BATCH) {
            continue;
        }
        if (f->options->split != NULL) {
            batch->nodes[index].split = OOMKIT_SPLIT_CALL;
            continue;
        }
        if (f->per_sample && index == f->first) {
            batch->nodes[index].split = OOMKIT_SPLIT_ITEMS;
        } else if (batch->rows >= 0) {
            oomkit_node_mark(batch, index, batch->rows, f->first);
        }
        holds = oomkit_find_closed(f, argument, index, -1, &where);
        if (holds != 0) {
            return holds < 0 ? -1 : find_refuse_closed(f, where);
        }
        if (find_check_dims(f, index) < 0) {
            return -1;
        }
    }
    if (batch->rows < 0) {
        return PyErr_Occurred() ? -1 : find_report(f);
    }
    return find_check_named(f);
}

static int
find_run(oomkit_find *f)
{
    Py_ssize_t argument, index;
    int found;

    if (oomkit_find_check_names(f, f->options->batch, "batch") < 0 ||
        oomkit_find_check_names(f, f->options->statics, "static") < 0 ||
        oomkit_find_check_dims(f) < 0 || oomkit_find_roles(f) < 0 ||
        oomkit_find_hide(f) < 0 ||
        (f->options->split == NULL && find_custom_rows(f) < 0)) {
        return -1;
    }
    f->named = f->first >= 0;
    if (f->first < 0) {
        found = f->options->batch == NULL ? find_first(f) : 0;
        if (found <= 0) {
            return found;
        }
    }
    if (find_batch(f) < 0) {
        return -1;
    }
    EACH_ARGUMENT (f, argument, index) {
        if (f->roles[argument] != OOMKIT_ROLE_OTHER) {
            continue;
        }
        if (f->batch->rows == 1) {
            oomkit_find_beside_one_row(f, argument, index);
        } else if (f->batch->rows > 1 && oomkit_find_beside(f, argument, index) < 0) {
            return -1;
        }
    }
    if (f->batch->rows > 1 &&
        ((f->options->split == NULL && oomkit_find_columns(f) < 0) ||
         find_check_layouts(f) < 0 || oomkit_find_ambiguity(f) < 0)) {
        return -1;
    }
    return oomkit_node_aliases(f->options, f->batch) < 0 ? -1 : 1;
}

int
oomkit_batch_find(oomkit_state *st, const oomkit_options *options,
                  const oomkit_batch_site *site, PyObject *names, oomkit_batch *batch)
{
    oomkit_find f = {.st = st,
                     .options = options,
                     .site = site,
                     .names = names,
                     .batch = batch,
                     .first = -1};
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
