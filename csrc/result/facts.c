/* A site's knowledge about its results: integers and sizes that do or do not depend on
 * the batch, and what has been said. */
#include "facts.h"
#include "../py/errors.h"
#include "../py/tensor.h"

#define SAID_LIMIT 512 /* keys made anew at every step must not fill the memory */

static int
fact_is_at(const oomkit_result_fact *fact, const oomkit_result_path *path)
{
    int i;
    if (fact->path.depth != path->depth) {
        return 0;
    }
    for (i = path->depth - 1; i >= 0; i--) { /* the outermost differ least */
        PyObject *key = path->keys[i], *known = fact->path.keys[i]; /* borrowed */
        if (key == NULL || known == NULL) {
            if (key != known || fact->path.positions[i] != path->positions[i]) {
                return 0;
            }
        } else if (key != known && PyUnicode_Compare(key, known) != 0) {
            return 0; /* both are exact str: comparing them runs no Python code */
        }
    }
    return 1;
}

const oomkit_result_fact *
oomkit_result_known(const oomkit_result_site *site, const oomkit_result_path *path)
{
    int i;
    for (i = 0; i < path->depth; i++) {
        if (path->keys[i] != NULL && !PyUnicode_CheckExact(path->keys[i])) {
            return NULL;
        }
    }
    for (i = 0; i < site->count; i++) {
        const oomkit_result_fact *fact = &site->facts[(site->next + i) % site->count];
        if (fact_is_at(fact, path)) {
            return fact;
        }
    }
    return NULL;
}

/* The fact of a place, made anew where there is room; NULL where there is none. */
static oomkit_result_fact *
fact_get(oomkit_result_site *site, const oomkit_result_path *path,
         oomkit_result_kind kind)
{
    oomkit_result_fact *fact = (oomkit_result_fact *)oomkit_result_known(site, path);
    int i;

    if (fact == NULL) {
        if (site->count == OOMKIT_RESULT_FACTS) {
            return NULL;
        }
        for (i = 0; i < path->depth; i++) {
            if (path->keys[i] != NULL && !PyUnicode_CheckExact(path->keys[i])) {
                return NULL;
            }
        }
        fact = &site->facts[site->count++];
        *fact = (oomkit_result_fact){.path = *path, .kind = kind};
        for (i = 0; i < path->depth; i++) {
            Py_XINCREF(fact->path.keys[i]);
        }
    }
    site->next = (int)(fact - site->facts) + 1;
    return fact->kind == kind ? fact : NULL;
}

static void
fact_integer(oomkit_result_fact *fact, long long value, int64_t rows)
{
    if (fact->calls == 0 || fact->value != value) {
        fact->changes += fact->calls != 0;
        fact->value = value;
        fact->rows = 0;
    }
    fact->varied |= fact->rows != 0 && fact->rows != rows;
    fact->rows = rows > fact->rows ? rows : fact->rows;
    fact->calls++;
}

/* 1, or 0 when they cannot be had: then nothing is learned. */
static int
facts_get(oomkit_state *st, PyObject *tensor, int64_t dim, oomkit_tensor_facts *facts)
{
    if (oomkit_tensor_facts_get(st, tensor, dim, facts) < 0) {
        PyErr_Clear(); /* a healthy call must not fail for what is only noted */
        return 0;
    }
    return 1;
}

static void
fact_shape(oomkit_state *st, oomkit_result_fact *fact, PyObject *tensor,
           const oomkit_tensor_facts *now, int64_t rows, int64_t dim)
{
    int64_t i;

    if (fact->shape == now->shape_hash && fact->rows == rows &&
        fact->size == now->size) {
        return;
    }
    fact->shape = now->shape_hash;
    fact->rows = rows;
    fact->size = now->size;
    fact->square = 0;
    for (i = 0; i < now->ndim; i++) {
        oomkit_tensor_facts other;
        if (i != (dim < 0 ? dim + now->ndim : dim) &&
            facts_get(st, tensor, i, &other)) {
            fact->square |= other.size == rows;
        }
    }
}

/* An array of numpy by its buffer, which runs no Python code. */
static void
learn_array(oomkit_result_site *site, const oomkit_result_path *path, PyObject *array,
            int64_t rows, int64_t dim)
{
    oomkit_result_fact *fact;
    Py_buffer view;
    Py_ssize_t i;

    if (PyObject_GetBuffer(array, &view, PyBUF_STRIDED_RO) < 0) {
        PyErr_Clear(); /* of dates: only noted, so nothing is known of it */
        return;
    }
    dim = dim < 0 ? dim + view.ndim : dim;
    if (dim >= 0 && dim < view.ndim &&
        (fact = fact_get(site, path, OOMKIT_RESULT_ARRAY)) != NULL) {
        fact->rows = rows;
        fact->size = view.shape[dim];
        fact->square = 0;
        for (i = 0; i < view.ndim; i++) {
            fact->square |= i != dim && view.shape[i] == rows;
        }
    }
    PyBuffer_Release(&view);
}

