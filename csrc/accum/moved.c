/* What moves once per batch must not move in a micro-batch that is not the last; but
 * for parameters that each moves alike, as the whole batch does: averages of the
 * weights in a module of their own, weights that are clipped. They are as at entry in
 * each, where the runs of a proof have shown it, and move by what the last one does. */
#include "accum.h"
#include "../call/step.h"
#include "../optim/optim.h"
#include "../plain/alike.h"
#include "../undo/parameters.h"
#include "../undo/undo.h"

/* A parameter that was replaced in its module. 0, or -1 with SplitError. */
static int
moved_slots(oomkit_call *call)
{
    PyObject *key = NULL; /* borrowed */
    int changed = oomkit_param_slots_changed(call, &key);

    if (changed <= 0) {
        return changed;
    }
    return oomkit_refuse_step(
        call,
        "the step replaces parameter %R of a module in micro-batch %lld of %lld. "
        "Replace it outside the decorated step" SEE("parameters-changed"),
        key, (long long)(call->cut->at + 1), (long long)call->cut->count);
}

static int
moved_schedulers(oomkit_call *call)
{
    PyObject *scheduler = NULL; /* borrowed */
    int moved = oomkit_owners_epochs_moved(call, &scheduler);

    if (moved <= 0) {
        return moved;
    }
    return oomkit_refuse_step(
        call,
        "%s.step() ran in micro-batch %lld of %lld, because oomkit could not delay it "
        "to the end of the batch. Call it as scheduler.step(), or after the decorated "
        "step" SEE("step-not-delayed"),
        Py_TYPE(scheduler)->tp_name, (long long)(call->cut->at + 1),
        (long long)call->cut->count);
}

/* --- parameters that each micro-batch moves alike --- */

/* What a parameter holds. New reference, None where it is too large, or NULL. */
static PyObject *
moved_value(oomkit_call *call, Py_ssize_t i)
{
    OWNED PyObject *copies = NULL;

    EXEMPT (call->st) {
        copies = PyObject_CallOneArg(call->st->value_copies, call->parts->params[i]);
    }
    return STEAL(copies);
}

static oomkit_slice
moved_rows(const oomkit_call *call)
{
    const oomkit_slice *slices = call->cut->slices;
    const oomkit_slice *last = &slices[call->cut->count - 1];

    return (oomkit_slice){slices->start, last->start + last->length - slices->start};
}

/* What the whole rows of a proof have moved, of parameters that no optimizer has: what
 * moves others is an update. 0 or -1. */
static int
moved_note_whole(oomkit_call *call, const uint8_t *moved)
{
    OWNED PyObject *whole = PyDict_New(), *others = oomkit_params_of_optimizers(call);
    Py_ssize_t i;

    if (whole == NULL || others == NULL) {
        return -1;
    }
    for (i = 0; call->training && i < call->parts->param_count; i++) {
        OWNED PyObject *number = NULL, *value = NULL, *address = NULL;
        int has;
        if (!moved[i]) {
            continue;
        }
        address = PyLong_FromVoidPtr(call->parts->params[i]);
        has = address == NULL ? -1 : PySet_Contains(others, address);
        if (has != 0) {
            if (has < 0) {
                return -1;
            }
            continue;
        }
        number = PyLong_FromSsize_t(i);
        value = moved_value(call, i);
        if (number == NULL || value == NULL ||
            PyDict_SetItem(whole, number, value) < 0) {
            return -1;
        }
    }
    call->cut->moved.rows = moved_rows(call);
    Py_XSETREF(call->cut->moved.whole, STEAL(whole));
    return 0;
}

/* Has it been moved to what the whole rows have moved it to? 1, 0; 2 these rows had no
 * whole run; -1. */
