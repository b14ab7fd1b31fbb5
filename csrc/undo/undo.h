/* Going back: what an attempt has changed, as it was at entry. */
#ifndef OOMKIT_UNDO_UNDO_H
#define OOMKIT_UNDO_UNDO_H

#include "../call/call.h"
#include "../call/events.h"

/* What happens in a call concerns (call/events.h): */
extern const oomkit_rule oomkit_gradients_rule;

/* --- buffers.c --- */
int
oomkit_buffers_mark(oomkit_call *call);
/* A module that takes part from now on; its buffers are as they were at entry, its
 * attributes were as in `noted` (oomkit_late_attributes()). 1; 0 where that cannot be;
 * -1. */
int
oomkit_buffers_mark_late(oomkit_call *call, PyObject *module, PyObject *noted);
/* 1 it moved in place, 2 another tensor stands in its place, 0 neither, -1 error. */
int
oomkit_buffer_moved(const oomkit_call *call, const oomkit_buffer *item);
/* Has any since entry? 1, 0 or -1. */
int
oomkit_buffers_moved(oomkit_call *call);
int
oomkit_buffers_restore(oomkit_call *call, PyObject **which);
void
oomkit_buffers_learn(oomkit_call *call);
void
oomkit_buffers_release(oomkit_savepoint *savepoint);
/* Those of `tensors` (a tuple) have values now that they are to go back to. 0 or -1. */
int
oomkit_buffers_take_again(oomkit_call *call, PyObject *tensors);
/* Versions of the buffers that are marked in a savepoint, as they are now: an array (to
 * be freed), NULL of none. 0 or -1. */
int
oomkit_buffers_versions(oomkit_state *st, const oomkit_savepoint *savepoint,
                        uint32_t **versions);
/* Beside a replay (savepoint.c): values of those that the call has marked. Where others
 * have used them it marks them anew. */
int
oomkit_buffers_now(oomkit_call *call, const oomkit_after *after, oomkit_savepoint *now);
int
oomkit_buffers_back(oomkit_call *call, const oomkit_savepoint *now, int finished);

/* A buffer has been marked. 0 or -1. */
int
oomkit_buffer_leaf(oomkit_call *call, oomkit_buffer *item,
                   const oomkit_tensor_facts *facts);
/* Is this tensor among those that are marked? */
int
oomkit_buffer_is_marked(const oomkit_call *call, const PyObject *tensor);
/* Is parameter number `which` a buffer? It may move in a forward. */
int
oomkit_buffers_have(const oomkit_call *call, Py_ssize_t which);
/* A tensor (borrowed) that this attempt has given its first gradient, as a buffer that
 * neither required grad at entry nor had one: it goes. 1, or 0 it is none. */
int
oomkit_buffers_bare_again(oomkit_call *call, PyObject *tensor);

/* --- late_modules.c --- */
/* {name: value} of an object's own attributes; of a list or a dictionary its length, of
 * what is not plain Ellipsis. New dict or NULL. */
PyObject *
oomkit_late_attributes(PyObject *module);
/* Those of all modules that came late in a call (its notes), as they are now; and they
 * are put back, which can be done again. 0 or -1. */
int
oomkit_late_modules_now(const oomkit_memo *notes, oomkit_memo **now);
int
oomkit_late_modules_put(oomkit_memo *notes);

/* --- undone_buffers.c --- */
/* An attempt is being undone, its buffers are not yet: 0 or -1. */
int
oomkit_undone_buffers_note(oomkit_call *call);
/* Before the retry updates anything: 0, or -1 with SplitError where it has not moved
 * what the other one had, or goes on with what that one has made. */
int
oomkit_undone_buffers_compare(oomkit_call *call);
void
oomkit_undone_buffers_free(oomkit_call *call);
static inline int
oomkit_undone_buffers_check(oomkit_call *call)
{
    return call->entry.undone.count == 0 ? 0 : oomkit_undone_buffers_compare(call);
}
static inline void
oomkit_undone_buffers_end(oomkit_call *call)
{
    if (call->entry.undone.room > 0) {
        oomkit_undone_buffers_free(call);
    }
}

/* --- flags.c --- */
/* What happens in a call concerns (call/events.h): */
extern const oomkit_rule oomkit_switches_rule;
int
oomkit_flags_note(oomkit_state *st, PyObject *module);
int
oomkit_flags_restore(oomkit_call *call);
int
oomkit_flags_keep(oomkit_call *call);
int
oomkit_flags_note_end(oomkit_call *call);
/* Has a parameter been frozen or unfrozen since the end of the call that `since` is of?
 * A backward heeds that; neither a replay from the entry nor an eager backward does. 1,
 * 0, -1. */
