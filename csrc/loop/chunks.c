/* The loop over a batch: capture, one part after the other, and the same rows in
 * smaller parts after a failure that a guard has ended. */
#include "chunks.h"
#include "../batch/batch.h"
#include "../engine/engine.h"
#include "../plain/plain.h"
#include "../plain/plain_state.h"
#include "../py/tensor.h"
#include "../sizes/sizes.h"
#include "../undo/undo.h"

#include <stddef.h>

#define MARKS_LIMIT 4096 /* more tensors than that are marked once */

/* --- beginning --- */

/* That of the batch or of who takes part, where it is none of the CPU's; else what is
 * in use: a part may be moved there in the body. */
static oomkit_device
begin_device(const oomkit_chunks *self)
{
    const oomkit_call *call = &self->call;

    if (call->batch.device_type > OOMKIT_DEVICE_CPU) {
        return (oomkit_device){call->batch.device_type, call->batch.device_index};
    }
    if (call->parts->device_type != OOMKIT_DEVICE_CPU) {
        return (oomkit_device){call->parts->device_type, call->parts->device_index};
    }
    return oomkit_device_default(self->st);
}

static int
is_sequence(PyObject *object)
{
    return PyList_CheckExact(object) || PyTuple_CheckExact(object) ||
           PyRange_Check(object);
}

static int
is_long(PyObject *object)
{
    return is_sequence(object) && !PyRange_Check(object) &&
           PySequence_Fast_GET_SIZE(object) > OOMKIT_CAPTURE_CONTAINER;
}

/* Lists of what is no tensor (texts, paths, samples of any kind), or very long ones: a
 * row is an element. Of a call only the first argument is looked at. 0 or -1. */
static int
begin_sequence(oomkit_chunks *self)
{
    Py_ssize_t i, n = self->as_call ? 1 : self->positional;

    if (PyTuple_GET_SIZE(self->names) < n) {
        return 0;
    }
    for (i = 0; i < n; i++) {
        Py_ssize_t length, first;
        if (!is_sequence(self->args[i])) {
            return 0;
        }
        first = PyObject_Size(self->args[0]);
        length = PyObject_Size(self->args[i]);
        if (length != first) {
            oomkit_raise(self->st->SplitError,
                         "%U: batch%zd has %zd elements, batch0 has %zd" SEE("options"),
                         self->options.label, i, length, first);
            return -1;
        }
    }
    Py_XSETREF(self->options.batch, PyTuple_GetSlice(self->names, 0, n));
    if (self->options.batch == NULL) {
        return -1;
    }
    self->options.split = Py_NewRef(self->st->cut_sequence);
    self->call.batch.searched = 0;
    return oomkit_batch_find(self->st, &self->options, NULL, self->names,
                             &self->call.batch);
}

/* Of texts, paths, numbers: nothing in it can be sliced. */
static int
is_plain(const oomkit_chunks *self)
{
    PyObject *object = self->args[0], *first; /* borrowed */

    if (PyRange_Check(object)) {
        return 1;
    }
    first = PySequence_Fast_GET_ITEM(object, 0);
    return !oomkit_tensor_check(self->st, first) && !PyList_Check(first) &&
           !PyTuple_Check(first) && !PyDict_Check(first);
}

/* The rows of the batch. 1; 0 where it has none, so that there is nothing to hand out;
 * or -1. */
