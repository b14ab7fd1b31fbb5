/* Arrays of numpy among the arguments, by their buffers: numpy is not linked. */
#include "batch.h"

#include <string.h>

#define SAMPLES 64 /* values that a change is looked for in */

static uint64_t
array_mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0xff51afd7ed558ccdu;
    return hash ^ (hash >> 32);
}

/* The same of memory without gaps: up to 64 words. */
static uint32_t
array_sample_dense(const Py_buffer *view)
{
    const char *bytes = view->buf;
    Py_ssize_t words = view->len / (Py_ssize_t)sizeof(uint64_t), i;
    Py_ssize_t step = words > SAMPLES ? words / SAMPLES : 1;
    uint64_t hash = (uint64_t)view->len, value = 0;

    for (i = 0; i < SAMPLES && i * step < words; i++) {
        memcpy(&value, bytes + i * step * (Py_ssize_t)sizeof(value), sizeof(value));
        hash = array_mix(hash, value);
    }
    for (i = words * (Py_ssize_t)sizeof(uint64_t); i < view->len; i++) {
        hash = array_mix(hash, (unsigned char)bytes[i]);
    }
    return (uint32_t)(hash ^ (hash >> 32));
}

/* A hash of up to 64 items spread over the array. */
static uint32_t
array_sample(const Py_buffer *view)
{
    Py_ssize_t count = view->itemsize > 0 ? view->len / view->itemsize : 0, number;
    Py_ssize_t step = count > SAMPLES ? count / SAMPLES : 1, i;
    uint64_t hash = (uint64_t)count;

    if (PyBuffer_IsContiguous(view, 'C')) {
        return array_sample_dense(view);
    }
    for (i = 0; i < SAMPLES && i * step < count; i++) {
        const char *item = view->buf;
        uint64_t value = 0;
        Py_ssize_t rest = i * step, size = view->itemsize, byte;
        for (number = view->ndim - 1; number >= 0; number--) {
            item += rest % view->shape[number] * view->strides[number];
            rest /= view->shape[number];
        }
        for (byte = 0; byte < size && byte < 64; byte++) {
            value = value * 257 + (unsigned char)item[byte];
        }
        hash = array_mix(hash, value);
    }
    return (uint32_t)(hash ^ (hash >> 32));
}

/* Sizes by the attribute: dates have no buffer. 0 or -1. */
static int
array_shape(oomkit_state *st, oomkit_node *node, int64_t dim)
{
    OWNED PyObject *shape = PyObject_GetAttr(node->object, st->str_shape);
    Py_ssize_t i, n;

    if (shape == NULL || !PyTuple_Check(shape)) {
        return shape == NULL ? -1 : 0;
    }
    n = PyTuple_GET_SIZE(shape);
    dim = dim < 0 ? dim + n : dim;
    for (i = 0; i < n; i++) {
        int64_t size = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
        if (i == dim) {
            node->rows = size;
        } else {
            node->shape_hash = array_mix(node->shape_hash, (uint64_t)size);
        }
    }
    return PyErr_Occurred() ? -1 : 0;
}

int
oomkit_array_mark(oomkit_state *st, oomkit_node *node, int64_t dim)
{
    Py_buffer view;
    int i;

    node->rows = -1;
    node->shape_hash = node->version = 0;
    if (PyObject_GetBuffer(node->object, &view, PyBUF_FULL_RO) < 0) {
        if (PyErr_ExceptionMatches(PyExc_MemoryError) ||
            !PyErr_ExceptionMatches(PyExc_Exception)) {
            return -1;
        }
        PyErr_Clear(); /* a dtype without a buffer */
        return array_shape(st, node, dim);
    }
    dim = dim < 0 ? dim + view.ndim : dim;
    for (i = 0; i < view.ndim; i++) {
        if (i == dim) {
            node->rows = view.shape[i];
        } else {
            node->shape_hash = array_mix(node->shape_hash, (uint64_t)view.shape[i]);
        }
    }
    node->shape_hash = array_mix(node->shape_hash, (uint64_t)view.itemsize);
    node->version = array_sample(&view);
    PyBuffer_Release(&view);
    return 0;
}

int
oomkit_array_moved(oomkit_state *st, const oomkit_node *node)
{
    oomkit_node now = *node;
    return oomkit_array_mark(st, &now, 0) < 0 ? -1 : now.version != node->version;
}

/* array[..., start : start + length, ...] in dimension `dim`: a view. */
PyObject *
oomkit_array_slice(oomkit_state *st, PyObject *array, int64_t dim, PyObject *start,
                   int64_t stop)
{
    OWNED PyObject *end = PyLong_FromLongLong(stop);
    OWNED PyObject *shape = PyObject_GetAttr(array, st->str_shape);
    OWNED PyObject *rows = NULL, *all = NULL, *index = NULL;
    int64_t i;

    if (end == NULL || shape == NULL) {
        return NULL;
    }
    if (dim < 0) {
        dim += PyObject_Length(shape);
    }
    rows = PySlice_New(start, end, NULL);
    all = PySlice_New(NULL, NULL, NULL);
    index = PyTuple_New((Py_ssize_t)dim + 1);
    if (rows == NULL || all == NULL || index == NULL) {
        return NULL;
    }
    for (i = 0; i <= dim; i++) {
        PyTuple_SET_ITEM(index, (Py_ssize_t)i, Py_NewRef(i == dim ? rows : all));
    }
    return PyObject_GetItem(array, index);
}
