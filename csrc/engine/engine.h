/* The protected call, from entry to return. */
#ifndef OOMKIT_ENGINE_ENGINE_H
#define OOMKIT_ENGINE_ENGINE_H

#include "../call/call_types.h"

/* --- attempt.c --- */
/* The present slices, from slice_index on. *result (owned) when there is one
 * alone. 0 or -1. */
int
oomkit_attempt_slices_run(oomkit_call *call, PyObject **result);
/* What is noted of a call that is split when an attempt begins. 0 or -1. */
int
oomkit_attempt_marks(oomkit_call *call);
/* The function, called with the arguments of one slice. New reference or NULL. */
PyObject *
oomkit_attempt_function(oomkit_call *call, PyObject *const *vector);
/* Their results, joined. New reference or NULL. */
PyObject *
oomkit_attempt_join(oomkit_call *call);
/* Nothing but results came out of this attempt so far, so that finished
 * parts of an evaluation may be kept. */
int
oomkit_attempt_only_results(const oomkit_call *call);
/* One try of the present plan, split or whole. */
PyObject *
oomkit_attempt_run(oomkit_call *call);

/* --- cut.c --- */
/* The first plan, into call->cut->plan; *known is borrowed from the step. 0 or -1. */
int
oomkit_cut_choose(oomkit_call *call, const oomkit_knowledge **known);
/* Its slices, and one line where it is not the last call's. 0 or -1. */
int
oomkit_cut_begin(oomkit_call *call, const oomkit_knowledge *known);
/* That line alone. 0 or -1. */
int
oomkit_cut_say(oomkit_call *call, const oomkit_knowledge *known);
/* The plan as a list of slices, appended after the call->cut->count first ones, which
 * are kept. `plan.batch` is the number of rows still to do. 0 or -1. */
int
oomkit_cut_planned(oomkit_call *call);
/* Exactly these slices; testing.force_slices, whatever the planner says. 0 or -1. */
int
oomkit_cut_given(oomkit_call *call, const oomkit_slice *slices, int64_t count);
int
oomkit_cut_forced(oomkit_call *call);
/* Rows of the largest of the first `count` slices; 0 of none. */
int64_t
oomkit_cut_largest(const oomkit_call *call, int64_t count);
/* The call's own slices while others are run, and back in place of those, where nothing
 * of the attempt has run. */
typedef struct oomkit_cut_own {
    oomkit_slice *slices; /* owned, or NULL */
    int64_t count, room;
    int split;
} oomkit_cut_own;

void
oomkit_cut_aside(oomkit_call *call, oomkit_cut_own *own);
void
oomkit_cut_back(oomkit_call *call, const oomkit_cut_own *own);

/* --- driver.c: of a step, a loop and a replay --- */
/* `parts` (a new counted reference is taken) are the call's, and at work. 0 or -1. */
int
oomkit_call_take_part(oomkit_call *call, oomkit_participants *parts);
/* May an OOM of this class be tried again, the call's number `ooms`? */
int
oomkit_oom_is_retried(oomkit_class class_, uint32_t ooms);
/* The time since the attempt began is lost. */
void
oomkit_call_lost(oomkit_call *call);
/* What is known about the call now, as a record; and into the site's ring. */
void
oomkit_call_record(const oomkit_call *call, oomkit_record *record);
void
oomkit_call_recorded(oomkit_call *call);
/* The call is over: nothing is intercepted or measured for it any more. `exception`
 * (borrowed, not in flight) is what it raises and is not told yet, or NULL. */
void
oomkit_call_leave(oomkit_call *call, int finished, PyObject *exception);
/* Lets go of everything that it holds. */
void
oomkit_call_free(oomkit_call *call);

/* --- earlier.c --- */
/* See oomkit_wiring. */
int
oomkit_earlier_make(oomkit_call *call, int result, PyObject **message, PyObject *error);
/* Tells who keeps the call in which slices it has run, none of a whole one. 0 or -1. */
int
oomkit_earlier_note(const oomkit_call *call);
int
oomkit_earlier_are_running(void);
/* Is this one that runs again? Then it was counted and recorded before. */
static inline int
oomkit_earlier_runs(const oomkit_options *options)
{
    return options->window != NULL && oomkit_earlier_are_running();
}
/* And is one whole, whatever is known by now? */
int
oomkit_earlier_was_whole(const oomkit_state *st);

