/* Joining tensors. */
#include "join_rules.h"
#include "../py/tensor.h"

/* --- messages --- */

/* Shapes of values[0] and of values[other] as text: "shapes [3, 2] and [2, 2] for 3 and
 * 2 rows". New reference or NULL. */
static PyObject *
shapes_text(const oomkit_rules *r, PyObject *const *values, Py_ssize_t other)
{
    OWNED PyObject *one = PyObject_GetAttr(values[0], r->st->str_shape);
    OWNED PyObject *two = PyObject_GetAttr(values[other], r->st->str_shape);

    if (one != NULL && two != NULL) {
        Py_SETREF(one, PySequence_List(one));
        Py_SETREF(two, PySequence_List(two));
    }
    if (one != NULL && two != NULL) {
        return PyUnicode_FromFormat("shapes %R and %R for %lld and %lld rows", one, two,
                                    (long long)r->rows[0], (long long)r->rows[other]);
    }
    if (!oomkit_error_is_no_answer(r->st)) {
        return NULL;
    }
    PyErr_Clear(); /* a nested tensor has no shape */
    return PyUnicode_FromString("no shape that could be compared");
}

/* SplitError: "has <shapes>, <what>". NULL always. */
static PyObject *
refuse_shapes(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values,
              Py_ssize_t other, const char *what)
{
    OWNED PyObject *shapes = shapes_text(r, values, other);

    return oomkit_place_refuse(
        r, where,
        shapes == NULL ? NULL : PyUnicode_FromFormat("has %U, %s", shapes, what));
}

/* SplitError with the text of the exception in flight, which is dropped. NULL always.
 */
static PyObject *
refuse_message(const oomkit_rules *r, const oomkit_place *where)
{
    PyObject *error = oomkit_exception_take(); /* owned */
    PyObject *text = PyUnicode_FromFormat("cannot be put together: %S", error);

    Py_XDECREF(error);
    return oomkit_place_refuse(r, where, text);
}

/* --- values --- */

/* Bitwise equal? 1, 0 or -1. */
static int
tensors_equal(const oomkit_rules *r, PyObject *a, PyObject *b)
{
    PyObject *stack[2] = {a, b}; /* borrowed from the results */
    OWNED PyObject *answer = NULL;

    if (a == b) {
        return 1;
    }
    answer = PyObject_Vectorcall(r->st->torch_equal, stack, 2, NULL);
    if (answer == NULL) {
        if (!oomkit_error_is_no_answer(r->st)) {
            return -1;
        }
        PyErr_Clear(); /* of several devices, sparse, nested: not known to be equal */
        return 0;
    }
    return PyObject_IsTrue(answer);
}

static int
tensors_all_equal(const oomkit_rules *r, PyObject *const *values)
{
    Py_ssize_t i;
    int equal = 1;
    for (i = 1; equal > 0 && i < r->count; i++) {
        equal = tensors_equal(r, values[0], values[i]);
    }
    return equal;
}

/* sum of weight * value in the tensors' own dtype, or the plain sum. New reference. */
static PyObject *
tensors_add(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values,
            int weighted)
{
    PyObject *sum = NULL; /* owned */
    int by_rows = weighted ? oomkit_rules_by_rows(r, where) : 0;
    Py_ssize_t i;

    if (by_rows < 0) {
        return NULL;
    }
    for (i = 0; i < r->count; i++) {
        double weight = weighted ? oomkit_rules_weight(r, where, i, by_rows) : 1.0;
        PyObject *term; /* owned */
        if (weight == 0.0) {
            continue; /* a share of nothing may be NaN */
        }
        term = Py_NewRef(values[i]);
        if (weighted) {
            OWNED PyObject *factor = PyFloat_FromDouble(weight);
            Py_SETREF(term, factor == NULL ? NULL
                                           : PyObject_CallMethodOneArg(
                                                 term, r->st->str_mul, factor));
        }
        if (term != NULL && sum != NULL) {
            Py_SETREF(term, PyObject_CallMethodOneArg(sum, r->st->str_add, term));
        }
        Py_XSETREF(sum, term);
        if (sum == NULL) {
            return NULL;
        }
    }
    return sum;
}

