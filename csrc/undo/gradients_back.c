/* Rolling gradients back: compare with the marks, drop what is new, restore from
 * copies, set aside what holds the whole contribution, or refuse. */
#include "gradients.h"
#include "undo.h"
#include "../py/half_made.h"
#include "../py/tensor.h"

/* Gradient i is as it was when the marks were taken, at another version. 0 or -1. */
static int
grads_remark(oomkit_call *call, Py_ssize_t i, PyObject *gradient)
{
    return oomkit_tensor_version(call->st, gradient, &call->grads.marks[i].version);
}

/* What versions do not tell of the gradient that was there at entry: torch adds to a
 * sparse one in several steps, and where a later one fails the gradient is half made,
 * or has the sum already. 0 or -1. */
static int
grads_look(oomkit_call *call, Py_ssize_t i, uint8_t *state, uint32_t *step)
{
    const int copied = call->grads.copies != NULL && call->grads.copies[i] != NULL;
    OWNED PyObject *gradient = grads_get(call, i);
    oomkit_half_made found;
    int whole;

    if (gradient == NULL || gradient == Py_None) {
        return gradient == NULL ? -1 : 0;
    }
    whole = oomkit_half_made_mend(call->st, gradient, &found);
    if (whole == 0) {
        *state =
            OOMKIT_GRAD_REPLACED; /* not to be written to: a copy takes its place */
    } else if (whole > 0 && found.sparse && *state == OOMKIT_GRAD_SAME &&
               (copied || found.may_have_grown)) {
        *state = OOMKIT_GRAD_MOVED;
        *step = 0;
    } else if (found.was_empty && *state == OOMKIT_GRAD_SAME) {
        whole = grads_remark(call, i, gradient);
    }
    return whole < 0 ? -1 : 0;
}

/* Gives parameter i the value of its host copy: in place while it is still the marked
 * tensor (others may look at it), else as a tensor of its own. */
static int
grads_put_copy(oomkit_call *call, Py_ssize_t i, int in_place)
{
    oomkit_state *st = call->st;
    PyObject *copy = call->grads.copies[i]; /* borrowed */
    OWNED PyObject *device = NULL, *fresh = NULL;

    if (in_place) {
        OWNED PyObject *target = grads_get(call, i);
        OWNED PyObject *done =
            target ? PyObject_CallMethodOneArg(target, st->str_copy, copy) : NULL;
        return done == NULL ? -1 : 0;
    }
    device = PyObject_GetAttr(call->parts->params[i], st->str_device);
    fresh = device ? PyObject_CallMethod(copy, "to", "O", device) : NULL;
    if (fresh == copy) { /* on the CPU: the copy itself must stay as it is */
        Py_SETREF(fresh, PyObject_CallMethodNoArgs(copy, st->str_clone));
    }
    return fresh == NULL ? -1 : grads_set(call, i, fresh);
}

/* May moved gradients be set aside? Only when a single backward was interrupted, so
 * that each moved leaf holds exactly one contribution of the whole batch. It may stay
 * when the replay will draw the same random numbers and normalise alike (1); else it
 * has to be taken off (2). A backward inside that one (reentrant checkpoint) may have
 * brought a part of what comes to a shared leaf. */
static int
grads_may_set_aside(oomkit_call *call, const uint8_t *states, const uint32_t *steps)
{
    Py_ssize_t i;
    int differs;

    if (call->split || call->grads.no_aside || !call->backward.failed ||
        call->backward.done != 0 || call->grads.aside != NULL ||
        call->st->engine_runs != call->grads.engine_runs + 1) {
        return 0;
    }
    differs = oomkit_buffers_moved(call);
    differs = differs == 0 ? oomkit_rng_moved(call) : differs;
    if (differs < 0 || (differs && !call->grads.may_owe)) {
        return 0;
    }
    for (i = 0; i < call->parts->param_count; i++) {
        if (states[i] == OOMKIT_GRAD_REPLACED || states[i] == OOMKIT_GRAD_GONE ||
            (states[i] == OOMKIT_GRAD_MOVED && steps[i] != 1)) {
            return 0;
        }
    }
    return 1 + differs;
}

