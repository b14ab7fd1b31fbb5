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
copies_drop(oomkit_call *call)
{
    if (call->entry.copies != NULL) {
        oomkit_param_copies_release(call);
    }
}

/* X(mark, moved, restore, drop), of which any but `restore` may be NULL. Put back in
 * this order; marked in the other one. */
#define RESOURCES(X)                                                                   \
    /* first: an optimizer's copies hold parameters, which are then compared */        \
    X(NULL, NULL, update_restore, NULL)                                                \
    X(NULL, NULL, slots_restore, NULL)                                                 \
    /* needs no memory where their handles died with the attempt; those below do */    \
    X(NULL, hooks_moved, hooks_restore, NULL)                                          \
    /* before what may change versions: they stand beside them */                      \
    X(NULL, NULL, flags_restore, NULL)                                                 \
    X(oomkit_params_begin, NULL, oomkit_params_restore, copies_drop)                   \
    X(NULL, NULL, extras_restore, NULL)                                                \
    X(NULL, NULL, oomkit_savepoint_gradients, oomkit_grads_end_attempt)                \
    X(oomkit_buffers_mark, buffers_moved, buffers_restore, oomkit_buffers_release)     \
    X(NULL, NULL, optimizers_restore, oomkit_optimizers_release)                       \
    X(oomkit_plain_begin, NULL, plain_restore, oomkit_plain_end_attempt)               \
    /* after plain state: their own methods have the last word */                      \
    X(oomkit_owners_mark, owners_moved, owners_restore, oomkit_owners_release)         \
    /* after both: who still holds a handle has not been put back */                   \
    X(NULL, hooks_moved, hooks_restore, NULL)                                          \
    /* last: what is put back may draw; so it is marked first */                       \
    X(oomkit_rng_mark, random_moved, random_restore, oomkit_rng_release)

#define MARK(mark, moved, restore, drop) mark,
#define MOVED(mark, moved, restore, drop) moved,
#define RESTORE(mark, moved, restore, drop) restore,
#define DROP(mark, moved, restore, drop) drop,

/* By what is done, for a healthy call marks and drops alone. */
/* At entry of an attempt: how it is, into call->entry. 0 or -1. NULL: it is marked
 * where it is about to move. */
static int (*const marks[])(oomkit_call *) = {RESOURCES(MARK)};
/* Between the parts of an evaluation: did it move? 1, 0 or -1. NULL: it cannot. */
static int (*const moves[])(oomkit_call *) = {RESOURCES(MOVED)};
/* As it was. 0; 1: it cannot be, and *message (owned) says why; -1. May be done again.
 */
static int (*const restores[])(oomkit_call *, PyObject **) = {RESOURCES(RESTORE)};
/* Forgets what belongs to one attempt. Keeps the exception in flight. */
static void (*const drops[])(oomkit_call *) = {RESOURCES(DROP)};

#define COUNT (sizeof(marks) / sizeof(*marks))

#if defined(__GNUC__) && !defined(__clang__) /* a call of each that is there, no loop  \
                                              */
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
        if (marks[i] != NULL && marks[i](call) < 0) {
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
        moved = moves[i] == NULL ? 0 : moves[i](call);
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
        int result = restores[i](call, &why);
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

/* Forgets what belongs to one attempt; what outlives it (copies) stays. */
void
oomkit_savepoint_end_attempt(oomkit_call *call)
{
    size_t i;

    IN_A_ROW
    for (i = 0; i < COUNT; i++) {
        if (drops[i] != NULL) {
            drops[i](call);
        }
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
    Py_CLEAR(call->entry.flags);
    Py_CLEAR(call->entry.hooks);
}

/* Ends the call: nothing of it stays behind. Keeps the exception in flight. */
void
oomkit_savepoint_end(oomkit_call *call)
{
    oomkit_plain_keep(call, 0);
    oomkit_savepoint_end_attempt(call);
    oomkit_grads_release(call);
    oomkit_savepoint_notes_end(call);
    oomkit_params_unmark(call);
    if (call->entry.slots.items != NULL) {
        oomkit_param_slots_release(call);
    }
    if (call->entry.undone.room > 0) {
        oomkit_undone_buffers_free(call);
    }
    if (call->entry.earlier.count > 0) {
        oomkit_earlier_grads_free(call);
    }
    Py_CLEAR(call->refused.hooked);
    Py_CLEAR(call->refused.split_alone);
}

void
oomkit_savepoint_move(oomkit_savepoint *to, oomkit_savepoint *from)
{
    to->rng = from->rng;
    to->buffers = from->buffers;
    to->versions = from->versions;
    to->flags = from->flags;
    to->hooks = from->hooks;
    memset(&from->rng, 0, sizeof(from->rng));
    memset(&from->buffers, 0, sizeof(from->buffers));
    from->versions = NULL;
    from->flags = NULL;
    from->hooks = NULL;
}

void
oomkit_savepoint_move_back(oomkit_call *call, oomkit_savepoint *from)
{
    oomkit_rng_release(call);
    oomkit_buffers_release(call);
    oomkit_savepoint_notes_end(call);
    oomkit_savepoint_move(&call->entry, from);
}

void
oomkit_savepoint_free(oomkit_savepoint *savepoint)
{
    struct oomkit_plain *plain_marks = /* first: finalisers run below */
        oomkit_plain_taken_out(savepoint);
    void *versions = NULL;

    SPARE_GIVE(versions, savepoint->versions);
    oomkit_rng_free(&savepoint->rng);
    oomkit_buffers_free(&savepoint->buffers);
    oomkit_plain_free(plain_marks);
    PyMem_Free(versions);
    Py_CLEAR(savepoint->flags);
    Py_CLEAR(savepoint->hooks);
    oomkit_owners_free(savepoint);
}

int
oomkit_savepoint_traverse(const oomkit_savepoint *savepoint, visitproc visit, void *arg)
{
    Py_VISIT(savepoint->flags);
    Py_VISIT(savepoint->hooks);
    return 0;
}
