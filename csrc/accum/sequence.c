/* One course: every micro-batch makes the same outermost backwards and intercepted
 * calls. */
#include "accum.h"
#include "../call/step.h"
#include "../optim/optim.h"
#include "../py/errors.h"
#include "../undo/undo.h"

static void
sequence_clear(oomkit_sequence *sequence)
{
    int i, count = sequence->count;
    sequence->count = 0;
    for (i = 0; i < count && i < OOMKIT_SEQUENCE; i++) {
        Py_CLEAR(sequence->events[i].where);
    }
}

/* Where in the first course this event is, when it is not at `at`: only a skipped
 * update explains what lies between. -1 with an exception. */
static int
sequence_find(oomkit_call *call, const void *target, const void *name, int at)
{
    const oomkit_sequence *first = &call->cut->sequence[0];
    int i, skipped;

    for (i = at; i < first->count; i++) {
        if (first->events[i].target == target && first->events[i].name == name) {
            break;
        }
    }
    if (target == NULL || i == at || i >= first->count) {
        return at;
    }
    skipped = oomkit_scale_fell(call);
    return skipped < 0 ? -1 : skipped ? i : at;
}

static int
sequence_differs(oomkit_call *call, PyObject *here, PyObject *there)
{
    OWNED PyObject *end = PyUnicode_FromString("its end");

    if (end == NULL) {
        return -1;
    }
    return oomkit_refuse_split(
        call,
        "its micro-batches run different code: micro-batch %lld of %lld reached %S "
        "where the first one reached %S. Make the decision from oomkit.current() (`if "
        "oomkit.current().is_last: ...`), or outside the step" SEE(
            "micro-batches-differ"),
        (long long)(call->cut->at + 1), (long long)call->cut->count,
        here == NULL ? end : here, there == NULL ? end : there);
}

/* Notes an event of the present micro-batch; `target` NULL is a backward. */
static int
sequence_note(oomkit_call *call, const void *target, const void *name)
{
    oomkit_sequence *sequence = &call->cut->sequence[call->cut->at > 0];
    oomkit_sequence *first = &call->cut->sequence[0];
    oomkit_event *event;
    PyObject *where; /* owned, then by the event */
    int at = sequence->count;

    if (call->sequence_waived) {
        return 0;
    }
    if (sequence != first && at < OOMKIT_SEQUENCE) {
        int found = sequence_find(call, target, name, at);
        while (at < found) {
            sequence->events[at++] = (oomkit_event){NULL, NULL, NULL};
        }
        if (found < 0) {
            return -1;
        }
    }
    where = oomkit_where();
    if (where == NULL) {
        return -1;
    }
    if (at >= OOMKIT_SEQUENCE) {
        Py_DECREF(where);
        sequence->count = OOMKIT_SEQUENCE; /* too long to compare further */
        return 0;
    }
    event = &sequence->events[at];
    event->target = target;
    event->name = name;
    event->where = where;
    sequence->count = at + 1;
    if (sequence == first) {
        return 0;
    }
    if (at >= first->count) {
        return sequence_differs(call, where, NULL);
    }
    if (first->events[at].target != target || first->events[at].name != name) {
        return sequence_differs(call, where, first->events[at].where);
    }
    return 0;
}

/* Did no micro-batch do what the whole batch does? A step that skips batches that are
 * too small does nothing at all in micro-batches. Refused where the failed attempt of
 * this very call ran a backward; said, once, where all whole calls before it did (or
 * made an update). 0 or -1. */