static int
grads_set_aside(oomkit_call *call, Py_ssize_t i)
{
    oomkit_grads *g = &call->grads;

    if (g->aside == NULL && (g->aside = grads_array(call)) == NULL) {
        return -1;
    }
    g->aside[i] = grads_get(call, i);
    return g->aside[i] == NULL ? -1 : grads_set(call, i, Py_None);
}

/* Keeps the exception in flight. */
static void
grads_aside_undo(oomkit_call *call)
{
    KEEPING_EXCEPTION {
        oomkit_grads_abandon(call);
        grads_array_free(call, &call->grads.aside);
    }
}

/* What was set aside is the failed attempt's sum, not the replay's: equal to rounding.
 */
static int
grads_say_aside(oomkit_call *call)
{
    return oomkit_say(call->st, "info", "sKO",
                      "step=%d of %s keeps gradients of the failed attempt that were "
                      "complete: equal up to rounding, not bit for bit",
                      (unsigned long long)call->log.number, call->options->label);
}

static int
grads_restore_one(oomkit_call *call, Py_ssize_t i, uint8_t state, int aside)
{
    switch (state) {
    case OOMKIT_GRAD_SAME:
        return 0;
    case OOMKIT_GRAD_NEW:
        return grads_set(call, i, Py_None);
    default:
        if (call->grads.copies != NULL && call->grads.copies[i] != NULL) {
            return grads_put_copy(call, i, state == OOMKIT_GRAD_MOVED);
        }
        return aside ? grads_set_aside(call, i) : 1;
    }
}

/* The caller's gradients, or those of finished micro-batches, are in .grad again; what
 * accumulated beside them is void. 0 or -1. */
static int
grads_bring_out(oomkit_call *call)
{
    oomkit_grads *g = &call->grads;

    if (g->eager || g->apart) {
        if (oomkit_grads_bring_back(call) < 0) {
            return -1;
        }
        grads_array_free(call, &g->parked);
        g->is_parked = 0;
    }
    if (!g->marked) {
        return 0;
    }
    if (!g->at_entry &&
        g->is_parked) { /* of this attempt: they would be dropped there */
        grads_array_free(call, &g->parked);
        g->is_parked = 0;
    }
    return g->eager ? 0 : oomkit_grads_unpark(call);
}

/* The first parameter whose gradient cannot go back, or -1. */
static Py_ssize_t
grads_stuck(const oomkit_call *call, const uint8_t *states, int aside)
{
    PyObject *const *copies = call->grads.copies, *const *kept = call->grads.aside;
    Py_ssize_t i;

    for (i = 0; i < call->parts->param_count; i++) {
        int moved = states[i] != OOMKIT_GRAD_SAME && states[i] != OOMKIT_GRAD_NEW;
        int copied = copies != NULL && copies[i] != NULL;
        if (moved && ((!copied && !aside) || (kept != NULL && kept[i] != NULL))) {
            return i;
        }
    }
    return -1;
}

/* How each gradient differs from the marks. 0 or -1. */
static int
grads_compare(oomkit_call *call, uint8_t *states, uint32_t *steps)
{
    Py_ssize_t i, n = call->parts->param_count;

    if (oomkit_grads_marks_compare(call, call->grads.marks, states, steps) < 0) {
        return -1;
    }
    for (i = 0; i < n; i++) {
        if (states[i] != OOMKIT_GRAD_NEW && states[i] != OOMKIT_GRAD_GONE &&
            grads_look(call, i, &states[i], &steps[i]) < 0) {
            return -1;
        }
    }
    if (oomkit_ranks_sharded(
            call)) { /* their parts are written to beneath the versions */
        for (i = 0; i < n; i++) {
            if (states[i] == OOMKIT_GRAD_SAME && call->grads.copies != NULL &&
                call->grads.copies[i] != NULL) {
                states[i] = OOMKIT_GRAD_MOVED;
            }
        }
    }
    return 0;
}

