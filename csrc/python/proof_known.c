/* What was proven at a site, and whether a split is to be proven. */
#include "proof.h"
#include "errors.h"
#include "step.h"
#include "tensor.h"
#include "tree.h"

static uint64_t
mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0xff51afd7ed558ccdu;
    return hash ^ (hash >> 32);
}

/* A batch of another structure, other participants, another mode or another way to run
 * the backward are proven anew; other sizes are not, unless verify=True. Never 0. */
static uint64_t
proof_key(oomkit_call *call)
{
    uint64_t hash =
        mix((uint64_t)call->batch.count + 1,
            (uint64_t)call->parts->param_count * 2 + (call->replayed != NULL));
    Py_ssize_t i;

    for (i = 0; i < call->batch.count; i++) {
        const oomkit_node *node = &call->batch.nodes[i];
        oomkit_tensor_facts facts;
        hash = mix(hash, (uint64_t)(node->kind * 64 + node->split * 8 + node->flags));
        if (node->split != OOMKIT_SPLIT_ITEMS) {
            hash = mix(hash, (uint64_t)node->children);
        }
        if (node->kind != OOMKIT_NODE_TENSOR) {
            continue;
        }
        if (oomkit_tensor_facts_get(call->st, node->object, 0, &facts) < 0) {
            oomkit_error_dismiss(); /* it does not count */
            continue;
        }
        hash = mix(hash, (uint64_t)(facts.dtype * 16 + facts.ndim));
    }
    hash = mix(hash, oomkit_signature_modes(call));
    if (call->options->verify == 1) {
        hash = mix(hash, oomkit_batch_signature(&call->batch));
    }
    return hash | 1;
}

oomkit_proven *
oomkit_proven_find(oomkit_call *call)
{
    oomkit_step *step = call->step;
    int i;

    if (call->proof_key == 0) {
        call->proof_key = proof_key(call);
    }
    for (i = 0; i < OOMKIT_PROVEN; i++) {
        if (step->proven[i].key == call->proof_key) {
            return &step->proven[i];
        }
    }
    return NULL;
}

int
oomkit_proven_note(oomkit_call *call, PyObject *rule, uint64_t course,
                   oomkit_proof_level level)
{
    oomkit_step *step = call->step;
    oomkit_proven *found = oomkit_proven_find(call);
    PyObject *before; /* owned */
    int labels = oomkit_weights_labels(call);

    if (found == NULL) {
        found = &step->proven[step->proven_next++ % OOMKIT_PROVEN];
    }
    before = found->rule;
    if (found->key != call->proof_key) {
        memset(found->courses, 0, sizeof(found->courses));
    }
    found->key = call->proof_key;
    found->rule = rule;
    found->level = (uint8_t)level;
    found->labels = labels > 0;
    found->courses[found->course_next++ % OOMKIT_COURSES] = course;
    Py_XDECREF(before);
    step->losses.compared = 1; /* a guess about them would say less */
    return labels < 0 ? -1 : 0;
}

void
oomkit_proven_clear(oomkit_proven *proven)
{
    int i;

    for (i = 0; i < OOMKIT_PROVEN; i++) {
        Py_CLEAR(proven[i].rule);
        proven[i].key = 0;
    }
}

PyObject *
oomkit_proof_rule(oomkit_call *call)
{
    const oomkit_proven *found;

    if (call->proof != NULL) {
        return call->proof->rule;
    }
    if (call->options->weight != NULL || call->options->verify == 0 || call->forced) {
        return NULL;
    }
    found = oomkit_proven_find(call);
    return found == NULL ? NULL : found->rule;
}

uint64_t
oomkit_proof_course(const oomkit_call *call)
{
    const oomkit_course *course = &call->course[0];
    uint64_t hash = (uint64_t)course->count + 1;
    int i;

    if (call->course_waived) {
        return 1;
    }
    for (i = 0; i < course->count && i < OOMKIT_COURSE; i++) {
        hash = mix(hash, (uintptr_t)course->events[i].target);
        hash = mix(hash, (uintptr_t)course->events[i].name);
    }
    return hash;
}

int
oomkit_proof_is_new_course(oomkit_call *call)
{
    oomkit_proven *found;
    uint64_t course;
    int i;

    if (call->proof != NULL || call->options->verify == 0 || call->forced ||
        call->restarts >= OOMKIT_RESTARTS) {
        return 0;
    }
    found = oomkit_proven_find(call);
    if (found == NULL || found->level != OOMKIT_PROVEN_FULLY) {
        return 0;
    }
    course = oomkit_proof_course(call);
    for (i = 0; i < OOMKIT_COURSES; i++) {
        if (found->courses[i] == course) {
            return 0;
        }
    }
    found->level = OOMKIT_PROVEN_NOT;
    return 1;
}

int
oomkit_proof_known(oomkit_call *call)
{
    const oomkit_proven *found;

    if (call->proof != NULL) {
        return 1;
    }
    if (call->options->verify == 0 || call->forced) {
        return 0;
    }
    found = oomkit_proven_find(call);
    return found != NULL && found->level == OOMKIT_PROVEN_FULLY;
}

int
oomkit_proof_wanted(oomkit_call *call)
{
    const oomkit_proven *found;

    if (!call->split || call->options->verify == 0 || call->forced ||
        call->st->proves_nothing || call->proof != NULL || call->slice_index > 0 ||
        call->joining) {
        return 0;
    }
    found = oomkit_proven_find(call);
    if (found == NULL || found->level != OOMKIT_PROVEN_FULLY) {
        return 1;
    }
    /* Where no label was ignored, a mean over labels is one over rows. */
    return found->rule == NULL && !found->labels ? oomkit_weights_labels(call) : 0;
}
