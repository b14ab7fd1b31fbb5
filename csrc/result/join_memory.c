/* Tensors of several micro-batches in the same memory: what the step keeps, and what a
 * later micro-batch has written over. */
#include "join_rules.h"
#include "../py/tensor.h"

/* The address of the first element, or NULL (with an exception: check). */
static void *
tensor_address(const oomkit_rules *r, PyObject *tensor)
{
    OWNED PyObject *number = PyObject_CallMethodNoArgs(tensor, r->st->str_data_ptr);

    if (number == NULL) {
        if (oomkit_error_is_no_answer(r->st)) {
            PyErr_Clear(); /* a tensor without memory of its own */
        }
        return NULL;
    }
    return PyLong_AsVoidPtr(number);
}

static int
column_addresses(const oomkit_rules *r, PyObject *const *values, oomkit_column *column)
{
    Py_ssize_t i, k, pairs = 0;
    OWNED_MEMORY void **at = PyMem_New(void *, (size_t)r->count);

    if (at == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (i = 0; i < r->count; i++) {
        at[i] = tensor_address(r, values[i]);
        if (at[i] == NULL && PyErr_Occurred()) {
            return -1;
        }
        for (k = 0; k < i; k++) {
            pairs += at[i] != NULL && at[i] == at[k];
        }
    }
    column->shared = pairs > 0;
    column->all_shared = pairs == r->count * (r->count - 1) / 2;
    return 0;
}

int
oomkit_column_read(const oomkit_rules *r, PyObject *const *values,
                   oomkit_column *column)
{
    Py_ssize_t i;

    *column = (oomkit_column){.same = r->count > 1};
    for (i = 0; i < r->count; i++) {
        uint32_t version;
        oomkit_kept kept;
        int found = oomkit_kept_get(r->marks, r->first + i, values[i], &kept);
        if (found < 0) {
            return -1;
        }
        column->same = column->same && values[i] == values[0];
        column->required |= kept.required;
        column->leaf = i == 0 || kept.leaf == column->leaf ? kept.leaf : NULL;
        if (!found || kept.leaf != NULL || r->first + i == r->batches - 1) {
            continue;
        }
        if (oomkit_tensor_version(r->st, values[i], &version) < 0) {
            return -1;
        }
        column->moved |= version != kept.version;
    }
    return r->count > 1 ? column_addresses(r, values, column) : 0;
}

/* Rows that are one row, as expand() makes them? 1, 0 or -1. */
static int
rows_are_one(const oomkit_rules *r, PyObject *tensor)
{
    long long dim = (long long)r->options->dim;
    OWNED PyObject *stride = PyObject_CallMethod(tensor, "stride", "L", dim);
    return stride == NULL ? -1 : PyObject_Not(stride);
}

const char *
oomkit_column_refusal(const oomkit_rules *r, PyObject *const *values,
                      const oomkit_column *column)
{
    int one;

    if (!column->shared) {
        return NULL;
    }
    if (column->moved) {
        return "in memory that a later micro-batch overwrote: return a clone() of it";
    }
    one = rows_are_one(r, values[0]);
    if (one != 0) {
        return NULL; /* or the exception */
    }
    return "in memory that several micro-batches share, such as the first rows of a "
           "table or of a reused array: these are not the rows of the batch";
}
