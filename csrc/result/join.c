/* The results of micro-batches joined into the result of the whole batch: containers by
 * element. What is in them is joined in join_rules.c, join_numbers.c, join_tensors.c.
 */
#include "join_rules.h"
#include "result.h"
#include "../py/tensor.h"
#include "../tree/kinds.h"
#include "../tree/named_parts.h"
#include "../tree/tree.h"
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

/* Dictionaries of exact type; `named` when their keys are names of attributes. */
static PyObject *
join_dicts(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values,
           int named)
{
    PyObject *key, *first;                           /* borrowed from values[0] */
    OWNED_MEMORY PyObject **column = join_column(r); /* of the results' values */
    OWNED PyObject *joined = column == NULL ? NULL : PyDict_New();
    Py_ssize_t position = 0, i;

    for (i = 1; joined != NULL && i < r->count; i++) {
        if (PyDict_GET_SIZE(values[i]) != PyDict_GET_SIZE(values[0])) {
            return oomkit_place_differs(r, where, values[0], values[i]);
        }
    }
    while (joined != NULL && PyDict_Next(values[0], &position, &key, &first)) {
        oomkit_place inner = {
            .outer = where, .key = named ? NULL : key, .name = named ? key : NULL};
        OWNED PyObject *item = NULL;
        for (i = 0; i < r->count; i++) {
            column[i] = PyDict_GetItemWithError(values[i], key);
            if (column[i] == NULL) {
                break;
            }
        }
        inner.is_loss = where->outer == NULL && i == r->count
                            ? PyObject_RichCompareBool(key, r->st->str_loss, Py_EQ)
                            : 0;
        if (i == r->count && inner.is_loss >= 0) {
            item = join_inner(r, &inner, column);
        } else if (!PyErr_Occurred()) {
            oomkit_place_differs(r, where, values[0], values[i]);
        }
        if (item == NULL || PyDict_SetItem(joined, key, item) < 0) {
            return NULL;
        }
    }
    return STEAL(joined);
}

/* Mappings and data classes of one type. */
static PyObject *
join_outputs(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values)
{
    oomkit_parts joined = {NULL, NULL};
    OWNED_MEMORY oomkit_parts *parts = PyMem_Calloc((size_t)r->count, sizeof(*parts));
    OWNED_MEMORY PyObject **column = join_column(r); /* of values borrowed from parts */
    PyObject *made = NULL;                           /* owned */
    Py_ssize_t i, opened = 0;

    if (parts == NULL || column == NULL) {
        return PyErr_NoMemory();
    }
    for (; opened < r->count; opened++) {
        if (oomkit_output_open(r->st, values[opened], &parts[opened]) < 0) {
            goto done;
        }
        column[opened] = parts[opened].entries;
    }
    if (parts[0].entries != NULL) {
        joined.entries = join_dicts(r, where, column, 0);
    }
    for (i = 0; i < r->count; i++) {
        column[i] = parts[i].attributes;
    }
    if (joined.entries != NULL || parts[0].entries == NULL) {
        joined.attributes = join_dicts(r, where, column, 1);
    }
    if (joined.attributes != NULL) {
        made = oomkit_output_like(r->st, values[0], &joined);
    }
done:
    while (opened > 0) {
        oomkit_parts_clear(&parts[--opened]);
    }
    oomkit_parts_clear(&joined);
    return made;
}

static PyObject *
sequence_item(PyObject *sequence, Py_ssize_t i)
{
    return PyList_Check(sequence) ? PyList_GET_ITEM(sequence, i)
                                  : PyTuple_GET_ITEM(sequence, i);
}

/* The field names of a named tuple. New reference; NULL without an exception where
 * there are none. */
static PyObject *
field_names(const oomkit_rules *r, PyObject *sequence)
{
    PyObject *names; /* owned */
    if (PyList_Check(sequence) || PyTuple_CheckExact(sequence)) {
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

/* All as long as the first? 0, or -1 with SplitError. */
static int
check_lengths(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values)
{
    Py_ssize_t size = PySequence_Fast_GET_SIZE(values[0]), k;

    for (k = 1; k < r->count; k++) {
        if (PySequence_Fast_GET_SIZE(values[k]) != size) {
            oomkit_place_refuse(
                r, where,
                PyUnicode_FromFormat("has %zd elements for %lld rows and %zd for %lld",
                                     size, (long long)r->rows[0],
                                     PySequence_Fast_GET_SIZE(values[k]),
                                     (long long)r->rows[k]));
            return -1;
        }
    }
    return 0;
}

/* By element: a list of the joined elements of lists or tuples as long as each other.
 */
static PyObject *
join_elements(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values)
{
    Py_ssize_t size = PySequence_Fast_GET_SIZE(values[0]), i, k;
    OWNED_MEMORY PyObject **column = join_column(r); /* of the results' values */
    OWNED PyObject *joined = NULL, *names = NULL;

    if (column == NULL || check_lengths(r, where, values) < 0) {
        return NULL;
    }
    names = field_names(r, values[0]);
    joined = names == NULL && PyErr_Occurred() ? NULL : PyList_New(size);
    for (i = 0; joined != NULL && i < size; i++) {
        PyObject *item = NULL; /* stolen by PyList_SET_ITEM() */
        oomkit_place inner = {.outer = where,
                              .name = names == NULL ? NULL : PyTuple_GET_ITEM(names, i),
                              .number = i,
                              .in_list = PyList_Check(values[0])};
        for (k = 0; k < r->count; k++) {
            column[k] = sequence_item(values[k], i);
        }
        inner.is_loss = where->outer == NULL
                            ? oomkit_loss_is_at(r->st, values[0], i, r->loss_at)
                            : 0;
        item = inner.is_loss < 0 ? NULL : join_inner(r, &inner, column);
        if (item == NULL) {
            return NULL;
        }
        PyList_SET_ITEM(joined, i, item);
    }
    return STEAL(joined);
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
    return join_elements(&alone, where, values + i);
}

/* Lists with an element for each row are put after one another. */
static PyObject *
join_lists(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values)
{
    int rows = r->count == 1 ? 0 : oomkit_lists_are_rows(r, where, values);
    OWNED PyObject *joined = NULL;
    Py_ssize_t i;

    if (rows <= 0) {
        return rows < 0 ? NULL : join_elements(r, where, values);
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

static PyObject *
join_tuples(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values)
{
    PyObject *list = join_elements(r, where, values); /* owned */
    return list == NULL ? NULL : oomkit_output_tuple(r->st, values[0], list);
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
    int tensor = oomkit_tensor_check(r->st, first), is_tuple;
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
    is_tuple = oomkit_output_is_tuple(r->st, first);
    if (is_tuple != 0) {
        joined = is_tuple < 0 ? NULL : join_tuples(r, where, values);
    } else if (PyDict_CheckExact(first)) {
        joined = join_dicts(r, where, values, 0);
    } else if (PyList_CheckExact(first)) {
        joined = join_lists(r, where, values);
    } else if (oomkit_output_check(r->st, first)) {
        joined = join_outputs(r, where, values);
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
