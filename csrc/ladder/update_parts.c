/* step() in parts: called several times, each time with some of the parameters in
 * `param_groups` and with the others left out. Of an optimizer that treats parameters
 * one by one that is the same update, to the last bit.
 *
 * Before a part its parameters and state are copied to the host; a part that runs out
 * of memory is put back from there and tried again with fewer parameters. Where one
 * alone does not fit, the state of all is moved to the host (host_state.c) and each
 * part brings its own; then the same is done with gradients; then a parameter is
 * updated some rows at a time, where its optimizer computes element by element
 * (oomkit/_ladder/rows.py). Where that is not enough, all parts are put back.
 *
 * A class that somebody has declared may write to gradients, or to itself, which no
 * copy is made of: there all parts are put back at once, and the whole call is
 * repeated. */
#include "activations.h"
#include "ahead.h"
#include "ladder.h"
#include "update_room.h"
#include "../device/device.h"
#include "../optim/optim.h"
#include "../optim/update_part.h"
#include "../py/errors.h"
#include "../py/modes.h"
#include "../py/tensor.h"
#include "../sizes/sizes.h"
#include "../undo/undo.h"

#define SLICE_PEAK 12 /* times its bytes are the most that known updates of it take */
#define ONE_AGAIN 1   /* times that one parameter is tried again as it is */

typedef struct parts_run {
    oomkit_call *call;
    PyObject *optimizer; /* borrowed: the mark has it */
    int index;
    int repeats;               /* a part that failed may be repeated by itself */
    int is_other;              /* not in parts: a hook has changed what is updated */
    oomkit_part_param *params; /* owned memory */
    Py_ssize_t count;
    PyObject *hosted;     /* owned: the registry's; NULL: state stays there */
    PyObject *grads;      /* owned: the same of gradients, in this update alone */
    oomkit_ahead ahead;   /* state of the next part */
    uint64_t beside;      /* bytes that a part needs beside its state, at most */
    uint64_t part_bytes;  /* of the parameters of one part, at most */
    uint64_t makes;       /* bytes of state that this update makes */
    Py_ssize_t at;        /* parameters before it have been updated */
    Py_ssize_t most;      /* parameters of one part, after a failure */
    uint64_t slice_bytes; /* what is larger goes by rows, so many bytes; 0: nothing */
    int cut;              /* some part was no whole group, or had something moved */
    uint64_t peak;        /* of the parts, above what was there after them */
    PyObject *host_copy;  /* owned: function for new state, or NULL */
    PyObject *groups;     /* owned: list of the groups' dicts */
    PyObject *lists;      /* owned: list of their `params` */
    PyObject *none;       /* owned: an empty list, in place of those */
    PyObject *below;      /* borrowed: step() of a part */
    PyObject *args;       /* owned: (optimizer, *args) */
    PyObject *kwargs;     /* borrowed: dict */
    PyObject *result;     /* owned: of the last part */
} parts_run;

/* --- one part --- */

/* group["params"] of every group: those of a part in theirs, none in the others. */
static int
groups_set(const parts_run *run, Py_ssize_t group, PyObject *params)
{
    Py_ssize_t g;

    for (g = 0; g < PyList_GET_SIZE(run->groups); g++) {
        if (PyDict_SetItem(PyList_GET_ITEM(run->groups, g), run->call->st->str_params,
                           g == group ? params : run->none) < 0) {
            return -1;
        }
    }
    return 0;
}

/* As they were, the very lists. Keeps the exception in flight; the keys are there, so
 * that nothing is allocated. */
static int
groups_back(const parts_run *run)
{
    Py_ssize_t g;
    int result = 0;

    KEEPING_EXCEPTION {
        for (g = 0; g < PyList_GET_SIZE(run->groups); g++) {
            if (PyDict_SetItem(PyList_GET_ITEM(run->groups, g),
                               run->call->st->str_params,
                               PyList_GET_ITEM(run->lists, g)) < 0) {
                result = -1;
            }
        }
    }
    return result;
}

/* The present values of a parameter's state. New dict or NULL, without an exception
 * where there is none. */
