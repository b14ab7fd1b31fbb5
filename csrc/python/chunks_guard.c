/* Which guard ends the out-of-memory error of which loop: the one whose block is in the
 * body of the loop that has a part now, in the same frame and thread, and behind which
 * nothing of the body follows. Everything else passes as it came, with a note. */
#include "chunks.h"
#include "errors.h"

#define MASKED_RETRIES 2

/* --- parts that are out --- */

static void
frames_clear(oomkit_chunks *self)
{
    int i;
    for (i = 0; i < OOMKIT_CHUNKS_FRAMES; i++) {
        Py_CLEAR(self->frames[i].frame);
    }
}

/* Where the part goes: to a loop of this frame, or through a generator to one of the
 * frame that the generator runs for. */
static void
frames_note(oomkit_chunks *self)
{
    PyFrameObject *frame = PyEval_GetFrame(); /* borrowed, then owned */
    int i;

    frames_clear(self);
    Py_XINCREF(frame);
    for (i = 0; frame != NULL && i < OOMKIT_CHUNKS_FRAMES; i++) {
        PyCodeObject *code = PyFrame_GetCode(frame); /* owned */
        int is_generator = (code->co_flags & CO_GENERATOR) != 0;
        Py_DECREF(code);
        self->frames[i].frame = (PyObject *)frame; /* owned */
        self->frames[i].instruction = PyFrame_GetLasti(frame);
        frame = is_generator ? PyFrame_GetBack(frame) : NULL;
    }
    Py_XDECREF(frame);
}

int
oomkit_chunks_hand_out(oomkit_chunks *self)
{
    oomkit_state *st = self->st;

    frames_note(self);
    self->thread = PyThread_get_thread_ident();
    self->engine_runs = oomkit_backward_runs();
    self->part++;
    self->guards = self->failed = 0;
    self->out = 1;
    self->newer = NULL;
    self->older = st->chunks_out;
    if (self->older != NULL) {
        self->older->newer = self;
    }
    st->chunks_out = self;
    return 0;
}

void
oomkit_chunks_take_in(oomkit_chunks *self)
{
    if (!self->out) {
        return;
    }
    self->out = 0;
    if (self->newer != NULL) {
        self->newer->older = self->older;
    } else {
        self->st->chunks_out = self->older;
    }
    if (self->older != NULL) {
        self->older->newer = self->newer;
    }
    self->newer = self->older = NULL;
    frames_clear(self);
}

/* --- guards --- */

static const oomkit_chunks_frame *
frame_of(const oomkit_chunks *self, const void *frame)
{
    int i;
    for (i = 0; frame != NULL && i < OOMKIT_CHUNKS_FRAMES; i++) {
        if (self->frames[i].frame == frame) {
            return &self->frames[i];
        }
    }
    return NULL;
}

PyObject *
oomkit_chunks_guard_enter(oomkit_state *st, uint64_t *part, int *order)
{
    unsigned long thread = PyThread_get_thread_ident();
    void *frame = PyEval_GetFrame();      /* borrowed, compared */
    oomkit_chunks *self = st->chunks_out; /* borrowed */

    for (; self != NULL; self = self->older) {
        if (self->thread == thread && !self->failed && frame_of(self, frame) != NULL) {
            *part = self->part;
            *order = ++self->guards;
            return Py_NewRef((PyObject *)self);
        }
    }
    return NULL;
}

void
oomkit_chunks_guard_passed(PyObject *chunks, uint64_t part, int order,
                           const oomkit_peak_window *peak)
{
    oomkit_chunks *self = chunks_CAST(chunks);
    const oomkit_device *device = &self->call.device;

    if (self->out && self->part == part && order == 1) {
        int same =
            peak->device.type == device->type &&
            (device->type == OOMKIT_DEVICE_CPU || peak->device.index == device->index);
        oomkit_chunks_measured(self,
                               same ? peak->peak_allocated_bytes : OOMKIT_UNKNOWN);
    }
}

