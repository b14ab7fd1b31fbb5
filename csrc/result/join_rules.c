/* Places in the results, what is said about them, and values without a rule. */
#include "join_rules.h"
#include "../py/errors.h"

#include <string.h>

#define MEANS_ALONE                                                                    \
    "correct for a mean over rows, wrong for a sum, a maximum or a perplexity; "       \
    "return a value for each row, or pass join=..."

/* --- places --- */

oomkit_place
oomkit_place_inner(const oomkit_place *outer, const oomkit_tree *opened, Py_ssize_t at,
                   Py_ssize_t number)
{
    const oomkit_node *node = &opened->nodes[at];
    int named = (node->flags & OOMKIT_NODE_ATTRIBUTE) != 0;

    return (oomkit_place){.outer = outer,
                          .key = named ? NULL : node->key,
                          .name = named ? node->key : NULL,
                          .number = node->key == NULL ? number : 0,
                          .in_list = opened->nodes[0].kind == OOMKIT_NODE_LIST};
}

PyObject *
oomkit_place_text(const oomkit_place *where)
{
    OWNED PyObject *outer = NULL;

    if (where->outer == NULL) {
        return PyUnicode_FromString("result");
    }
    outer = oomkit_place_text(where->outer);
    if (outer == NULL) {
        return NULL;
    }
    if (where->key != NULL) {
        return PyUnicode_FromFormat("%U[%R]", outer, where->key);
    }
    if (where->name != NULL) {
        return PyUnicode_FromFormat("%U.%S", outer, where->name);
    }
    return PyUnicode_FromFormat("%U[%zd]", outer, where->number);
}

PyObject *
oomkit_place_name(const oomkit_place *where)
{
    for (; where != NULL; where = where->outer) {
        if (where->key != NULL || where->name != NULL) {
            return where->key != NULL ? where->key : where->name;
        }
    }
    return NULL;
}

/* The nearest name as text; "" when there is none. */
static const char *
place_word(const oomkit_place *where)
{
    PyObject *name = oomkit_place_name(where); /* borrowed from where */
    const char *text;

    if (name == NULL || !PyUnicode_Check(name)) {
        return "";
    }
    text = PyUnicode_AsUTF8(name);
    if (text == NULL) {
        PyErr_Clear(); /* a lone surrogate: no name that is known here */
        return "";
    }
    return text;
}

static int
place_log(const oomkit_rules *r, const oomkit_place *where, const char *level,
          const char *choice)
{
    OWNED PyObject *place = NULL, *text = NULL;

    if (r->site == NULL || r->proving || r->options->label == NULL) {
        return 0;
    }
    place = oomkit_place_text(where->in_list ? where->outer : where);
    if (place == NULL) {
        return -1;
    }
    text = PyUnicode_FromFormat("results of the micro-batches of %U: %U%s %s",
                                r->options->label, place, where->in_list ? "[...]" : "",
                                choice);
    return text == NULL ? -1 : oomkit_result_say(r->st, r->site, level, text);
}

int
oomkit_place_say(const oomkit_rules *r, const oomkit_place *where, const char *choice)
{
    return place_log(r, where, "info", choice);
}

int
oomkit_place_warn(const oomkit_rules *r, const oomkit_place *where, const char *what)
{
    return place_log(r, where, "warning", what);
}

/* NULL always: SplitError "... result['x']: <what>". Steals `what`, which may be NULL
 * with an exception. */
PyObject *
oomkit_place_refuse(const oomkit_rules *r, const oomkit_place *where, PyObject *what)
{
    OWNED PyObject *text = what == NULL ? NULL : oomkit_place_text(where);
    if (text != NULL) {
        PyErr_Format(r->st->SplitError,
                     "auto_batch cannot join the results of %zd micro-batches: %U %U; "
                     "return it in another way, or give join=... (join=lambda results, "
                     "rows: results keeps a list of the parts)" SEE("join-results"),
                     r->batches, text, what);
    }
    Py_XDECREF(what);
    return NULL;
}

PyObject *
oomkit_place_differs(const oomkit_rules *r, const oomkit_place *where, PyObject *a,
                     PyObject *b)
{
    if (Py_IS_TYPE(a, Py_TYPE(b))) {
        return oomkit_place_refuse(
            r, where, PyUnicode_FromFormat("differs: %.200R and %.200R", a, b));
    }
    return oomkit_place_refuse(r, where,
                               PyUnicode_FromFormat("is a '%.200s' and then a '%.200s'",
                                                    Py_TYPE(a)->tp_name,
                                                    Py_TYPE(b)->tp_name));
}

/* --- what the rules ask --- */

/* What a proof has shown of this place: OOMKIT_FIGURE_*, -1 for nothing, -2 with an
 * exception. */