static int
begin_rows(oomkit_chunks *self)
{
    oomkit_call *call = &self->call;
    int may_be = self->positional > 0 && self->options.split == NULL, found;

    if (self->positional > 0 && is_sequence(self->args[0]) &&
        PyObject_Size(self->args[0]) == 0) {
        return 0;
    }
    if (may_be && is_sequence(self->args[0]) &&
        (is_long(self->args[0]) || (self->total > 1 && is_plain(self)))) {
        found = begin_sequence(self);
    } else {
        found = oomkit_batch_find(self->st, &self->options, self->site->batch_site,
                                  self->names, &call->batch);
        if (found == 0 && may_be) {
            found = begin_sequence(self);
        }
    }
    if (found < 0 && call->batch.empty &&
        PyErr_ExceptionMatches(self->st->SplitError)) {
        PyErr_Clear(); /* tensors without rows: a loop without parts */
        return 0;
    }
    if (found != 0) {
        self->rows = found < 0 ? 0 : call->batch.rows;
        return found < 0 ? -1 : self->rows > 0;
    }
    return oomkit_batch_refuse(
        self->st, &call->batch,
        PyUnicode_FromFormat(
            "%U found no batch to split: pass a tensor, a list, or a tuple or dict of "
            "tensors%s; or give split=...",
            self->options.label,
            self->as_call ? ""
                          : " (oomkit.map takes a loader or another "
                            "iterator of batches)"));
}

/* Those of the loop before at this site, where it was for the same function; of one
 * call of oomkit.map, of its loop before; or searched for. 1 they are new, 0 or -1. */
static int
begin_find(oomkit_chunks *self)
{
    if (self->parts == NULL) {
        self->parts = oomkit_chunks_known_parts(self);
        oomkit_plain_share(&self->plain,
                           self->parts == NULL ? NULL : &self->site->plain);
    }
    if (self->parts != NULL &&
        (self->parts->busy > 0 ||
         !oomkit_participants_valid(self->st, self->parts, NULL, 0))) {
        oomkit_participants_release(self->parts);
        self->parts = NULL;
    }
    if (self->parts != NULL) {
        return 0;
    }
    oomkit_plain_share(&self->plain, NULL);
    self->parts = oomkit_participants_find(self->st, &self->options,
                                           self->call.given.func, NULL, 0, 0);
    return self->parts == NULL || oomkit_chunks_know_parts(self) < 0 ? -1 : 1;
}

/* Of a loop's body nothing is put back that its code shows: it is judged by
 * body_judge(). 0 or -1. */
static int
begin_participants(oomkit_chunks *self)
{
    oomkit_call *call = &self->call;
    const int is_new = begin_find(self);
    int result;

    if (is_new < 0 || oomkit_call_take_part(call, self->parts) < 0) {
        return -1;
    }
    if (self->func == NULL) {
        return 0;
    }
    if (call->parts->writes == NULL && oomkit_writes_look(call) < 0) {
        return -1;
    }
    /* twice, as of a step: what the first call makes may be there then */
    result = is_new || self->plain.looked == 1 ? oomkit_plain_find(call, !is_new) : 0;
    if (result == 0 && self->site->parts == self->parts) {
        oomkit_plain_share(&self->site->plain, &self->plain);
    }
    return result;
}

static int
begin_capture(oomkit_chunks *self)
{
    oomkit_state *st = self->st;
    oomkit_call *call = &self->call;

    oomkit_call_init(call, &self->cut, self->site, &self->options);
    oomkit_call_cut(call);
    call->given.args = self->args;
    call->given.nargsf = (size_t)self->positional;
    call->given.kwnames = self->kwnames;
    call->given.is_body = self->func == NULL;
    call->given.places = &self->plain;
    if (self->func != NULL) {
        call->given.func = self->func;
    }
    call->log.number = ++self->site->calls;
    call->is_last = 1;
    call->shape.bucket = self->bucket;
    self->stage = OOMKIT_CHUNKS_RUNNING;
    if (oomkit_batch_capture(st, &self->options, self->args, self->positional,
                             self->kwnames, 0, self->names, &call->batch) < 0) {
        return -1;
    }
    if (begin_participants(self) < 0) {
        return -1;
    }
    call->device = begin_device(self);
    oomkit_device_prepare(st, call->device);
    oomkit_window_of_loop(call);
    if (!st->backward_patched && oomkit_engine_install(st) < 0) {
        return -1;
    }
    return self->options.restore_batch ? oomkit_batch_save(st, &call->batch) : 0;
}

/* 1, 0 where there is nothing to hand out, -1. */
static int
chunks_begin(oomkit_chunks *self)
{
    int found;

    if (begin_capture(self) < 0) {
        return -1;
    }
    found = begin_rows(self);
    return found <= 0 ? found : oomkit_chunks_plan(self) < 0 ? -1 : 1;
}

