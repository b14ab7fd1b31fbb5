/* Parsing auto_batch's options: every one checked once, with a message that says what
 * was expected and what came. */
#include "types.h"
#include "../batch/batch.h"
#include "../ladder/ladder.h"

#include <stdlib.h>

static const char *const option_names[] = {
    "batch",
    "static",
    "dim",
    "split",
    "join",
    "model",
    "optimizer",
    "participants",
    "backward",
    "reduction",
    "weight",
    "global_weight",
    "verify",
    "accumulation_steps",
    "min_micro_batch",
    "multiple_of",
    "rng",
    "gradient_safety",
    "optimizer_safety",
    "ladder",
    "restore_batch",
    "hooks",
    "remember",
    "on_retry",
    "sinks",
    "label",
    "reset_peaks",
    "phases",
    "_window", /* of adapters alone */
    NULL,
};

/* "; did you mean 'batch'?", or "". New reference or NULL. */
static PyObject *
option_meant(oomkit_state *st, PyObject *key, const char *const *names)
{
    OWNED PyObject *list = PyList_New(0);

    if (st->close_match == NULL) { /* not bound yet */
        return PyUnicode_FromString("");
    }
    for (; list != NULL && *names != NULL; names++) {
        OWNED PyObject *name = PyUnicode_FromString(*names);
        if (name == NULL || PyList_Append(list, name) < 0) {
            return NULL;
        }
    }
    return list == NULL
               ? NULL
               : PyObject_CallFunctionObjArgs(st->close_match, key, list, NULL);
}

int
oomkit_options_known(oomkit_state *st, const char *function, PyObject *kwargs,
                     const char *const *names)
{
    PyObject *key, *value; /* borrowed */
    Py_ssize_t at = 0;
    int i;

    while (kwargs != NULL && PyDict_Next(kwargs, &at, &key, &value)) {
        OWNED PyObject *meant = NULL;
        for (i = 0; names[i] != NULL; i++) {
            if (PyUnicode_CompareWithASCIIString(key, names[i]) == 0) {
                break;
            }
        }
        if (names[i] != NULL) {
            continue;
        }
        meant = option_meant(st, key, names);
        if (meant != NULL) {
            PyErr_Format(PyExc_TypeError,
                         "%s() got an unknown option %R%S" SEE("options"), function,
                         key, meant);
        }
        return -1;
    }
    return 0;
}

/* The option's value, borrowed, or NULL when it was not given. */
static PyObject *
option_get(PyObject *kwargs, const char *name)
{
    return kwargs == NULL ? NULL : oomkit_item(kwargs, name);
}

static int
option_count(PyObject *kwargs, const char *name, int64_t *value)
{
    PyObject *given = option_get(kwargs, name); /* borrowed */
    long long number;
    int overflow;

    if (given == NULL) {
        return 0;
    }
    if (!PyLong_Check(given) || PyBool_Check(given)) {
        PyErr_Format(PyExc_TypeError,
                     "auto_batch(%s=...) expected an int, got %s" SEE("options"), name,
                     Py_TYPE(given)->tp_name);
        return -1;
    }
    number = PyLong_AsLongLongAndOverflow(given, &overflow);
    if (overflow != 0) {
        PyErr_Format(
            PyExc_ValueError,
            "auto_batch(%s=...) expected a number of rows, got %S" SEE("options"), name,
            given);
        return -1;
    }
    if (number < 1) {
        PyErr_Format(PyExc_ValueError,
                     "auto_batch(%s=...) expected at least 1, got %lld" SEE("options"),
                     name, number);
        return -1;
    }
    *value = number;
    return 0;
}

