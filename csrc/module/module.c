/* oomkit._C: the table of contents. Nothing includes this file. */
#include "error_methods.h"
#include "memory_methods.h"
#include "outcome.h"
#include "release_methods.h"
#include "split_methods.h"
#include "wiring.h"
#include "../accum/accum.h"
#include "../accum/module_attributes.h"
#include "../deferred/deferred.h"
#include "../hook/hook.h"
#include "../ladder/offload.h"
#include "../loop/chunks.h"
#include "../loop/parts_join.h"
#include "../proof/proof.h"
#include "../ranks/agree.h"
#include "../py/tensor.h"
#include "../sizes/remember.h"
#include "../tree/splitters.h"
#include "../types/current.h"
#include "../ranks/ranks.h"
#include "../types/heap_types.h"
#include "../types/step_type.h"
#include "../undo/generator.h"
#include "../undo/undo.h"

PyMODINIT_FUNC
PyInit__C(void);

PyDoc_STRVAR(
    auto_batch_doc,
    "auto_batch(fn=None, /, *, batch=None, static=(), dim=0, split=None, join=None,\n"
    "           model=None, optimizer=None, participants=(), backward=None,\n"
    "           reduction='mean', weight=None, global_weight=False, verify=None,\n"
    "           accumulation_steps=1, min_micro_batch=1, multiple_of=1,\n"
    "           rng='torch', gradient_safety='auto',\n"
    "           optimizer_safety='predict', ladder='auto', restore_batch=False,\n"
    "           hooks='warn', remember=None, on_retry=None, sinks=None, "
    "           label=None, "
    "reset_peaks=True, phases=False)\n"
    "--\n\n"
    "Make a training or evaluation step that survives running out of memory.\n\n"
    "Until the first out-of-memory error the decorated step is the undecorated one. "
    "Then\n"
    "everything that the failed attempt touched is rolled back (gradients, buffers, "
    "random\n"
    "streams), the micro-batch is halved, the accumulation doubled, and the step "
    "replayed,\n"
    "so that the result is the whole batch's. Sizes found are kept for later calls.\n\n"
    "Args:\n"
    "    fn: the step: a function that takes the batch as an argument and contains "
    "the\n"
    "        backward (or needs none).\n"
    "    batch: name (or names) of the arguments to split; found by itself otherwise: "
    "the\n"
    "        first argument that is or holds a tensor, and others of the same length.\n"
    "    static: names of arguments, or parts (\"batch['weights']\"), passed whole.\n"
    "    dim: the batch dimension of the tensors, or a dict of it by argument name.\n"
    "    split: ``split(batch, start, length)`` for a batch of a type of your own.\n"
    "    join: ``join(results, rows)`` in place of the rules for joining results.\n"
    "    model, optimizer: what takes part, when it cannot be found in arguments, "
    "self,\n"
    "        closure and globals of the step. Kept by weak reference.\n"
    "    participants: further objects to roll back: with ``state_dict()`` and\n"
    "        ``load_state_dict()``, or ``save()`` and ``restore()``.\n"
    "    backward: True, or a callable such as ``accelerator.backward``: oomkit runs "
    "the\n"
    "        backward of the returned scalar loss inside the call.\n"
    "    reduction: 'mean' (a micro-batch of n of N rows weighs n/N) or 'sum' (1). A\n"
    "        call that passes ``num_items_in_batch`` and not None is a sum unless\n"
    "        reduction or weight is given: the step divides by that number itself.\n"
    "    weight: ``weight(batch)`` -> number >= 0, for losses that are a mean over\n"
    "        something other than rows (tokens: the number of labels that are not "
    "-100;\n"
    "        weighted classes: the sum of the targets' weights); shares of the sum "
    "are\n"
    "        used. It gets the arguments that are split, sliced: one object, or a "
    "tuple\n"
    "        of several. A tuple or list of numbers is one for each backward() of the\n"
    "        step, in order, each with shares of its own sum. A returned tuple or "
    "list\n"
    "        of as many losses is then joined one by one; any other returned number "
    "is\n"
    "        joined with the first weight, so that a sum of several losses is not "
    "exact\n"
    "        (gradients are); it warns once.\n"
    "    global_weight: with several ranks, over DistributedDataParallel or\n"
    "        fully_shard(): shares are of what weight= counts on all of them, so that\n"
    "        the mean of the ranks' gradients is one over the items of all.\n"
    "    verify: before the first update of a split call, run the rows of its "
    "largest\n"
    "        micro-batch whole and then in two parts, as the split call would, and\n"
    "        compare gradients, results and what updates are given. SplitError where\n"
    "        they differ by more than rounding; everything is put back. None: once "
    "for\n"
    "        each structure of the batch, set of participants and code path of the "
    "step;\n"
    "        True: for each shape; 'warn': a warning in place of the error; False:\n"
    "        never. It costs about two more forwards and backwards of a micro-batch;\n"
    "        other effects of the step (prints) happen as often.\n"
    "    accumulation_steps: number of micro-batches to start from.\n"
    "    min_micro_batch, multiple_of: bounds of the micro-batch, in rows.\n"
    "    rng: 'torch' (torch's generators, Python's and numpy's where the code names\n"
    "        them), 'all', or 'none'.\n"
    "    gradient_safety: 'auto', 'copy' or 'off': host copies of gradients that are "
    "there\n"
    "        before the step.\n"
    "    optimizer_safety: 'predict'; 'parts' (every update of an optimizer that "
    "treats\n"
    "        its parameters one by one is made in parts, each after a host copy: an "
    "OOM\n"
    "        inside ``optimizer.step()`` is undone and retried); or 'copy' (the same "
    "by "
    "a\n"
    "        host copy of all parameters and optimizer state, for any optimizer).\n"
    "    ladder: what may be done where the smallest micro-batch does not fit, in "
    "this\n"
    "        order: 'update' (updates in parts), 'state' (optimizer state in host\n"
    "        memory), 'activations' (what autograd saves in host memory), 'recompute'\n"
    "        (repeated modules under torch.utils.checkpoint). 'auto': all of them; a\n"
    "        tuple of names: those; (): none. In a trial of oomkit.optuna none, "
    "unless\n"
    "        given.\n"
    "    restore_batch: keep a host copy of the batch, for steps that change it in "
    "place.\n"
    "    on_retry: ``on_retry(record)`` before every replay.\n"
    "    sinks: callables that get the record of each call (see oomkit.sinks).\n"
    "    label: name in records and reports.\n"
    "    reset_peaks: whether the device's peak counters are reset at entry.\n"
    "    phases: also measure memory and time of each phase (forward, backward, "
    "optimizer),\n"
    "        for records and reports.\n"
    "    hooks: 'warn' (a warning, once) or 'error' when a split meets hooks on "
    "gradients,\n"
    "        which are exact only if they are linear.\n"
    "    remember: True: sizes found are kept in a small file of the user's, and a "
    "later\n"
    "        run of the same step begins with them (see oomkit.sizes). None: what the\n"
    "        environment variable OOMKIT_REMEMBER says (1), else False.\n\n"
    "Returns:\n"
    "    A callable like ``fn`` with ``.records`` (tuple of StepRecord) and "
    "``.label``; or,\n"
    "    without ``fn``, a decorator.\n\n"
    "Raises:\n"
    "    oomkit.OutOfMemory: nothing smaller is allowed, or (``.committed``) the "
    "update was\n"
    "        applied already.\n"
    "    oomkit.PartialUpdate: an optimizer ran out of memory half-way.\n"
    "    oomkit.SplitError: the step or the batch cannot be split exactly.\n");

