/* _Vote: the vote of vote.h for oomkit/_ranks, over memory that was mapped there. */
#include "ranks.h"
#include "vote.h"
#include "../call/records.h"
#include "../py/errors.h"

#include <string.h>

#define SLEEP_NS UINT64_C(20000000) /* so often is looked for signals */
#define LOOKS 5 /* of those between two looks at the others' processes */

typedef struct process {
    int64_t pid;
    uint64_t started;
} process;

typedef struct vote_object {
    PyObject_HEAD
    oomkit_vote vote;
    Py_buffer memory; /* held: writable, and shared with other processes */
    process *processes;
    int stays; /* one that is late is waited for again: the round goes on */
} vote_object;

#define vote_CAST(op) ((vote_object *)(op))

/* How a round ended; _ranks/world.py has the same names. */
enum { ALL_CAME = 0, ONE_DEAD, ONE_GONE, ONE_LATE, ONE_STOPPED, BEHIND };

/* The processes of the ranks, from a sequence of (pid, started). 0 or -1. */
static int
vote_processes(vote_object *self, PyObject *given, uint32_t world)
{
    OWNED PyObject *items = PySequence_Tuple(given);
    uint32_t i;

    if (items == NULL) {
        return -1;
    }
    if (PyTuple_GET_SIZE(items) != (Py_ssize_t)world) {
        PyErr_Format(PyExc_ValueError,
                     "_Vote() expected %u processes, got %zd" SEE("internal-error"),
                     world, PyTuple_GET_SIZE(items));
        return -1;
    }
    self->processes = PyMem_Calloc(world, sizeof(*self->processes));
    if (self->processes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (i = 0; i < world; i++) {
        long long pid;
        unsigned long long started;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(items, i), "LK", &pid, &started)) {
            return -1;
        }
        self->processes[i] = (process){pid, started};
    }
    return 0;
}

static PyObject *
vote_new(PyTypeObject *tp, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"memory", "world", "rank", "epoch", "processes", NULL};
    PyObject *memory, *processes; /* borrowed from args */
    unsigned int world, rank;
    unsigned long long epoch;
    OWNED PyObject *op = NULL;
    vote_object *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OIIKO:_Vote", names, &memory,
                                     &world, &rank, &epoch, &processes)) {
        return NULL;
    }
    op = tp->tp_alloc(tp, 0);
    if (op == NULL) {
        return NULL;
    }
    self = vote_CAST(op);
    if (vote_processes(self, processes, world) < 0 ||
        PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0) {
        return NULL;
    }
    if (oomkit_vote_bytes(world) == 0 ||
        (size_t)self->memory.len < oomkit_vote_bytes(world) ||
        oomkit_vote_open(&self->vote, self->memory.buf, world, rank, epoch) < 0) {
        return oomkit_raise(PyExc_ValueError,
                            "_Vote() expected memory of this epoch for rank %u of %u, "
                            "got something else in %zd bytes" SEE("internal-error"),
                            rank, world, self->memory.len);
    }
    return STEAL(op);
}

static void
vote_dealloc(PyObject *op)
{
    PyTypeObject *tp = Py_TYPE(op);
    vote_object *self = vote_CAST(op);

    if (self->memory.obj != NULL) {
        PyBuffer_Release(&self->memory);
    }
    PyMem_Free(self->processes);
    tp->tp_free(op);
    Py_DECREF(tp);
}

/* Who has not come, and will not? ALL_CAME where that cannot be said of anybody. */
static int
vote_missing(const vote_object *self, uint32_t *rank)
{
    char text[OOMKIT_VOTE_TEXT];
    uint32_t i;

    for (i = 0; i < self->vote.world; i++) {
        const process *one = &self->processes[i];
        if (oomkit_vote_has_come(&self->vote, i)) {
            continue;
        }
        *rank = i;
        if (oomkit_vote_said(&self->vote, i, text)) {
            return ONE_GONE;
        }
        if (oomkit_process_look(one->pid, one->started) == OOMKIT_PROCESS_DEAD) {
            return ONE_DEAD;
        }
    }
    return ALL_CAME;
}

/* The first that is late, and whether it is stopped. */
static int
vote_late(const vote_object *self, uint32_t *rank)
{
    const process *one;

    for (*rank = 0; *rank + 1 < self->vote.world; ++*rank) {
        if (!oomkit_vote_has_come(&self->vote, *rank)) {
            break; /* else it is the last one; or who held the round has just let it go
                    */
        }
    }
    one = &self->processes[*rank];
    return oomkit_process_look(one->pid, one->started) == OOMKIT_PROCESS_STOPPED
               ? ONE_STOPPED
               : ONE_LATE;
}

/* What a state is as an end; -1 of none. */
static int
vote_end_of(oomkit_vote_state state)
{
    return state == OOMKIT_VOTE_DONE ? ALL_CAME
                                     : (state == OOMKIT_VOTE_BEHIND ? BEHIND : -1);
}

