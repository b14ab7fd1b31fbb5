/* How everything was at entry of an attempt: marked, put back after a failure, dropped.
 * What can go back is a table. */
#include "gradients.h"
#include "parameters.h"
#include "undo.h"
#include "../optim/optim.h"
#include "../optim/optimizer_extras.h"
#include "../plain/marks.h"

static _Thread_local oomkit_call *current_call;

oomkit_call *
oomkit_call_current(void)
{
    return current_call;
}

oomkit_call *
oomkit_call_noting(const oomkit_state *st)
{
    return current_call != NULL ? current_call : st->wiring->part_call(st);
}

oomkit_call **
oomkit_call_current_place(void)
{
    return &current_call;
}

void
oomkit_call_set_current(oomkit_call *call)
{
    current_call = call;
}

/* --- what can go back --- */

/* optimizer_safety="copy": what optimizers have moved is back. 0 or -1. */
static int
update_restore(oomkit_call *call, PyObject **message)
{
    (void)message;
    return call->options->optimizer_copy && oomkit_update_committed(call) == 1
               ? oomkit_optimizers_restore_copies(call, oomkit_params_version_is)
               : 0;
}

static int
slots_restore(oomkit_call *call, PyObject **message)
{
    (void)message;
    return oomkit_param_slots_restore(call);
}

static int
flags_restore(oomkit_call *call, PyObject **message)
{
    (void)message;
    return oomkit_flags_restore(call);
}

static int
hooks_restore(oomkit_call *call, PyObject **message)
{
    (void)message;
    return call->entry.hooks == NULL ? 0 : oomkit_hooks_restore(call);
}

static int
hooks_moved(oomkit_call *call)
{
    return call->entry.hooks == NULL ? 0 : oomkit_hooks_moved(call);
}

static int
extras_restore(oomkit_call *call, PyObject **message)
{
    return oomkit_extras_any_unknown(call) == NULL
               ? 0
               : oomkit_extras_refuse(call, message);
}

int
oomkit_savepoint_gradients(oomkit_call *call, PyObject **message)
{
    const char *why = NULL;
    OWNED PyObject *which = NULL, *name = NULL;
    int result = oomkit_tell_gradients_go_back(call) < 0
                     ? -1
                     : oomkit_grads_restore(call, &why, &which);

    if (result <= 0) {
        return result;
    }
    name = oomkit_describe_tensor(call, which);
    *message =
        name == NULL
            ? NULL
            : PyUnicode_FromFormat(
                  "gradients cannot be restored: %U: %s; pass gradient_safety=\"copy\" "
                  "to auto_batch, and call zero_grad() before you continue",
                  name, why);
    return *message == NULL ? -1 : 1;
}

static int
buffers_restore(oomkit_call *call, PyObject **message)
{
    OWNED PyObject *which = NULL;
    int result = oomkit_buffers_restore(call, &which);

    if (result <= 0) {
        return result;
    }
    *message = which == NULL
                   ? NULL
                   : PyUnicode_FromFormat(
                         "buffer %U changed for the first time in this call and no "
                         "copy exists; run the step once on a small batch first",
                         which);
    return *message == NULL ? -1 : 1;
}

/* No version tells of the statistics of a normalisation. */
static int
buffers_moved(oomkit_call *call)
{
    int moved = oomkit_buffers_moved(call);
    return moved == 0 ? oomkit_buffers_norm(call, 1) : moved;
}

static int
optimizers_restore(oomkit_call *call, PyObject **message)
{
    (void)message;
    return oomkit_optimizers_undo(call);
}

static int
plain_restore(oomkit_call *call, PyObject **message)
{
    (void)message;
    return oomkit_plain_restore(call);
}

static int
owners_restore(oomkit_call *call, PyObject **message)
{
    (void)message;
    return oomkit_owners_restore(call);
}

/* What the user's own objects are is not known: one counts as moved. */
static int
owners_moved(oomkit_call *call)
{
    EACH_OWNER (one, call->parts, OWNERS_OF(OOMKIT_OWNER_USER)) {
        return 1;
    }
    return 0;
}

static int
random_restore(oomkit_call *call, PyObject **message)
{
    (void)message;
    return oomkit_rng_restore(call);
}

static int
random_moved(oomkit_call *call)
{
    return call->entry.rng.cpu_state != NULL ? oomkit_rng_moved(call) : 0;
}