int
oomkit_flags_frozen_since(oomkit_state *st, const oomkit_participants *parts,
                          const oomkit_savepoint *since);
/* The training flags aside, so that none is noted yet; and in place of those noted
 * meanwhile. Owned by the caller in between; may be NULL. */
PyObject *
oomkit_flags_take(oomkit_call *call);
void
oomkit_flags_put(oomkit_call *call, PyObject *training);
/* Beside a replay (savepoint.c). */
int
oomkit_flags_now(oomkit_call *call, const oomkit_after *after, oomkit_savepoint *now);
int
oomkit_flags_back(oomkit_call *call, const oomkit_savepoint *now, int finished);
void
oomkit_flags_clear(oomkit_flags *flags);
static inline void
oomkit_flags_release(oomkit_savepoint *savepoint)
{
    if (savepoint->flags.training != NULL) {
        oomkit_flags_clear(&savepoint->flags);
    }
}
int
oomkit_flags_visit(const oomkit_savepoint *savepoint, visitproc visit, void *arg);

/* --- gradients.c --- */
/* Restore: 0 restored; 1 refused, *why tells (static text); -1 error. */
int
oomkit_grads_mark(oomkit_call *call);
int
oomkit_grads_park(oomkit_call *call);
int
oomkit_grads_unpark(oomkit_call *call);
int
oomkit_grads_settle(oomkit_call *call);
int
oomkit_grads_put_away(oomkit_call *call);
int
oomkit_grads_bring_back(oomkit_call *call);
/* The call failed for good while gradients are set aside: they go back as they are,
 * with the contribution of the failed attempt. Is that still to be said? Keeps no
 * exception. */
int
oomkit_grads_abandon(oomkit_call *call);
/* Those that are set aside are in .grad again, and no longer aside. 0 or -1. */
int
oomkit_grads_aside_back(oomkit_call *call);
void
oomkit_grads_end_attempt(oomkit_call *call);
int
oomkit_grads_grow(oomkit_call *call, Py_ssize_t old);
/* All of them, once the attempt has ended. */
void
oomkit_grads_release(oomkit_call *call);
int
oomkit_grads_note_last(oomkit_call *call);
int
oomkit_grads_changed_since(oomkit_call *call);

/* --- gradients_back.c --- */
/* What happens in a call concerns (call/events.h): */
extern const oomkit_rule oomkit_earlier_grads_rule;
extern const oomkit_rule oomkit_earlier_grads_shown_rule;
int
oomkit_grads_restore(oomkit_call *call, const char **why, PyObject **which);
/* Stand-ins of gradients of earlier calls are no longer in .grad. 0 or -1. */
int
oomkit_earlier_grads_show(oomkit_call *call);
/* The same where the step goes on: SplitError if it has asked for a value of one. 0 or
 * -1. */
int
oomkit_earlier_grads_leave(oomkit_call *call);
void
oomkit_earlier_grads_free(oomkit_call *call);

/* --- gradients.c: since a micro-batch began --- */
void
oomkit_grads_end_micro(oomkit_call *call);

/* --- hook_tables.c --- */
/* The user's code registers the hook `id` in this table of torch's: `registered` is
 * (weak reference to its handle, line); or is about to remove it: None. 0 or -1. */
int
oomkit_hooks_note(const oomkit_state *st, PyObject *table, PyObject *id,
                  PyObject *registered);
/* Before the retry updates anything: 0, or -1 with SplitError where it has not
 * registered again what was undone. */
int
oomkit_hooks_compare(oomkit_call *call);
static inline int
oomkit_hooks_check(oomkit_call *call)
{
    return call->entry.hooks == NULL ? 0 : oomkit_hooks_compare(call);
}
/* Do other hooks stand in the tables than at entry? 1, 0 or -1. */
int
oomkit_hooks_moved(oomkit_call *call);
int
oomkit_hooks_restore(oomkit_call *call);
/* A loss that was returned keeps which ones there were, but none alive that is gone: a
 * hook may lead to the loss. 0 or -1. */
int
oomkit_hooks_slim(const oomkit_state *st, oomkit_savepoint *savepoint);
/* Beside a replay (savepoint.c). */
int
oomkit_hooks_now(oomkit_call *call, const oomkit_after *after, oomkit_savepoint *now);
int
oomkit_hooks_back(oomkit_call *call, const oomkit_savepoint *now, int finished);
static inline void
oomkit_hooks_release(oomkit_savepoint *savepoint)
{
    Py_CLEAR(savepoint->hooks);
}
int
oomkit_hooks_visit(const oomkit_savepoint *savepoint, visitproc visit, void *arg);

