/* Which guard ends the out-of-memory error of which loop: the one whose block is in the
 * body of the loop that has a part now, in the same frame and thread, and behind which
 * nothing of the body follows. Everything else passes as it came, with a note. */
#include "chunks.h"
#include "guard.h"
#include "../engine/engine.h"
#include "../hook/hook.h"
#include "../py/tensor.h"
#include "../undo/undo.h"

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
 * frame that the generator runs for. 0 or -1. */
static int
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
    if (frame == NULL && PyErr_Occurred()) {
        frames_clear(self); /* the object of a frame could not be made */
        return -1;
    }
    Py_XDECREF(frame);
    return 0;
}

int
oomkit_chunks_hand_out(oomkit_chunks *self)
{
    oomkit_state *st = self->st;

    if (frames_note(self) < 0) {
        return -1;
    }
    self->thread = PyThread_get_thread_ident();
    self->engine_runs = oomkit_backward_runs();
    self->part++;
    self->handed = ++st->chunks_handed;
    self->guards = self->failed = 0;
    oomkit_chunks_share_nothing(self);
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
    oomkit_chunks_share_nothing(self);
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

/* What the body may change: the declared participants go back with the part, and parts
 * are of the batch as it was at entry. New reference to a tuple, or NULL. */
static PyObject *
body_kept(const oomkit_chunks *self)
{
    PyObject *declared = self->options.participants; /* borrowed, or NULL */
    Py_ssize_t n = declared == NULL ? 0 : PyTuple_GET_SIZE(declared), i;
    PyObject *kept = PyTuple_New(n + self->total); /* owned */

    for (i = 0; kept != NULL && i < n + self->total; i++) {
        PyTuple_SET_ITEM(
            kept, i,
            Py_NewRef(i < n ? PyTuple_GET_ITEM(declared, i) : self->args[i - n]));
    }
    return kept;
}

/* The generators that the part went through to the loop at `where`, each with its frame
 * and the instruction that asked. New reference to a tuple, or NULL. */
static PyObject *
generators_of(const oomkit_chunks *self, const oomkit_chunks_frame *where)
{
    Py_ssize_t n = where - self->frames, i;
    PyObject *found = PyTuple_New(n); /* owned */

    for (i = 0; found != NULL && i < n; i++) {
        PyFrameObject *frame = (PyFrameObject *)self->frames[i].frame; /* borrowed */
        OWNED PyObject *generator =
            PyFrame_GetGenerator(frame); /* NULL: it has ended */
        PyObject *one =                  /* owned */
            Py_BuildValue("OOi", generator == NULL ? Py_None : generator, frame,
                          self->frames[i].instruction);
        if (one == NULL) {
            Py_CLEAR(found);
        } else {
            PyTuple_SET_ITEM(found, i, one);
        }
    }
    return found;
}

/* May the body run again for its rows? 1; 0 with *why (owned str) where it may not; -1.
 */
static int
body_judge(const oomkit_chunks *self, PyObject *exception, PyObject **why)
{
    PyFrameObject *frame = PyEval_GetFrame(); /* borrowed */
    const oomkit_chunks_frame *where = frame_of(self, frame);
    OWNED PyObject *kept = where == NULL ? NULL : body_kept(self);
    OWNED PyObject *generators = kept == NULL ? NULL : generators_of(self, where);
    OWNED PyObject *answer = NULL;
    long instruction = -1;

    if (where != NULL && generators == NULL) {
        return -1;
    }
    answer = where == NULL ? PyLong_FromLong(-1)
                           : PyObject_CallFunction(self->st->loop_judge, "OiOOOO",
                                                   frame, PyFrame_GetLasti(frame),
                                                   exception, self, kept, generators);
    if (answer == NULL) {
        return -1;
    }
    if (PyUnicode_Check(answer)) {
        *why = STEAL(answer);
        return 0;
    }
    instruction = PyLong_AsLong(answer);
    if (instruction == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (instruction >= 0 && instruction == where->instruction) {
        return 1;
    }
    *why = PyUnicode_FromString(
        "code of the loop's body follows the guarded block (or the loop is not a for "
        "loop) and would run for rows that have failed: move it into the block");
    return *why == NULL ? -1 : 0;
}

/* Do two loops share one for statement? Then the other one would go on to its next
 * part.
 */
static int
has_partner(const oomkit_chunks *self)
{
    const oomkit_chunks_frame *where = frame_of(self, PyEval_GetFrame());
    const oomkit_chunks *other = self->st->chunks_out;

    for (; where != NULL && other != NULL; other = other->older) {
        const oomkit_chunks_frame *there = frame_of(other, where->frame);
        if (other != self && there != NULL &&
            there->instruction == where->instruction) {
            return 1;
        }
    }
    return 0;
}

/* The same, with what is known without looking at the code. */
static int
failed_judge(const oomkit_chunks *self, uint64_t part, int order, PyObject *exception,
             PyObject **why)
{
    const char *text = NULL;

    if (self->shared != NULL) {
        *why = Py_NewRef(self->shared);
        return 0;
    }
    if (!self->out || self->part != part) {
        text = "the loop has asked for another part inside the guarded block: ask at "
               "the head of the loop alone";
    } else if (order > 1) {
        text = "another guarded block of the same body came before this one, and would "
               "run again for these rows: put the body into one block";
    } else if (has_partner(self)) {
        text = "two loops share one for statement (zip): give both batches to one "
               "chunks()";
    } else if (oomkit_backward_runs() != self->engine_runs) {
        text = "a backward() has run in this part, and gradients may hold some of its "
               "rows: for training decorate the step with @oomkit.auto_batch";
    }
    if (text == NULL) {
        return body_judge(self, exception, why);
    }
    *why = PyUnicode_FromString(text);
    return *why == NULL ? -1 : 0;
}

/* The OOM stays the caller's; the note says why. */
static void
failed_pass(const oomkit_chunks *self, PyObject *exception, PyObject *why)
{
    OWNED PyObject *note =
        PyUnicode_FromFormat("oomkit: %U does not repeat these rows: %U" SEE("chunks"),
                             self->options.label, why);
    OWNED PyObject *done =
        note == NULL ? NULL : PyObject_CallMethod(exception, "add_note", "O", note);

    if (done == NULL) {
        oomkit_error_unraised(exception); /* the exception itself tells more */
    }
}

int
oomkit_chunks_guard_failed(PyObject *chunks, uint64_t part, int order,
                           PyObject *exception, PyObject *handled)
{
    oomkit_chunks *self = chunks_CAST(chunks);
    oomkit_call *call = &self->call;
    oomkit_class class_ = oomkit_exception_classify(self->st, exception);
    OWNED PyObject *why = NULL;
    int status, phase;

    if (!oomkit_oom_is_retried(class_, call->tries.ooms + 1)) {
        return 0;
    }
    status = failed_judge(self, part, order, exception, &why);
    if (status <= 0) {
        if (status == 0) {
            failed_pass(self, exception, why);
        }
        return status;
    }
    if (oomkit_recover_note(call, exception) < 0) {
        return -1;
    }
    /* Of the exception nothing is left but itself: the interpreter drops it as soon as
     * the block is left. */
    oomkit_exception_drop(self->st, Py_NewRef(exception), handled);
    phase = oomkit_phase_set(self->st, OOMKIT_PHASE_RECOVERY);
    self->busy = 1; /* participants are the user's */
    status = oomkit_recover_roll_back(call);
    if (status == 0) { /* set_grad_enabled() of the body; contexts have been left */
        status = oomkit_modes_entry_back(call);
    }
    self->busy = 0;
    oomkit_phase_set(self->st, phase);
    self->failed = status == 0;
    return status < 0 ? -1 : 1;
}
