/* Arguments that can be read in two ways: refused, with the candidates. */
#include "layout.h"
#include "../py/tensor.h"

#include <string.h>

/* The shape of a tensor or array as a tuple. New reference; NULL without an exception
 * where there is none. */
static PyObject *
leaf_shape(const oomkit_find *f, Py_ssize_t index)
{
    const oomkit_node *node = &f->batch->nodes[index];
    oomkit_tensor_facts facts;
    PyObject *shape; /* owned */

    if (node->kind != OOMKIT_NODE_TENSOR && node->kind != OOMKIT_NODE_ARRAY) {
        return NULL;
    }
    if (node->kind == OOMKIT_NODE_TENSOR &&
        (oomkit_tensor_facts_get(f->st, node->object, 0, &facts) < 0 ||
         facts.ndim < 0)) {
        return NULL; /* nested */
    }
    shape = PyObject_GetAttr(node->object, f->st->str_shape);
    if (shape != NULL && !PyTuple_Check(shape)) {
        Py_CLEAR(shape);
    }
    return shape;
}

int
oomkit_find_dimensions(const oomkit_find *f, Py_ssize_t index)
{
    OWNED PyObject *shape = leaf_shape(f, index);

    if (shape == NULL) {
        return PyErr_Occurred() ? -2 : -1;
    }
    return (int)PyTuple_GET_SIZE(shape);
}

int
oomkit_find_has_size(const oomkit_find *f, int64_t size)
{
    Py_ssize_t i, k;
    int found = 0;

    for (i = 0; found == 0 && size > 1 && i < f->batch->count; i++) {
        OWNED PyObject *shape = NULL;
        int passed = 0;
        if (f->batch->nodes[i].split != OOMKIT_SPLIT_NARROW) {
            continue;
        }
        shape = leaf_shape(f, i);
        for (k = 0; shape != NULL && k < PyTuple_GET_SIZE(shape); k++) {
            int64_t each = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, k));
            if (each == f->batch->rows && !passed) {
                passed = 1; /* the dimension of the samples, or one like it */
                continue;
            }
            found |= each == size;
        }
        if (PyErr_Occurred()) {
            return -1;
        }
    }
    return found;
}

/* --- samples or columns --- */

static int
keys_equal(PyObject *a, PyObject *b)
{
    return a == b || (a != NULL && b != NULL && PyUnicode_Check(a) &&
                      PyUnicode_Check(b) && PyUnicode_Compare(a, b) == 0);
}

/* Two containers of the same structure, with the same keys. */
static int
same_structure(const oomkit_batch *batch, Py_ssize_t a, Py_ssize_t b)
{
    Py_ssize_t end = oomkit_node_end(batch, a), i;

    if (end - a != oomkit_node_end(batch, b) - b || batch->nodes[a].children == 0) {
        return 0;
    }
    for (i = 0; a + i < end; i++) {
        const oomkit_node *one = &batch->nodes[a + i], *two = &batch->nodes[b + i];
        if (one->kind != two->kind || one->children != two->children ||
            (i > 0 && !keys_equal(one->key, two->key))) {
            return 0;
        }
    }
    return 1;
}

/* A list (or tuple) of two or more dictionaries, objects or tuples alike, or of lists
 * that would be cut and are no longer than it is: [images, labels] are columns. */
static int
may_be_samples(const oomkit_batch *batch, Py_ssize_t index)
{
    const oomkit_node *node = &batch->nodes[index];
    Py_ssize_t number, child;

    if ((!PyList_CheckExact(node->object) && !PyTuple_CheckExact(node->object)) ||
        node->children < 2 || node->split == OOMKIT_SPLIT_ITEMS ||
        (batch->nodes[index + 1].kind == OOMKIT_NODE_LIST &&
         (batch->nodes[index + 1].children != batch->rows ||
          batch->nodes[index + 1].children > node->children)) ||
        !oomkit_node_holds_tensor(batch, index)) {
        return 0;
    }
    for (number = 1, child = oomkit_node_end(batch, index + 1); number < node->children;
         number++, child = oomkit_node_end(batch, child)) {
        if (!same_structure(batch, index + 1, child)) {
            return 0;
        }
    }
    return 1;
}

int
oomkit_is_floating(int32_t dtype)
{
    return (dtype >= 5 && dtype <= 7) || dtype == 15; /* c10::ScalarType */
}

/* A list (or tuple) of tensors alike that may be samples: of different sizes, images
 * [3, H, W], or many vectors. Columns are few, or differ in dimensions and dtype. 1, 0
 * or -1. */
