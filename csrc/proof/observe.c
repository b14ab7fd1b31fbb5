/* What a run of a proof sees of the step: its backwards, what its updates are given,
 * its results and its gradients. All of it is handed to oomkit._proof.judge.Proof. */
#include "proof.h"
#include "../accum/accum.h"
#include "../call/call.h"
#include "../call/step.h"
#include "../hook/step_arguments.h"
#include "../optim/optim.h"
#include "../plain/alike.h"
#include "../py/tensor.h"
#include "../result/result.h"
#include "../undo/gradients.h"

/* judge.method(argument), outside the budget. 0 or -1. */
static int
watch_tell(const oomkit_proof *p, const char *method, PyObject *argument)
{
    OWNED PyObject *done = NULL;

    EXEMPT (p->call->st) {
        done = PyObject_CallMethod(p->judge, method, "(O)", argument);
    }
    return done == NULL ? -1 : 0;
}

static int
proof_root(oomkit_call *call, const oomkit_backward *backward)
{
    OWNED PyObject *given = oomkit_terms_given(backward->gradients), *done = NULL;

    call->proof->trained = 1;
    EXEMPT (call->st) {
        done = given == NULL ? NULL
                             : PyObject_CallMethod(call->proof->judge, "root", "OO",
                                                   backward->roots, given);
    }
    return done == NULL ? -1 : 0;
}

/* The gradients that this call has accumulated, None where there is none. New list or
 * NULL. */
static PyObject *
watch_gradients(oomkit_call *call, int parked)
{
    Py_ssize_t i, n = call->parts->param_count;
    PyObject *const *kept = oomkit_grads_parked_ones(call); /* borrowed */
    OWNED PyObject *list = PyList_New(n);

    for (i = 0; list != NULL && i < n; i++) {
        PyObject *hosted = oomkit_grads_hosted_of(call, i); /* borrowed */
        PyObject *gradient = /* owned, stolen by the list */
            hosted != NULL ? Py_NewRef(hosted)
            : parked ? Py_NewRef(kept != NULL && kept[i] != NULL ? kept[i] : Py_None)
                     : grads_get(call, i);
        if (gradient == NULL) {
            return NULL;
        }
        PyList_SET_ITEM(list, i, gradient);
    }
    return STEAL(list);
}

PyObject *
oomkit_proof_marks(const oomkit_call *call)
{
    const oomkit_bridge *bridge = call->st->bridge;
    const oomkit_participants *parts = call->parts;
    Py_ssize_t i, n = parts->param_count;
    OWNED PyObject *list = NULL;
    OWNED_MEMORY uint32_t *versions = NULL;

    if (!oomkit_has_bridge(call->st) || call->device.type != OOMKIT_DEVICE_CPU) {
        Py_RETURN_NONE;
    }
    versions = PyMem_Calloc((size_t)n + 1, sizeof(*versions));
    if (versions == NULL) {
        return PyErr_NoMemory();
    }
    if (bridge->versions((const void *const *)parts->params, call->st->impl_offset,
                         (size_t)n, versions, NULL, NULL) != OOMKIT_OK) {
        Py_RETURN_NONE;
    }
    list = PyList_New(n);
    for (i = 0; list != NULL && i < n; i++) {
        uint64_t mark = oomkit_tensor_sample(call->st, parts->params[i]) ^
                        versions[i] * 0x9e3779b97f4a7c15u;
        PyObject *number = PyLong_FromUnsignedLongLong(mark); /* owned, stolen */
        if (number == NULL) {
            return NULL;
        }
        PyList_SET_ITEM(list, i, number);
    }
    return STEAL(list);
}

static int
watch_tell_gradients(oomkit_call *call, const char *method, int parked)
{
    OWNED PyObject *list = watch_gradients(call, parked);
    OWNED PyObject *done = NULL;

    if (list == NULL) {
        return -1;
    }
    if (oomkit_grads_are_eager(call)) {
        done = PyObject_CallMethod(call->proof->judge, "eager", NULL);
        if (done == NULL) {
            return -1;
        }
    }
    return watch_tell(call->proof, method, list);
}

