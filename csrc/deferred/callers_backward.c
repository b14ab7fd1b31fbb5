/* The second half of a call whose loss was returned: the caller's backward.
 *
 * Before it runs, the gradients of those who take part are marked. If it runs out of
 * memory, everything goes back to the marks, what the failed graph has saved is freed,
 * and the calls whose losses it reached are run again in smaller micro-batches with the
 * gradients that reached them. Losses of calls that were split already hand out
 * their gradients when it has run. */
#include "callers_backward.h"
#include "../engine/engine.h"
#include "../hook/hook.h"
#include "../py/modes.h"
#include "../sizes/sizes.h"
#include "../undo/undo.h"

static _Thread_local oomkit_callers *active;

/* --- begin and end --- */

int
oomkit_callers_is_running(const oomkit_state *st)
{
    /* One of autograd's own threads, at work for it, is at a node of some graph. */
    return active != NULL || (st->callers != NULL && oomkit_nested_in_engine(st));
}

/* A call of its own for the marks of one list of participants; `call` is that of an
 * oomkit_own_call. 0 or -1. */
int
oomkit_callers_mark(oomkit_callers *s, const oomkit_deferred *p, oomkit_call *call)
{
    /* Released by oomkit_replay_end: another thread's backward may retire `p`. */
    oomkit_call_init(call, &((oomkit_own_call *)call)->cut,
                     (struct oomkit_step *)Py_NewRef((PyObject *)p->step),
                     &p->step->options);
    oomkit_call_cut(call);
    call->batch.rows = -1;
    call->log.number = p->number;
    call->device = p->device;
    call->parts = p->parts;
    call->parts->refs++;
    call->parts->busy++;
    call->shape.signature =
        p->signature != 0
            ? p->signature
            : oomkit_signature_of(call, &p->batch, p->modes.autocast != NULL, 1);
    call->shape.known = 1;
    call->is_last = call->training = 1;
    oomkit_window_begin(call);
    if (oomkit_callers_is_elsewhere(s, p->parts)) {
        call->deferred.elsewhere = OOMKIT_UNMARKED;
        return 0;
    }
    return oomkit_grads_mark(call);
}

oomkit_call *
oomkit_callers_call(oomkit_callers *s, const oomkit_participants *parts)
{
    int i;
    for (i = 0; i < s->call_count; i++) {
        if (s->calls[i]->parts == parts) {
            return s->calls[i];
        }
    }
    return NULL;
}

static void
callers_take(oomkit_callers *s, oomkit_deferred *p)
{
    p->callers = s;
    p->fired = p->replayed = 0;
    Py_CLEAR(p->gradient);
}

static int
callers_has(const oomkit_callers *s, const oomkit_deferred *p)
{
    int i = 0;
    while (i < s->count && s->armed[i] != p) {
        i++;
    }
    return i < s->count;
}

