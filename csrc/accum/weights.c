/* The share of the loss that each micro-batch carries: n_i/N for a mean over rows, 1
 * for a sum, and what weight= answers for everything else. */
#include "accum.h"
#include "../batch/batch.h"
#include "../call/call.h"
#include "../call/step.h"
#include "../optim/updating.h"
#include "../py/tensor.h"
#include "../ranks/agree.h"
#include "../result/result.h"

#include <float.h>
#include <math.h>

/* Does the call pass a value for the parameter num_items_in_batch? Then the loss is a
 * sum that the function divides by that number itself. */
static int
weights_items_passed(const oomkit_call *call)
{
    Py_ssize_t i, positional = PyVectorcall_NARGS(call->given.nargsf);
    PyObject *name = call->st->str_num_items; /* borrowed from state */
    PyObject *names = call->step->names;      /* borrowed from step */

    for (i = 0;
         call->given.kwnames != NULL && i < PyTuple_GET_SIZE(call->given.kwnames);
         i++) {
        if (PyUnicode_Compare(PyTuple_GET_ITEM(call->given.kwnames, i), name) == 0) {
            return call->given.args[positional + i] != Py_None;
        }
    }
    for (i = 0; names != NULL && i < PyTuple_GET_SIZE(names) && i < positional; i++) {
        if (PyUnicode_Compare(PyTuple_GET_ITEM(names, i), name) == 0) {
            return call->given.args[i] != Py_None;
        }
    }
    return 0;
}

/* One number of what weight= returned; -1.0 with an exception. */
static double
weight_number(oomkit_call *call, PyObject *item)
{
    OWNED PyObject *number = PyNumber_Float(item); /* of a 0-d tensor too */
    double value;

    if (number == NULL) {
        return -1.0;
    }
    value = PyFloat_AS_DOUBLE(number);
    if (!(value >= 0.0) || value > DBL_MAX) {
        return oomkit_refuse(call,
                             "auto_batch(weight=...) must return a number >= 0 for "
                             "each micro-batch, got %s" SEE("weight"),
                             value != value ? "nan"
                             : value > 0.0  ? "inf"
                                            : "a negative number");
    }
    return value;
}

