/* Normalisations: which of them couple the samples of a batch, and which move running
 * statistics. */
#include "call.h"

/* Has a normalisation running statistics? Without them it uses those of the batch in
 * eval mode too. 1, 0 or -1. */
static int
norm_is_tracked(oomkit_state *st, PyObject *module)
{
    static const char *const names[] = {"running_mean", "running_var"};
    PyObject *dict = PyObject_GetAttr(module, st->str_buffers); /* owned */
    int i, tracked = dict == NULL ? -1 : 0;

    for (i = 0; tracked == 0 && i < 2; i++) {
        PyObject *buffer =
            PyDict_Check(dict) ? PyDict_GetItemString(dict, names[i]) : NULL;
        tracked = buffer != NULL && buffer != Py_None;
    }
    Py_XDECREF(dict);
    return tracked;
}

/* Does forward normalise by the batch (`moves` 0), or move running statistics (1)? 1,
 * 0 or -1. */
static int
norm_is_at_work(oomkit_state *st, const oomkit_buffered *entry, PyObject *module,
                int moves)
{
    int training = oomkit_module_is_training(st, module), tracked;

    if (training < 0 || (entry->is_norm == OOMKIT_NORM_SAMPLE && !moves)) {
        return training < 0 ? -1 : 0;
    }
    if (training && !moves) {
        return 1;
    }
    tracked = norm_is_tracked(st, module);
    return tracked < 0 ? -1 : moves ? training && tracked : !tracked;
}

/* The first such: 1 and *which (owned, unless NULL), 0, -1. */
static int
norm_find(oomkit_call *call, int moves, PyObject **which)
{
    oomkit_participants *parts = call->parts;
    Py_ssize_t i;
    int found = 0;

    for (i = 0; found == 0 && i < parts->buffered_count; i++) {
        const oomkit_buffered *entry = &parts->buffered[i];
        PyObject *module; /* owned */
        if (!entry->is_norm) {
            continue;
        }
        module = oomkit_reference_get(entry->ref);
        if (module == NULL) {
            continue;
        }
        found = norm_is_at_work(call->st, entry, module, moves);
        if (found > 0 && which != NULL) {
            *which = Py_NewRef(module);
        }
        Py_DECREF(module);
    }
    return found;
}

int
oomkit_buffers_norm(oomkit_call *call, int moves)
{
    return norm_find(call, moves, NULL);
}

/* Once per site: normalisation over a micro-batch is not that over the batch. 0 or -1.
 */
int
oomkit_buffers_say_norm(oomkit_call *call)
{
    oomkit_state *st = call->st;
    PyObject *module = NULL; /* owned */
    int found = call->parts->norm_said ? 0 : norm_find(call, 0, &module);
    int training = found > 0 ? oomkit_module_is_training(st, module) : 0;

    if (found > 0 && training >= 0) {
        call->parts->norm_said = 1;
        found = oomkit_warn(
            st->OomkitWarning, 2,
            "oomkit: the batch is split and %s %s: its statistics are those of each "
            "micro-batch, not of the whole batch; use a normalisation without batch "
            "statistics (GroupNorm, LayerNorm)%s" SEE("batch-norm"),
            Py_TYPE(module)->tp_name,
            training ? "is in training mode"
                     : "has no running statistics (track_running_stats=False)",
            training ? " or put it in eval mode where this matters" : "");
    }
    Py_XDECREF(module);
    return training < 0 ? -1 : found;
}
