/* The forgotten reduction="sum": the losses of the first split call beside the last
 * whole one. */
#include "accum.h"
#include "../call/step.h"
#include "../py/tensor.h"
#include "../undo/undo.h"

#include <math.h>

#define NEAR 0.2    /* relative distance at which two losses are of the same kind */
#define EQUAL 0.005 /* at which two of the same batch are the same loss */
#define EQUAL_HALF 0.02
#define EARLY 64  /* copies on a device: calls 1, 2, 4 ... up to this, then every so */
#define FLOAT16 5 /* c10::ScalarType */
#define FLOAT32 6
#define FLOAT64 7
#define BFLOAT16 15

static uint32_t
dtype_size(int32_t dtype)
{
    switch (dtype) {
    case FLOAT16:
    case BFLOAT16:
        return 2;
    case FLOAT32:
        return 4;
    case FLOAT64:
        return 8;
    default:
        return 0;
    }
}

PyObject *
oomkit_losses_root(oomkit_state *st, PyObject *roots)
{
    if (PyTuple_Check(roots) && PyTuple_GET_SIZE(roots) == 1) {
        roots = PyTuple_GET_ITEM(roots, 0);
    }
    return oomkit_tensor_check(st, roots) ? roots : NULL;
}

/* A copy of a scalar on a device, which waits for nothing. Never fails: a loss that
 * cannot be copied is not compared. */
static void
losses_copy(oomkit_state *st, PyObject *root, oomkit_loss *loss)
{
    OWNED PyObject *plain = NULL;

    EXEMPT (st) {
        plain = PyObject_CallMethodNoArgs(root, st->str_detach);
        Py_XSETREF(loss->tensor,
                   plain ? PyObject_CallMethodNoArgs(plain, st->str_clone) : NULL);
    }
    if (PyErr_Occurred()) {
        oomkit_error_dismiss(); /* as the contract says */
    }
}

/* While whole: the value as it is. Two look-ups of a tensor's header on the CPU. */
static void
losses_keep(oomkit_call *call, PyObject *root)
{
    oomkit_state *st = call->st;
    oomkit_loss *loss = &call->whole_loss;
    oomkit_loss_site *site = &call->step->losses;
    oomkit_tensor_facts facts;
    uint64_t calls = call->step->calls;

    if (site->compared || loss->size != 0) {
        return;
    }
    if (site->size != 0 && st->bridge->bytes_get(root, st->impl_offset, loss->bytes,
                                                 site->size) == OOMKIT_OK) {
        loss->size = site->size;
        return;
    }
    if (oomkit_tensor_facts_get(st, root, 0, &facts) < 0) {
        oomkit_error_dismiss(); /* a loss that cannot be read is not compared */
        return;
    }
    site->size = dtype_size(facts.dtype);
    if (site->size == 0 || facts.bytes != site->size) {
        return;
    }
    if (st->bridge->bytes_get(root, st->impl_offset, loss->bytes, site->size) ==
        OOMKIT_OK) {
        loss->size = site->size;
    } else if (calls <= EARLY ? (calls & (calls - 1)) == 0 : calls % EARLY == 0) {
        losses_copy(st, root, loss);
    }
}

void
oomkit_losses_learn(oomkit_call *call, int64_t rows)
{
    oomkit_loss *loss = &call->whole_loss;
    oomkit_loss_site *site = &call->step->losses;

    if (rows <= 0 || (loss->size == 0 && loss->tensor == NULL)) {
        return;
    }
    Py_CLEAR(site->before.tensor);
    site->before = site->whole;
    site->whole = *loss;
    loss->tensor = NULL; /* now the site's */
    site->rows = rows;
}

void
oomkit_loss_site_clear(oomkit_loss_site *site)
{
    Py_CLEAR(site->whole.tensor);
    Py_CLEAR(site->before.tensor);
    site->whole.size = site->before.size = 0;
}