/* What cannot go back goes, and all else with it: it is made again from nothing. Not
 * where the step has cleared some itself. 1 done, 0 or -1. */
static int
grads_go(oomkit_call *call, const uint8_t *states)
{
    Py_ssize_t i, n = call->parts->param_count;

    if (!call->grads.may_go || grads_stuck(call, states, 0) < 0) {
        return 0;
    }
    for (i = 0; i < n; i++) {
        if (states[i] == OOMKIT_GRAD_GONE) {
            return 0;
        }
    }
    call->grads.gone = 1;
    for (i = 0; i < n; i++) {
        if (grads_set(call, i, Py_None) < 0) {
            return -1;
        }
    }
    return 1;
}

/* --- gradients of earlier calls that the step clears --- */

struct oomkit_earlier_grad {
    PyObject *param;    /* owned: had a gradient at entry */
    PyObject *stand_in; /* owned: in its .grad while the function runs; or NULL */
    PyObject *behind; /* owned: what that stands in front of, NULL while it does not */
    int cleared;      /* it is another one since, or has been written to */
};

/* Which tensor gradient i was when this attempt marked it, or is now: to be compared
 * with that of the entry. */
static const void *
earlier_then(const oomkit_call *call, const void *const *now, Py_ssize_t i)
{
    void *marked;
    OWNED PyObject *alive = NULL; /* of a mark without a bridge, a weak reference */

    if (!call->grads.marked) {
        return now[i];
    }
    marked = call->grads.marks[i].grad;
    if (marked == NULL || oomkit_has_bridge(call->st)) {
        return marked;
    }
    alive = oomkit_reference_get(marked);
    return alive;
}

/* What the step has done ahead of its first backward. Where it has written to one of
 * them (zeros) it has to all: the version of the first is known. */
static void
earlier_compare(oomkit_call *call, const void *const *entry, const void *const *now)
{
    oomkit_earlier_grads *e = &call->entry.earlier;
    const Py_ssize_t n = call->parts->param_count;
    Py_ssize_t i;
    int moved = 0;

    for (i = 0; i < n; i++) {
        oomkit_earlier_grad *item = &e->items[e->count];
        const int same = entry[i] == earlier_then(call, now, i);
        if (entry[i] == NULL) {
            continue;
        }
        if (e->count == 0 && same) {
            moved = (uint32_t)(uintptr_t)entry[n] !=
                    (call->grads.marked ? call->grads.marks[i].version
                                        : (uint32_t)(uintptr_t)now[n]);
        }
        item->param = Py_NewRef(call->parts->params[i]);
        item->cleared = !same || moved;
        e->count++;
    }
}

/* Once for a call, while the marks of its entry stand. 0 or -1. */
static int
earlier_note(oomkit_call *call)
{
    oomkit_earlier_grads *e = &call->entry.earlier;
    const void *const *entry = oomkit_params_gradients(call); /* borrowed */
    const Py_ssize_t n = call->parts->param_count;
    OWNED_MEMORY const void **now = NULL;
    Py_ssize_t i, had = 0;

    for (i = 0; !e->noted && entry != NULL && i < n; i++) {
        had += entry[i] != NULL;
    }
    if (had == 0) {
        e->noted |= entry != NULL;
        return 0;
    }
    now = PyMem_Malloc(((size_t)n + 1) * sizeof(*now));
    e->items = PyMem_Calloc((size_t)had, sizeof(*e->items));
    if (now == NULL || e->items == NULL) {
        MEMORY_CLEAR(e->items);
        PyErr_NoMemory();
        return -1;
    }
    if (oomkit_params_gradients_now(call, now) < 0) {
        MEMORY_CLEAR(e->items);
        return -1;
    }
    earlier_compare(call, entry, now);
    e->noted = 1;
    return 0;
}

