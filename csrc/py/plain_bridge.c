/* Where the bridge cannot be used: facts of a tensor by its attributes, and the table
 * that stands in for the bridge's.
 *
 * Its entries take the GIL for granted. Those for versions, gradients and modes look
 * attributes up and may run Python code: where one fails, an exception is in flight.
 * What only torch's own memory tells is answered as the bridge answers for tensors and
 * devices that it cannot read.
 *
 * Entries get no state, and are called while memory lacks: names and functions that
 * exist already are kept beside them, for good, as torch itself is. */
#include "tensor.h"
#include "../core/status.h"

#include <string.h>

static struct {
    PyObject *grad, *version, *requires_grad;     /* owned: names */
    PyObject *is_grad_enabled, *set_grad_enabled; /* owned: torch's functions */
} kept;

void
oomkit_plain_bridge_bind(const oomkit_state *st)
{
    Py_XSETREF(kept.grad, Py_NewRef(st->str_grad));
    Py_XSETREF(kept.version, Py_NewRef(st->str_version));
    Py_XSETREF(kept.requires_grad, Py_NewRef(st->str_requires_grad));
    Py_XSETREF(kept.is_grad_enabled, Py_NewRef(st->is_grad_enabled));
    Py_XSETREF(kept.set_grad_enabled, Py_NewRef(st->set_grad_enabled));
}

/* --- facts of a tensor --- */

/* c10::ScalarType and c10::DeviceType by number; NULL where nothing is met in practice.
 */
static const char *const dtype_names[] = {
    "uint8",           "int8",
    "int16",           "int32",
    "int64",           "float16",
    "float32",         "float64",
    "complex32",       "complex64",
    "complex128",      "bool",
    "qint8",           "quint8",
    "qint32",          "bfloat16",
    "quint4x2",        "quint2x4",
    "bits1x8",         "bits2x4",
    "bits4x2",         "bits8",
    "bits16",          "float8_e5m2",
    "float8_e4m3fn",   "float8_e5m2fnuz",
    "float8_e4m3fnuz", "uint16",
    "uint32",          "uint64",
};

static const char *const device_names[] = {
    "cpu",  "cuda", "mkldnn", "opengl", "opencl", "ideep", "hip",
    "fpga", "maia", "xla",    "vulkan", "metal",  "xpu",   "mps",
    "meta", "hpu",  "ve",     "lazy",   "ipu",    "mtia",
};

#define COUNT_OF(array) ((int)(sizeof(array) / sizeof *(array)))

static int
name_index(const char *const *names, int count, const char *name)
{
    for (int i = 0; i < count; i++) {
        if (strcmp(names[i], name) == 0) {
            return i;
        }
    }
    return -1;
}

const char *
oomkit_device_type_name(int type)
{
    return type >= 0 && type < COUNT_OF(device_names) ? device_names[type] : NULL;
}

/* 1, 0 or -1 with an exception. */
static int
attribute_truth(PyObject *object, const char *name)
{
    OWNED PyObject *value = PyObject_GetAttrString(object, name);

    return value == NULL ? -1 : PyObject_IsTrue(value);
}

/* str() of an attribute. New reference or NULL. */
static PyObject *
attribute_text(PyObject *object, const char *name)
{
    OWNED PyObject *value = PyObject_GetAttrString(object, name);

    return value == NULL ? NULL : PyObject_Str(value);
}

/* An attribute that is an integer. -1 with an exception (-1 is also a value). */
static int64_t
attribute_integer(PyObject *object, const char *name)
{
    OWNED PyObject *value = PyObject_GetAttrString(object, name);

    return value == NULL ? -1 : PyLong_AsLongLong(value);
}

/* Of a tensor: 1, 0 for an inference tensor, whose version is 0, or -1 with an
 * exception. */
static int
attribute_version(PyObject *tensor, uint32_t *version)
{
    OWNED PyObject *value = PyObject_GetAttr(tensor, kept.version);

    *version = 0;
    if (value == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) {
            return -1;
        }
        PyErr_Clear(); /* "Inference tensors do not track version counter." */
        return 0;
    }
    *version = (uint32_t)PyLong_AsUnsignedLongMask(value);
    return PyErr_Occurred() ? -1 : 1;
}

