/* The results of micro-batches: kept without their graphs, then joined into the result
 * of the whole batch. */
#include "join_rules.h"
#include "tensor.h"
#include "tree.h"

#define DEPTH_LIMIT 32 /* deeper containers are kept as they are */

/* --- keeping --- */

static PyObject *
keep_value(oomkit_state *st, PyObject *value, int depth);

static int
is_named_or_plain_tuple(const oomkit_state *st, PyObject *value)
{
    return PyTuple_CheckExact(value) ||
           (PyTuple_Check(value) && oomkit_type_is_named_tuple(st, Py_TYPE(value)));
}

/* A view without the graph; the tensor itself where there is no graph. Allocates no
 * tensor memory: this runs between micro-batches, where there may be none. */
static PyObject *
keep_tensor(oomkit_state *st, PyObject *tensor)
{
    PyObject *flag; /* owned */
    int requires_grad;

    flag = PyObject_GetAttr(tensor, st->str_requires_grad);
    if (flag == NULL) {
        return NULL;
    }
    requires_grad = PyObject_IsTrue(flag);
    Py_DECREF(flag);
    if (requires_grad <= 0) {
        return requires_grad < 0 ? NULL : Py_NewRef(tensor);
    }
    return PyObject_CallMethodNoArgs(tensor, st->str_detach);
}

static PyObject *
keep_dict(oomkit_state *st, PyObject *dict, int depth)
{
    PyObject *kept = PyDict_New(); /* owned */
    PyObject *key, *value;         /* borrowed from dict */
    Py_ssize_t position = 0;

    while (kept != NULL && PyDict_Next(dict, &position, &key, &value)) {
        PyObject *name = Py_NewRef(key);                   /* owned */
        PyObject *item = keep_value(st, value, depth + 1); /* owned */
        if (item == NULL || PyDict_SetItem(kept, name, item) < 0) {
            Py_CLEAR(kept);
        }
        Py_DECREF(name);
        Py_XDECREF(item);
    }
    return kept;
}

/* A list of the kept elements of a list or tuple. */
static PyObject *
keep_items(oomkit_state *st, PyObject *sequence, int depth)
{
    PyObject *kept = PyList_New(0); /* owned */
    int is_list = PyList_Check(sequence);
    Py_ssize_t i;

    for (i = 0; kept != NULL && i < PySequence_Fast_GET_SIZE(sequence); i++) {
        PyObject *each = is_list ? PyList_GET_ITEM(sequence, i)
                                 : PyTuple_GET_ITEM(sequence, i); /* borrowed */
        PyObject *item = keep_value(st, each, depth + 1);         /* owned */
        if (item == NULL || PyList_Append(kept, item) < 0) {
            Py_CLEAR(kept);
        }
        Py_XDECREF(item);
    }
    return kept;
}

/* Containers are made anew even where nothing in them has a graph: a step that returns
 * the same dictionary every time would otherwise overwrite what is kept. */
static PyObject *
keep_value(oomkit_state *st, PyObject *value, int depth)
{
    PyObject *list; /* owned */

    if (oomkit_tensor_check(st, value)) {
        return keep_tensor(st, value);
    }
    if (depth >= DEPTH_LIMIT) {
        return Py_NewRef(value);
    }
    if (PyDict_CheckExact(value)) {
        return keep_dict(st, value, depth);
    }
    if (PyList_CheckExact(value)) {
        return keep_items(st, value, depth);
    }
    if (is_named_or_plain_tuple(st, value)) {
        list = keep_items(st, value, depth);
        return list == NULL ? NULL : oomkit_tuple_like(value, list);
    }
    return Py_NewRef(value);
}

/* Appends and drops the reference. 0 or -1; `item` may be NULL with an exception. */
static int
append_stolen(PyObject *list, PyObject *item)
{
    int result = item == NULL ? -1 : PyList_Append(list, item);
    Py_XDECREF(item);
    return result;
}