static int
sequence_skipped(oomkit_call *call)
{
    struct oomkit_step *step = call->step;
    const oomkit_sequence *first = &call->cut->sequence[0];
    OWNED PyObject *recorded = NULL;
    const char *what = NULL;
    int i, updates = call->sequence_waived;

    if (oomkit_call_is_replay(call) || oomkit_loss_is_returned(call)) {
        return 0;
    }
    for (i = 0; i < first->count && i < OOMKIT_SEQUENCE; i++) {
        updates |= first->events[i].target != NULL;
    }
    if (!call->training && call->tries.may_hold) {
        return oomkit_refuse_split(
            call,
            "it calls backward() with the whole batch, but not with any of its %lld "
            "micro-batches. If the step skips small batches, pass min_micro_batch= to "
            "auto_batch" SEE("micro-batches-differ"),
            (long long)call->cut->count);
    }
    if (!call->training && step->whole.seen && !step->whole.without_backward) {
        what = "backward()";
    } else if (!updates && step->whole.seen && !step->whole.without_update) {
        what = "update";
    }
    if (what == NULL || oomkit_has_said(step, OOMKIT_SAID_NEITHER)) {
        return 0;
    }
    recorded = PyObject_CallNoArgs(call->st->is_grad_enabled);
    if (recorded != Py_True) {
        return recorded == NULL ? -1 : 0; /* an evaluation by the same step */
    }
    (void)oomkit_say_once(step, OOMKIT_SAID_NEITHER);
    return oomkit_warn(
        call->st->OomkitWarning, 1,
        "oomkit: %U is split, and no micro-batch made the %s that each call with a "
        "whole batch made. If the step skips small batches, pass min_micro_batch= to "
        "auto_batch. Warned once" SEE("micro-batches-differ"),
        call->options->label, what);
}

/* At the end of a micro-batch: nothing that the first one did may be missing. */
static int
sequence_finish(oomkit_call *call)
{
    oomkit_sequence *sequence = &call->cut->sequence[call->cut->at > 0];
    oomkit_sequence *first = &call->cut->sequence[0];
    int result = 0;

    if (sequence == first) {
        return 0;
    }
    if (!call->sequence_waived && sequence->count < first->count) {
        int skipped = oomkit_scale_fell(call);
        result = skipped != 0 ? (skipped < 0 ? -1 : 0)
                              : sequence_differs(call, NULL,
                                                 first->events[sequence->count].where);
    }
    sequence_clear(sequence);
    return result;
}

/* Gradients of earlier micro-batches come back before a backward: what was cleared or
 * used since the last one of this micro-batch cannot be told from them. 1 with
 * SplitError. */
static int
sequence_cut(oomkit_call *call)
{
    const oomkit_sequence *sequence = &call->cut->sequence[call->cut->at > 0];
    const oomkit_event *last = sequence->count > 0 && sequence->count <= OOMKIT_SEQUENCE
                                   ? &sequence->events[sequence->count - 1]
                                   : NULL;
    int stepped = last != NULL && last->target != NULL, changed;

    if (call->backward.done == 0) {
        return 0;
    }
    changed = call->is_last ? oomkit_grads_changed_since(call) : 0;
    if (changed < 0 || (call->backward.cleared == NULL && !stepped && !changed)) {
        return changed < 0;
    }
    oomkit_refuse_split(
        call,
        "%s%s%V between two backward() calls, which micro-batches cannot reproduce. "
        "Make two decorated steps of it" SEE("update-between-backwards"),
        call->backward.cleared != NULL ? "zero_grad() is called"
        : stepped                      ? "an update is made"
                                       : "gradients are cleared or changed",
        call->backward.cleared != NULL || stepped ? " at " : "",
        call->backward.cleared != NULL ? call->backward.cleared
        : stepped                      ? last->where
                                       : NULL,
        "");
    return 1;
}

static int
sequence_backward(oomkit_call *call, oomkit_backward *backward)
{
    (void)backward;
    return sequence_cut(call) || sequence_note(call, NULL, NULL) < 0 ? -1 : 0;
}

static int
sequence_update(oomkit_call *call, oomkit_update *update)
{
    return sequence_note(call, update->method->target, update->method->name);
}

static int
sequence_update_runs(oomkit_call *call, const oomkit_update *update)
{
    return update->method->name == call->st->str_update
               ? oomkit_scale_note(call, update->method->target)
               : 0;
}

static int
sequence_micro_ends(oomkit_call *call, PyObject *result)
{
    (void)result;
    return call->split ? sequence_finish(call) : 0;
}

static int
sequence_before_join(oomkit_call *call)
{
    return call->proof == NULL ? sequence_skipped(call) : 0;
}

static void
sequence_attempt_ends(oomkit_call *call)
{
    sequence_clear(&call->cut->sequence[0]);
    sequence_clear(&call->cut->sequence[1]);
}

const oomkit_rule oomkit_sequence_rule = {.backward_begins = sequence_backward,
                                          .update_begins = sequence_update,
                                          .update_runs = sequence_update_runs,
                                          .micro_ends = sequence_micro_ends,
                                          .before_join = sequence_before_join,
                                          .attempt_ends = sequence_attempt_ends};
