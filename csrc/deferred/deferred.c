/* Calls whose loss was returned to a caller who runs backward: made when the call ends,
 * owned by the graph of that loss, freed with it. */
#include "deferred.h"
#include "../accum/accum.h"
#include "../accum/weights.h"
#include "../call/step.h"
#include "../plain/plain_state.h"
#include "../py/tensor.h"
#include "../result/result.h"
#include "../batch/batch.h"
#include "../undo/gradients.h"
#include "../undo/undo.h"

#include <structmember.h>

#define SMALL_BYTES (1u << 14)

/* --- the list of those that wait --- */

static void
deferred_link(oomkit_deferred *p)
{
    oomkit_participants *parts = p->parts;
    oomkit_state *st = p->st;

    p->serial = ++st->deferred_serial;
    p->next = parts->deferred;
    if (p->next != NULL) {
        p->next->previous = p;
    } else {
        parts->waiting_next = st->waiting;
        if (st->waiting != NULL) {
            st->waiting->waiting_previous = parts;
        }
        st->waiting = parts;
    }
    parts->deferred = p;
}

/* None of them waits any more. */
static void
parts_unlink(oomkit_state *st, oomkit_participants *parts)
{
    if (parts->waiting_previous != NULL) {
        parts->waiting_previous->waiting_next = parts->waiting_next;
    } else {
        st->waiting = parts->waiting_next;
    }
    if (parts->waiting_next != NULL) {
        parts->waiting_next->waiting_previous = parts->waiting_previous;
    }
    parts->waiting_next = parts->waiting_previous = NULL;
}

static void
deferred_unlink(oomkit_deferred *p)
{
    if (p->serial == 0) {
        return; /* it never waited */
    }
    p->serial = 0;
    if (p->previous != NULL) {
        p->previous->next = p->next;
    } else {
        p->parts->deferred = p->next;
        if (p->next == NULL) {
            parts_unlink(p->st, p->parts);
        }
    }
    if (p->next != NULL) {
        p->next->previous = p->previous;
    }
    p->next = p->previous = NULL;
}

void
oomkit_deferred_retire(oomkit_deferred *p)
{
    Py_ssize_t i, total = p->total;
    PyObject **args = p->args;
    oomkit_participants *parts = p->parts;
    struct oomkit_step *step = p->step;

    p->retired = 1;
    deferred_unlink(p);
    oomkit_eager_free(p); /* needs parts */
    p->parts = NULL;
    p->step = NULL;
    p->args = NULL;
    p->total = 0;
    for (i = 0; args != NULL && i < total; i++) {
        Py_XDECREF(args[i]);
    }
    PyMem_Free(args);
    Py_CLEAR(p->kwnames);
    Py_CLEAR(p->gradient);
    Py_CLEAR(p->others);
    oomkit_loss_drop(&p->value);
    oomkit_batch_release(&p->batch);
    oomkit_savepoint_free(&p->entry);
    oomkit_after_free(&p->after);
    oomkit_modes_clear(&p->modes);
    PyMem_Free(p->slices);
    p->slices = NULL;
    p->slice_count = 0;
    oomkit_participants_release(parts);
    Py_XDECREF((PyObject *)step);
}

/* --- arrival of a gradient --- */

int
oomkit_deferred_gradient(oomkit_deferred *p, PyObject *gradient)
{
    if (oomkit_tensor_version(p->st, gradient, &p->gradient_version) < 0) {
        return -1;
    }
    Py_XSETREF(p->gradient, Py_NewRef(gradient));
    return 0;
}

/* The hook: called by the engine with a tuple of gradients (a pre-hook of the loss's
 * node), or by our own node with one. Answers None: nothing is changed. */
