/* Results of micro-batches, kept until they are joined: without their graphs, and with
 * a mark of each tensor: did it require grad, and which version was it. */
#include "join_rules.h"
#include "result.h"
#include "../py/tensor.h"
#include "../tree/kinds.h"

#define DEPTH_LIMIT 32 /* deeper containers are kept as they are */

typedef struct keeper {
    oomkit_state *st;
    const oomkit_options *options;
    oomkit_result_site *site; /* borrowed, or NULL */
    int *required;            /* set once a tensor requires grad */
    PyObject *convert;        /* borrowed: callable, or NULL */
    PyObject *loss;           /* borrowed: what stands where a loss stands, or NULL */
    PyObject **kept_loss;     /* owned by oomkit_join_add: the same without its graph */
    PyObject *marks; /* borrowed, or NULL: dict: address of a kept tensor -> int: twice
                        its version, plus 1 when it required grad; or the leaf
                        that it was detached from */
} keeper;

static PyObject *
keep_value(const keeper *k, const oomkit_place *where, PyObject *value, int depth);

/* Borrowed from the marks; NULL without an exception when there is none. */
static PyObject *
mark_get(PyObject *marks, PyObject *tensor)
{
    OWNED PyObject *address = PyLong_FromVoidPtr(tensor);
    return address == NULL ? NULL : PyDict_GetItemWithError(marks, address);
}