/* Is the last one alone not 0, and may be a norm of gradients? 1, 0 or -1. Reads the
 * values, so only for a possible norm. */
static int
tensors_zero_but_last(const oomkit_rules *r, const oomkit_place *where,
                      PyObject *const *values)
{
    int shown;
    Py_ssize_t i;

    for (i = 0; i < r->count - 1; i++) {
        int truth = PyObject_IsTrue(values[i]);
        if (truth != 0) {
            return truth < 0 ? -1 : 0;
        }
    }
    shown = oomkit_rules_shown(r, where, OOMKIT_FIGURE_NO_NORM);
    return shown < 0 ? -1 : !shown;
}

/* c10::ScalarType: 5-7 and 15 are floating, 8-10 complex, 23 on the 8-bit floats. */
static int
dtype_is_floating(int32_t dtype)
{
    return (dtype >= 5 && dtype <= 10) || dtype == 15 || (dtype >= 23 && dtype <= 26);
}

static PyObject *
join_float_scalars(const oomkit_rules *r, const oomkit_place *where,
                   PyObject *const *values)
{
    int by_rows = oomkit_rules_by_rows(r, where);
    int summed = where->is_loss && r->is_sum && !by_rows;
    int norm = by_rows < 0 ? -1 : oomkit_rules_may_be_norm(r, where);

    norm = norm > 0 ? tensors_zero_but_last(r, where, values) : norm;
    if (norm < 0 ||
        (norm ? oomkit_place_say(r, where, "taken from the last micro-batch")
              : oomkit_place_say_mean(r, where, summed)) < 0) {
        return NULL;
    }
    return norm ? Py_NewRef(values[r->count - 1]) : tensors_add(r, where, values, 1);
}

static PyObject *
join_scalars(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values,
             int32_t dtype)
{
    int equal = 0, told;

    if (dtype_is_floating(dtype)) {
        return join_float_scalars(r, where, values);
    }
    told = dtype == 11 ? 1 : oomkit_rules_is_one(r, where);
    if (told < 0) {
        return NULL;
    }
    if (told == 1) { /* bool, an epoch */
        equal = tensors_all_equal(r, values);
        if (equal < 0 || (equal && oomkit_place_say(r, where, "kept") < 0)) {
            return NULL;
        }
        if (!equal && dtype != 11) {
            told = oomkit_rules_was_one(r, where);
            if (told < 0) {
                return NULL;
            }
        }
        if (!equal && told == 1) {
            return oomkit_place_differs(r, where, values[0], values[r->count - 1]);
        }
    }
    if (equal) {
        return Py_NewRef(values[0]);
    }
    return oomkit_place_say(r, where, "added") < 0 ? NULL
                                                   : tensors_add(r, where, values, 0);
}

static PyObject *
tensors_cat(const oomkit_rules *r, PyObject *const *values)
{
    OWNED PyObject *list = PyList_New(r->count);
    OWNED PyObject *dim = PyLong_FromLongLong(r->options->dim);
    PyObject *stack[2] = {list, dim}; /* borrowed from this function */
    Py_ssize_t i;

    if (list == NULL || dim == NULL) {
        return NULL;
    }
    for (i = 0; i < r->count; i++) {
        PyList_SET_ITEM(list, i, Py_NewRef(values[i]));
    }
    return PyObject_Vectorcall(r->st->torch_cat, stack, 2, NULL);
}

/* Rows after rows. What torch refuses to put together (sizes, devices) is an error that
 * names the place. */
static PyObject *
join_slices(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values,
            Py_ssize_t ragged)
{
    PyObject *joined = tensors_cat(r, values); /* owned */

    if (joined != NULL || !oomkit_error_is_no_answer(r->st)) {
        return joined;
    }
    if (ragged == 0) {
        return refuse_message(r, where);
    }
    PyErr_Clear(); /* told below, with the place */
    return refuse_shapes(r, where, values, ragged,
                         "which cannot be put one after the other: other sizes differ "
                         "when each micro-batch is padded to its own longest row or "
                         "generates until it is done; pad to a fixed length, or use "
                         "oomkit.map(..., pad=...), which pads");
}

