/* Surroundings in which a replay would do harm whatever the step looks like:
 * collectives that other ranks would wait for, and a stream that is being captured.
 * Asked only after an OOM and before a split, never in a healthy call. */
#include "call.h"
#include "../py/tensor.h"

/* Is more than one rank at work? 1, 0 or -1. */
static int
several_ranks(void)
{
    OWNED PyObject *module = NULL, *size = NULL;
    int result = oomkit_imported_says("torch.distributed", "is_initialized");
    long world;

    if (result <= 0) {
        return result;
    }
    module = oomkit_imported("torch.distributed");
    size = module == NULL ? NULL : PyObject_CallMethod(module, "get_world_size", NULL);
    if (size == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    world = PyLong_AsLong(size);
    if (world == -1 && PyErr_Occurred()) {
        return -1;
    }
    return world > 1;
}

int
oomkit_ranks_watched(oomkit_state *st)
{
    OWNED PyObject *done = NULL;
    int several = several_ranks();

    if (several > 0) {
        done = PyObject_CallNoArgs(st->ranks_watch);
        several = done == NULL ? -1 : 1;
    }
    return several;
}

/* By the names of its classes: fully_shard() derives one of its own from the user's. */
static int
is_wrapper_type(PyTypeObject *type)
{
    static const char *const names[] = {"DistributedDataParallel",
                                        "FullyShardedDataParallel", "FSDPModule",
                                        "DeepSpeedEngine", "MegatronModule"};
    PyObject *mro = type->tp_mro; /* borrowed */
    Py_ssize_t i;
    size_t n;

    for (i = 0; mro != NULL && i < PyTuple_GET_SIZE(mro); i++) {
        const char *name = ((PyTypeObject *)PyTuple_GET_ITEM(mro, i))->tp_name;
        for (n = 0; n < sizeof(names) / sizeof(*names); n++) {
            if (strcmp(name, names[n]) == 0) {
                return 1;
            }
        }
    }
    return 0;
}

/* Has it parameters that are spread over ranks, with no wrapper (tensor parallelism)?
 */
static int
has_spread_params(const oomkit_call *call)
{
    Py_ssize_t i;

    for (i = 0; i < call->parts->param_count; i++) {
        if (strcmp(Py_TYPE(call->parts->params[i])->tp_name, "DTensor") == 0) {
            return 1;
        }
    }
    return 0;
}

/* Modules that wrap others for several ranks: even alone their reducers keep state that
 * a roll-back does not reach; and stages of pipelines. New list or NULL. */
PyObject *
oomkit_wrappers(oomkit_call *call)
{
    PyObject *roots = call->parts->roots; /* borrowed */
    PyTypeObject *last = NULL; /* compared alone: modules alike follow each other */
    OWNED PyObject *found = PyList_New(0);
    Py_ssize_t i;

    for (i = 0; found != NULL && roots != NULL && i < PyList_GET_SIZE(roots); i++) {
        OWNED PyObject *root = NULL;
        if (call->parts->wrapped > 0 &&
            PyList_GET_SIZE(found) == call->parts->wrapped) {
            break; /* in each call of a healthy step: there are no more */
        }
        root = oomkit_reference_get(PyList_GET_ITEM(roots, i));
        if (root == NULL || Py_TYPE(root) == last) {
            continue;
        }
        if (!is_wrapper_type(Py_TYPE(root))) {
            last = Py_TYPE(root);
        } else if (PyList_Append(found, root) < 0) {
            return NULL;
        }
    }
    EACH_OWNER (one, call->parts, OWNERS_OF(OOMKIT_OWNER_PIPELINE)) {
        if (found != NULL && PyList_Append(found, one.object) < 0) {
            return NULL;
        }
    }
    if (found != NULL && PyList_GET_SIZE(found) == 0 && has_spread_params(call)) {
        OWNED PyObject *root = roots == NULL || PyList_GET_SIZE(roots) == 0
                                   ? Py_NewRef(Py_None)
                                   : oomkit_reference_get(PyList_GET_ITEM(roots, 0));
        if (root != NULL && PyList_Append(found, root) < 0) {
            return NULL;
        }
    }
    return STEAL(found);
}

int
oomkit_wrappers_any(oomkit_call *call)
{
    OWNED PyObject *found = NULL;

    if (call->parts->wrapped == 0) {
        found = oomkit_wrappers(call);
        if (found == NULL) {
            return -1;
        }
        call->parts->wrapped = PyList_GET_SIZE(found) > 0 ? PyList_GET_SIZE(found) : -1;
    }
    return call->parts->wrapped > 0;
}

/* Is a transform of torch.func running on this thread? Its tensors hide dimensions:
 * what looks like the rows of a batch is not. 1, 0 or -1. */
int
oomkit_refusal_transform(oomkit_state *st)
{
    OWNED PyObject *level = NULL;

    if (st->functorch_level == NULL) {
        return 0;
    }
    level = PyObject_CallNoArgs(st->functorch_level);
    return level == NULL ? -1 : level != Py_None;
}

/* Has the device graphs of torch.compile(mode="reduce-overhead")? Where a gradient or a
 * result of one micro-batch is, they write that of the next: torch raises an error in
 * the first call, and in later ones gradients are silently those of the last one twice
 * (seen on an H100 with 2.11, without oomkit). Graphs of other steps count, for torch
 * does not tell whose they are. 1, 0 or -1. */
static int
has_graphs(const oomkit_call *call)
{
    OWNED PyObject *module = NULL, *manager = NULL;
    int has;

    if (call->device.type == OOMKIT_DEVICE_CPU) {
        return 0;
    }
    module = oomkit_imported("torch._inductor.cudagraph_trees");
    if (module == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    has = oomkit_has_attribute_string(module, "get_manager");
    if (has <= 0) {
        return has;
    }
    manager =
        PyObject_CallMethod(module, "get_manager", "iO", call->device.index, Py_False);
    return manager == NULL ? -1 : manager != Py_None;
}

static const char graphs_text[] =
    "torch.compile(mode=\"reduce-overhead\") has CUDA graphs on this device, which "
    "write "
    "gradients and results where those of the micro-batch before are: compile with "
    "mode=\"default\" or mode=\"max-autotune-no-cudagraphs\"";

int
oomkit_refuse_graphs(oomkit_call *call)
{
    int has = has_graphs(call);

    return has > 0 ? oomkit_refuse_step(call, "%s" SEE("not-retried"), graphs_text)
                   : has;
}

/* Does it need no gradients, as far as is known, so that other ranks have no part in
 * it? Collectives of its own are told from now on: in micro-batches they are an error.
 * 1, 0 or -1. */
static int
evaluation_alone(oomkit_call *call)
{
    int wrapped = oomkit_wrappers_any(call);

    if (wrapped != 0 || call->training || !oomkit_modes_without_grad(call)) {
        return wrapped < 0 ? -1 : 0;
    }
    return oomkit_ranks_watched(call->st) < 0 ? -1 : 1;
}

/* Why this call must not be replayed or split: a static text, or NULL. -1 on error. */
int
oomkit_refusal(oomkit_call *call, const char **why)
{
    int state;

    *why = NULL;
    state = oomkit_ranks_agreed(call) ? 0 : several_ranks();
    if (state == 0 && !oomkit_ranks_agreed(call)) {
        state = oomkit_wrappers_any(call);
    } else if (state > 0) {
        state = evaluation_alone(call);
        state = state < 0 ? -1 : !state;
    }
    if (state != 0) {
        *why = "distributed training: a replay would leave the other ranks waiting in "
               "their collectives; call backward() inside the decorated step, over a "
               "DistributedDataParallel model that it names";
        return state < 0 ? -1 : 0;
    }
    state = oomkit_refusal_transform(call->st);
    if (state != 0) {
        *why = "it is called inside a transform of torch.func (grad, vmap, jacrev), "
               "whose tensors hide the batch: call the transform inside the decorated "
               "step";
        return state < 0 ? -1 : 0;
    }
    state = has_graphs(call);
    if (state != 0) {
        *why = graphs_text;
        return state < 0 ? -1 : 0;
    }
    state = oomkit_is_capturing();
    if (state != 0) {
        *why = "a CUDA graph is being captured: capture the step with the micro-batch "
               "that fits, outside auto_batch";
    }
    return state < 0 ? -1 : 0;
}
