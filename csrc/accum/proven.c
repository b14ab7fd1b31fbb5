/* What was proven at a site, and whether a split is to be proven. */
#include "accum.h"
#include "../call/call.h"
#include "../hook/graph.h"
#include "../optim/updating.h"
#include "../py/tensor.h"
#include "../sizes/sizes.h"
#include "../batch/batch.h"

#define LENGTHS 32 /* bits: see oomkit/_proof/lengths.py */
#define PROOFS 4   /* in one call, of micro-batches whose numbers differ */
#define MISSED 3   /* calls in a row in which losses could not be compared */

/* A batch of another structure, other participants, another mode or another way to run
 * the backward are proven anew; other sizes are not, unless verify=True. Never 0. */
static uint64_t
proof_key(oomkit_call *call)
{
    uint64_t hash = oomkit_hash_mix((uint64_t)call->batch.count + 1,
                                    (uint64_t)call->parts->param_count * 2 +
                                        oomkit_call_is_replay(call));
    Py_ssize_t i;

    for (i = 0; i < call->batch.count; i++) {
        const oomkit_node *node = &call->batch.nodes[i];
        oomkit_tensor_facts facts;
        hash = oomkit_hash_mix(
            hash, (uint64_t)(node->kind * 64 + node->split * 8 + node->flags));
        if (node->split != OOMKIT_SPLIT_ITEMS) {
            hash = oomkit_hash_mix(hash, (uint64_t)node->children);
        }
        if (node->kind != OOMKIT_NODE_TENSOR) {
            continue;
        }
        if (oomkit_tensor_facts_get(call->st, node->object, 0, &facts) < 0) {
            oomkit_error_dismiss(); /* it does not count */
            continue;
        }
        hash = oomkit_hash_mix(hash, (uint64_t)(facts.dtype * 16 + facts.ndim));
    }
    hash = oomkit_hash_mix(hash, oomkit_signature_modes(call));
    if (call->options->verify == 1) {
        hash = oomkit_hash_mix(hash, oomkit_batch_signature(&call->batch));
    }
    return hash | 1;
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

/* --- what graphs and hooks show --- */

#define HOOKS 0x9e3779b97f4a7c15u /* a kind of what is no edge */

int
oomkit_paths_watched(oomkit_call *call)
{
    const oomkit_proven *found;

    if (!call->split || call->options->verify == 0 || call->cut->forced) {
        return 0;
    }
    if (call->proof != NULL) {
        return 1;
    }
    found = oomkit_proven_find(call);
    return found != NULL && known_now(call, found);
}

void
oomkit_paths_micro(oomkit_call *call)
{
    call->cut->paths.graphs = 0;
    call->cut->paths.left = 0;
}

void
oomkit_paths_graph(oomkit_call *call)
{
    call->cut->paths.graphs++;
}

/* A place in the present graph. Never 0. */
static uint64_t
paths_place(const oomkit_call *call, uint64_t place)
{
    return oomkit_hash_mix(place, call->cut->paths.graphs) | 1;
}

/* Are the rows of that micro-batch among those that this call has proven? */
static int
paths_are_proven(const oomkit_call *call, int64_t at)
{
    const oomkit_paths *paths = &call->cut->paths;
    const oomkit_slice *slice = &call->cut->slices[at];
    Py_ssize_t i = 0;

    while (i < paths->count && (paths->proven[i].start > slice->start ||
                                paths->proven[i].start + paths->proven[i].length <
                                    slice->start + slice->length)) {
        i++;
    }
    return i < paths->count;
}

static void
paths_unseen(oomkit_call *call, oomkit_proven *found)
{
    if (!paths_are_proven(call, call->cut->at)) {
        found->unseen = 1;
        if (call->cut->paths.anchor == 0) {
            call->cut->paths.anchor = call->cut->slices[call->cut->at].start + 1;
        }
    }
}

/* What comes to that node in the backward is looked at. 0 or -1. */
static int
paths_listen(oomkit_call *call, const oomkit_edge *edge)
{
    oomkit_paths *paths = &call->cut->paths;
    OWNED PyObject *done = NULL;

    if (edge->is_leaf) {
        return 0;
    }
    if (paths->flows == NULL) {
        paths->flows = PyObject_CallMethod(call->st->proof, "flows", NULL);
    }
    if (paths->flows != NULL) {
        done = PyObject_CallMethod(paths->flows, "watch", "OKK", edge->to,
                                   (unsigned long long)paths_place(call, edge->place),
                                   (unsigned long long)paths_place(call, edge->before));
    }
    return done == NULL ? -1 : 0;
}

int
oomkit_paths_kind(oomkit_call *call, uint64_t kind)
{
    oomkit_proven *found;

    if (call->proof != NULL) {
        return oomkit_hashes_add(&call->cut->paths.kinds, kind) < 0 ? -1 : 0;
    }
    found = oomkit_proven_find(call);
    if (found == NULL || oomkit_hashes_have(&found->kinds, kind)) {
        return 0; /* NULL: another thread's call has taken its place */
    }
    if (paths_are_proven(call, call->cut->at)) {
        return oomkit_hashes_add(&found->kinds, kind) < 0 ? -1 : 0;
    }
    paths_unseen(call, found);
    return 0;
}

void
oomkit_paths_leave(oomkit_call *call, uint64_t gradients)
{
    call->cut->paths.left = gradients;
}

uint64_t
oomkit_paths_left(oomkit_call *call)
{
    const uint64_t left = call->cut->paths.left;

    call->cut->paths.left = 0;
    return left;
}

int
oomkit_paths_edge(oomkit_call *call, const oomkit_edge *edge)
{
    const uint64_t place = paths_place(call, edge->place);
    const oomkit_proven *found;

    if (oomkit_paths_kind(call, oomkit_hash_mix(edge->from, edge->kind) | 1) < 0) {
        return -1;
    }
    if (call->proof != NULL) {
        return edge->first && oomkit_proof_of_whole(call) ? paths_listen(call, edge)
                                                          : 0;
    }
    found = oomkit_proven_find(call);
    return found != NULL && edge->first && oomkit_hashes_have(&found->silent, place) &&
                   !oomkit_hashes_have(&found->heard, place)
               ? paths_listen(call, edge)
               : 0;
}

/* Places that gradients have come to, in a proof or in a micro-batch; hooks go. 0 or
 * -1. */
static int
paths_hear(oomkit_call *call, oomkit_proven *found, int proof)
{
    OWNED PyObject *list = NULL;
    Py_ssize_t i;

    if (call->cut->paths.flows == NULL) {
        return 0;
    }
    list = PyObject_CallMethod(call->cut->paths.flows, "take", NULL);
    for (i = 0; list != NULL && i < PyList_GET_SIZE(list); i++) {
        PyObject *item = PyList_GET_ITEM(list, i); /* borrowed */
        const int came = PyTuple_GET_ITEM(item, 1) == Py_True;
        const uint64_t place = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(item, 0));
        int added = 0;
        if (came && oomkit_hashes_have(&found->silent, place)) {
            added = oomkit_hashes_add(&found->heard, place);
            if (!proof) {
                paths_unseen(call, found);
            }
        } else if (!came && proof) {
            added = oomkit_hashes_keep(&found->silent, place);
        }
        if (added < 0) {
            return -1;
        }
    }
    return list == NULL ? -1 : 0;
}