static PyObject *
deferred_vectorcall(PyObject *op, PyObject *const *args, size_t nargsf,
                    PyObject *Py_UNUSED(kwnames))
{
    oomkit_deferred *p = deferred_CAST(op);
    PyObject *gradient = PyVectorcall_NARGS(nargsf) > 0 ? args[0] : Py_None;

    if (PyTuple_Check(gradient)) {
        Py_ssize_t at = PyTuple_GET_SIZE(gradient) == 1 ? 0 : p->output;
        gradient = at < PyTuple_GET_SIZE(gradient) ? PyTuple_GET_ITEM(gradient, at)
                                                   : Py_None; /* borrowed */
    }
    if (!p->retired && oomkit_callers_claim(p) < 0) {
        return NULL;
    }
    if (p->kind != OOMKIT_RETURNED_WHOLE && p->retired) {
        return oomkit_raise(
            PyExc_RuntimeError,
            "oomkit: backward through a split loss a second time, but its gradients "
            "were freed after the first. Call backward() once, or pass "
            "retain_graph=True the first time" SEE("returned-loss"));
    }
    if (p->kind != OOMKIT_RETURNED_WHOLE && p->callers == NULL &&
        oomkit_call_current() != NULL) {
        return oomkit_raise(
            p->st->SplitError,
            "backward() of a loss that %U computed in micro-batches was called inside "
            "another decorated step: call it outside, or make one decorated step of "
            "both" SEE("returned-loss"),
            p->step->options.label);
    }
    if (p->kind != OOMKIT_RETURNED_WHOLE && p->callers == NULL) {
        return oomkit_raise(
            p->st->SplitError,
            "the gradient of a loss that auto_batch computed in micro-batches must "
            "come from loss.backward() or torch.autograd.backward(), not from "
            "autograd.grad() or the engine itself; pass backward=True to "
            "auto_batch" SEE("returned-loss"));
    }
    oomkit_callers_arrived(
        p); /* if by another output, its graph is reached all the same */
    if (p->callers != NULL && gradient != Py_None) {
        if (oomkit_deferred_gradient(p, gradient) < 0) {
            return NULL;
        }
        p->fired = 1;
    }
    Py_RETURN_NONE;
}

/* --- made when a call ends --- */

/* It will not be: the marks are the call's again. Takes the reference to `p`. */
static void
deferred_unmake(oomkit_deferred *p, oomkit_call *call)
{
    oomkit_savepoint_move_back(call, &p->entry);
    Py_DECREF(p);
}

/* `loss` and `result` are those of a whole call; NULL where a split one has none that
 * its arguments could lead to. */
static oomkit_deferred *
deferred_new(oomkit_call *call, oomkit_returned kind, PyObject *loss, PyObject *result)
{
    oomkit_state *st = call->st;
    PyTypeObject *type = (PyTypeObject *)st->deferred_type;
    oomkit_deferred *p = deferred_CAST(type->tp_alloc(type, 0)); /* owned */

    if (p == NULL) {
        return NULL;
    }
    p->st = st;
    p->vectorcall = deferred_vectorcall;
    p->kind = kind;
    p->step = (struct oomkit_step *)Py_NewRef((PyObject *)call->step);
    p->parts = call->parts;
    p->parts->refs++;
    p->device = call->device;
    p->number = call->log.number;
    p->record = call->log.record;
    p->signature = call->shape.signature;
    if (oomkit_deferred_arguments(p, call, loss, result) < 0 ||
        oomkit_modes_note(call, &p->modes) < 0 || oomkit_flags_note_end(call) < 0) {
        Py_DECREF(p);
        return NULL;
    }
    oomkit_batch_move(&p->batch, &call->batch, p->args);
    oomkit_savepoint_move(&p->entry, &call->entry);
    if (oomkit_deferred_containers(p, loss, result) < 0 ||
        oomkit_after_note(call, &p->entry, &p->after) < 0 ||
        oomkit_savepoint_slim(st, &p->entry) < 0) { /* last: it cannot be undone */
        deferred_unmake(p, call);
        return NULL;
    }
    return p;
}

/* Hangs it onto the node that made the loss, below any later in-place operation. */
static int
deferred_hang(oomkit_deferred *p, PyObject *node)
{
    OWNED PyObject *metadata = PyObject_GetAttr(node, p->st->str_metadata);

    return metadata == NULL
               ? -1
               : PyObject_SetItem(metadata, p->st->str_oomkit, (PyObject *)p);
}

/* As oomkit_result_wants_backward(), and what its size tells. */
static int
deferred_loss(oomkit_state *st, PyObject *result, PyObject **loss, int *small,
              int *single)
{
    oomkit_tensor_facts facts;
    int wants = oomkit_result_wants_backward(st, result, loss, &facts);

    if (wants > 0) {
        *small = facts.bytes <= SMALL_BYTES;
        *single = facts.size == 1 ? (int)facts.ndim : 0; /* 0-d: its size is -1 */
    }
    return wants;
}

/* One element in front where the batch has several rows: no row per sample. */
static int
single_is_loss(const oomkit_call *call, int dimensions)
{
    return (dimensions == 1 || call->options->dim == 0) &&
           oomkit_batch_rows(&call->batch) > 1;
}