static long
rules_figure(const oomkit_rules *r, const oomkit_place *where)
{
    OWNED PyObject *text = NULL;
    PyObject *found; /* borrowed */
    long figure;

    if (r->site == NULL || r->site->figures == NULL) {
        return -1;
    }
    text = oomkit_place_text(where);
    found = text == NULL ? NULL : PyDict_GetItemWithError(r->site->figures, text);
    figure = found == NULL ? -1 : PyLong_AsLong(found);
    return PyErr_Occurred() ? -2 : figure;
}

/* Why nobody knows that the numbers of this place make a mean: static text, or NULL
 * (with an exception on failure: check). */
static const char *
mean_is_unknown(const oomkit_rules *r, const oomkit_place *where)
{
    long figure;

    if (r->evaluation || r->site == NULL || r->site->figures == NULL) {
        return NULL;
    }
    figure = rules_figure(r, where);
    if (figure < 0) {
        return figure == -2 || where->is_loss
                   ? NULL
                   : "averaged, which no proof has shown: it was not among the results "
                     "of calls that were proven; " MEANS_ALONE;
    }
    if ((figure & OOMKIT_FIGURE_HOW) == OOMKIT_FIGURE_OF_ROWS ||
        (figure & (OOMKIT_FIGURE_BY_ROWS | OOMKIT_FIGURE_BY_LOSS)) != 0 ||
        (where->is_loss && (figure & OOMKIT_FIGURE_NO_LOSS) == 0)) {
        return NULL;
    }
    return "averaged, which no proof has shown: it was 0, or one number for all rows, "
           "in calls that were proven; " MEANS_ALONE;
}

int
oomkit_place_say_mean(const oomkit_rules *r, const oomkit_place *where, int summed)
{
    const char *unknown = summed ? NULL : mean_is_unknown(r, where);

    if (unknown != NULL || PyErr_Occurred()) {
        return unknown == NULL ? -1 : oomkit_place_warn(r, where, unknown);
    }
    if (summed || !r->evaluation) {
        return oomkit_place_say(r, where, summed ? "added" : "averaged");
    }
    return oomkit_place_warn(
        r, where,
        "averaged over the rows: correct for a mean over rows, wrong for a sum, a "
        "maximum or a mean over tokens; return a value for each row, or pass join=... "
        "(verify=True checks it)");
}

int
oomkit_rules_by_rows(const oomkit_rules *r, const oomkit_place *where)
{
    long figure;

    if ((r->is_sum && !where->is_loss) ||
        (!r->found && (r->site == NULL || r->site->figures == NULL))) {
        return 0;
    }
    figure = rules_figure(r, where);
    if (figure == -2) {
        return -1;
    }
    if (figure >= 0 &&
        (figure & (OOMKIT_FIGURE_BY_ROWS | OOMKIT_FIGURE_BY_LOSS)) != 0) {
        return (figure & OOMKIT_FIGURE_BY_ROWS) != 0;
    }
    return (figure >= 0 && r->is_sum && (figure & OOMKIT_FIGURE_NO_LOSS) != 0) ||
           (r->found && !where->is_loss);
}

double
oomkit_rules_weight(const oomkit_rules *r, const oomkit_place *where, Py_ssize_t i,
                    int by_rows)
{
    if (by_rows) {
        return (double)r->rows[i] / (double)r->total;
    }
    if (r->group_weights != NULL && where->outer != NULL &&
        where->outer->outer == NULL) {
        return r->group_weights[i * r->groups + where->number];
    }
    /* Shares of the batch when the loss is a sum, where only the loss is added. */
    if (!r->is_sum) {
        return r->weights[i];
    }
    return where->is_loss ? 1.0 : (double)r->rows[i] / (double)r->total;
}

/* A name that says otherwise (an accuracy can be 0 as well) is believed. */
int
oomkit_rules_may_be_norm(const oomkit_rules *r, const oomkit_place *where)
{
    const char *word;

    if (!r->parked || where->is_loss) {
        return 0;
    }
    if (oomkit_place_name(where) == NULL) {
        return 1;
    }
    word = place_word(where);
    return strstr(word, "norm") != NULL || strstr(word, "grad") != NULL ||
           strcmp(word, "gn") == 0;
}

int
oomkit_rules_shown(const oomkit_rules *r, const oomkit_place *where, long figure)
{
    long shown = rules_figure(r, where);

    return shown < 0 ? (shown == -2 ? -1 : 0) : (shown & OOMKIT_FIGURE_HOW) >= figure;
}

int
oomkit_rules_was_one(const oomkit_rules *r, const oomkit_place *where)
{
    const long shown = rules_figure(r, where);

    return shown == -2 ? -1 : shown == OOMKIT_FIGURE_LAST;
}

int
oomkit_rules_is_one(const oomkit_rules *r, const oomkit_place *where)
{
    const long shown = rules_figure(r, where);

    return shown == -2                       ? -1
           : shown == OOMKIT_FIGURE_LAST     ? 1
           : shown == OOMKIT_FIGURE_OF_ROWS  ? 0
           : oomkit_place_is_no_count(where) ? 1
                                             : 2;
}