static uint64_t
mix(uint64_t hash, uint64_t value)
{
    hash ^= value + 0x9e3779b97f4a7c15u + (hash << 6) + (hash >> 2);
    hash *= 0xff51afd7ed558ccdu;
    return hash ^ (hash >> 33);
}

static int
facts_dtype(PyObject *tensor, oomkit_tensor_facts *facts)
{
    OWNED PyObject *text = attribute_text(tensor, "dtype"); /* "torch.float32" */
    const char *name = text == NULL ? NULL : PyUnicode_AsUTF8(text);

    if (name == NULL) {
        return -1;
    }
    name = strncmp(name, "torch.", 6) == 0 ? name + 6 : name;
    facts->dtype = name_index(dtype_names, COUNT_OF(dtype_names), name);
    return 0;
}

static int
facts_device(PyObject *tensor, oomkit_tensor_facts *facts)
{
    OWNED PyObject *device = PyObject_GetAttrString(tensor, "device");
    OWNED PyObject *type =
        device == NULL ? NULL : PyObject_GetAttrString(device, "type");
    const char *name = type == NULL ? NULL : PyUnicode_AsUTF8(type);
    int64_t index;

    if (name == NULL) {
        return -1;
    }
    facts->device_type = name_index(device_names, COUNT_OF(device_names), name);
    if (facts->device_type < 0) {
        facts->device_type = OOMKIT_DEVICE_PRIVATE_USE;
    }
    facts->device_index = -1;
    if (facts->device_type != 0) {
        index = attribute_integer(device, "index");
        if (index == -1 && PyErr_Occurred()) {
            if (!PyErr_ExceptionMatches(PyExc_TypeError)) {
                return -1;
            }
            PyErr_Clear(); /* None: a device without a number */
        }
        facts->device_index = (int32_t)index;
    }
    return 0;
}

static int
facts_shape(PyObject *tensor, int64_t dim, oomkit_tensor_facts *facts)
{
    OWNED PyObject *shape = PyObject_GetAttrString(tensor, "shape");
    int64_t size, item_bytes, numel = 1;
    uint64_t hash = mix(0, (uint64_t)facts->dtype);

    if (shape == NULL) {
        return -1;
    }
    if (!PyTuple_Check(shape)) {
        PyErr_Format(
            PyExc_TypeError,
            "expected the shape of a tensor, got '%.200s'" SEE("internal-error"),
            Py_TYPE(shape)->tp_name);
        return -1;
    }
    facts->ndim = PyTuple_GET_SIZE(shape);
    dim = dim < 0 ? dim + facts->ndim : dim;
    for (int64_t i = 0; i < facts->ndim; i++) {
        size = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
        if (size == -1 && PyErr_Occurred()) {
            return -1;
        }
        numel *= size;
        hash = mix(hash, i == dim ? UINT64_MAX : (uint64_t)size);
        facts->size = i == dim ? size : facts->size;
    }
    item_bytes = attribute_integer(tensor, "itemsize");
    if (item_bytes == -1 && PyErr_Occurred()) {
        return -1;
    }
    facts->bytes = (uint64_t)(numel * item_bytes);
    facts->shape_hash = hash;
    return 0;
}

static int
facts_layout(PyObject *tensor, oomkit_tensor_facts *facts)
{
    OWNED PyObject *text = attribute_text(tensor, "layout");

    if (text == NULL) {
        return -1;
    }
    facts->is_strided = PyUnicode_CompareWithASCIIString(text, "torch.strided") == 0;
    return 0;
}