void
oomkit_loss_take(oomkit_state *st, PyObject *tensor, oomkit_loss *loss)
{
    oomkit_tensor_facts facts;
    uint32_t size;

    if (oomkit_tensor_facts_get(st, tensor, 0, &facts) < 0) {
        oomkit_error_dismiss(); /* a loss that cannot be read is not compared */
        return;
    }
    size = dtype_size(facts.dtype);
    if (size == 0 || facts.bytes != size) {
        return;
    }
    if (st->bridge->bytes_get(tensor, st->impl_offset, loss->bytes, size) ==
        OOMKIT_OK) {
        loss->size = size;
    } else { /* the same memory: worth nothing once the version has moved */
        loss->tensor = PyObject_CallMethodNoArgs(tensor, st->str_detach);
        loss->version = facts.version;
        if (loss->tensor == NULL) {
            oomkit_error_dismiss(); /* likewise */
        }
    }
}

void
oomkit_loss_drop(oomkit_loss *loss)
{
    Py_CLEAR(loss->tensor);
    loss->size = 0;
}

/* tensor.item() as a double; NaN for everything that has none. */
static double
losses_item(oomkit_state *st, PyObject *tensor)
{
    OWNED PyObject *number = NULL;
    double value = NAN;

    EXEMPT (st) {
        number = PyObject_CallMethodNoArgs(tensor, st->str_item);
    }
    if (number != NULL && PyFloat_Check(number)) {
        value = PyFloat_AS_DOUBLE(number);
    }
    if (PyErr_Occurred()) {
        oomkit_error_dismiss(); /* several elements, or a loss that cannot be read */
    }
    return value;
}

double
oomkit_loss_value(oomkit_state *st, const oomkit_loss *loss, int32_t dtype)
{
    double value = NAN;
    float single;
    uint32_t word = 0;

    if (loss->tensor != NULL) {
        return losses_item(st, loss->tensor);
    }
    if (loss->size == 0 || loss->size != dtype_size(dtype)) {
        return NAN;
    }
    switch (dtype) {
    case FLOAT64:
        memcpy(&value, loss->bytes, sizeof(value));
        return value;
    case BFLOAT16: /* the upper half of a float */
        word = (uint32_t)loss->bytes[0] << 16 | (uint32_t)loss->bytes[1] << 24;
        memcpy(&single, &word, sizeof(single));
        return (double)single;
    case FLOAT16:
        value = PyFloat_Unpack2((const char *)loss->bytes, 1);
        if (value == -1.0 && PyErr_Occurred()) {
            oomkit_error_dismiss(); /* not compared then */
            return NAN;
        }
        return value;
    default:
        memcpy(&single, loss->bytes, sizeof(single));
        return (double)single;
    }
}

int
oomkit_loss_is_nan(oomkit_state *st, PyObject *root, const oomkit_tensor_facts *facts)
{
    oomkit_loss loss = {.size = dtype_size(facts->dtype)};

    if (loss.size == 0 || facts->bytes != loss.size) {
        return 0; /* a vector, whose gradient is given, has no value */
    }
    if (st->bridge->bytes_get(root, st->impl_offset, loss.bytes, loss.size) !=
        OOMKIT_OK) {
        return isnan(losses_item(st, root));
    }
    return isnan(oomkit_loss_value(st, &loss, facts->dtype));
}

static int
near(double value, double wanted, double limit)
{
    return fabs(value - wanted) <= limit * fabs(wanted);
}

/* The whole loss, and how many times it a sum over this batch's rows would be. NaN when
 * losses differ so much from call to call that nothing can be said. */
static double
losses_whole(const oomkit_call *call, int32_t dtype, double *rows_factor)
{
    double whole, before;
    const oomkit_loss_site *site = &call->step->losses;

    *rows_factor = 1.0;
    if (call->whole_loss.size != 0 || call->whole_loss.tensor != NULL) {
        return oomkit_loss_value(call->st, &call->whole_loss,
                                 dtype); /* of this very batch */
    }
    if (site->rows > 0) {
        *rows_factor = (double)call->batch.rows / (double)site->rows;
    }
    whole = oomkit_loss_value(call->st, &site->whole, dtype);
    before = oomkit_loss_value(call->st, &site->before, dtype);
    return near(before, whole, NEAR) ? whole : NAN;
}