/* Until all have come. How it ended, or -1 with an exception. */
static int
vote_wait(vote_object *self, uint64_t patience_ns, oomkit_voted *voted)
{
    const uint64_t until = oomkit_now_ns() + patience_ns;
    const uint64_t sleep =
        patience_ns > 0 && patience_ns < SLEEP_NS ? patience_ns : SLEEP_NS;
    int turn, ended;

    for (turn = 1;; turn++) {
        oomkit_vote_state state;
        Py_BEGIN_ALLOW_THREADS;
        state = oomkit_vote_wait(&self->vote, sleep, voted);
        Py_END_ALLOW_THREADS;
        if (vote_end_of(state) >= 0) {
            return vote_end_of(state);
        }
        if (PyErr_CheckSignals() < 0) {
            return -1;
        }
        ended = turn % LOOKS == 0 ? vote_missing(self, &voted->rank) : ALL_CAME;
        if (ended != ALL_CAME) { /* it may have come and gone since */
            state = oomkit_vote_wait(&self->vote, 0, voted);
            return vote_end_of(state) >= 0 ? vote_end_of(state) : ended;
        }
        if (oomkit_now_ns() >= until) {
            state = oomkit_vote_wait(&self->vote, 0, voted);
            return vote_end_of(state) >= 0 ? vote_end_of(state)
                                           : vote_late(self, &voted->rank);
        }
    }
}

/* The end of a round, or a step that this rank is to make before it. */
static PyObject *
vote_end(vote_object *self, double patience)
{
    oomkit_voted voted = {0};
    int ended = vote_end_of(oomkit_vote_wait(&self->vote, 0, &voted));

    if (ended < 0) { /* else the lock of the interpreter was not needed */
        ended = vote_wait(self, (uint64_t)(patience * 1e9), &voted);
    }
    if (ended == BEHIND) {
        voted = (oomkit_voted){.word = oomkit_vote_step(&self->vote)};
    } else if (!self->stays || (ended != ONE_LATE && ended != ONE_STOPPED)) {
        oomkit_vote_leave(&self->vote);
    }
    return ended < 0 ? NULL
                     : Py_BuildValue("iLIi", ended, (long long)voted.word,
                                     (unsigned int)voted.rank, voted.one_matter);
}

static PyObject *
vote_cast(PyObject *op, PyObject *args)
{
    long long word;
    unsigned long long tag;
    double patience;

    vote_CAST(op)->stays = 0;
    if (!PyArg_ParseTuple(args, "LKd|p:cast", &word, &tag, &patience,
                          &vote_CAST(op)->stays)) {
        return NULL;
    }
    oomkit_vote_cast(&vote_CAST(op)->vote, word, tag);
    return vote_end(vote_CAST(op), patience);
}

static PyObject *
vote_go_on(PyObject *op, PyObject *patience)
{
    const double seconds = PyFloat_AsDouble(patience);

    return seconds == -1.0 && PyErr_Occurred() ? NULL
                                               : vote_end(vote_CAST(op), seconds);
}

static PyObject *
vote_tell(PyObject *op, PyObject *args)
{
    long long what, stop;

    if (!PyArg_ParseTuple(args, "LL:tell", &what, &stop)) {
        return NULL;
    }
    return PyLong_FromLong(oomkit_vote_tell(&vote_CAST(op)->vote, what, stop));
}

static PyObject *
vote_hold(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    return PyBool_FromLong(oomkit_vote_hold(&vote_CAST(op)->vote));
}

static PyObject *
vote_release(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    oomkit_vote_release(&vote_CAST(op)->vote);
    Py_RETURN_NONE;
}

static PyObject *
vote_tag(PyObject *op, PyObject *given)
{
    unsigned long rank = PyLong_AsUnsignedLong(given);

    if (rank >= vote_CAST(op)->vote.world) {
        return PyErr_Occurred()
                   ? NULL
                   : oomkit_raise(
                         PyExc_IndexError,
                         "tag() expected a rank of %u, got %lu" SEE("internal-error"),
                         vote_CAST(op)->vote.world, rank);
    }
    return PyLong_FromUnsignedLongLong(
        oomkit_vote_tag(&vote_CAST(op)->vote, (uint32_t)rank));
}

static PyObject *
vote_say(PyObject *op, PyObject *args)
{
    const char *text;
    int gone = 0;

    if (!PyArg_ParseTuple(args, "s|p:say", &text, &gone)) {
        return NULL;
    }
    oomkit_vote_say(&vote_CAST(op)->vote, text, gone);
    Py_RETURN_NONE;
}