/* How many hooks were registered so far, and one; 0 with an exception. */
static uint64_t
paths_hooks(const oomkit_call *call)
{
    OWNED PyObject *number = PyObject_CallMethod(call->st->proof, "hooks", NULL);
    const uint64_t count = number == NULL ? 0 : PyLong_AsUnsignedLongLong(number);

    return PyErr_Occurred() ? 0 : count + 1 - call->st->own_hooks;
}

/* Hooks that were registered since the last call, outside the step, are not seen in any
 * graph, and may do anything to gradients. A program may do so in each call. 0 or -1.
 */
static int
paths_hooks_since(oomkit_call *call, oomkit_proven *found)
{
    uint64_t hooks, since;

    if (call->cut->paths.hooks != 0 || found->hooks == 0 ||
        oomkit_ranks_sharded(call)) {
        return 0; /* asked already; never counted; a sharded model registers its own */
    }
    hooks = paths_hooks(call);
    since = hooks - found->hooks;
    /* whole calls between have run the step, each of them once */
    since -= (call->log.number - found->hooks_at - 1) * found->hooks_of_micro;
    if (hooks != 0 && since != 0) {
        const uint64_t kind = oomkit_hash_mix(HOOKS, since) | 1;
        found->unseen |= !oomkit_hashes_have(&found->kinds, kind);
        call->cut->paths.since = kind;
    }
    return hooks == 0 ? -1 : 0;
}