static void
gradients_end(oomkit_call *call)
{
    oomkit_grads_release(call);
    if (call->entry.earlier.count > 0) {
        oomkit_earlier_grads_free(call);
    }
}

/* All of a resource but `restore` may be missing. What forgets keeps the exception in
 * flight. */
typedef struct resource {
    /* At entry of an attempt: how it is, into call->entry. 0 or -1. NULL: it is marked
     * where it is about to move. */
    int (*mark)(oomkit_call *);
    /* Between the parts of an evaluation: did it move? 1, 0 or -1. NULL: it cannot. */
    int (*moved)(oomkit_call *);
    /* As it was. 0; 1: it cannot be, and *message (owned) says why; -1. May be done
     * again. */
    int (*restore)(oomkit_call *, PyObject **message);
    /* Forgets what belongs to one attempt, or to the call, beside `release`. */
    void (*drop)(oomkit_call *), (*end)(oomkit_call *);
    /* Beside a replay, which begins as its call began: how it is now, into another
     * savepoint. And back to that, which may be done again. 0 or -1. NULL: what the
     * replay makes of it is what the call would have. */
    int (*now)(oomkit_call *, const oomkit_after *, oomkit_savepoint *now);
    int (*back)(oomkit_call *, const oomkit_savepoint *now, int finished);
    /* Forgets what is in a savepoint, whoever's that is. Of a call: at the end of each
     * attempt, of its notes (oomkit_savepoint_notes_end), or `drop` or `end` does. */
    void (*release)(oomkit_savepoint *);
    enum { WITH_ATTEMPT, WITH_NOTES, BY_ITSELF } forgotten;
    /* The field that outlives a call whose loss is returned; of no bytes: none. Needs
     * `release`. */
    size_t at, bytes;
    /* While it waits for the caller's backward: holds nothing that may lead to the
     * loss. And for a replay what it has let go of is looked for again. 0 or -1. */
    int (*slim)(const oomkit_state *, oomkit_savepoint *);
    int (*find_again)(oomkit_call *);
    /* As tp_traverse, where it may lead back to what the savepoint is in. */
    int (*visit)(const oomkit_savepoint *, visitproc, void *);
} resource;

#define OUTLIVES(field)                                                                \
    .at = offsetof(oomkit_savepoint, field),                                           \
    .bytes = sizeof(((oomkit_savepoint *)NULL)->field)

/* Put back in this order; marked and ended in the other one. */
static const resource resources[] = {
    /* first: an optimizer's copies hold parameters, which are then compared */
    {.restore = update_restore},
    {.restore = slots_restore, .end = oomkit_param_slots_end},
    /* needs no memory where their handles died with the attempt; those below do */
    {.restore = hooks_restore},
    /* before what may change versions: they stand beside them */
    {.restore = flags_restore,
     .now = oomkit_flags_now,
     .back = oomkit_flags_back,
     .release = oomkit_flags_release,
     .forgotten = WITH_NOTES,
     OUTLIVES(flags),
     .visit = oomkit_flags_visit},
    {.mark = oomkit_params_begin,
     .restore = oomkit_params_restore,
     .drop = oomkit_param_copies_end,
     .end = oomkit_params_unmark,
     .release = oomkit_params_release,
     .forgotten = BY_ITSELF,
     OUTLIVES(versions)},
    {.restore = extras_restore},
    {.restore = oomkit_savepoint_gradients,
     .drop = oomkit_grads_end_attempt,
     .end = gradients_end},
    {.mark = oomkit_buffers_mark,
     .moved = buffers_moved,
     .restore = buffers_restore,
     .end = oomkit_undone_buffers_end,
     .now = oomkit_buffers_now,
     .back = oomkit_buffers_back,
     .release = oomkit_buffers_release,
     OUTLIVES(buffers)},
    {.restore = optimizers_restore, .drop = oomkit_optimizers_release},
    {.mark = oomkit_plain_begin,
     .restore = plain_restore,
     .drop = oomkit_plain_end_attempt,
     .now = oomkit_plain_now,
     .back = oomkit_plain_back,
     .release = oomkit_plain_release,
     .forgotten = BY_ITSELF,
     OUTLIVES(plain), /* NOLINT(bugprone-sizeof-expression): a pointer it is */
     .slim = oomkit_plain_slim,
     .find_again = oomkit_plain_find_again},
    /* after plain state: their own methods have the last word */
    {.mark = oomkit_owners_mark,
     .moved = owners_moved,
     .restore = owners_restore,
     .now = oomkit_owners_now,
     .back = oomkit_owners_back,
     .release = oomkit_owners_release,
     .visit = oomkit_owners_visit},
    /* after both: who still holds a handle has not been put back */
    {.moved = hooks_moved,
     .restore = hooks_restore,
     .now = oomkit_hooks_now,
     .back = oomkit_hooks_back,
     .release = oomkit_hooks_release,
     .forgotten = WITH_NOTES,
     OUTLIVES(hooks), /* NOLINT(bugprone-sizeof-expression): likewise */
     .slim = oomkit_hooks_slim,
     .visit = oomkit_hooks_visit},
    /* last: what is put back may draw; so it is marked first */
    {.mark = oomkit_rng_mark,
     .moved = random_moved,
     .restore = random_restore,
     .now = oomkit_rng_now,
     .back = oomkit_rng_back,
     .release = oomkit_rng_release,
     OUTLIVES(rng)},
};