/* One of `choices` (NULL-ended); the index goes to *value. */
static int
option_choice(PyObject *kwargs, const char *name, const char *const *choices,
              int *value)
{
    PyObject *given = option_get(kwargs, name); /* borrowed */
    int i;

    if (given == NULL) {
        return 0;
    }
    for (i = 0; PyUnicode_Check(given) && choices[i] != NULL; i++) {
        if (PyUnicode_CompareWithASCIIString(given, choices[i]) == 0) {
            *value = i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError,
                 "auto_batch(%s=...) expected one of %s%s%s%s%s, got %R" SEE("options"),
                 name, choices[0], choices[1] ? ", " : "", choices[1] ? choices[1] : "",
                 choices[1] && choices[2] ? ", " : "",
                 choices[1] && choices[2] ? choices[2] : "", given);
    return -1;
}

static int
option_bool(PyObject *kwargs, const char *name, int *value)
{
    PyObject *given = option_get(kwargs, name); /* borrowed */
    if (given == NULL) {
        return 0;
    }
    if (!PyBool_Check(given)) {
        PyErr_Format(PyExc_TypeError,
                     "auto_batch(%s=...) expected True or False, got %s" SEE("options"),
                     name, Py_TYPE(given)->tp_name);
        return -1;
    }
    *value = given == Py_True;
    return 0;
}

/* True, False or None, which leaves *value as it is. */
static int
option_switch(PyObject *kwargs, const char *name, int *value)
{
    PyObject *given = option_get(kwargs, name); /* borrowed */
    if (given == NULL || given == Py_None) {
        return 0;
    }
    if (!PyBool_Check(given)) {
        PyErr_Format(
            PyExc_TypeError,
            "auto_batch(%s=...) expected True, False or None, got %s" SEE("options"),
            name, Py_TYPE(given)->tp_name);
        return -1;
    }
    *value = given == Py_True;
    return 0;
}

static int
option_verify(PyObject *kwargs, int *value)
{
    PyObject *given = option_get(kwargs, "verify"); /* borrowed */

    if (given != NULL && PyUnicode_Check(given) &&
        PyUnicode_CompareWithASCIIString(given, "warn") == 0) {
        *value = OOMKIT_VERIFY_WARN;
        return 0;
    }
    if (given != NULL && given != Py_None && !PyBool_Check(given)) {
        PyErr_Format(
            PyExc_TypeError,
            "auto_batch(verify=...) expected True, False, \"warn\" or None, got %R" SEE(
                "options"),
            given);
        return -1;
    }
    return option_switch(kwargs, "verify", value);
}

static int
option_callable(PyObject *kwargs, const char *name, PyObject **value)
{
    PyObject *given = option_get(kwargs, name); /* borrowed */
    if (given == NULL || given == Py_None) {
        return 0;
    }
    if (!PyCallable_Check(given)) {
        PyErr_Format(PyExc_TypeError,
                     "auto_batch(%s=...) expected a callable, got %s" SEE("options"),
                     name, Py_TYPE(given)->tp_name);
        return -1;
    }
    *value = Py_NewRef(given);
    return 0;
}

/* A name or several, as a tuple of str. */
static int
option_names_of(PyObject *kwargs, const char *name, PyObject **value)
{
    PyObject *given = option_get(kwargs, name); /* borrowed */
    PyObject *names;                            /* owned */
    Py_ssize_t i;

    if (given == NULL || given == Py_None) {
        return 0;
    }
    names = PyUnicode_Check(given)                        ? PyTuple_Pack(1, given)
            : PyTuple_Check(given) || PyList_Check(given) ? PySequence_Tuple(given)
                                                          : NULL;
    for (i = 0; names != NULL && i < PyTuple_GET_SIZE(names); i++) {
        if (!PyUnicode_Check(PyTuple_GET_ITEM(names, i))) {
            Py_CLEAR(names);
        }
    }
    if (names == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_Format(
                PyExc_TypeError,
                "auto_batch(%s=...) expected an argument name or several, got %R" SEE(
                    "options"),
                name, given);
        }
        return -1;
    }
    *value = names;
    return 0;
}

/* remember=, or what the user has set for all programs. 0 or -1. */
static int
options_remember(PyObject *kwargs, oomkit_options *options)
{
    const char *wanted = getenv("OOMKIT_REMEMBER");

    options->remember = wanted != NULL && wanted[0] != '\0' && strcmp(wanted, "0") != 0;
    return option_switch(kwargs, "remember", &options->remember);
}