/* --- one part --- */

/* The batch as it is now: what the body has changed in the rows that it had is its own
 * affair, until rows are to be handed out again. 0 or -1. */
static int
part_remark(oomkit_chunks *self)
{
    oomkit_batch *batch = &self->call.batch;
    Py_ssize_t i;

    for (i = 0; batch->count <= MARKS_LIMIT && i < batch->count; i++) {
        oomkit_node *node = &batch->nodes[i];
        oomkit_tensor_facts facts;
        if (node->kind != OOMKIT_NODE_TENSOR) {
            continue;
        }
        if (oomkit_tensor_facts_get(self->st, node->object, 0, &facts) < 0) {
            return -1;
        }
        node->version = oomkit_tensor_mark(self->st, node->object, &facts);
    }
    return 0;
}

/* The arguments as a loop gets them. Steals what is in `vector`. New reference or NULL.
 */
static PyObject *
part_object(oomkit_chunks *self, PyObject **vector)
{
    OWNED PyObject *args = NULL, *kwargs = NULL;
    Py_ssize_t i, n = self->positional;
    int failed;

    if (n == 1 && self->total == 1 && !self->as_call) {
        return vector[0];
    }
    args = PyTuple_New(n);
    kwargs = self->as_call ? PyDict_New() : NULL;
    failed = args == NULL || (self->as_call && kwargs == NULL);
    for (i = 0; i < self->total; i++) {
        if (i < n && args != NULL) {
            PyTuple_SET_ITEM(args, i, vector[i]);
            continue;
        }
        failed =
            failed || PyDict_SetItem(kwargs, PyTuple_GET_ITEM(self->kwnames, i - n),
                                     vector[i]) < 0;
        Py_DECREF(vector[i]);
    }
    if (failed) {
        return NULL;
    }
    return self->as_call ? PyTuple_Pack(2, args, kwargs) : STEAL(args);
}

/* The rows at slice_index; all of them are the caller's very objects. New reference or
 * NULL. */
static PyObject *
part_build(oomkit_chunks *self)
{
    oomkit_call *call = &self->call;
    const oomkit_slice *slice = &call->cut->slices[call->cut->at];
    OWNED_MEMORY PyObject **vector = /* of owned references */
        PyMem_Calloc((size_t)self->total + 1, sizeof(PyObject *));
    Py_ssize_t i;

    if (vector == NULL) {
        return PyErr_NoMemory();
    }
    if (call->cut->count == 1 && call->tries.ooms == 0) {
        for (i = 0; i < self->total; i++) {
            vector[i] = Py_NewRef(self->args[i]);
        }
        return part_object(self, vector);
    }
    if (oomkit_batch_build(self->st, &self->options, &call->batch, slice->start,
                           slice->length, vector) == 0) {
        return part_object(self, vector);
    }
    for (i = 0; i < self->total; i++) {
        Py_XDECREF(vector[i]);
    }
    return NULL;
}

/* Marks, then the part. New reference or NULL. */
static PyObject *
part_begin(oomkit_chunks *self)
{
    oomkit_call *call = &self->call;
    PyObject *part; /* owned */

    oomkit_savepoint_end_attempt(call);
    if (oomkit_savepoint_take(call) < 0 ||
        (call->cut->at > 0 && part_remark(self) < 0)) {
        return NULL;
    }
    self->part_baseline_bytes = oomkit_device_allocated(self->st, call->device);
    part = part_build(self);
    if (part != NULL && oomkit_chunks_hand_out(self) < 0) {
        Py_CLEAR(part);
    }
    return part;
}

/* --- after a part --- */

/* A part that could not even be cut (a splitter that copies): like one that failed. 1
 * with everything noted, or 0 with the exception in flight. */
