/* Backwards of several threads at the same time: each marks all gradients of whose
 * losses wait, and must keep its hands off those that another one writes. */
#include "callers_backward.h"
#include "../undo/undo.h"

/* Is `other` this one, or one that this one runs inside? */
static int
second_is_own(const oomkit_second *s, const oomkit_second *other)
{
    while (s != NULL && s != other) {
        s = s->outer;
    }
    return s != NULL;
}

int
oomkit_second_is_elsewhere(const oomkit_second *s, const oomkit_participants *parts)
{
    const oomkit_pending *p;
    int others = 0;

    if (s->st->seconds == s && s->next == NULL) {
        return 0; /* no other runs */
    }
    for (p = parts->pendings; p != NULL; p = p->next) {
        if (p->second != NULL && second_is_own(s, p->second)) {
            return 0;
        }
        others |= p->second != NULL;
    }
    return others;
}

int
oomkit_second_takes_over(oomkit_second *s, const oomkit_participants *parts)
{
    oomkit_second *other;
    oomkit_call *call = oomkit_second_call(s, parts);
    int unmarked = call->deferred.elsewhere == OOMKIT_UNMARKED, i;

    call->deferred.elsewhere = 0;
    for (other = s->st->seconds; other != NULL; other = other->next) {
        oomkit_call *theirs =
            second_is_own(s, other) ? NULL : oomkit_second_call(other, parts);
        for (i = 0; theirs != NULL && i < other->count; i++) {
            if (other->armed[i]->second == other && other->armed[i]->parts == parts) {
                theirs = NULL;
            }
        }
        if (theirs != NULL && theirs->deferred.elsewhere == 0) {
            theirs->deferred.elsewhere = 1;
        }
    }
    return unmarked ? oomkit_grads_mark(call) : 0;
}