#define COUNT (sizeof(resources) / sizeof(*resources))

/* Where a healthy call runs: a call of each function that is there, no loop. */
#if defined(__GNUC__) && !defined(__clang__)
#define IN_A_ROW _Pragma("GCC unroll 16")
#else
#define IN_A_ROW
#endif

/* --- the savepoint of a call --- */

/* At entry of an attempt. 0 or -1. */
int
oomkit_savepoint_take(oomkit_call *call)
{
    size_t i;

    if (oomkit_modes_entry(call) < 0) {
        return -1;
    }
    IN_A_ROW
    for (i = COUNT; i-- > 0;) {
        if (resources[i].mark != NULL && resources[i].mark(call) < 0) {
            return -1;
        }
    }
    return 0;
}

/* At the start of a later part of an evaluation: do the marks of the entry still say
 * how everything is? Else the parts before it cannot be kept, for a failure goes back
 * to the entry. 0 or -1. */
int
oomkit_savepoint_compare(oomkit_call *call)
{
    size_t i;
    int moved = 0;

    for (i = 0; moved == 0 && i < COUNT; i++) {
        moved = resources[i].moved == NULL ? 0 : resources[i].moved(call);
    }
    call->parts_moved |= moved != 0;
    return moved < 0 || oomkit_plain_begin_part(call) < 0 ? -1 : 0;
}

/* 0 everything is as at entry; 1 it cannot be, *message (owned) says why first, and all
 * else is; -1 error. */
int
oomkit_savepoint_restore(oomkit_call *call, PyObject **message)
{
    size_t i;
    int refused = 0;

    for (i = 0; i < COUNT; i++) {
        OWNED PyObject *why = NULL;
        int result = resources[i].restore(call, &why);
        if (result < 0) {
            return -1;
        }
        if (result > 0 && !refused) {
            *message = STEAL(why);
            refused = 1;
        }
    }
    return refused;
}

/* What is forgotten then, of one resource. */
static inline void
forget(oomkit_savepoint *savepoint, size_t i, int when)
{
    if (resources[i].release != NULL && (int)resources[i].forgotten == when) {
        resources[i].release(savepoint);
    }
}

/* Forgets what belongs to one attempt; what outlives it (copies) stays. */
void
oomkit_savepoint_end_attempt(oomkit_call *call)
{
    size_t i;

    IN_A_ROW
    for (i = 0; i < COUNT; i++) {
        if (resources[i].drop != NULL) {
            resources[i].drop(call);
        }
        forget(&call->entry, i, WITH_ATTEMPT);
    }
    if (oomkit_call_is_cut(call)) {
        oomkit_tell_attempt_ends(call);
    }
    call->training = call->backward.done = call->backward.failed =
        call->backward.queued = 0;
    call->refused.raised = call->sequence_waived = 0;
    oomkit_grads_forget(call);
    oomkit_returned_forget(call);
    call->parts_moved = 0;
    oomkit_updates_forget(call);
}

void
oomkit_savepoint_notes_end(oomkit_call *call)
{
    size_t i;

    IN_A_ROW
    for (i = 0; i < COUNT; i++) {
        forget(&call->entry, i, WITH_NOTES);
    }
}