static PyObject *
vote_said(PyObject *op, PyObject *given)
{
    unsigned long rank = PyLong_AsUnsignedLong(given);
    char text[OOMKIT_VOTE_TEXT];

    if (rank >= vote_CAST(op)->vote.world) {
        return PyErr_Occurred()
                   ? NULL
                   : oomkit_raise(
                         PyExc_IndexError,
                         "said() expected a rank of %u, got %lu" SEE("internal-error"),
                         vote_CAST(op)->vote.world, rank);
    }
    oomkit_vote_said(&vote_CAST(op)->vote, (uint32_t)rank, text);
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static PyObject *
vote_prepare(PyObject *Py_UNUSED(type), PyObject *args)
{
    Py_buffer memory;
    unsigned int world;
    unsigned long long epoch;

    if (!PyArg_ParseTuple(args, "w*IK:prepare", &memory, &world, &epoch)) {
        return NULL;
    }
    if (oomkit_vote_bytes(world) == 0 ||
        (size_t)memory.len < oomkit_vote_bytes(world)) {
        PyBuffer_Release(&memory);
        return oomkit_raise(PyExc_ValueError,
                            "prepare() expected memory for %u ranks, got %zd bytes" SEE(
                                "internal-error"),
                            world, memory.len);
    }
    oomkit_vote_format(memory.buf, world, epoch);
    PyBuffer_Release(&memory);
    Py_RETURN_NONE;
}

static PyObject *
vote_bytes(PyObject *Py_UNUSED(type), PyObject *given)
{
    unsigned long world = PyLong_AsUnsignedLong(given);

    if (world == (unsigned long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    return PyLong_FromSize_t(
        oomkit_vote_bytes(world > UINT32_MAX ? 0 : (uint32_t)world));
}

static PyObject *
vote_started(PyObject *Py_UNUSED(type), PyObject *given)
{
    long long pid = PyLong_AsLongLong(given);

    if (pid == -1 && PyErr_Occurred()) {
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(oomkit_process_started(pid));
}

static PyObject *
vote_look(PyObject *Py_UNUSED(type), PyObject *args)
{
    long long pid;
    unsigned long long started;

    if (!PyArg_ParseTuple(args, "LK:look", &pid, &started)) {
        return NULL;
    }
    return PyLong_FromLong(oomkit_process_look(pid, started));
}

static PyMethodDef vote_methods[] = {
    {"cast", vote_cast, METH_VARARGS,
     "cast($self, word, tag, patience, stays=False, /)\n--\n\n"
     "(how it ended, largest word, rank, all on one matter), once all have come. Where "
     "it ended with a step of others, that is in place of the word. `stays`: where one "
     "is late, go_on() waits in the same round."},
    {"go_on", vote_go_on, METH_O,
     "go_on($self, patience, /)\n--\n\nThe same, after such a step was made, or a "
     "wait."},
    {"tell", vote_tell, METH_VARARGS,
     "tell($self, what, stop, /)\n--\n\n"
     "0: the others are told of this step; 1 a rank has cast at least `stop`, 2 "
     "another "
     "one makes another step, 3 it is too far behind."},
    {"hold", vote_hold, METH_NOARGS,
     "hold($self, /)\n--\n\nMay it tell of a step that it alone knows of? Nobody "
     "leaves "
     "the round before release()."},
    {"release", vote_release, METH_NOARGS, "release($self, /)\n--\n\nThey may."},
    {"tag", vote_tag, METH_O, "tag($self, rank, /)\n--\n\nWhat it votes on."},
    {"say", vote_say, METH_VARARGS,
     "say($self, text, gone=False, /)\n--\n\nFor the others."},
    {"said", vote_said, METH_O, "said($self, rank, /)\n--\n\nWhat it has said last."},
    {"prepare", vote_prepare, METH_VARARGS | METH_STATIC,
     "prepare(memory, world, epoch, /)\n--\n\nBefore anybody opens it."},
    {"bytes", vote_bytes, METH_O | METH_STATIC,
     "bytes(world, /)\n--\n\nSize of the memory; 0 of too many."},
    {"started", vote_started, METH_O | METH_STATIC,
     "started(pid, /)\n--\n\nWhen that process was started, in ticks."},
    {"look", vote_look, METH_VARARGS | METH_STATIC,
     "look(pid, started, /)\n--\n\n0 it runs, 1 is stopped, 2 dead."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot vote_slots[] = {
    {Py_tp_new, vote_new},
    {Py_tp_dealloc, vote_dealloc},
    {Py_tp_methods, vote_methods},
    {Py_tp_doc, "_Vote(memory, world, rank, epoch, processes)\n--\n\n"
                "A rank's part in votes with others of its machine."},
    {0, NULL},
};

/* No part in collections: of objects it holds the exporter of a buffer alone. */
PyType_Spec oomkit_vote_spec = {
    .name = "oomkit._C._Vote",
    .basicsize = sizeof(vote_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = vote_slots,
};