static int
moved_as_whole(oomkit_call *call, Py_ssize_t i)
{
    const oomkit_slice rows = moved_rows(call), *of = &call->cut->moved.rows;
    OWNED PyObject *number = NULL, *value = NULL, *same = NULL;
    PyObject *whole; /* borrowed */

    if (call->cut->moved.whole == NULL || of->start != rows.start ||
        of->length != rows.length) {
        return 2;
    }
    number = PyLong_FromSsize_t(i);
    whole =
        number == NULL ? NULL : PyDict_GetItemWithError(call->cut->moved.whole, number);
    if (whole == NULL || whole == Py_None) {
        return PyErr_Occurred() ? -1 : 0;
    }
    value = moved_value(call, i);
    EXEMPT (call->st) {
        same = value == NULL ? NULL
                             : PyObject_CallFunctionObjArgs(call->st->same_copies,
                                                            whole, value, NULL);
    }
    return same == NULL ? -1 : same == Py_True;
}

/* Has a proof shown that each micro-batch moves it alike? 1, 0 or -1. */
static int
moved_known(const oomkit_call *call, Py_ssize_t i)
{
    PyObject *param = call->parts->params[i], *known = NULL; /* borrowed */
    OWNED PyObject *address = NULL;

    if (call->step->averaged == NULL) {
        return 0;
    }
    address = PyLong_FromVoidPtr(param);
    known =
        address == NULL ? NULL : PyDict_GetItemWithError(call->step->averaged, address);
    return known == NULL ? (PyErr_Occurred() ? -1 : 0)
                         : PyWeakref_GET_OBJECT(known) == param;
}

static int
moved_learn(oomkit_call *call, Py_ssize_t i, int alike)
{
    PyObject **known = &call->step->averaged;
    OWNED PyObject *address = PyLong_FromVoidPtr(call->parts->params[i]);
    OWNED PyObject *weak = PyWeakref_NewRef(call->parts->params[i], NULL);

    if (address == NULL || weak == NULL ||
        (*known == NULL && (*known = PyDict_New()) == NULL)) {
        return -1;
    }
    if (alike) {
        return PyDict_SetItem(*known, address, weak);
    }
    return PyDict_Contains(*known, address) > 0 ? PyDict_DelItem(*known, address) : 0;
}

/* All that have moved are as at entry again, if each micro-batch moves them so. 1, 0 or
 * -1. */
static int
moved_back(oomkit_call *call)
{
    OWNED_MEMORY uint8_t *moved = oomkit_params_all_moved(call);
    Py_ssize_t i, count = 0;
    int back = moved == NULL ? -1 : 1;

    for (i = 0; back > 0 && i < call->parts->param_count; i++) {
        if (moved[i]) {
            count++;
            back = call->proof != NULL ? moved_as_whole(call, i) : 2;
            back = back == 2 ? moved_known(call, i) : back;
            back = back > 0 ? oomkit_param_copies_put_one(call, i) : back;
        }
    }
    if (back > 0 && call->proof == NULL && call->cut->at > 0 &&
        count != call->cut->moved.count) {
        return 0; /* some rows have moved others */
    }
    call->cut->moved.count = count;
    return back;
}

/* The last micro-batch of a proof: what the others and it have moved alike. 0 or -1. */
static int
moved_shown(oomkit_call *call)
{
    OWNED_MEMORY uint8_t *moved = NULL;
    Py_ssize_t i;
    int status = 0;

    if (call->st->value_copies == NULL) {
        return 0;
    }
    moved = oomkit_params_all_moved(call);
    if (moved == NULL) {
        return -1;
    }
    if (call->cut->count == 1) {
        return moved_note_whole(call, moved);
    }
    if (call->cut->moved.count == 0) {
        return 0; /* an update by hand: the last one has all gradients */
    }
    for (i = 0; status == 0 && i < call->parts->param_count; i++) {
        if (moved[i]) {
            status = moved_as_whole(call, i);
            status = status < 0 ? -1 : status == 2 ? 0 : moved_learn(call, i, status);
        }
    }
    return status;
}

/* The first of them, once: nothing compares what they are moved by in a call. 0 or -1.
 */