/* --- graph_capture.c --- */
/* Is a graph captured on that device, a CUDA one? 1 and call->captured, 0, -1. */
int
oomkit_captured_find(oomkit_call *call);
/* The function as it is, and the end of the call. New reference, or NULL: nothing is
 * rolled back. */
PyObject *
oomkit_captured_run(oomkit_call *call);

/* --- passthrough.c --- */
/* An error that is not ours to recover from. While the call is split, and
 * for a KeyboardInterrupt, the attempt is taken back first, so that no parked gradient
 * and no half-done accumulation is left; the error keeps its traceback and gets a note.
 * Steals `exception`. -1 always. */
int
oomkit_recover_pass(oomkit_call *call, PyObject *exception);
void
oomkit_pass_abandon(oomkit_call *call, PyObject *exception);
/* Notes on an error (borrowed, not in flight) with the tensors that sizes may be wrong
 * of. Keeps no exception. */
void
oomkit_pass_tensors(oomkit_call *call, PyObject *exception);

/* --- recover.c --- */
/* From a failed attempt (the exception is in flight) to the result of a
 * replay, or NULL with an exception. Also entered without an exception when the plan
 * splits from the start. */
PyObject *
oomkit_recover(oomkit_call *call, int failed);
/* Plain values of the failure, before its exception (borrowed) goes. 0 or
 * -1.
 */
int
oomkit_recover_note(oomkit_call *call, PyObject *exception);
/* Has something moved for good? 1, 0 or -1; call->refused.why says why a failure must
 * not be retried for another reason. */
int
oomkit_recover_committed(oomkit_call *call);
/* Clears what still holds memory of the failed attempt: the autocast cache, cycles when
 * more is allocated than before it, and the allocator's cache once. 0 or -1. */
int
oomkit_recover_reclaim(oomkit_call *call, uint64_t baseline_bytes);
int
oomkit_recover_batch(oomkit_call *call);

/* --- replan.c --- */
/* What a failure leaves done. */
typedef enum {
    OOMKIT_KEEP_NOTHING = 0,
    OOMKIT_KEEP_RESULTS, /* finished parts of an evaluation */
    OOMKIT_KEEP_HANDED   /* parts that a loop has had */
} oomkit_keep;

/* The next plan into call->cut->plan and its slices, after a failure of slices of
 * `failed_rows` rows, `failed_count` of them, and the line that says it. 0; 1 where
 * nothing smaller is allowed, which the caller says; -1. */
int
oomkit_replan(oomkit_call *call, oomkit_keep keep, int64_t failed_rows,
              int64_t failed_count);
/* The same after the failure at call->cut->at, which is noted and rolled back: first
 * what still holds memory of it above `baseline_bytes` goes. */
int
oomkit_replan_failed(oomkit_call *call, oomkit_keep keep, uint64_t baseline_bytes);
/* The line alone, and the user's hook. 0 or -1. */
int
oomkit_replan_say(oomkit_call *call, int64_t old_rows, int64_t old_count);
/* Rows of the smallest micro-batch that has run out of memory in this call (the last
 * may have been the whole batch again); 0 of none. */
int64_t
oomkit_replan_smallest(const oomkit_call *call);
/* Of a step: nothing smaller is allowed, oomkit.OutOfMemory. -1 always. */
int
oomkit_replan_exhausted(oomkit_call *call);
/* Everything has been rolled back: results of parts go, and what the attempt held. 0 or
 * -1. */
int
oomkit_begin_clear(oomkit_call *call);
/* The same, and the next attempt, by call->cut->plan for call->cut->reason. 0 or -1. */
int
oomkit_begin_again(oomkit_call *call);
/* A call that is run again because another one failed: half its batch. 0 or -1. */
int
oomkit_recover_split(oomkit_call *call);
/* One line for a change of plan. 0 or -1. */
int
oomkit_plan_say(oomkit_call *call, const char *level, int64_t old_rows,
                int64_t old_count);

/* --- restart.c --- */
/* The attempt that a rule has ended, with an exception in flight or caught by the step.
 * 0 the same plan can be tried again; 1 something else went wrong, the exception in
 * flight says what; -1 with the exception to raise. */
int
oomkit_restart(oomkit_call *call);

/* --- whole.c --- */
/* The protected call. */
PyObject *
oomkit_engine_call(PyObject *op, PyObject *const *args, size_t nargsf,
                   PyObject *kwnames);
/* In the process's first protected call: torch's backward is ours. 0 or -1.
 */
int
oomkit_engine_install(oomkit_state *st);

#endif
