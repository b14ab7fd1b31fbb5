/* Proofs that outlive a run: text for a checkpoint or for the file of sizes, and what
 * an earlier run has noted (oomkit/_proof/kept.py). */
#include "sizes.h"

PyObject *
oomkit_proven_text(const oomkit_step *step, PyObject *recalled, int own)
{
    OWNED PyObject *list = PyList_New(0);
    int i;

    for (i = 0; own && list != NULL && i < OOMKIT_PROVEN; i++) {
        const oomkit_proven *proven = &step->proven[i];
        OWNED PyObject *item = NULL;
        if (proven->key == 0 || proven->level != OOMKIT_PROVEN_FULLY) {
            continue;
        }
        item = Py_BuildValue("KOOi", (unsigned long long)proven->key,
                             proven->rule == NULL ? Py_None : proven->rule,
                             proven->tried == NULL ? Py_None : proven->tried,
                             (int)proven->labels);
        if (item == NULL || PyList_Append(list, item) < 0) {
            return NULL;
        }
    }
    if (list == NULL) {
        return NULL;
    }
    return PyObject_CallMethod(
        step->st->proof, "noted", "OOOO", step->func, list,
        recalled == NULL ? Py_None : recalled,
        !own || step->results.figures == NULL ? Py_None : step->results.figures);
}

int
oomkit_proven_write(oomkit_step *step)
{
    OWNED PyObject *text = oomkit_proven_text(step, step->recalled, 1);

    if (text == NULL) {
        return -1;
    }
    Py_XSETREF(step->proven_text, text == Py_None ? NULL : Py_NewRef(text));
    return 0;
}

int
oomkit_proven_put(const oomkit_step *step, PyObject *dict)
{
    return step->proven_text == NULL
               ? 0
               : PyDict_SetItemString(dict, "proven", step->proven_text);
}

/* Appends a text of an earlier run. 0 or -1. */
static int
recalled_text(PyObject **list, PyObject *text)
{
    if (text == NULL || !PyUnicode_Check(text)) {
        return 0;
    }
    if (*list == NULL && (*list = PyList_New(0)) == NULL) {
        return -1;
    }
    return PyList_Append(*list, text);
}

int
oomkit_recalled_add(PyObject **list, PyObject *dict)
{
    return recalled_text(list, oomkit_item(dict, "proven"));
}

uint64_t
oomkit_proven_print(const oomkit_step *step)
{
    return step->proven_text == NULL ? 0 : (uint64_t)PyObject_Hash(step->proven_text);
}

/* What earlier runs have shown of numbers in the results, beside what this one has. 0
 * or -1. */
static int
recall_figures(oomkit_step *step)
{
    OWNED PyObject *found = PyObject_CallMethod(step->st->proof, "recalled_figures",
                                                "OO", step->func, step->recalled);

    if (found == NULL) {
        return -1;
    }
    if (PyDict_GET_SIZE(found) > 0) {
        if (step->results.figures != NULL &&
            PyDict_Update(found, step->results.figures) < 0) {
            return -1;
        }
        Py_XSETREF(step->results.figures, Py_NewRef(found));
    }
    return 0;
}

oomkit_proven *
oomkit_proven_recall(oomkit_call *call)
{
    oomkit_step *step = call->step;
    oomkit_proven *place;
    OWNED PyObject *found = NULL, *before_tried = NULL, *before = NULL;
    PyObject *rule, *tried; /* borrowed from found */
    int labels;

    if (step->recalled == NULL) {
        return NULL;
    }
    found =
        PyObject_CallMethod(step->st->proof, "recalled", "OOK", step->func,
                            step->recalled, (unsigned long long)call->shape.proof_key);
    if (found == NULL || found == Py_None ||
        !PyArg_ParseTuple(found, "OOp", &rule, &tried, &labels) ||
        recall_figures(step) < 0) {
        return NULL;
    }
    place = &step->proven[step->proven_next++ % OOMKIT_PROVEN];
    before = place->rule;
    before_tried = place->tried;
    memset(place, 0, sizeof(*place));
    place->key = call->shape.proof_key;
    place->rule = rule == Py_None ? NULL : Py_NewRef(rule);
    place->tried = Py_NewRef(tried);
    place->calls = 1; /* losses are compared in this call */
    place->level = OOMKIT_PROVEN_FULLY;
    place->labels = (uint8_t)labels;
    place->recalled = 1;
    return place;
}
