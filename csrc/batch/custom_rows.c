/* How many rows a batch has that split= slices: of its first tensor, else its len(). Of
 * a list what split= makes of it tells. */
#include "layout.h"
#include "../py/errors.h"

/* The length of a list or tuple, -1 for other objects. */
static Py_ssize_t
called_length(PyObject *object)
{
    return PyList_CheckExact(object) || PyTuple_CheckExact(object)
               ? PySequence_Fast_GET_SIZE(object)
               : -1;
}

/* Of split(list, 0, 1) a list of one sample is left, or all the columns with one row
 * each. `rows` are those of the first tensor. -1 with an exception. */
static int64_t
called_list_rows(const oomkit_find *f, int64_t rows)
{
    OWNED PyObject *whole = oomkit_node_whole(f->st, f->batch, f->first);
    OWNED PyObject *part = NULL;
    Py_ssize_t before, after;

    if (whole == NULL) {
        return -1;
    }
    before = called_length(whole);
    part = PyObject_CallFunction(f->options->split, "Oii", whole, 0, 1);
    if (part == NULL) {
        return -1;
    }
    after = called_length(part);
    if (after == 1 &&
        (before > 1 || (before == 1 && PySequence_Fast_GET_ITEM(part, 0) ==
                                           PySequence_Fast_GET_ITEM(whole, 0)))) {
        return before;
    }
    if (after < 0 || after != before) {
        return oomkit_find_refuse(f, f->first, " that split= cuts",
                                  "of one row, split(batch, 0, 1), it must return a "
                                  "list of one sample, or one "
                                  "as long as before with one row in each");
    }
    return rows;
}

int64_t
oomkit_find_called_rows(const oomkit_find *f)
{
    PyObject *object = f->batch->nodes[f->first].object; /* borrowed from the node */
    Py_ssize_t tensor = oomkit_node_first_tensor(f->batch, f->first, -1, 0);
    Py_ssize_t length;
    int counts = /* a class of the user's that knows its length */
        f->batch->nodes[f->first].kind == OOMKIT_NODE_OBJECT && !PyDict_Check(object) &&
        !PyType_IsSubtype(Py_TYPE(object), (PyTypeObject *)f->st->UserDict);

    if (counts) {
        counts = oomkit_has_attribute((PyObject *)Py_TYPE(object), f->st->str_len);
        if (counts < 0) {
            return -1;
        }
    }
    if (tensor >= 0 && !counts) {
        return PyList_CheckExact(object) || PyTuple_CheckExact(object)
                   ? called_list_rows(f, f->batch->nodes[tensor].rows)
                   : f->batch->nodes[tensor].rows;
    }
    if ((f->batch->nodes[f->first].flags & OOMKIT_NODE_CUSTOM) != 0) {
        int64_t rows;
        int known = oomkit_splitter_rows(f->st, object, &rows);
        if (known <= 0) {
            return known < 0 ? -1 : rows;
        }
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
