/* Gradients: marks, host copies, parking between micro-batches, roll back.
 *
 * Mark: which tensor a parameter's gradient was, held weakly so that its address cannot
 * be given to another one, and its version. AccumulateGrad is atomic per leaf, so after
 * a failed backward a leaf has all of the slice's contribution or none, and the mark
 * tells which. */
#include "gradients.h"
#include "undo.h"
#include "../py/half_made.h"
#include "../py/modes.h"
#include "../py/tensor.h"
#include "../ranks/agree.h"
#include "../sizes/sizes.h"

int
oomkit_grads_marks_take(oomkit_call *call, oomkit_grad_mark **marks)
{
    const oomkit_state *st = call->st;
    const size_t n = (size_t)call->parts->param_count;

    if (*marks == NULL &&
        (*marks = oomkit_spare_take(&call->parts->spare_marks,
                                    (n + 1) * sizeof(**marks))) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (st->bridge->grads_mark((const void *const *)call->parts->params,
                               st->impl_offset, n, *marks) != OOMKIT_OK) {
        SPARE_GIVE(call->parts->spare_marks, *marks);
        return oomkit_bridge_failed("mark the gradients of the parameters");
    }
    return 0;
}

void
oomkit_grads_marks_drop(oomkit_call *call, oomkit_grad_mark **marks)
{
    if (*marks != NULL) {
        call->st->bridge->grads_release(*marks, (size_t)call->parts->param_count);
        SPARE_GIVE(call->parts->spare_marks, *marks);
    }
}

Py_ssize_t
oomkit_grads_marks_compare(oomkit_call *call, const oomkit_grad_mark *marks,
                           uint8_t *states, uint32_t *steps)
{
    const oomkit_state *st = call->st;
    size_t moved;

    if (st->bridge->grads_compare((const void *const *)call->parts->params,
                                  st->impl_offset, (size_t)call->parts->param_count,
                                  marks, states, steps, &moved) != OOMKIT_OK) {
        return oomkit_bridge_failed("compare the gradients of the parameters");
    }
    return (Py_ssize_t)moved;
}

/* Host copies of the gradients that are there now, once per call. All or none: without
 * one of them another attempt could not be taken back. */
static int
grads_copy(oomkit_call *call)
{
    Py_ssize_t i;
    PyObject **copies; /* owned, then by call->grads */

    if (call->grads.copies != NULL) {
        return 0;
    }
    copies = grads_array(call);
    if (copies == NULL) {
        return -1;
    }
    for (i = 0; i < call->parts->param_count; i++) {
        OWNED PyObject *gradient = grads_get(call, i);
        if (gradient != NULL && gradient != Py_None) {
            copies[i] = oomkit_host_copy(call->st, gradient);
        }
        if (copies[i] == NULL && PyErr_Occurred()) {
            grads_array_free(call, &copies);
            return -1;
        }
    }
    call->grads.copies = copies;
    return 0;
}

/* Is it, by the leaves that had one? 1, 0 or -1. */
static int
grads_ask_window(oomkit_call *call)
{
    OWNED PyObject *leaves = PyList_New(0), *answer = NULL;
    Py_ssize_t i;

    for (i = 0; leaves != NULL && i < call->parts->param_count; i++) {
        if (call->grads.marks[i].grad != NULL &&
            PyList_Append(leaves, call->parts->params[i]) < 0) {
            return -1;
        }
    }
    answer = leaves == NULL
                 ? NULL
                 : PyObject_CallMethod(call->options->window, "can_make", "O", leaves);
    return answer == NULL ? -1 : PyObject_IsTrue(answer);
}

int
oomkit_grads_can_be_remade(oomkit_call *call)
{
    oomkit_grads *g = &call->grads;

    if (call->options->window == NULL || !g->marked || !g->at_entry) {
        return 0;
    }
    if (g->remade == 0) {
        const int answer = grads_ask_window(call);
        if (answer < 0) {
            return -1;
        }
        g->remade = answer ? 1 : -1;
    }
    return g->remade > 0;
}

/* Copies of what is there, unless it can be made again. 0 or -1. */
static int
grads_insure(oomkit_call *call)
{
    const int again = call->grads.force_copies ? 0 : oomkit_grads_can_be_remade(call);
    return again < 0 ? -1 : again ? 0 : grads_copy(call);
}

/* At the first outermost backward of an attempt. 0 or -1. */
int
oomkit_grads_mark(oomkit_call *call)
{
    oomkit_grads *g = &call->grads;
    Py_ssize_t n = call->parts->param_count, i = 0;

    if (g->marked) {
        return 0;
    }
    g->at_entry = 0;
    if (oomkit_grads_marks_take(call, &g->marks) < 0) {
        return -1;
    }
    while (i < n && g->marks[i].grad == NULL) {
        i++;
    }
    g->at_entry = i < n;
    g->marked = 1;
    g->engine_runs = call->st->engine_runs;
    oomkit_baseline_marked(call, g->at_entry);
    if (g->at_entry && !g->eager && g->owed == OOMKIT_OWED_NOTHING &&
        !oomkit_proof_of_whole(call) &&
        (g->force_copies || oomkit_call_wants_copies(call))) {
        return grads_insure(call);
    }
    /* Without copies what a micro-batch adds to the caller's gradients could not be
     * taken back: they stay out of a split call until its last backward. */
    if (g->at_entry && !g->eager && call->split && !oomkit_call_is_replay(call) &&
        g->copies == NULL && !oomkit_proof_of_whole(call)) {
        g->apart = 1;
        return oomkit_grads_put_away(call);
    }
    return 0;
}

/* Puts the caller's gradients away, so that those of this call accumulate alone. The
 * very tensors come back: nothing is copied. */
int
oomkit_grads_put_away(oomkit_call *call)
{
    oomkit_grads *g = &call->grads;
    Py_ssize_t i;

    if (g->entry == NULL && (g->entry = grads_array(call)) == NULL) {
        return -1;
    }
    g->away = 1;
    for (i = 0; i < call->parts->param_count; i++) {
        PyObject *gradient = grads_get(call, i); /* owned, then by entry */
        if (gradient == NULL) {
            return -1;
        }
        Py_XSETREF(g->entry[i], gradient); /* None too: it is away where entry says */
        if (gradient != Py_None && grads_set(call, i, Py_None) < 0) {
            return -1;
        }
    }
    return 0;
}

/* The caller's gradients again; what accumulated meanwhile is dropped. */
int
oomkit_grads_bring_back(oomkit_call *call)
{
    oomkit_grads *g = &call->grads;
    Py_ssize_t i;

    if (!g->away) {
        return 0;
    }
    for (i = 0; i < call->parts->param_count; i++) {
        if (g->entry[i] == NULL) {
            continue; /* back already, or never put away */
        }
        if (grads_set(call, i, g->entry[i]) < 0) {
            return -1;
        }
        Py_CLEAR(g->entry[i]);
    }
    g->away = 0;
    return 0;
}

int
oomkit_grads_host_begin(oomkit_call *call)
{
    if (call->grads.hosted == NULL) {
        call->grads.hosted = grads_array(call);
    }
    return call->grads.hosted == NULL ? -1 : 0;
}

/* The version of a gradient. 0 or -1. */
static int
version_get(oomkit_call *call, PyObject *gradient, uint32_t *version)
{
    oomkit_tensor_facts facts;

    if (oomkit_tensor_facts_get(call->st, gradient, 0, &facts) < 0) {
        return -1;
    }
    *version = facts.version;
    return 0;
}

/* Notes the versions of those that were parked, all of them after the last: gradients
 * that are views of one tensor have one version. 0 or -1. */
static int
parked_note(oomkit_call *call)
{
    oomkit_grads *g = &call->grads;
    Py_ssize_t i, n = call->parts->param_count;

    if (g->parked_at == NULL) {
        g->parked_at = PyMem_Calloc((size_t)n + 1, sizeof(*g->parked_at));
        if (g->parked_at == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    for (i = 0; i < n; i++) {
        if (g->parked[i] != NULL &&
            version_get(call, g->parked[i], &g->parked_at[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

/* What is parked lies in memory that the step may still reach: a flat buffer of
 * gradients that each micro-batch zeroes would lose what earlier ones have added. 0, or
 * -1 with SplitError where one has changed. */
static int
parked_refuse_changed(oomkit_call *call)
{
    const oomkit_grads *g = &call->grads;
    OWNED PyObject *name = NULL;
    Py_ssize_t i;

    for (i = 0; g->is_parked && i < call->parts->param_count; i++) {
        uint32_t version;
        if (g->parked[i] == NULL) {
            continue;
        }
        if (version_get(call, g->parked[i], &version) < 0) {
            return -1;
        }
        if (version != g->parked_at[i]) {
            break;
        }
    }
    if (!g->is_parked || i == call->parts->param_count) {
        return 0;
    }
    name = oomkit_describe_tensor(call, call->parts->params[i]);
    return name == NULL
               ? -1
               : oomkit_refuse_step(
                     call,
                     "the gradient of %U was changed in place before the backward() of "
                     "micro-batch %lld of %lld, through a tensor that shares its "
                     "memory. It held the sum of the earlier micro-batches. Clear such "
                     "a tensor before the step, or guard the line with `if "
                     "oomkit.current().index == 0:`" SEE("gradient-set-by-hand"),
                     name, (long long)(call->cut->at + 1), (long long)call->cut->count);
}

/* Takes every gradient out of .grad, so that what follows in this micro-batch sees
 * none; or, in a call whose loss is returned, the caller's own. */
int
oomkit_grads_park(oomkit_call *call)
{
    oomkit_grads *g = &call->grads;
    Py_ssize_t i;

    if (g->parked == NULL && (g->parked = grads_array(call)) == NULL) {
        return -1;
    }
    g->is_parked = 1;
    for (i = 0; i < call->parts->param_count; i++) {
        OWNED PyObject *gradient = grads_get(call, i);
        if (gradient == NULL) {
            return -1;
        }
        if (gradient == Py_None) {
            continue;
        }
        Py_XSETREF(g->parked[i], STEAL(gradient));
        if (grads_set(call, i, Py_None) < 0) {
            return -1;
        }
    }
    return parked_note(call) < 0 ? -1 : g->apart ? 0 : oomkit_grads_bring_back(call);
}

/* Puts them back before the next backward, so that accumulation sums. */
int
oomkit_grads_unpark(oomkit_call *call)
{
    oomkit_grads *g = &call->grads;
    Py_ssize_t i;

    if (g->eager && !g->away && oomkit_grads_put_away(call) < 0) {
        return -1;
    }
    if (!g->is_parked) {
        return 0;
    }
    for (i = 0; i < call->parts->param_count; i++) {
        if (g->parked[i] != NULL) {
            if (grads_set(call, i, g->parked[i]) < 0) {
                return -1;
            }
            Py_CLEAR(g->parked[i]);
        }
    }
    g->is_parked = 0;
    return 0;
}

/* Before the micro-batches of a returned loss are run again: what the call cleared was
 * cleared when it was made, and what is there now was put there since. It stays as it
 * is until the last of them is done, so that the sum is rounded as that of a call that
 * was split before its backward, and a failure on the way has nothing to take back. */
static int
grads_hide(oomkit_call *call)
{
    if (oomkit_grads_mark(call) < 0) {
        return -1;
    }
    call->grads.apart = 1;
    return oomkit_grads_put_away(call);
}

/* .grad of one parameter becomes the caller's plus what is there now. 0 or -1. */
static int
grads_add_one(oomkit_call *call, Py_ssize_t i, PyObject *entry)
{
    oomkit_tensor_facts was, now;
    OWNED PyObject *ours = grads_get(call, i);
    OWNED PyObject *sum = NULL;

    if (ours == Py_None) {
        sum = Py_NewRef(entry);
    } else if (ours != NULL && oomkit_tensor_facts_get(call->st, entry, 0, &was) == 0 &&
               oomkit_tensor_facts_get(call->st, ours, 0, &now) == 0 &&
               (was.is_strided || oomkit_half_made_refuse(call->st, entry) == 0)) {
        /* as autograd accumulates: in place where the kinds allow it */
        sum = was.is_strided || !now.is_strided ? PyNumber_InPlaceAdd(entry, ours)
                                                : PyNumber_Add(ours, entry);
    }
    return sum == NULL ? -1 : grads_set(call, i, sum);
}

/* The caller's gradients again, with what accumulated apart from them. */
static int
grads_add_apart(oomkit_call *call)
{
    oomkit_grads *g = &call->grads;
    Py_ssize_t i;
    int result = 0, mode = oomkit_grad_mode_off(call->st);

    if (mode < 0) {
        return -1;
    }
    EXEMPT (call->st) { /* what is added is there already */
        for (i = 0; result == 0 && i < call->parts->param_count; i++) {
            if (g->entry[i] != NULL && g->entry[i] != Py_None) {
                result = grads_add_one(call, i, g->entry[i]);
            }
        }
    }
    if (result < 0) { /* entry still has them all: nothing is lost */
        PyObject *exception = oomkit_exception_take(); /* owned, given back */
        if (oomkit_grad_mode_set(call->st, mode) < 0) {
            oomkit_error_unraised(call->given.func);
        }
        oomkit_exception_give(exception);
        return -1;
    }
    grads_array_free(call, &g->entry);
    g->apart = g->away = 0;
    return oomkit_grad_mode_set(call->st, mode) < 0 ? -1 : 0;
}

int
oomkit_grads_aside_back(oomkit_call *call)
{
    oomkit_grads *g = &call->grads;
    Py_ssize_t i;

    for (i = 0; g->aside != NULL && i < call->parts->param_count; i++) {
        if (g->aside[i] != NULL && grads_set(call, i, g->aside[i]) < 0) {
            return -1;
        }
    }
    grads_array_free(call, &g->aside);
    return 0;
}

/* After the backward of the last micro-batch of a replay: leaves whose gradient already
 * held the whole contribution of the failed attempt get it back in place of the
 * replayed one. */
int
oomkit_grads_settle(oomkit_call *call)
{
    const oomkit_grads *g = &call->grads;

    if (!call->is_last || (g->apart && g->away && grads_add_apart(call) < 0)) {
        return call->is_last ? -1 : 0;
    }
    return oomkit_grads_aside_back(call);
}

int
oomkit_grads_abandon(oomkit_call *call)
{
    Py_ssize_t i;

    for (i = 0; call->grads.aside != NULL && i < call->parts->param_count; i++) {
        if (call->grads.aside[i] != NULL &&
            grads_set(call, i, call->grads.aside[i]) < 0) {
            oomkit_error_unraised(call->parts->params[i]);
        }
    }
    return call->grads.aside != NULL && !call->grads.aside_said;
}

/* After a backward of the last micro-batch: what the gradients are now. 0 or -1. */
int
oomkit_grads_note_last(oomkit_call *call)
{
    oomkit_grads_marks_drop(call, &call->grads.after);
    return oomkit_grads_marks_take(call, &call->grads.after);
}

/* Before the next one: did the step clear or change them meanwhile? 1, 0 or -1.
 * Forgets. */
int
oomkit_grads_changed_since(oomkit_call *call)
{
    const oomkit_grads *g = &call->grads;
    OWNED_MEMORY uint8_t *states = NULL;
    Py_ssize_t moved;

    if (g->after == NULL) {
        return 0;
    }
    states = PyMem_Malloc((size_t)call->parts->param_count);
    if (states == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    moved = oomkit_grads_marks_compare(call, g->after, states, NULL);
    return moved < 0 ? -1 : moved != 0;
}

/* Forgets the marks of an attempt; copies and gradients set aside outlive it. */
void
oomkit_grads_end_attempt(oomkit_call *call)
{
    oomkit_grads *g = &call->grads;

    if (g->marked && g->at_entry) { /* the array is for the next attempt */
        call->st->bridge->grads_release(g->marks, (size_t)call->parts->param_count);
    }
    oomkit_grads_marks_drop(call, &g->after);
    oomkit_grads_end_micro(call);
    grads_array_free(call, &g->hosted);
    g->marked = 0;
    oomkit_baseline_unmarked(call);
}

static int
grads_array_grow(oomkit_call *call, PyObject ***array, Py_ssize_t old)
{
    PyObject **grown; /* owned, then by the call */

    if (*array == NULL) {
        return 0;
    }
    grown = grads_array(call);
    if (grown == NULL) {
        while (old-- > 0) { /* of the old size, nothing could ever look at it again */
            Py_CLEAR((*array)[old]);
        }
        PyMem_Free(*array);
        *array = NULL;
        return -1;
    }
    memcpy(grown, *array, (size_t)old * sizeof(*grown)); /* the references move */
    PyMem_Free(*array);
    *array = grown;
    return 0;
}

/* Between attempts: there are more parameters than `old`. 0 or -1. */
int
oomkit_grads_grow(oomkit_call *call, Py_ssize_t old)
{
    oomkit_grads *g = &call->grads;

    SPARE_GIVE(call->parts->spare_marks, g->marks);
    MEMORY_CLEAR(g->parked_at); /* nothing is parked between attempts */
    return grads_array_grow(call, &g->copies, old) |
           grads_array_grow(call, &g->parked, old) |
           grads_array_grow(call, &g->hosted, old) |
           grads_array_grow(call, &g->entry, old) |
           grads_array_grow(call, &g->aside, old);
}

void
oomkit_grads_release(oomkit_call *call)
{
    oomkit_grads *g = &call->grads;

    if (g->marks != NULL) {
        SPARE_GIVE(call->parts->spare_marks, g->marks);
    }
    MEMORY_CLEAR(g->parked_at);
    if (g->away && oomkit_grads_bring_back(call) < 0) {
        oomkit_error_unraised(call->given.func);
    }
    grads_array_free(call, &g->entry);
    grads_array_free(call, &g->copies);
    grads_array_free(call, &g->parked);
    grads_array_free(call, &g->hosted);
    grads_array_free(call, &g->aside);
}

/* --- what happens in a call --- */

/* Marks of the first backward of an attempt; while split, what earlier micro-batches
 * have accumulated is back. */
static int
gradients_backward_begins(oomkit_call *call, oomkit_backward *backward)
{
    (void)backward;
    if (oomkit_earlier_grads_leave(call) < 0 || oomkit_grads_mark(call) < 0) {
        return -1;
    }
    if (call->grads.aside != NULL && call->backward.done > 0) {
        return oomkit_refuse(
            call,
            "auto_batch cannot replay a step with several backward() calls: gradients "
            "were present before the step and the first backward ran out of memory; "
            "pass gradient_safety=\"copy\"" SEE("gradients-not-restored"));
    }
    if (call->split &&
        (parked_refuse_changed(call) < 0 || oomkit_grads_unpark(call) < 0)) {
        return -1;
    }
    return oomkit_ranks_backward_begins(call);
}

static int
gradients_backward_ends(oomkit_call *call, const oomkit_backward *backward)
{
    (void)backward;
    if (call->split && (!call->is_last || call->grads.eager)) {
        return oomkit_grads_park(call);
    }
    if (oomkit_grads_settle(call) < 0 || oomkit_ranks_backward_ends(call) < 0) {
        return -1;
    }
    return call->split ? oomkit_grads_note_last(call) : 0;
}

static int
gradients_attempt_begins(oomkit_call *call)
{
    return call->split && oomkit_call_is_replay(call) ? grads_hide(call) : 0;
}

const oomkit_rule oomkit_gradients_rule = {.attempt_begins = gradients_attempt_begins,
                                           .backward_begins = gradients_backward_begins,
                                           .backward_ends = gradients_backward_ends};

/* --- since a micro-batch began: which have come or moved, by whatever way --- */

int
oomkit_grads_micro_begins(oomkit_call *call)
{
    oomkit_grads_end_micro(call);
    return oomkit_grads_marks_take(call, &call->grads.began);
}

int
oomkit_grads_since_micro(oomkit_call *call, uint8_t *states)
{
    return oomkit_grads_marks_compare(call, call->grads.began, states, NULL) < 0 ? -1
                                                                                 : 0;
}

/* Forgets what was marked when a micro-batch began. */
void
oomkit_grads_end_micro(oomkit_call *call)
{
    oomkit_grads_marks_drop(call, &call->grads.began);
}
