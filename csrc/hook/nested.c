/* Backwards inside backwards, while the batch is split. One that a custom Function runs
 * in its own backward (reentrant checkpoint) takes its gradient from the outer one,
 * weight included. One that a hook runs starts from a loss of its own: it would carry
 * no weight. The Python frames between the two tell them apart. */
#include "hook.h"
#include "../py/errors.h"

#include <stdatomic.h>

/* The frame that entered the innermost engine of this thread; only ever compared. */
static _Thread_local void *engine_frame;

/* Split calls inside their backward, in any thread: on an accelerator hooks run in
 * threads of the engine's own, which know of no call. */
static _Atomic int split_engines;

/* Before the engine runs; gives what oomkit_nested_leave() wants back. */
void *
oomkit_nested_enter(const oomkit_call *call)
{
    void *outer = engine_frame;

    if (call != NULL && call->split) {
        engine_frame = PyEval_GetFrame();
        atomic_fetch_add(&split_engines, 1);
    }
    return outer;
}

void
oomkit_nested_leave(const oomkit_call *call, void *outer)
{
    if (call != NULL && call->split) {
        engine_frame = outer;
        atomic_fetch_sub(&split_engines, 1);
    }
}

int
oomkit_nested_any(void)
{
    return atomic_load(&split_engines) > 0;
}

/* Is this the frame from which torch calls a custom Function's backward? 1, 0 or -1
 * with an exception. */
static int
nested_is_function(PyFrameObject *frame)
{
    OWNED PyObject *code = (PyObject *)PyFrame_GetCode(frame);
    OWNED PyObject *globals = PyFrame_GetGlobals(frame);
    PyObject *module = oomkit_item(globals, "__name__"); /* borrowed */
    const char *name;

    if (module == NULL || !PyUnicode_Check(module) ||
        PyUnicode_CompareWithASCIIString(module, "torch.autograd.function") != 0) {
        return 0;
    }
    name = PyUnicode_AsUTF8(((PyCodeObject *)code)->co_qualname);
    return name == NULL ? -1 : strncmp(name, "BackwardCFunction.", 18) == 0;
}

int
oomkit_nested_in_engine(const oomkit_state *st)
{
    OWNED PyObject *id = NULL;
    long number = -1;

    if (st->graph_task_id == NULL) {
        return 0;
    }
    id = PyObject_CallNoArgs(st->graph_task_id);
    if (id != NULL) {
        number = PyLong_AsLong(id);
    }
    if (number == -1 && PyErr_Occurred()) {
        oomkit_error_unraised(st->graph_task_id); /* it takes and gives a number only */
    }
    return number != -1;
}

/* Is a custom Function's backward among the frames from here to `last` (NULL: to the
 * outermost)? 1, 0 or -1 with an exception. */
static int
nested_has_function(const void *last)
{
    PyFrameObject *frame = (PyFrameObject *)Py_XNewRef(PyEval_GetFrame()); /* owned */
    int function = 0;

    while (frame != NULL && (const void *)frame != last && !function) {
        function = nested_is_function(frame);
        if (function == 0 && oomkit_frame_back(&frame) < 0) {
            function = -1;
        }
    }
    Py_XDECREF(frame);
    return function;
}

int
oomkit_nested_is_functions(void)
{
    return nested_has_function(NULL);
}

/* A backward that is no outermost one of a call (`call` may be NULL). 0, or -1 with
 * SplitError when it starts in a hook of a backward that is split. */
int
oomkit_nested_refuse(oomkit_state *st, oomkit_call *call)
{
    OWNED PyObject *where = NULL;
    int inside;

    if (call != NULL) {
        inside = call->split && oomkit_backward_nesting() > 0;
    } else {
        inside = oomkit_nested_in_engine(st);
    }
    if (inside <= 0) {
        return inside;
    }
    inside = nested_has_function(call == NULL ? NULL : engine_frame);
    if (inside != 0) {
        return inside < 0 ? -1 : 0;
    }
    where = oomkit_where();
    if (where == NULL) {
        return -1;
    }
    if (call != NULL) {
        call->refused.raised = 1;
    }
    oomkit_raise(st->SplitError,
                 "auto_batch cannot split this step: backward() is called at %U by a "
                 "hook inside another backward(), where it does not get the weight of "
                 "the micro-batch; add that loss to the loss of the step, or call "
                 "backward() on it in the step itself" SEE("backward-in-hook"),
                 where);
    return -1;
}
