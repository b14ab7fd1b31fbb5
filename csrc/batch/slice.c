/* The arguments of one micro-batch: containers made anew, their leaves sliced. */
#include "batch.h"
#include "../device/device.h"
#include "../py/tensor.h"

typedef struct build {
    oomkit_state *st;
    const oomkit_options *options;
    const oomkit_batch *batch;
    int64_t start, length, dim;
    PyObject *numbers[3]; /* owned: dim, start, length for narrow() */
    int whole;            /* all rows: tensors are passed as they are */
    int sliced;           /* 0 inside an element of a list of samples, and for the value
                             that split= gets */
    PyObject **made;      /* owned array of values borrowed from what is being built: by
                             node, for those that are the same again; or NULL */
} build;

static PyObject *
build_narrow(const build *b, PyObject *tensor)
{
    PyObject *stack[4] = {tensor, b->numbers[0], b->numbers[1],
                          b->numbers[2]}; /* borrowed from the node and from build */
    oomkit_tensor_facts facts;

    if (oomkit_tensor_facts_get(b->st, tensor, b->dim, &facts) < 0) {
        return NULL;
    }
    /* A sparse tensor has no views. */
    return PyObject_VectorcallMethod(
        facts.is_strided ? b->st->str_narrow : b->st->str_narrow_copy, stack, 4, NULL);
}

/* A list of the wanted rows out of one that capture did not open. */
static PyObject *
build_closed_items(const build *b, PyObject *list)
{
    if (PyList_GET_SIZE(list) != b->batch->rows) {
        PyErr_Format(b->st->SplitError,
                     "auto_batch cannot repeat the step, because it changed the length "
                     "of a list argument from %lld to %zd; make a new list instead" SEE(
                         "batch-changed"),
                     (long long)b->batch->rows, PyList_GET_SIZE(list));
        return NULL;
    }
    return PyList_GetSlice(list, (Py_ssize_t)b->start,
                           (Py_ssize_t)(b->start + b->length));
}

/* A tensor, an array, or what is closed. */
static PyObject *
build_leaf(const build *b, const oomkit_node *node, int split)
{
    if (split == OOMKIT_SPLIT_NARROW) {
        return node->kind == OOMKIT_NODE_TENSOR
                   ? build_narrow(b, node->object)
                   : oomkit_array_slice(b->st, node->object, b->dim, b->numbers[1],
                                        b->start + b->length);
    }
    return split == OOMKIT_SPLIT_ITEMS ? build_closed_items(b, node->object)
                                       : Py_NewRef(node->object);
}

/* The rows of this slice where the rows of the batch are dealt otherwise, of a leaf or
 * a list with all of them. Steals `whole`, may be NULL. New reference or NULL. */
static PyObject *
build_dealt(const build *b, PyObject *whole)
{
    PyObject *made = NULL; /* owned, returned */

    EXEMPT (b->st) {
        made = whole == NULL
                   ? NULL
                   : PyObject_CallMethod(b->batch->dealt, "rows", "OLLL", whole,
                                         (long long)b->dim, (long long)b->start,
                                         (long long)b->length);
    }
    Py_XDECREF(whole);
    return made;
}

/* The maker of the tree. What is the same object at two places is one object again. New
 * reference or NULL. */
static PyObject *
build_node(void *context, Py_ssize_t at, Py_ssize_t Py_UNUSED(number))
{
    build *b = context;
    const oomkit_node *node = &b->batch->nodes[at];
    int sliced = b->sliced;
    int split = sliced && !b->whole ? node->split : OOMKIT_SPLIT_WHOLE;
    int items = split == OOMKIT_SPLIT_ITEMS;
    int dealt = split != OOMKIT_SPLIT_WHOLE && b->batch->dealt != NULL;
    int some = items && !dealt;
    PyObject *made; /* owned */

    if (sliced && b->made != NULL && node->same >= 0 && b->made[node->same] != NULL) {
        return Py_NewRef(b->made[node->same]);
    }
    if (oomkit_node_is_open(node)) {
        b->sliced = sliced && !items;
        made = oomkit_tree_build_part(
            b->st, &b->batch->tree, at, some ? (Py_ssize_t)b->start : 0,
            some ? (Py_ssize_t)(b->start + b->length) : node->children, build_node, b);
        b->sliced = sliced;
    } else {
        made = build_leaf(b, node, dealt ? OOMKIT_SPLIT_WHOLE : split);
    }
    if (dealt && (made = build_dealt(b, made)) == Py_NotImplemented) {
        Py_SETREF(made, build_leaf(b, node, split));
    }
    if (made != NULL && split == OOMKIT_SPLIT_CUSTOM) {
        Py_SETREF(made, oomkit_splitter_cut(b->st, made, b->start, b->length));
    }
    if (sliced && b->made != NULL) {
        b->made[at] = made;
    }
    return made;
}

PyObject *
oomkit_node_whole(oomkit_state *st, const oomkit_batch *batch, Py_ssize_t index)
{
    build b = {.st = st, .batch = batch, .whole = 1};
    return build_node(&b, index, 0);
}

/* An argument that split= slices. */
static PyObject *
build_called(build *b, Py_ssize_t at)
{
    OWNED PyObject *value = build_node(b, at, 0);
    PyObject *stack[3] = {value, b->numbers[1], b->numbers[2]}; /* borrowed */

    if (value == NULL || b->whole) {
        return STEAL(value);
    }
    return PyObject_Vectorcall(b->options->split, stack, 3, NULL);
}