/* Nothing to compare with, as when memory ran out in the very first forward or losses
 * change too fast: where the code of the step names a sum, what is taken for granted is
 * said once, in the log, beside the line about the split. */
static int
losses_unknown(oomkit_call *call)
{
    const oomkit_options *options = call->options;
    OWNED PyObject *sums = NULL;

    if (options->reduction_given || call->cut->losses.is_sum || options->verify == 1 ||
        options->backward != NULL || oomkit_loss_is_returned(call)) {
        return 0; /* stated, or verified anyway */
    }
    sums = PyObject_CallOneArg(call->st->names_sum, call->given.func);
    if (sums == NULL || sums != Py_True) {
        return sums == NULL ? -1 : 0;
    }
    return oomkit_say(
        call->st, "warning", "sO",
        "the loss of %s is treated as a mean over samples, because no call ran with "
        "the whole batch to compare with. Pass reduction=\"mean\" or reduction=\"sum\" "
        "to state which it is, or verify=True to have it checked",
        options->label);
}

/* Does nothing else tell of a loss that the slices do not make up? */
static int
losses_are_unverified(const oomkit_call *call)
{
    return call->options->verify < 0 && !oomkit_loss_is_returned(call) &&
           !call->step->losses.labels_said;
}

/* How near losses of the same batch must be: random numbers and batch statistics make a
 * difference anyway. Negative on failure. */
static double
losses_limit(oomkit_call *call, int32_t dtype)
{
    int noisy = oomkit_buffers_norm(call, 0);

    noisy = noisy == 0 ? oomkit_rng_moved(call) : noisy;
    if (noisy != 0) {
        return noisy < 0 ? -1.0 : NEAR;
    }
    return dtype_size(dtype) == 2 ? EQUAL_HALF : EQUAL;
}

/* The whole loss of this very batch, in the attempt that failed, beside that of its
 * micro-batches: where they differ, the samples depend on each other. 0 or -1. */
static int
losses_judge_coupled(oomkit_call *call, double whole, double limit)
{
    const oomkit_losses *l = &call->cut->losses;
    double joined = l->is_sum ? l->sum : l->mean;

    if (fabs(joined - whole) <= limit * fmax(fabs(whole), l->largest)) {
        return 0;
    }
    return oomkit_warn(
        call->st->OomkitWarning, 4,
        "oomkit: %U is split, but the losses of its micro-batches do not add up to the "
        "loss of the whole batch. A loss that couples the samples of a batch "
        "(contrastive, in-batch negatives, batch statistics) cannot be split exactly. "
        "For a mean over something other than rows (tokens, classes) pass weight= to "
        "auto_batch" SEE("split-not-exact"),
        call->options->label);
}

/* All losses of the split batch are known and the last backward has not run: a sum or a
 * mean, beside what the weights say it is? */
