/* Module state: creation, look-ups in torch, traversal. */
#include "tensor.h"

int
oomkit_state_init(oomkit_state *st)
{
    st->bridge = st->plain_bridge = &oomkit_plain_bridge;
#define MAKE_STRING(field, text)                                                       \
    st->field = PyUnicode_InternFromString(text);                                      \
    if (st->field == NULL) {                                                           \
        return -1;                                                                     \
    }
    OOMKIT_STATE_STRINGS(MAKE_STRING)
#undef MAKE_STRING
    st->empty_tuple = PyTuple_New(0);
    return st->empty_tuple == NULL ? -1 : 0;
}

int
oomkit_state_visit(oomkit_state *st, visitproc visit, void *arg)
{
#define VISIT_STRING(field, text) Py_VISIT(st->field);
#define VISIT_TORCH(field, module, name, required) Py_VISIT(st->field);
#define VISIT(field) Py_VISIT(st->field);
    OOMKIT_STATE_STRINGS(VISIT_STRING)
    OOMKIT_STATE_TYPES(VISIT)
    OOMKIT_STATE_TORCH(VISIT_TORCH)
    OOMKIT_STATE_OTHER(VISIT)
    OOMKIT_STATE_GLUE(VISIT)
#undef VISIT
#undef VISIT_TORCH
#undef VISIT_STRING
    Py_VISIT(st->bridge_capsule);
    return 0;
}

void
oomkit_state_clear(oomkit_state *st)
{
#define CLEAR_STRING(field, text) Py_CLEAR(st->field);
#define CLEAR_TORCH(field, module, name, required) Py_CLEAR(st->field);
#define CLEAR(field) Py_CLEAR(st->field);
    OOMKIT_STATE_OTHER(CLEAR)
    OOMKIT_STATE_GLUE(CLEAR)
    OOMKIT_STATE_TORCH(CLEAR_TORCH)
    OOMKIT_STATE_TYPES(CLEAR)
    OOMKIT_STATE_STRINGS(CLEAR_STRING)
#undef CLEAR
#undef CLEAR_TORCH
#undef CLEAR_STRING
    st->stream_size =
        0; /* the bridge stays: calls that are still alive have its marks */
    Py_CLEAR(st->bridge_capsule);
    while (st->node_types != NULL) {
        oomkit_chained *first = st->node_types;
        st->node_types = first->next;
        PyMem_Free(first);
    }
}

/* One name out of a module, imported. New reference; NULL without an exception when an
 * optional name is missing. */
static PyObject *
state_lookup(const char *module_name, const char *name, int required)
{
    OWNED PyObject *module = PyImport_ImportModule(module_name);
    PyObject *value; /* owned, returned */

    if (module == NULL) {
        if (!required && PyErr_ExceptionMatches(PyExc_ImportError)) {
            PyErr_Clear();
        }
        return NULL;
    }
    value = PyObject_GetAttrString(module, name);
    if (value == NULL && !required && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
    }
    return value;
}

static int
state_bind_torch(oomkit_state *st)
{
#define BIND(field, module, name, required)                                            \
    Py_XSETREF(st->field, state_lookup(module, name, required));                       \
    if (st->field == NULL && PyErr_Occurred()) {                                       \
        return -1;                                                                     \
    }
    OOMKIT_STATE_TORCH(BIND)
#undef BIND
    /* One at a time: nothing may be called while an exception is set. */
    Py_XSETREF(st->log, PyObject_CallFunction(st->logger, "s", "oomkit"));
    if (st->log == NULL) {
        return -1;
    }
    Py_XSETREF(st->live_steps, PyObject_CallNoArgs(st->weak_set));
    if (st->live_steps == NULL) {
        return -1;
    }
    Py_XSETREF(st->generator_get,
               PyObject_GetAttr(st->default_generator, st->str_get_state));
    if (st->generator_get == NULL) {
        return -1;
    }
    Py_XSETREF(st->generator_set,
               PyObject_GetAttr(st->default_generator, st->str_set_state));
    return st->generator_set == NULL ? -1 : 0;
}

int
oomkit_state_passes(void)
{
    if (!PyErr_Occurred()) {
        return 0;
    }
    if (PyErr_ExceptionMatches(PyExc_MemoryError) ||
        PyErr_ExceptionMatches(PyExc_SystemError) ||
        !PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyErr_Clear(); /* it means that the bridge does not fit, which is no error */
    return 0;
}

/* The bridge is used only when its struct is the one that this file was compiled with
 * and when a TensorImpl pointer can be found in a tensor object. */
static int
state_bind_bridge(oomkit_state *st, PyObject *capsule)
{
    const oomkit_bridge *bridge;
    int fits;

    st->bridge = st->plain_bridge;
    st->stream_size = 0;
    Py_CLEAR(st->bridge_capsule);
    if (capsule == Py_None) {
        return 0;
    }
    bridge = PyCapsule_GetPointer(capsule, OOMKIT_BRIDGE_CAPSULE);
    if (bridge == NULL) {
        return -1;
    }
    if (bridge->version != OOMKIT_BRIDGE_VERSION || bridge->size != sizeof(*bridge)) {
        PyErr_Format(
            PyExc_RuntimeError,
            "oomkit._bridge has interface %u of %u bytes, oomkit._C needs %u of %zu: "
            "rebuild both with `pip install --no-build-isolation .`" SEE("bridge"),
            (unsigned)bridge->version, (unsigned)bridge->size, OOMKIT_BRIDGE_VERSION,
            sizeof(*bridge));
        return -1;
    }
    st->bridge = bridge;
    st->bridge_capsule = Py_NewRef(capsule);
    fits = oomkit_tensor_calibrate(st);
    if (fits <= 0) {
        st->bridge = st->plain_bridge;
        Py_CLEAR(st->bridge_capsule);
        return fits;
    }
    return 0;
}

int
oomkit_state_bind(oomkit_state *st, PyObject *bridge_capsule)
{
    if (state_bind_torch(st) < 0) {
        return -1;
    }
    oomkit_plain_bridge_bind(st);
    if (state_bind_bridge(st, bridge_capsule) < 0) {
        return -1;
    }
    st->bound = 1;
    return 0;
}