static PyObject *
build_argument(build *b, Py_ssize_t argument, Py_ssize_t at)
{
    if (!oomkit_node_is_split(b->batch, at)) {
        /* The very object: the step may collect into it. */
        return Py_NewRef(b->batch->args[argument]);
    }
    b->sliced = b->batch->nodes[at].split != OOMKIT_SPLIT_CALL;
    return b->sliced ? build_node(b, at, 0) : build_called(b, at);
}

/* The dimension of the argument's samples, as a number too. 0 or -1. */
static int
build_dim(build *b, Py_ssize_t argument)
{
    b->dim = oomkit_argument_dim(b->options, b->batch, argument);
    if (b->dim == INT64_MIN) {
        return -1;
    }
    Py_XSETREF(b->numbers[0], PyLong_FromLongLong(b->dim));
    return b->numbers[0] == NULL ? -1 : 0;
}

int
oomkit_batch_build(oomkit_state *st, const oomkit_options *options,
                   const oomkit_batch *batch, int64_t start, int64_t length,
                   PyObject **vector)
{
    build b = {
        .st = st,
        .options = options,
        .batch = batch,
        .start = start,
        .length = length,
        .numbers = {NULL, PyLong_FromLongLong(start), PyLong_FromLongLong(length)},
        .whole = start == 0 && length == batch->rows && !batch->views,
        .made = batch->aliases ? PyMem_Calloc((size_t)batch->count, sizeof(PyObject *))
                               : NULL};
    Py_ssize_t argument = 0, at = 0;
    int result = -1;

    if (b.numbers[1] == NULL || b.numbers[2] == NULL) {
        goto done;
    }
    if (batch->aliases && b.made == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (; argument < batch->total; argument++) {
        vector[argument] =
            build_dim(&b, argument) < 0 ? NULL : build_argument(&b, argument, at);
        if (vector[argument] == NULL) {
            goto done;
        }
        at = oomkit_node_end(batch, at);
    }
    result = 0;
done:
    while (result < 0 && argument > 0) {
        argument--;
        Py_CLEAR(vector[argument]);
    }
    PyMem_Free(b.made);
    Py_XDECREF(b.numbers[0]);
    Py_XDECREF(b.numbers[1]);
    Py_XDECREF(b.numbers[2]);
    return result;
}

PyObject *
oomkit_batch_argument(const oomkit_batch *batch, PyObject *const *vector)
{
    Py_ssize_t argument, at, count = 0;
    PyObject *found = NULL; /* borrowed from vector */
    PyObject *tuple;        /* owned */

    for (argument = 0, at = 0; argument < batch->total; argument++) {
        if (oomkit_node_is_split(batch, at)) {
            found = vector[argument];
            count++;
        }
        at = oomkit_node_end(batch, at);
    }
    if (count == 1) {
        return Py_NewRef(found);
    }
    tuple = PyTuple_New(count);
    count = 0;
    for (argument = 0, at = 0; tuple != NULL && argument < batch->total; argument++) {
        if (oomkit_node_is_split(batch, at)) {
            PyTuple_SET_ITEM(tuple, count++, Py_NewRef(vector[argument]));
        }
        at = oomkit_node_end(batch, at);
    }
    return tuple;
}

/* --- one object at two places is one object in every micro-batch --- */

/* Are two subtrees of the same object, one after the other, built in the same way? */
static int
built_alike(const oomkit_batch *batch, Py_ssize_t a, Py_ssize_t b)
{
    Py_ssize_t end = oomkit_node_end(batch, a);

    if (end - a != oomkit_node_end(batch, b) - b) {
        return 0;
    }
    for (; a < end; a++, b++) {
        if (batch->nodes[a].split != batch->nodes[b].split ||
            batch->nodes[a].object != batch->nodes[b].object) {
            return 0;
        }
    }
    return 1;
}

/* Is the dimension of the samples the same for both nodes? 1, 0 or -1. */
static int
sliced_alike(const oomkit_options *options, const oomkit_batch *batch, Py_ssize_t a,
             Py_ssize_t b)
{
    const int64_t one = oomkit_node_dim(options, batch, a),
                  two = oomkit_node_dim(options, batch, b);

    return one == INT64_MIN || two == INT64_MIN ? -1 : one == two;
}

/* Is it made anew in a micro-batch? */
static int
is_made(const oomkit_node *node)
{
    return node->split != OOMKIT_SPLIT_WHOLE || node->children > 0;
}

int
oomkit_node_aliases(const oomkit_options *options, oomkit_batch *batch)
{
    OWNED PyObject *places = PyDict_New(); /* address of an object -> its first node */
    Py_ssize_t i;

    for (i = 0; places != NULL && i < batch->count; i++) {
        oomkit_node *node = &batch->nodes[i];
        OWNED PyObject *address = NULL, *here = NULL;
        PyObject *place; /* borrowed from places */
        Py_ssize_t first;
        int alike;
        if (!is_made(node)) {
            continue;
        }
        address = PyLong_FromVoidPtr(node->object);
        place = address == NULL ? NULL : PyDict_GetItemWithError(places, address);
        if (place == NULL) {
            here = PyErr_Occurred() ? NULL : PyLong_FromSsize_t(i);
            if (here == NULL || PyDict_SetItem(places, address, here) < 0) {
                return -1;
            }
            continue;
        }
        first = PyLong_AsSsize_t(place);
        alike =
            built_alike(batch, first, i) ? sliced_alike(options, batch, first, i) : 0;
        if (alike < 0) {
            return -1;
        }
        if (alike) {
            node->same = (int32_t)first;
            batch->aliases = 1;
        }
    }
    return places == NULL ? -1 : 0;
}
