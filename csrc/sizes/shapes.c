/* What a site knows about each shape of batch: sizes that worked and that failed. */
#include "sizes.h"
#include "../py/tensor.h"
#include "../batch/batch.h"

static uint64_t
mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0xff51afd7ed558ccdu;
    return hash ^ (hash >> 32);
}

/* --- which shape --- */

/* The training flag of the first module that takes part; 1 without one, as of most
 * that are found later. Never raises. */
static uint64_t
training_flag(const oomkit_call *call)
{
    PyObject *roots = call->parts->roots; /* borrowed */
    Py_ssize_t i;

    for (i = 0; roots != NULL && i < PyList_GET_SIZE(roots); i++) {
        OWNED PyObject *root = oomkit_reference_get(PyList_GET_ITEM(roots, i));
        OWNED PyObject *flag = NULL;
        if (root == NULL ||
            !PyObject_TypeCheck(root, (PyTypeObject *)call->st->Module)) {
            continue;
        }
        flag = PyObject_GetAttr(root, call->st->str_training);
        oomkit_error_dismiss(); /* a module without the flag has none */
        if (flag != NULL) {
            return flag == Py_True;
        }
    }
    return 1;
}

static uint64_t
is_on(PyObject *callable)
{
    OWNED PyObject *on = callable == NULL ? NULL : PyObject_CallNoArgs(callable);

    oomkit_error_dismiss(); /* one mode less to tell shapes apart by */
    return on == Py_True;
}

uint64_t
oomkit_signature_of(const oomkit_call *call, const oomkit_batch *batch, int autocast,
                    int recording)
{
    uint64_t hash = oomkit_batch_signature(batch);
    uint64_t modes = training_flag(call) * 4 + (uint64_t)(autocast != 0) * 2 +
                     (uint64_t)(recording != 0);
    return mix(hash, modes + 1) ^ call->shape.bucket;
}

uint64_t
oomkit_signature_modes(const oomkit_call *call)
{
    return mix(training_flag(call) + 1, is_on(call->st->is_any_autocast) * 2 +
                                            is_on(call->st->is_grad_enabled)) ^
           call->shape.bucket;
}

/* What the shapes of a family have in common, and the bytes of one row of this one:
 * sequence lengths differ in nothing else. Never raises. */
static void
shape_of(oomkit_call *call, oomkit_signature *entry)
{
    oomkit_tensor_facts facts;
    Py_ssize_t i;

    entry->family = oomkit_signature_modes(call);
    entry->row_bytes = 0.0;
    for (i = 0; i < call->batch.count; i++) {
        const oomkit_node *node = &call->batch.nodes[i];
        if (node->kind != OOMKIT_NODE_TENSOR) {
            continue;
        }
        if (oomkit_tensor_facts_get(call->st, node->object, call->options->dim,
                                    &facts) < 0) {
            oomkit_error_dismiss(); /* it does not count */
            continue;
        }
        entry->family = mix(entry->family, (uint64_t)(facts.dtype * 16 + facts.ndim));
        if (facts.size > 0) {
            entry->row_bytes += (double)facts.bytes / (double)facts.size;
        }
    }
}

/* A shape that was not seen before begins with what is known of its nearest neighbour:
 * rather a larger one, whose sizes are safe. */
static void
learn_from_neighbour(oomkit_call *call, oomkit_signature *entry)
{
    oomkit_step *step = call->step;
    const oomkit_signature *nearest = NULL;
    int i;

    for (i = 0; i < step->signature_count; i++) {
        const oomkit_signature *other = &step->signatures[i];
        int is_larger = other->row_bytes >= entry->row_bytes;
        int was_larger = nearest != NULL && nearest->row_bytes >= entry->row_bytes;
        if (other == entry || other->family != entry->family ||
            other->row_bytes <= 0.0 || other->known.borrowed) {
            continue;
        }
        if (nearest == NULL || (is_larger && !was_larger) ||
            (is_larger == was_larger &&
             (is_larger ? other->row_bytes < nearest->row_bytes
                        : other->row_bytes > nearest->row_bytes))) {
            nearest = other;
        }
    }
    if (nearest != NULL && entry->row_bytes > 0.0) {
        oomkit_know_neighbour(&entry->known, &nearest->known,
                              entry->row_bytes / nearest->row_bytes);
    }
}

