/* Before an optimizer's step(): is there room for it? Most failures inside an update
 * come after something has moved, so that what does not fit is known before, or made in
 * parts. With room to spare that takes a comparison of two numbers. */
#include "ladder.h"
#include "update_room.h"
#include "../device/device.h"
#include "../optim/update_part.h"
#include "../py/tensor.h"
#include "../sizes/sizes.h"

#define ROOMY 8    /* times the parameters: more than any known update allocates */
#define WARY 8     /* updates in parts after one that failed where it was to fit */
#define SLOP 65536 /* bytes: numbers, counts, lists of a foreach update */

uint64_t
oomkit_update_budget(const oomkit_call *call)
{
    const uint64_t budget = oomkit_device_budget(call->st, call->device);

    return call->device.type != OOMKIT_DEVICE_CPU && call->step->device_bytes > 0 &&
                   call->step->device_bytes < budget
               ? call->step->device_bytes
               : budget;
}

uint64_t
oomkit_update_left(const oomkit_call *call)
{
    const uint64_t budget = oomkit_update_budget(call);
    uint64_t used;

    if (budget == OOMKIT_UNKNOWN) {
        return OOMKIT_UNKNOWN;
    }
    used = oomkit_device_allocated(call->st, call->device);
    return used == OOMKIT_UNKNOWN ? OOMKIT_UNKNOWN : used < budget ? budget - used : 0;
}

/* The same; of an accelerator its driver is asked, which takes long. */
static uint64_t
left_asked(const oomkit_call *call)
{
    if (call->device.type != OOMKIT_DEVICE_CPU) {
        call->step->device_bytes = oomkit_device_usable(call->st, call->device);
    }
    return oomkit_update_left(call);
}

/* --- closer --- */

int
oomkit_update_room(oomkit_call *call, PyObject *optimizer, oomkit_update_figures *f)
{
    OWNED PyObject *needs = PyObject_CallOneArg(call->st->update_needs, optimizer);
    unsigned long long state, fixed, together, key;
    PyObject *hosted = NULL; /* borrowed */

    if (needs == NULL || !PyArg_ParseTuple(needs, "iKKKK:update_needs", &f->independent,
                                           &state, &fixed, &together, &key)) {
        return -1;
    }
    f->state = state;
    f->fixed = fixed;
    f->together = together;
    /* State that is made on the way hides what else it takes. */
    f->key = state > 0 ? 0 : key;
    hosted = oomkit_hosted_of(call->st, optimizer);
    if (hosted == NULL && PyErr_Occurred()) {
        return -1;
    }
    /* Before a first state, where it was never asked about what is needed, and where
     * that takes little of what moving state takes. */
    f->left = f->state > 0 || hosted != NULL ||
                      (call->step->device_bytes == 0 && (fixed | together) != 0)
                  ? left_asked(call)
                  : oomkit_update_left(call);
    return 0;
}

/* Bytes of the parameters of a mark that has changed since. 0 or -1. */
static int
need_anew(oomkit_call *call, int index, oomkit_update_need *need)
{
    OWNED_MEMORY oomkit_part_param *params = NULL;
    Py_ssize_t i, count;

    if (oomkit_part_list(call, index, &params, &count) < 0) {
        return -1;
    }
    need->roomy = need->roomy_now = SLOP;
    for (i = 0; i < count; i++) {
        need->roomy += ROOMY * params[i].all_bytes;
        need->roomy_now += ROOMY * params[i].bytes;
    }
    need->items = oomkit_part_items(call, index);
    return 0;
}

/* What cannot be helped is said before anything has moved. -1 always. */
static int
refuse_state(oomkit_call *call, PyObject *optimizer, const oomkit_update_figures *f)
{
    char state[32], left[32];
    PyObject *reason = /* owned, then stolen */
        PyUnicode_FromFormat(
            "%s.step() needs %s for its state and %s are left: "
            "nothing was updated; use an optimizer with less state, "
            "a larger budget, or %s" SEE("out-of-memory"),
            Py_TYPE(optimizer)->tp_name, oomkit_format_bytes(f->state, state),
            oomkit_format_bytes(f->left, left),
            f->independent ? "ladder=(\"update\", \"state\")"
                           : "an optimizer whose update can be made in parts");

    call->refused.raised = 1;
    return oomkit_give_up_for(call, reason);
}