int
oomkit_deferred_offer(oomkit_call *call, PyObject *result)
{
    oomkit_state *st = call->st;
    OWNED PyObject *loss = NULL, *node = NULL, *number = NULL;
    oomkit_deferred *p; /* owned, then by the node */
    int small = 0, single = 0;
    int state = deferred_loss(st, result, &loss, &small, &single);

    if (state <= 0) {
        return state;
    }
    call->step->single_loss = 1 + (single > 0 && single_is_loss(call, single));
    if (oomkit_losses_note(call, loss) < 0) {
        return -1;
    }
    oomkit_losses_learn(call, oomkit_batch_rows(&call->batch));
    node = PyObject_GetAttr(loss, st->str_grad_fn);
    if (node == NULL || node == Py_None) { /* a leaf has no forward to run again */
        return node == NULL ? -1 : 0;
    }
    number = PyObject_GetAttr(loss, st->str_output_nr);
    p = number ? deferred_new(call, OOMKIT_RETURNED_WHOLE, loss, result) : NULL;
    if (p == NULL) {
        return -1;
    }
    oomkit_loss_take(st, loss, &p->value);
    p->small = small;
    if (small && !oomkit_loss_known(&p->value)) {
        oomkit_loss_rows_take(st, loss, &p->value);
    }
    p->output = PyLong_AsSsize_t(number);
    p->hooks_inside = oomkit_hooks_of(loss, st->str_backward_hooks);
    if (PyErr_Occurred() || oomkit_deferred_others(p, result, loss) < 0 ||
        (Py_TYPE(node) != call->step->plain_node &&
         oomkit_deferred_base(p, loss, &node) < 0) ||
        deferred_hang(p, node) < 0) {
        deferred_unmake(p, call);
        return -1;
    }
    deferred_link(p);
    Py_DECREF(p);
    return 0;
}

int
oomkit_deferred_attach(oomkit_call *call, PyObject *result)
{
    oomkit_state *st = call->st;
    OWNED PyObject *done = NULL;
    OWNED PyObject *loss =
        oomkit_result_loss_at(st, result, oomkit_join_loss_at(&call->cut->join));
    oomkit_deferred *p; /* owned, then by the node */
    oomkit_tensor_facts facts;
    if (loss == NULL) {
        if (!PyErr_Occurred()) {
            oomkit_raise(
                st->SplitError,
                "auto_batch(join=...) must keep the loss that the step returned (a "
                "tensor, a tuple with one, a mapping with 'loss'), got %s" SEE(
                    "returned-loss"),
                Py_TYPE(result)->tp_name);
        }
        return -1;
    }
    p = deferred_new(call, call->deferred.returned, NULL, NULL);
    if (p == NULL) {
        return -1;
    }
    p->small =
        oomkit_tensor_facts_get(st, loss, 0, &facts) == 0 && facts.bytes <= SMALL_BYTES;
    p->slices = call->cut->slices;
    p->slice_count = call->cut->count;
    call->cut->slices = NULL;
    call->cut->count = call->cut->room = 0;
    p->eager = oomkit_grads_take_parked(call);
    p->eager_count = call->parts->param_count;
    p->assumed = call->deferred.assumed;
    EXEMPT (st) { /* a few bytes: there is no way back from here */
        done = oomkit_deferred_others(p, result, loss) < 0
                   ? NULL
                   : PyObject_CallFunctionObjArgs(st->split_loss, loss, p, NULL);
    }
    if (done == NULL) {
        deferred_unmake(p, call);
        return -1;
    }
    deferred_link(p);
    Py_DECREF(p);
    return 0;
}

/* --- the type --- */

static int
deferred_traverse(PyObject *op, visitproc visit, void *arg)
{
    oomkit_deferred *p = deferred_CAST(op);
    Py_ssize_t i;

    Py_VISIT(Py_TYPE(op));
    Py_VISIT((PyObject *)p->step);
    for (i = 0; p->args != NULL && i < p->total; i++) {
        Py_VISIT(p->args[i]);
    }
    Py_VISIT(p->gradient);
    return oomkit_savepoint_traverse(&p->entry, visit, arg);
}

static int
deferred_clear(PyObject *op)
{
    if (!deferred_CAST(op)->retired) {
        oomkit_deferred_retire(deferred_CAST(op));
    }
    return 0;
}

static void
deferred_dealloc(PyObject *op)
{
    PyTypeObject *tp = Py_TYPE(op);
    KEEPING_EXCEPTION {
        PyObject_GC_UnTrack(op);
        deferred_clear(op);
        Py_CLEAR(deferred_CAST(op)->gradient);
        tp->tp_free(op);
        Py_DECREF(tp);
    }
}

static PyMemberDef deferred_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(oomkit_deferred, vectorcall),
     READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot deferred_slots[] = {
    {Py_tp_dealloc, deferred_dealloc}, {Py_tp_traverse, deferred_traverse},
    {Py_tp_clear, deferred_clear},     {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, deferred_members}, {0, NULL},
};

PyType_Spec oomkit_deferred_spec = {
    .name = "oomkit._C._Pending",
    .basicsize = sizeof(oomkit_deferred),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = deferred_slots,
};
