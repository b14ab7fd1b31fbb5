/* Telling the rules of what a step does. Attempts and their micro-batches are told to
 * those of a split call, also where one has a single slice: a replay, or the whole
 * batch once more. */
#include "events.h"

#define EACH_RULE(rule, rules)                                                         \
    for (const oomkit_rule *const *rule = (rules); *rule != NULL; rule++)

#define HANDLER_ADD(list, handler)                                                     \
    do {                                                                               \
        size_t n_ = 0;                                                                 \
        while ((list)[n_] != NULL) {                                                   \
            n_++;                                                                      \
        }                                                                              \
        (list)[n_] = (handler); /* NULL: nothing is added */                           \
    } while (0)

void
oomkit_handlers_fill(oomkit_wiring *wiring)
{
    oomkit_handlers *handlers = &wiring->handlers;

    if (handlers->filled) { /* another interpreter may be reading it */
        return;
    }
    EACH_RULE(rule, wiring->when_whole)
    {
        HANDLER_ADD(handlers->backward_begins, (*rule)->backward_begins);
        HANDLER_ADD(handlers->backward_ends, (*rule)->backward_ends);
        HANDLER_ADD(handlers->update_runs, (*rule)->update_runs);
        HANDLER_ADD(handlers->call_ends, (*rule)->call_ends);
        HANDLER_ADD(handlers->whole_call_ends, (*rule)->whole_call_ends);
    }
    handlers->filled = 1;
}

void
oomkit_tell_backward_fails(oomkit_call *call, const oomkit_backward *backward)
{
    EACH_RULE(rule, oomkit_rules_of(call))
    {
        if ((*rule)->backward_fails != NULL) {
            (*rule)->backward_fails(call, backward);
        }
    }
}

void
oomkit_tell_backward_left(oomkit_call *call)
{
    EACH_RULE(rule, oomkit_rules_of(call))
    {
        if ((*rule)->backward_left != NULL) {
            (*rule)->backward_left(call);
        }
    }
}

int
oomkit_tell_backward_nests(oomkit_call *call, const oomkit_backward *backward)
{
    OOMKIT_TELL(oomkit_rules_of(call), backward_nests, call, backward);
}

int
oomkit_tell_update_begins(oomkit_call *call, oomkit_update *update)
{
    OOMKIT_TELL(call->split ? call->st->wiring->when_split
                            : call->st->wiring->when_repeated,
                update_begins, call, update);
}

int
oomkit_tell_update_runs(oomkit_call *call, const oomkit_update *update)
{
    if (!call->split) {
        OOMKIT_TELL_WHOLE(call, update_runs, call, update);
    }
    OOMKIT_TELL(call->st->wiring->when_split, update_runs, call, update);
}

int
oomkit_tell_update_ends(oomkit_call *call, const oomkit_update *update)
{
    OOMKIT_TELL(call->st->wiring->when_split, update_ends, call, update);
}

int
oomkit_tell_leaf_at_entry(oomkit_call *call, PyObject *buffer)
{
    OOMKIT_TELL(call->st->wiring->when_whole, leaf_at_entry, call, buffer);
}

int
oomkit_tell_arguments_given(oomkit_call *call, const oomkit_held_arguments *arguments)
{
    OOMKIT_TELL(call->st->wiring->when_split, arguments_given, call, arguments);
}

int
oomkit_tell_arguments_settle(oomkit_call *call, oomkit_held_arguments *arguments)
{
    OOMKIT_TELL(call->st->wiring->when_split, arguments_settle, call, arguments);
}

int
oomkit_tell_gradients_cleared(oomkit_call *call, PyObject *params)
{
    OOMKIT_TELL(call->st->wiring->when_split, gradients_cleared, call, params);
}

int
oomkit_tell_group_begins(oomkit_call *call)
{
    OOMKIT_TELL(call->st->wiring->when_split, group_begins, call);
}

int
oomkit_tell_before_attempt(oomkit_call *call)
{
    OOMKIT_TELL(call->st->wiring->when_split, before_attempt, call);
}

int
oomkit_tell_attempt_begins(oomkit_call *call)
{
    OOMKIT_TELL(call->st->wiring->when_split, attempt_begins, call);
}

int
oomkit_tell_micro_begins(oomkit_call *call)
{
    OOMKIT_TELL(call->st->wiring->when_split, micro_begins, call);
}

void
oomkit_tell_micro_left(oomkit_call *call)
{
    EACH_RULE(rule, call->st->wiring->when_split)
    {
        if ((*rule)->micro_left != NULL) {
            (*rule)->micro_left(call);
        }
    }
}

int
oomkit_tell_micro_returns(oomkit_call *call, PyObject *result)
{
    OOMKIT_TELL(call->st->wiring->when_split, micro_returns, call, result);
}

int
oomkit_tell_micro_ends(oomkit_call *call, PyObject *result)
{
    OOMKIT_TELL(call->st->wiring->when_split, micro_ends, call, result);
}

int
oomkit_tell_before_join(oomkit_call *call)
{
    OOMKIT_TELL(call->st->wiring->when_split, before_join, call);
}

int
oomkit_tell_call_returns(oomkit_call *call, PyObject *result)
{
    OOMKIT_TELL(oomkit_rules_of(call), call_returns, call, result);
}

int
oomkit_tell_failure_is_judged(oomkit_call *call, int *committed)
{
    OOMKIT_TELL(call->st->wiring->when_split, failure_is_judged, call, committed);
}

const char *
oomkit_tell_failure_remains(oomkit_call *call)
{
    const char *why = NULL;

    EACH_RULE(rule, call->st->wiring->when_split)
    {
        if ((*rule)->failure_remains != NULL && why == NULL) {
            why = (*rule)->failure_remains(call);
        }
    }
    return why;
}

int
oomkit_tell_gradients_go_back(oomkit_call *call)
{
    OOMKIT_TELL(call->st->wiring->when_split, gradients_go_back, call);
}

int
oomkit_tell_before_retry(oomkit_call *call)
{
    OOMKIT_TELL(call->st->wiring->when_split, before_retry, call);
}

int
oomkit_tell_before_restart(oomkit_call *call, int why)
{
    OOMKIT_TELL(call->st->wiring->when_split, before_restart, call, why);
}

void
oomkit_tell_attempt_ends(oomkit_call *call)
{
    EACH_RULE(rule, call->st->wiring->when_split)
    {
        if ((*rule)->attempt_ends != NULL) {
            (*rule)->attempt_ends(call);
        }
    }
}

/* Of a call that was never cut those of a whole one: nothing else has begun. */
void
oomkit_tell_call_ends(oomkit_call *call)
{
    const oomkit_handlers *handlers = &call->st->wiring->handlers;
    size_t i;

    if (!oomkit_call_is_cut(call)) {
        for (i = 0; handlers->call_ends[i] != NULL; i++) {
            handlers->call_ends[i](call);
        }
        return;
    }
    EACH_RULE(rule, call->st->wiring->when_split)
    {
        if ((*rule)->call_ends != NULL) {
            (*rule)->call_ends(call);
        }
    }
}

void
oomkit_tell_whole_call_ends(oomkit_call *call, int64_t rows)
{
    const oomkit_handlers *handlers = &call->st->wiring->handlers;
    size_t i;

    for (i = 0; handlers->whole_call_ends[i] != NULL; i++) {
        handlers->whole_call_ends[i](call, rows);
    }
}