static uint64_t
needed(const oomkit_update_figures *f, const oomkit_update_need *need)
{
    uint64_t most = f->fixed > f->together ? f->fixed : f->together;

    /* What was measured is the whole update's, where it is like the one before. */
    most = need->peak > most || (need->peak > 0 && f->key != 0) ? need->peak : most;
    if (f->fixed == OOMKIT_UNKNOWN) { /* somebody else's: measured, or not known */
        return need->peak > 0 ? need->peak + SLOP : OOMKIT_UNKNOWN;
    }
    return most == 0 && f->state == 0 ? 0 : f->state + most + SLOP;
}

/* Is there less to spare than it needs, or is that not known? */
static int
is_near(const oomkit_update_figures *f, uint64_t bytes)
{
    return f->left != OOMKIT_UNKNOWN &&
           (bytes == OOMKIT_UNKNOWN || f->left < bytes || f->left - bytes < bytes);
}

/* 2, 0, 3 or -1 as oomkit_update_fits(). */
static int
fits_closely(oomkit_call *call, PyObject *optimizer, oomkit_update_need *need)
{
    oomkit_update_figures f;
    const int may = oomkit_rung_allowed(call, OOMKIT_RUNG_UPDATE);
    PyObject *hosted = NULL; /* borrowed */

    if (oomkit_update_room(call, optimizer, &f) < 0) {
        return -1;
    }
    if (f.key != need->key) {
        need->peak = 0;
        need->key = f.key;
    }
    if (may && f.independent) {
        hosted = oomkit_hosted_of(call->st, optimizer);
        if (hosted == NULL && PyErr_Occurred()) {
            return -1;
        }
        if ((hosted != NULL && PyDict_GET_SIZE(hosted) > 0) || need->failed ||
            call->options->optimizer_parts) {
            return 0;
        }
    }
    need->near = is_near(&f, needed(&f, need));
    if (f.left == OOMKIT_UNKNOWN || needed(&f, need) <= f.left) {
        return 2;
    }
    if (f.fixed == OOMKIT_UNKNOWN && need->peak == 0 && f.left >= need->roomy_now) {
        return 2; /* more than any known one takes */
    }
    if (oomkit_device_empty_cache(call->st, call->device) < 0) {
        return -1;
    }
    f.left = left_asked(call);
    if (may && f.independent) {
        return needed(&f, need) <= f.left ? 2 : 0;
    }
    if (f.state > f.left) {
        return refuse_state(call, optimizer, &f);
    }
    return needed(&f, need) <= f.left || !oomkit_host_has_room(call) ? 2 : 3;
}

/* The first update that is looked at begins where an earlier run has ended. A call
 * whose shape nobody has asked for was planned without anything recalled. */
static void
need_recalled(oomkit_call *call, oomkit_update_need *need)
{
    const oomkit_signature *entry = /* borrowed from the step */
        call->shape.known ? oomkit_signature_get(call, 0) : NULL;
    const oomkit_update_known *update;

    if (entry == NULL ||
        !oomkit_update_known_holds(&entry->known, oomkit_update_budget(call))) {
        return;
    }
    update = &entry->known.update;
    need->state_out = update->rung >= OOMKIT_RUNG_STATE;
    need->failed = update->failed > WARY ? WARY : (int)update->failed;
    need->grads_out = (int)update->grads;
    need->most = (Py_ssize_t)update->most;
    need->slice_bytes = update->slice_bytes;
}

