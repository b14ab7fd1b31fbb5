/* torch.compile(): while a function that it has made runs, every Python frame below is
 * compiled on this thread, also those of oomkit, of logging and of warnings between a
 * failure and a replay. That takes seconds, warns of graph breaks in code that is not
 * the user's, and is an error with fullgraph=True. So it is put off while a call is
 * recovered, and on again while the step itself runs. */
#include "call.h"

/* Runs set_eval_frame(wanted). What was there before: new reference or NULL. */
static PyObject *
compiler_set(oomkit_call *call, PyObject *wanted)
{
    PyObject *exception = oomkit_exception_take(); /* owned, given back */
    PyObject *before = PyObject_CallOneArg(call->st->set_eval_frame, wanted);

    if (exception != NULL) {
        if (before == NULL) {
            oomkit_error_dismiss(); /* the exception in flight is the one to tell */
            before = Py_NewRef(Py_None);
        }
        oomkit_exception_give(exception);
    }
    return before;
}

int
oomkit_compiler_off(oomkit_call *call)
{
    if (call->st->set_eval_frame == NULL || call->compiler != NULL) {
        return 0;
    }
    call->compiler = compiler_set(call, Py_None);
    return call->compiler == NULL ? -1 : 0;
}

int
oomkit_compiler_on(oomkit_call *call)
{
    OWNED PyObject *before = NULL, *wanted = call->compiler;

    if (wanted == NULL) {
        return 0;
    }
    call->compiler = NULL;
    before = compiler_set(call, wanted);
    return before == NULL ? -1 : 0;
}