/* --- joining --- */

/* Rows in a second dimension as well: of micro-batches alike in size, blocks of a
 * matrix that compares the rows with each other look like rows of a fixed length. 0, or
 * -1. */
static int
squares_judge(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values,
              const oomkit_result_fact *known, uint64_t hash)
{
    oomkit_tensor_facts facts = {0};
    int64_t i, dimensions = 1;
    int square = 0;

    for (i = 0; i < dimensions; i++) {
        if (oomkit_tensor_facts_get(r->st, values[0], i, &facts) < 0) {
            return -1;
        }
        dimensions = facts.ndim;
        square += facts.size == r->rows[0];
    }
    for (i = 0; i < r->count; i++) {
        square = r->rows[i] == r->rows[0] ? square : 0; /* the other size stayed */
    }
    if (square < 2 || r->rows[0] < 2) {
        return 0;
    }
    if (known != NULL && known->kind == OOMKIT_RESULT_ARRAY &&
        known->rows != r->rows[0]) {
        if (known->shape == hash) {
            return 0; /* the other sizes stayed while the rows changed */
        }
        if (known->square) {
            refuse_shapes(r, where, values, r->count - 1,
                          "and the rows in two dimensions: what compares the rows of a "
                          "batch with each other cannot be put together");
            return -1;
        }
    }
    if (dimensions > 2) {
        return 0;
    }
    return oomkit_place_warn(
        r, where,
        "has the rows of a micro-batch in both dimensions and was joined along one: if "
        "it compares the rows with each other, compare them outside the step "
        "(verify=True checks it)");
}

/* What the tensors of a place look like in all micro-batches. */
typedef struct column_sizes {
    int scalars, slices; /* all have no dimension; all have the rows in front */
    int32_t dtype;       /* a floating one where there is one */
    Py_ssize_t ragged;   /* the first that differs from values[0] in its other sizes */
    uint64_t hash;       /* of values[0] */
    int64_t size;        /* of values[0] in the dimension of the rows */
} column_sizes;

static int
sizes_read(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values,
           column_sizes *sizes)
{
    Py_ssize_t i;

    *sizes = (column_sizes){.scalars = 1, .slices = 1, .dtype = -1};
    for (i = 0; i < r->count; i++) {
        oomkit_tensor_facts facts;
        if (oomkit_tensor_facts_get(r->st, values[i], r->options->dim, &facts) < 0) {
            return -1;
        }
        if (i == 0) {
            sizes->hash = facts.shape_hash;
            sizes->size = facts.size;
        }
        sizes->scalars =
            sizes->scalars && (facts.ndim == 0 || (where->is_loss && r->one_loss));
        sizes->slices = sizes->slices && facts.size == r->rows[i];
        if (i == 0 || !dtype_is_floating(sizes->dtype)) {
            sizes->dtype = facts.dtype;
        }
        if (sizes->ragged == 0 && facts.shape_hash != sizes->hash) {
            sizes->ragged = i;
        }
    }
    return 0;
}

/* Tensors of a size of their own must be equal. */
static PyObject *
join_constants(const oomkit_rules *r, const oomkit_place *where,
               PyObject *const *values, const oomkit_result_fact *known, int64_t size)
{
    Py_ssize_t i;

    for (i = 1; i < r->count; i++) {
        int equal = tensors_equal(r, values[0], values[i]);
        if (equal < 0) {
            return NULL;
        }
        if (!equal) {
            return refuse_shapes(r, where, values, i,
                                 "and differing values (if it is the next batch "
                                 "fetched inside the step: fetch it outside)");
        }
    }
    if (known != NULL && known->rows > r->rows[0] &&
        known->size * r->rows[0] == size * known->rows && size > 0) {
        return refuse_shapes(r, where, values, r->count - 1,
                             "so many for each row as whole calls returned: rows that "
                             "were flattened together with another dimension");
    }
    return oomkit_place_say(r, where, "kept") < 0 ? NULL : Py_NewRef(values[0]);
}

