/* The results of micro-batches joined into the result of the whole batch: containers by
 * element. What is in them is joined in join_rules.c, join_numbers.c, join_tensors.c.
 */
#include "join_rules.h"
#include "result.h"
#include "../py/tensor.h"
#include "../tree/kinds.h"
#include "../tree/splitters.h"

/* A refusal under the name of a cache: None in its place, said once. NULL otherwise. */
static PyObject *
join_no_cache(const oomkit_rules *r, const oomkit_place *where)
{
    if (!oomkit_output_is_cache_name(oomkit_place_name(where)) ||
        !PyErr_ExceptionMatches(r->st->SplitError)) {
        return NULL;
    }
    PyErr_Clear(); /* a refusal of ours */
    return oomkit_place_say(r, where, "dropped: a cache cannot be joined") < 0
               ? NULL
               : Py_NewRef(Py_None);
}

/* One element further in: `column` holds a value of each micro-batch. */
static PyObject *
join_inner(const oomkit_rules *r, const oomkit_place *where, PyObject *const *column)
{
    PyObject *joined = oomkit_join_place(r, where, column); /* owned */
    if (joined != NULL || (where->key == NULL && where->name == NULL)) {
        return joined;
    }
    return join_no_cache(r, where);
}

/* The field names of a named tuple. New reference; NULL without an exception where
 * there are none. */
static PyObject *
field_names(const oomkit_rules *r, PyObject *sequence)
{
    PyObject *names; /* owned */
    if (!PyTuple_Check(sequence) || PyTuple_CheckExact(sequence)) {
        return NULL;
    }
    names = PyObject_GetAttr(sequence, r->st->str_fields);
    if (names == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear(); /* what torch.max() returns has none */
    } else if (names != NULL &&
               !(PyTuple_Check(names) &&
                 PyTuple_GET_SIZE(names) == PySequence_Fast_GET_SIZE(sequence))) {
        Py_CLEAR(names);
    }
    return names;
}

typedef struct join_parts {
    const oomkit_rules *r;
    const oomkit_place *where; /* of the containers */
    PyObject *const *values;   /* the containers, borrowed */
    oomkit_tree *trees;        /* they, opened */
    PyObject **column; /* room for the values of one part, borrowed from the trees */
    PyObject *names;   /* borrowed: of the fields of named tuples, or NULL */
} join_parts;

/* The entries of an object, or its attributes. New dictionary or NULL. */
static PyObject *
parts_dict(const oomkit_tree *tree, int attributes)
{
    OWNED PyObject *dict = PyDict_New();
    Py_ssize_t at;

    for (at = 1; dict != NULL && at < tree->count; at++) {
        const oomkit_node *node = &tree->nodes[at];
        if (attributes == ((node->flags & OOMKIT_NODE_ATTRIBUTE) != 0) &&
            PyDict_SetItem(dict, node->key, node->object) < 0) {
            return NULL;
        }
    }
    return STEAL(dict);
}

/* -1 always: SplitError, those of micro-batch i are not those of the first. */
static int
parts_differ(const join_parts *p, Py_ssize_t i, int attributes)
{
    OWNED PyObject *first = NULL, *other = NULL;

    if (p->trees[0].nodes->kind != OOMKIT_NODE_OBJECT) {
        oomkit_place_differs(p->r, p->where, p->values[0], p->values[i]);
        return -1;
    }
    first = parts_dict(&p->trees[0], attributes);
    other = first == NULL ? NULL : parts_dict(&p->trees[i], attributes);
    if (other != NULL) {
        oomkit_place_differs(p->r, p->where, first, other);
    }
    return -1;
}

/* Have all as many parts as the first? 0, or -1 with SplitError. */
static int
parts_check(const join_parts *p)
{
    const oomkit_node *first = p->trees[0].nodes;
    Py_ssize_t i;

    for (i = 1; i < p->r->count; i++) {
        const oomkit_node *other = p->trees[i].nodes;
        int entries = first->entries == other->entries;
        if (entries && first->children == other->children) {
            continue;
        }
        if (first->kind == OOMKIT_NODE_DICT || first->kind == OOMKIT_NODE_OBJECT) {
            return parts_differ(p, i, entries);
        }
        oomkit_place_refuse(
            p->r, p->where,
            PyUnicode_FromFormat("has %zd elements for %lld rows and %zd for %lld",
                                 first->children, (long long)p->r->rows[0],
                                 other->children, (long long)p->r->rows[i]));
        return -1;
    }
    return 0;
}

/* The part of another micro-batch that is what node `at` of the first one is, whatever
 * the order there. Borrowed; NULL where there is none (check for an exception). */