int
oomkit_update_fits(oomkit_call *call, PyObject *optimizer, int index)
{
    oomkit_update_need *need = oomkit_update_need_of(call->parts, optimizer);
    const uint64_t left = oomkit_update_left(call);

    if (need == NULL ||
        (!call->options->optimizer_parts && oomkit_part_is_copied(call, index))) {
        return 1;
    }
    if (need->items != oomkit_part_items(call, index)) {
        if (need->items == 0) {
            need_recalled(call, need);
        }
        if (left == OOMKIT_UNKNOWN && call->device.type == OOMKIT_DEVICE_CPU &&
            call->st->hosted_any == 0 && !need->failed &&
            !call->options->optimizer_parts) {
            return 1;
        }
        if (need_anew(call, index, need) < 0) {
            return -1;
        }
        return fits_closely(call, optimizer, need);
    }
    if (left >= need->roomy_now && call->st->hosted_any == 0 && !need->failed &&
        !call->options->optimizer_parts) {
        if (left >= need->roomy) {
            return 1;
        }
        /* Only where some had no gradient: they may have been thawed. */
        if (need_anew(call, index, need) < 0) {
            return -1;
        }
        if (left >= need->roomy_now) {
            return 1;
        }
    }
    return fits_closely(call, optimizer, need);
}

int
oomkit_update_fits_whole(oomkit_call *call, PyObject *optimizer, int index,
                         int computes)
{
    const int fits = oomkit_update_fits(call, optimizer, index);

    if (fits < 0 || fits == 1 || (fits == 2 && !computes)) {
        return fits;
    }
    /* Its state is looked for where the optimizer left it. */
    if (oomkit_host_return(call, optimizer) < 0) {
        return -1;
    }
    return oomkit_host_has_room(call) ? 3 : 2;
}

int
oomkit_update_is_near(const oomkit_call *call, PyObject *optimizer, int fits)
{
    const oomkit_update_need *need = oomkit_update_need_of(call->parts, optimizer);

    return fits == 2 && need != NULL && need->near;
}

/* --- afterwards --- */

/* The smaller one; 0 is no bound. */
static int64_t
least_of(int64_t a, int64_t b)
{
    return a == 0 || (b > 0 && b < a) ? b : a;
}

void
oomkit_update_failed(oomkit_call *call, PyObject *optimizer)
{
    oomkit_update_need *need = oomkit_update_need_of(call->parts, optimizer);

    if (need != NULL) {
        need->failed = WARY;
    }
}

void
oomkit_update_went(oomkit_call *call, PyObject *optimizer)
{
    oomkit_update_need *need = oomkit_update_need_of(call->parts, optimizer);

    if (need != NULL) {
        need->failed -= need->failed > 0;
        need->went = call->step->calls;
    }
}

void
oomkit_updates_known(oomkit_call *call, oomkit_update_known *update)
{
    memset(update, 0, sizeof(*update));
    if (oomkit_host_bytes(call) > 0) {
        update->rung = OOMKIT_RUNG_STATE;
    }
    EACH_OWNER (one, call->parts, OWNERS_OF(OOMKIT_OWNER_OPTIMIZER)) {
        const oomkit_update_need *need = oomkit_update_need_of(call->parts, one.object);
        if (need == NULL || need->went == 0 || need->went != call->step->calls) {
            continue; /* it went as it is */
        }
        update->rung = update->rung > 0 ? update->rung : OOMKIT_RUNG_UPDATE;
        update->failed = (uint32_t)need->failed > update->failed
                             ? (uint32_t)need->failed
                             : update->failed;
        update->grads |= need->grads_out > 0;
        update->most = least_of(update->most, need->most);
        update->slice_bytes = (uint64_t)least_of((int64_t)update->slice_bytes,
                                                 (int64_t)need->slice_bytes);
    }
    if (update->rung > 0) {
        update->budget_bytes = oomkit_update_budget(call);
    }
}

void
oomkit_update_measured(oomkit_call *call, PyObject *optimizer, uint64_t bytes)
{
    oomkit_update_need *need = oomkit_update_need_of(call->parts, optimizer);

    if (need != NULL && bytes > need->peak) {
        need->peak = bytes;
    }
}
