/* Joining values of a type that was registered with a join=. */
#include "join_rules.h"
#include "../py/tensor.h"
#include "../tree/kinds.h"
#include "../tree/splitters.h"

/* Did the tensors at element `number` of these tuples require grad? 1, 0 or -1. */
static int
element_required(const oomkit_rules *r, PyObject *const *values, Py_ssize_t number)
{
    Py_ssize_t i;
    int found = 0;

    for (i = 0; found == 0 && i < r->count; i++) {
        oomkit_kept kept;
        if (!PyTuple_Check(values[i]) || number >= PyTuple_GET_SIZE(values[i])) {
            continue;
        }
        if (oomkit_kept_get(r->marks, r->first + i, PyTuple_GET_ITEM(values[i], number),
                            &kept) < 0) {
            return -1;
        }
        found = kept.required;
    }
    return found;
}

/* A joined tuple with elements that refuse gradients where the parts had some. New
 * reference or NULL. */
static PyObject *
tuple_refusing(const oomkit_rules *r, const oomkit_place *where,
               PyObject *const *values, PyObject *joined)
{
    OWNED PyObject *list = PySequence_List(joined);
    Py_ssize_t i;

    for (i = 0; list != NULL && i < PyList_GET_SIZE(list); i++) {
        PyObject *item = PyList_GET_ITEM(list, i); /* borrowed from list */
        oomkit_place inner = {.outer = where, .number = i};
        int required =
            oomkit_tensor_check(r->st, item) ? element_required(r, values, i) : 0;
        PyObject *refusing; /* owned, stolen by the list */
        if (required == 0) {
            continue;
        }
        refusing =
            required < 0 ? NULL : oomkit_join_refusing(r, &inner, Py_NewRef(item));
        if (refusing == NULL || PyList_SetItem(list, i, refusing) < 0) {
            return NULL;
        }
    }
    return list == NULL ? NULL : oomkit_output_tuple(r->st, joined, STEAL(list));
}

PyObject *
oomkit_join_custom(const oomkit_rules *r, const oomkit_place *where,
                   PyObject *const *values)
{
    OWNED PyObject *list = PyList_New(r->count), *rows = PyList_New(r->count);
    OWNED PyObject *joined = NULL;
    Py_ssize_t i;
    int tuple;

    for (i = 0; list != NULL && rows != NULL && i < r->count; i++) {
        PyObject *number = PyLong_FromLongLong(r->rows[i]); /* stolen by rows */
        if (number == NULL) {
            return NULL;
        }
        PyList_SET_ITEM(list, i, Py_NewRef(values[i]));
        PyList_SET_ITEM(rows, i, number);
    }
    if (list == NULL || rows == NULL) {
        return NULL;
    }
    joined = oomkit_splitter_join(r->st, list, rows);
    tuple = joined == NULL ? -1 : oomkit_output_is_tuple(r->st, joined);
    return tuple < 0    ? NULL
           : tuple == 1 ? tuple_refusing(r, where, values, joined)
                        : STEAL(joined);
}