/* --- parameter_slots.c --- */
int
oomkit_param_slots_note(oomkit_call *call);
int
oomkit_param_slots_changed(oomkit_call *call, PyObject **key);
int
oomkit_param_slots_restore(oomkit_call *call);
void
oomkit_param_slots_release(oomkit_call *call);
static inline void
oomkit_param_slots_end(oomkit_call *call)
{
    if (call->entry.slots.items != NULL) {
        oomkit_param_slots_release(call);
    }
}

/* --- random.c --- */
int
oomkit_rng_mark(oomkit_call *call);
/* The same for comparing alone, into *rng. 0 or -1. */
int
oomkit_rng_note(oomkit_call *call, oomkit_rng *rng);
int
oomkit_rng_restore(oomkit_call *call);
int
oomkit_rng_moved(oomkit_call *call);
/* The same of all but torch's CPU generator. */
int
oomkit_rng_moved_beside(oomkit_call *call);
/* Was something drawn between the marks of the call and `after`? 1 (also where that is
 * not known), 0 or -1. */
int
oomkit_rng_drawn(const oomkit_call *call, const oomkit_after *after);
/* Were the streams marked, so that they can go back? */
static inline int
oomkit_rng_marked(const oomkit_savepoint *savepoint)
{
    return savepoint->rng.cpu_state != NULL;
}
/* Beside a replay (savepoint.c), where the call has marked them. */
int
oomkit_rng_now(oomkit_call *call, const oomkit_after *after, oomkit_savepoint *now);
int
oomkit_rng_back(oomkit_call *call, const oomkit_savepoint *now, int finished);
void
oomkit_rng_free(oomkit_rng *rng);
void
oomkit_rng_release(oomkit_savepoint *savepoint);

/* --- random_objects.c --- */
/* Random generators of the site; torch.Generator objects alike. */
int
oomkit_streams_mark(oomkit_call *call, oomkit_rng *rng);
int
oomkit_streams_restore(oomkit_state *st, const oomkit_rng *rng);
/* 1 none has moved, 0, or -1. */
int
oomkit_streams_same(oomkit_state *st, const oomkit_rng *rng);
/* What has been marked, but for torch's default generator: generators, and the modules
 * of Python's and numpy's streams. New list or NULL. */
PyObject *
oomkit_rng_streams(const oomkit_call *call);
/* Of two states, which may hold arrays: 1 they are equal, 0 not or not known, -1. */
int
oomkit_streams_equal(PyObject *was, PyObject *now);

/* --- rollback.c --- */
/* The same as oomkit_savepoint_restore, outside the budget and tried again where
 * an error came between. An error that is not out-of-memory is raised when everything
 * is back; *message (NULL or owned) tells what is not, also with an error, which has
 * said it. */
int
oomkit_take_back(oomkit_call *call, PyObject **message);
/* What must be done to its end: once(argument) until it does not fail, thrice at most.
 * What it answered last; *error (owned, or NULL) is what has to be raised, also after a
 * try that succeeded: not what ran out of memory on the way there. */
int
oomkit_insist(oomkit_state *st, int (*once)(void *), void *argument, PyObject **error);
/* Memory that oomkit needs for itself was refused: the exception in flight becomes
 * oomkit.OutOfMemory, which says so and what it was wanted for; others stay. -1 always.
 */
int
oomkit_own_failed(oomkit_call *call, const char *doing);
/* An error of waiting for a device or of flushing it is in flight: unless it is out of
 * memory itself, it is told what was being recovered from. */
void
oomkit_reclaim_failed(oomkit_call *call);
/* recover.c: parts of it for a call that is run again without a failure of its own. */
int
oomkit_recover_roll_back(oomkit_call *call);
/* "the state is as if the step had not begun", and what is not. */
const char *
oomkit_state_as_before(const oomkit_call *call);
/* An error that is to pass takes the call back with it; what cannot be
 * taken back is a note on it. */
void
oomkit_recover_undo(oomkit_call *call);

/* --- savepoint.c --- */
/* The call in progress on this thread, or NULL. */
oomkit_call *
oomkit_call_current(void);
/* Or that of the loop that has a part out in this thread: whose marks tell how
 * everything was. */