/* Appends an object, or each of a list or tuple, as weak references. */
static int
participants_append(PyObject *list, PyObject *given)
{
    OWNED PyObject *ref = NULL;
    Py_ssize_t i;

    if (given == NULL || given == Py_None) {
        return 0;
    }
    if (PyList_Check(given) || PyTuple_Check(given)) {
        for (i = 0; i < PySequence_Fast_GET_SIZE(given); i++) {
            if (participants_append(list, PySequence_Fast_GET_ITEM(given, i)) < 0) {
                return -1;
            }
        }
        return 0;
    }
    ref = PyWeakref_NewRef(given, NULL);
    if (ref == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) {
            return -1;
        }
        PyErr_Clear(); /* no weak references to this type */
        ref = Py_NewRef(given);
    }
    return PyList_Append(list, ref);
}

/* Has it both? 1, 0 or -1. */
static int
participants_pair(PyObject *given, PyObject *save, PyObject *restore)
{
    int has = oomkit_has_attribute(given, save);
    return has > 0 ? oomkit_has_attribute(given, restore) : has;
}

/* A user's own participant needs one of two pairs of methods. */
static int
participants_check(oomkit_state *st, PyObject *given)
{
    Py_ssize_t i;
    int pair;

    if (given == NULL || given == Py_None) {
        return 0;
    }
    if (PyList_Check(given) || PyTuple_Check(given)) {
        for (i = 0; i < PySequence_Fast_GET_SIZE(given); i++) {
            if (participants_check(st, PySequence_Fast_GET_ITEM(given, i)) < 0) {
                return -1;
            }
        }
        return 0;
    }
    pair = participants_pair(given, st->str_state_dict, st->str_load_state_dict);
    if (pair == 0) {
        pair = participants_pair(given, st->str_save, st->str_restore);
    }
    if (pair != 0 || PyObject_TypeCheck(given, (PyTypeObject *)st->Tensor) ||
        PyObject_TypeCheck(given, (PyTypeObject *)st->Generator) ||
        oomkit_accelerate_kind(given) >= 0) {
        return pair < 0 ? -1 : 0;
    }
    PyErr_Format(PyExc_TypeError,
                 "auto_batch(participants=...) expected objects with state_dict() and "
                 "load_state_dict(), or save() and restore(), got %s" SEE("options"),
                 Py_TYPE(given)->tp_name);
    return -1;
}

/* model= and optimizer= take one object of their kind or several. */
static int
kind_check(PyObject *given, const char *name, PyObject *type, const char *wanted)
{
    Py_ssize_t i;

    if (given == NULL || given == Py_None ||
        PyObject_TypeCheck(given, (PyTypeObject *)type)) {
        return 0;
    }
    if (PyList_Check(given) || PyTuple_Check(given)) {
        for (i = 0; i < PySequence_Fast_GET_SIZE(given); i++) {
            if (kind_check(PySequence_Fast_GET_ITEM(given, i), name, type, wanted) <
                0) {
                return -1;
            }
        }
        return 0;
    }
    PyErr_Format(PyExc_TypeError,
                 "auto_batch(%s=...) expected %s or several, got %s" SEE("options"),
                 name, wanted, Py_TYPE(given)->tp_name);
    return -1;
}

static int
options_participants(oomkit_state *st, PyObject *kwargs, oomkit_options *options)
{
    PyObject *model = option_get(kwargs, "model");         /* borrowed */
    PyObject *optimizer = option_get(kwargs, "optimizer"); /* borrowed */
    PyObject *others = option_get(kwargs, "participants"); /* borrowed */
    OWNED PyObject *list = PyList_New(0);

    if (list == NULL || participants_check(st, others) < 0 ||
        kind_check(model, "model", st->Module, "a torch.nn.Module") < 0 ||
        kind_check(optimizer, "optimizer", st->Optimizer, "a torch.optim.Optimizer") <
            0 ||
        participants_append(list, model) < 0 ||
        participants_append(list, optimizer) < 0 ||
        participants_append(list, others) < 0) {
        return -1;
    }
    options->participants = PyList_AsTuple(list);
    return options->participants == NULL ? -1 : 0;
}

/* weight= is called for the first time in the first split call: whether it takes what
 * it is given is said before. 0 or -1. */