static int
losses_judge(oomkit_call *call, int32_t dtype)
{
    oomkit_losses *l = &call->cut->losses;
    double factor, whole = losses_whole(call, dtype, &factor), limit = NEAR;
    int is_sum, is_mean,
        same_batch = call->whole_loss.size != 0 || call->whole_loss.tensor != NULL;

    call->step->losses.compared = 1;
    oomkit_loss_site_clear(&call->step->losses);
    if (!isfinite(whole) || whole == 0.0 || !isfinite(l->sum)) {
        return losses_unknown(call);
    }
    if (same_batch && (limit = losses_limit(call, dtype)) < 0.0) {
        return -1;
    }
    is_sum = near(l->sum, whole * factor, limit);
    is_mean = near(l->mean, whole, limit);
    if (limit < NEAR && is_sum == is_mean && losses_are_unverified(call)) {
        return losses_judge_coupled(call, whole, limit);
    }
    if (is_sum == is_mean) {
        return losses_unknown(call);
    }
    if (is_sum == l->is_sum) {
        return 0;
    }
    if (!same_batch && is_sum && call->options->reduction_given) {
        return 0; /* of another batch, which may have another loss: the user knows */
    }
    l->said = 1;
    if (!same_batch && is_sum) {
        return oomkit_warn(
            call->st->OomkitWarning, 4,
            "oomkit: %U is split, and the losses of its micro-batches add up to the "
            "loss of the previous batch. If the loss is a sum over samples, pass "
            "reduction=\"sum\" to auto_batch: otherwise the gradients are about %lld "
            "times too small. If it is a mean, pass reduction=\"mean\"" SEE(
                "loss-reduction"),
            call->options->label, (long long)call->cut->count);
    }
    if (is_sum) {
        return oomkit_warn(
            call->st->OomkitWarning, 4,
            "oomkit: %U is split as a mean, but its loss looks like a sum over "
            "samples: the losses of the micro-batches add up to that of the whole "
            "batch. Pass reduction=\"sum\" to auto_batch: otherwise the gradients are "
            "about %lld times too small" SEE("loss-reduction"),
            call->options->label, (long long)call->cut->count);
    }
    return oomkit_warn(
        call->st->OomkitWarning, 4,
        "oomkit: %U is split as a sum (%s), but its loss looks like a mean: each "
        "micro-batch has the loss of the whole batch. Pass reduction=\"mean\" to "
        "auto_batch: otherwise the gradients are about %lld times too large" SEE(
            "loss-reduction"),
        call->options->label,
        l->counts_items ? "num_items_in_batch was passed" : "reduction=\"sum\"",
        (long long)call->cut->count);
}

/* In the first split call of the site. 0 or -1. */
static int
losses_compare(oomkit_call *call, PyObject *root)
{
    oomkit_losses *l = &call->cut->losses;
    oomkit_tensor_facts facts;
    double value, by_rows;

    if (call->step->losses.compared || oomkit_loss_is_rowwise(call) ||
        call->options->weight != NULL || call->cut->weights == NULL ||
        l->seen != call->cut->at) {
        return 0;
    }
    if (oomkit_tensor_facts_get(call->st, root, 0, &facts) < 0) {
        return -1;
    }
    value = losses_item(call->st, root);
    by_rows =
        (double)call->cut->slices[call->cut->at].length / (double)call->batch.rows;
    l->sum += value;
    l->mean += value * by_rows;
    l->largest = fmax(l->largest, fabs(value) * (l->is_sum ? 1.0 : by_rows));
    l->seen++;
    return l->seen == call->cut->count ? losses_judge(call, facts.dtype) : 0;
}

int
oomkit_losses_replay(oomkit_call *call, PyObject *root)
{
    oomkit_losses *l = &call->cut->losses;
    double weight =
        call->cut->weights == NULL ? 1.0 : call->cut->weights[call->cut->at];
    double value;

    if (call->options->verify == 0) {
        return 0;
    }
    if (call->cut->at == 0) {
        oomkit_tensor_facts facts;
        OWNED PyObject *tolerance = PyObject_CallOneArg(call->st->tolerance, root);
        l->tolerance = tolerance == NULL ? -1.0 : PyFloat_AsDouble(tolerance);
        if (PyErr_Occurred() ||
            oomkit_tensor_facts_get(call->st, root, 0, &facts) < 0) {
            return -1;
        }
        l->made = l->scale = 0.0;
        l->dtype = facts.dtype;
    }
    value = weight == 0.0 ? 0.0 : weight * losses_item(call->st, root);
    l->made += value;
    l->scale = fmax(l->scale, fabs(value));
    l->replayed = call->cut->at + 1;
    return 0;
}

/* What the call's loss was, NaN where it is not known any more. */
static double
replayed_whole(oomkit_call *call, const oomkit_loss *loss)
{
    uint32_t version;

    if (loss->tensor != NULL &&
        oomkit_tensor_version(call->st, loss->tensor, &version) < 0) {
        oomkit_error_dismiss(); /* it cannot be read, then */
        return NAN;
    }
    if (loss->tensor != NULL && version != loss->version) {
        return NAN; /* the caller changed it in place */
    }
    return oomkit_loss_value(call->st, loss, call->cut->losses.dtype);
}