static int
proof_swept(oomkit_call *call)
{
    return call->is_last
               ? watch_tell_gradients(call, "swept", oomkit_grads_are_eager(call))
               : watch_tell_gradients(call, "parked", 1);
}

int
oomkit_proof_finish(oomkit_proof *p)
{
    OWNED PyObject *marks = oomkit_proof_marks(p->call);
    OWNED PyObject *done =
        marks ? PyObject_CallMethod(p->judge, "ended", "O", marks) : NULL;

    return done == NULL ? -1
                        : watch_tell_gradients(p->call, "finish",
                                               oomkit_grads_are_eager(p->call));
}

int
oomkit_proof_returns_nothing(const oomkit_call *call)
{
    return call->training && !oomkit_loss_is_returned(call) &&
           !oomkit_call_is_replay(call) && call->options->backward == NULL;
}

static int
proof_micro_end(oomkit_call *call, PyObject *result)
{
    OWNED PyObject *loss = oomkit_proof_returns_nothing(call)
                               ? NULL
                               : oomkit_result_loss(call->st, result);
    OWNED PyObject *done = NULL;

    if (loss == NULL && PyErr_Occurred()) {
        return -1;
    }
    EXEMPT (call->st) {
        done = PyObject_CallMethod(call->proof->judge, "result", "OOLdO", result,
                                   loss == NULL ? Py_None : loss,
                                   (long long)call->cut->slices[call->cut->at].length,
                                   call->cut->weights[call->cut->at],
                                   oomkit_losses_are_sums(call) ? Py_True : Py_False);
        if (done != NULL && call->proof->dealt != NULL) {
            Py_SETREF(done, PyObject_CallMethod(
                                call->proof->dealt, "again", "L",
                                (long long)call->cut->slices[call->cut->at].length));
        }
    }
    if (done != NULL && call->proof->dealt == NULL && !oomkit_call_is_replay(call)) {
        /* a call of so many rows like any other: what is no count shows, and what is */
        call->step->results.integers_only = !oomkit_proof_of_whole(call);
        oomkit_result_learn(call->st, &call->step->results, result,
                            call->cut->slices[call->cut->at].length,
                            call->options->dim);
        call->step->results.integers_only = 0;
    }
    return done == NULL ? -1 : 0;
}

/* Will the call's own join meet what that of these two parts has met? It has parts of
 * one row alone, or one beside larger ones as here. */
static int
joins_alike(const oomkit_proof *p)
{
    const oomkit_cut *cut = p->call->cut;
    const int mixed = cut->slices[0].length != cut->slices[1].length;
    int64_t i, single = 0;

    for (i = 0; i < p->cut.count; i++) {
        single += p->cut.slices[i].length == 1;
    }
    return single == p->cut.count || (mixed && single > 0);
}

/* The results of parts of one row could not be joined, as the SplitError in flight
 * says, which is ended: of one row much looks like anything, see proof_joins(). Where
 * the call itself has such parts, it is refused by what the error says. 0 or -1. */
static int
proof_unjoined(oomkit_proof *p)
{
    OWNED PyObject *error = oomkit_exception_take();
    OWNED PyObject *told = joins_alike(p) ? PyObject_Str(error) : Py_NewRef(Py_True);

    p->call->refused.raised = 0;
    p->unjoined = 1;
    return told == NULL ? -1 : PyObject_SetAttrString(p->judge, "unjoined", told);
}

int
oomkit_proof_joined(oomkit_call *call)
{
    OWNED PyObject *result = oomkit_attempt_join(call);
    int status = result == NULL ? -1 : watch_tell(call->proof, "joined", result);

    if (result == NULL && !call->proof->own &&
        PyErr_ExceptionMatches(call->st->SplitError) &&
        (call->cut->slices[0].length == 1 || call->cut->slices[1].length == 1)) {
        status = proof_unjoined(call->proof);
    }
    call->tries.joining = 0;
    return status;
}

