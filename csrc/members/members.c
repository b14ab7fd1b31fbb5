/* The list of participants: what is added, what keeps it valid, how it is freed. */
#include "members.h"
#include "../py/errors.h"
#include "../py/tensor.h"

#define PARTS_CAPSULE "oomkit.participants"

static void
parts_drop_tensors(oomkit_participants *parts)
{
    Py_ssize_t count = parts->param_count, moving = parts->moving_count, i;

    /* The counts go first: a finaliser that runs here must see no half-freed array. */
    parts->param_count = 0;
    parts->moving_count = 0;
    for (i = 0; i < count; i++) {
        Py_CLEAR(parts->params[i]);
    }
    for (i = 0; i < moving; i++) {
        Py_CLEAR(parts->copies[i]);
        PyMem_Free(parts->images[i].bytes);
        parts->images[i].bytes = NULL;
        parts->images[i].size = 0;
    }
    for (i = 0; i < parts->owner_count; i++) {
        Py_CLEAR(parts->owners[i].kept.groups); /* they have the parameters, too */
    }
}

/* Called by the interpreter when a module or optimizer dies. */
static PyObject *
parts_on_death(PyObject *capsule, PyObject *Py_UNUSED(ref))
{
    oomkit_watch *watch = PyCapsule_GetPointer(capsule, PARTS_CAPSULE);
    if (watch == NULL) {
        return NULL;
    }
    if (watch->parts != NULL) {
        watch->parts->dead = 1;
        if (watch->parts->refs == 1) { /* no call in progress uses the arrays */
            parts_drop_tensors(watch->parts);
        }
    }
    Py_RETURN_NONE;
}

static PyMethodDef parts_death_method = {
    "_participant_died", parts_on_death, METH_O,
    "Weak reference callback: a module or optimizer of a site is gone."};

static void
watch_free(PyObject *capsule)
{
    PyMem_Free(PyCapsule_GetPointer(capsule, PARTS_CAPSULE));
}

