/* Schedulers and optimizers that are called with arguments, while split:
 * ReduceLROnPlateau's metric is that of one micro-batch, and its one real call must see
 * the whole batch's. Arguments that are the same in every micro-batch (an epoch, a
 * figure from outside) stay the very objects; a metric that differs becomes the mean
 * with the weights of the loss; any other argument that differs is refused. */
#include "optim.h"
#include "../call/call.h"
#include "../py/tensor.h"

struct oomkit_metric {
    const void *target; /* borrowed address of the scheduler */
    int64_t slice;
    int call;     /* which call of that scheduler in the micro-batch, from 0 */
    int argument; /* position, positional arguments first */
    double value, weight;
};

static int
metric_append(oomkit_call *call, const oomkit_metric *metric)
{
    if (ARRAY_GROW(call->cut->scheduled.items, call->cut->scheduled.count,
                   call->cut->scheduled.room) < 0) {
        return -1;
    }
    call->cut->scheduled.items[call->cut->scheduled.count++] = *metric;
    return 0;
}

/* How often the scheduler was called in this micro-batch before. */
static int
metric_calls(const oomkit_call *call, const void *target)
{
    int i, calls = 0;
    for (i = 0; i < call->cut->scheduled.count; i++) {
        const oomkit_metric *m = &call->cut->scheduled.items[i];
        if (m->target == target && m->slice == call->cut->at && m->call >= calls) {
            calls = m->call + 1;
        }
    }
    return calls;
}

static int
is_plateau(const oomkit_call *call, PyObject *scheduler)
{
    return call->st->ReduceLROnPlateau != NULL &&
           PyObject_TypeCheck(scheduler, (PyTypeObject *)call->st->ReduceLROnPlateau);
}

/* Is it a number that may be a mean or a sum over rows, and no count? 1, 0 or -1. */
static int
is_floating(oomkit_state *st, PyObject *metric)
{
    OWNED PyObject *answer = NULL;

    if (!oomkit_tensor_check(st, metric)) {
        return !PyLong_Check(metric);
    }
    answer = PyObject_CallMethod(metric, "is_floating_point", NULL);
    return answer == NULL ? -1 : answer == Py_True;
}

/* Is argument `i` the metric of a ReduceLROnPlateau? */
static int
is_metric(const oomkit_call *call, const oomkit_held_arguments *given, Py_ssize_t i)
{
    if (!is_plateau(call, given->target)) {
        return 0;
    }
    return i < given->positional
               ? i == 0
               : PyUnicode_CompareWithASCIIString(
                     PyTuple_GET_ITEM(given->kwnames, i - given->positional),
                     "metrics") == 0;
}

/* A mean over rows is known only for a figure that is itself one. Asked in the first
 * micro-batch, before anything moves. 0, or -1 with SplitError. */
static int
metric_check(oomkit_call *call, PyObject *scheduler, PyObject *metric)
{
    const char *why = NULL;
    int whole = is_floating(call->st, metric);

    if (whole < 0) {
        return -1;
    }
    whole = !whole;
    if (call->options->reduction == OOMKIT_REDUCTION_SUM) {
        why = "with reduction=\"sum\" the metric of the whole batch cannot be computed "
              "from those of the micro-batches";
    } else if (whole) {
        why = "the metric is an integer, which may be a count: the count of the whole "
              "batch is not the mean of the counts of the micro-batches";
    }
    if (why == NULL) {
        return 0;
    }
    return oomkit_refuse_split(
        call,
        "%s.step() is called with the metric of one micro-batch, and %s; call it "
        "outside the step, with what the step returns" SEE("step-arguments"),
        Py_TYPE(scheduler)->tp_name, why);
}

