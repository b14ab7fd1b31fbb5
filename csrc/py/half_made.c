/* Tensors that torch has left half made: an operation that changes one in place sets
 * its sizes first and then fails to get the memory for them. Adding to an empty sparse
 * gradient is one. Nobody is told (no version moves), and whoever reads such a tensor
 * reads past its storage. */
#include "half_made.h"
#include "tensor.h"

/* A whole number that a method answers. 0 or -1. */
static int
ask(PyObject *object, const char *method, int64_t *value)
{
    OWNED PyObject *answer = PyObject_CallMethod(object, method, NULL);

    *value = answer == NULL ? -1 : PyLong_AsLongLong(answer);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

/* The bytes of its storage. 0 or -1. */
static int
storage_bytes(PyObject *tensor, int64_t *bytes)
{
    OWNED PyObject *storage = PyObject_CallMethod(tensor, "untyped_storage", NULL);

    return storage == NULL ? -1 : ask(storage, "nbytes", bytes);
}

/* Does a strided tensor's storage have all of its elements? 1, 0 or -1. */
static int
is_backed(PyObject *tensor)
{
    OWNED PyObject *sizes = NULL, *strides = NULL;
    int64_t count, last, item, bytes;
    Py_ssize_t i;

    if (ask(tensor, "numel", &count) < 0 || ask(tensor, "storage_offset", &last) < 0 ||
        ask(tensor, "element_size", &item) < 0 || storage_bytes(tensor, &bytes) < 0) {
        return -1;
    }
    sizes = PyObject_CallMethod(tensor, "size", NULL);
    strides = sizes == NULL ? NULL : PyObject_CallMethod(tensor, "stride", NULL);
    if (strides != NULL && PyTuple_Check(sizes) && PyTuple_Check(strides)) {
        for (i = 0; i < PyTuple_GET_SIZE(sizes) && i < PyTuple_GET_SIZE(strides); i++) {
            last += (PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, i)) - 1) *
                    PyLong_AsLongLong(PyTuple_GET_ITEM(strides, i));
        }
    }
    return PyErr_Occurred() ? -1 : count == 0 || (last + 1) * item <= bytes;
}

/* The size of a dimension. 0 or -1. */
static int
size_of(PyObject *tensor, int dim, int64_t *size)
{
    OWNED PyObject *answer = PyObject_CallMethod(tensor, "size", "i", dim);

    *size = answer == NULL ? -1 : PyLong_AsLongLong(answer);
    return *size == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Of a COO tensor. 0 or -1. */
static int
coo_look(PyObject *tensor, oomkit_half_made *found)
{
    OWNED PyObject *indices = PyObject_CallMethod(tensor, "_indices", NULL);
    OWNED PyObject *values =
        indices ? PyObject_CallMethod(tensor, "_values", NULL) : NULL;
    int64_t listed = 0, bytes = 0, numel = 0;
    int whole, full;

    if (values == NULL || size_of(indices, 1, &listed) < 0 ||
        size_of(values, 0, &found->count) < 0 || storage_bytes(values, &bytes) < 0 ||
        ask(tensor, "numel", &numel) < 0) {
        return -1;
    }
    whole = is_backed(indices);
    full = whole < 0 ? -1 : is_backed(values);
    found->whole = whole > 0 && full > 0 && listed == found->count;
    /* resize_() never takes memory away: there were no values before */
    found->was_empty = !found->whole && (found->count == 0 || bytes == 0);
    found->may_have_grown = found->count > numel;
    return full < 0 ? -1 : 0;
}

/* Of one whose parts have these names. 0 or -1. */
static int
compressed_look(PyObject *tensor, const char *const *names, oomkit_half_made *found)
{
    int i;

    for (i = 0; i < 3; i++) {
        OWNED PyObject *part = PyObject_CallMethod(tensor, names[i], NULL);
        int backed = part == NULL ? -1 : is_backed(part);
        found->whole &= backed > 0;
        if (backed < 0) {
            return -1;
        }
    }
    return 0;
}

int
oomkit_half_made_look(oomkit_state *st, PyObject *tensor, oomkit_half_made *found)
{
    static const char *const by_row[] = {"crow_indices", "col_indices", "values"};
    static const char *const by_column[] = {"ccol_indices", "row_indices", "values"};
    oomkit_tensor_facts facts;
    OWNED PyObject *layout = NULL;
    const char *name;

    *found = (oomkit_half_made){.whole = 1};
    if (oomkit_tensor_facts_get(st, tensor, 0, &facts) < 0) {
        return -1;
    }
    if (facts.is_strided) {
        return 0;
    }
    found->sparse = 1;
    layout = PyObject_GetAttrString(tensor, "layout");
    if (layout != NULL) {
        Py_SETREF(layout, PyObject_Str(layout));
    }
    name = layout == NULL ? NULL : PyUnicode_AsUTF8(layout);
    if (name == NULL) {
        return -1;
    }
    if (strcmp(name, "torch.sparse_coo") == 0) {
        return coo_look(tensor, found);
    }
    if (strcmp(name, "torch.sparse_csr") == 0 ||
        strcmp(name, "torch.sparse_bsr") == 0) {
        return compressed_look(tensor, by_row, found);
    }
    if (strcmp(name, "torch.sparse_csc") == 0 ||
        strcmp(name, "torch.sparse_bsc") == 0) {
        return compressed_look(tensor, by_column, found);
    }
    return 0;
}

int
oomkit_half_made_mend(oomkit_state *st, PyObject *tensor, oomkit_half_made *found)
{
    OWNED PyObject *done = NULL;

    if (oomkit_half_made_look(st, tensor, found) < 0) {
        return -1;
    }
    if (found->whole || !found->was_empty) {
        return found->whole;
    }
    done =
        PyObject_CallMethod(tensor, "zero_", NULL); /* empty again: allocates nothing */
    return done == NULL ? -1 : 1;
}

int
oomkit_half_made_refuse(oomkit_state *st, PyObject *tensor)
{
    oomkit_half_made found;
    int whole = oomkit_half_made_mend(st, tensor, &found);

    if (whole == 0) {
        PyErr_SetString(
            PyExc_RuntimeError,
            "oomkit cannot read a tensor that torch left incomplete when memory ran "
            "out (its sizes are larger than its storage); if it is a gradient, set it "
            "to None before you continue" SEE("incomplete-tensor"));
    }
    return whole > 0 ? 0 : -1;
}