static int
may_be_tensors(const oomkit_find *f, Py_ssize_t index, int inner)
{
    const oomkit_batch *batch = f->batch;
    const oomkit_node *node = &batch->nodes[index], *child = node + 1;
    oomkit_tensor_facts first = {0};
    Py_ssize_t i;
    int ragged = 0, image;

    if ((!PyList_CheckExact(node->object) && !PyTuple_CheckExact(node->object)) ||
        node->children < 2 || node->split == OOMKIT_SPLIT_ITEMS ||
        (inner && node->key == NULL && !oomkit_node_is_zipped(batch, index))) {
        return 0;
    }
    for (i = 0; i < node->children; i++, child++) {
        oomkit_tensor_facts facts;
        if (child->kind != OOMKIT_NODE_TENSOR) {
            return 0;
        }
        if (oomkit_tensor_facts_get(f->st, child->object, 0, &facts) < 0) {
            return -1;
        }
        if (i > 0 && (facts.ndim != first.ndim || facts.dtype != first.dtype)) {
            return 0;
        }
        ragged |= i > 0 && facts.shape_hash != first.shape_hash;
        first = facts;
    }
    image = first.ndim == 3 && (first.size == 1 || first.size == 3 || first.size == 4);
    if (node->children < 4) {
        return image && ragged;
    }
    return image || (ragged && first.ndim <= 3) ||
           (first.ndim <= 2 && oomkit_is_floating(first.dtype));
}

static Py_ssize_t
count_sliced(const oomkit_batch *batch, Py_ssize_t index, Py_ssize_t end)
{
    Py_ssize_t count = 0;
    for (; index < end; index++) {
        count += batch->nodes[index].split != OOMKIT_SPLIT_WHOLE;
    }
    return count;
}

static int
ambiguous_refuse_samples(const oomkit_find *f, Py_ssize_t index)
{
    const oomkit_node *node = &f->batch->nodes[index];
    OWNED PyObject *path = oomkit_node_path(f->batch, f->names, index);

    if (path == NULL) {
        return -1;
    }
    return oomkit_find_raise(
        f, index,
        PyUnicode_FromFormat(
            "%U is a '%.200s' of %zd similar items, which may be %zd samples, or "
            "columns of %lld rows; for samples pass split=lambda batch, start, length: "
            "batch[start : start + length], for columns put them into a dict",
            path, Py_TYPE(node->object)->tp_name, node->children, node->children,
            (long long)f->batch->rows));
}

/* Is the list an argument of its own, and nothing beside it that could have a part for
 * each of its samples? */
static int
is_all_there_is(const oomkit_find *f, Py_ssize_t list)
{
    Py_ssize_t argument, index;
    int found = 0;

    EACH_ARGUMENT (f, argument, index) {
        PyObject *object = f->batch->nodes[index].object; /* borrowed from the node */
        if (index == list) {
            found = 1;
        } else if (object != Py_None && !PyLong_Check(object) &&
                   !PyFloat_Check(object) && !PyUnicode_Check(object) &&
                   !PyObject_TypeCheck(object, (PyTypeObject *)f->st->Module) &&
                   !PyObject_TypeCheck(object, (PyTypeObject *)f->st->Optimizer)) {
            return 0;
        }
    }
    return found;
}

/* Taken for samples, with the refusal in flight for where that does not prove to be so.
 * 0 or -1. */
static int
ambiguous_try_samples(const oomkit_find *f, Py_ssize_t index)
{
    oomkit_batch *batch = f->batch;
    PyObject *exception; /* owned */

    if (!PyErr_ExceptionMatches(f->st->SplitError)) {
        return -1;
    }
    exception = oomkit_exception_take();
    Py_XSETREF(batch->ambiguous, PyObject_Str(exception));
    Py_DECREF(exception);
    oomkit_node_unmark(batch, index);
    batch->nodes[index].split = OOMKIT_SPLIT_ITEMS;
    batch->rows = batch->nodes[index].children;
    return batch->ambiguous == NULL ? -1 : 0;
}

/* All that is sliced lies in lists of things alike: samples that were not collated, or
 * columns? 0 or -1. */
static int
ambiguous_samples(const oomkit_find *f)
{
    const oomkit_batch *batch = f->batch;
    Py_ssize_t inside = 0, first = -1, i = 0, root_end = 0;

    while (i < batch->count) {
        int inner = i < root_end; /* no argument of its own */
        int samples = may_be_samples(batch, i) ? 1 : may_be_tensors(f, i, inner);
        Py_ssize_t sliced = 0;
        if (samples < 0) {
            return -1;
        }
        root_end = inner ? root_end : oomkit_node_end(batch, i);
        if (samples) {
            Py_ssize_t end = oomkit_node_end(batch, i);
            sliced = count_sliced(batch, i, end);
            first = sliced > 0 && first < 0 ? i : first;
            i = end;
        } else {
            i++;
        }
        inside += sliced;
    }
    if (first < 0 || inside != count_sliced(batch, 0, batch->count)) {
        return 0;
    }
    return ambiguous_refuse_samples(f, first) < 0 &&
                   (!batch->provable || !is_all_there_is(f, first))
               ? -1
               : ambiguous_try_samples(f, first);
}

/* --- which argument --- */

static int
most_dimensions(const oomkit_find *f, Py_ssize_t index, Py_ssize_t *where)
{
    Py_ssize_t end = oomkit_node_end(f->batch, index);
    int most = 0;

    for (; index < end; index++) {
        int dimensions =
            f->batch->nodes[index].rows > 1 ? oomkit_find_dimensions(f, index) : 0;
        if (dimensions < -1) {
            return -1;
        }
        if (dimensions > most) {
            most = dimensions;
            *where = index;
        }
    }
    return most;
}