static int
moved_tell(oomkit_call *call, Py_ssize_t which)
{
    OWNED PyObject *name = NULL;

    if (call->proof != NULL || !oomkit_say_once(call->step, OOMKIT_SAID_AVERAGED)) {
        return 0;
    }
    name = oomkit_describe_tensor(call, call->parts->params[which]);
    if (name != NULL) {
        Py_SETREF(name, PyUnicode_FromFormat("%U (and others like it)", name));
    }
    return name == NULL ? -1 : oomkit_plain_moves_once(call, name);
}

/* The last micro-batch has moved as many of them as the others. 0 or -1. */
static int
moved_last(oomkit_call *call)
{
    OWNED_MEMORY uint8_t *moved = NULL;
    Py_ssize_t i, count = 0;

    if (call->step->averaged == NULL || !call->split || call->sequence_waived) {
        return 0;
    }
    moved = oomkit_params_all_moved(call);
    for (i = 0; moved != NULL && i < call->parts->param_count; i++) {
        const int known = moved[i] ? moved_known(call, i) : 0;
        if (known < 0) {
            return -1;
        }
        count += known;
    }
    if (moved == NULL || count == call->cut->moved.count) {
        return moved == NULL ? -1 : 0;
    }
    return oomkit_warn(
        call->st->OomkitWarning, 1,
        "oomkit: the batch of %U is split, and its last micro-batch has moved other "
        "parameters than the ones before it: %zd, not %zd. They are what it has made "
        "them. Guard with `if oomkit.current().is_last:` what depends on the rows" SEE(
            "side-effects"),
        call->options->label, count, call->cut->moved.count);
}

static void
moved_end(oomkit_call *call)
{
    Py_CLEAR(call->cut->moved.whole);
}

static int
moved_attempt_begins(oomkit_call *call)
{
    call->cut->moved.count = 0;
    return 0;
}

/* --- the rule --- */

/* At the end of a micro-batch that is not the last: nothing that is meant to move once
 * per batch may have moved. 0, or -1 with SplitError that names it. */
static int
moved_micro_ends(oomkit_call *call, PyObject *result)
{
    Py_ssize_t which = 0;
    OWNED PyObject *name = NULL;
    int state;

    (void)result;
    if (call->is_last && call->proof != NULL && moved_shown(call) < 0) {
        return -1;
    }
    if (call->is_last && call->proof == NULL && moved_last(call) < 0) {
        return -1;
    }
    if (call->is_last) {
        return oomkit_update_begun(call)               ? 0
               : oomkit_undone_buffers_check(call) < 0 ? -1
                                                       : oomkit_hooks_check(call);
    }
    state = oomkit_params_moved(call, &which);

    if (state == 0) {
        state = oomkit_params_rewritten(call, &which);
    }
    if (state == 0 && (moved_slots(call) < 0 || moved_schedulers(call) < 0)) {
        return -1;
    }
    if (state > 0 && !call->sequence_waived) {
        const int back = moved_back(call);
        state = back < 0 || (back && moved_tell(call, which) < 0) ? -1 : !back;
    } else if (state == 0) {
        state = call->cut->at > 0 && call->proof == NULL && call->cut->moved.count > 0;
    }
    if (state <= 0) {
        return state;
    }
    name = oomkit_describe_tensor(call, call->parts->params[which]);
    if (name == NULL) {
        return -1;
    }
    return oomkit_refuse_split(
        call,
        "%U was changed in micro-batch %lld of %lld by something other than a known "
        "optimizer. Pass the optimizer as optimizer=..., or guard the line with `if "
        "oomkit.current().is_last:`" SEE("parameters-changed"),
        name, (long long)(call->cut->at + 1), (long long)call->cut->count);
}

const oomkit_rule oomkit_moved_early_rule = {.attempt_begins = moved_attempt_begins,
                                             .micro_ends = moved_micro_ends,
                                             .call_ends = moved_end};