static int
options_weight(oomkit_state *st, PyObject *kwargs, oomkit_options *options)
{
    OWNED PyObject *problem = NULL;

    if (option_callable(kwargs, "weight", &options->weight) < 0) {
        return -1;
    }
    if (options->weight == NULL || st->weight_problem == NULL) {
        return 0;
    }
    problem = PyObject_CallOneArg(st->weight_problem, options->weight);
    if (problem == NULL) {
        return -1;
    }
    if (PyUnicode_GET_LENGTH(problem) == 0) {
        return 0;
    }
    PyErr_SetObject(PyExc_TypeError, problem);
    return -1;
}

static int
options_backward(PyObject *kwargs, oomkit_options *options)
{
    PyObject *given = option_get(kwargs, "backward"); /* borrowed */

    if (given == NULL || given == Py_None || given == Py_False) {
        return 0;
    }
    if (given == Py_True) {
        options->backward = Py_NewRef(given);
        return 0;
    }
    return option_callable(kwargs, "backward", &options->backward);
}

/* hooks=, which had "say" for "warn". */
static int
option_hooks(PyObject *kwargs, const char *const *choices, int *value)
{
    PyObject *given = option_get(kwargs, "hooks"); /* borrowed */

    if (given != NULL && PyUnicode_Check(given) &&
        PyUnicode_CompareWithASCIIString(given, "say") == 0) {
        *value = 0;
        return oomkit_warn(PyExc_FutureWarning, 1,
                           "auto_batch(hooks=\"say\") is deprecated and will be "
                           "removed: write hooks=\"warn\"" SEE("options"));
    }
    return option_choice(kwargs, "hooks", choices, value);
}

static int
options_choices(PyObject *kwargs, oomkit_options *options)
{
    static const char *const reductions[] = {"mean", "sum", NULL};
    static const char *const rngs[] = {"none", "torch", "all", NULL};
    static const char *const gradient[] = {"auto", "copy", "off", NULL};
    static const char *const optimizer[] = {"predict", "copy", "parts", NULL};
    static const char *const hooks[] = {"warn", "error", NULL};
    int reduction = 0, rng = 1, gradients = 0, optimizers = 0, hook = 0;

    if (option_choice(kwargs, "reduction", reductions, &reduction) < 0 ||
        option_choice(kwargs, "rng", rngs, &rng) < 0 ||
        option_choice(kwargs, "gradient_safety", gradient, &gradients) < 0 ||
        option_choice(kwargs, "optimizer_safety", optimizer, &optimizers) < 0 ||
        option_hooks(kwargs, hooks, &hook) < 0) {
        return -1;
    }
    options->reduction = reduction == 1 ? OOMKIT_REDUCTION_SUM : OOMKIT_REDUCTION_MEAN;
    options->reduction_given = option_get(kwargs, "reduction") != NULL;
    options->rng = (oomkit_rng_scope)rng;
    options->gradient_safety = (oomkit_safety)gradients;
    options->optimizer_copy = optimizers != 0;
    options->optimizer_parts = optimizers == 2;
    options->hooks_error = hook == 1;
    return 0;
}

static int
options_ladder(PyObject *kwargs, oomkit_options *options)
{
    PyObject *given = option_get(kwargs, "ladder"); /* borrowed */

    options->ladder_given = given != NULL;
    options->ladder = OOMKIT_LADDER_ALL;
    return given == NULL ? 0 : oomkit_ladder_parse(given, &options->ladder);
}

static int
options_sinks(PyObject *kwargs, oomkit_options *options)
{
    PyObject *given = option_get(kwargs, "sinks"); /* borrowed */
    Py_ssize_t i, count = -1;

    if (given == NULL || given == Py_None) {
        return 0;
    }
    if (PyList_Check(given) || PyTuple_Check(given)) {
        count = PySequence_Fast_GET_SIZE(given);
    }
    for (i = 0; i < count && PyCallable_Check(PySequence_Fast_GET_ITEM(given, i));
         i++) {
    }
    if (count < 0 || i < count) {
        PyErr_Format(
            PyExc_TypeError,
            "auto_batch(sinks=...) expected a list or a tuple of callables, got %R" SEE(
                "options"),
            given);
        return -1;
    }
    options->sinks = count == 0 ? NULL : PySequence_Tuple(given);
    return count == 0 || options->sinks != NULL ? 0 : -1;
}