int
oomkit_join_add(oomkit_state *st, oomkit_join *join, PyObject *result, int64_t rows,
                double weight)
{
    Py_ssize_t before;

    if (join->results == NULL) {
        join->results = PyList_New(0);
        join->rows = PyList_New(0);
        join->weights = PyList_New(0);
        if (join->results == NULL || join->rows == NULL || join->weights == NULL) {
            oomkit_join_clear(join);
            return -1;
        }
    }
    before = PyList_GET_SIZE(join->results);
    if (append_stolen(join->results, keep_value(st, result, 0)) == 0 &&
        append_stolen(join->rows, PyLong_FromLongLong(rows)) == 0 &&
        append_stolen(join->weights, PyFloat_FromDouble(weight)) == 0) {
        return 0;
    }
    {
        PyObject *exception = oomkit_exception_take(); /* owned, stolen by give */
        if (oomkit_join_truncate(join, before) < 0) {
            Py_XDECREF(oomkit_exception_take()); /* the first one tells more */
        }
        oomkit_exception_give(exception);
    }
    return -1;
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
    return results < 0 || rows < 0 || weights < 0 ? -1 : 0;
}

void
oomkit_join_clear(oomkit_join *join)
{
    Py_CLEAR(join->results);
    Py_CLEAR(join->rows);
    Py_CLEAR(join->weights);
}

/* --- joining --- */

static PyObject *
join_place(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values);

/* One element further in: `column` holds a value of each micro-batch. */
static PyObject *
join_inner(const oomkit_rules *r, const oomkit_place *outer, PyObject *whole,
           PyObject *key, Py_ssize_t number, PyObject *const *column)
{
    oomkit_place where = {outer, key, number, 0};
    if (outer->outer == NULL) {
        where.is_loss = oomkit_loss_is_at(r->st, whole, number, key);
        if (where.is_loss < 0) {
            return NULL;
        }
    }
    return join_place(r, &where, column);
}

static PyObject **
join_column(const oomkit_rules *r)
{
    PyObject **column =
        PyMem_New(PyObject *, (size_t)r->count); /* of borrowed values */
    if (column == NULL) {
        PyErr_NoMemory();
    }
    return column;
}

static PyObject *
join_dicts(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values)
{
    PyObject *joined, *key, *first;     /* owned; borrowed from values[0] */
    PyObject **column = join_column(r); /* owned, of values borrowed from the results */
    Py_ssize_t position = 0, i;

    joined = column == NULL ? NULL : PyDict_New();
    for (i = 1; joined != NULL && i < r->count; i++) {
        if (PyDict_GET_SIZE(values[i]) != PyDict_GET_SIZE(values[0])) {
            Py_CLEAR(joined);
            oomkit_place_differs(r, where, values[0], values[i]);
        }
    }
    while (joined != NULL && PyDict_Next(values[0], &position, &key, &first)) {
        PyObject *item = NULL; /* owned */
        for (i = 0; i < r->count; i++) {
            column[i] = PyDict_GetItemWithError(values[i], key);
            if (column[i] == NULL) {
                break;
            }
        }
        if (i == r->count) {
            item = join_inner(r, where, values[0], key, 0, column);
        } else if (!PyErr_Occurred()) {
            oomkit_place_differs(r, where, values[0], values[i]);
        }
        if (item == NULL || PyDict_SetItem(joined, key, item) < 0) {
            Py_CLEAR(joined);
        }
        Py_XDECREF(item);
    }
    PyMem_Free(column);
    return joined;
}

static PyObject *
sequence_item(PyObject *sequence, Py_ssize_t i)
{
    return PyList_Check(sequence) ? PyList_GET_ITEM(sequence, i)
                                  : PyTuple_GET_ITEM(sequence, i);
}

/* By element: a list of the joined elements of lists or tuples as long as each other.
 */