/* The entry of this call's shape, or NULL when there is none and `create` is 0. */
oomkit_signature *
oomkit_signature_get(oomkit_call *call, int create)
{
    oomkit_step *step = call->step;
    oomkit_signature *entry = NULL;
    int i, oldest = 0;

    if (!call->shape.known) {
        call->shape.signature = oomkit_signature_of(
            call, &call->batch, (int)is_on(call->st->is_any_autocast),
            (int)is_on(call->st->is_grad_enabled));
        call->shape.known = 1;
    }
    for (i = 0; i < step->signature_count; i++) {
        if (step->signatures[i].hash == call->shape.signature) {
            step->signatures[i].used = step->calls;
            return &step->signatures[i];
        }
        if (step->signatures[i].used < step->signatures[oldest].used) {
            oldest = i;
        }
    }
    if (!create) {
        return NULL;
    }
    entry = step->signature_count < OOMKIT_SIGNATURES
                ? &step->signatures[step->signature_count++]
                : &step->signatures[oldest];
    memset(entry, 0, sizeof(*entry));
    entry->hash = call->shape.signature;
    entry->used = step->calls;
    if (step->seen_oom) {
        shape_of(call, entry);
        learn_from_neighbour(call, entry);
    }
    return entry;
}

/* --- what the planner is told --- */

/* Of the budget: blocks are rounded and do not fit, less so in segments that grow. */
#define ACCELERATOR_MARGIN 0.06
#define EXPANDABLE_MARGIN 0.03
#define SURVEY_EVERY 16 /* calls of a step that has run out of memory on a device */

static const oomkit_knowledge nothing; /* all zeros */

/* What accumulates beyond the baseline: gradients that were there are in it. */
static uint64_t
gradients_beyond(oomkit_call *call)
{
    const oomkit_signature *entry = oomkit_signature_get(call, 0); /* borrowed */
    const int seen = call->sizes.gradients != OOMKIT_GRADIENTS_UNSEEN;
    int kept = seen ? call->sizes.gradients == OOMKIT_GRADIENTS_THERE
                    : call->sizes.entry_gradients > 0 && call->sizes.dropped == 0;

    if (kept || call->step->gradient_bytes == 0 ||
        (entry != NULL && entry->known.rung >= OOMKIT_RUNG_NONE_BESIDE)) {
        return 0;
    }
    if (!seen) { /* an evaluation has none, whatever the model wants */
        if (call->sizes.forward_only || (entry != NULL && entry->forward_only)) {
            return 0;
        }
    }
    return call->step->gradient_bytes;
}

/* The limit in force, and what the device had for us when it was last asked: other
 * processes come and go. */
static uint64_t
budget_of(oomkit_call *call)
{
    uint64_t budget = oomkit_device_budget(call->st, call->device);
    uint64_t usable = call->step->device_bytes;
    if (call->device.type == OOMKIT_DEVICE_CPU || usable == 0) { /* not asked yet */
        return budget;
    }
    return usable < budget ? usable : budget;
}

static double
margin_of(const oomkit_call *call)
{
    if (call->device.type == OOMKIT_DEVICE_CPU) {
        return 0.0;
    }
    return oomkit_device_expandable(call->st, call->device) ? EXPANDABLE_MARGIN
                                                            : ACCELERATOR_MARGIN;
}

/* The driver is asked at failures, and now and then by a step that has had one: it is
 * slow to answer. */
static int
survey_is_due(const oomkit_call *call)
{
    const oomkit_step *step = call->step;
    return !step->surveyed ||
           (call->device.type != OOMKIT_DEVICE_CPU && call->tries.ooms == 0 &&
            step->seen_oom && step->calls - step->surveyed_at >= SURVEY_EVERY);
}