static PyObject *
state_of(const parts_run *run, PyObject *param)
{
    OWNED PyObject *state = PyObject_GetAttr(run->optimizer, run->call->st->str_state);
    PyObject *values; /* borrowed from state */

    if (state == NULL || !PyDict_Check(state)) {
        return NULL;
    }
    values = PyDict_GetItemWithError(state, param);
    return values == NULL || !PyDict_Check(values) ? NULL : PyDict_Copy(values);
}

/* Gradients of the parameters of a part in, or out again. 0 or -1. */
static int
grads_move(const parts_run *run, Py_ssize_t at, Py_ssize_t count, int in)
{
    oomkit_state *st = run->call->st;
    Py_ssize_t i;
    uint64_t bytes = 0;

    for (i = at; run->grads != NULL && i < at + count; i++) {
        OWNED PyObject *grad = PyObject_GetAttr(run->params[i].param, st->str_grad);
        int moves = grad == NULL ? -1 : grad != Py_None;
        const Py_ssize_t there = PyDict_GET_SIZE(run->grads);
        if (moves < 0 ||
            (moves > 0 &&
             (in ? oomkit_host_move_in(run->call, run->grads, grad, NULL)
                 : oomkit_host_move_out(run->call, run->grads, grad, &bytes)) < 0)) {
            return -1;
        }
        if (PyDict_GET_SIZE(run->grads) < there) { /* no copy of it is kept */
            oomkit_host_share_give(run->call, run->params[i].bytes);
        }
    }
    return 0;
}

/* State of the parameters of a part in, or out again. 0 or -1. */
static int
part_move(const parts_run *run, Py_ssize_t at, Py_ssize_t count, int in)
{
    Py_ssize_t i;
    uint64_t bytes = 0;

    for (i = at; run->hosted != NULL && i < at + count; i++) {
        OWNED PyObject *values = state_of(run, run->params[i].param);
        PyObject *key, *value; /* borrowed from values */
        Py_ssize_t next = 0;
        if (values == NULL) {
            if (PyErr_Occurred()) {
                return -1;
            }
            continue;
        }
        while (PyDict_Next(values, &next, &key, &value)) {
            if ((in ? oomkit_host_move_in(run->call, run->hosted, value, &run->ahead)
                    : oomkit_host_move_out(run->call, run->hosted, value, &bytes)) <
                0) {
                return -1;
            }
        }
    }
    return 0;
}

