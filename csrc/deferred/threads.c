/* Backwards of several threads at the same time: each marks all gradients of whose
 * losses wait, and must keep its hands off those that another one writes. */
#include "callers_backward.h"
#include "../undo/undo.h"

/* Is `other` this one, or one that this one runs inside? */
static int
callers_is_own(const oomkit_callers *s, const oomkit_callers *other)
{
    while (s != NULL && s != other) {
        s = s->outer;
    }
    return s != NULL;
}

int
oomkit_callers_is_elsewhere(const oomkit_callers *s, const oomkit_participants *parts)
{
    const oomkit_deferred *p;
    int others = 0;

    if (s->st->callers == s && s->next == NULL) {
        return 0; /* no other runs */
    }
    for (p = parts->deferred; p != NULL; p = p->next) {
        if (p->callers != NULL && callers_is_own(s, p->callers)) {
            return 0;
        }
        others |= p->callers != NULL;
    }
    return others;
}

int
oomkit_callers_takes_over(oomkit_callers *s, const oomkit_participants *parts)
{
    oomkit_callers *other;
    oomkit_call *call = oomkit_callers_call(s, parts);
    int unmarked = call->deferred.elsewhere == OOMKIT_UNMARKED, i;

    call->deferred.elsewhere = 0;
    for (other = s->st->callers; other != NULL; other = other->next) {
        oomkit_call *theirs =
            callers_is_own(s, other) ? NULL : oomkit_callers_call(other, parts);
        for (i = 0; theirs != NULL && i < other->count; i++) {
            if (other->armed[i]->callers == other && other->armed[i]->parts == parts) {
                theirs = NULL;
            }
        }
        if (theirs != NULL && theirs->deferred.elsewhere == 0) {
            theirs->deferred.elsewhere = 1;
        }
    }
    return unmarked ? oomkit_grads_mark(call) : 0;
}