/* Room for one more in an array that begins inside `s`. 0 or -1. */
static int
callers_grow(void **items, void *few, int count, int *room)
{
    void *grown; /* owned by s */

    if (count < *room) {
        return 0;
    }
    grown = PyMem_Malloc((size_t)*room * 2 * sizeof(void *));
    if (grown == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(grown, *items, (size_t)count * sizeof(void *));
    if (*items != few) {
        PyMem_Free(*items);
    }
    *items = grown;
    *room *= 2;
    return 0;
}

int
oomkit_callers_claim(oomkit_deferred *p)
{
    oomkit_callers *s = active;
    void *armed;

    if (s == NULL && p->callers == NULL) { /* the one that began first of those */
        for (s = p->st->callers; s != NULL && s->next != NULL; s = s->next) {
        }
    }
    /* One that was made meanwhile is no part of it. */
    if (s == NULL || p->callers == s || p->serial == 0 || p->serial > s->began ||
        oomkit_callers_call(s, p->parts) == NULL) {
        return 0;
    }
    armed = s->armed;
    if (p->callers == NULL || !callers_has(s, p)) {
        int result = callers_grow(&armed, s->few_armed, s->count, &s->room);
        s->armed = armed;
        if (result < 0) {
            return -1;
        }
        s->armed[s->count++] = (oomkit_deferred *)Py_NewRef((PyObject *)p);
    }
    callers_take(s, p);
    return oomkit_callers_takes_over(s, p->parts);
}

/* It is ours no longer; a backward of another thread that waits may come to it. */
static void
callers_let_go(const oomkit_callers *s, oomkit_deferred *p)
{
    oomkit_callers *other = s->st->callers;

    while (other != NULL && !callers_has(other, p)) {
        other = other->next;
    }
    p->callers = other;
    p->fired = 0;
    Py_CLEAR(p->gradient);
}

/* Marks of one list of participants of which calls wait. 0 or -1. */
static int
callers_arm(oomkit_callers *s, oomkit_participants *parts)
{
    oomkit_deferred *p = parts->deferred;
    void *calls = s->calls;
    oomkit_call *call = &s->first.call;
    int result = callers_grow(&calls, s->few_calls, s->call_count, &s->call_room);

    s->calls = calls;
    if (result < 0 || p == NULL) {
        return result;
    }
    if (s->call_count > 0) {
        call = PyMem_Malloc(sizeof(oomkit_own_call));
        if (call == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    s->calls[s->call_count++] = call;
    Py_INCREF(p); /* its graph may go meanwhile */
    result = oomkit_callers_mark(s, p, call);
    Py_DECREF(p);
    return result;
}

/* The marks of several. While they are taken others may go or come. 0 or -1. */
static int
callers_arm_all(oomkit_callers *s)
{
    oomkit_participants *parts, **all; /* owned array of counted references */
    Py_ssize_t i, count = 0;
    int result = 0;

    for (parts = s->st->waiting; parts != NULL; parts = parts->waiting_next) {
        count++;
    }
    all = PyMem_Malloc((size_t)count * sizeof(*all));
    if (all == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (i = 0, parts = s->st->waiting; parts != NULL; parts = parts->waiting_next) {
        all[i++] = parts;
        parts->refs++;
    }
    for (i = 0; i < count; i++) {
        result = result < 0 ? -1 : callers_arm(s, all[i]);
        oomkit_participants_release(all[i]);
    }
    PyMem_Free(all);
    return result;
}

static int
callers_begin(oomkit_callers *s, oomkit_state *st)
{
    memset(s, 0, offsetof(oomkit_callers, first));
    s->st = st;
    s->armed = s->few_armed;
    s->calls = s->few_calls;
    s->room = s->call_room = OOMKIT_CALLERS_FEW;
    s->nesting = oomkit_backward_outside();
    s->began = st->deferred_serial;
    if (active != NULL) {
        oomkit_callers_nested(st);
    }
    s->outer = active;
    active = s;
    s->next = st->callers;
    st->callers = s;
    if (st->waiting == NULL || st->waiting->waiting_next != NULL) {
        return callers_arm_all(s);
    }
    return callers_arm(s, st->waiting);
}

static void
callers_exempt_leave(oomkit_callers *s)
{
    if (s->exempt) {
        s->exempt = 0;
        oomkit_exempt_leave(s->st);
    }
}

/* Keeps the exception in flight. */
static void
callers_end(oomkit_callers *s, int finished)
{
    PyObject *exception = finished ? NULL : oomkit_exception_take(); /* owned */
    oomkit_callers **link = &s->st->callers;
    int i;

    callers_exempt_leave(s);
    active = s->outer;
    while (*link != s) {
        link = &(*link)->next;
    }
    *link = s->next;
    for (i = 0; i < s->call_count; i++) {
        const oomkit_deferred *record = NULL; /* of the one whose peak this was */
        int k, n = 0;
        for (k = 0; k < s->count; k++) {
            if (s->armed[k]->callers == s && s->armed[k]->fired &&
                s->armed[k]->parts == s->calls[i]->parts) {
                record = s->armed[k];
                n++;
            }
        }
        if (exception != NULL) {
            oomkit_pass_abandon(s->calls[i], exception);
        }
        oomkit_replay_end(s->calls[i], n == 1 ? record : NULL, finished);
        if (s->calls[i] != &s->first.call) {
            PyMem_Free(s->calls[i]);
        }
    }
    for (i = 0; i < s->count; i++) {
        oomkit_deferred *p = s->armed[i];
        if (p->callers == s) {
            int done = p->spent || (p->fired && finished && !s->keep_graph);
            callers_let_go(s, p);
            if (done && !p->retired) {
                oomkit_deferred_retire(p);
            }
        }
        Py_DECREF(p);
    }
    if (s->armed != s->few_armed) {
        PyMem_Free(s->armed);
    }
    if (s->calls != s->few_calls) {
        PyMem_Free(s->calls);
    }
    if (s->node_hooks != NULL) {
        oomkit_between_end(s);
    }
    Py_CLEAR(s->roots);
    Py_CLEAR(s->inputs);
    Py_CLEAR(s->loose);
    if (exception != NULL) {
        oomkit_exception_give(exception);
    }
}

/* --- what the engine and the hooks tell --- */

static int
callers_refuse_flags(oomkit_callers *s)
{
    const char *flag = s->create_graph ? "create_graph=True"
                       : s->inputs     ? "inputs="
                                       : NULL;
    int found = flag == NULL ? 0 : oomkit_graph_has_split(s->st, s->roots);

    if (found > 0) {
        oomkit_raise(s->st->SplitError,
                     "backward(%s) cannot go through a loss that auto_batch computed "
                     "in micro-batches, because their graphs are freed; call it inside "
                     "the decorated step" SEE("returned-loss"),
                     flag);
    }
    return found != 0 ? -1 : 0;
}

int
oomkit_callers_engine(oomkit_state *st, PyObject *const *args, size_t nargsf,
                      PyObject *Py_UNUSED(kwnames))
{
    oomkit_callers *s = active;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    OWNED PyObject *nodes = NULL;
    int near;

    if (s == NULL || s->nesting != oomkit_backward_outside()) {
        oomkit_callers_nested(st); /* on a thread of autograd's own; in a hook */
        return 0;
    }
    if (s->engine_seen || n < 5) {
        return 0;
    }
    s->engine_seen = 1;
    Py_XSETREF(s->roots, Py_NewRef(args[0]));
    s->keep_graph = args[2] == Py_True;
    s->create_graph = args[3] == Py_True;
    if (PyTuple_Check(args[4]) && PyTuple_GET_SIZE(args[4]) > 0) {
        Py_XSETREF(s->inputs, Py_NewRef(args[4]));
    }
    if (callers_refuse_flags(s) < 0) {
        return -1;
    }
    near = oomkit_graph_watch(st, args, &nodes);
    if (near < 0 || (near > 1 && !s->keep_graph && !s->create_graph &&
                     oomkit_between_hang(s, nodes, args[1], near) < 0)) {
        return -1;
    }
    if (near > 0 && !s->exempt) {
        /* The few bytes between the root and its losses must not fail: what reaches the
         * losses would not be known. */
        s->exempt = 1;
        oomkit_exempt_enter(st);
    }
    return 0;
}

void
oomkit_callers_nested(const oomkit_state *st)
{
    oomkit_callers *s;
    int functions;

    if (st->callers == NULL) {
        return;
    }
    functions = oomkit_nested_is_functions();
    if (functions < 0) {
        oomkit_error_dismiss(); /* it counts as foreign: refused is better than wrong */
    }
    if (functions > 0) {
        return;
    }
    if (active != NULL) {
        active->foreign = 1;
        return;
    }
    for (s = st->callers; s != NULL; s = s->next) { /* whose thread of autograd's? */
        s->foreign = 1;
    }
}

void
oomkit_callers_arrived(oomkit_deferred *p)
{
    if (p->callers == NULL) {
        return;
    }
    if (p->callers->node_hooks != NULL) {
        oomkit_between_arrived(p->callers);
    }
    if (p->callers == active) {
        active->arrived = 1;
        callers_exempt_leave(active);
    }
}

void
oomkit_callers_between(oomkit_callers *s, int begins)
{
    if (s != active) { /* on a thread of autograd's own */
        return;
    }
    if (!begins && s->arrived) {
        callers_exempt_leave(s);
    } else if (begins && !s->exempt) {
        s->exempt = 1;
        oomkit_exempt_enter(s->st);
    }
}

int
oomkit_callers_wanted(const oomkit_state *st)
{
    if (st->waiting == NULL) {
        return 0;
    }
    /* Inside one that runs: of losses that were made meanwhile, by a hook or in a
     * reentrant checkpoint. */
    return active != NULL ? st->deferred_serial > active->began && active->engine_seen
                          : !oomkit_callers_is_running(st);
}

/* --- running --- */

static PyObject *
callers_protected(oomkit_state *st, PyObject *original, PyObject *const *args,
                  size_t nargsf, PyObject *kwnames)
{
    oomkit_callers s;
    PyObject *result = NULL; /* owned */
    int retry = 0;

    if (callers_begin(&s, st) < 0) {
        if (s.call_count > 0) {
            oomkit_own_failed(s.calls[s.call_count - 1],
                              "its backward() was being prepared");
        }
        callers_end(&s, 0);
        return NULL;
    }
    do {
        result = PyObject_Vectorcall(original, args, nargsf, kwnames);
        if (result != NULL) {
            break;
        }
        callers_exempt_leave(&s);
        retry = oomkit_callers_failed(&s, !retry);
    } while (retry == 1);
    if (result == NULL && retry == 0) {
        result = Py_NewRef(Py_None); /* replayed: as torch's own functions answer */
    }
    if (result == NULL && s.ours) {
        oomkit_callers_gradients_back(&s);
        oomkit_own_failed(s.calls[0], "its backward() was run again");
    }
    if (result != NULL && oomkit_callers_finish(&s) < 0) {
        oomkit_callers_take_back(&s);
        oomkit_own_failed(s.calls[0], "its gradients were handed out");
        Py_CLEAR(result);
    }
    callers_end(&s, result != NULL);
    return result;
}

PyObject *
oomkit_callers_run(oomkit_state *st, PyObject *original, PyObject *const *args,
                   size_t nargsf, PyObject *kwnames)
{
    PyObject *result, *guard; /* owned */

    /* Under inference_mode() the engine works as ever, but a replay records nothing and
     * copies of gradients would be inference tensors. */
    if (oomkit_inference_begin(st, 0, &guard) < 0) {
        return NULL;
    }
    result = callers_protected(st, original, args, nargsf, kwnames);
    if (oomkit_inference_end(st, guard, result == NULL ? -1 : 0) < 0) {
        Py_CLEAR(result);
    }
    return result;
}

/* --- backwards outside every call --- */

/* One that writes to no .grad cannot pass a loss that was computed in parts. */
static int
outside_without_leaves(oomkit_state *st, PyObject *roots)
{
    int found = oomkit_graph_has_split(st, roots);

    if (found > 0) {
        oomkit_raise(st->SplitError,
                     "autograd.grad() cannot go through a loss that auto_batch "
                     "computed in micro-batches, because their graphs are freed; call "
                     "it inside the decorated step" SEE("returned-loss"));
    }
    return found == 0 ? 0 : -1;
}

const oomkit_outside oomkit_backward_outside_calls = {
    .wanted = oomkit_callers_wanted,
    .run = oomkit_callers_run,
    .engine = oomkit_callers_engine,
    .engine_without_leaves = outside_without_leaves,
    .nests = oomkit_callers_nested,
    .mode_changes = oomkit_mode_log,
};
