/* The protected call, from entry to return. */
#ifndef OOMKIT_ENGINE_ENGINE_H
#define OOMKIT_ENGINE_ENGINE_H

#include "../call/call_types.h"

/* --- attempt.c --- */
/* The present slices, from slice_index on. *result (owned) when there is one
 * alone. 0 or -1. */
int
oomkit_attempt_slices_run(oomkit_call *call, PyObject **result);
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
int
oomkit_attempt_slices(oomkit_call *call);

/* --- passthrough.c --- */
/* An error that is not ours to recover from. While the call is split, and
 * for a KeyboardInterrupt, the attempt is taken back first, so that no stash and no
 * half-done accumulation is left; the error keeps its traceback and gets a note. Steals
 * `exception`. -1 always. */
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
/* Clears what still holds memory of the failed attempt: the autocast cache, cycles when
 * more is allocated than before it, and the allocator's cache once. 0 or -1. */
int
oomkit_recover_reclaim(oomkit_call *call, uint64_t baseline_bytes);
int
oomkit_recover_batch(oomkit_call *call);

/* --- replan.c --- */
/* The next plan into call->cut->plan and its slices, after a failure of slices of
 * `failed_rows` rows, `failed_count` of them; with `keep` the finished ones stay. 0, or
 * -1 with oomkit.OutOfMemory. The line that says it, and the user's hook. */
int
oomkit_replan(oomkit_call *call, int keep, int64_t failed_rows, int64_t failed_count);
int
oomkit_replan_say(oomkit_call *call, int64_t old_rows, int64_t old_count);
/* Nothing smaller than `micro_batch` rows is allowed: oomkit.OutOfMemory. -1 always. */
int
oomkit_replan_exhausted(oomkit_call *call, int64_t micro_batch);
/* A plan that was not the last call's, and that no failure of this one led to: one
 * line. 0 or -1. */
int
oomkit_plan_say_begin(oomkit_call *call, const oomkit_knowledge *known);
int
oomkit_plan_say(oomkit_call *call, const char *level, int64_t old_rows,
                int64_t old_count);
int
oomkit_recover_split(oomkit_call *call);

/* --- whole.c --- */
/* The protected call. */
PyObject *
oomkit_engine_call(PyObject *op, PyObject *const *args, size_t nargsf,
                   PyObject *kwnames);
/* In the process's first protected call: torch's backward is ours. 0 or -1.
 */
int
oomkit_engine_install(oomkit_state *st);
/* testing.force_slices: exactly these slices, whatever the planner says. 0 or -1. */
int
oomkit_engine_forced(oomkit_call *call);
void
oomkit_call_free(oomkit_call *call);
void
oomkit_call_merge_window(oomkit_call *call);
void
oomkit_call_record(const oomkit_call *call, oomkit_record *record);

#endif