int
oomkit_attribute_facts(PyObject *tensor, int64_t dim, oomkit_tensor_facts *facts)
{
    int truth;

    *facts = (oomkit_tensor_facts){.ndim = -1, .size = -1};
    if (facts_dtype(tensor, facts) < 0 || facts_device(tensor, facts) < 0) {
        return -1;
    }
    facts->has_version = attribute_version(tensor, &facts->version);
    if (facts->has_version < 0) {
        return -1;
    }
    truth = attribute_truth(tensor, "is_leaf");
    if (truth < 0) {
        return -1;
    }
    facts->is_leaf = truth;
    truth = attribute_truth(tensor, "requires_grad");
    if (truth < 0) {
        return -1;
    }
    facts->requires_grad = truth;
    truth = attribute_truth(tensor, "is_nested");
    if (truth != 0) {
        return truth < 0 ? -1 : 0;
    }
    return facts_layout(tensor, facts) < 0 ? -1 : facts_shape(tensor, dim, facts);
}

int
oomkit_tensor_is_leaf(PyObject *tensor, const oomkit_tensor_facts *facts)
{
    int leaf =
        facts->is_leaf >= 0 ? facts->is_leaf : attribute_truth(tensor, "is_leaf");

    if (leaf < 0 && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear(); /* a view whose base has been written to: it has a graph */
        return 0;
    }
    return leaf;
}

/* --- tensors, as the bridge's table has them --- */

/* A holder is the tensor's object. Borrowed. */
static PyObject *
held_by(const void *holder)
{
    return (PyObject *)(uintptr_t)holder;
}

/* Never known, so that the caller asks for the attributes by itself. */
static int
plain_tensor_facts(const void *Py_UNUSED(holder), ptrdiff_t Py_UNUSED(offset),
                   int64_t Py_UNUSED(dim), oomkit_tensor_facts *Py_UNUSED(facts))
{
    return OOMKIT_EUNSUPPORTED;
}

static int
plain_versions(const void *const *holders, ptrdiff_t Py_UNUSED(offset), size_t count,
               uint32_t *versions, uint8_t *requires_grad, const void **grads)
{
    uint32_t of_first = 0;
    int found = 0;

    for (size_t i = 0; i < count; i++) {
        PyObject *tensor = held_by(holders[i]); /* borrowed */
        if (versions != NULL && attribute_version(tensor, &versions[i]) < 0) {
            return OOMKIT_EFAILED;
        }
        if (requires_grad != NULL) {
            OWNED PyObject *flag = PyObject_GetAttr(tensor, kept.requires_grad);
            if (flag == NULL) {
                return OOMKIT_EFAILED;
            }
            requires_grad[i] = flag == Py_True;
        }
        if (grads != NULL) {
            OWNED PyObject *grad = PyObject_GetAttr(tensor, kept.grad);
            if (grad == NULL ||
                (grad != Py_None && !found && attribute_version(grad, &of_first) < 0)) {
                return OOMKIT_EFAILED;
            }
            grads[i] = grad == Py_None ? NULL : grad; /* lives as long as its tensor */
            found |= grad != Py_None;
        }
    }
    if (grads != NULL) {
        grads[count] = (const void *)(uintptr_t)of_first;
    }
    return OOMKIT_OK;
}

/* A mark holds a weak reference to the gradient's object, which lives as long as its
 * tensor does. */
static void
plain_grads_release(oomkit_grad_mark *marks, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        PyObject *weak = marks[i].grad; /* owned */
        marks[i] = (oomkit_grad_mark){NULL, 0};
        Py_XDECREF(weak);
    }
}

/* 0 or -1 with an exception. */
static int
mark_one(PyObject *tensor, oomkit_grad_mark *mark)
{
    OWNED PyObject *gradient = PyObject_GetAttr(tensor, kept.grad);

    *mark = (oomkit_grad_mark){NULL, 0};
    if (gradient == NULL || gradient == Py_None) {
        return gradient == NULL ? -1 : 0;
    }
    if (attribute_version(gradient, &mark->version) < 0) {
        return -1;
    }
    mark->grad = PyWeakref_NewRef(gradient, NULL);
    return mark->grad == NULL ? -1 : 0;
}