/* The arguments as (tuple, dict), with `mean` in the place of number `at`. 0 or -1. */
static int
watch_arguments(PyObject *const *args, size_t nargsf, PyObject *kwnames, PyObject *mean,
                Py_ssize_t at, PyObject **positional, PyObject **named)
{
    Py_ssize_t i, n = PyVectorcall_NARGS(nargsf);

    *named = PyDict_New();
    *positional = *named == NULL ? NULL : PyTuple_New(n);
    if (*positional == NULL) {
        return -1;
    }
    for (i = 0; i < n; i++) {
        PyTuple_SET_ITEM(*positional, i,
                         Py_NewRef(mean != NULL && i == at ? mean : args[i]));
    }
    for (i = 0; kwnames != NULL && i < PyTuple_GET_SIZE(kwnames); i++) {
        if (PyDict_SetItem(*named, PyTuple_GET_ITEM(kwnames, i),
                           mean != NULL && n + i == at ? mean : args[n + i]) < 0) {
            return -1;
        }
    }
    return 0;
}

/* An intercepted call of the last micro-batch: 1 noted and held back, 0 to be made (the
 * scaler's unscale_), -1. */
static int
proof_update(interceptor_object *self, PyObject *optimizer, PyObject *const *args,
             size_t nargsf, PyObject *kwnames)
{
    oomkit_call *call = self->call;
    OWNED PyObject *mean = NULL, *positional = NULL, *named = NULL, *done = NULL;
    OWNED PyObject *given = NULL;
    oomkit_held_arguments held = {.target = self->target,
                                  .args = args,
                                  .positional = PyVectorcall_NARGS(nargsf),
                                  .kwnames = kwnames};
    int settled = 0;

    if (self->name == call->st->str_unscale) {
        return 0; /* what follows, clipping above all, depends on it; it is undone */
    }
    if (self->kind == OOMKIT_OWNER_OPTIMIZER) {
        given = oomkit_given_settle(self, args, PyVectorcall_NARGS(nargsf), kwnames);
        if (given == NULL) {
            return -1;
        }
        args = PySequence_Fast_ITEMS(given);
    } else if (self->kind == OOMKIT_OWNER_SCHEDULER) {
        settled = oomkit_tell_arguments_settle(call, &held);
        mean = held.instead;
    }
    if (settled >= 0 && watch_arguments(args, nargsf, kwnames, mean, held.at,
                                        &positional, &named) == 0) {
        EXEMPT (call->st) {
            done = PyObject_CallMethod(
                call->proof->judge, "update", "OOOOO", self->target, self->name,
                optimizer == NULL ? Py_None : optimizer, positional, named);
            if (done != NULL) {
                Py_SETREF(done,
                          PyObject_CallMethod(call->proof->around, "updated", NULL));
            }
        }
    }
    return done == NULL ? -1 : 1;
}

/* --- what happens in a call --- */

static void
proof_attempt_ends(oomkit_call *call)
{
    if (call->proof == NULL && oomkit_call_is_cut(call)) {
        oomkit_paths_forget(call);
        Py_CLEAR(call->cut->terms);
    }
}

static void
proof_call_ends(oomkit_call *call)
{
    if (oomkit_call_is_cut(call)) {
        oomkit_paths_clear(call);
    }
}

static int
proof_micro_begins(oomkit_call *call)
{
    if (oomkit_call_is_cut(call)) {
        oomkit_paths_micro(call);
    }
    return 0;
}

static int
proof_backward_begins(oomkit_call *call, oomkit_backward *backward)
{
    return call->proof != NULL ? proof_root(call, backward)
           : call->split       ? oomkit_terms_note(call, backward)
                               : 0;
}

/* Gradients that are not what the backward has left: a kind of path. */
#define CHANGED 0xd1b54a32d192ed03u

/* Those on a device, and others of which only torch knows the values: their norms, for
 * which a device is waited for, once. 0 or -1. */
static int
gradients_norms(oomkit_call *call, PyObject *others, uint64_t *sample)
{
    OWNED PyObject *told = NULL;

    if (PyList_GET_SIZE(others) == 0) {
        return 0;
    }
    EXEMPT (call->st) {
        told = PyObject_CallMethod(call->st->proof, "norms", "O", others);
    }
    if (told == NULL) {
        return -1;
    }
    *sample = oomkit_hash_mix(*sample, PyLong_AsUnsignedLongLongMask(told));
    return PyErr_Occurred() ? -1 : 0;
}