/* Its parameter gets a stand-in, whose values are an error to read. 0 or -1. */
static int
earlier_hide(oomkit_call *call, oomkit_earlier_grad *item)
{
    oomkit_state *st = call->st;
    OWNED PyObject *gradient = PyObject_GetAttr(item->param, st->str_grad);
    OWNED PyObject *made = NULL;

    if (gradient == NULL) {
        return -1;
    }
    if (gradient != Py_None && !item->cleared) { /* the caller's own, as it was */
        return 0;
    }
    made = PyObject_CallFunctionObjArgs(
        st->stand_in, item->param, gradient,
        item->stand_in == NULL ? Py_None : item->stand_in, NULL);
    if (made == NULL || made == Py_None) {
        return made == NULL ? -1 : 0;
    }
    Py_XSETREF(item->stand_in, STEAL(made));
    if (PyObject_SetAttr(item->param, st->str_grad, item->stand_in) < 0) {
        return -1;
    }
    item->behind = STEAL(gradient);
    call->entry.earlier.out = 1;
    return 0;
}

/* The stand-in goes, unless the step has put something else there. 0 or -1. */
static int
earlier_show(oomkit_call *call, oomkit_earlier_grad *item)
{
    PyObject *name = call->st->str_grad; /* borrowed */
    OWNED PyObject *gradient = NULL, *read = NULL;

    if (item->behind == NULL) {
        return 0;
    }
    gradient = PyObject_GetAttr(item->param, name);
    if (gradient == NULL ||
        (gradient == item->stand_in &&
         PyObject_SetAttr(item->param, name, item->behind) < 0) ||
        (read = PyObject_CallMethod(item->stand_in, "leave", NULL)) == NULL) {
        return -1;
    }
    call->entry.earlier.was_read |= read == Py_True;
    Py_CLEAR(item->behind);
    return 0;
}

int
oomkit_earlier_grads_show(oomkit_call *call)
{
    oomkit_earlier_grads *e = &call->entry.earlier;
    Py_ssize_t i;
    int result = 0;

    for (i = 0; e->out && i < e->count; i++) {
        result |= earlier_show(call, &e->items[i]);
    }
    e->out = result < 0;
    return result;
}

int
oomkit_earlier_grads_leave(oomkit_call *call)
{
    if (oomkit_earlier_grads_show(call) < 0) {
        return -1;
    }
    if (!call->entry.earlier.was_read) {
        return 0;
    }
    (void)oomkit_refuse_step(
        call, "it read a gradient of an earlier call before its own backward(), and "
              "caught the error that says so. That gradient is gone: store what the "
              "next call needs of it in a tensor or a number before the step "
              "returns" SEE("earlier-gradient"));
    return call->cut->at > 0 ? oomkit_split_alone(call) : -1;
}

/* What stands in for those that the step clears goes. */
static int
earlier_cleared(oomkit_call *call, PyObject *params)
{
    oomkit_earlier_grads *e = &call->entry.earlier;
    Py_ssize_t i, k, at = 0; /* mostly they come in the same order */

    for (i = 0; e->out && i < PyList_GET_SIZE(params); i++) {
        PyObject *param = PyList_GET_ITEM(params, i); /* borrowed */
        for (k = 0; k < e->count && e->items[(at + k) % e->count].param != param; k++) {
        }
        at = (at + k) % e->count;
        if (k < e->count && earlier_show(call, &e->items[at]) < 0) {
            return -1;
        }
    }
    return 0;
}

/* The whole batch would find those of earlier calls. Where they are gone, because an
 * attempt before has cleared them, or the first micro-batch, to read them is an error.
 */
static int
earlier_micro_begins(oomkit_call *call)
{
    oomkit_earlier_grads *e = &call->entry.earlier;
    const int later = call->cut->at > 0 || oomkit_call_is_replay(call);
    Py_ssize_t i;
    int result = later ? earlier_note(call) : 0;

    EXEMPT (call->st) {
        for (i = 0; result == 0 && i < e->count; i++) {
            if (later || e->items[i].cleared) {
                result = earlier_hide(call, &e->items[i]);
            }
        }
    }
    return result;
}