static int
plain_grads_mark(const void *const *holders, ptrdiff_t Py_UNUSED(offset), size_t count,
                 oomkit_grad_mark *marks)
{
    for (size_t i = 0; i < count; i++) {
        if (mark_one(held_by(holders[i]), &marks[i]) < 0) {
            plain_grads_release(marks, i);
            return OOMKIT_EFAILED;
        }
    }
    return OOMKIT_OK;
}

/* OOMKIT_GRAD_* or -1 with an exception. */
static int
compare_one(PyObject *tensor, const oomkit_grad_mark *mark, uint32_t *step)
{
    OWNED PyObject *gradient = PyObject_GetAttr(tensor, kept.grad);
    uint32_t version;

    *step = 0;
    if (gradient == NULL) {
        return -1;
    }
    if (mark->grad == NULL) {
        return gradient == Py_None ? OOMKIT_GRAD_SAME : OOMKIT_GRAD_NEW;
    }
    if (gradient == Py_None) {
        return OOMKIT_GRAD_GONE;
    }
    if (PyWeakref_GET_OBJECT((PyObject *)mark->grad) != gradient) {
        return OOMKIT_GRAD_REPLACED;
    }
    if (attribute_version(gradient, &version) < 0) {
        return -1;
    }
    *step = version - mark->version;
    return *step == 0 ? OOMKIT_GRAD_SAME : OOMKIT_GRAD_MOVED;
}

static int
plain_grads_compare(const void *const *holders, ptrdiff_t Py_UNUSED(offset),
                    size_t count, const oomkit_grad_mark *marks, uint8_t *states,
                    uint32_t *steps, size_t *moved)
{
    *moved = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t step;
        int state = compare_one(held_by(holders[i]), &marks[i], &step);
        if (state < 0) {
            return OOMKIT_EFAILED;
        }
        states[i] = (uint8_t)state;
        *moved += state != OOMKIT_GRAD_SAME;
        if (steps != NULL) {
            steps[i] = step;
        }
    }
    return OOMKIT_OK;
}

static int
plain_bytes_get(const void *Py_UNUSED(holder), ptrdiff_t Py_UNUSED(offset),
                void *Py_UNUSED(bytes), uint64_t Py_UNUSED(size))
{
    return OOMKIT_EUNSUPPORTED;
}

static int
plain_bytes_set(const void *Py_UNUSED(holder), ptrdiff_t Py_UNUSED(offset),
                const void *Py_UNUSED(bytes), uint64_t Py_UNUSED(size))
{
    return OOMKIT_EUNSUPPORTED;
}

static uint64_t
plain_sample(const void *Py_UNUSED(holder), ptrdiff_t Py_UNUSED(offset))
{
    return 0;
}

/* --- modes and generators --- */

static int
plain_modes_get(oomkit_thread_modes *modes)
{
    OWNED PyObject *on = PyObject_CallNoArgs(kept.is_grad_enabled);

    *modes = (oomkit_thread_modes){.grad = on == Py_True, .dispatch = -1};
    return on == NULL ? OOMKIT_EFAILED : OOMKIT_OK;
}

/* Gradient recording alone. A mode that intercepts functions is not shown what changes
 * nothing. */
static int
plain_modes_set(const oomkit_thread_modes *modes)
{
    oomkit_thread_modes now;
    OWNED PyObject *done = NULL;

    if (plain_modes_get(&now) != OOMKIT_OK) {
        return OOMKIT_EFAILED;
    }
    if (now.grad == modes->grad) {
        return OOMKIT_OK;
    }
    done = PyObject_CallOneArg(kept.set_grad_enabled, modes->grad ? Py_True : Py_False);
    return done == NULL ? OOMKIT_EFAILED : OOMKIT_OK;
}

static uint64_t
plain_generator_read(void *Py_UNUSED(generator), void *Py_UNUSED(bytes),
                     uint64_t Py_UNUSED(room))
{
    return 0;
}

static int
plain_generator_same(void *Py_UNUSED(generator), const void *Py_UNUSED(bytes),
                     uint64_t Py_UNUSED(size))
{
    return 0;
}