/* Rows: as many elements as rows, always. Numbers: always as many. Else rows that were
 * chosen. Once it had another length than rows it is no list of all rows, whatever has
 * that many of them later. */
static void
fact_list(oomkit_result_fact *fact, Py_ssize_t size, int64_t rows)
{
    fact->changes |= fact->calls > 0 && fact->size != size;
    if (size != rows || fact->size == fact->rows) {
        fact->size = size;
        fact->rows = rows;
    }
    fact->varied = fact->changes && fact->size != fact->rows;
    fact->calls = 1;
}

static void
learn_value(oomkit_state *st, oomkit_result_site *site, const oomkit_result_path *path,
            PyObject *value, int64_t rows, int64_t dim)
{
    oomkit_result_fact *fact;
    oomkit_tensor_facts facts;

    if (PyLong_CheckExact(value)) {
        int overflow;
        long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        fact = overflow != 0 ? NULL : fact_get(site, path, OOMKIT_RESULT_INTEGER);
        if (fact != NULL) {
            fact_integer(fact, number, rows);
        }
    } else if (site->integers_only) {
        return;
    } else if (Py_IS_TYPE(value, (PyTypeObject *)st->Tensor)) {
        fact = facts_get(st, value, dim, &facts) && facts.ndim > 0
                   ? fact_get(site, path, OOMKIT_RESULT_ARRAY)
                   : NULL;
        if (fact != NULL) {
            fact_shape(st, fact, value, &facts, rows, dim);
        }
    } else if (PyList_CheckExact(value)) {
        fact = fact_get(site, path, OOMKIT_RESULT_LIST);
        if (fact != NULL) {
            fact_list(fact, PyList_GET_SIZE(value), rows);
        }
    } else if (strcmp(Py_TYPE(value)->tp_name, "numpy.ndarray") == 0) {
        learn_array(site, path, value, rows, dim);
    }
}

static int
is_container(PyObject *value)
{
    return PyDict_Check(value) || PyTuple_Check(value) || PyList_Check(value);
}

/* The value at `path`, and what is in it. */
static void
learn_from(oomkit_state *st, oomkit_result_site *site, const oomkit_result_path *path,
           PyObject *value, int64_t rows, int64_t dim)
{
    oomkit_result_path inner;
    PyObject *key, *item; /* borrowed from value */
    Py_ssize_t position = 0, i;

    learn_value(st, site, path, value, rows, dim);
    if (path->depth == OOMKIT_RESULT_DEPTH || !is_container(value)) {
        return;
    }
    inner = *path;
    inner.depth++;
    if (PyDict_Check(value)) {
        for (i = 0;
             i < OOMKIT_RESULT_FACTS && PyDict_Next(value, &position, &key, &item);
             i++) {
            inner.keys[path->depth] = key;
            inner.positions[path->depth] = -1;
            learn_from(st, site, &inner, item, rows, dim);
        }
        return;
    }
    if (PySequence_Fast_GET_SIZE(value) > OOMKIT_RESULT_FACTS) {
        return; /* rows rather than places */
    }
    for (i = 0; i < PySequence_Fast_GET_SIZE(value); i++) {
        inner.keys[path->depth] = NULL;
        inner.positions[path->depth] = i;
        item = PyList_Check(value) ? PyList_GET_ITEM(value, i)
                                   : PyTuple_GET_ITEM(value, i);
        learn_from(st, site, &inner, item, rows, dim);
    }
}

void
oomkit_result_learn_from(oomkit_state *st, oomkit_result_site *site, PyObject *result,
                         int64_t rows, int64_t dim)
{
    oomkit_result_path path = {0};

    site->next = 0;
    learn_from(st, site, &path, result, rows, dim);
}

#define SURE 3 /* whole calls that gave one number */
#define OFTEN 8

/* A number that changes from call to call may be a count, the same one by chance. */
int
oomkit_result_is_constant(const oomkit_result_fact *fact, PyObject *value, int64_t rows,
                          int *sure)
{
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);

    *sure = fact != NULL && (fact->varied || fact->calls >= SURE);
    return fact != NULL && fact->kind == OOMKIT_RESULT_INTEGER && overflow == 0 &&
           fact->value == number && fact->rows >= rows &&
           (fact->changes == 0 ||
            (fact->calls >= OFTEN && fact->changes * 4 <= fact->calls));
}

