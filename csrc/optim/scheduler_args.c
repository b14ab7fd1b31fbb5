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

/* The number that an argument stands for: 1 and *value, 0 when it is none, -1. */
int
oomkit_metric_number(oomkit_state *st, PyObject *argument, double *value)
{
    OWNED PyObject *item = NULL, *number = NULL;

    if (oomkit_tensor_check(st, argument)) {
        Py_ssize_t n; /* what float() accepts has one element */
        OWNED PyObject *numel = PyObject_CallMethod(argument, "numel", NULL);
        if (numel == NULL) {
            return -1;
        }
        n = PyLong_AsSsize_t(numel);
        if (n != 1) {
            return n == -1 && PyErr_Occurred() ? -1 : 0;
        }
        item = PyObject_CallMethod(argument, "item", NULL);
        if (item == NULL) { /* torch warns of float() where a gradient is wanted */
            return -1;
        }
    } else if (argument == Py_None || PyUnicode_Check(argument) ||
               Py_TYPE(argument)->tp_as_number == NULL ||
               (Py_TYPE(argument)->tp_as_number->nb_float == NULL &&
                Py_TYPE(argument)->tp_as_number->nb_index == NULL)) {
        return 0;
    }
    number = PyNumber_Float(item != NULL ? item : argument);
    if (number == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError) &&
            !PyErr_ExceptionMatches(PyExc_ValueError) &&
            !PyErr_ExceptionMatches(PyExc_OverflowError)) {
            return -1;
        }
        PyErr_Clear(); /* an array, an int without a float: the scheduler's to judge */
        return 0;
    }
    *value = PyFloat_AS_DOUBLE(number);
    return 1;
}

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
is_metric(oomkit_call *call, PyObject *scheduler, Py_ssize_t i, Py_ssize_t positional,
          PyObject *kwnames)
{
    if (!is_plateau(call, scheduler)) {
        return 0;
    }
    return i < positional
               ? i == 0
               : PyUnicode_CompareWithASCIIString(
                     PyTuple_GET_ITEM(kwnames, i - positional), "metrics") == 0;
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

/* Notes the arguments of a scheduler's call, held back or not. 0 or -1. */
int
oomkit_metrics_note(oomkit_call *call, PyObject *scheduler, PyObject *const *args,
                    Py_ssize_t positional, PyObject *kwnames)
{
    Py_ssize_t i,
        total = positional + (kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames));
    oomkit_metric metric = {.target = scheduler,
                            .slice = call->cut->at,
                            .weight = call->cut->weights[call->cut->at],
                            .call = metric_calls(call, scheduler)};

    for (i = 0; i < total; i++) {
        int is_number = oomkit_metric_number(call->st, args[i], &metric.value);
        if (is_number < 0 || (is_number && !call->is_last &&
                              is_metric(call, scheduler, i, positional, kwnames) &&
                              metric_check(call, scheduler, args[i]) < 0)) {
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
may_average(oomkit_call *call, PyObject *target, PyObject *const *args, Py_ssize_t i,
            Py_ssize_t positional, PyObject *kwnames)
{
    return PyObject_TypeCheck(target, (PyTypeObject *)call->st->Optimizer)
               ? is_floating(call->st, args[i])
               : is_metric(call, target, i, positional, kwnames);
}

/* Before the one real call: 1 when *mean (owned) takes the place of argument *at, 0
 * when the arguments are right as they are, -1 with SplitError. */
int
oomkit_metrics_settle(oomkit_call *call, PyObject *scheduler, PyObject *const *args,
                      Py_ssize_t positional, PyObject *kwnames, PyObject **mean,
                      Py_ssize_t *at)
{
    int i, which = metric_calls(call, scheduler) - 1, result = 0;
    double value;

    for (i = 0; i < call->cut->scheduled.count && which >= 0; i++) {
        const oomkit_metric *m = &call->cut->scheduled.items[i];
        int state, may;
        if (m->target != scheduler || m->slice != call->cut->at || m->call != which) {
            continue;
        }
        state = metric_mean(call, m, &value);
        if (state == 2) {
            continue;
        }
        may = state == 0 || result == 1 ? 0
                                        : may_average(call, scheduler, args,
                                                      m->argument, positional, kwnames);
        if (may < 0) {
            Py_CLEAR(*mean);
            return -1;
        }
        if (!may) {
            Py_CLEAR(*mean);
            return oomkit_refuse_split(
                call,
                "%s.step() is called with a different argument in each micro-batch; "
                "compute it outside the step, or guard the line that counts with `if "
                "oomkit.current().is_last:`" SEE("step-arguments"),
                Py_TYPE(scheduler)->tp_name);
        }
        *at = m->argument;
        *mean = metric_object(call->st, args[m->argument], value);
        if (*mean == NULL) {
            return -1;
        }
        result = 1;
    }
    return result;
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

const oomkit_rule oomkit_scheduler_args_rule = {.attempt_ends = metrics_attempt_ends,
                                                .call_ends = metrics_call_ends};