/* What weight= returned, as numbers: see weights_ask(). */
static double *
weight_numbers(oomkit_call *call, PyObject *answer, Py_ssize_t *groups)
{
    int several = PyTuple_Check(answer) || PyList_Check(answer);
    Py_ssize_t i, count = several ? PySequence_Fast_GET_SIZE(answer) : 1;
    double *values;

    if (count == 0) {
        oomkit_refuse(call,
                      "auto_batch(weight=...) must return a number, or one for each "
                      "backward() of the step, got an empty %s" SEE("weight"),
                      Py_TYPE(answer)->tp_name);
        return NULL;
    }
    values = PyMem_New(double, (size_t)count);
    if (values == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (i = 0; i < count; i++) {
        PyObject *item = /* owned: float() of it may change a list */
            Py_NewRef(several ? PySequence_Fast_GET_ITEM(answer, i) : answer);
        values[i] = weight_number(call, item);
        Py_DECREF(item);
        if (values[i] < 0.0 || (several && PySequence_Fast_GET_SIZE(answer) != count)) {
            PyMem_Free(values);
            return PyErr_Occurred()
                       ? NULL
                       : (PyErr_SetString(PyExc_RuntimeError,
                                          "weight= changed its result" SEE("weight")),
                          NULL);
        }
    }
    *groups = several ? count : 0;
    return values;
}

/* weight= of the batch's rows start .. start + length into values[0 .. *groups), made
 * by PyMem (free it); *groups is 0 for a plain number. NULL with an exception. */
static double *
weights_ask(oomkit_call *call, int64_t start, int64_t length, Py_ssize_t *groups)
{
    Py_ssize_t i, n = call->batch.total;
    OWNED_MEMORY PyObject **vector = PyMem_Calloc((size_t)n + 1, sizeof(PyObject *));
    OWNED PyObject *argument = NULL, *answer = NULL;
    double *values = NULL;

    if (vector == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    if (oomkit_batch_build(call->st, call->options, &call->batch, start, length,
                           vector) == 0) {
        argument = oomkit_batch_argument(&call->batch, vector);
        answer = argument ? PyObject_CallOneArg(call->options->weight, argument) : NULL;
        values = answer ? weight_numbers(call, answer, groups) : NULL;
    }
    for (i = 0; i < n; i++) {
        Py_CLEAR(vector[i]);
    }
    return values;
}

/* All slices' answers into one table, each as long as the first. 0 or -1. */
static int
weights_collect(oomkit_call *call)
{
    oomkit_losses *l = &call->cut->losses;
    Py_ssize_t groups = 0, width = 0;
    int64_t i;

    for (i = 0; i < call->cut->count; i++) {
        OWNED_MEMORY double *values = weights_ask(call, call->cut->slices[i].start,
                                                  call->cut->slices[i].length, &groups);
        if (values == NULL) {
            return -1;
        }
        if (i == 0) {
            l->groups = groups;
            width = groups > 0 ? groups : 1;
            PyMem_Free(l->group_weights);
            l->group_weights =
                PyMem_New(double, (size_t)width *(size_t)call->cut->count);
        }
        if (l->group_weights == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        if (groups != l->groups) {
            return oomkit_refuse(
                call,
                "auto_batch(weight=...) must return the same number of weights for "
                "each micro-batch, got %zd and then %zd" SEE("weight"),
                l->groups > 0 ? l->groups : 1, groups > 0 ? groups : 1);
        }
        memcpy(l->group_weights + i * width, values, (size_t)width * sizeof(double));
    }
    return 0;
}

/* weight=: each group as shares of its own total. A lone slice has all of it, and is
 * not asked for. */
static int
weights_measured(oomkit_call *call)
{
    oomkit_losses *l = &call->cut->losses;
    Py_ssize_t g, width;
    int64_t i;

    if (call->cut->count == 1) {
        call->cut->weights[0] = 1.0;
        return 0;
    }
    if (weights_collect(call) < 0) {
        return -1;
    }
    width = l->groups > 0 ? l->groups : 1;
    for (g = 0; g < width; g++) {
        double total = 0.0;
        for (i = 0; i < call->cut->count; i++) {
            total += l->group_weights[i * width + g];
        }
        for (i = 0; i < call->cut->count; i++) {
            double *weight = &l->group_weights[i * width + g];
            *weight = total > 0.0 ? *weight / total : 1.0 / (double)call->cut->count;
        }
    }
    for (i = 0; i < call->cut->count; i++) {
        call->cut->weights[i] = l->group_weights[i * width];
    }
    return 0;
}

/* A number that a rule has; -1.0 with an exception. */
static double
rule_number(PyObject *rule, const char *name)
{
    OWNED PyObject *number = PyObject_GetAttrString(rule, name);

    return number == NULL ? -1.0 : PyFloat_AsDouble(number);
}

/* What the slices have of what a rule counts. New list or NULL. */
static PyObject *
rule_counts(oomkit_call *call, PyObject *rule)
{
    const Py_ssize_t leaf = (Py_ssize_t)rule_number(rule, "leaf");
    OWNED PyObject *cut = NULL, *tensor = NULL;
    PyObject *answer = NULL; /* owned, returned */

    cut = PyErr_Occurred() ? NULL
                           : oomkit_proof_slices(call->cut->slices, call->cut->count);
    if (cut == NULL) {
        return NULL;
    }
    tensor = leaf >= 0 ? oomkit_proof_leaf(call, leaf) : Py_NewRef(Py_None);
    EXEMPT (call->st) {
        if (tensor != NULL && tensor != Py_None && call->batch.dealt != NULL) {
            Py_SETREF(tensor,
                      PyObject_CallMethod(call->batch.dealt, "leaf", "O", tensor));
        }
        answer = tensor == NULL
                     ? NULL
                     : PyObject_CallMethod(rule, "counts", "OO", tensor, cut);
    }
    return answer;
}

/* Weights that a proof has found, of these slices: shares of what all have; where a sum
 * is divided by max(1, n), also of that 1, and together they are more than 1 then. 0 or
 * -1. */
static int
weights_found(oomkit_call *call, PyObject *rule)
{
    OWNED PyObject *counts = rule_counts(call, rule);
    const double least = counts == NULL ? -1.0 : rule_number(rule, "least");
    double total = 0.0;
    int64_t i;

    if (least < 0.0) {
        return -1;
    }
    for (i = 0; i < call->cut->count; i++) {
        call->cut->weights[i] = PyFloat_AsDouble(PyList_GET_ITEM(counts, i));
        total += call->cut->weights[i];
    }
    total = fmax(total, least);
    for (i = 0; i < call->cut->count; i++) {
        call->cut->weights[i] = total > 0.0 ? fmax(call->cut->weights[i], least) / total
                                            : 1.0 / (double)call->cut->count;
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* The rows that the slices make up: the batch's, or those of a proof. */
static int64_t
weights_rows(const oomkit_call *call)
{
    const oomkit_slice *last = &call->cut->slices[call->cut->count - 1];
    return last->start + last->length - call->cut->slices[0].start;
}

static int
weights_rule_is(PyObject *rule, const char *name)
{
    OWNED PyObject *kind = PyObject_GetAttrString(rule, "kind");
    return kind != NULL && PyUnicode_Check(kind) &&
           PyUnicode_CompareWithASCIIString(kind, name) == 0;
}

int
oomkit_weights_set(oomkit_call *call)
{
    OWNED PyObject *rule = Py_XNewRef(oomkit_proof_rule(call));
    oomkit_losses *l = &call->cut->losses;
    const oomkit_options *options = call->options;
    int64_t i;
    void *grown = PyMem_Realloc(call->cut->weights,
                                (size_t)call->cut->count * sizeof(*call->cut->weights));
    if (grown == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    call->cut->weights = grown;
    l->sum = l->mean = l->largest = 0.0;
    l->seen = 0;
    l->groups = 0;
    l->counts_items = rule == NULL && options->weight == NULL &&
                      !options->reduction_given && weights_items_passed(call);
    l->is_sum = rule != NULL
                    ? weights_rule_is(rule, "sum")
                    : l->counts_items || (options->weight == NULL &&
                                          options->reduction == OOMKIT_REDUCTION_SUM);
    oomkit_join_weighed(&call->cut->join, rule != NULL ? l->is_sum : l->counts_items,
                        rule != NULL);
    if (options->weight != NULL) {
        if (weights_measured(call) < 0) {
            return -1;
        }
        oomkit_join_grouped(&call->cut->join, l->group_weights, l->groups);
        return 0;
    }
    for (i = 0; i < call->cut->count; i++) {
        call->cut->weights[i] = l->is_sum ? 1.0
                                          : (double)call->cut->slices[i].length /
                                                (double)weights_rows(call);
    }
    if (rule != NULL && call->batch.count > 0 && !l->is_sum &&
        !weights_rule_is(rule, "rows")) {
        return weights_found(call, rule);
    }
    return PyErr_Occurred() ? -1 : 0;
}

PyObject *
oomkit_weights_of_slice(const oomkit_call *call, int64_t slice)
{
    const oomkit_losses *l = &call->cut->losses;
    const Py_ssize_t groups = l->groups > 0 ? l->groups : 1;
    OWNED PyObject *list = PyList_New(0);
    Py_ssize_t i;

    for (i = 0; list != NULL && i < groups; i++) {
        OWNED PyObject *value =
            PyFloat_FromDouble(l->groups > 0 ? l->group_weights[slice * groups + i]
                                             : call->cut->weights[slice]);
        if (value == NULL || PyList_Append(list, value) < 0) {
            return NULL;
        }
    }
    return STEAL(list);
}

/* global_weight=: what the losses of this call count among those of all ranks, whose
 * mean is taken. Runs weight= of the whole batch. 0 or -1. */
static int
weights_group_begins(oomkit_call *call)
{
    OWNED_MEMORY double *items = NULL;
    Py_ssize_t groups = 0;
    int found;

    if (!call->options->global_weight) {
        return 0;
    }
    call->batch.provable = oomkit_proof_possible(call);
    found = oomkit_batch_find(call->st, call->options, call->step->batch_site,
                              call->step->names, &call->batch);
    if (found <= 0) {
        return found < 0
                   ? -1
                   : oomkit_batch_refuse(
                         call->st, &call->batch,
                         PyUnicode_FromFormat(
                             "auto_batch(global_weight=True) found no batch to count "
                             "in the arguments of %U: pass it as an argument of the "
                             "step",
                             call->options->label));
    }
    EXEMPT (call->st) {
        items = weights_ask(call, 0, call->batch.rows, &groups);
    }
    return items == NULL ? -1
                         : oomkit_ranks_weigh(call, items, groups > 0 ? groups : 1);
}

/* As many weights as backwards? -1 with SplitError. */
static int
weights_refuse(oomkit_call *call, int backwards, const char *least)
{
    return oomkit_refuse(call,
                         "auto_batch(weight=...) must return one weight for each "
                         "backward() of the step: got %zd, expected %s%d" SEE("weight"),
                         call->cut->losses.groups, least, backwards);
}

static double
weights_next(oomkit_call *call)
{
    const oomkit_losses *l = &call->cut->losses;

    if (call->cut->weights == NULL || oomkit_loss_is_rowwise(call)) {
        return 1.0;
    }
    if (l->groups == 0 || !call->split) {
        return call->cut->weights[call->cut->at];
    }
    if (call->backward.done >= l->groups) {
        return weights_refuse(call, call->backward.done + 1, "at least ");
    }
    return l->group_weights[call->cut->at * l->groups + call->backward.done];
}

/* --- labels of -100 --- */

/* How weight= would name the leaf: its argument when that is the only one that is
 * split, else an element of the tuple that it gets. New reference or NULL. */
static PyObject *
labels_expression(const oomkit_call *call, Py_ssize_t leaf, PyObject **parameter)
{
    const oomkit_batch *batch = &call->batch;
    PyObject *names = call->step->names; /* borrowed from step */
    OWNED PyObject *path = NULL, *name = NULL, *rest = NULL;
    Py_ssize_t argument = 0, number = 0, found = 0, split = 0, at = 0;

    for (; argument < batch->total; argument++) {
        Py_ssize_t end = oomkit_node_end(batch, at);
        if (at <= leaf && leaf < end) {
            found = argument;
            number = split;
        }
        split += oomkit_node_is_split(batch, at);
        at = end;
    }
    path = oomkit_node_path(batch, names, leaf);
    name = path ? oomkit_argument_name(batch, names, found) : NULL;
    if (name == NULL) {
        return NULL;
    }
    if (split == 1 && PyUnicode_IsIdentifier(name) == 1) {
        *parameter = STEAL(name);
        return STEAL(path);
    }
    rest = PyUnicode_Substring(path, PyUnicode_GET_LENGTH(name), PY_SSIZE_T_MAX);
    *parameter = PyUnicode_FromString("batch");
    if (rest == NULL || *parameter == NULL) {
        return NULL;
    }
    return split == 1 ? PyUnicode_FromFormat("batch%U", rest)
                      : PyUnicode_FromFormat("batch[%zd]%U", number, rest);
}

static int
labels_say(oomkit_call *call, Py_ssize_t leaf)
{
    OWNED PyObject *parameter = NULL;
    OWNED PyObject *expression = labels_expression(call, leaf, &parameter);
    OWNED PyObject *path = oomkit_node_path(&call->batch, call->step->names, leaf);

    if (expression == NULL || path == NULL) {
        return -1;
    }
    return oomkit_warn(
        call->st->OomkitWarning, 1,
        "oomkit: %U is split, and the micro-batches have different numbers of labels "
        "of -100 in %U. A mean over the other labels is then weighted wrongly. Pass "
        "weight=lambda %U: (%U != -100).sum() to auto_batch (with the labels as the "
        "loss sees them, shifted or not)" SEE("weight"),
        call->options->label, path, parameter, expression);
}

/* The lengths of the slices, for torch.split. New reference or NULL. */
static PyObject *
labels_lengths(const oomkit_call *call)
{
    OWNED PyObject *lengths = PyList_New((Py_ssize_t)call->cut->count);
    Py_ssize_t i;

    for (i = 0; lengths != NULL && i < (Py_ssize_t)call->cut->count; i++) {
        PyObject *length = PyLong_FromLongLong(call->cut->slices[i].length);
        if (length == NULL) {
            return NULL;
        }
        PyList_SET_ITEM(lengths, i, length);
    }
    return STEAL(lengths);
}

/* Do the slices of this leaf have unequal shares of labels that are not -100? Reads the
 * values. 1 or 0; what cannot be read is not said: this check is a service. */
static int
labels_are_uneven(oomkit_call *call, Py_ssize_t leaf, PyObject *lengths)
{
    const int64_t dim = oomkit_node_dim(call->options, &call->batch, leaf);
    OWNED PyObject *answer = NULL;

    if (dim < 0) {
        return 0; /* with an exception */
    }

    EXEMPT (call->st) {
        answer = PyObject_CallFunction(call->st->uneven_labels, "OLO",
                                       call->batch.nodes[leaf].object, (long long)dim,
                                       lengths);
    }
    if (answer == NULL && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear(); /* labels that cannot be counted tell nothing */
    }
    return answer == Py_True;
}

/* Reading labels waits for a device: there it is done in a few calls only. */
static int
labels_are_due(const oomkit_call *call)
{
    return call->device.type == OOMKIT_DEVICE_CPU || call->log.number <= 16 ||
           call->log.number % 64 == 0;
}

/* Is there an integer leaf whose labels of -100 make n_i/N wrong? Its number in *leaf.
 * 1, 0 or -1. */
static int
labels_find(oomkit_call *call, Py_ssize_t *leaf)
{
    const oomkit_batch *batch = &call->batch;
    OWNED PyObject *lengths = labels_lengths(call);
    Py_ssize_t i;
    int result = lengths == NULL ? -1 : 0;

    for (i = 0; result == 0 && i < batch->count; i++) {
        const oomkit_node *node = &batch->nodes[i];
        if (node->kind != OOMKIT_NODE_TENSOR || node->split != OOMKIT_SPLIT_NARROW) {
            continue;
        }
        result = labels_are_uneven(call, i, lengths);
        result = PyErr_Occurred() ? -1 : result;
        *leaf = i;
    }
    return result;
}

int
oomkit_weights_are_free(const oomkit_call *call)
{
    return call->options->weight == NULL && !call->options->reduction_given;
}

int
oomkit_weights_are_due(const oomkit_call *call)
{
    return oomkit_weights_are_free(call) && labels_are_due(call);
}

/* That is said once per site. */
static int
labels_check(oomkit_call *call)
{
    Py_ssize_t leaf = 0;
    int found = labels_find(call, &leaf);

    if (found > 0) {
        call->step->losses.labels_said = 1;
        found = labels_say(call, leaf);
    }
    return found;
}

/* Does the micro-batch return a number that stands for a loss? 1, 0 or -1. */
static int
result_is_loss(oomkit_call *call, PyObject *result)
{
    oomkit_tensor_facts facts;
    OWNED PyObject *loss = NULL;

    if (PyFloat_Check(result)) {
        return 1;
    }
    if ((PyTuple_Check(result) || PyList_Check(result)) &&
        PySequence_Fast_GET_SIZE(result) > 0 &&
        PyFloat_Check(PySequence_Fast_GET_ITEM(result, 0))) {
        return 1;
    }
    loss = oomkit_result_loss(call->st, result);
    if (loss == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    return oomkit_tensor_facts_get(call->st, loss, 0, &facts) < 0 ? -1
                                                                  : facts.ndim == 0;
}

/* A single loss returned for several weights: it is joined with the first ones. */
static int
groups_say(oomkit_call *call, PyObject *result)
{
    int scalar;

    if ((PyTuple_Check(result) || PyList_Check(result)) &&
        PySequence_Fast_GET_SIZE(result) == call->cut->losses.groups) {
        return 0; /* one by one */
    }
    scalar = result_is_loss(call, result);
    if (scalar <= 0) {
        return scalar;
    }
    call->step->losses.groups_said = 1;
    return oomkit_warn(
        call->st->OomkitWarning, 1,
        "oomkit: weight= returns %zd weights, but %U returns one loss, which is joined "
        "with the first weight. Gradients are exact. To join each loss with its own "
        "weight, return the losses as a tuple in the order of their backwards" SEE(
            "weight"),
        call->cut->losses.groups, call->options->label);
}

static int
weights_check(oomkit_call *call, PyObject *result)
{
    oomkit_loss_site *site = &call->step->losses;
    int loss;

    if (call->cut->losses.groups > 0 && call->training &&
        !oomkit_update_is_final(call) &&
        call->backward.done != call->cut->losses.groups) {
        return weights_refuse(call, call->backward.done, "");
    }
    if (call->cut->losses.groups > 1 && !site->groups_said &&
        groups_say(call, result) < 0) {
        return -1;
    }
    if (call->cut->at > 0 || site->labels_said || call->options->weight != NULL ||
        call->cut->losses.is_sum || oomkit_proof_known(call) ||
        oomkit_proof_rule(call) != NULL || !labels_are_due(call)) {
        return 0;
    }
    loss = call->training ? 1 : result_is_loss(call, result);
    return loss <= 0 ? loss : labels_check(call);
}

int
oomkit_losses_are_sums(const oomkit_call *call)
{
    return call->cut->losses.is_sum;
}

void
oomkit_weights_on_trial(oomkit_call *call, PyObject *const *rule)
{
    call->cut->losses.on_trial = rule;
}

static void
weights_call_ends(oomkit_call *call)
{
    Py_CLEAR(call->cut->losses.rows);
    PyMem_Free(call->cut->losses.group_weights);
    call->cut->losses.group_weights = NULL;
}

static int
weights_backward(oomkit_call *call, oomkit_backward *backward)
{
    backward->weight = weights_next(call);
    return backward->weight < 0.0 ? -1 : 0;
}

static int
weights_micro_ends(oomkit_call *call, PyObject *result)
{
    return call->split ? weights_check(call, result) : 0;
}

const oomkit_rule oomkit_weights_rule = {.group_begins = weights_group_begins,
                                         .attempt_begins = oomkit_weights_set,
                                         .backward_begins = weights_backward,
                                         .micro_ends = weights_micro_ends,
                                         .call_ends = weights_call_ends};