/* A few values of each. 0 or -1. */
static int
gradients_sample(oomkit_call *call, uint64_t *sample)
{
    OWNED PyObject *others = PyList_New(0);
    Py_ssize_t i;

    *sample = 1;
    for (i = 0; others != NULL && i < call->parts->param_count; i++) {
        OWNED PyObject *gradient = grads_get(call, i);
        uint64_t values;
        if (gradient == NULL) {
            return -1;
        }
        values = gradient == Py_None ? 1 : oomkit_tensor_sample(call->st, gradient);
        *sample = oomkit_hash_mix(*sample, values);
        if (values == 0 && PyList_Append(others, gradient) < 0) {
            return -1;
        }
    }
    if (others == NULL || gradients_norms(call, others, sample) < 0) {
        return -1;
    }
    *sample |= 1;
    return 0;
}

/* A backward of the last micro-batch, or a scaler that has unscaled them, has left the
 * gradients of all. 0 or -1. */
static int
gradients_are_left(oomkit_call *call)
{
    uint64_t sample;

    if (!call->is_last || !oomkit_has_bridge(call->st) || !oomkit_paths_watched(call)) {
        return 0;
    }
    if (gradients_sample(call, &sample) < 0) {
        return -1;
    }
    oomkit_paths_leave(call, sample);
    return 0;
}

static int
proof_update_ends(oomkit_call *call, const oomkit_update *update)
{
    return update->method->name == call->st->str_unscale ? gradients_are_left(call) : 0;
}

/* The step has changed them, before its first update: by what it has read from the rows
 * of the last micro-batch, as far as anybody knows. 0 or -1. */
static int
gradients_are_used(oomkit_call *call)
{
    const uint64_t left = oomkit_paths_left(call);
    uint64_t now;

    if (left == 0) {
        return 0;
    }
    if (gradients_sample(call, &now) < 0) {
        return -1;
    }
    return now == left ? 0 : oomkit_paths_kind(call, CHANGED);
}

static int
proof_backward_ends(oomkit_call *call, const oomkit_backward *backward)
{
    (void)backward;
    if (call->proof != NULL && proof_swept(call) < 0) {
        return -1;
    }
    return call->split ? gradients_are_left(call) : 0;
}

/* The first micro-batch has done what no proof has seen, again. 0 or -1. */
static int
path_differs_again(oomkit_call *call)
{
    if (call->options->verify == OOMKIT_VERIFY_WARN) {
        return oomkit_warn(
            call->st->OomkitWarning, 1,
            "oomkit: %U is split (verify=\"warn\"), but runs other code each time "
            "that it is started again, so its split cannot be verified" SEE(
                "micro-batches-differ"),
            call->options->label);
    }
    return oomkit_refuse_split(
        call, "it runs other code each time that it is started again, so its split "
              "cannot be verified. Make the decision outside the step" SEE(
                  "micro-batches-differ"));
}

/* The first micro-batch has changed a place that no proof has seen changed (a count of
 * epochs): how the others are to find it must be shown. 1, 0 or -1. */
static int
place_is_new(oomkit_call *call)
{
    oomkit_proven *found;
    int is_new;

    if (call->cut->at > 0 || call->is_last || !oomkit_paths_watched(call) ||
        oomkit_updates_made(call) > 0 || oomkit_update_is_final(call)) {
        return 0;
    }
    is_new = oomkit_plain_is_new(call);
    found = is_new > 0 ? oomkit_proven_find(call) : NULL;
    if (found != NULL) {
        found->unseen = 0;
        found->level = OOMKIT_PROVEN_NOT;
    }
    return is_new < 0 ? -1 : found != NULL;
}

/* A micro-batch that has done what no proof has seen begins the attempt again, with a
 * proof. 0 or -1. */