/* The same of the step itself. 0 or -1. */
static int
paths_hooks_of_micro(oomkit_call *call, oomkit_proven *found)
{
    const uint64_t before = call->cut->paths.hooks, now = paths_hooks(call);

    if (now == 0) {
        return -1;
    }
    if (call->cut->at == 0 && before != 0 && !oomkit_ranks_sharded(call)) {
        if (now - before != found->hooks_of_micro) {
            paths_unseen(call, found);
        }
        found->hooks_of_micro = now - before;
    }
    found->hooks = now;
    found->hooks_at = call->log.number;
    return 0;
}

int
oomkit_paths_begin(oomkit_call *call)
{
    if (call->proof != NULL || !oomkit_paths_watched(call)) {
        return 0;
    }
    call->cut->paths.hooks = paths_hooks(call);
    return call->cut->paths.hooks == 0 ? -1 : 0;
}

int64_t
oomkit_paths_anchor(const oomkit_call *call)
{
    return call->cut->paths.anchor - 1;
}

int
oomkit_paths_prove(oomkit_call *call, oomkit_slice rows)
{
    oomkit_paths *paths = &call->cut->paths;

    if (ARRAY_GROW(paths->proven, paths->count, paths->room) < 0) {
        return -1;
    }
    paths->proven[paths->count++] = rows;
    return 0;
}

int
oomkit_paths_prove_next(oomkit_call *call, int64_t at)
{
    oomkit_proven *found;

    if (call->cut->paths.count >= PROOFS || paths_are_proven(call, at)) {
        return 0;
    }
    found = oomkit_proven_find(call);
    if (found != NULL) { /* else another thread's call has taken its place */
        found->level = OOMKIT_PROVEN_NOT;
    }
    call->cut->paths.anchor = call->cut->slices[at].start + 1;
    return 1;
}

void
oomkit_paths_forget(oomkit_call *call)
{
    oomkit_hashes_clear(&call->cut->paths.kinds);
    Py_CLEAR(call->cut->paths.flows);
}

void
oomkit_paths_clear(oomkit_call *call)
{
    oomkit_paths_forget(call);
    MEMORY_CLEAR(call->cut->paths.proven);
}

static void
proven_hashes_clear(oomkit_proven *proven)
{
    oomkit_hashes_clear(&proven->kinds);
    oomkit_hashes_clear(&proven->silent);
    oomkit_hashes_clear(&proven->heard);
}

/* What the runs of a proof have had in their graphs. 0 or -1. */
static int
paths_learn(oomkit_call *call, oomkit_proven *found)
{
    oomkit_hashes *kinds = &call->cut->paths.kinds;
    uint32_t i;

    if (found->silent.count >= OOMKIT_PLACES) {
        /* Graphs without end. With their kinds, so that those are proven again. */
        proven_hashes_clear(found);
    }
    for (i = 0; i < kinds->room; i++) {
        if (kinds->items[i] != 0 &&
            oomkit_hashes_add(&found->kinds, kinds->items[i]) < 0) {
            return -1;
        }
    }
    oomkit_hashes_clear(kinds);
    if (call->cut->paths.since != 0 &&
        oomkit_hashes_add(&found->kinds, call->cut->paths.since) < 0) {
        return -1;
    }
    call->cut->paths.since = 0;
    call->cut->paths.anchor = 0;
    return paths_hear(call, found, 1);
}

