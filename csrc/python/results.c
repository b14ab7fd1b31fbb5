/* A site's knowledge about its results: integers and sizes that do or do not depend on
 * the batch, and what has been said. */
#include "results.h"

#define SAID_LIMIT 512 /* keys made anew at every step must not fill the memory */

static int
fact_is_at(const oomkit_result_fact *fact, PyObject *key, Py_ssize_t position)
{
    if (key == NULL || fact->key == NULL) {
        return key == NULL && fact->key == NULL && fact->position == position;
    }
    /* Both are exact str: comparing them runs no Python code. */
    return fact->key == key || PyUnicode_Compare(fact->key, key) == 0;
}

const oomkit_result_fact *
oomkit_result_known(const oomkit_result_site *site, PyObject *key, Py_ssize_t position)
{
    int i;
    if (key != NULL && !PyUnicode_CheckExact(key)) {
        return NULL;
    }
    for (i = 0; i < site->count; i++) {
        if (fact_is_at(&site->facts[i], key, position)) {
            return &site->facts[i];
        }
    }
    return NULL;
}

/* The fact of a place, made anew where there is room; NULL where there is none. */
static oomkit_result_fact *
fact_get(oomkit_result_site *site, PyObject *key, Py_ssize_t position, int is_tensor)
{
    oomkit_result_fact *fact =
        (oomkit_result_fact *)oomkit_result_known(site, key, position);

    if (fact == NULL) {
        if (site->count == OOMKIT_RESULT_FACTS ||
            (key != NULL && !PyUnicode_CheckExact(key))) {
            return NULL;
        }
        fact = &site->facts[site->count++];
        *fact = (oomkit_result_fact){
            .key = Py_XNewRef(key), .position = position, .is_tensor = is_tensor};
    }
    return fact->is_tensor == is_tensor ? fact : NULL;
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

static void
learn_value(oomkit_state *st, oomkit_result_site *site, PyObject *key,
            Py_ssize_t position, PyObject *value, int64_t rows, int64_t dim)
{
    oomkit_result_fact *fact;
    oomkit_tensor_facts facts;

    if (PyLong_CheckExact(value)) {
        int overflow;
        long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        fact = overflow != 0 ? NULL : fact_get(site, key, position, 0);
        if (fact != NULL) {
            fact_integer(fact, number, rows);
        }
    } else if (Py_IS_TYPE(value, (PyTypeObject *)st->Tensor) &&
               facts_get(st, value, dim, &facts) && facts.ndim > 0) {
        fact = fact_get(site, key, position, 1);
        if (fact != NULL) {
            fact_shape(st, fact, value, &facts, rows, dim);
        }
    }
}

void
oomkit_result_learn_from(oomkit_state *st, oomkit_result_site *site, PyObject *result,
                         int64_t rows, int64_t dim)
{
    PyObject *key, *value; /* borrowed from result */
    Py_ssize_t position = 0, i;

    if (PyDict_Check(result)) {
        while (PyDict_Next(result, &position, &key, &value)) {
            learn_value(st, site, key, -1, value, rows, dim);
        }
        return;
    }
    if (!PyTuple_Check(result) && !PyList_Check(result)) {
        learn_value(st, site, NULL, -1, result, rows, dim);
        return;
    }
    for (i = 0; i < PySequence_Fast_GET_SIZE(result) && i < OOMKIT_RESULT_FACTS; i++) {
        value = PyList_Check(result) ? PyList_GET_ITEM(result, i)
                                     : PyTuple_GET_ITEM(result, i);
        learn_value(st, site, NULL, i, value, rows, dim);
    }
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
    return fact != NULL && !fact->is_tensor && overflow == 0 && fact->value == number &&
           fact->rows >= rows &&
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
    return fact == NULL || !fact->is_tensor || fact->size == fact->rows;
}

/* The place of such a tensor at `place` or below, as a new str; NULL without an
 * exception when there is none. Steals `place`, which may be NULL with an exception. */
static PyObject *
find_of_whole(const of_whole *w, PyObject *value, PyObject *place,
              const oomkit_result_fact *fact, int depth)
{
    PyObject *key, *inner, *found = NULL; /* borrowed, borrowed, owned */
    Py_ssize_t at = 0, i;

    if (place == NULL) {
        return NULL;
    }
    if (Py_IS_TYPE(value, (PyTypeObject *)w->st->Tensor)) {
        if (depth > 0 && tensor_is_of_whole(w, fact, value)) {
            return place;
        }
    } else if (depth < OF_WHOLE_DEPTH && PyDict_Check(value)) {
        while (found == NULL && !PyErr_Occurred() &&
               PyDict_Next(value, &at, &key, &inner)) {
            fact = depth == 0 ? oomkit_result_known(w->site, key, -1) : NULL;
            found = find_of_whole(w, inner, PyUnicode_FromFormat("%U[%R]", place, key),
                                  fact, depth + 1);
        }
    } else if (depth < OF_WHOLE_DEPTH &&
               (PyTuple_Check(value) || PyList_Check(value))) {
        for (i = 0;
             found == NULL && !PyErr_Occurred() && i < PySequence_Fast_GET_SIZE(value);
             i++) {
            inner = PyList_Check(value) ? PyList_GET_ITEM(value, i)
                                        : PyTuple_GET_ITEM(value, i);
            fact = depth == 0 ? oomkit_result_known(w->site, NULL, i) : NULL;
            found = find_of_whole(w, inner, PyUnicode_FromFormat("%U[%zd]", place, i),
                                  fact, depth + 1);
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
    return find_of_whole(&w, result, PyUnicode_FromString("result"), NULL, 0);
}

int
oomkit_result_say(oomkit_state *st, oomkit_result_site *site, const char *level,
                  PyObject *text)
{
    PyObject *done; /* owned */
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
    done = PyObject_CallMethod(st->log, level, "sO", "%s", text);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

void
oomkit_result_site_clear(oomkit_result_site *site)
{
    Py_CLEAR(site->said);
    while (site->count > 0) {
        Py_CLEAR(site->facts[--site->count].key);
    }
}
