/* Which rungs there are, which a call may climb to, and what is said of one. */
#include "activations.h"
#include "ladder.h"
#include "offload.h"
#include "../device/device.h"
#include "../sizes/sizes.h"

static const char *const names[OOMKIT_RUNGS] = {
    "split", "update", "state", "activations", "recompute", "gradients"};

static const char *const costs[OOMKIT_RUNGS] = {
    "",
    "updates run in parts, which needs host copies and more calls of step()",
    "the optimizer's state is kept in host memory and moved in each update",
    "what autograd saves is kept in host memory and moved in each backward",
    "modules run their forward twice",
    "gradients accumulate in host memory, where each is moved in each backward"};

/* Of calls on this thread that do not ask for a ladder: a mask, or -1 for all. */
static _Thread_local int scope_mask = -1;

int
oomkit_ladder_scope(int mask)
{
    const int before = scope_mask;

    scope_mask = mask;
    return before;
}

static int
ladder_wrong(PyObject *given)
{
    PyErr_Format(PyExc_ValueError,
                 "ladder= expected \"auto\" or a tuple of \"update\", \"state\", "
                 "\"activations\", \"recompute\", \"gradients\", got %R" SEE("options"),
                 given);
    return -1;
}

int
oomkit_ladder_parse(PyObject *given, unsigned *mask)
{
    Py_ssize_t i;

    *mask = OOMKIT_LADDER_ALL;
    if (PyUnicode_Check(given) &&
        PyUnicode_CompareWithASCIIString(given, "auto") == 0) {
        return 0;
    }
    if (!PyTuple_Check(given) && !PyList_Check(given)) {
        return ladder_wrong(given);
    }
    *mask = 0;
    for (i = 0; i < PySequence_Fast_GET_SIZE(given); i++) {
        PyObject *name = PySequence_Fast_GET_ITEM(given, i); /* borrowed */
        int rung = PyUnicode_Check(name) ? oomkit_rung_of(name) : 0;
        if (rung == 0) {
            return ladder_wrong(given);
        }
        *mask |= OOMKIT_RUNG_BIT(rung);
    }
    return 0;
}

const char *
oomkit_rung_name(int rung)
{
    return rung >= 0 && rung < OOMKIT_RUNGS ? names[rung] : "?";
}

int
oomkit_rung_of(PyObject *name)
{
    int rung;

    for (rung = 1; rung < OOMKIT_RUNGS; rung++) {
        if (PyUnicode_CompareWithASCIIString(name, names[rung]) == 0) {
            return rung;
        }
    }
    return 0;
}

int
oomkit_rung_allowed(const oomkit_call *call, oomkit_rung rung)
{
    const oomkit_options *options = call->options;

    if (rung == OOMKIT_RUNG_UPDATE && options->optimizer_parts) {
        return 1;
    }
    if (!options->ladder_given && scope_mask >= 0) {
        return ((unsigned)scope_mask & OOMKIT_RUNG_BIT(rung)) != 0;
    }
    return (options->ladder & OOMKIT_RUNG_BIT(rung)) != 0;
}

int
oomkit_rung_used(oomkit_call *call, oomkit_rung rung, const char *detail)
{
    if (call->log.rung < (uint32_t)rung) {
        call->log.rung = (uint32_t)rung;
        oomkit_window_climbed(call);
    }
    if ((rung == OOMKIT_RUNG_UPDATE && call->options->optimizer_parts) ||
        !oomkit_say_once(call->step, OOMKIT_RUNG_BIT(rung))) {
        return 0; /* asked for, or said */
    }
    return oomkit_say(call->st, "warning", "sOssss",
                      "%s needs more than smaller micro-batches: rung=%s, "
                      "%s%s%s",
                      call->options->label, names[rung], costs[rung],
                      detail == NULL ? "" : "; ", detail == NULL ? "" : detail);
}

int
oomkit_host_grads_are_next(const oomkit_call *call)
{
    return call->cut->plan.rung < OOMKIT_RUNG_GRADIENTS &&
           oomkit_rung_allowed(call, OOMKIT_RUNG_GRADIENTS);
}

/* --- up and down --- */

/* Room between budget and what would be there if no state were on the host. */
static uint64_t
room_without(oomkit_call *call, const oomkit_plan_request *request)
{
    const uint64_t room = oomkit_room(request->baseline_bytes, request->budget_bytes);
    const uint64_t hosted = oomkit_host_bytes(call);

    return room == OOMKIT_UNKNOWN ? OOMKIT_UNKNOWN : room > hosted ? room - hosted : 0;
}