static PyObject *
join_rows(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values,
          const oomkit_result_fact *known, const column_sizes *sizes)
{
    if (sizes->ragged == 0 && squares_judge(r, where, values, known, sizes->hash) < 0) {
        return NULL;
    }
    return join_slices(r, where, values, sizes->ragged);
}

static PyObject *
join_column(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values,
            const oomkit_column *column)
{
    const oomkit_result_fact *known = oomkit_rules_known(r, where); /* of the site */
    column_sizes sizes;

    if (sizes_read(r, where, values, &sizes) < 0) {
        return NULL;
    }
    if (known != NULL && known->kind != OOMKIT_RESULT_ARRAY) {
        known = NULL;
    }
    if (known != NULL && known->size != known->rows) {
        sizes.slices =
            0; /* its own size, which the micro-batch's rows happen to have */
    }
    if (sizes.slices && !(column->same && !column->moved)) {
        const char *refusal = oomkit_column_refusal(r, values, column); /* static */
        if (refusal != NULL) {
            return refuse_shapes(r, where, values, r->count - 1, refusal);
        }
        if (PyErr_Occurred()) {
            return NULL;
        }
    }
    if (column->same || (column->moved && column->all_shared)) {
        /* What the step keeps and returns every time: it is as the last one left it. */
        return oomkit_place_say(r, where, "kept") < 0 ? NULL
                                                      : Py_NewRef(values[r->count - 1]);
    }
    if (sizes.scalars) {
        return oomkit_rules_check_number(r, where) < 0
                   ? NULL
                   : join_scalars(r, where, values, sizes.dtype);
    }
    return sizes.slices ? join_rows(r, where, values, known, &sizes)
                        : join_constants(r, where, values, known, sizes.size);
}

PyObject *
oomkit_join_refusing(const oomkit_rules *r, const oomkit_place *where, PyObject *joined)
{
    OWNED PyObject *place = NULL;
    PyObject *answer = NULL; /* owned */

    if (joined != NULL && *r->refusal == NULL) {
        *r->refusal = PyObject_CallFunction(
            r->st->refusal, "OnO",
            r->options->label == NULL ? Py_None : r->options->label, r->batches,
            r->sources == NULL ? r->st->empty_tuple : r->sources);
    }
    if (joined != NULL && *r->refusal != NULL) {
        place = oomkit_place_text(where);
    }
    if (place != NULL) {
        answer =
            PyObject_CallFunction(*r->refusal, "OOi", joined, place, where->is_loss);
    }
    Py_XDECREF(joined);
    return answer;
}

/* Are these the losses of the micro-batches, here or under another name as well? */
static int
are_losses(const oomkit_rules *r, PyObject *const *values)
{
    Py_ssize_t i = 0;

    if (r->losses == NULL || r->count != r->batches || r->group_weights != NULL) {
        return 0;
    }
    while (i < r->count && values[i] == r->losses[i]) {
        i++;
    }
    return i == r->count;
}

static PyObject *
join_at(const oomkit_rules *r, const oomkit_place *where, PyObject *const *values)
{
    oomkit_column column;
    int open_loss;
    PyObject *joined; /* owned, stolen by oomkit_join_refusing() */

    if (oomkit_column_read(r, values, &column) < 0) {
        return NULL;
    }
    open_loss = where->is_loss && !r->parked; /* its caller will run backward */
    if (column.leaf != NULL && !open_loss) {
        return Py_NewRef(column.leaf); /* a parameter: the whole call returns it too */
    }
    joined =
        r->count == 1 ? Py_NewRef(values[0]) : join_column(r, where, values, &column);
    if (!column.required || open_loss) {
        return joined;
    }
    return oomkit_join_refusing(r, where, joined);
}

/* A loss that stands at several places is one tensor, as in the whole call's result. */
PyObject *
oomkit_join_tensors(const oomkit_rules *r, const oomkit_place *where,
                    PyObject *const *values)
{
    oomkit_place place = *where;

    if (!are_losses(r, values)) {
        return join_at(r, where, values);
    }
    if (*r->whole_loss == NULL) {
        place.is_loss = 1;
        *r->whole_loss = join_at(r, &place, values);
    }
    return Py_XNewRef(*r->whole_loss);
}