int
oomkit_proven_note(oomkit_call *call, PyObject *rule, PyObject *tried,
                   uint64_t sequence, oomkit_proof_level level)
{
    oomkit_step *step = call->step;
    oomkit_proven *found = oomkit_proven_find(call);
    OWNED PyObject *before = NULL, *before_tried = NULL;

    if (found == NULL) {
        found = &step->proven[step->proven_next++ % OOMKIT_PROVEN];
    }
    before = found->rule;
    before_tried = found->tried;
    if (rule != before) {
        oomkit_hashes_clear(&found->kinds); /* of weights that were in use before */
    }
    if (found->key != call->shape.proof_key) {
        memset(found->sequences, 0, sizeof(found->sequences));
        proven_hashes_clear(found);
        found->missed = found->unseen = 0;
        found->hooks_of_micro = 0;
        found->pieces = 0;
        found->calls = 1;
    }
    found->key = call->shape.proof_key;
    found->rule = rule;
    found->tried = tried;
    found->call = call->log.number;
    found->level = (uint8_t)level;
    found->pieces = call->cut->count > found->pieces ? call->cut->count : found->pieces;
    if (sequence != 0) { /* 0: nothing but losses were compared */
        found->sequences[found->sequence_next++ % OOMKIT_SEQUENCES] = sequence;
    }
    if (sequence != 0 || level == OOMKIT_PROVEN_WEAKLY) {
        found->unseen = 0; /* that was no mere look at losses of later calls */
    }
    step->losses.compared = 1; /* a guess about them would say less */
    if (paths_learn(call, found) < 0) {
        found->level = OOMKIT_PROVEN_NOT; /* what was learnt in part shows nothing */
        return -1;
    }
    return 0;
}

void
oomkit_proven_forget(oomkit_call *call)
{
    oomkit_proven *found = oomkit_proven_find(call);

    if (found != NULL) {
        PyObject *rule = found->rule, *tried = found->tried; /* owned */
        proven_hashes_clear(found);
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
        proven_hashes_clear(&proven[i]);
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
        hash = oomkit_hash_mix(hash, (uintptr_t)sequence->events[i].target);
        hash = oomkit_hash_mix(hash, (uintptr_t)sequence->events[i].name);
    }
    return hash;
}