void
oomkit_signature_request(oomkit_call *call, oomkit_plan_request *request,
                         const oomkit_knowledge **known)
{
    const oomkit_options *options = call->options;
    const oomkit_signature *entry = oomkit_signature_get(call, call->step->seen_oom);

    if (survey_is_due(call)) { /* whether fewer would do depends on the room */
        oomkit_signature_survey(call);
    }
    if (call->tries.ooms == 0) {
        oomkit_baseline_enter(call);
    }
    *known = entry == NULL ? &nothing : &entry->known;
    *request = (oomkit_plan_request){
        .batch = call->batch.rows,
        .min_micro_batch = oomkit_unfit_least(call),
        .multiple_of = oomkit_unfit_multiple(call),
        .start_accumulation = options->accumulation_steps,
        .baseline_bytes = oomkit_baseline(call),
        .budget_bytes = budget_of(call),
        .gradient_bytes = gradients_beyond(call),
        .largest_gradient =
            gradients_beyond(call) > 0 ? call->step->largest_gradient : 0,
        .margin = margin_of(call),
    };
}

/* --- what it learns --- */

void
oomkit_signature_survey(oomkit_call *call)
{
    oomkit_step *step = call->step;
    oomkit_tensor_facts facts;
    uint64_t gradient_bytes = 0, largest = 0;
    Py_ssize_t i;

    step->surveyed = 1;
    step->surveyed_at = step->calls;
    step->device = call->device;
    step->param_count = (uint64_t)call->parts->param_count;
    step->param_bytes = 0;
    for (i = 0; i < call->parts->param_count; i++) {
        if (oomkit_tensor_facts_get(call->st, call->parts->params[i], 0, &facts) < 0) {
            oomkit_error_dismiss(); /* an estimate goes without it */
            continue;
        }
        step->param_bytes += facts.bytes;
        gradient_bytes += facts.requires_grad ? facts.bytes : 0;
        largest = facts.requires_grad && facts.bytes > largest ? facts.bytes : largest;
    }
    step->largest_gradient = largest;
    step->gradient_bytes = is_on(call->st->is_grad_enabled) ? gradient_bytes : 0;
    if (call->device.type != OOMKIT_DEVICE_CPU) {
        step->device_bytes = oomkit_device_usable(call->st, call->device);
    }
}

/* Peaks of a replay do not compare: its call was there before with all it had saved. */
static void
measured_complete(oomkit_call *call, oomkit_measured *m)
{
    if (oomkit_call_is_replay(call)) {
        m->bytes[OOMKIT_FIRST] = m->bytes[OOMKIT_LATER] = m->optimizer_bytes = 0;
    }
    m->batch = call->batch.rows > 0 ? call->batch.rows : m->rows[OOMKIT_FIRST];
    m->k = call->cut->count > 0 ? call->cut->count : 1;
    m->baseline_bytes = oomkit_baseline(call);
    m->budget_bytes = budget_of(call);
    m->gradient_bytes = gradients_beyond(call);
    m->alloc_retries = call->sizes.window.alloc_retries != OOMKIT_UNKNOWN &&
                               call->sizes.window.alloc_retries > 0 &&
                               !call->sizes.window.open
                           ? 1
                           : 0;
}

void
oomkit_signature_succeeded(oomkit_call *call, int64_t micro_batch, uint64_t peak_bytes)
{
    oomkit_signature *entry = oomkit_signature_get(call, 1);

    if (call->cut->measured.rows[OOMKIT_FIRST] < 1) { /* a caller's backward: no peak */
        call->cut->measured.rows[OOMKIT_FIRST] = micro_batch;
    }
    measured_complete(call, &call->cut->measured);
    oomkit_know_worked(&entry->known, &call->cut->measured);
    entry->forward_only = call->sizes.forward_only;
    if (micro_batch >= entry->peak_rows && peak_bytes != OOMKIT_UNKNOWN) {
        entry->peak_rows = micro_batch;
        entry->peak_bytes = peak_bytes;
    }
    if (call->options->remember) {
        oomkit_recall_note(call, entry);
    }
}