static PyObject *
part_like(const oomkit_tree *tree, const oomkit_node *like, Py_ssize_t at)
{
    Py_hash_t hash;
    Py_ssize_t i;

    if (like->key == NULL || tree->nodes[at].key == like->key) {
        return tree->nodes[at].object;
    }
    if (PyDict_Check(tree->nodes->object) &&
        (like->flags & OOMKIT_NODE_ATTRIBUTE) == 0) {
        return PyDict_GetItemWithError(tree->nodes->object, like->key);
    }
    hash = PyObject_Hash(like->key);
    for (i = 1; hash != -1 && i < tree->count; i++) {
        const oomkit_node *node = &tree->nodes[i];
        int same = 0;
        if (((node->flags ^ like->flags) & OOMKIT_NODE_ATTRIBUTE) == 0) {
            Py_hash_t other = PyObject_Hash(node->key);
            same = other == hash ? PyObject_RichCompareBool(node->key, like->key, Py_EQ)
                                 : (other == -1 ? -1 : 0);
        }
        if (same != 0) {
            return same < 0 ? NULL : node->object;
        }
    }
    return NULL;
}

/* The maker of one part of the joined container. */
static PyObject *
join_part(void *context, Py_ssize_t at, Py_ssize_t number)
{
    const join_parts *p = context;
    const oomkit_rules *r = p->r;
    const oomkit_node *node = &p->trees[0].nodes[at];
    oomkit_place inner = oomkit_place_inner(p->where, p->trees, at, number);
    Py_ssize_t i;

    for (i = 0; i < r->count; i++) {
        p->column[i] = part_like(&p->trees[i], node, at);
        if (p->column[i] == NULL) {
            if (!PyErr_Occurred()) {
                parts_differ(p, i, inner.name != NULL);
            }
            return NULL;
        }
    }
    if (p->names != NULL) {
        inner.name = PyTuple_GET_ITEM(p->names, number);
    }
    if (p->where->outer == NULL) {
        inner.is_loss =
            node->key != NULL
                ? PyObject_RichCompareBool(node->key, r->st->str_loss, Py_EQ)
                : oomkit_loss_is_at(r->st, p->values[0], number, r->loss_at);
    }
    return inner.is_loss < 0 ? NULL : join_inner(r, &inner, p->column);
}

/* Containers of one type by what is in them; other values must be the same or equal. */
static PyObject *
join_containers(const oomkit_rules *r, const oomkit_place *where,
                PyObject *const *values)
{
    OWNED_MEMORY oomkit_tree *trees = PyMem_New(oomkit_tree, (size_t)r->count);
    OWNED_MEMORY PyObject **column = PyMem_New(PyObject *, (size_t)r->count);
    OWNED PyObject *names = NULL;
    join_parts p = {r, where, values, trees, column, NULL};
    PyObject *joined = NULL; /* owned */
    Py_ssize_t opened = 0;

    if (trees == NULL || column == NULL) {
        return PyErr_NoMemory();
    }
    while (opened < r->count &&
           oomkit_tree_open(r->st, &trees[opened], values[opened]) == 0) {
        opened++;
    }
    if (opened == r->count && !oomkit_node_is_open(trees[0].nodes)) {
        joined = oomkit_join_equal(r, where, values);
    } else if (opened == r->count && parts_check(&p) == 0) {
        p.names = names = field_names(r, values[0]);
        if (names != NULL || !PyErr_Occurred()) {
            joined = oomkit_tree_build(r->st, trees, 0, join_part, &p);
        }
    }
    while (opened > 0) {
        oomkit_tree_clear(&trees[--opened]);
    }
    return joined;
}

/* The elements of micro-batch i, tensors that required grad as ones that refuse it. New
 * list or NULL. */
static PyObject *
rows_alone(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values,
           Py_ssize_t i)
{
    oomkit_rules alone = *r;

    alone.count = 1;
    alone.rows = r->rows + i;
    alone.weights = r->weights + i;
    alone.first = r->first + i;
    alone.group_weights = NULL; /* those are of the result itself */
    return join_containers(&alone, where, values + i);
}

/* Lists with an element for each row are put after one another. */
static PyObject *
join_lists(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values)
{
    int rows = r->count == 1 ? 0 : oomkit_lists_are_rows(r, where, values);
    OWNED PyObject *joined = NULL;
    Py_ssize_t i;

    if (rows <= 0) {
        return rows < 0 ? NULL : join_containers(r, where, values);
    }
    joined = PyList_New(0);
    for (i = 0; joined != NULL && i < r->count; i++) {
        Py_ssize_t end = PyList_GET_SIZE(joined);
        OWNED PyObject *items = rows_alone(r, where, values, i);
        if (items == NULL || PyList_SetSlice(joined, end, end, items) < 0) {
            return NULL;
        }
    }
    return STEAL(joined);
}

static int
all_numbers(const oomkit_rules *r, PyObject *const *values)
{
    Py_ssize_t i;
    for (i = 0; i < r->count; i++) {
        if (!PyLong_CheckExact(values[i]) &&
            (!PyFloat_Check(values[i]) || oomkit_is_numpy_number(values[i]))) {
            return 0;
        }
    }
    return 1;
}