static PyObject *
join_elements(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values)
{
    Py_ssize_t size = PySequence_Fast_GET_SIZE(values[0]), i, k;
    PyObject *joined = NULL;            /* owned */
    PyObject **column = join_column(r); /* owned, of values borrowed from the results */

    for (k = 1; k < r->count; k++) {
        if (column != NULL && PySequence_Fast_GET_SIZE(values[k]) != size) {
            oomkit_place_refuse(
                r, where,
                PyUnicode_FromFormat("has %zd elements for %lld rows and %zd for %lld",
                                     size, (long long)r->rows[0],
                                     PySequence_Fast_GET_SIZE(values[k]),
                                     (long long)r->rows[k]));
            PyMem_Free(column);
            return NULL;
        }
    }
    joined = column == NULL ? NULL : PyList_New(size);
    for (i = 0; joined != NULL && i < size; i++) {
        PyObject *item; /* stolen by PyList_SET_ITEM() */
        for (k = 0; k < r->count; k++) {
            column[k] = sequence_item(values[k], i);
        }
        item = join_inner(r, where, values[0], NULL, i, column);
        if (item == NULL) {
            Py_CLEAR(joined);
            break;
        }
        PyList_SET_ITEM(joined, i, item);
    }
    PyMem_Free(column);
    return joined;
}

/* Lists with an element for each row are put after one another. */
static PyObject *
join_lists(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values)
{
    PyObject *joined; /* owned */
    Py_ssize_t i;

    for (i = 0; i < r->count; i++) {
        if (PyList_GET_SIZE(values[i]) != r->rows[i]) {
            return join_elements(r, where, values);
        }
    }
    joined = PyList_New(0);
    for (i = 0; joined != NULL && i < r->count; i++) {
        Py_ssize_t end = PyList_GET_SIZE(joined);
        if (PyList_SetSlice(joined, end, end, values[i]) < 0) {
            Py_CLEAR(joined);
        }
    }
    return joined;
}

static PyObject *
join_tuples(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values)
{
    PyObject *list = join_elements(r, where, values); /* owned */
    return list == NULL ? NULL : oomkit_tuple_like(values[0], list);
}

static int
all_numbers(const oomkit_rules *r, PyObject *const *values)
{
    Py_ssize_t i;
    for (i = 0; i < r->count; i++) {
        if (!PyFloat_Check(values[i]) && !PyLong_CheckExact(values[i])) {
            return 0;
        }
    }
    return 1;
}

static PyObject *
join_place(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values)
{
    PyObject *first = values[0]; /* borrowed from the results */
    int tensor = oomkit_tensor_check(r->st, first);
    Py_ssize_t i;
    PyObject *joined; /* owned */

    if (!tensor && all_numbers(r, values)) {
        for (i = 0; i < r->count && PyLong_CheckExact(values[i]); i++) {
        }
        return i == r->count ? oomkit_join_integers(r, values)
                             : oomkit_join_floats(r, where, values);
    }
    for (i = 1; i < r->count; i++) {
        if (tensor ? !oomkit_tensor_check(r->st, values[i])
                   : !Py_IS_TYPE(values[i], Py_TYPE(first))) {
            return oomkit_place_differs(r, where, first, values[i]);
        }
    }
    if (tensor) {
        return oomkit_join_tensors(r, where, values);
    }
    if (Py_EnterRecursiveCall(" while joining results")) {
        return NULL;
    }
    if (PyDict_CheckExact(first)) {
        joined = join_dicts(r, where, values);
    } else if (PyList_CheckExact(first)) {
        joined = join_lists(r, where, values);
    } else if (is_named_or_plain_tuple(r->st, first)) {
        joined = join_tuples(r, where, values);
    } else {
        joined = oomkit_join_equal(r, where, values);
    }
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

PyObject *
oomkit_join_finish(oomkit_state *st, const oomkit_options *options, oomkit_join *join)
{
    oomkit_rules r = {.st = st, .options = options, .parked = join->parked};
    oomkit_place where = {NULL, NULL, 0, 1};
    PyObject *joined = NULL; /* owned */

    r.count = join->results == NULL ? 0 : PyList_GET_SIZE(join->results);
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
    if (join->groups > 0 && is_sequence_of(join, join->groups)) {
        r.group_weights = join->group_weights;
        r.groups = join->groups;
    }
    r.rows = PyMem_New(int64_t, (size_t)r.count);
    r.weights = PyMem_New(double, (size_t)r.count);
    if (r.rows == NULL || r.weights == NULL) {
        PyErr_NoMemory();
    } else if (rules_fill(&r, join) == 0) {
        joined = join_place(&r, &where, PySequence_Fast_ITEMS(join->results));
    }
    PyMem_Free(r.rows);
    PyMem_Free(r.weights);
    return joined;
}