/* The capsule that the callbacks share. Borrowed from parts, or NULL. */
static PyObject *
parts_capsule(oomkit_participants *parts)
{
    if (parts->capsule != NULL) {
        return parts->capsule;
    }
    parts->watch = PyMem_Malloc(sizeof(*parts->watch));
    if (parts->watch == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    parts->watch->parts = parts;
    parts->capsule = PyCapsule_New(parts->watch, PARTS_CAPSULE, watch_free);
    if (parts->capsule == NULL) {
        PyMem_Free(parts->watch);
        parts->watch = NULL;
    }
    return parts->capsule;
}

/* A weak reference whose death invalidates the list. New reference or NULL. */
static PyObject *
parts_watch(oomkit_participants *parts, PyObject *object)
{
    PyObject *capsule = parts_capsule(parts); /* borrowed from parts */
    OWNED PyObject *callback =
        capsule ? PyCFunction_New(&parts_death_method, capsule) : NULL;
    return callback == NULL ? NULL : PyWeakref_NewRef(object, callback);
}

PyObject *
oomkit_reference_get(PyObject *ref)
{
    PyObject *object; /* borrowed from ref */
    if (!PyWeakref_Check(ref)) {
        return Py_NewRef(ref);
    }
    object = PyWeakref_GET_OBJECT(ref);
    return object == Py_None ? NULL : Py_NewRef(object);
}

int
oomkit_participants_first_time(oomkit_participants *parts, PyObject *object)
{
    int known;
    OWNED PyObject *address = PyLong_FromVoidPtr(object);
    if (address == NULL) {
        return -1;
    }
    known = PySet_Contains(parts->seen, address);
    if (known == 0 && PySet_Add(parts->seen, address) < 0) {
        return -1;
    }
    return known < 0 ? -1 : !known;
}

static int
parts_add_tensor(oomkit_state *st, oomkit_participants *parts, PyObject *tensor)
{
    oomkit_tensor_facts facts;
    int first, leaf;

    if (oomkit_tensor_facts_get(st, tensor, 0, &facts) < 0) {
        return -1;
    }
    /* A frozen Parameter takes part too: it must not move while the call is split. */
    leaf = oomkit_tensor_is_leaf(tensor, &facts);
    if (leaf <= 0 ||
        (!facts.requires_grad && !oomkit_tensor_is_parameter(st, tensor))) {
        return leaf < 0 ? -1 : 0;
    }
    first = oomkit_participants_first_time(parts, tensor);
    if (first <= 0) {
        return first;
    }
    if (ARRAY_GROW(parts->params, parts->param_count, parts->param_room) < 0) {
        return -1;
    }
    parts->some_lazy |= strcmp(Py_TYPE(tensor)->tp_name, "UninitializedParameter") == 0;
    parts->params[parts->param_count++] = Py_NewRef(tensor);
    if (facts.device_type != 0 && parts->device_type == 0) {
        parts->device_type = facts.device_type;
        parts->device_index = facts.device_index;
    }
    return 0;
}

/* The values of an instance's dictionary attribute `name` are handed to `add`. */
static int
parts_each_value(oomkit_state *st, oomkit_participants *parts, PyObject *object,
                 PyObject *name, int depth)
{
    PyObject *key, *value; /* borrowed from the dict */
    Py_ssize_t at = 0;
    OWNED PyObject *dict = PyObject_GetAttr(object, name);

    if (dict == NULL) {
        return -1;
    }
    while (PyDict_Check(dict) && PyDict_Next(dict, &at, &key, &value)) {
        /* A look-up inside may run code that changes the dict. */
        OWNED PyObject *held = Py_NewRef(value);
        if (oomkit_participants_add(st, parts, held, depth) < 0) {
            return -1;
        }
    }
    return 0;
}

static const oomkit_buffered *
parts_buffered(const oomkit_participants *parts, const PyObject *module)
{
    Py_ssize_t i;

    for (i = 0; i < parts->buffered_count; i++) {
        if (PyWeakref_GET_OBJECT(parts->buffered[i].ref) == module) {
            return &parts->buffered[i];
        }
    }
    return NULL;
}

static int
parts_append_buffered(oomkit_state *st, oomkit_participants *parts, PyObject *module,
                      int late)
{
    oomkit_buffered *entry;
    const int is_norm = oomkit_norm_kind(st, module);

    if (is_norm < 0 ||
        ARRAY_GROW(parts->buffered, parts->buffered_count, parts->buffered_room) < 0) {
        return -1;
    }
    entry = &parts->buffered[parts->buffered_count];
    *entry = (oomkit_buffered){.is_norm = is_norm, .is_late = late};
    entry->ref = parts_watch(parts, module);
    if (entry->ref == NULL) {
        return -1;
    }
    parts->some_late |= late;
    parts->buffered_count++;
    return 0;
}

static int
parts_add_buffered(oomkit_state *st, oomkit_participants *parts, PyObject *module)
{
    OWNED PyObject *buffers = PyObject_GetAttr(module, st->str_buffers);

    if (buffers == NULL) {
        return -1;
    }
    return !PyDict_Check(buffers) || PyDict_GET_SIZE(buffers) == 0 ||
                   (parts->some_late && parts_buffered(parts, module) != NULL)
               ? 0
               : parts_append_buffered(st, parts, module, 0);
}

PyObject *
oomkit_participants_buffered(const oomkit_participants *parts)
{
    OWNED PyObject *all = PySet_New(NULL);
    Py_ssize_t i;

    for (i = 0; all != NULL && i < parts->buffered_count; i++) {
        OWNED PyObject *address =
            PyLong_FromVoidPtr(PyWeakref_GET_OBJECT(parts->buffered[i].ref));
        if (address == NULL || PySet_Add(all, address) < 0) {
            return NULL;
        }
    }
    return STEAL(all);
}

PyObject *
oomkit_participants_modules(const oomkit_participants *parts)
{
    OWNED PyObject *refs = parts == NULL || parts->roots == NULL
                               ? PyList_New(0)
                               : PySequence_List(parts->roots);
    Py_ssize_t i;

    for (i = 0; refs != NULL && parts != NULL && i < parts->buffered_count; i++) {
        if (parts->buffered[i].is_late &&
            PyList_Append(refs, parts->buffered[i].ref) < 0) {
            return NULL;
        }
    }
    return STEAL(refs);
}

int
oomkit_participants_add_late(oomkit_state *st, oomkit_participants *parts,
                             PyObject *module)
{
    return parts_buffered(parts, module) != NULL
               ? 0
               : parts_append_buffered(st, parts, module, 1);
}

int
oomkit_participants_inherit(oomkit_state *st, oomkit_participants *parts,
                            const oomkit_participants *before)
{
    OWNED PyObject *known = NULL;
    Py_ssize_t i;

    if (before == NULL) {
        return 0;
    }
    parts->watches = before->watches;
    known = before->some_late ? oomkit_participants_buffered(parts) : NULL;
    for (i = 0; known != NULL && i < before->buffered_count; i++) {
        OWNED PyObject *module = before->buffered[i].is_late
                                     ? oomkit_reference_get(before->buffered[i].ref)
                                     : NULL;
        OWNED PyObject *address = module == NULL ? NULL : PyLong_FromVoidPtr(module);
        const int has = address == NULL ? 1 : PySet_Contains(known, address);
        if (has < 0 || (has == 0 && parts_append_buffered(st, parts, module, 1) < 0)) {
            return -1;
        }
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int
parts_add_root(oomkit_participants *parts, PyObject *object)
{
    OWNED PyObject *ref = parts_watch(parts, object);
    return ref == NULL ? -1 : PyList_Append(parts->roots, ref);
}

/* Appends an entry without asking whether the object was seen. */
static int
parts_append_owner(oomkit_participants *parts, PyObject *object, oomkit_owner_kind kind)
{
    PyObject *ref; /* owned, then by the entry */

    if (ARRAY_GROW(parts->owners, parts->owner_count, parts->owner_room) < 0) {
        return -1;
    }
    if (kind == OOMKIT_OWNER_GENERATOR) {
        ref = Py_NewRef(object); /* leads to no tensor, has no weak references */
    } else {
        ref = parts_watch(parts, object);
        if (ref == NULL && kind == OOMKIT_OWNER_USER &&
            PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear(); /* no weak references to this type: the user keeps it anyway
                            */
            ref = Py_NewRef(object);
        }
    }
    if (ref == NULL) {
        return -1;
    }
    parts->owners[parts->owner_count++] = (oomkit_owner){.ref = ref, .kind = kind};
    return 1;
}

/* 1 when it was added, 0 when it is known already, -1 with an exception. */
static int
parts_add_owner(oomkit_participants *parts, PyObject *object, oomkit_owner_kind kind)
{
    int first = oomkit_participants_first_time(parts, object);
    return first <= 0 ? first : parts_append_owner(parts, object, kind);
}

/* Random generators that a module has as attributes, as for noise or masks. */
static int
parts_add_generators(oomkit_state *st, oomkit_participants *parts, PyObject *module)
{
    OWNED PyObject *own = oomkit_own_attributes(module);
    Py_ssize_t i;

    for (i = 1; own != NULL && i < PyTuple_GET_SIZE(own); i += 2) {
        PyObject *value = PyTuple_GET_ITEM(own, i); /* borrowed */
        if (PyObject_TypeCheck(value, (PyTypeObject *)st->Generator) &&
            parts_add_owner(parts, value, OOMKIT_OWNER_GENERATOR) < 0) {
            return -1;
        }
    }
    return own == NULL ? -1 : 0;
}

static int
parts_add_module(oomkit_state *st, oomkit_participants *parts, PyObject *module)
{
    int first = oomkit_participants_first_time(parts, module);
    if (first <= 0) {
        return first;
    }
    if (st->AveragedModel != NULL &&
        PyType_IsSubtype(Py_TYPE(module), (PyTypeObject *)st->AveragedModel) &&
        parts_append_owner(parts, module, OOMKIT_OWNER_AVERAGED) < 0) {
        return -1;
    }
    if (parts_add_root(parts, module) < 0 ||
        parts_each_value(st, parts, module, st->str_parameters, 0) < 0 ||
        parts_add_buffered(st, parts, module) < 0 ||
        parts_add_generators(st, parts, module) < 0) {
        return -1;
    }
    if (Py_EnterRecursiveCall(" while collecting the parts of a module")) {
        return -1;
    }
    first = parts_each_value(st, parts, module, st->str_modules, 0);
    Py_LeaveRecursiveCall();
    return first;
}

static int
parts_add_optimizer(oomkit_state *st, oomkit_participants *parts, PyObject *optimizer);

/* What one of the program's own keeps and steps itself: SAM's base_optimizer, or a list
 * of them. 0 or -1. */
static int
parts_add_inner(oomkit_state *st, oomkit_participants *parts, PyObject *value,
                int in_list)
{
    OWNED PyObject *items = NULL; /* a stable copy, for look-ups may run code */
    Py_ssize_t i;

    if (PyObject_TypeCheck(value, (PyTypeObject *)st->Optimizer)) {
        return parts_add_optimizer(st, parts, value);
    }
    if (in_list || (!PyList_CheckExact(value) && !PyTuple_CheckExact(value))) {
        return 0;
    }
    items = PySequence_Tuple(value);
    for (i = 0; items != NULL && i < PyTuple_GET_SIZE(items); i++) {
        if (parts_add_inner(st, parts, PyTuple_GET_ITEM(items, i), 1) < 0) {
            return -1;
        }
    }
    return items == NULL ? -1 : 0;
}

/* Not of torch's own (ZeroRedundancyOptimizer), whose step() is one update of all
 * ranks.
 */
static int
parts_add_inner_optimizers(oomkit_state *st, oomkit_participants *parts,
                           PyObject *optimizer)
{
    OWNED PyObject *module =
        PyObject_GetAttrString((PyObject *)Py_TYPE(optimizer), "__module__");
    OWNED PyObject *own = module ? oomkit_own_attributes(optimizer) : NULL;
    const char *name =
        own != NULL && PyUnicode_Check(module) ? PyUnicode_AsUTF8(module) : NULL;
    Py_ssize_t i;

    if (name == NULL || strncmp(name, "torch.", 6) == 0) {
        return name != NULL || (own != NULL && !PyErr_Occurred()) ? 0 : -1;
    }
    for (i = 1; own != NULL && i < PyTuple_GET_SIZE(own); i += 2) {
        if (parts_add_inner(st, parts, PyTuple_GET_ITEM(own, i), 0) < 0) {
            return -1;
        }
    }
    return own == NULL ? -1 : 0;
}

/* An optimizer leads to the parameters of its groups, and to those inside it. */
static int
parts_add_optimizer(oomkit_state *st, oomkit_participants *parts, PyObject *optimizer)
{
    OWNED PyObject *groups = NULL;
    PyObject *params; /* borrowed from a group */
    Py_ssize_t i, j;
    int result = parts_add_owner(parts, optimizer, OOMKIT_OWNER_OPTIMIZER);

    if (result <= 0) {
        return result;
    }
    groups = PyObject_GetAttr(optimizer, st->str_param_groups);
    if (groups == NULL) {
        return -1;
    }
    for (i = 0; PyList_Check(groups) && i < PyList_GET_SIZE(groups); i++) {
        PyObject *group = PyList_GET_ITEM(groups, i); /* borrowed from groups */
        params =
            PyDict_Check(group) ? PyDict_GetItemWithError(group, st->str_params) : NULL;
        for (j = 0; params && PyList_Check(params) && j < PyList_GET_SIZE(params);
             j++) {
            const Py_ssize_t before = parts->param_count;
            if (parts_add_tensor(st, parts, PyList_GET_ITEM(params, j)) < 0) {
                return -1;
            }
            parts->optimizer_led |= parts->param_count > before;
        }
    }
    return parts_add_inner_optimizers(st, parts, optimizer);
}

static int
parts_add_scheduler(oomkit_state *st, oomkit_participants *parts, PyObject *scheduler)
{
    OWNED PyObject *optimizer = NULL;
    int result = parts_add_owner(parts, scheduler, OOMKIT_OWNER_SCHEDULER);
    if (result <= 0) {
        return result;
    }
    optimizer = PyObject_GetAttr(scheduler, st->str_optimizer);
    if (optimizer == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear(); /* a scheduler of somebody's own, without an optimizer */
        return 0;
    }
    return oomkit_participants_add(st, parts, optimizer, 0);
}

static int
parts_add_container(oomkit_state *st, oomkit_participants *parts, PyObject *object,
                    int depth)
{
    Py_ssize_t i;
    OWNED PyObject *items = NULL; /* a stable copy, for look-ups may run code */

    if (PyList_CheckExact(object) || PyTuple_CheckExact(object)) {
        items = PySequence_Tuple(object);
    } else if (PyDict_CheckExact(object)) {
        OWNED PyObject *values = PyDict_Values(object);
        items = values == NULL ? NULL : PySequence_Tuple(values);
    } else {
        return 0;
    }
    if (items == NULL) {
        return -1;
    }
    for (i = 0; i < PyTuple_GET_SIZE(items); i++) {
        if (oomkit_participants_add(st, parts, PyTuple_GET_ITEM(items, i), depth - 1) <
            0) {
            return -1;
        }
    }
    return 0;
}

/* Adds `object` by its type; containers are opened `depth` levels deep. 0 or -1. */
int
oomkit_participants_add(oomkit_state *st, oomkit_participants *parts, PyObject *object,
                        int depth)
{
    PyTypeObject *type = Py_TYPE(object);

    if (object == Py_None || PyUnicode_CheckExact(object) ||
        PyLong_CheckExact(object) || PyFloat_CheckExact(object)) {
        return 0;
    }
    if (oomkit_tensor_check(st, object)) {
        return parts_add_tensor(st, parts, object);
    }
    if (PyType_IsSubtype(type, (PyTypeObject *)st->Module)) {
        return parts_add_module(st, parts, object);
    }
    if (PyType_IsSubtype(type, (PyTypeObject *)st->Optimizer)) {
        return parts_add_optimizer(st, parts, object);
    }
    if (PyType_IsSubtype(type, (PyTypeObject *)st->LRScheduler)) {
        return parts_add_scheduler(st, parts, object);
    }
    if (PyType_IsSubtype(type, (PyTypeObject *)st->GradScaler)) {
        OWNED PyObject *enabled = PyObject_GetAttrString(object, "_enabled");
        if (enabled == NULL) {
            return -1;
        }
        if (enabled == Py_False) {
            return 0; /* a switched-off scaler does nothing and has nothing */
        }
        return parts_add_owner(parts, object, OOMKIT_OWNER_SCALER) < 0 ? -1 : 0;
    }
    if (PyType_IsSubtype(type, (PyTypeObject *)st->Generator)) {
        return parts_add_owner(parts, object, OOMKIT_OWNER_GENERATOR) < 0 ? -1 : 0;
    }
    return depth > 0 ? parts_add_container(st, parts, object, depth) : 0;
}

int
oomkit_participants_add_hidden(oomkit_participants *parts, PyObject *object,
                               oomkit_owner_kind kind)
{
    return parts_append_owner(parts, object, kind);
}

int
oomkit_participants_have(const oomkit_participants *parts, const PyObject *object)
{
    Py_ssize_t i;

    for (i = 0; i < parts->owner_count; i++) {
        const PyObject *ref = parts->owners[i].ref;
        if (ref == object || (PyWeakref_Check(ref) &&
                              PyWeakref_GET_OBJECT(parts->owners[i].ref) == object)) {
            return 1;
        }
    }
    return 0;
}

int
oomkit_participants_add_owner(oomkit_participants *parts, PyObject *object,
                              oomkit_owner_kind kind)
{
    return parts_add_owner(parts, object, kind) < 0 ? -1 : 0;
}

void
oomkit_participants_release(oomkit_participants *parts)
{
    Py_ssize_t i;

    if (parts == NULL || --parts->refs > 0) {
        if (parts != NULL && parts->refs == 1) {
            oomkit_participants_let_go(parts);
            if (parts->dead) {
                parts_drop_tensors(parts);
            }
        }
        return;
    }
    Py_CLEAR(parts->adopted);
    if (parts->watch != NULL) {
        parts->watch->parts = NULL; /* callbacks that live on find nothing */
    }
    Py_CLEAR(parts->roots);
    Py_CLEAR(parts->writes);
    for (i = 0; i < parts->owner_count; i++) {
        Py_CLEAR(parts->owners[i].ref);
        PyMem_Free(parts->owners[i].kept.layout);
        PyMem_Free(parts->owners[i].kept.seen);
    }
    for (i = 0; i < parts->buffered_count; i++) {
        Py_CLEAR(parts->buffered[i].ref);
    }
    parts_drop_tensors(parts);
    for (i = 0; i < parts->source_count; i++) {
        Py_CLEAR(parts->sources[i].container);
        Py_CLEAR(parts->sources[i].key);
    }
    Py_CLEAR(parts->seen);
    Py_CLEAR(parts->capsule);
    PyMem_Free(parts->sources);
    PyMem_Free(parts->params);
    PyMem_Free(parts->buffered);
    PyMem_Free(parts->owners);
    PyMem_Free(parts->moving);
    PyMem_Free(parts->copies);
    PyMem_Free(parts->images);
    PyMem_Free(parts->spare_marks);
    PyMem_Free(parts->spare_versions);
    PyMem_Free(parts);
}

int
oomkit_participants_traverse(oomkit_participants *parts, visitproc visit, void *arg)
{
    Py_ssize_t i;

    if (parts == NULL) {
        return 0;
    }
    Py_VISIT(parts->roots);
    for (i = 0; i < parts->source_count; i++) {
        Py_VISIT(parts->sources[i].container);
    }
    for (i = 0; i < parts->owner_count; i++) {
        Py_VISIT(parts->owners[i].ref);
        Py_VISIT(parts->owners[i].kept.groups);
    }
    for (i = 0; i < parts->param_count; i++) {
        Py_VISIT(parts->params[i]);
    }
    return 0;
}

void
oomkit_participants_let_go(oomkit_participants *parts)
{
    while (parts->adopted_count > 0 && parts->param_count > 0) {
        parts->adopted_count--;
        parts->param_count--;
        Py_CLEAR(parts->params[parts->param_count]);
    }
    parts->adopted_count = 0;
}

/* Which kind of participant this object of accelerate's is, or -1. */
int
oomkit_accelerate_kind(PyObject *object)
{
    return oomkit_accelerate_is(object, "Accelerator") ? (int)OOMKIT_OWNER_ACCELERATOR
           : oomkit_accelerate_is(object, "AcceleratedScheduler")
               ? (int)OOMKIT_OWNER_SCHEDULER
               : -1;
}

/* An object of a class of this name (or derived from it) in this package. */
static int
object_is_of(PyObject *object, const char *name, const char *package)
{
    const size_t length = strlen(package);
    PyObject *mro = Py_TYPE(object)->tp_mro; /* borrowed */
    Py_ssize_t i;

    for (i = 0; mro != NULL && i < PyTuple_GET_SIZE(mro); i++) {
        PyTypeObject *type = (PyTypeObject *)PyTuple_GET_ITEM(mro, i); /* borrowed */
        PyObject *module; /* borrowed from the type */
        if ((type->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0 ||
            strcmp(type->tp_name, name) != 0) {
            continue;
        }
        module = oomkit_item(type->tp_dict, "__module__");
        if (module != NULL && PyUnicode_Check(module) &&
            (size_t)PyUnicode_GET_LENGTH(module) >= length &&
            PyUnicode_1BYTE_KIND == PyUnicode_KIND(module) &&
            memcmp(PyUnicode_1BYTE_DATA(module), package, length) == 0) {
            return 1;
        }
    }
    return 0;
}

int
oomkit_accelerate_is(PyObject *object, const char *name)
{
    return object_is_of(object, name, "accelerate");
}

int
oomkit_pipeline_is(PyObject *object)
{
    const char *const package = "torch.distributed.pipelining";

    return object_is_of(object, "_PipelineSchedule", package) ||
           object_is_of(object, "_PipelineStageBase", package);
}

/* Is this the name of torch.optim, or of a module in it, or of ours that tells of new
 * schedulers? Keeps no exception. */
static int
module_is_torchs(PyObject *module)
{
    const char *name =
        module != NULL && PyUnicode_Check(module) ? PyUnicode_AsUTF8(module) : NULL;

    if (PyErr_Occurred()) {
        oomkit_error_dismiss(); /* an unreadable name is not torch's */
    }
    return name != NULL && (strncmp(name, "torch.optim", 11) == 0 ||
                            strcmp(name, "oomkit._engine.patches") == 0);
}

/* Is this one of a class's, which is no method, or one of torch? By where it reads its
 * globals: what wraps another has that one's __module__. */
static int
value_is_torchs(const oomkit_state *st, PyObject *value)
{
    OWNED PyObject *function = Py_IS_TYPE(value, &PyStaticMethod_Type)
                                   ? PyObject_GetAttrString(value, "__func__")
                                   : Py_NewRef(value);

    if (function == NULL) {
        oomkit_error_dismiss(); /* what cannot be read is not torch's */
        return 0;
    }
    return PyFunction_Check(function)
               ? module_is_torchs(PyDict_GetItemWithError(
                     PyFunction_GET_GLOBALS(function), st->str_name))
               : !PyCallable_Check(function);
}

/* Are all methods of a class torch's, so that none counts anything beside attributes?
 */
static int
methods_are_torchs(const oomkit_state *st, const PyTypeObject *type)
{
    PyObject *name, *value; /* borrowed */
    Py_ssize_t i, at;

    for (i = 0; i < PyTuple_GET_SIZE(type->tp_mro); i++) {
        PyTypeObject *one = (PyTypeObject *)PyTuple_GET_ITEM(type->tp_mro, i);
        at = 0;
        while ((one->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0 &&
               PyDict_Next(one->tp_dict, &at, &name, &value)) {
            if (!value_is_torchs(st, value)) {
                return 0;
            }
        }
    }
    return 1;
}

/* Asked once per class: another one may be given to an object, and other methods to a
 * class. */
int
oomkit_owner_is_torchs(const oomkit_state *st, const oomkit_participants *parts,
                       PyObject *object)
{
    oomkit_owner *owner = parts->owners, *const end = owner + parts->owner_count;
    PyTypeObject *type = Py_TYPE(object);
    OWNED PyObject *module = NULL;
    int is_torchs;

    while (owner < end && ((owner->kind != OOMKIT_OWNER_OPTIMIZER &&
                            owner->kind != OOMKIT_OWNER_SCHEDULER) ||
                           PyWeakref_GET_OBJECT(owner->ref) != object)) {
        owner++;
    }
    if (owner < end && owner->type == type && owner->version != 0 &&
        owner->version == type->tp_version_tag) {
        return owner->is_torchs;
    }
    module = PyObject_GetAttrString((PyObject *)type, "__module__");
    is_torchs = module_is_torchs(module);
    if (owner < end && owner->kind == OOMKIT_OWNER_SCHEDULER) {
        is_torchs = is_torchs && methods_are_torchs(st, type);
    }
    if (owner < end) {
        owner->type = type;
        owner->version = type->tp_version_tag;
        owner->is_torchs = is_torchs;
    }
    return is_torchs;
}