#define OF_WHOLE_DEPTH 4

typedef struct of_whole {
    oomkit_state *st;
    const oomkit_result_site *site;
    int64_t total, dim;
} of_whole;

/* Has the tensor all rows of the batch where it should have those of the micro-batch?
 */
static int
tensor_is_of_whole(const of_whole *w, const oomkit_result_fact *fact, PyObject *tensor)
{
    oomkit_tensor_facts facts;

    if (!facts_get(w->st, tensor, w->dim, &facts) || facts.ndim < 1 ||
        facts.size != w->total) {
        return 0;
    }
    return fact == NULL || fact->kind != OOMKIT_RESULT_ARRAY ||
           fact->size == fact->rows;
}

/* The place of such a tensor at `place` or below, as a new str; NULL without an
 * exception when there is none. Steals `place`, which may be NULL with an exception.
 * `path` leads to the value as long as facts do, and is NULL below. */
static PyObject *
find_of_whole(const of_whole *w, PyObject *value, PyObject *place,
              const oomkit_result_path *path, int depth)
{
    oomkit_result_path inner;
    const oomkit_result_path *down = NULL; /* &inner, or NULL */
    PyObject *key, *item, *found = NULL;   /* borrowed, borrowed, owned */
    Py_ssize_t at = 0, i;

    if (place == NULL) {
        return NULL;
    }
    if (path != NULL && depth < OOMKIT_RESULT_DEPTH) {
        inner = *path;
        inner.depth++;
        down = &inner;
    }
    if (Py_IS_TYPE(value, (PyTypeObject *)w->st->Tensor)) {
        if (depth > 0 &&
            tensor_is_of_whole(
                w, path == NULL ? NULL : oomkit_result_known(w->site, path), value)) {
            return place;
        }
    } else if (depth < OF_WHOLE_DEPTH && PyDict_Check(value)) {
        while (found == NULL && !PyErr_Occurred() &&
               PyDict_Next(value, &at, &key, &item)) {
            if (down != NULL && depth < OOMKIT_RESULT_DEPTH) {
                inner.keys[depth] = key;
                inner.positions[depth] = -1;
            }
            found = find_of_whole(w, item, PyUnicode_FromFormat("%U[%R]", place, key),
                                  down, depth + 1);
        }
    } else if (depth < OF_WHOLE_DEPTH &&
               (PyTuple_Check(value) || PyList_Check(value))) {
        for (i = 0;
             found == NULL && !PyErr_Occurred() && i < PySequence_Fast_GET_SIZE(value);
             i++) {
            if (down != NULL && depth < OOMKIT_RESULT_DEPTH) {
                inner.keys[depth] = NULL;
                inner.positions[depth] = i;
            }
            item = PyList_Check(value) ? PyList_GET_ITEM(value, i)
                                       : PyTuple_GET_ITEM(value, i);
            found = find_of_whole(w, item, PyUnicode_FromFormat("%U[%zd]", place, i),
                                  down, depth + 1);
        }
    }
    Py_DECREF(place);
    return found;
}

PyObject *
oomkit_result_of_whole(oomkit_state *st, const oomkit_result_site *site,
                       PyObject *result, int64_t total, int64_t dim)
{
    of_whole w = {st, site, total, dim};
    oomkit_result_path path = {0};

    return find_of_whole(&w, result, PyUnicode_FromString("result"), &path, 0);
}

int
oomkit_result_say(oomkit_state *st, oomkit_result_site *site, const char *level,
                  PyObject *text)
{
    int known;

    if (site->said == NULL) {
        site->said = PySet_New(NULL);
        if (site->said == NULL) {
            return -1;
        }
    }
    known = PySet_Contains(site->said, text);
    if (known != 0) {
        return known < 0 ? -1 : 0;
    }
    if (PySet_GET_SIZE(site->said) >= SAID_LIMIT) {
        return 0;
    }
    if (PySet_Add(site->said, text) < 0) {
        return -1;
    }
    return oomkit_say(st, level, "sO", "%s", text);
}

void
oomkit_result_site_clear(oomkit_result_site *site)
{
    int i;

    Py_CLEAR(site->said);
    Py_CLEAR(site->figures);
    while (site->count > 0) {
        oomkit_result_path *path = &site->facts[--site->count].path;
        for (i = 0; i < path->depth; i++) {
            Py_CLEAR(path->keys[i]);
        }
    }
}
