/* The table of places that a step's code leads to. It holds what the function itself
 * holds (its variables and defaults), and none of the objects on the way. */
#include "plain_state.h"
#include "../call/call.h"
#include "../call/step.h"

void
oomkit_plain_site_release(oomkit_plain_site *site)
{
    Py_ssize_t i;

    if (site == NULL || --site->refs > 0) {
        return;
    }
    for (i = 0; i < site->count; i++) {
        Py_CLEAR(site->nodes[i].key);
        Py_CLEAR(site->nodes[i].name);
    }
    oomkit_plain_drop(site->spare);
    Py_CLEAR(site->streams);
    Py_CLEAR(site->said);
    PyMem_Free(site->nodes);
    PyMem_Free(site);
}

void
oomkit_plain_share(oomkit_plain_found *to, const oomkit_plain_found *from)
{
    oomkit_plain_site *before = to->site;

    *to = from == NULL ? (oomkit_plain_found){NULL, 0} : *from;
    if (to->site != NULL) {
        to->site->refs++;
    }
    oomkit_plain_site_release(before);
}

int
oomkit_plain_site_traverse(oomkit_plain_site *site, visitproc visit, void *arg)
{
    Py_ssize_t i;

    if (site == NULL || site->refs > 1) { /* a call in progress holds it */
        return 0;
    }
    for (i = 0; i < site->count; i++) {
        Py_VISIT(site->nodes[i].key);
    }
    Py_VISIT(site->streams);
    return 0;
}

/* One row of the table: (parent, kind, key, what, name). 0 or -1. */
static int
site_row(oomkit_plain_site *site, PyObject *row)
{
    oomkit_plain_node *node = &site->nodes[site->count];
    PyObject *key, *name; /* borrowed from row */
    int kind, what;

    if (!PyArg_ParseTuple(row, "niOiU", &node->parent, &kind, &key, &what, &name)) {
        return -1;
    }
    if (node->parent < -1 || node->parent >= site->count) {
        PyErr_SetString(PyExc_ValueError,
                        "oomkit found a place before its parent" SEE("internal-error"));
        return -1;
    }
    node->kind = (uint8_t)kind;
    node->what = (uint8_t)what;
    node->key = Py_NewRef(key);
    node->name = Py_NewRef(name);
    if (PyUnicode_CheckExact(node->key)) {
        PyUnicode_InternInPlace(&node->key);
    }
    site->count++;
    return 0;
}

/* From what oomkit._code.plain_state.places has returned. NULL with an exception. */
static oomkit_plain_site *
site_new(PyObject *found)
{
    oomkit_plain_site *site;
    PyObject *rows, *streams; /* borrowed from found */
    Py_ssize_t i, n;
    int result = 0;

    if (!PyArg_ParseTuple(found, "O!O!", &PyTuple_Type, &rows, &PyTuple_Type,
                          &streams)) {
        return NULL;
    }
    n = PyTuple_GET_SIZE(rows);
    site = PyMem_Calloc(1, sizeof(*site));
    if (site == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    site->refs = 1;
    site->streams = Py_NewRef(streams);
    site->said = PySet_New(NULL);
    site->nodes = PyMem_Calloc((size_t)n + 1, sizeof(*site->nodes));
    if (site->nodes == NULL) {
        PyErr_NoMemory();
        result = -1;
    }
    for (i = 0; result == 0 && site->said != NULL && i < n; i++) {
        result = site_row(site, PyTuple_GET_ITEM(rows, i));
    }
    if (result < 0 || site->said == NULL) {
        KEEPING_EXCEPTION {
            oomkit_plain_site_release(site);
        }
        return NULL;
    }
    return site;
}

/* oomkit._code.plain_state.places, while nothing compiles its frames: the call may come
 * out of a function that torch.compile() has made. New reference or NULL. */
static PyObject *
site_look(oomkit_call *call, PyObject *positional, PyObject *named)
{
    oomkit_state *st = call->st;
    OWNED PyObject *before = NULL, *modules = NULL;
    PyObject *found; /* owned */

    modules = oomkit_participants_modules(call->step->parts);
    if (modules == NULL) {
        return NULL;
    }
    if (st->set_eval_frame != NULL) {
        before = PyObject_CallOneArg(st->set_eval_frame, Py_None);
        if (before == NULL) {
            return NULL;
        }
    }
    found = PyObject_CallFunctionObjArgs(
        st->plain_places, call->given.func, positional, named,
        call->options->rng == OOMKIT_RNG_ALL ? Py_True : Py_False, modules, NULL);
    if (before != NULL) {
        KEEPING_EXCEPTION {
            OWNED PyObject *after = PyObject_CallOneArg(st->set_eval_frame, before);
            if (after == NULL) {
                Py_CLEAR(found);
            }
        }
    }
    return found;
}

/* Is there a place in `site` that is reached in the same way? Its number, or -1. */
static Py_ssize_t
site_find(const oomkit_plain_site *site, const oomkit_plain_node *node,
          Py_ssize_t parent)
{
    Py_ssize_t i;

    for (i = 0; i < site->count; i++) {
        const oomkit_plain_node *other = &site->nodes[i];
        if (other->kind == node->kind && other->parent == parent &&
            (other->key == node->key ||
             (PyUnicode_CheckExact(other->key) && PyUnicode_CheckExact(node->key) &&
              PyUnicode_Compare(other->key, node->key) == 0))) {
            return i;
        }
    }
    return -1;
}

/* Adds the places of `before` that were not found again. 0 or -1. */
static int
site_merge(oomkit_plain_site *site, const oomkit_plain_site *before)
{
    Py_ssize_t i, total = site->count + before->count;
    OWNED_MEMORY Py_ssize_t *number =
        PyMem_Calloc((size_t)before->count + 1, sizeof(*number));
    void *grown = number == NULL ? NULL
                                 : PyMem_Realloc(site->nodes,
                                                 (size_t)total * sizeof(*site->nodes));

    if (grown == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    site->nodes = grown;
    for (i = 0; i < before->count; i++) {
        oomkit_plain_node node = before->nodes[i];
        node.parent = node.parent < 0 ? -1 : number[node.parent];
        number[i] = site_find(site, &node, node.parent);
        if (number[i] >= 0) {
            site->nodes[number[i]].what |= node.what;
            continue;
        }
        Py_INCREF(node.key);
        Py_INCREF(node.name);
        number[i] = site->count;
        site->nodes[site->count++] = node;
    }
    return 0;
}

/* Only what has places or streams is kept: a step without pays for one look at NULL. */
int
oomkit_plain_find(oomkit_call *call, int again)
{
    oomkit_plain_found *places = call->given.places;
    OWNED PyObject *positional = NULL, *named = NULL, *found = NULL;
    oomkit_plain_site *site = NULL, *before;

    if (call->st->plain_places == NULL) {
        return 0;
    }
    if (oomkit_effects_arguments(call, &positional, &named) < 0) {
        return -1;
    }
    found = site_look(call, positional, named);
    if (found == NULL) {
        return -1;
    }
    if (found != Py_None) {
        site = site_new(found);
    }
    if (PyErr_Occurred()) {
        return -1;
    }
    places->looked = again ? 2 : places->looked == 0 ? 1 : places->looked;
    before = places->site;
    if (again && site != NULL && before != NULL && site_merge(site, before) < 0) {
        KEEPING_EXCEPTION {
            oomkit_plain_site_release(site);
        }
        return -1;
    }
    if (again && site == NULL) {
        return 0; /* what was found before is as good */
    }
    places->site = site;
    oomkit_plain_site_release(before);
    return 0;
}