static int
proof_path(oomkit_call *call)
{
    int is_new = oomkit_proof_is_new_path(call);

    is_new = is_new == 0 ? oomkit_terms_are_new(call) : is_new;
    is_new = is_new == 0 ? place_is_new(call) : is_new;
    if (is_new <= 0) {
        return is_new;
    }
    if (call->cut->at == 0 && call->tries.restarts >= 2 * OOMKIT_RESTARTS) {
        return path_differs_again(call);
    }
    call->tries.restart =
        call->cut->at == 0 ? OOMKIT_RESTART_PROOF : OOMKIT_RESTART_ROWS;
    oomkit_raise(
        call->st->SplitError,
        "auto_batch starts the step again, to verify its micro-batches on the code "
        "path that it takes now. Do not catch this error in the step" SEE(
            "let-errors-pass"));
    return -1;
}

static int
proof_update_begins(oomkit_call *call, oomkit_update *update)
{
    int held;

    if (!call->is_last) {
        return 0;
    }
    if (gradients_are_used(call) < 0) {
        return -1;
    }
    if (call->proof == NULL) {
        return proof_path(call);
    }
    held = proof_update(update->method, update->optimizer, update->args, update->nargsf,
                        update->kwnames);
    update->held = held != 0;
    return held < 0 ? -1 : 0;
}

static int
proof_micro_ends(oomkit_call *call, PyObject *result)
{
    if (call->proof != NULL) {
        return proof_micro_end(call, result);
    }
    return call->split ? proof_path(call) : 0;
}

const oomkit_rule oomkit_proof_of_split_rule = {
    .before_attempt = oomkit_prove,
    .micro_begins = proof_micro_begins,
    .backward_begins = proof_backward_begins,
    .backward_ends = proof_backward_ends,
    .update_begins = proof_update_begins,
    .micro_ends = proof_micro_ends,
    .update_ends = proof_update_ends,
    .before_retry = oomkit_repeats_before_retry,
    .attempt_ends = proof_attempt_ends,
    .call_ends = proof_call_ends};

static PyObject *
prove_switch(PyObject *module, PyObject *on)
{
    oomkit_state *st = oomkit_state_of_module(module);
    int truth = PyObject_IsTrue(on);

    if (truth < 0) {
        return NULL;
    }
    st->proves_nothing = !truth;
    Py_RETURN_NONE;
}

static PyObject *
refusals_switch(PyObject *module, PyObject *on)
{
    oomkit_state *st = oomkit_state_of_module(module);
    const int truth = PyObject_IsTrue(on);

    if (truth < 0) {
        return NULL;
    }
    st->refusals_end = !truth;
    Py_RETURN_NONE;
}

PyMethodDef oomkit_proof_methods[] = {
    {"_prove", prove_switch, METH_O,
     "_prove(on, /)\n--\n\nWhether splits are proven; for tests that count the runs of "
     "a "
     "step."},
    {"_whole_again", refusals_switch, METH_O,
     "_whole_again(on, /)\n--\n\nWhether a refused split is followed by the whole "
     "batch; for "
     "tests of refusals."},
    {"flow_hook", oomkit_proof_flow_hook, METH_VARARGS,
     "flow_hook(came, place, /)\n--\n\nA prehook of a node of a graph that notes in "
     "came[place] whether a gradient comes that is not all 0."},
    {"own_hooks", oomkit_proof_own_hooks, METH_O,
     "own_hooks(count, /)\n--\n\nSo many handles of torch's hooks were made by oomkit "
     "itself."},
    {"modules_of", oomkit_proof_modules_of, METH_O,
     "modules_of(roots, /)\n--\n\nAll modules of these trees, each once. In every "
     "split call: "
     "`modules()` of each root, which are modules of one another, takes a multiple of "
     "the time."},
    {"label_hints", oomkit_proof_label_hints, METH_VARARGS,
     "label_hints(modules, norms, /)\n--\n\nWhat they have as ignore_index, and "
     "buffers of those "
     "that are not of the class `norms`."},
    {"label_range", oomkit_proof_label_range, METH_O,
     "label_range(tensor, /)\n--\n\nThe least and the largest of integers; None where "
     "torch has to "
     "look for them."},
    {NULL, NULL, 0, NULL},
};