/* One lone tensor gave the rows, and a later argument holds one of more dimensions and
 * of another size: step(mean, images). 0 or -1. */
static int
ambiguous_first(const oomkit_find *f)
{
    const oomkit_batch *batch = f->batch;
    Py_ssize_t argument, index, lone = f->first, other = 0;
    int most;

    if (f->named || count_sliced(batch, 0, batch->count) != 1 ||
        batch->nodes[f->first].split != OOMKIT_SPLIT_NARROW) {
        return 0;
    }
    most = most_dimensions(f, f->first, &lone);
    if (most < 0) {
        return -1;
    }
    EACH_ARGUMENT (f, argument, index) {
        const oomkit_seen *seen = oomkit_find_seen(f, argument);
        OWNED PyObject *one = NULL, *two = NULL;
        int dimensions, known;
        if (index <= f->first || f->roles[argument] != OOMKIT_ROLE_OTHER ||
            (seen != NULL && seen->size_stays)) {
            continue;
        }
        dimensions = most_dimensions(f, index, &other);
        if (dimensions < 0) {
            return -1;
        }
        if (dimensions <= most) {
            continue;
        }
        known = oomkit_find_has_size(f, batch->nodes[other].rows);
        if (known != 0) {
            return known < 0 ? -1 : 0;
        }
        one = oomkit_find_describe(f, lone);
        two = oomkit_find_describe(f, other);
        if (one == NULL || two == NULL) {
            return -1;
        }
        return oomkit_find_raise(
            f, f->first,
            PyUnicode_FromFormat(
                "%U, %U, and either may be the batch; name it with batch=..., or the "
                "other one with static=...",
                one, two));
    }
    return 0;
}

/* An object before a lone tensor that holds tensors of its own: step(sample, scale). 0
 * or -1. */
static int
ambiguous_object(const oomkit_find *f)
{
    Py_ssize_t argument, index;

    if (count_sliced(f->batch, 0, f->batch->count) > 1) {
        return 0;
    }
    EACH_ARGUMENT (f, argument, index) {
        const oomkit_node *node = &f->batch->nodes[index];
        OWNED PyObject *one = NULL;
        int holds;
        if (f->named || index >= f->first) {
            return 0;
        }
        if (f->roles[argument] != OOMKIT_ROLE_OTHER ||
            node->kind != OOMKIT_NODE_OTHER) {
            continue;
        }
        holds = oomkit_object_holds_tensor(f->st, node->object, 0, -1, 1);
        if (holds == 0) {
            continue;
        }
        one = holds < 0 ? NULL : oomkit_find_describe(f, f->first);
        if (one == NULL) {
            return -1;
        }
        return oomkit_find_raise(
            f, index,
            PyUnicode_FromFormat(
                "it is a '%.200s' that holds tensors, %U, and either may be the batch; "
                "name it with batch=..., or the other one with static=...; a type of "
                "your own is split by oomkit.register_splitter(type, split=...)",
                Py_TYPE(node->object)->tp_name, one));
    }
    return 0;
}

/* batch["class_weights"], as many as rows by chance. 0, or -1 with SplitError. */
static int
ambiguous_weights(const oomkit_find *f)
{
    Py_ssize_t i;

    for (i = 0; i < f->batch->count; i++) {
        const oomkit_node *node = &f->batch->nodes[i];
        OWNED PyObject *one = NULL, *path = NULL;
        const char *key; /* borrowed from the node */
        int dimensions;
        if (node->split != OOMKIT_SPLIT_NARROW || node->key == NULL ||
            !PyUnicode_Check(node->key)) {
            continue;
        }
        key = PyUnicode_AsUTF8(node->key);
        if (key == NULL) {
            if (!PyErr_ExceptionMatches(PyExc_UnicodeError)) {
                return -1; /* without memory to read it, it may be one of these */
            }
            PyErr_Clear(); /* not a name that can be written: not one of these */
            continue;
        }
        if (strstr(key, "class_weight") == NULL && strstr(key, "pos_weight") == NULL) {
            continue;
        }
        dimensions = oomkit_find_dimensions(f, i);
        if (dimensions < 0 && PyErr_Occurred()) {
            return -1;
        }
        if (dimensions != 1) {
            continue;
        }
        one = oomkit_find_describe(f, i);
        path = oomkit_node_path(f->batch, f->names, i);
        if (one == NULL || path == NULL) {
            return -1;
        }
        return oomkit_find_raise(
            f, i,
            PyUnicode_FromFormat(
                "%U, as many as rows, and its name says one per class; pass it whole "
                "with static=\"%U\", or give it another name",
                one, path));
    }
    return 0;
}

int
oomkit_find_ambiguity(const oomkit_find *f)
{
    if (f->options->split != NULL) {
        return 0;
    }
    return ambiguous_samples(f) < 0 || ambiguous_first(f) < 0 ||
                   ambiguous_object(f) < 0 || ambiguous_weights(f) < 0
               ? -1
               : 0;
}
