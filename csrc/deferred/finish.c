/* The caller's backward has run: what is learned from it, and losses that were split
 * before get their due. */
#include "callers_backward.h"
#include "../py/tensor.h"
#include "../sizes/sizes.h"
#include "../batch/batch.h"
#include "../undo/gradients.h"

static void
callers_learn(oomkit_callers *s, oomkit_deferred *p)
{
    oomkit_call *call = oomkit_callers_call(s, p->parts);
    oomkit_tensor_facts facts;

    if (oomkit_tensor_facts_get(s->st, p->gradient, 0, &facts) < 0) {
        PyErr_Clear(); /* an odd gradient: nothing is learned from it */
    } else if (facts.ndim == 0 && !s->create_graph) {
        Py_XSETREF(p->step->last_gradient, Py_NewRef(p->gradient));
    }
    if (call != NULL && (p->step->seen_oom || oomkit_grads_at_entry(call))) {
        call->shape.signature =
            p->signature != 0
                ? p->signature
                : oomkit_signature_of(call, &p->batch, p->modes.autocast != NULL, 1);
        oomkit_signature_succeeded(call, oomkit_batch_rows(&p->batch),
                                   oomkit_window_peak(call));
    }
}

/* The caller looks at the gradient of something that was returned beside a loss which
 * was split. 0, or -1 with SplitError. */
static int
callers_refuse_watched(const oomkit_deferred *p)
{
    int watched = oomkit_deferred_watched(p);

    if (watched > 0) {
        oomkit_raise(
            p->st->SplitError,
            "register_hook() or retain_grad() was called on another result of %U than "
            "its loss. The step ran in micro-batches, whose gradients do not pass "
            "there: call it inside the decorated step" SEE("returned-loss"),
            p->step->options.label);
    }
    return watched == 0 ? 0 : -1;
}

int
oomkit_callers_finish(oomkit_callers *s)
{
    int i, again;

    for (i = 0; i < s->call_count; i++) {
        oomkit_window_close(s->calls[i]);
    }
    for (i = 0; i < s->count; i++) {
        oomkit_deferred *p = s->armed[i];
        if (p->callers != s || !p->fired) {
            continue;
        }
        if (p->kind == OOMKIT_RETURNED_WHOLE) {
            if (!p->replayed) {
                callers_learn(s, p);
            }
            continue;
        }
        if (callers_refuse_watched(p) < 0) {
            return -1;
        }
        again = p->kind == OOMKIT_RETURNED_DEFERRED
                    ? 1
                    : oomkit_eager_deposit(p, s->keep_graph);
        if (again > 0 && s->keep_graph) {
            oomkit_raise(
                s->st->SplitError,
                "backward(retain_graph=True) cannot go through this loss, which "
                "auto_batch computed in micro-batches: call backward() once, or pass "
                "backward=True to auto_batch" SEE("returned-loss"));
            again = -1;
        }
        if (again < 0 || (again > 0 && oomkit_callers_again(s, p, NULL) < 0)) {
            p->spent = 1; /* some of its gradients may be gone */
            return -1;
        }
    }
    return 0;
}