PyObject *
oomkit_join_place(const oomkit_rules *r, const oomkit_place *where,
                  PyObject *const *values)
{
    PyObject *first = values[0]; /* borrowed from the results */
    int tensor = oomkit_tensor_check(r->st, first);
    Py_ssize_t i;
    PyObject *joined; /* owned */

    if (!tensor && all_numbers(r, values)) {
        for (i = 0; i < r->count && PyLong_CheckExact(values[i]); i++) {
        }
        if (r->count == 1) {
            return Py_NewRef(first); /* of one row: nothing is chosen */
        }
        return i == r->count ? oomkit_join_integers(r, where, values)
                             : oomkit_join_floats(r, where, values);
    }
    for (i = 1; i < r->count; i++) {
        if (tensor ? !oomkit_tensor_check(r->st, values[i])
                   : !Py_IS_TYPE(values[i], Py_TYPE(first))) {
            return oomkit_place_differs(r, where, first, values[i]);
        }
    }
    if (r->count > 1 && oomkit_splitter_joins(r->st, first)) {
        return oomkit_join_custom(r, where, values);
    }
    if (tensor) {
        return oomkit_join_tensors(r, where, values);
    }
    if (oomkit_is_numpy_array(first) || oomkit_is_numpy_number(first)) {
        return oomkit_join_numpy(r, where, values);
    }
    if (oomkit_is_shape(first)) {
        return r->count == 1 ? Py_NewRef(first) : oomkit_join_shapes(r, where, values);
    }
    if (Py_EnterRecursiveCall(" while joining results")) {
        return NULL;
    }
    joined = PyList_CheckExact(first) ? join_lists(r, where, values)
                                      : join_containers(r, where, values);
    Py_LeaveRecursiveCall();
    return joined;
}

/* Reads rows and weights out of the lists. */
static int
rules_fill(oomkit_rules *r, const oomkit_join *join)
{
    Py_ssize_t i;
    for (i = 0; i < r->count; i++) {
        r->rows[i] = PyLong_AsLongLong(PyList_GET_ITEM(join->rows, i));
        r->weights[i] = PyFloat_AsDouble(PyList_GET_ITEM(join->weights, i));
        r->total += r->rows[i];
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Is the result a tuple or list of so many elements? */
static int
is_sequence_of(const oomkit_join *join, Py_ssize_t count)
{
    PyObject *first = PyList_GET_ITEM(join->results, 0); /* borrowed from join */
    return (PyTuple_Check(first) || PyList_CheckExact(first)) &&
           PySequence_Fast_GET_SIZE(first) == count;
}

/* The loss of each result. 0 or -1. */
static int
rules_losses(oomkit_rules *r, const oomkit_join *join)
{
    Py_ssize_t i;
    for (i = 0; i < r->count; i++) {
        r->losses[i] = oomkit_result_loss_at(r->st, PyList_GET_ITEM(join->results, i),
                                             join->loss_at);
        if (r->losses[i] == NULL && PyErr_Occurred()) {
            return -1;
        }
    }
    return 0;
}

static void
rules_free(oomkit_rules *r)
{
    Py_ssize_t i;
    for (i = 0; r->losses != NULL && i < r->count; i++) {
        Py_XDECREF(r->losses[i]);
    }
    PyMem_Free(r->losses);
    PyMem_Free(r->rows);
    PyMem_Free(r->weights);
}

PyObject *
oomkit_join_finish(oomkit_state *st, const oomkit_options *options, oomkit_join *join)
{
    OWNED PyObject *refusal = NULL, *loss = NULL; /* by way of r */
    oomkit_rules r = {.st = st,
                      .options = options,
                      .site = join->site,
                      .marks = join->marks,
                      .sources = join->sources,
                      .refusal = &refusal,
                      .rows_sure = join->rows_sure,
                      .evaluation = join->evaluation,
                      .parked = join->parked,
                      .updated = join->updated,
                      .one_loss = join->one_loss,
                      .proving = join->proving,
                      .loss_at = join->loss_at,
                      .whole_loss = &loss};
    oomkit_place where = {.is_loss = 1};
    PyObject *joined = NULL; /* owned */

    r.count = join->results == NULL ? 0 : PyList_GET_SIZE(join->results);
    r.batches = r.count;
    if (r.count == 0) {
        return Py_NewRef(Py_None);
    }
    if (r.count == 1) {
        return Py_NewRef(PyList_GET_ITEM(join->results, 0));
    }
    if (options->join != NULL) {
        PyObject *stack[2] = {join->results, join->rows}; /* borrowed from join */
        return PyObject_Vectorcall(options->join, stack, 2, NULL);
    }
    r.is_sum = join->is_sum || options->reduction == OOMKIT_REDUCTION_SUM;
    r.found = join->found;
    if (join->groups > 0 && is_sequence_of(join, join->groups)) {
        r.group_weights = join->group_weights;
        r.groups = join->groups;
    }
    r.rows = PyMem_New(int64_t, (size_t)r.count);
    r.weights = PyMem_New(double, (size_t)r.count);
    r.losses = PyMem_Calloc((size_t)r.count, sizeof(*r.losses));
    if (r.rows == NULL || r.weights == NULL || r.losses == NULL) {
        PyErr_NoMemory();
    } else if (rules_fill(&r, join) == 0 && rules_losses(&r, join) == 0) {
        joined = oomkit_join_place(&r, &where, PySequence_Fast_ITEMS(join->results));
    }
    rules_free(&r);
    return joined;
}