static int
metrics_note(oomkit_call *call, const oomkit_held_arguments *given)
{
    PyObject *const *args = given->args;
    Py_ssize_t i,
        total = given->positional +
                (given->kwnames == NULL ? 0 : PyTuple_GET_SIZE(given->kwnames));
    oomkit_metric metric = {.target = given->target,
                            .slice = call->cut->at,
                            .weight = call->cut->weights[call->cut->at],
                            .call = metric_calls(call, given->target)};

    for (i = 0; i < total; i++) {
        int is_number = oomkit_number_of(call->st, args[i], &metric.value);
        if (is_number < 0 ||
            (is_number && !call->is_last && is_metric(call, given, i) &&
             metric_check(call, given->target, args[i]) < 0)) {
            return -1;
        }
        metric.argument = (int)i;
        if (is_number && metric_append(call, &metric) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
same_number(double a, double b)
{
    return a == b || (a != a && b != b);
}

/* The mean of one argument over the micro-batches. 2: it is `last` everywhere; 1: *mean
 * differs from it; 0: not every micro-batch gave one. */
static int
metric_mean(const oomkit_call *call, const oomkit_metric *last, double *mean)
{
    const oomkit_metric *first = NULL;
    int64_t seen = 0;
    int i, same = 1;

    *mean = 0.0;
    for (i = 0; i < call->cut->scheduled.count; i++) {
        const oomkit_metric *m = &call->cut->scheduled.items[i];
        if (m->target != last->target || m->call != last->call ||
            m->argument != last->argument) {
            continue;
        }
        seen++;
        if (m->weight == 0.0) {
            continue; /* a mean over nothing, which may be NaN */
        }
        first = first == NULL ? m : first;
        same = same && same_number(m->value, first->value);
        *mean += m->weight * m->value;
    }
    if (first == NULL || (same && same_number(first->value, last->value))) {
        return seen == call->cut->count || seen == 1 ? 2 : 0;
    }
    *mean = same ? first->value : *mean;
    return seen == call->cut->count;
}

/* The mean as the kind of object that the step passed. New reference or NULL. */
static PyObject *
metric_object(oomkit_state *st, PyObject *like, double mean)
{
    OWNED PyObject *number = PyFloat_FromDouble(mean);
    OWNED PyObject *plain = NULL, *result = NULL, *done = NULL; /* done: result */

    if (number == NULL || !oomkit_tensor_check(st, like)) {
        return STEAL(number);
    }
    plain = PyObject_CallMethodNoArgs(like, st->str_detach);
    result = plain ? PyObject_CallMethodNoArgs(plain, st->str_clone) : NULL;
    done = result ? PyObject_CallMethod(result, "fill_", "O", number) : NULL;
    return done ? STEAL(result) : NULL;
}

/* May the mean of argument `i` take its place? Of an optimizer's any figure: the loss
 * that it is given. 1, 0 or -1. */
static int
may_average(oomkit_call *call, const oomkit_held_arguments *given, Py_ssize_t i)
{
    return PyObject_TypeCheck(given->target, (PyTypeObject *)call->st->Optimizer)
               ? is_floating(call->st, given->args[i])
               : is_metric(call, given, i);
}

static int
metrics_settle(oomkit_call *call, oomkit_held_arguments *given)
{
    int i, which = metric_calls(call, given->target) - 1;
    double value;

    for (i = 0; i < call->cut->scheduled.count && which >= 0; i++) {
        const oomkit_metric *m = &call->cut->scheduled.items[i];
        int state, may;
        if (m->target != given->target || m->slice != call->cut->at ||
            m->call != which) {
            continue;
        }
        state = metric_mean(call, m, &value);
        if (state == 2) {
            continue;
        }
        may = state == 0 || given->instead != NULL
                  ? 0
                  : may_average(call, given, m->argument);
        if (may < 0) {
            return -1;
        }
        if (!may) {
            return oomkit_refuse_split(
                call,
                "%s.step() is called with a different argument in each micro-batch; "
                "compute it outside the step, or guard the line that counts with `if "
                "oomkit.current().is_last:`" SEE("step-arguments"),
                Py_TYPE(given->target)->tp_name);
        }
        given->at = m->argument;
        given->instead = metric_object(call->st, given->args[m->argument], value);
        if (given->instead == NULL) {
            return -1;
        }
    }
    return 0;
}

static void
metrics_attempt_ends(oomkit_call *call)
{
    call->cut->scheduled.count = 0;
}

static void
metrics_call_ends(oomkit_call *call)
{
    MEMORY_CLEAR(call->cut->scheduled.items);
}

const oomkit_rule oomkit_scheduler_args_rule = {.arguments_given = metrics_note,
                                                .arguments_settle = metrics_settle,
                                                .attempt_ends = metrics_attempt_ends,
                                                .call_ends = metrics_call_ends};