const oomkit_result_fact *
oomkit_rules_known(const oomkit_rules *r, const oomkit_place *where)
{
    oomkit_result_path path = {0};
    const oomkit_place *outer;
    int i;

    for (outer = where; outer->outer != NULL; outer = outer->outer) {
        path.depth++;
    }
    if (r->site == NULL || !r->rows_sure || path.depth > OOMKIT_RESULT_DEPTH) {
        return NULL;
    }
    for (i = path.depth - 1; i >= 0; i--, where = where->outer) {
        /* A named tuple's field has a name here, and is known by its number. */
        path.keys[i] = where->key;
        path.positions[i] = where->key != NULL ? -1 : where->number;
    }
    return oomkit_result_known(r->site, &path);
}

int
oomkit_rules_check_number(const oomkit_rules *r, const oomkit_place *where)
{
    const oomkit_result_fact *known = oomkit_rules_known(r, where); /* of the site */

    if (known == NULL || known->kind == OOMKIT_RESULT_INTEGER || r->rows[0] != 1 ||
        known->rows < 2 || known->size != known->rows) {
        return 0;
    }
    oomkit_place_refuse(
        r, where,
        PyUnicode_FromString("is a single number in micro-batches of one row, where "
                             "whole calls returned rows: name the dimension that "
                             "squeeze() takes out, or give min_micro_batch=2"));
    return -1;
}

/* The last word of the name, as in "global_step" and "epoch". */
int
oomkit_place_is_no_count(const oomkit_place *where)
{
    static const char *const words[] = {"epoch", "step",  "iteration", "iter",
                                        "it",    "rank",  "seed",      "stage",
                                        "phase", "level", "version"};
    const char *word = place_word(where), *last;
    size_t i;

    if (strcmp(word, "world_size") == 0) {
        return 1;
    }
    last = strrchr(word, '_');
    last = last == NULL ? word : last + 1;
    for (i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        if (PyOS_stricmp(last, words[i]) == 0) {
            return 1;
        }
    }
    return 0;
}

int
oomkit_error_is_no_answer(const oomkit_state *st)
{
    return (PyErr_ExceptionMatches(PyExc_ValueError) ||
            PyErr_ExceptionMatches(PyExc_TypeError) ||
            PyErr_ExceptionMatches(PyExc_RuntimeError)) &&
           !PyErr_ExceptionMatches(st->TorchOutOfMemoryError) &&
           !PyErr_ExceptionMatches(PyExc_RecursionError);
}

/* --- everything else --- */

/* Types of which equal values are one value, and none could count rows. 1, 0 or -1. */
static int
is_plain_value(PyObject *value)
{
    static const char *const libraries[] = {"torch.", "numpy.", "datetime."};
    const char *name = Py_TYPE(value)->tp_name;
    size_t i;

    if (PyUnicode_Check(value) || PyBytes_Check(value) || PyLong_Check(value) ||
        PyComplex_Check(value) || PyAnySet_Check(value)) {
        return 1;
    }
    if ((Py_TYPE(value)->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0) {
        for (i = 0; i < sizeof(libraries) / sizeof(libraries[0]); i++) {
            if (strncmp(name, libraries[i], strlen(libraries[i])) == 0) {
                return 1;
            }
        }
    }
    return oomkit_has_attribute_string((PyObject *)Py_TYPE(value), "__fspath__");
}

/* Equal? 1, 0 also when == has no single answer, as for arrays, or -1. */
static int
values_are_equal(const oomkit_rules *r, PyObject *a, PyObject *b)
{
    int same = PyObject_RichCompareBool(a, b, Py_EQ);
    if (same < 0 && oomkit_error_is_no_answer(r->st)) {
        PyErr_Clear(); /* no answer: told by the caller, with the place */
        return 0;
    }
    return same;
}

/* Values that have no rule of their own must be the same, or equal plain ones. */
PyObject *
oomkit_join_equal(const oomkit_rules *r, const oomkit_place *where,
                  PyObject *const *values)
{
    int plain = is_plain_value(values[0]);
    Py_ssize_t i;

    for (i = 1; i < r->count && plain >= 0; i++) {
        int same;
        if (!Py_IS_TYPE(values[i], Py_TYPE(values[0]))) {
            return oomkit_place_differs(r, where, values[0], values[i]);
        }
        if (values[i] == values[0]) {
            continue;
        }
        same = values_are_equal(r, values[0], values[i]);
        if (same <= 0) {
            return same < 0 ? NULL
                            : oomkit_place_differs(r, where, values[0], values[i]);
        }
        if (!plain) { /* equal halves of a batch may be no equal of the whole */
            return oomkit_place_refuse(
                r, where,
                PyUnicode_FromFormat("is a '%.200s', which has no rule",
                                     Py_TYPE(values[0])->tp_name));
        }
    }
    return plain < 0 ? NULL : Py_NewRef(values[0]);
}