static int
part_build_failed(oomkit_chunks *self)
{
    oomkit_call *call = &self->call;
    OWNED PyObject *exception = NULL;

    if (!oomkit_exception_is_oom(self->st) || call->cut->count == 0) {
        return 0;
    }
    exception = oomkit_exception_take();
    if (oomkit_recover_note(call, exception) < 0) {
        return 0;
    }
    oomkit_exception_discard(self->st, STEAL(exception));
    return 1;
}

/* The exception of the failed part is gone by now: memory back, and a smaller plan. 0
 * or -1. */
static int
part_again(oomkit_chunks *self)
{
    oomkit_call *call = &self->call;
    int status, phase = oomkit_phase_set(self->st, OOMKIT_PHASE_RECOVERY);

    self->failed = 0;
    oomkit_baseline_else(call, self->part_baseline_bytes);
    status = oomkit_replan_failed(call, OOMKIT_KEEP_HANDED, self->part_baseline_bytes);
    if (status > 0) {
        status = oomkit_chunks_exhausted(self);
    }
    oomkit_phase_set(self->st, phase);
    oomkit_call_lost(call);
    return status;
}

/* Rows of a body without a guard are not handed out again: said once. 0 or -1. */
static int
part_unguarded(oomkit_chunks *self)
{
    if (self->guards > 0 || self->st->chunks_out != NULL ||
        self->st->chunks_handed != self->handed) { /* one of two loops has the guard */
        return 0;
    }
    if (!oomkit_say_once(self->site, OOMKIT_SAID_UNGUARDED)) {
        return 0;
    }
    return oomkit_warn(
        self->st->OomkitWarning, 1,
        "%U: the body of the loop has no `with oomkit.guard():`, so an out-of-memory "
        "error ends the loop; put the body into that block" SEE("chunks"),
        self->options.label);
}

/* What became of the part that was out. 0 or -1. */
static int
part_settle(oomkit_chunks *self)
{
    oomkit_call *call = &self->call;

    oomkit_chunks_take_in(self);
    if (self->failed) {
        return part_again(self);
    }
    if (oomkit_hooks_check(call) < 0) {
        return -1;
    }
    oomkit_savepoint_notes_end(call);
    oomkit_buffers_learn(call);
    call->cut->at++;
    call->tries.started_ns = oomkit_now_ns();
    return part_unguarded(self);
}

/* --- the iterator --- */

static PyObject *
next_inside(oomkit_chunks *self)
{
    oomkit_call *call = &self->call;
    PyObject *part; /* owned */

    if (self->stage == OOMKIT_CHUNKS_FRESH) {
        int begun = chunks_begin(self);
        if (begun <= 0) {
            return NULL;
        }
    } else if (self->out && part_settle(self) < 0) {
        return NULL;
    }
    for (;;) {
        if (call->cut->at >= call->cut->count) {
            return NULL;
        }
        part = part_begin(self);
        if (part != NULL || !part_build_failed(self)) {
            return part;
        }
        if (part_again(self) < 0) {
            return NULL;
        }
    }
}

PyObject *
oomkit_chunks_next(oomkit_chunks *self)
{
    PyObject *part; /* owned */

    if (self->busy) {
        return oomkit_raise(
            PyExc_ValueError,
            "%U is asked for a part while it prepares or restores one" SEE("chunks"),
            self->options.label);
    }
    if (self->stage == OOMKIT_CHUNKS_CLOSED) {
        return NULL;
    }
    self->busy = 1;
    part = next_inside(self);
    self->busy = 0;
    if (part == NULL) {
        oomkit_chunks_close(self, !PyErr_Occurred());
    }
    return part;
}

void
oomkit_chunks_close(oomkit_chunks *self, int finished)
{
    oomkit_call *call = &self->call;

    oomkit_chunks_take_in(self);
    if (self->stage != OOMKIT_CHUNKS_RUNNING) {
        self->stage = OOMKIT_CHUNKS_CLOSED;
        return;
    }
    self->stage = OOMKIT_CHUNKS_CLOSED;
    KEEPING_EXCEPTION {
        if (call->cut->count > 0) {
            oomkit_chunks_learn(self, finished);
        }
        oomkit_call_free(call);
        call->cut->slices = NULL;
        call->parts = NULL;
    }
}