int
oomkit_proof_is_new_path(oomkit_call *call)
{
    oomkit_proven *found;
    uint64_t sequence;
    int i, known;

    if (call->proof != NULL || !oomkit_paths_watched(call)) {
        return 0;
    }
    found = oomkit_proven_find(call);
    if (paths_hear(call, found, 0) < 0 || paths_hooks_of_micro(call, found) < 0) {
        return -1;
    }
    sequence = oomkit_proof_sequence(call);
    /* Of losses alone it knows none; later micro-batches are compared with the first.
     */
    known = call->cut->at > 0 || found->level == OOMKIT_PROVEN_WEAKLY;
    for (i = 0; i < OOMKIT_SEQUENCES; i++) {
        known |= found->sequences[i] == sequence;
    }
    if ((known && !found->unseen) || oomkit_updates_made(call) > 0 ||
        oomkit_update_is_final(call)) {
        return 0; /* after an update it is the next call that is proven */
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

/* A list of samples: how long each tensor in these is, as a list of (name, tensor). New
 * reference or NULL. */
static PyObject *
leaf_lengths(const oomkit_call *call, Py_ssize_t index, PyObject *name)
{
    PyObject *found = NULL; /* owned */

    EXEMPT (call->st) {
        found = PyObject_CallMethod(call->st->proof, "lengths", "OO", name,
                                    call->batch.nodes[index].object);
    }
    return found;
}

/* The number of the lengths `which` of a list among the leaves. */
static Py_ssize_t
lengths_leaf(Py_ssize_t index, Py_ssize_t which)
{
    return ((which + 1) << LENGTHS) + index;
}

/* As oomkit_proof_leaf(). */
static PyObject *
leaf_of_lengths(const oomkit_call *call, Py_ssize_t leaf)
{
    const Py_ssize_t which = (leaf >> LENGTHS) - 1;
    const Py_ssize_t index = leaf & (((Py_ssize_t)1 << LENGTHS) - 1);
    OWNED PyObject *found = index < call->batch.count
                                ? leaf_lengths(call, index, call->st->str_params)
                                : PyList_New(0);

    if (found == NULL || which >= PyList_GET_SIZE(found)) {
        return found == NULL ? NULL : Py_NewRef(Py_None);
    }
    return Py_NewRef(PyTuple_GET_ITEM(PyList_GET_ITEM(found, which), 1));
}

PyObject *
oomkit_proof_leaf(const oomkit_call *call, Py_ssize_t index)
{
    PyObject *tensor, *moved = NULL; /* borrowed, owned */
    int64_t dim;

    if (index >= call->batch.count) {
        return leaf_of_lengths(call, index);
    }
    tensor = call->batch.nodes[index].object;
    dim = oomkit_node_dim(call->options, &call->batch, index);
    if (dim <= 0) {
        return dim < 0 ? NULL : Py_NewRef(tensor);
    }
    EXEMPT (call->st) {
        moved = PyObject_CallMethod(tensor, "movedim", "Li", (long long)dim, 0);
    }
    if (moved == NULL) {
        oomkit_error_dismiss(); /* a layout that has no views is not counted */
        return Py_NewRef(Py_None);
    }
    return moved;
}

/* Its name, for a message. New reference or NULL. */
static PyObject *
leaf_name(const oomkit_call *call, Py_ssize_t index, int sliced)
{
    const oomkit_batch *batch = &call->batch;
    const int64_t dim = sliced ? oomkit_node_dim(call->options, batch, index) : 0;
    OWNED PyObject *path =
        dim < 0 ? NULL : oomkit_node_path(batch, call->step->names, index);

    return path == NULL || dim == 0
               ? STEAL(path)
               : PyUnicode_FromFormat("%U.movedim(%lld, 0)", path, (long long)dim);
}

/* (number, name, tensor, is it sliced?) at the end of a list. 0 or -1. */
static int
leaves_add(PyObject *list, Py_ssize_t number, PyObject *name, PyObject *tensor,
           int sliced)
{
    OWNED PyObject *item =
        Py_BuildValue("nOOO", number, name, tensor, sliced ? Py_True : Py_False);

    return item == NULL ? -1 : PyList_Append(list, item);
}

/* How long the tensors in a list of samples are. 0 or -1. */
static int
leaves_add_lengths(const oomkit_call *call, PyObject *list, Py_ssize_t index)
{
    OWNED PyObject *path = oomkit_node_path(&call->batch, call->step->names, index);
    OWNED PyObject *found = path == NULL ? NULL : leaf_lengths(call, index, path);
    Py_ssize_t i;

    for (i = 0; found != NULL && i < PyList_GET_SIZE(found); i++) {
        PyObject *both = PyList_GET_ITEM(found, i); /* borrowed */
        if (leaves_add(list, lengths_leaf(index, i), PyTuple_GET_ITEM(both, 0),
                       PyTuple_GET_ITEM(both, 1), 1) < 0) {
            return -1;
        }
    }
    return found == NULL ? -1 : 0;
}

/* A tensor of the batch. 0 or -1. */
static int
leaves_add_tensor(const oomkit_call *call, PyObject *list, Py_ssize_t index)
{
    const oomkit_node *node = &call->batch.nodes[index];
    const int sliced = node->split == OOMKIT_SPLIT_NARROW;
    OWNED PyObject *path = leaf_name(call, index, sliced), *leaf = NULL;

    leaf = path == NULL ? NULL
           : sliced     ? oomkit_proof_leaf(call, index)
                        : Py_NewRef(node->object);
    return leaf == NULL ? -1 : leaves_add(list, index, path, leaf, sliced);
}

PyObject *
oomkit_proof_leaves(const oomkit_call *call)
{
    const oomkit_batch *batch = &call->batch;
    OWNED PyObject *list = PyList_New(0);
    Py_ssize_t i;

    for (i = 0; list != NULL && i < batch->count; i++) {
        const oomkit_node *node = &batch->nodes[i];
        if ((node->kind == OOMKIT_NODE_TENSOR &&
             leaves_add_tensor(call, list, i) < 0) ||
            (node->split == OOMKIT_SPLIT_ITEMS &&
             leaves_add_lengths(call, list, i) < 0)) {
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
 * 8, ...; and where micro-batches are smaller than they were there. */
static int
known_is_due(const oomkit_call *call, oomkit_proven *found)
{
    if (call->cut->count > found->pieces) {
        found->pieces = call->cut->count;
        return 1;
    }
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
    if (known_now(call, found) && paths_hooks_since(call, found) < 0) {
        return -1;
    }
    if (found->unseen ||
        (found->level == OOMKIT_PROVEN_WEAKLY && known_is_due(call, found))) {
        found->unseen = 0;
        found->level = OOMKIT_PROVEN_NOT; /* with gradients, if they fit by now */
    }
    unsettled = known_unsettled(call, found);
    if (unsettled != 0 || !known_fully(call, found)) {
        return unsettled > 0 ? OOMKIT_PROOF_WEIGHTS : unsettled < 0 ? -1 : 1;
    }
    return known_is_due(call, found) ? OOMKIT_PROOF_LOSSES : 0;
}