static int
earlier_backward_begins(oomkit_call *call, oomkit_backward *backward)
{
    (void)backward;
    return oomkit_earlier_grads_leave(call);
}

static int
earlier_micro_ends(oomkit_call *call, PyObject *result)
{
    (void)result;
    return oomkit_earlier_grads_leave(call);
}

/* The whole batch may find what a later micro-batch does not. */
static void
earlier_micro_left(oomkit_call *call)
{
    KEEPING_EXCEPTION {
        if (oomkit_earlier_grads_show(call) < 0) {
            oomkit_error_unraised(
                call->given.func); /* tried again when all goes back */
        }
    }
    if (call->entry.earlier.was_read && call->cut->at > 0 && PyErr_Occurred() &&
        PyErr_ExceptionMatches(call->st->SplitError)) {
        call->refused.raised = 1;
        (void)oomkit_split_alone(call);
    }
}

void
oomkit_earlier_grads_free(oomkit_call *call)
{
    oomkit_earlier_grads *e = &call->entry.earlier;
    Py_ssize_t i;

    earlier_micro_left(call);
    for (i = 0; i < e->count; i++) {
        Py_XDECREF(e->items[i].param);
        Py_XDECREF(e->items[i].stand_in);
        Py_XDECREF(e->items[i].behind);
    }
    PyMem_Free(e->items);
    memset(e, 0, sizeof(*e));
}

const oomkit_rule oomkit_earlier_grads_rule = {.micro_begins = earlier_micro_begins};

const oomkit_rule oomkit_earlier_grads_shown_rule = {
    .backward_begins = earlier_backward_begins,
    .gradients_cleared = earlier_cleared,
    .micro_left = earlier_micro_left,
    .micro_ends = earlier_micro_ends};

/* 0 every gradient is as at the marks (or set aside); 1 refused: *why and *which (owned
 * parameter) tell; -1 error. Nothing is changed when it refuses. */
int
oomkit_grads_restore(oomkit_call *call, const char **why, PyObject **which)
{
    Py_ssize_t i, n = call->parts->param_count;
    OWNED_MEMORY uint8_t *states = NULL;
    OWNED_MEMORY uint32_t *steps = NULL;
    int aside, result = 0;

    if (oomkit_earlier_grads_show(call) < 0 ||
        (call->proof == NULL && earlier_note(call) < 0) || grads_bring_out(call) < 0) {
        return -1;
    }
    call->entry.earlier.was_read = 0; /* by the attempt that goes back */
    if (!call->grads.marked || call->grads.gone) {
        return 0;
    }
    states = PyMem_Calloc((size_t)n + 1, sizeof(*states));
    steps = PyMem_Calloc((size_t)n + 1, sizeof(*steps));
    if (states == NULL || steps == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (grads_compare(call, states, steps) < 0) {
        return -1;
    }
    result = grads_go(call, states);
    if (result != 0) {
        return result < 0 ? -1 : 0;
    }
    aside = call->grads.at_entry ? grads_may_set_aside(call, states, steps) : 0;
    i = grads_stuck(call, states, aside);
    if (i >= 0) {
        *why = "its gradient from before the step was changed, and no copy exists";
        *which = Py_NewRef(call->parts->params[i]);
        return 1;
    }
    for (i = 0; i < n && result == 0; i++) {
        result = grads_restore_one(call, i, states[i], aside) != 0 ? -1 : 0;
    }
    if (result == 0 && aside == 1 && call->grads.aside != NULL) {
        result = grads_say_aside(call);
    }
    if (result == 0 && aside == 2 && call->grads.aside != NULL) {
        call->grads.owed = OOMKIT_OWED_LATER;
    }
    if (result < 0 && aside) { /* as found, to be tried again */
        grads_aside_undo(call);
    }
    return result;
}
