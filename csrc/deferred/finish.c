/* The caller's backward has run: what is learned from it, and losses that were split
 * before get their due. */
#include "callers_backward.h"
#include "../py/tensor.h"
#include "../sizes/sizes.h"
#include "../batch/batch.h"

static void
second_learn(oomkit_second *s, oomkit_pending *p)
{
    oomkit_call *call = oomkit_second_call(s, p->parts);
    oomkit_tensor_facts facts;

    if (oomkit_tensor_facts_get(s->st, p->gradient, 0, &facts) < 0) {
        PyErr_Clear(); /* an odd gradient: nothing is learned from it */
    } else if (facts.ndim == 0 && !s->create_graph) {
        Py_XSETREF(p->step->last_gradient, Py_NewRef(p->gradient));
    }
    if (call != NULL && (p->step->seen_oom || call->grads.at_entry)) {
        call->shape.signature =
            p->signature != 0
                ? p->signature
                : oomkit_signature_of(call, &p->batch, p->modes.autocast != NULL, 1);
        oomkit_signature_succeeded(call, oomkit_batch_rows(&p->batch),
                                   call->sizes.window.peak_allocated_bytes);
    }
}

/* The caller looks at the gradient of something that was returned beside a loss which
 * was split. 0, or -1 with SplitError. */
static int
second_refuse_watched(const oomkit_pending *p)
{
    int watched = oomkit_pending_watched(p);

    if (watched > 0) {
        oomkit_raise(p->st->SplitError,
                     "register_hook() or retain_grad() was called on what %U returned "
                     "beside its loss; it ran in micro-batches, whose gradients do not "
                     "pass there: do it inside the decorated step",
                     p->step->options.label);
    }
    return watched == 0 ? 0 : -1;
}

int
oomkit_second_finish(oomkit_second *s)
{
    int i, again;

    for (i = 0; i < s->call_count; i++) {
        if (s->calls[i]->sizes.window.open) {
            oomkit_device_end(s->st, &s->calls[i]->sizes.window);
        }
    }
    for (i = 0; i < s->count; i++) {
        oomkit_pending *p = s->armed[i];
        if (p->second != s || !p->fired) {
            continue;
        }
        if (p->kind == OOMKIT_RETURNED_WHOLE) {
            if (!p->replayed) {
                second_learn(s, p);
            }
            continue;
        }
        if (second_refuse_watched(p) < 0) {
            return -1;
        }
        again = p->kind == OOMKIT_RETURNED_DEFERRED
                    ? 1
                    : oomkit_stash_deposit(p, s->keep_graph);
        if (again > 0 && s->keep_graph) {
            oomkit_raise(
                s->st->SplitError,
                "backward(retain_graph=True) cannot go through this loss, which "
                "auto_batch computed in micro-batches: call backward() once, "
                "or pass backward=True to auto_batch");
            again = -1;
        }
        if (again < 0 || (again > 0 && oomkit_second_again(s, p, NULL) < 0)) {
            p->spent = 1; /* a part of its stash may be gone */
            return -1;
        }
    }
    return 0;
}