/* What the engine calls of the package, by name. 0, or -1 with an exception. */
static int
module_bind_glue(oomkit_state *st, PyObject *glue)
{
#define BIND_GLUE(field)                                                               \
    {                                                                                  \
        PyObject *value = oomkit_item(glue, #field); /* borrowed */                    \
        if (value == NULL) {                                                           \
            PyErr_SetString(PyExc_KeyError, #field);                                   \
            return -1;                                                                 \
        }                                                                              \
        Py_XSETREF(st->field, Py_NewRef(value));                                       \
    }
    OOMKIT_STATE_GLUE(BIND_GLUE)
#undef BIND_GLUE
    return 0;
}

static PyObject *
module_bind(PyObject *module, PyObject *args)
{
    oomkit_state *st = oomkit_state_of_module(module);
    PyObject *capsule, *glue; /* borrowed from args */

    if (!PyArg_ParseTuple(args, "OO!:_bind", &capsule, &PyDict_Type, &glue)) {
        return NULL;
    }
    if (oomkit_state_bind(st, capsule) < 0 || oomkit_stream_calibrate(st) < 0 ||
        module_bind_glue(st, glue) < 0) {
        return NULL;
    }
    /* The last of them: an import that failed half-way is tried again in this module.
     */
    if (st->OomkitWarning == NULL && oomkit_errors_init(st) < 0) {
        return NULL;
    }
    if (PyModule_AddObjectRef(module, "OomkitError", st->OomkitError) < 0 ||
        PyModule_AddObjectRef(module, "OutOfMemory", st->OutOfMemory) < 0 ||
        PyModule_AddObjectRef(module, "PartialUpdate", st->PartialUpdate) < 0 ||
        PyModule_AddObjectRef(module, "SplitError", st->SplitError) < 0 ||
        PyModule_AddObjectRef(module, "RankError", st->RankError) < 0 ||
        PyModule_AddObjectRef(module, "OomkitWarning", st->OomkitWarning) < 0) {
        return NULL;
    }
    return PyBool_FromLong(oomkit_has_bridge(st));
}

static PyObject *
module_live_steps(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    oomkit_state *st = oomkit_state_of_module(module);
    return st->live_steps == NULL ? PyList_New(0) : PySequence_List(st->live_steps);
}

static PyObject *
module_histories(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    OWNED PyObject *live = module_live_steps(module, NULL);

    return live == NULL ? NULL : oomkit_histories(oomkit_state_of_module(module), live);
}

static PyObject *
module_outside_limit(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    OWNED PyObject *live = module_live_steps(module, NULL), *list = PyList_New(0);
    Py_ssize_t i;

    if (live == NULL || list == NULL) {
        return NULL;
    }
    for (i = 0; i < PyList_GET_SIZE(live); i++) {
        const oomkit_step *step = step_CAST(PyList_GET_ITEM(live, i));
        const uint64_t bytes = oomkit_holders_outside(step);
        OWNED PyObject *entry = NULL;
        if (bytes == 0) {
            continue;
        }
        entry = Py_BuildValue("(OK)", step->options.label, (unsigned long long)bytes);
        if (entry == NULL || PyList_Append(list, entry) < 0) {
            return NULL;
        }
    }
    return STEAL(list);
}

static PyObject *
module_set_sinks_attached(PyObject *module, PyObject *given)
{
    const int attached = PyObject_IsTrue(given);

    if (attached < 0) {
        return NULL;
    }
    oomkit_state_of_module(module)->sinks_attached = attached;
    Py_RETURN_NONE;
}

static PyObject *
module_set_phases_wanted(PyObject *module, PyObject *given)
{
    const int wanted = PyObject_IsTrue(given);

    if (wanted < 0) {
        return NULL;
    }
    oomkit_state_of_module(module)->phases_wanted = wanted;
    Py_RETURN_NONE;
}

static PyObject *
module_forget_records(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    OWNED PyObject *live = module_live_steps(module, NULL);
    Py_ssize_t i;

    for (i = 0; live != NULL && i < PyList_GET_SIZE(live); i++) {
        oomkit_history_forget(step_CAST(PyList_GET_ITEM(live, i))->history);
    }
    Py_CLEAR(oomkit_state_of_module(module)->gone);
    return live == NULL ? NULL : Py_NewRef(Py_None);
}

static PyObject *
module_watch_backward(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    if (oomkit_backward_install(oomkit_state_of_module(module)) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Registration hooks of torch.nn.Module: (module, name, value) -> None. */
static PyObject *
module_structure_changed(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    oomkit_state *st = oomkit_state_of_module(module);

    st->structure_generation++;
    if (count >= 3 && oomkit_parameter_joins(st, args[2]) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* (scheduler) -> None */
static PyObject *
module_scheduler_made(PyObject *module, PyObject *scheduler)
{
    if (oomkit_hidden_made(oomkit_state_of_module(module), scheduler) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* A buffer that is bound again is no change of structure, a new one is. */
static PyObject *
module_buffer_changed(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    oomkit_state *st = oomkit_state_of_module(module);
    int known = 0;

    if (count >= 2) {
        OWNED PyObject *buffers = PyObject_GetAttr(args[0], st->str_buffers);
        if (buffers == NULL) {
            return NULL;
        }
        known = PyDict_Check(buffers) ? PyDict_Contains(buffers, args[1]) : 0;
        if (known < 0) {
            return NULL;
        }
        if (PyDict_Check(buffers) && PyDict_GET_SIZE(buffers) == 0) {
            oomkit_hidden_buffered(st, args[0]);
        }
    }
    if (!known) {
        st->structure_generation++;
    }
    Py_RETURN_NONE;
}

/* Hooks of torch.optim: (optimizer, args, kwargs) -> None. */
static PyObject *
module_optimizer_begins(PyObject *Py_UNUSED(module), PyObject *const *args,
                        Py_ssize_t count)
{
    if (count > 0 && oomkit_unknown_optimizer_begins(args[0]) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
module_optimizer_ends(PyObject *Py_UNUSED(module), PyObject *const *Py_UNUSED(args),
                      Py_ssize_t Py_UNUSED(count))
{
    oomkit_unknown_optimizer_ends();
    Py_RETURN_NONE;
}

/* A hook before every module's forward: (module, arguments) -> None. */
static PyObject *
module_forward_begins(PyObject *Py_UNUSED(module), PyObject *const *args,
                      Py_ssize_t count)
{
    if (count > 0 && oomkit_forward_begins(args[0]) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* The forward of this module is about to run. */
static PyObject *
module_module_runs(PyObject *Py_UNUSED(module), PyObject *target)
{
    if (oomkit_forwards_see(target) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* torch.nn.Module.train() is about to set the flag of this module. */
static PyObject *
module_mode_changes(PyObject *module, PyObject *target)
{
    if (oomkit_flags_note(oomkit_state_of_module(module), target) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* The user's code registers a hook, or is about to remove it: tables, id, and what
 * oomkit_hooks_note() gets. */
static PyObject *
module_hooks_change(PyObject *module, PyObject *args)
{
    const oomkit_state *st = oomkit_state_of_module(module);
    PyObject *tables, *id, *registered; /* borrowed */
    Py_ssize_t i;

    if (!PyArg_ParseTuple(args, "O!OO", &PyTuple_Type, &tables, &id, &registered)) {
        return NULL;
    }
    for (i = 0; i < PyTuple_GET_SIZE(tables); i++) {
        if (oomkit_hooks_note(st, PyTuple_GET_ITEM(tables, i), id, registered) < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

static PyObject *
module_hooks_count(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    const oomkit_call *call = oomkit_call_noting(oomkit_state_of_module(module));

    return Py_NewRef(call == NULL ? Py_None
                     : call->given.is_body || call->given.func == NULL
                         ? Py_True
                         : call->given.func);
}

/* torch.nn.Module.zero_grad() is about to clear the gradients of this module. */
static PyObject *
module_zero_grad_begins(PyObject *Py_UNUSED(module), PyObject *target)
{
    if (oomkit_intercept_zero_grad_begins(target) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
module_tensor_sample(PyObject *module, PyObject *tensor)
{
    const oomkit_state *st = oomkit_state_of_module(module);
    uint64_t hash = oomkit_tensor_check(st, tensor)
                        ? st->bridge->sample(tensor, st->impl_offset)
                        : 0;
    return PyLong_FromUnsignedLongLong(hash);
}

/* (name, value) of what is not in `but`: modules are many and have little of their own.
 * A name is a plain str: any other key may have an == of its own. New list or NULL. */
static PyObject *
attributes_of(PyObject *object, PyObject *but)
{
    OWNED PyObject *found = PyList_New(0), *own = NULL;
    Py_ssize_t i;

    own = found == NULL || PyType_Check(object) ? NULL : oomkit_own_attributes(object);
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear(); /* slots alone */
    }
    for (i = 0; own != NULL && i < PyTuple_GET_SIZE(own); i += 2) {
        PyObject *name = PyTuple_GET_ITEM(own, i); /* borrowed */
        OWNED PyObject *pair = NULL;
        int skip = PyUnicode_CheckExact(name) ? PySet_Contains(but, name) : 1;
        if (skip == 1) {
            continue;
        }
        pair = skip < 0 ? NULL : PyTuple_Pack(2, name, PyTuple_GET_ITEM(own, i + 1));
        if (pair == NULL || PyList_Append(found, pair) < 0) {
            return NULL;
        }
    }
    return PyErr_Occurred() ? NULL : STEAL(found);
}

static PyObject *
module_attributes(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 2 || !PyAnySet_Check(args[1])) {
        PyErr_SetString(
            PyExc_TypeError,
            "_attributes() expected an object and a set" SEE("internal-error"));
        return NULL;
    }
    return attributes_of(args[0], args[1]);
}

static PyMethodDef module_methods[] = {
    {"auto_batch", (PyCFunction)(void (*)(void))oomkit_auto_batch,
     METH_VARARGS | METH_KEYWORDS, auto_batch_doc},
    {"register_splitter", (PyCFunction)(void (*)(void))oomkit_register_splitter,
     METH_VARARGS | METH_KEYWORDS, OOMKIT_REGISTER_SPLITTER_DOC},
    {"histories", module_histories, METH_NOARGS,
     "histories()\n--\n\n(label, StepSummary, records) of "
     "every label, those of functions that are gone included (list)."},
    {"outside_limit", module_outside_limit, METH_NOARGS,
     "outside_limit()\n--\n\n(label, bytes of parameters on the CPU that are not "
     "counted) of the decorated steps that have been called (list)."},
    {"set_phases_wanted", module_set_phases_wanted, METH_O,
     "set_phases_wanted(wanted, /)\n--\n\nThe default of auto_batch(phases=)."},
    {"set_sinks_attached", module_set_sinks_attached, METH_O,
     "set_sinks_attached(attached, /)\n--\n\nHave every record told to oomkit.sinks, "
     "or "
     "those of sinks= alone."},
    {"forget_records", module_forget_records, METH_NOARGS,
     "forget_records()\n--\n\nForget the records of all steps, alive or gone."},
    {"live_steps", module_live_steps, METH_NOARGS,
     "live_steps()\n--\n\nThe decorated steps that are alive (list)."},
    {"_bind", module_bind, METH_VARARGS,
     "_bind(bridge, glue, /)\n--\n\nConnect to torch; True with a bridge."},
    {"_watch_backward", module_watch_backward, METH_NOARGS,
     "_watch_backward()\n--\n\nSee every backward from now on."},
    {"_structure_changed", (PyCFunction)(void (*)(void))module_structure_changed,
     METH_FASTCALL, "_structure_changed(module, name, value, /)\n--\n\nA torch hook."},
    {"_buffer_changed", (PyCFunction)(void (*)(void))module_buffer_changed,
     METH_FASTCALL, "_buffer_changed(module, name, value, /)\n--\n\nA torch hook."},
    {"_forward_begins", (PyCFunction)(void (*)(void))module_forward_begins,
     METH_FASTCALL, "_forward_begins(module, arguments, /)\n--\n\nA torch hook."},
    {"_tensor_sample", module_tensor_sample, METH_O,
     "_tensor_sample(tensor, /)\n--\n\n"
     "A hash of 64 values of a plain CPU tensor; 0 of every other one."},
    {"_attributes", (PyCFunction)(void (*)(void))module_attributes, METH_FASTCALL,
     "_attributes(object, but, /)\n--\n\n"
     "(name, value) of each name that is a str and is not in the set `but`."},
    {"_scheduler_made", module_scheduler_made, METH_O,
     "_scheduler_made(scheduler, /)\n--\n\nOf a new scheduler or averaged model."},
    {"_module_runs", module_module_runs, METH_O,
     "_module_runs(module, /)\n--\n\nBefore the forward of a module that is watched."},
    {"_hooks_change", module_hooks_change, METH_VARARGS,
     "_hooks_change(tables, id, registered, /)\n--\n\nThe user's code registers or "
     "removes a hook."},
    {"_hooks_count", module_hooks_count, METH_NOARGS,
     "_hooks_count()\n--\n\nThe function for which hooks are noted, True: a body."},
    {"_mode_changes", module_mode_changes, METH_O,
     "_mode_changes(module, /)\n--\n\nBefore a module's train() or eval()."},
    {"_zero_grad_begins", module_zero_grad_begins, METH_O,
     "_zero_grad_begins(module, /)\n--\n\nBefore a module's zero_grad()."},
    {"_optimizer_begins", (PyCFunction)(void (*)(void))module_optimizer_begins,
     METH_FASTCALL,
     "_optimizer_begins(optimizer, args, kwargs, /)\n--\n\nA torch hook."},
    {"_optimizer_ends", (PyCFunction)(void (*)(void))module_optimizer_ends,
     METH_FASTCALL, "_optimizer_ends(optimizer, args, kwargs, /)\n--\n\nA torch hook."},
    {NULL, NULL, 0, NULL},
};

static int
module_add_type(PyObject *module, PyObject **field, PyType_Spec *spec)
{
    *field = PyType_FromModuleAndSpec(module, spec, NULL);
    if (*field == NULL) {
        oomkit_error_insure();
        return -1;
    }
    return 0;
}

static int
module_exec(PyObject *module)
{
    oomkit_state *st = oomkit_state_of_module(module);

    oomkit_wire(st);
    if (oomkit_state_init(st) < 0 ||
        PyModule_AddFunctions(module, oomkit_current_methods) < 0 ||
        PyModule_AddFunctions(module, oomkit_error_methods) < 0 ||
        PyModule_AddFunctions(module, oomkit_guarded_methods) < 0 ||
        PyModule_AddFunctions(module, oomkit_chunks_methods) < 0 ||
        PyModule_AddFunctions(module, oomkit_chunks_join_methods) < 0 ||
        PyModule_AddFunctions(module, oomkit_shared_part_methods) < 0 ||
        PyModule_AddFunctions(module, oomkit_memory_methods) < 0 ||
        PyModule_AddFunctions(module, oomkit_release_methods) < 0 ||
        PyModule_AddFunctions(module, oomkit_scan_methods) < 0 ||
        PyModule_AddFunctions(module, oomkit_split_methods) < 0 ||
        PyModule_AddFunctions(module, oomkit_state_methods) < 0 ||
        PyModule_AddFunctions(module, oomkit_kept_methods) < 0 ||
        PyModule_AddFunctions(module, oomkit_proof_methods) < 0 ||
        PyModule_AddFunctions(module, oomkit_ranks_methods) < 0 ||
        PyModule_AddFunctions(module, oomkit_offload_methods) < 0 ||
        PyModule_AddFunctions(module, oomkit_trial_methods) < 0 ||
        oomkit_records_init(st) < 0 || oomkit_current_init(st) < 0 ||
        module_add_type(module, &st->step_type, &oomkit_step_spec) < 0 ||
        module_add_type(module, &st->step_object_type, &oomkit_step_object_spec) < 0 ||
        module_add_type(module, &st->bound_type, &oomkit_bound_spec) < 0 ||
        module_add_type(module, &st->interceptor_type, &oomkit_interceptor_spec) < 0 ||
        module_add_type(module, &st->hook_type, &oomkit_hook_spec) < 0 ||
        module_add_type(module, &st->backward_type, &oomkit_backward_spec) < 0 ||
        module_add_type(module, &st->deferred_type, &oomkit_deferred_spec) < 0 ||
        module_add_type(module, &st->between_type, &oomkit_between_spec) < 0 ||
        module_add_type(module, &st->offload_type, &oomkit_offload_spec) < 0 ||
        module_add_type(module, &st->packed_type, &oomkit_packed_spec) < 0 ||
        module_add_type(module, &st->vote_type, &oomkit_vote_spec) < 0 ||
        module_add_type(module, &st->guard_type, &oomkit_guard_spec) < 0 ||
        module_add_type(module, &st->chunks_type, &oomkit_chunks_spec) < 0 ||
        module_add_type(module, &st->guarded_type, &oomkit_guarded_spec) < 0 ||
        module_add_type(module, &st->guarded_object_type, &oomkit_guarded_object_spec) <
            0) {
        return -1;
    }
    if (PyModule_AddObjectRef(module, "Step", st->step_type) < 0 ||
        PyModule_AddObjectRef(module, "_Vote", st->vote_type) < 0 ||
        PyModule_AddObjectRef(module, "guard", st->guard_type) < 0 ||
        PyModule_AddObjectRef(module, "chunks", st->chunks_type) < 0 ||
        PyModule_AddObjectRef(module, "StepRecord", st->record_type) < 0 ||
        PyModule_AddObjectRef(module, "OOMReport", st->report_type) < 0 ||
        PyModule_AddObjectRef(module, "StepSummary", st->summary_type) < 0) {
        return -1;
    }
    return 0;
}

static int
module_traverse(PyObject *module, visitproc visit, void *arg)
{
    return oomkit_state_visit(oomkit_state_of_module(module), visit, arg);
}

static int
module_clear(PyObject *module)
{
    oomkit_state_clear(oomkit_state_of_module(module));
    return 0;
}

static void
module_free(void *module)
{
    module_clear((PyObject *)module);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

struct PyModuleDef oomkit_module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "oomkit._C",
    .m_doc = "The engine of oomkit, in C.",
    .m_size = sizeof(oomkit_state),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC
PyInit__C(void)
{
    return PyModuleDef_Init(&oomkit_module_def);
}
