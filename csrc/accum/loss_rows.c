/* Results with a row per sample that are run again for their backward: beside the rows
 * that the call had returned. */
#include "weights.h"
#include "../call/call_types.h"
#include "../py/tensor.h"

void
oomkit_loss_rows_take(oomkit_state *st, PyObject *tensor, oomkit_loss *loss)
{
    if (oomkit_tensor_version(st, tensor, &loss->version) == 0) {
        loss->tensor = PyObject_CallMethodNoArgs(tensor, st->str_detach);
    }
    if (loss->tensor == NULL) {
        oomkit_error_dismiss(); /* what cannot be read is not compared */
    }
}

/* Is it still what the call had returned? */
static int
rows_are_there(oomkit_state *st, const oomkit_loss *whole)
{
    uint32_t version;

    if (whole->tensor == NULL) {
        return 0;
    }
    if (oomkit_tensor_version(st, whole->tensor, &version) < 0) {
        oomkit_error_dismiss(); /* it cannot be read, then */
        return 0;
    }
    return version == whole->version;
}

int
oomkit_losses_rows(oomkit_call *call, PyObject *result, const oomkit_loss *whole)
{
    oomkit_losses *l = &call->cut->losses;
    OWNED PyObject *done = NULL;

    if (call->options->verify == 0) {
        return 0;
    }
    if (call->cut->at == 0) {
        Py_CLEAR(l->rows);
        if (!rows_are_there(call->st, whole)) {
            return 0;
        }
    } else if (l->rows == NULL) {
        return 0;
    }
    EXEMPT (call->st) {
        if (l->rows == NULL) {
            l->rows = PyObject_CallOneArg(call->st->replay_rows, whole->tensor);
        }
        if (l->rows != NULL) {
            done =
                PyObject_CallMethod(l->rows, "add", "OLL", result,
                                    (long long)call->cut->slices[call->cut->at].start,
                                    (long long)call->options->dim);
        }
    }
    return done == NULL ? -1 : 0;
}

int
oomkit_losses_rows_judge(oomkit_call *call, int noise)
{
    OWNED PyObject *text = NULL;

    EXEMPT (call->st) {
        text = PyObject_CallMethod(call->cut->losses.rows, "judge", "i", noise);
    }
    return oomkit_losses_replay_differs(call, text, noise);
}