/* --- the CPU's allocator: never in place --- */

static int
plain_cpu_install(void)
{
    return OOMKIT_EUNSUPPORTED;
}

static int
plain_cpu_installed(void)
{
    return 0;
}

static int
plain_cpu_set_limit(uint64_t Py_UNUSED(bytes))
{
    return OOMKIT_EUNSUPPORTED;
}

static int
plain_cpu_stats(oomkit_cpu_stats *stats)
{
    *stats = (oomkit_cpu_stats){.limit = OOMKIT_UNKNOWN};
    return OOMKIT_OK;
}

static int
plain_cpu_counted(const void *Py_UNUSED(holder), ptrdiff_t Py_UNUSED(offset))
{
    return -1;
}

static int
plain_cpu_peak_push(int *window)
{
    *window = -1;
    return OOMKIT_EUNSUPPORTED;
}

static uint64_t
plain_cpu_peak(int Py_UNUSED(window))
{
    return OOMKIT_UNKNOWN;
}

static void
plain_nothing(void)
{
}

static void
plain_exempt_all(int Py_UNUSED(by))
{
}

static int
plain_fault_arm(const oomkit_fault_schedule *Py_UNUSED(schedule))
{
    return OOMKIT_EUNSUPPORTED;
}

static int
plain_fault_stats(uint64_t *seen, uint64_t *fired, int *armed)
{
    *seen = *fired = 0;
    *armed = 0;
    return OOMKIT_OK;
}

static int
plain_set_phase(int Py_UNUSED(phase))
{
    return OOMKIT_PHASE_FORWARD;
}

/* --- devices: asked of torch itself, see oomkit_device_by_bridge() --- */

static int
plain_device(int Py_UNUSED(device_type))
{
    return OOMKIT_EUNSUPPORTED;
}

static int
plain_device_stats(int Py_UNUSED(device_type), int Py_UNUSED(device_index),
                   oomkit_memory_stats *Py_UNUSED(stats))
{
    return OOMKIT_EUNSUPPORTED;
}

static int
plain_device_reset_peak(int Py_UNUSED(device_type), int Py_UNUSED(device_index))
{
    return OOMKIT_EUNSUPPORTED;
}

const oomkit_bridge oomkit_plain_bridge = {
    .version = OOMKIT_BRIDGE_VERSION,
    .size = sizeof(oomkit_bridge),
    .tensor_facts = plain_tensor_facts,
    .versions = plain_versions,
    .grads_mark = plain_grads_mark,
    .grads_compare = plain_grads_compare,
    .grads_release = plain_grads_release,
    .bytes_get = plain_bytes_get,
    .bytes_set = plain_bytes_set,
    .sample = plain_sample,
    .modes_get = plain_modes_get,
    .modes_set = plain_modes_set,
    .generator_read = plain_generator_read,
    .generator_same = plain_generator_same,
    .cpu_install = plain_cpu_install,
    .cpu_installed = plain_cpu_installed,
    .cpu_set_limit = plain_cpu_set_limit,
    .cpu_stats = plain_cpu_stats,
    .cpu_counted = plain_cpu_counted,
    .cpu_peak_push = plain_cpu_peak_push,
    .cpu_peak_pop = plain_cpu_peak,
    .cpu_peak_read = plain_cpu_peak,
    .exempt_enter = plain_nothing,
    .exempt_leave = plain_nothing,
    .exempt_all = plain_exempt_all,
    .fault_arm = plain_fault_arm,
    .fault_disarm = plain_nothing,
    .fault_stats = plain_fault_stats,
    .set_phase = plain_set_phase,
    .device_initialized = plain_device,
    .device_stats = plain_device_stats,
    .device_reset_peak = plain_device_reset_peak,
    .device_empty_cache = plain_device,
    .device_expandable = plain_device,
};

int
oomkit_bridge_failed(const char *what)
{
    if (!PyErr_Occurred()) {
        PyErr_Format(PyExc_RuntimeError, "oomkit could not %s" SEE("internal-error"),
                     what);
    }
    return -1;
}