/* Is the next thing after the block the loop's request for another part? 1, 0 or -1. */
static int
nothing_follows(const oomkit_chunks *self)
{
    PyFrameObject *frame = PyEval_GetFrame(); /* borrowed */
    const oomkit_chunks_frame *where = frame_of(self, frame);
    PyCodeObject *code;    /* owned */
    PyObject *next = NULL; /* owned */
    long instruction;

    if (where == NULL) {
        return 0;
    }
    code = PyFrame_GetCode(frame);
    next = PyObject_CallFunction(self->st->loop_after, "Oi", code,
                                 PyFrame_GetLasti(frame));
    Py_DECREF(code);
    if (next == NULL) {
        return -1;
    }
    instruction = PyLong_AsLong(next);
    Py_DECREF(next);
    if (instruction == -1 && PyErr_Occurred()) {
        return -1;
    }
    return instruction >= 0 && instruction == where->instruction;
}

/* Why the rows are not handed out again: static text, or NULL. 0 or -1. */
static int
failed_refusal(const oomkit_chunks *self, uint64_t part, int order, const char **why)
{
    int follows;

    *why = NULL;
    if (!self->out || self->part != part) {
        *why =
            "the loop has asked for another part inside the guarded block: ask at the "
            "head of the loop alone";
        return 0;
    }
    if (order > 1) {
        *why = "another guarded block of the same body came before this one, and would "
               "run again for these rows: put the body into one block";
        return 0;
    }
    if (oomkit_backward_runs() != self->engine_runs) {
        *why = "a backward() has run in this part, and gradients may hold some of its "
               "rows: for training decorate the step with @oomkit.auto_batch";
        return 0;
    }
    follows = nothing_follows(self);
    if (follows == 0) {
        *why = "code of the loop's body follows the guarded block (or it is no for "
               "loop), and would run for rows that have failed: move it into the block";
    }
    return follows < 0 ? -1 : 0;
}

/* The OOM stays the caller's; the note says why. 0 always. */
static int
failed_pass(const oomkit_chunks *self, PyObject *exception, const char *why)
{
    PyObject *note = PyUnicode_FromFormat("oomkit: %U does not hand these rows out "
                                          "again: %s",
                                          self->options.label, why); /* owned */
    PyObject *done =                                                 /* owned */
        note == NULL ? NULL : PyObject_CallMethod(exception, "add_note", "O", note);

    if (done == NULL) {
        PyErr_WriteUnraisable(exception); /* the exception itself tells more */
    }
    Py_XDECREF(note);
    Py_XDECREF(done);
    return 0;
}

int
oomkit_chunks_guard_failed(PyObject *chunks, uint64_t part, int order,
                           PyObject *exception, PyObject *handled)
{
    oomkit_chunks *self = chunks_CAST(chunks);
    oomkit_call *call = &self->call;
    oomkit_class class_ = oomkit_exception_classify(self->st, exception);
    const char *why;
    int status, phase;

    if (class_ != OOMKIT_CLASS_CERTAIN &&
        (class_ != OOMKIT_CLASS_MASKED || call->ooms >= MASKED_RETRIES)) {
        return 0;
    }
    if (failed_refusal(self, part, order, &why) < 0) {
        return -1;
    }
    if (why != NULL) {
        return failed_pass(self, exception, why);
    }
    if (oomkit_recover_note(call, exception) < 0) {
        return -1;
    }
    /* Of the exception nothing is left but itself: the interpreter drops it as soon as
     * the block is left. */
    oomkit_exception_drop(self->st, Py_NewRef(exception), handled);
    phase = oomkit_phase_set(self->st, OOMKIT_PHASE_RECOVERY);
    status = oomkit_recover_roll_back(call);
    oomkit_phase_set(self->st, phase);
    self->failed = status == 0;
    return status < 0 ? -1 : 1;
}