/* Appends a parameter's state that is on the host. 0 or -1. */
static int
part_hosted(const parts_run *run, PyObject *param, PyObject *tensors, uint64_t *bytes)
{
    OWNED PyObject *values = state_of(run, param);
    oomkit_tensor_facts facts;
    PyObject *key, *value; /* borrowed from values */
    Py_ssize_t next = 0;

    if (values == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    while (PyDict_Next(values, &next, &key, &value)) {
        OWNED PyObject *address = PyLong_FromVoidPtr(value);
        int there = address == NULL ? -1 : PyDict_Contains(run->hosted, address);
        if (there < 0 || (there > 0 && (oomkit_tensor_facts_get(run->call->st, value, 0,
                                                                &facts) < 0 ||
                                        PyList_Append(tensors, value) < 0))) {
            return -1;
        }
        *bytes += there > 0 ? facts.bytes : 0;
    }
    return 0;
}

/* Does the update of a parameter go by rows? Then its state and its gradient stay on
 * the host, and are written to there. */
static int
goes_by_rows(const parts_run *run, Py_ssize_t at)
{
    return run->slice_bytes > 0 && run->grads != NULL &&
           run->params[at].bytes > run->slice_bytes;
}

/* Parameters from `at` on that make one part: of one group, so many bytes, at least
 * one. */
static Py_ssize_t
part_count(const parts_run *run, Py_ssize_t at)
{
    Py_ssize_t n = 0;
    uint64_t bytes = 0;

    while (at + n < run->count && (run->most == 0 || n < run->most) &&
           run->params[at + n].group == run->params[at].group) {
        if (goes_by_rows(run, at + n)) {
            return n > 0 ? n : 1;
        }
        bytes += run->params[at + n].bytes;
        if (n > 0 && bytes > run->part_bytes) {
            break;
        }
        n++;
    }
    return n;
}

/* The state of a part that is on the host begins to come, where there is room for it
 * beside the part before. 0 or -1. */
static int
part_ahead(parts_run *run, Py_ssize_t at)
{
    oomkit_call *call = run->call;
    const uint64_t left = run->ahead.stream == NULL ? 0 : oomkit_update_left(call);
    OWNED PyObject *tensors = NULL;
    uint64_t bytes = 0;
    Py_ssize_t i, count;

    if (left == 0 || left == OOMKIT_UNKNOWN || run->hosted == NULL ||
        run->grads != NULL || at >= run->count) {
        return 0;
    }
    tensors = PyList_New(0);
    count = part_count(run, at);
    for (i = at; tensors != NULL && i < at + count; i++) {
        if (part_hosted(run, run->params[i].param, tensors, &bytes) < 0) {
            return -1;
        }
    }
    if (tensors == NULL || bytes == 0 || run->beside >= left ||
        bytes > left - run->beside) {
        return tensors == NULL ? -1 : 0;
    }
    return oomkit_ahead_fetch(call, &run->ahead, tensors);
}

/* Bytes of one row of a parameter; 0 with an exception. */
static uint64_t
row_bytes(const parts_run *run, Py_ssize_t at)
{
    oomkit_tensor_facts facts;

    if (oomkit_tensor_facts_get(run->call->st, run->params[at].param, 0, &facts) < 0) {
        return 0;
    }
    return facts.size > 0
               ? (facts.bytes + (uint64_t)facts.size - 1) / (uint64_t)facts.size
               : 1;
}

/* The update of one parameter by rows, its group being set. New reference or NULL. */
static PyObject *
rows_step(const parts_run *run, Py_ssize_t at)
{
    const uint64_t row = row_bytes(run, at);
    const uint64_t rows = row == 0 ? 0 : run->slice_bytes / row;

    return row == 0 ? NULL
                    : PyObject_CallFunction(run->call->st->update_rows, "OOOOOKOO",
                                            run->optimizer, run->below, run->args,
                                            run->kwargs, run->params[at].param,
                                            (unsigned long long)(rows > 0 ? rows : 1),
                                            run->hosted, run->host_copy);
}

/* An update that fits as it is was made in parts for safety where each is a whole
 * group: what they take is what it takes. */
static int
is_whole_group(const parts_run *run, Py_ssize_t at, Py_ssize_t count)
{
    const oomkit_part_param *params = run->params;

    return run->hosted == NULL && run->grads == NULL && !goes_by_rows(run, at) &&
           (at == 0 || params[at - 1].group != params[at].group) &&
           (at + count == run->count || params[at + count].group != params[at].group);
}

/* step() with the groups as they are set. New reference or NULL. */
static PyObject *
part_call(parts_run *run, int whole)
{
    oomkit_call *call = run->call;
    oomkit_peak_window window;
    PyObject *result; /* owned */
    uint64_t left;

    run->cut |= !whole;
    if (run->cut) {
        return PyObject_Call(run->below, run->args, run->kwargs);
    }
    oomkit_device_begin(call->st, call->device, call->options->reset_peaks, &window);
    result = PyObject_Call(run->below, run->args, run->kwargs);
    left = oomkit_device_allocated(call->st, call->device);
    oomkit_device_end(call->st, &window);
    if (window.peak_allocated_bytes == OOMKIT_UNKNOWN || left == OOMKIT_UNKNOWN) {
        run->cut = 1;
    } else if (window.peak_allocated_bytes > left + run->peak) {
        run->peak = window.peak_allocated_bytes - left;
    }
    return result;
}

static int
part_step(parts_run *run, Py_ssize_t at, Py_ssize_t count)
{
    const int whole = is_whole_group(run, at, count);
    OWNED PyObject *params = PyList_New(count);
    Py_ssize_t i;

    if (params == NULL) {
        return -1;
    }
    for (i = 0; i < count; i++) {
        PyList_SET_ITEM(params, i, Py_NewRef(run->params[at + i].param));
    }
    Py_CLEAR(run->result);
    if (groups_set(run, run->params[at].group, params) == 0) {
        run->result =
            goes_by_rows(run, at) ? rows_step(run, at) : part_call(run, whole);
    }
    return groups_back(run) < 0 || run->result == NULL ? -1 : 0;
}

/* Copies first, then the update, and its state out again. 0 or -1. */
static int
part_run(parts_run *run, Py_ssize_t at, Py_ssize_t count)
{
    Py_ssize_t i;

    for (i = at; i < at + count; i++) {
        if (oomkit_part_keep(run->call, run->index, &run->params[i],
                             goes_by_rows(run, i) ? NULL : run->hosted) < 0) {
            return -1;
        }
    }
    if (goes_by_rows(run, at)) {
        return part_step(run, at, count);
    }
    return grads_move(run, at, count, 1) < 0 ||
                   oomkit_ahead_wait(run->call, &run->ahead) < 0 ||
                   part_move(run, at, count, 1) < 0 ||
                   part_ahead(run, at + count) < 0 || part_step(run, at, count) < 0 ||
                   part_move(run, at, count, 0) < 0 || grads_move(run, at, count, 0) < 0
               ? -1
               : 0;
}

/* --- back --- */

/* Parameters number `at` and following are as before their update. What was brought in
 * is noted as out again, for its value is the host's memory. 0 or -1. */
static int
parts_undo(const parts_run *run, Py_ssize_t at, Py_ssize_t count)
{
    oomkit_call *call = run->call;
    int mode = oomkit_grad_mode_off(call->st), result = 0;
    Py_ssize_t i;

    if (mode < 0) {
        return -1;
    }
    for (i = at; result == 0 && i < at + count; i++) {
        result = oomkit_part_put_back(call, run->index, &run->params[i],
                                      goes_by_rows(run, i) ? NULL : run->hosted,
                                      oomkit_params_version_is);
    }
    return oomkit_grad_mode_back(call->st, mode, result);
}

/* An error that nothing helps against: everything is as before step(). Keeps it in
 * flight. -1 always. */
static int
parts_give_up(parts_run *run, Py_ssize_t count)
{
    oomkit_state *st = run->call->st;
    PyObject *exception = oomkit_exception_take(); /* owned, given back */

    oomkit_ahead_drop(run->call, &run->ahead);
    if (oomkit_exception_classify(st, exception) != OOMKIT_CLASS_OTHER) {
        oomkit_exception_clear_frames(st, exception, NULL);
    }
    if (parts_undo(run, 0, run->repeats ? count : run->count) < 0 ||
        oomkit_optimizer_undo(run->call, run->index) < 0) {
        run->call->refused.raised = 1;
        Py_DECREF(exception);
        return -1;
    }
    oomkit_exception_give(exception);
    return -1;
}

/* The state of all goes to the host, where that may be; then all gradients. 1, 0 where
 * nothing is left to go, or -1.
 *
 * The host has to have room for it twice, and for the parameters that are left: in each
 * later update a part's state is copied out anew, beside what there is to go back to.
 */
static int
parts_to_host(parts_run *run)
{
    oomkit_call *call = run->call;
    uint64_t bytes = 0, kept = 0;
    Py_ssize_t i;

    if (run->grads != NULL || !oomkit_rung_allowed(call, OOMKIT_RUNG_STATE)) {
        return 0;
    }
    if (run->hosted != NULL) {
        run->grads = PyDict_New();
        return run->grads == NULL || grads_move(run, 0, run->count, 0) < 0 ? -1 : 1;
    }
    for (i = run->at + 1; i < run->count; i++) {
        kept += run->params[i].all_bytes;
    }
    if (!oomkit_host_share_take(call, kept + 2 * run->makes)) {
        return 0;
    }
    if (oomkit_host_all(call, oomkit_host_share_left(call) / 2, &bytes) < 0) {
        return -1;
    }
    oomkit_host_share_give(call, kept + run->makes);
    run->hosted = Py_XNewRef(oomkit_hosted_make(call, run->optimizer));
    return run->hosted == NULL ||
                   oomkit_rung_used(call, OOMKIT_RUNG_STATE, "in an update") < 0
               ? -1
               : 1;
}

/* A parameter alone has failed, and nothing else may go to the host: fewer of its rows
 * at a time. 1, 0 where it cannot, or -1. */
static int
rows_fewer(parts_run *run, Py_ssize_t at, oomkit_update_need *need)
{
    const uint64_t bytes = run->params[at].bytes;
    const uint64_t left = oomkit_update_left(run->call);
    const int cut = goes_by_rows(run, at);
    OWNED PyObject *may = NULL;
    uint64_t row, slice;

    if (!run->repeats || run->grads == NULL || run->hosted == NULL ||
        run->call->device.type == OOMKIT_DEVICE_PRIVATE_USE) { /* nothing has moved */
        return 0;
    }
    may = PyObject_CallFunctionObjArgs(run->call->st->rows_possible, run->optimizer,
                                       run->params[at].param, NULL);
    row = may == NULL ? 0 : row_bytes(run, at);
    if (row == 0 || may != Py_True || (cut && run->slice_bytes <= row)) {
        return row == 0 ? -1 : 0;
    }
    slice = cut ? run->slice_bytes / 2 : bytes / 2;
    if (!cut && left != OOMKIT_UNKNOWN && left / SLICE_PEAK < slice) {
        slice = left / SLICE_PEAK;
    }
    run->slice_bytes = slice > row ? slice : row;
    if (need != NULL) {
        need->slice_bytes = run->slice_bytes;
    }
    if (!cut) { /* they are those of the host's memory itself */
        oomkit_part_unkeep(run->call, run->index, &run->params[at]);
    }
    return 1;
}

/* What a part of `count` parameters that has failed may become: smaller, the same once
 * more, or with state on the host. 1, 0 where nothing is left to be tried, or -1. */
static int
part_becomes(parts_run *run, Py_ssize_t at, Py_ssize_t count, int *again)
{
    oomkit_update_need *need = oomkit_update_need_of(run->call->parts, run->optimizer);
    int helps;

    if (!run->repeats) { /* the next update of this call has to know, too */
        oomkit_update_failed(run->call, run->optimizer);
    }
    if (count > 1) {
        run->most = count / 2;
        if (need != NULL) {
            need->most = run->most;
        }
        return 1;
    }
    if (run->repeats && *again < ONE_AGAIN) {
        ++*again;
        return 1;
    }
    *again = 0;
    if (!run->repeats && run->hosted != NULL) { /* the next one begins without them */
        const int more = need != NULL && !need->grads_out;
        if (more) {
            need->grads_out = 1;
        }
        return more;
    }
    helps = parts_to_host(run);
    if (helps > 0 && need != NULL && run->grads != NULL) {
        need->grads_out = 1;
    }
    return helps != 0 ? helps : rows_fewer(run, at, need);
}

/* A part has run out of memory (the exception is in flight): it goes, and so does what
 * the part has done. 0: once more; -1 with the exception. */
static int
part_failed(parts_run *run, Py_ssize_t at, Py_ssize_t count, int *again)
{
    oomkit_call *call = run->call;
    PyObject *exception = oomkit_exception_take(); /* owned */
    int status;

    oomkit_exception_clear_frames(call->st, exception, NULL);
    oomkit_ahead_drop(call, &run->ahead);
    status = run->repeats ? parts_undo(run, at, count) : parts_undo(run, 0, run->count);
    if (status == 0) {
        status = oomkit_device_empty_cache(call->st, call->device);
    }
    if (status == 0) {
        status = part_becomes(run, at, count, again);
        if (status == 0 && oomkit_host_share_is_short(call)) {
            oomkit_exception_discard(call->st, exception);
            return oomkit_host_share_refuse(call, run->optimizer);
        }
        call->tries.update_smaller |= status > 0 && !run->repeats;
        if (status == 0 || (status > 0 && !run->repeats)) {
            oomkit_exception_give(exception);
            return -1;
        }
    }
    Py_DECREF(exception);
    call->tries.ooms++;
    call->st->seen_oom = 1;
    return status < 0 ? -1 : 0;
}

/* --- all of them --- */

static int
parts_all(parts_run *run)
{
    Py_ssize_t at = 0;
    int again = 0;

    while (at < run->count) {
        Py_ssize_t count = part_count(run, at);
        run->at = at;
        if (part_run(run, at, count) == 0) {
            at += count;
            again = 0;
            continue;
        }
        if (oomkit_update_failed_shared(run->call, run->optimizer) ||
            !oomkit_exception_is_oom(run->call->st) || run->call->refused.raised ||
            part_failed(run, at, count, &again) < 0) {
            return parts_give_up(run, at + count);
        }
    }
    if (!run->cut && run->count > 0) {
        oomkit_update_measured(run->call, run->optimizer, run->peak);
    }
    return 0;
}

/* Bytes that a part of so many bytes of all needs beside its state, at most. */
static uint64_t
beside_state(const oomkit_update_figures *f, uint64_t part, uint64_t all)
{
    const double share = all == 0 ? 0.0 : (double)part / (double)all;

    return f->fixed + (uint64_t)((double)f->together * share);
}

/* State that an earlier run had on the host is there before figures are looked at. 0 or
 * -1. */
static int
parts_state_out(parts_run *run, oomkit_update_need *need)
{
    const int out = need != NULL && need->state_out && run->hosted == NULL;

    if (need != NULL) {
        need->state_out = 0;
    }
    return out && parts_to_host(run) < 0 ? -1 : 0;
}

/* What has been to the host in earlier updates is so from the beginning, while there is
 * no room for all (parameters and state of so many bytes). 0 or -1. */
static int
parts_resume(parts_run *run, oomkit_update_need *need, const oomkit_update_figures *f,
             uint64_t bytes)
{
    if (need == NULL || run->hosted == NULL) {
        return 0;
    }
    if (f->left != OOMKIT_UNKNOWN && f->left > f->fixed + f->state + bytes) {
        need->slice_bytes = 0; /* there is room again */
        need->grads_out = 0;
    }
    if ((need->grads_out || need->slice_bytes > 0) && parts_to_host(run) < 0) {
        return -1;
    }
    run->slice_bytes = need->slice_bytes;
    return 0;
}

/* How many bytes of parameters go into one part. 0 or -1. */
static int
parts_plan(parts_run *run)
{
    oomkit_update_need *need = oomkit_update_need_of(run->call->parts, run->optimizer);
    oomkit_update_figures f;
    uint64_t bytes = 0, largest = 0, hosted = 0, left, grows;
    Py_ssize_t i;

    if (parts_state_out(run, need) < 0 ||
        oomkit_update_room(run->call, run->optimizer, &f) < 0) {
        return -1;
    }
    for (i = 0; i < run->count; i++) {
        bytes += run->params[i].bytes;
        largest = run->params[i].bytes > largest ? run->params[i].bytes : largest;
    }
    run->makes = f.state;
    if (run->hosted != NULL) {
        hosted = oomkit_host_bytes(run->call);
    }
    if (parts_resume(run, need, &f, bytes + hosted) < 0) {
        return -1;
    }
    run->part_bytes = bytes;
    run->most = need == NULL ? 0 : need->most;
    run->repeats = f.independent == OOMKIT_PARTS_REPEAT &&
                   !oomkit_part_is_copied(run->call, run->index);
    if (f.left == OOMKIT_UNKNOWN) {
        return 0;
    }
    if (f.fixed == OOMKIT_UNKNOWN) { /* nothing is known: small parts */
        run->part_bytes = f.left / 8;
        return 0;
    }
    if (hosted > 0) {
        oomkit_host_room(
            run->call, hosted + f.state + (f.fixed > f.together ? f.fixed : f.together),
            f.left);
    }
    if (run->hosted != NULL && f.state == 0 &&
        oomkit_ahead_begin(run->call, &run->ahead) < 0) {
        return -1;
    }
    left = f.left > f.fixed ? f.left - f.fixed : 0;
    grows = f.together + hosted + (run->hosted != NULL ? f.state : 0) +
            (run->ahead.stream != NULL ? hosted : 0);
    if (grows > left) {
        run->part_bytes =
            (uint64_t)(0.9 * (double)bytes * (double)left / (double)grows);
    }
    run->beside = beside_state(&f, run->part_bytes, bytes);
    /* State that has no room on the device for sure: to the host from the start, not
     * after a failure. */
    if (run->hosted == NULL
            ? f.state > f.left
            : bytes > 0 && (double)(hosted + f.state) * (double)largest >
                               (double)left * (double)bytes) {
        return parts_to_host(run) < 0 ? -1 : 0;
    }
    return 0;
}

/* The lists of all groups. 0 or -1. */
static int
parts_groups(parts_run *run)
{
    OWNED PyObject *groups =
        PyObject_GetAttr(run->optimizer, run->call->st->str_param_groups);
    Py_ssize_t g;

    run->groups = groups == NULL ? NULL : PySequence_List(groups);
    run->lists = PyList_New(0);
    run->none = PyList_New(0);
    if (run->groups == NULL || run->lists == NULL || run->none == NULL) {
        return -1;
    }
    for (g = 0; g < PyList_GET_SIZE(run->groups); g++) {
        PyObject *group = PyList_GET_ITEM(run->groups, g); /* borrowed */
        PyObject *params = PyDict_Check(group) ? oomkit_item(group, "params") : NULL;
        if (params == NULL) {
            PyErr_SetString(
                PyExc_TypeError,
                "param_groups expected dicts with 'params'" SEE("internal-error"));
            return -1;
        }
        if (PyList_Append(run->lists, params) < 0) {
            return -1;
        }
    }
    return 0;
}

static void
parts_end(parts_run *run)
{
    PyMem_Free(run->params);
    oomkit_ahead_end(run->call, &run->ahead);
    Py_CLEAR(run->hosted);
    Py_CLEAR(run->grads);
    Py_CLEAR(run->groups);
    Py_CLEAR(run->lists);
    Py_CLEAR(run->none);
    Py_CLEAR(run->args);
    Py_CLEAR(run->result);
    Py_CLEAR(run->host_copy);
}

static const char *const capsule_name = "oomkit.parts_run";
/* Its functions may be kept, and find it no more: what it leads to is on the stack. */
static const char *const capsule_ended = "oomkit.parts_run that has ended";

/* Are the parameters those of the mark? A hook around step() may have added some. */
static int
parts_are_all(const parts_run *run)
{
    Py_ssize_t g, i, n = 0;

    for (g = 0; g < PyList_GET_SIZE(run->lists); g++) {
        PyObject *params = PyList_GET_ITEM(run->lists, g); /* borrowed */
        for (i = 0; PyList_Check(params) && i < PyList_GET_SIZE(params); i++, n++) {
            if (n >= run->count || run->params[n].param != PyList_GET_ITEM(params, i)) {
                return 0;
            }
        }
    }
    return n == run->count;
}

/* A hook has changed what is updated: as it is, with state where the optimizer looks
 * for it. New reference or NULL. */
static PyObject *
parts_other(parts_run *run)
{
    oomkit_call *call = run->call;
    PyObject *result; /* owned */

    run->is_other = 1;
    if (oomkit_host_return(call, run->optimizer) < 0) {
        return NULL;
    }
    result = PyObject_Call(run->below, run->args, run->kwargs);
    if (result == NULL && oomkit_exception_is_oom(call->st)) {
        OWNED PyObject *exception = oomkit_exception_take();
        oomkit_exception_clear_frames(call->st, exception, NULL);
        oomkit_half_updated(
            call,
            "%s.step() ran out of memory after a hook had changed its parameters, so "
            "the update cannot be undone; restore a checkpoint, or change param_groups "
            "before the step" SEE("partial-update"),
            Py_TYPE(run->optimizer)->tp_name);
    }
    return result;
}

/* What stands in place of step(), below its hooks: (optimizer, below, args, kwargs). */
static PyObject *
parts_function(PyObject *capsule, PyObject *given)
{
    parts_run *run = PyCapsule_GetPointer(capsule, capsule_name);
    PyObject *optimizer, *below, *args, *kwargs; /* borrowed */
    OWNED PyObject *first = NULL;

    if (run == NULL || !PyArg_ParseTuple(given, "OOO!O!", &optimizer, &below,
                                         &PyTuple_Type, &args, &PyDict_Type, &kwargs)) {
        return NULL;
    }
    first = PyTuple_Pack(1, optimizer);
    run->args = first == NULL ? NULL : PySequence_Concat(first, args);
    run->below = below;
    run->kwargs = kwargs;
    if (run->args == NULL || parts_groups(run) < 0) {
        return NULL;
    }
    if (!parts_are_all(run)) {
        return parts_other(run);
    }
    if (parts_plan(run) < 0 || parts_all(run) < 0) {
        KEEPING_EXCEPTION {
            if (grads_move(run, 0, run->count, 1) < 0) {
                oomkit_error_dismiss(); /* the call is rolled back, gradients too */
            }
        }
        return NULL;
    }
    if (grads_move(run, 0, run->count, 1) < 0) {
        parts_give_up(run, run->count);
        return NULL;
    }
    return Py_XNewRef(run->result == NULL ? Py_None : run->result);
}

/* A copy of a tensor in host memory, outside the budget: (tensor). */
static PyObject *
parts_host_copy(PyObject *capsule, PyObject *tensor)
{
    parts_run *run = PyCapsule_GetPointer(capsule, capsule_name);

    oomkit_tensor_facts facts;

    if (run == NULL || oomkit_tensor_facts_get(run->call->st, tensor, 0, &facts) < 0 ||
        (!oomkit_host_share_take(run->call, facts.bytes) &&
         oomkit_host_share_refuse(run->call, run->optimizer) < 0)) {
        return NULL;
    }
    return oomkit_host_copy_pinned(run->call->st, tensor);
}

static PyMethodDef host_copy_method = {"host_copy", parts_host_copy, METH_O, NULL};
static PyMethodDef parts_method = {"step", parts_function, METH_VARARGS, NULL};

PyObject *
oomkit_update_in_parts(oomkit_call *call, PyObject *optimizer, int index,
                       PyObject *original, PyObject *const *args, size_t nargsf,
                       PyObject *kwnames)
{
    parts_run run = {.call = call, .optimizer = optimizer, .index = index};
    OWNED PyObject *capsule = PyCapsule_New(&run, capsule_name, NULL);
    OWNED PyObject *function = NULL, *step = NULL;
    PyObject *result = NULL; /* owned */

    run.host_copy =
        capsule == NULL ? NULL : PyCFunction_New(&host_copy_method, capsule);
    function = run.host_copy == NULL ? NULL : PyCFunction_New(&parts_method, capsule);
    step = function == NULL
               ? NULL
               : PyObject_CallFunctionObjArgs(call->st->around_parts, optimizer,
                                              original == NULL ? Py_None : original,
                                              function, NULL);
    if (step == Py_None) {
        return Py_NewRef(Py_NotImplemented);
    }
    oomkit_host_share_begin(call, oomkit_host_left(call));
    run.hosted =
        step == NULL ? NULL : Py_XNewRef(oomkit_hosted_of(call->st, optimizer));
    if (step != NULL && !PyErr_Occurred() &&
        oomkit_part_list(call, index, &run.params, &run.count) == 0 &&
        oomkit_rung_used(call, OOMKIT_RUNG_UPDATE, NULL) == 0 &&
        (run.hosted == NULL || PyDict_GET_SIZE(run.hosted) == 0 ||
         oomkit_rung_used(call, OOMKIT_RUNG_STATE, NULL) == 0)) {
        result = PyObject_Vectorcall(step, args, nargsf, kwnames);
    }
    if (result != NULL) {
        oomkit_update_went(call, optimizer);
        if (!call->options->optimizer_parts) {
            oomkit_part_forget(call, index);
        }
    }
    if (result != NULL && run.hosted != NULL && PyDict_GET_SIZE(run.hosted) == 0) {
        KEEPING_EXCEPTION {
            if (oomkit_hosted_tidy(call->st, optimizer) < 0) {
                oomkit_error_unraised(optimizer);
            }
        }
    }
    if (capsule != NULL && PyCapsule_SetName(capsule, capsule_ended) < 0) {
        Py_CLEAR(result);
    }
    oomkit_host_share_end(call);
    parts_end(&run);
    return result;
}