int
oomkit_kept_get(PyObject *marks, Py_ssize_t number, PyObject *tensor, oomkit_kept *kept)
{
    PyObject *mark; /* borrowed from marks */
    unsigned long long packed;

    *kept = (oomkit_kept){0};
    if (marks == NULL || number >= PyList_GET_SIZE(marks)) {
        return 0;
    }
    mark = mark_get(PyList_GET_ITEM(marks, number), tensor);
    if (mark == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    if (!PyLong_Check(mark)) {
        kept->leaf = mark;
        kept->required = 1;
        return 1;
    }
    packed = PyLong_AsUnsignedLongLong(mark);
    kept->required = (int)(packed & 1);
    kept->version = (uint32_t)(packed >> 1);
    return 1;
}

/* Steals `kept` and gives it back, or NULL. `leaf` is NULL or the leaf that it was. */
static PyObject *
mark_tensor(const keeper *k, PyObject *kept, int required, PyObject *leaf)
{
    OWNED PyObject *address = NULL, *mark = NULL;
    uint32_t version = 0;

    if (kept == NULL) {
        return NULL;
    }
    address = PyLong_FromVoidPtr(kept);
    if (address != NULL && leaf != NULL) {
        mark = Py_NewRef(leaf);
    } else if (address != NULL && oomkit_tensor_version(k->st, kept, &version) == 0) {
        mark = PyLong_FromUnsignedLongLong((unsigned long long)version * 2 +
                                           (unsigned)required);
    }
    if (mark == NULL || PyDict_SetItem(k->marks, address, mark) < 0) {
        Py_CLEAR(kept);
    }
    return kept;
}

static int
attribute_is_true(PyObject *object, PyObject *name)
{
    OWNED PyObject *flag = PyObject_GetAttr(object, name);
    return flag == NULL ? -1 : PyObject_IsTrue(flag);
}

/* What the caller wants kept in place of a tensor. Steals `kept`, which may be NULL. */
static PyObject *
keep_as(const keeper *k, PyObject *kept, int required)
{
    PyObject *as; /* owned */

    if (kept == NULL) {
        return NULL;
    }
    as = PyObject_CallOneArg(k->convert, kept);
    Py_DECREF(kept);
    return as == NULL || k->marks == NULL || !oomkit_tensor_check(k->st, as)
               ? as
               : mark_tensor(k, as, required, NULL);
}

/* A view without the graph; the tensor itself where there is no graph. Allocates no
 * tensor memory: this runs between micro-batches, where there may be none. */
static PyObject *
keep_tensor(const keeper *k, PyObject *tensor)
{
    int required = attribute_is_true(tensor, k->st->str_requires_grad), leaf = 0;
    PyObject *kept; /* owned */

    if (required > 0) {
        leaf = attribute_is_true(tensor, k->st->str_is_leaf);
    }
    if (required < 0 || leaf < 0) {
        return NULL;
    }
    if (!required) {
        return k->convert == NULL ? mark_tensor(k, Py_NewRef(tensor), 0, NULL)
                                  : keep_as(k, Py_NewRef(tensor), 0);
    }
    *k->required = 1;
    if (tensor == k->loss && *k->kept_loss != NULL) {
        return Py_NewRef(*k->kept_loss); /* under another name: one tensor stays one */
    }
    kept = PyObject_CallMethodNoArgs(tensor, k->st->str_detach);
    kept = k->convert == NULL ? mark_tensor(k, kept, 1, leaf ? tensor : NULL)
                              : keep_as(k, kept, 1);
    if (tensor == k->loss) {
        *k->kept_loss = Py_XNewRef(kept);
    }
    return kept;
}

/* A cache in place of which None is returned. */
static PyObject *
keep_no_cache(const keeper *k, const oomkit_place *where)
{
    oomkit_rules r = {.st = k->st, .options = k->options, .site = k->site};
    return oomkit_place_say(&r, where, "dropped: a cache cannot be joined") < 0
               ? NULL
               : Py_NewRef(Py_None);
}

typedef struct keep_parts {
    const keeper *k;
    const oomkit_place *where; /* of the container */
    const oomkit_tree *tree;   /* the container, opened */
    int depth;
} keep_parts;

/* The maker of one part of a container. */
static PyObject *
keep_part(void *context, Py_ssize_t at, Py_ssize_t number)
{
    const keep_parts *p = context;
    oomkit_place where = oomkit_place_inner(p->where, p->tree, at, number);

    return keep_value(p->k, &where, p->tree->nodes[at].object, p->depth + 1);
}

/* Containers are made anew even where nothing in them has a graph: a step that returns
 * the same dictionary every time would otherwise overwrite what is kept. */
static PyObject *
keep_value(const keeper *k, const oomkit_place *where, PyObject *value, int depth)
{
    oomkit_tree tree;
    keep_parts parts = {k, where, &tree, depth};
    PyObject *kept; /* owned */

    if (oomkit_tensor_check(k->st, value)) {
        return keep_tensor(k, value);
    }
    if (depth >= DEPTH_LIMIT || oomkit_value_is_plain(value)) {
        return Py_NewRef(value);
    }
    if (oomkit_output_is_cache(k->st, oomkit_place_name(where), value) &&
        k->options->join == NULL) {
        return keep_no_cache(k, where);
    }
    if (oomkit_tree_open(k->st, &tree, value) < 0) {
        return NULL;
    }
    if (oomkit_node_is_open(tree.nodes)) {
        kept = oomkit_tree_build(k->st, &tree, 0, keep_part, &parts);
    } else if (oomkit_is_numpy_array(value)) {
        /* An array has no version: writing over it would not be seen. */
        kept = PyObject_CallMethod(value, "copy", NULL);
    } else {
        kept = Py_NewRef(value);
    }
    oomkit_tree_clear(&tree);
    return kept;
}

/* Appends and drops the reference. 0 or -1; `item` may be NULL with an exception. */
static int
append_stolen(PyObject *list, PyObject *item)
{
    int result = item == NULL ? -1 : PyList_Append(list, item);
    Py_XDECREF(item);
    return result;
}

static int
join_begin(oomkit_join *join)
{
    join->results = PyList_New(0);
    join->rows = PyList_New(0);
    join->weights = PyList_New(0);
    join->marks = PyList_New(0);
    if (join->results == NULL || join->rows == NULL || join->weights == NULL ||
        join->marks == NULL) {
        oomkit_join_clear(join);
        return -1;
    }
    return 0;
}

int
oomkit_join_add(oomkit_state *st, const oomkit_options *options, oomkit_join *join,
                PyObject *result, int64_t rows, double weight)
{
    OWNED PyObject *marks = NULL, *loss = NULL, *kept_loss = NULL;
    keeper k = {.st = st,
                .options = options,
                .site = join->site,
                .required = &join->required,
                .convert = join->convert,
                .kept_loss = &kept_loss};
    oomkit_place where = {.is_loss = 1};
    Py_ssize_t before;

    if (join->results == NULL && join_begin(join) < 0) {
        return -1;
    }
    before = PyList_GET_SIZE(join->results);
    if (before == 0) {
        join->loss_at = oomkit_loss_place(st, result);
    }
    loss = join->loss_at < 0 ? NULL : oomkit_result_loss_at(st, result, join->loss_at);
    if (loss == NULL && PyErr_Occurred()) {
        return -1;
    }
    k.loss = loss;
    k.marks = marks = PyDict_New();
    if (marks != NULL && PyList_Append(join->marks, marks) == 0 &&
        append_stolen(join->results, keep_value(&k, &where, result, 0)) == 0 &&
        append_stolen(join->rows, PyLong_FromLongLong(rows)) == 0 &&
        append_stolen(join->weights, PyFloat_FromDouble(weight)) == 0) {
        return 0;
    }
    Py_CLEAR(marks);
    KEEPING_EXCEPTION {
        Py_CLEAR(loss);
        Py_CLEAR(kept_loss);
        oomkit_join_truncate(join, before); /* the first error tells more */
    }
    return -1;
}

PyObject *
oomkit_keep_converted(oomkit_state *st, const oomkit_options *options, PyObject *result,
                      PyObject *convert)
{
    PyObject *kept_loss = NULL; /* stays NULL: there is no loss here */
    int required = 0;
    keeper k = {.st = st,
                .options = options,
                .required = &required,
                .convert = convert,
                .kept_loss = &kept_loss};
    oomkit_place where = {.is_loss = 0};

    return keep_value(&k, &where, result, 0);
}

static int
truncate_list(PyObject *list, Py_ssize_t keep)
{
    if (list == NULL || PyList_GET_SIZE(list) <= keep) {
        return 0;
    }
    return PyList_SetSlice(list, keep, PyList_GET_SIZE(list), NULL);
}

int
oomkit_join_truncate(oomkit_join *join, Py_ssize_t keep)
{
    int results = truncate_list(join->results, keep);
    int rows = truncate_list(join->rows, keep);
    int weights = truncate_list(join->weights, keep);
    int marks = truncate_list(join->marks, keep);
    return results < 0 || rows < 0 || weights < 0 || marks < 0 ? -1 : 0;
}

void
oomkit_join_clear(oomkit_join *join)
{
    Py_CLEAR(join->results);
    Py_CLEAR(join->rows);
    Py_CLEAR(join->weights);
    Py_CLEAR(join->marks);
    Py_CLEAR(join->sources);
    oomkit_memo_drop(&join->updated);
}
