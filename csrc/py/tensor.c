/* Facts of tensors: by the bridge, or by attributes where it cannot tell; and the
 * search for the TensorImpl pointer that the bridge starts from. */
#include "tensor.h"
#include "../core/status.h"

#include <string.h>

/* --- facts by attributes --- */

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
        PyErr_Format(PyExc_TypeError, "expected the shape of a tensor, got '%.200s'",
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
facts_version(oomkit_state *st, PyObject *tensor, oomkit_tensor_facts *facts)
{
    OWNED PyObject *value = PyObject_GetAttr(tensor, st->str_version);

    if (value == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) {
            return -1;
        }
        PyErr_Clear(); /* "Inference tensors do not track version counter." */
        return 0;
    }
    facts->version = (uint32_t)PyLong_AsUnsignedLongMask(value);
    facts->has_version = 1;
    return PyErr_Occurred() ? -1 : 0;
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

static int
facts_by_attributes(oomkit_state *st, PyObject *tensor, int64_t dim,
                    oomkit_tensor_facts *facts)
{
    int truth;

    *facts = (oomkit_tensor_facts){.ndim = -1, .size = -1};
    if (facts_dtype(tensor, facts) < 0 || facts_device(tensor, facts) < 0 ||
        facts_version(st, tensor, facts) < 0) {
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
oomkit_tensor_facts_get(oomkit_state *st, PyObject *tensor, int64_t dim,
                        oomkit_tensor_facts *facts)
{
    if (st->bridge == NULL ||
        st->bridge->tensor_facts(tensor, st->impl_offset, dim, facts) != OOMKIT_OK) {
        return facts_by_attributes(st, tensor, dim, facts);
    }
    return 0;
}

int
oomkit_tensor_is_leaf(PyObject *tensor, const oomkit_tensor_facts *facts)
{
    return facts->is_leaf >= 0 ? facts->is_leaf : attribute_truth(tensor, "is_leaf");
}

/* --- calibration --- */

#define SAMPLES 4

/* torch.ones(size, device="cpu", requires_grad=...), whatever the default device is.
 * New reference or NULL. */
static PyObject *
sample_make(oomkit_state *st, int size, int requires_grad)
{
    OWNED PyObject *args = Py_BuildValue("(i)", size);
    OWNED PyObject *kwargs = Py_BuildValue("{sssO}", "device", "cpu", "requires_grad",
                                           requires_grad ? Py_True : Py_False);

    return args == NULL || kwargs == NULL ? NULL
                                          : PyObject_Call(st->torch_ones, args, kwargs);
}

/* `_cdata`: the TensorImpl as torch says it. NULL with an exception. */
static void *
sample_impl(oomkit_state *st, PyObject *tensor)
{
    OWNED PyObject *number = PyObject_GetAttr(tensor, st->str_cdata);

    return number == NULL ? NULL : PyLong_AsVoidPtr(number);
}

/* The one place in a tensor's object where all samples have their own TensorImpl; -1
 * without an exception when there is none, or with one. */
static ptrdiff_t
offset_find(oomkit_state *st, PyObject *const *samples)
{
    void *impls[SAMPLES], *word;
    const ptrdiff_t size = ((PyTypeObject *)st->Tensor)->tp_basicsize;
    const ptrdiff_t step = (ptrdiff_t)sizeof(void *);
    int i;

    for (i = 0; i < SAMPLES; i++) {
        impls[i] = sample_impl(st, samples[i]);
        if (impls[i] == NULL) {
            return -1;
        }
    }
    for (ptrdiff_t at = (ptrdiff_t)sizeof(PyObject); at + step <= size; at += step) {
        for (i = 0; i < SAMPLES; i++) {
            memcpy(&word, (const char *)samples[i] + at, sizeof word);
            if (word != impls[i]) {
                break;
            }
        }
        if (i == SAMPLES) {
            return at;
        }
    }
    return -1;
}

/* One comparison of a gradient with a mark: what the bridge finds, or -1. */
static int
gradient_state(const oomkit_bridge *bridge, PyObject *tensor, ptrdiff_t offset,
               const oomkit_grad_mark *mark)
{
    const void *holder = tensor;
    uint8_t state = 0;
    size_t moved = 0;

    if (bridge->grads_compare(&holder, offset, 1, mark, &state, NULL, &moved) !=
        OOMKIT_OK) {
        return -1;
    }
    return moved == (size_t)(state != OOMKIT_GRAD_SAME) ? state : -1;
}

/* Does the bridge see the gradient of `tensor` as torch does: there, changed in place,
 * gone? `gradient` is any tensor of its shape. 1 or 0; may leave an exception. */
static int
gradients_agree(oomkit_state *st, PyObject *tensor, PyObject *gradient,
                ptrdiff_t offset)
{
    const oomkit_bridge *bridge = st->bridge;
    const void *holder = tensor;
    oomkit_grad_mark mark = {NULL, 0};
    OWNED PyObject *same = NULL;
    int agrees;

    if (bridge->grads_mark(&holder, offset, 1, &mark) != OOMKIT_OK ||
        mark.grad != NULL || PyObject_SetAttr(tensor, st->str_grad, gradient) < 0 ||
        gradient_state(bridge, tensor, offset, &mark) != OOMKIT_GRAD_NEW ||
        bridge->grads_mark(&holder, offset, 1, &mark) != OOMKIT_OK) {
        return 0;
    }
    agrees = mark.grad == sample_impl(st, gradient) &&
             gradient_state(bridge, tensor, offset, &mark) == OOMKIT_GRAD_SAME;
    same = PyObject_CallMethod(gradient, "zero_", NULL);
    agrees = agrees && same != NULL &&
             gradient_state(bridge, tensor, offset, &mark) == OOMKIT_GRAD_MOVED &&
             PyObject_SetAttr(tensor, st->str_grad, Py_None) == 0 &&
             gradient_state(bridge, tensor, offset, &mark) == OOMKIT_GRAD_GONE;
    bridge->grads_release(&mark, 1);
    return agrees;
}

/* 1 when the bridge's facts of the tensor are those of its attributes, else 0; may
 * leave an exception. */
static int
facts_agree(oomkit_state *st, PyObject *tensor, ptrdiff_t offset)
{
    const void *holder = tensor;
    oomkit_tensor_facts ours, theirs;
    uint32_t version = UINT32_MAX;

    if (st->bridge->tensor_facts(tensor, offset, 0, &ours) != OOMKIT_OK ||
        st->bridge->versions(&holder, offset, 1, &version, NULL) != OOMKIT_OK ||
        facts_by_attributes(st, tensor, 0, &theirs) < 0) {
        return 0;
    }
    return ours.ndim == theirs.ndim && ours.size == theirs.size &&
           ours.bytes == theirs.bytes && ours.version == theirs.version &&
           ours.version == version && ours.dtype == theirs.dtype &&
           ours.device_type == theirs.device_type &&
           ours.device_index == theirs.device_index &&
           ours.requires_grad == theirs.requires_grad &&
           ours.is_strided == theirs.is_strided;
}

/* 0 and st->impl_offset set, or -1; may leave an exception. */
static int
calibrate(oomkit_state *st, PyObject *const *samples)
{
    ptrdiff_t offset = offset_find(st, samples);

    if (offset < 0) {
        return -1;
    }
    for (int i = 0; i < SAMPLES; i++) {
        if (!facts_agree(st, samples[i], offset)) {
            return -1;
        }
    }
    if (!gradients_agree(st, samples[2], samples[1], offset) ||
        !facts_agree(st, samples[1], offset)) {
        return -1;
    }
    st->impl_offset = offset;
    return 0;
}

int
oomkit_tensor_calibrate(oomkit_state *st)
{
    PyObject *samples[SAMPLES] = {NULL}; /* owned */
    int fits = 0;

    st->bridge->exempt_enter();
    samples[0] = sample_make(st, 1, 0);
    samples[1] = sample_make(st, 3, 0);
    samples[2] = sample_make(st, 3, 1);
    if (samples[0] != NULL && samples[1] != NULL && samples[2] != NULL) {
        samples[3] = PyObject_CallOneArg(st->Parameter, samples[0]);
    }
    if (samples[3] != NULL) {
        fits = calibrate(st, samples) == 0;
    }
    for (int i = 0; i < SAMPLES; i++) {
        Py_XDECREF(samples[i]);
    }
    st->bridge->exempt_leave();
    return oomkit_state_passes() < 0 ? -1 : fits;
}