/* Ends the call: nothing of it stays behind. Keeps the exception in flight. */
void
oomkit_savepoint_end(oomkit_call *call)
{
    size_t i;

    oomkit_plain_keep(call, 0);
    oomkit_savepoint_end_attempt(call);
    oomkit_savepoint_notes_end(call);
    IN_A_ROW
    for (i = COUNT; i-- > 0;) {
        if (resources[i].end != NULL) {
            resources[i].end(call);
        }
    }
    Py_CLEAR(call->refused.hooked);
    Py_CLEAR(call->refused.split_alone);
}

/* --- others --- */

int
oomkit_savepoint_now(oomkit_call *call, const oomkit_after *after,
                     oomkit_savepoint *now)
{
    size_t i;

    for (i = COUNT; i-- > 0;) {
        if (resources[i].now != NULL && resources[i].now(call, after, now) < 0) {
            return -1;
        }
    }
    return 0;
}

int
oomkit_savepoint_back(oomkit_call *call, const oomkit_savepoint *now, int finished)
{
    OWNED PyObject *error = NULL;
    size_t i;

    for (i = 0; i < COUNT; i++) {
        if (resources[i].back == NULL || resources[i].back(call, now, finished) == 0) {
            continue;
        }
        if (error == NULL) { /* what comes behind it goes back all the same */
            error = oomkit_exception_take();
        } else {
            oomkit_error_beside(call->st, call->given.func);
        }
    }
    if (error == NULL) {
        return 0;
    }
    oomkit_exception_give(STEAL(error));
    return -1;
}

int
oomkit_after_note(oomkit_call *call, const oomkit_savepoint *entry, oomkit_after *after)
{
    after->buffers_serial = call->parts->buffers_serial;
    if (oomkit_rng_marked(entry) && oomkit_rng_note(call, &after->rng) < 0) {
        if (!oomkit_exception_is_oom(call->st)) {
            return -1;
        }
        PyErr_Clear(); /* accounted for: it counts as used, which is always right */
        oomkit_rng_free(&after->rng);
    }
    return oomkit_buffers_versions(call->st, entry, &after->buffers);
}

void
oomkit_after_free(oomkit_after *after)
{
    oomkit_rng_free(&after->rng);
    MEMORY_CLEAR(after->buffers);
}

void
oomkit_savepoint_move(oomkit_savepoint *to, oomkit_savepoint *from)
{
    size_t i;

    IN_A_ROW
    for (i = 0; i < COUNT; i++) {
        char *place = (char *)from + resources[i].at;
        memcpy((char *)to + resources[i].at, place, resources[i].bytes);
        memset(place, 0, resources[i].bytes);
    }
}

void
oomkit_savepoint_move_back(oomkit_call *call, oomkit_savepoint *from)
{
    size_t i;

    for (i = 0; i < COUNT; i++) {
        if (resources[i].bytes > 0) {
            resources[i].release(&call->entry);
        }
    }
    oomkit_savepoint_move(&call->entry, from);
}

void
oomkit_savepoint_free(oomkit_savepoint *savepoint)
{
    size_t i;

    IN_A_ROW
    for (i = 0; i < COUNT; i++) {
        if (resources[i].release != NULL) {
            resources[i].release(savepoint);
        }
    }
}

int
oomkit_savepoint_slim(const oomkit_state *st, oomkit_savepoint *savepoint)
{
    size_t i;

    IN_A_ROW
    for (i = COUNT; i-- > 0;) {
        if (resources[i].slim != NULL && resources[i].slim(st, savepoint) < 0) {
            return -1;
        }
    }
    return 0;
}

int
oomkit_savepoint_find_again(oomkit_call *call)
{
    size_t i;

    for (i = 0; i < COUNT; i++) {
        if (resources[i].find_again != NULL && resources[i].find_again(call) < 0) {
            return -1;
        }
    }
    return 0;
}

int
oomkit_savepoint_traverse(const oomkit_savepoint *savepoint, visitproc visit, void *arg)
{
    size_t i;
    int result = 0;

    for (i = 0; result == 0 && i < COUNT; i++) {
        result = resources[i].visit ? resources[i].visit(savepoint, visit, arg) : 0;
    }
    return result;
}