void
oomkit_signature_failed(oomkit_call *call, int64_t micro_batch)
{
    oomkit_signature *entry = oomkit_signature_get(call, 1);
    oomkit_measured *m = &call->cut->measured;
    oomkit_role role =
        call->cut->slices != NULL && call->cut->at > 0 ? OOMKIT_LATER : OOMKIT_FIRST;

    if (call->cut->slices !=
        NULL) { /* a first slice may be larger than the one that failed */
        micro_batch = call->cut->slices[call->cut->at].length;
    }
    if (entry->row_bytes <= 0.0) { /* from before the first OOM of this site */
        shape_of(call, entry);
    }
    oomkit_signature_survey(call);
    measured_complete(call, m);
    if (call->cut->slices != NULL &&
        role == OOMKIT_LATER) { /* the first one has worked */
        oomkit_know_measured(&entry->known, OOMKIT_FIRST, m->rows[OOMKIT_FIRST],
                             m->bytes[OOMKIT_FIRST], m->baseline_bytes, m->budget_bytes,
                             m->gradient_bytes);
    }
    oomkit_know_failed(&entry->known, role, micro_batch, m->baseline_bytes,
                       m->budget_bytes, m->gradient_bytes);
    memset(m, 0, sizeof(*m));
    if (entry->peak_rows >= micro_batch) {
        entry->peak_rows = 0;
    }
}

/* The step turned out not to be splittable: its next call is tried whole again. */
void
oomkit_signature_forget(oomkit_call *call)
{
    oomkit_signature *entry = oomkit_signature_get(call, 0);
    if (entry != NULL) {
        memset(&entry->known, 0, sizeof(entry->known));
        entry->peak_rows = 0;
    }
}

void
oomkit_signature_doubt(oomkit_call *call)
{
    const oomkit_signature *entry = oomkit_signature_get(call, 0);

    if (entry != NULL && entry->known.k <= 1) {
        oomkit_signature_forget(call);
    }
}

/* Copies of gradients at entry are an insurance: taken when asked for, while the call
 * is split, while this shape is unproven, and when its last peak came near the budget.
 */
int
oomkit_call_wants_copies(oomkit_call *call)
{
    const oomkit_signature *known;

    if (call->options->gradient_safety != OOMKIT_SAFETY_AUTO) {
        return call->options->gradient_safety == OOMKIT_SAFETY_COPY;
    }
    if (call->split) {
        return 1;
    }
    known = oomkit_signature_get(call, 1);
    if (known->known.successes == 0 || known->known.recalled) {
        return 1;
    }
    if (call->sizes.window.budget_bytes == OOMKIT_UNKNOWN || known->peak_bytes == 0) {
        return 0;
    }
    return (double)known->peak_bytes > 0.9 * (double)call->sizes.window.budget_bytes;
}

int64_t
oomkit_unfit_least(const oomkit_call *call)
{
    int64_t least = call->options->min_micro_batch;

    least = call->step->least_rows > least ? call->step->least_rows : least;
    least =
        call->step->whole_only && call->batch.rows > least ? call->batch.rows : least;
    return call->sizes.least > least ? call->sizes.least : least;
}

int64_t
oomkit_unfit_multiple(const oomkit_call *call)
{
    int64_t multiple = call->options->multiple_of;
    int even = call->step->even_rows || call->sizes.even;

    /* An odd batch cannot be cut into even parts: its last one would be odd. */
    return even && call->batch.rows % 2 == 0 && multiple % 2 != 0 ? 2 * multiple
                                                                  : multiple;
}

void
oomkit_unfit_bound(oomkit_call *call, int64_t least, int even)
{
    call->sizes.least = least > 0 ? least : call->sizes.least;
    call->sizes.even |= even;
}

void
oomkit_unfit_bound_site(oomkit_call *call)
{
    if (call->sizes.least > call->step->least_rows) {
        call->step->least_rows = (int)call->sizes.least;
    }
    call->step->even_rows |= call->sizes.even;
}
