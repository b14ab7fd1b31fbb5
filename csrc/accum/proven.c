/* What was proven at a site, and whether a split is to be proven. */
#include "accum.h"
#include "../py/tensor.h"
#include "../sizes/sizes.h"
#include "../batch/batch.h"

#define MISSED 3 /* calls in a row in which losses could not be compared */
/* Of edges; then they are forgotten and the split is proven anew. */
#define KINDS 4096

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
            (uint64_t)call->parts->param_count * 2 + oomkit_call_is_replay(call));
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

/* --- kinds of edges --- */

static void
kinds_clear(oomkit_edge_kinds *kinds)
{
    PyMem_Free(kinds->hashes);
    *kinds = (oomkit_edge_kinds){0};
}

/* The place of a hash, or the free one where it belongs. */
static uint64_t *
kinds_place(const oomkit_edge_kinds *kinds, uint64_t hash)
{
    uint32_t at = (uint32_t)hash & (kinds->room - 1);

    while (kinds->hashes[at] != 0 && kinds->hashes[at] != hash) {
        at = (at + 1) & (kinds->room - 1);
    }
    return &kinds->hashes[at];
}

/* Room for one more. 0 or -1. */
static int
kinds_grow(oomkit_edge_kinds *kinds)
{
    oomkit_edge_kinds grown = {.room = kinds->room == 0 ? 128 : kinds->room * 2};
    uint32_t i;

    grown.hashes = PyMem_Calloc(grown.room, sizeof(*grown.hashes));
    if (grown.hashes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (i = 0; i < kinds->room; i++) {
        if (kinds->hashes[i] != 0) {
            *kinds_place(&grown, kinds->hashes[i]) = kinds->hashes[i];
        }
    }
    grown.count = kinds->count;
    kinds_clear(kinds);
    *kinds = grown;
    return 0;
}

/* 1: it was not there and is now; 0; -1. */
static int
kinds_add(oomkit_edge_kinds *kinds, uint64_t hash)
{
    if (kinds->room > 0 && *kinds_place(kinds, hash) == hash) {
        return 0;
    }
    if (kinds->count == KINDS) {
        kinds_clear(kinds);
    }
    if (kinds->count * 2 >= kinds->room && kinds_grow(kinds) < 0) {
        return -1;
    }
    *kinds_place(kinds, hash) = hash;
    kinds->count++;
    return 1;
}

/* What a node does: the name of its type. Each graph that torch.compile has compiled is
 * a type of its own, all of one name. */
static uint64_t
node_kind(PyObject *node)
{
    const char *name = Py_TYPE(node)->tp_name;
    uint64_t hash =
        strstr(name, "CompiledFunction") != NULL ? (uintptr_t)Py_TYPE(node) : 0;

    for (; *name != '\0'; name++) {
        hash = (hash ^ (unsigned char)*name) * 0x100000001b3u;
    }
    return hash;
}

oomkit_proven *
oomkit_proven_find(oomkit_call *call)
{
    oomkit_step *step = call->step;
    int i;

    if (call->shape.proof_key == 0) {
        call->shape.proof_key = proof_key(call);
    }
    for (i = 0; i < OOMKIT_PROVEN; i++) {
        if (step->proven[i].key == call->shape.proof_key) {
            return &step->proven[i];
        }
    }
    return NULL;
}

int
oomkit_proven_note(oomkit_call *call, PyObject *rule, PyObject *tried,
                   uint64_t sequence, oomkit_proof_level level)
{
    oomkit_step *step = call->step;
    oomkit_proven *found = oomkit_proven_find(call);
    OWNED PyObject *before = NULL, *before_tried = NULL;
    int labels = oomkit_weights_labels(call);

    if (found == NULL) {
        found = &step->proven[step->proven_next++ % OOMKIT_PROVEN];
    }
    before = found->rule;
    before_tried = found->tried;
    if (found->key != call->shape.proof_key) {
        memset(found->sequences, 0, sizeof(found->sequences));
        kinds_clear(&found->kinds);
        found->missed = found->unseen = 0;
        found->shown = 0;
        found->calls = 1;
    }
    found->key = call->shape.proof_key;
    found->rule = rule;
    found->tried = tried;
    found->call = call->log.number;
    found->level = (uint8_t)level;
    found->labels = labels > 0;
    if (sequence != 0) { /* 0: nothing but losses were compared */
        found->sequences[found->sequence_next++ % OOMKIT_SEQUENCES] = sequence;
    }
    if (sequence != 0 || level == OOMKIT_PROVEN_WEAKLY) {
        found->shown = call->log.number; /* no mere look at losses of later calls */
        found->unseen = 0;
    }
    step->losses.compared = 1; /* a guess about them would say less */
    return labels < 0 ? -1 : 0;
}

void
oomkit_proven_forget(oomkit_call *call)
{
    oomkit_proven *found = oomkit_proven_find(call);

    if (found != NULL) {
        PyObject *rule = found->rule, *tried = found->tried; /* owned */
        kinds_clear(&found->kinds);
        memset(found, 0, sizeof(*found));
        Py_XDECREF(rule);
        Py_XDECREF(tried);
    }
}

void
oomkit_proven_again(oomkit_call *call)
{
    oomkit_proven *found = oomkit_proven_find(call);

    if (found != NULL && found->missed < MISSED) {
        found->missed++;
        found->calls--;
    }
}

void
oomkit_proven_clear(oomkit_proven *proven)
{
    int i;

    for (i = 0; i < OOMKIT_PROVEN; i++) {
        Py_CLEAR(proven[i].rule);
        Py_CLEAR(proven[i].tried);
        kinds_clear(&proven[i].kinds);
        proven[i].key = 0;
    }
}

PyObject *
oomkit_proof_rule(oomkit_call *call)
{
    const oomkit_proven *found;

    if (call->cut->losses.on_trial != NULL) {
        return *call->cut->losses.on_trial;
    }
    if (call->options->weight != NULL || call->options->verify == 0 ||
        call->cut->forced) {
        return NULL;
    }
    found = oomkit_proven_find(call);
    return found == NULL ? NULL : found->rule;
}

uint64_t
oomkit_proof_sequence(const oomkit_call *call)
{
    const oomkit_sequence *sequence = &call->cut->sequence[0];
    uint64_t hash = (uint64_t)sequence->count + 1;
    int i;

    if (call->sequence_waived) {
        return 1;
    }
    for (i = 0; i < sequence->count && i < OOMKIT_SEQUENCE; i++) {
        hash = mix(hash, (uintptr_t)sequence->events[i].target);
        hash = mix(hash, (uintptr_t)sequence->events[i].name);
    }
    return hash;
}

/* Is this call's split proven? */
static int
known_fully(const oomkit_call *call, const oomkit_proven *found)
{
    return found->level == OOMKIT_PROVEN_FULLY ||
           (found->level == OOMKIT_PROVEN_HERE && found->call == call->log.number);
}

/* Is its split taken for exact, by gradients or by losses alone? */
static int
known_now(const oomkit_call *call, const oomkit_proven *found)
{
    return found->level == OOMKIT_PROVEN_WEAKLY || known_fully(call, found);
}

oomkit_proven *
oomkit_proven_watches(oomkit_call *call)
{
    oomkit_proven *found;

    if (!call->split || call->cut->at > 0 || call->proof != NULL ||
        call->options->verify == 0 || call->cut->forced) {
        return NULL;
    }
    found = oomkit_proven_find(call);
    return found != NULL && known_now(call, found) ? found : NULL;
}

int
oomkit_proven_edge(const oomkit_call *call, oomkit_proven *proven, PyObject *from,
                   PyObject *to)
{
    const int added = kinds_add(
        &proven->kinds, mix(from == NULL ? 1 : node_kind(from), node_kind(to)) | 1);

    /* A call whose gradients were compared has this graph's operations in it. */
    proven->unseen |= added > 0 && proven->shown != call->log.number;
    return added < 0 ? -1 : 0;
}

int
oomkit_proof_is_new_sequence(oomkit_call *call)
{
    oomkit_proven *found;
    uint64_t sequence;
    int i, known;

    if (call->proof != NULL || call->options->verify == 0 || call->cut->forced) {
        return 0;
    }
    found = oomkit_proven_find(call);
    if (found == NULL || !known_now(call, found)) {
        return 0;
    }
    sequence = oomkit_proof_sequence(call);
    known = found->level == OOMKIT_PROVEN_WEAKLY; /* it knows of none */
    for (i = 0; i < OOMKIT_SEQUENCES; i++) {
        known |= found->sequences[i] == sequence;
    }
    if (known && !found->unseen) {
        return 0;
    }
    found->unseen = 0;
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
    if (call->options->verify == 0 || call->cut->forced) {
        return 0;
    }
    found = oomkit_proven_find(call);
    return found != NULL && known_fully(call, found);
}

PyObject *
oomkit_proof_leaves(const oomkit_call *call)
{
    const oomkit_batch *batch = &call->batch;
    OWNED PyObject *list = PyList_New(0);
    Py_ssize_t i;

    for (i = 0; list != NULL && i < batch->count; i++) {
        const oomkit_node *node = &batch->nodes[i];
        OWNED PyObject *path = NULL, *item = NULL;
        if (node->kind != OOMKIT_NODE_TENSOR) {
            continue;
        }
        path = oomkit_node_path(batch, call->step->names, i);
        if (path != NULL) {
            item =
                Py_BuildValue("nOOO", i, path, node->object,
                              node->split == OOMKIT_SPLIT_NARROW ? Py_True : Py_False);
        }
        if (item == NULL || PyList_Append(list, item) < 0) {
            return NULL;
        }
    }
    return STEAL(list);
}

PyObject *
oomkit_proof_slices(const oomkit_slice *slices, int64_t count)
{
    OWNED PyObject *list = PyList_New(0);
    int64_t i;

    for (i = 0; list != NULL && i < count; i++) {
        OWNED PyObject *item = Py_BuildValue("LL", (long long)slices[i].start,
                                             (long long)slices[i].length);
        if (item == NULL || PyList_Append(list, item) < 0) {
            return NULL;
        }
    }
    return STEAL(list);
}

/* A mean over a mask, or over tokens that are not padding, is one over rows until a
 * batch comes whose rows differ in it: is this the first one? 1, 0 or -1. */
static int
known_unsettled(oomkit_call *call, const oomkit_proven *found)
{
    OWNED PyObject *leaves = NULL, *slices = NULL, *answer = NULL;

    if (found->tried == NULL || !oomkit_weights_are_due(call)) {
        return 0;
    }
    leaves = oomkit_proof_leaves(call);
    slices = oomkit_proof_slices(call->cut->slices, call->cut->count);
    if (leaves == NULL || slices == NULL) {
        return -1;
    }
    EXEMPT (call->st) {
        answer = PyObject_CallMethod(
            call->st->proof, "unsettled", "OOOOO(LL)",
            call->parts->roots == NULL ? Py_None : call->parts->roots, leaves,
            found->rule == NULL ? Py_None : found->rule, found->tried, slices,
            (long long)oomkit_unfit_multiple(call),
            (long long)oomkit_unfit_least(call));
    }
    return answer == NULL ? -1 : answer == Py_True;
}

/* What was shown is looked at again with other data, ever more seldom: in calls 2, 4,
 * 8, ... */
static int
known_is_due(const oomkit_call *call, oomkit_proven *found)
{
    if (found->call == call->log.number) {
        return 0; /* an attempt before has asked */
    }
    found->call = call->log.number;
    found->calls++;
    return (found->calls & (found->calls - 1)) == 0;
}

int
oomkit_proof_wanted(oomkit_call *call)
{
    oomkit_proven *found;
    const int countable = oomkit_weights_are_countable(call);
    int unsettled;

    if (!call->split || call->options->verify == 0 || call->cut->forced ||
        call->st->proves_nothing || call->proof != NULL || call->cut->at > 0 ||
        call->tries.joining) {
        return 0;
    }
    found = oomkit_proven_find(call);
    if (found == NULL) {
        return 1;
    }
    if (found->unseen ||
        (found->level == OOMKIT_PROVEN_WEAKLY && known_is_due(call, found))) {
        found->unseen = 0;
        found->level = OOMKIT_PROVEN_NOT; /* with gradients, if they fit by now */
    }
    unsettled = countable ? known_unsettled(call, found) : 0;
    if (unsettled != 0 || !known_fully(call, found)) {
        return unsettled > 0 ? OOMKIT_PROOF_WEIGHTS : unsettled < 0 ? -1 : 1;
    }
    if (known_is_due(call, found)) {
        return OOMKIT_PROOF_LOSSES;
    }
    if (countable) {
        return 0;
    }
    /* Where no label was ignored, a mean over labels is one over rows. */
    return found->rule == NULL && !found->labels ? oomkit_weights_labels(call) : 0;
}
