/* What a part of a loop shares with the other ranks of a process group: after a
 * collective in it its rows are not handed out again, and a batch that only this rank
 * has cut makes none. oomkit._ranks tells of them. */
#include "chunks.h"
#include "../undo/undo.h"

/* The first one of this thread, from `loop` outwards. Borrowed, or NULL. */
static oomkit_chunks *
part_from(oomkit_chunks *loop)
{
    const unsigned long thread = PyThread_get_thread_ident();

    while (loop != NULL && loop->thread != thread) {
        loop = loop->older;
    }
    return loop;
}

oomkit_chunks *
oomkit_chunks_of_thread(const oomkit_state *st)
{
    return part_from(st->chunks_out);
}

oomkit_call *
oomkit_chunks_call(const oomkit_state *st)
{
    oomkit_chunks *self = oomkit_chunks_of_thread(st);

    return self == NULL ? NULL : &self->call;
}

void
oomkit_chunks_share_nothing(oomkit_chunks *self)
{
    Py_CLEAR(self->shared);
    Py_CLEAR(self->reduces);
}

int
oomkit_chunks_backward_begins(oomkit_state *st)
{
    const oomkit_chunks *loop = oomkit_chunks_of_thread(st);
    OWNED PyObject *what = loop == NULL ? NULL : Py_XNewRef(loop->reduces);
    OWNED PyObject *done = NULL;

    if (what == NULL) {
        return 0;
    }
    done = PyObject_CallOneArg(st->ranks_reduce, what);
    return done == NULL ? -1 : 0;
}

/* A collective comes now, so that nothing repeats the part, nor that of a loop around
 * it. Has memory, and not the caller, decided on the rows of one of them? */
static PyObject *
part_shares(PyObject *module, PyObject *why)
{
    oomkit_chunks *loop = oomkit_chunks_of_thread(oomkit_state_of_module(module));
    int is_cut = 0;

    for (; loop != NULL; loop = part_from(loop->older)) {
        const oomkit_cut *cut = loop->call.cut;
        Py_XSETREF(loop->shared, Py_NewRef(why));
        is_cut |= cut->count > 1 && cut->reason != OOMKIT_REASON_ASKED;
    }
    return PyBool_FromLong(is_cut);
}

static PyObject *
part_reduces(PyObject *module, PyObject *what)
{
    oomkit_chunks *loop = oomkit_chunks_of_thread(oomkit_state_of_module(module));

    if (loop != NULL) {
        Py_XSETREF(loop->reduces, Py_NewRef(what));
    }
    Py_RETURN_NONE;
}

/* Buffers that ranks have just come to agree on: they stay so when the part goes back.
 */
static PyObject *
part_keeps(PyObject *module, PyObject *tensors)
{
    oomkit_chunks *loop = oomkit_chunks_of_thread(oomkit_state_of_module(module));
    OWNED PyObject *several = PySequence_Tuple(tensors);

    if (several == NULL) {
        return NULL;
    }
    for (; loop != NULL; loop = part_from(loop->older)) {
        if (oomkit_buffers_take_again(&loop->call, several) < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

PyMethodDef oomkit_shared_part_methods[] = {
    {"_part_shares", part_shares, METH_O,
     "_part_shares(why, /)\n--\n\n"
     "A collective comes in this part, which is not repeated then: is it one of a\n"
     "batch that is split for want of memory?"},
    {"_part_reduces", part_reduces, METH_O,
     "_part_reduces(what, /)\n--\n\nA backward in this part would reduce those."},
    {"_part_keeps", part_keeps, METH_O,
     "_part_keeps(buffers, /)\n--\n\n"
     "Their values are those that they go back to when this part has failed."},
    {NULL, NULL, 0, NULL},
};