int
oomkit_options_parse(oomkit_state *st, PyObject *kwargs, oomkit_options *options)
{
    PyObject *label = option_get(kwargs, "label"); /* borrowed */

    memset(options, 0, sizeof(*options));
    options->accumulation_steps = options->min_micro_batch = options->multiple_of = 1;
    options->reset_peaks = 1;
    options->phases = st->phases_wanted;
    options->verify = -1;
    options->window = Py_XNewRef(option_get(kwargs, "_window"));
    if (oomkit_options_known(st, "auto_batch", kwargs, option_names) < 0 ||
        options_remember(kwargs, options) < 0 ||
        option_names_of(kwargs, "batch", &options->batch) < 0 ||
        option_names_of(kwargs, "static", &options->statics) < 0 ||
        oomkit_options_dim(option_get(kwargs, "dim"), options) < 0 ||
        option_callable(kwargs, "split", &options->split) < 0 ||
        option_callable(kwargs, "join", &options->join) < 0 ||
        options_participants(st, kwargs, options) < 0 ||
        options_backward(kwargs, options) < 0 || options_choices(kwargs, options) < 0 ||
        options_weight(st, kwargs, options) < 0 ||
        option_bool(kwargs, "global_weight", &options->global_weight) < 0 ||
        options_ladder(kwargs, options) < 0 ||
        option_callable(kwargs, "on_retry", &options->on_retry) < 0 ||
        options_sinks(kwargs, options) < 0 ||
        option_count(kwargs, "accumulation_steps", &options->accumulation_steps) < 0 ||
        option_count(kwargs, "min_micro_batch", &options->min_micro_batch) < 0 ||
        option_count(kwargs, "multiple_of", &options->multiple_of) < 0 ||
        option_bool(kwargs, "restore_batch", &options->restore_batch) < 0 ||
        option_verify(kwargs, &options->verify) < 0 ||
        option_bool(kwargs, "reset_peaks", &options->reset_peaks) < 0 ||
        option_bool(kwargs, "phases", &options->phases) < 0) {
        return -1;
    }
    if (options->weight != NULL && options->reduction == OOMKIT_REDUCTION_SUM) {
        PyErr_SetString(PyExc_ValueError,
                        "auto_batch(reduction=\"sum\", weight=...): the micro-batches "
                        "of a sum all weigh 1; give one of the two" SEE("options"));
        return -1;
    }
    if (options->weight == NULL && options->global_weight) {
        PyErr_SetString(PyExc_ValueError,
                        "auto_batch(global_weight=True) needs weight=, which counts "
                        "the items of a batch" SEE("options"));
        return -1;
    }
    if (label != NULL && label != Py_None) {
        if (!PyUnicode_Check(label)) {
            PyErr_Format(PyExc_TypeError,
                         "auto_batch(label=...) expected a str, got %s" SEE("options"),
                         Py_TYPE(label)->tp_name);
            return -1;
        }
        options->label = Py_NewRef(label);
    }
    if (options->statics == NULL) {
        options->statics = PyTuple_New(0);
    }
    return options->statics == NULL ? -1 : 0;
}

void
oomkit_options_clear(oomkit_options *options)
{
    Py_CLEAR(options->batch);
    Py_CLEAR(options->statics);
    Py_CLEAR(options->split);
    Py_CLEAR(options->dims);
    Py_CLEAR(options->join);
    Py_CLEAR(options->participants);
    Py_CLEAR(options->backward);
    Py_CLEAR(options->weight);
    Py_CLEAR(options->on_retry);
    Py_CLEAR(options->sinks);
    Py_CLEAR(options->window);
    Py_CLEAR(options->label);
}

int
oomkit_options_traverse(oomkit_options *options, visitproc visit, void *arg)
{
    Py_VISIT(options->split);
    Py_VISIT(options->join);
    Py_VISIT(options->participants);
    Py_VISIT(options->backward);
    Py_VISIT(options->weight);
    Py_VISIT(options->on_retry);
    Py_VISIT(options->sinks);
    Py_VISIT(options->window);
    return 0;
}