oomkit_call *
oomkit_call_noting(const oomkit_state *st);
void
oomkit_call_set_current(oomkit_call *call);
/* Where the calling thread keeps it. */
oomkit_call **
oomkit_call_current_place(void);
/* A parameter that moved since entry: 1 and its index, 0, -1. */
int
oomkit_params_moved(oomkit_call *call, Py_ssize_t *which);
/* Begin an attempt, take it back, end the call. */
int
oomkit_savepoint_take(oomkit_call *call);
int
oomkit_savepoint_compare(oomkit_call *call);
int
oomkit_params_sample(oomkit_call *call);
void
oomkit_savepoint_end_attempt(oomkit_call *call);
/* What was noted where it was about to change, since the entry of the call: the entry
 * is now. */
void
oomkit_savepoint_notes_end(oomkit_call *call);
/* 0 everything is as at entry; 1 it cannot be: *message (owned str) says what and which
 * line to change; -1 error. */
int
oomkit_savepoint_restore(oomkit_call *call, PyObject **message);
/* The same of the gradients alone. */
int
oomkit_savepoint_gradients(oomkit_call *call, PyObject **message);
/* The same by value, for writes that bump no version. */
int
oomkit_params_rewritten(const oomkit_call *call, Py_ssize_t *which);
int
oomkit_params_mark(oomkit_call *call);
/* At entry of an attempt, with copies where they are wanted. And back, as
 * oomkit_savepoint_restore(): how many the step itself has changed is told at the end,
 * everything else goes back all the same. */
int
oomkit_params_begin(oomkit_call *call);
int
oomkit_params_restore(oomkit_call *call, PyObject **message);
/* The marks go: there are other parameters now, or the call ends. */
static inline void
oomkit_params_unmark(oomkit_call *call)
{
    if (call->entry.versions != NULL) {
        SPARE_GIVE(call->parts->spare_versions, call->entry.versions);
    }
    MEMORY_CLEAR(call->entry.samples);
}
/* Of a savepoint that is no call's. */
void
oomkit_params_release(oomkit_savepoint *savepoint);
/* A parameter that was put back from its copy has a new version and its old value: that
 * is the version to compare with from here on. */
void
oomkit_params_version_is(oomkit_call *call, const PyObject *param, uint32_t version);
/* Does each parameter require grad: at entry, and (once noted) at the end of the call.
 * Borrowed, behind param_versions, which must be there. And now: 0 or -1. */
uint8_t *
oomkit_params_flags(const oomkit_call *call, int at_end);
int
oomkit_params_flags_now(oomkit_state *st, const oomkit_participants *parts,
                        uint8_t *flags);
/* Which tensor the gradient of each parameter was at entry (NULL: none), to be compared
 * alone; behind them the version of the first. Borrowed, NULL without marks. And now,
 * into as many and one: 0 or -1. */
const void *const *
oomkit_params_gradients(const oomkit_call *call);
int
oomkit_params_gradients_now(oomkit_call *call, const void **gradients);
void
oomkit_savepoint_end(oomkit_call *call);
/* What outlives a call goes from one savepoint to another that has none of it. And an
 * end of what a savepoint has that is no call's. */
void
oomkit_savepoint_move(oomkit_savepoint *to, oomkit_savepoint *from);
void
oomkit_savepoint_free(oomkit_savepoint *savepoint);
/* One that waits for the caller's backward must hold nothing that may lead to the loss.
 * Once it has moved to a call, what it has let go of is looked for again. 0 or -1. */
int
oomkit_savepoint_slim(const oomkit_state *st, oomkit_savepoint *savepoint);
int
oomkit_savepoint_find_again(oomkit_call *call);
int
oomkit_savepoint_traverse(const oomkit_savepoint *savepoint, visitproc visit,
                          void *arg);
/* It goes to a call, in place of what that one has marked of it. */
void
oomkit_savepoint_move_back(oomkit_call *call, oomkit_savepoint *from);
/* A second one, beside that of a replay, which begins as its call began: how everything
 * is now that is not the replay's to move, into *now (all zero; oomkit_savepoint_free()
 * ends it, also where this fails). `after`: the end of the call, for what nobody has
 * used since stays where a replay that has finished leaves it. And back to that, which
 * may be done again. 0 or -1. */
int
oomkit_savepoint_now(oomkit_call *call, const oomkit_after *after,
                     oomkit_savepoint *now);
int
oomkit_savepoint_back(oomkit_call *call, const oomkit_savepoint *now, int finished);
/* The end of a call whose marks have gone to the savepoint `entry`. 0 or -1. */
int
oomkit_after_note(oomkit_call *call, const oomkit_savepoint *entry,
                  oomkit_after *after);
void
oomkit_after_free(oomkit_after *after);

#endif