int
oomkit_losses_replay_differs(oomkit_call *call, PyObject *text, int noise)
{
    if (text == NULL || text == Py_None) {
        return text == NULL ? -1 : 0;
    }
    if (noise || call->options->verify == OOMKIT_VERIFY_WARN) {
        return oomkit_warn(call->st->OomkitWarning, 1,
                           "oomkit: %U %U" SEE("replay-differs"), call->options->label,
                           text);
    }
    return oomkit_give_up_for(
        call,
        PyUnicode_FromFormat("the backward() of %U's loss ran out of memory and is "
                             "not retried: the step %U; the gradients are as before "
                             "it" SEE("replay-differs"),
                             call->options->label, text));
}

int
oomkit_losses_replayed(oomkit_call *call, const oomkit_loss *loss, int noise)
{
    const oomkit_losses *l = &call->cut->losses;
    OWNED PyObject *text = NULL;
    double whole;

    if (call->options->verify != 0 && l->rows != NULL) {
        return oomkit_losses_rows_judge(call, noise);
    }
    if (call->options->verify == 0 || l->replayed != call->cut->count) {
        return 0;
    }
    whole = replayed_whole(call, loss);
    if (l->said && near(l->is_sum ? l->mean : l->sum, whole, noise ? NEAR : EQUAL)) {
        return 0; /* of another kind, which explains it */
    }
    text = PyObject_CallFunction(call->st->replay_differs, "ddddi", whole, l->made,
                                 l->scale, l->tolerance, noise);
    return oomkit_losses_replay_differs(call, text, noise);
}

/* A micro-batch that has nothing of what the loss was found to be a mean over weighs 0,
 * so that its backward is left out: its loss is 0 or NaN, then. One that is divided by
 * a number that is not 0 is neither, and belongs to the whole. 0 or -1. */
static int
losses_left_out(oomkit_call *call, PyObject *root)
{
    const int64_t at = call->cut->at;
    oomkit_tensor_facts facts;
    double value;

    if (root == NULL || oomkit_proof_rule(call) == NULL || call->cut->weights == NULL ||
        call->cut->weights[at] != 0.0 || call->options->weight != NULL) {
        return 0;
    }
    if (oomkit_tensor_facts_get(call->st, root, 0, &facts) < 0) {
        oomkit_error_dismiss(); /* a loss that cannot be read is not judged */
        return 0;
    }
    value = facts.size == 1 || facts.ndim == 0 ? losses_item(call->st, root) : 0.0;
    if (value == 0.0 || !isfinite(value)) {
        return 0;
    }
    return oomkit_refuse_split(
        call,
        "micro-batch %lld of %lld (%lld rows) has nothing of what the loss is a mean "
        "over, and its loss is not 0, as for a sum that is divided by n.clamp(eps). "
        "Divide by a number of the whole batch, and pass reduction=\"sum\"" SEE(
            "empty-micro-batch"),
        (long long)(at + 1), (long long)call->cut->count,
        (long long)call->cut->slices[at].length);
}

int
oomkit_losses_note(oomkit_call *call, PyObject *roots)
{
    PyObject *root = oomkit_losses_root(call->st, roots); /* borrowed from roots */

    if (call->split) {
        oomkit_nothing_begin(call, root);
        if (losses_left_out(call, root) < 0) {
            return -1;
        }
    }
    if (root == NULL || call->backward.done > 0) {
        return 0;
    }
    if (call->split) {
        return losses_compare(call, root);
    }
    losses_keep(call, root);
    return 0;
}

static int
losses_backward(oomkit_call *call, oomkit_backward *backward)
{
    return call->proof == NULL ? oomkit_losses_note(call, backward->roots) : 0;
}

static void
losses_call_ends(oomkit_call *call)
{
    Py_CLEAR(call->whole_loss.tensor);
}

const oomkit_rule oomkit_loss_value_rule = {.backward_begins = losses_backward,
                                            .whole_call_ends = oomkit_losses_learn,
                                            .call_ends = losses_call_ends};