/* May saved tensors be moved? Where no gradients are recorded there are none. */
static int
records_gradients(const oomkit_call *call)
{
    OWNED PyObject *on = PyObject_CallNoArgs(call->st->is_grad_enabled);

    return on == NULL ? -1 : on == Py_True;
}

/* The rung that helps, or 0, or -1. State is moved at once. */
static int
climb_next(oomkit_call *call, int highest)
{
    int rung = (int)call->cut->plan.rung, records;
    uint64_t bytes = 0;

    if (!call->tries.state_moved && oomkit_rung_allowed(call, OOMKIT_RUNG_STATE)) {
        if (oomkit_host_all(call, oomkit_host_left(call), &bytes) < 0) {
            return -1;
        }
        if (bytes > 0) {
            call->tries.state_moved = 1;
            return rung > OOMKIT_RUNG_STATE ? rung : OOMKIT_RUNG_STATE;
        }
    }
    records = records_gradients(call);
    rung = rung < OOMKIT_RUNG_STATE ? OOMKIT_RUNG_STATE : rung;
    while (records > 0 && ++rung <= highest) {
        int helps = !oomkit_rung_allowed(call, (oomkit_rung)rung) ? 0
                    : rung == OOMKIT_RUNG_GRADIENTS ? oomkit_host_grads_possible(call)
                    : rung == OOMKIT_RUNG_RECOMPUTE ? oomkit_recompute_find(call)
                                                    : oomkit_offload_possible(call->st);
        if (helps != 0) {
            return helps < 0 ? -1 : rung;
        }
    }
    return records < 0 ? -1 : 0;
}

int
oomkit_ladder_climb(oomkit_call *call, int highest)
{
    oomkit_plan_request request;
    const oomkit_knowledge *known; /* borrowed from the step */
    OWNED PyObject *modules = NULL;
    uint64_t room;
    int rung;

    oomkit_signature_request(call, &request, &known);
    room = room_without(call, &request);
    rung = climb_next(call, highest);
    if (rung <= 0) {
        return rung;
    }
    modules = rung == OOMKIT_RUNG_RECOMPUTE ? oomkit_recompute_names(call) : NULL;
    if (PyErr_Occurred()) {
        return -1;
    }
    oomkit_know_rung(&oomkit_signature_get(call, 1)->known, (uint32_t)rung, room);
    return oomkit_rung_used(call, (oomkit_rung)rung,
                            modules == NULL ? NULL : PyUnicode_AsUTF8(modules)) < 0
               ? -1
               : rung;
}

/* State of optimizers that was on the host in an earlier run, and has come to the
 * device out of a checkpoint: what is known of sizes is of calls without it. 1 where it
 * has moved, 0 or -1. */
static int
state_resumes(oomkit_call *call, const oomkit_knowledge *known,
              const oomkit_plan_request *request)
{
    uint64_t bytes = 0;

    if (known->update.rung < OOMKIT_RUNG_STATE ||
        !oomkit_rung_allowed(call, OOMKIT_RUNG_STATE) ||
        !oomkit_update_known_holds(known, request->budget_bytes)) {
        return 0;
    }
    if (oomkit_host_all(call, oomkit_host_left(call), &bytes) < 0) {
        if (!oomkit_exception_is_oom(call->st)) {
            return -1;
        }
        /* It is not needed before something fails. */
        oomkit_exception_discard(call->st, oomkit_exception_take());
    }
    return bytes > 0 && oomkit_rung_used(call, OOMKIT_RUNG_STATE, NULL) < 0 ? -1
                                                                            : bytes > 0;
}

int
oomkit_ladder_begins(oomkit_call *call, const oomkit_plan_request *request)
{
    oomkit_signature *entry = oomkit_signature_get(call, 0); /* borrowed */
    const int resumes = entry == NULL ? 0 : state_resumes(call, &entry->known, request);

    if (resumes < 0 || entry == NULL || entry->known.rung == 0) {
        return resumes;
    }
    if (!oomkit_rung_allowed(call, (oomkit_rung)entry->known.rung) ||
        oomkit_rung_is_roomy(&entry->known, room_without(call, request))) {
        oomkit_know_rung(&entry->known, 0, 0);
        oomkit_host_unpin(call->st);
        return 1;
    }
    if (call->log.rung < entry->known.rung) {
        call->log.rung = entry->known.rung;
    }
    return resumes;
}

int
oomkit_ladder_has_worked(oomkit_call *call)
{
    const oomkit_signature *entry = oomkit_signature_get(call, 0); /* borrowed */
    const unsigned mask = call->options->ladder_given || scope_mask < 0
                              ? call->options->ladder
                              : (unsigned)scope_mask;

    return mask != 0 && entry != NULL && entry->known.successes > 0 &&
           !entry->known.recalled && entry->known.rung == call->cut->plan.rung;
}
