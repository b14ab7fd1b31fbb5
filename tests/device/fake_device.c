/* A device for tests: tensors of the CPU that the bridge says are on an accelerator,
 * with figures that a test scripts. Compiled by tests/device/fake.py, never shipped.
 *
 * While it is installed, oomkit._C goes through a copy of the bridge's table: facts of
 * tensors say the fake device, figures are `live` (those of oomkit's own CPU allocator,
 * so that budgets and planned faults make real errors) or as they were set, and every
 * call is counted. */
#define PY_SSIZE_T_CLEAN
#include "../../csrc/py/state.h"

#include "../../csrc/core/status.h"

#define INDICES 4

typedef struct fake_figures {
    unsigned long long allocated, reserved, peak_allocated, peak_reserved;
    unsigned long long num_alloc_retries, num_ooms;
} fake_figures;

typedef struct fake {
    oomkit_state *st;           /* borrowed from oomkit._C, which outlives this */
    const oomkit_bridge *below; /* the real table */
    PyObject *to_host;          /* the name that is in use again without us */
    oomkit_bridge table;
    int type, index; /* below 0: no tensor is on the device */
    int wide_index;  /* of float64 tensors, when >= 0 */
    int live;
    int initialized, expandable; /* what the backend answers */
    int stats_status, reset_status, empty_status;
    unsigned long long cached;       /* beside what is allocated; gone when emptied */
    unsigned long long pending;      /* of side streams: counted until emptied */
    unsigned long long retries_each; /* alloc retries that each look finds */
    int window;                      /* of the CPU's peak, open since the last reset */
    int cpu_refused;                 /* somebody else's allocator is the CPU's */
    fake_figures now;
    long stats_calls, reset_calls, empty_calls, asked;
} fake;

static fake the_fake;

/* --- the table --- */

static int
fake_tensor_facts(const void *holder, ptrdiff_t offset, int64_t dim,
                  oomkit_tensor_facts *facts)
{
    int status = the_fake.below->tensor_facts(holder, offset, dim, facts);

    if (status == OOMKIT_OK && facts->device_type == 0 && the_fake.index >= 0) {
        int is_wide = facts->dtype == 7 && the_fake.wide_index >= 0; /* float64 */
        facts->device_type = the_fake.type;
        facts->device_index = is_wide ? the_fake.wide_index : the_fake.index;
    }
    return status;
}

static int
fake_storage_facts(const void *holder, ptrdiff_t offset, oomkit_storage_facts *facts)
{
    int status = the_fake.below->storage_facts(holder, offset, facts);

    if (status == OOMKIT_OK && facts->device_type == 0 && the_fake.index >= 0) {
        facts->device_type = the_fake.type;
        facts->device_index = the_fake.index;
    }
    return status;
}

static int
fake_initialized(int type)
{
    the_fake.asked++;
    return type == the_fake.type ? the_fake.initialized : OOMKIT_EUNSUPPORTED;
}

static void
fake_live(oomkit_memory_stats *stats)
{
    oomkit_cpu_stats cpu;

    the_fake.below->cpu_stats(&cpu);
    stats->allocated = cpu.allocated + the_fake.pending;
    stats->reserved = stats->allocated + the_fake.cached;
    stats->peak_allocated = the_fake.window >= 0
                                ? the_fake.below->cpu_peak_read(the_fake.window)
                                : cpu.peak_allocated;
    if (stats->peak_allocated < stats->allocated) {
        stats->peak_allocated = stats->allocated;
    }
    stats->peak_reserved = stats->peak_allocated + the_fake.cached;
}

static int
fake_cpu_installed(void)
{
    return !the_fake.cpu_refused && the_fake.below->cpu_installed();
}

static int
fake_stats(int type, int index, oomkit_memory_stats *stats)
{
    (void)index;
    the_fake.stats_calls++;
    if (type != the_fake.type || the_fake.initialized != 1) {
        return OOMKIT_EUNSUPPORTED;
    }
    if (the_fake.stats_status != OOMKIT_OK) {
        return the_fake.stats_status;
    }
    the_fake.now.num_alloc_retries += the_fake.retries_each;
    stats->allocated = the_fake.now.allocated;
    stats->reserved = the_fake.now.reserved;
    stats->peak_allocated = the_fake.now.peak_allocated;
    stats->peak_reserved = the_fake.now.peak_reserved;
    if (the_fake.live) {
        fake_live(stats);
    }
    stats->num_alloc_retries = the_fake.now.num_alloc_retries;
    stats->num_ooms = the_fake.now.num_ooms;
    stats->free = stats->total = OOMKIT_UNKNOWN;
    return OOMKIT_OK;
}

static int
fake_reset_peak(int type, int index)
{
    (void)type;
    (void)index;
    the_fake.reset_calls++;
    if (the_fake.reset_status != OOMKIT_OK) {
        return the_fake.reset_status;
    }
    the_fake.now.peak_allocated = the_fake.now.allocated;
    the_fake.now.peak_reserved = the_fake.now.reserved;
    if (the_fake.live) {
        if (the_fake.window >= 0) {
            the_fake.below->cpu_peak_pop(the_fake.window);
        }
        if (the_fake.below->cpu_peak_push(&the_fake.window) != OOMKIT_OK) {
            the_fake.window = -1;
        }
    }
    return OOMKIT_OK;
}

static int
fake_empty_cache(int type)
{
    if (type != the_fake.type || the_fake.initialized != 1) {
        return OOMKIT_EUNSUPPORTED;
    }
    the_fake.empty_calls++;
    if (the_fake.empty_status != OOMKIT_OK) {
        return the_fake.empty_status;
    }
    the_fake.cached = 0;
    the_fake.pending = 0;
    if (the_fake.now.reserved > the_fake.now.allocated) {
        the_fake.now.reserved = the_fake.now.allocated;
    }
    return OOMKIT_OK;
}

static int
fake_expandable(int type)
{
    return type == the_fake.type ? the_fake.expandable : OOMKIT_EUNSUPPORTED;
}

/* --- the module --- */

static PyObject *
install(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *core; /* borrowed from args */
    fake *f = &the_fake;

    if (f->st != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the fake device is installed already");
        return NULL;
    }
    memset(f, 0, sizeof(*f));
    f->wide_index = f->window = -1;
    if (!PyArg_ParseTuple(args, "Oiip", &core, &f->type, &f->index, &f->live)) {
        return NULL;
    }
    f->st = PyModule_GetState(core);
    if (f->st == NULL || !oomkit_has_bridge(f->st)) {
        f->st = NULL;
        PyErr_SetString(PyExc_RuntimeError, "oomkit._C has no bridge");
        return NULL;
    }
    f->below = f->st->bridge;
    f->below->cpu_install();
    f->to_host = f->st->str_cpu; /* of a tensor of the CPU .cpu() is no copy */
    f->st->str_cpu = f->st->str_clone;
    f->initialized = 1;
    f->st->flush_pending = 0; /* of another test's guard */
    f->table = *f->below;
    f->table.tensor_facts = fake_tensor_facts;
    f->table.storage_facts = fake_storage_facts;
    f->table.cpu_installed = fake_cpu_installed;
    f->table.device_initialized = fake_initialized;
    f->table.device_stats = fake_stats;
    f->table.device_reset_peak = fake_reset_peak;
    f->table.device_empty_cache = fake_empty_cache;
    f->table.device_expandable = fake_expandable;
    f->st->bridge = &f->table;
    Py_RETURN_NONE;
}

static PyObject *
uninstall(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(ignored))
{
    fake *f = &the_fake;

    if (f->st != NULL) {
        f->st->bridge = f->below;
        f->st->str_cpu = f->to_host;
        if (f->window >= 0) {
            f->below->cpu_peak_pop(f->window);
        }
        f->st = NULL;
    }
    Py_RETURN_NONE;
}

#define NUMBERS(X)                                                                     \
    X(index)                                                                           \
    X(wide_index) X(initialized) X(expandable) X(stats_status) X(reset_status)         \
        X(empty_status) X(cached) X(pending) X(retries_each) X(now.allocated)          \
            X(now.reserved) X(now.peak_allocated) X(now.peak_reserved)                 \
                X(now.num_alloc_retries) X(now.num_ooms) X(stats_calls) X(reset_calls) \
                    X(empty_calls) X(asked) X(cpu_refused)

static PyObject *
set(PyObject *Py_UNUSED(self), PyObject *args)
{
    const char *name;
    long long value;

    if (!PyArg_ParseTuple(args, "sL", &name, &value)) {
        return NULL;
    }
#define SET(field)                                                                     \
    if (strcmp(name, #field) == 0) {                                                   \
        the_fake.field = value;                                                        \
        Py_RETURN_NONE;                                                                \
    }
    NUMBERS(SET)
#undef SET
    return PyErr_Format(PyExc_AttributeError, "the fake device has no %s", name);
}

static PyObject *
get(PyObject *Py_UNUSED(self), PyObject *text)
{
    const char *name = PyUnicode_AsUTF8(text); /* borrowed from text */

    if (name == NULL) {
        return NULL;
    }
#define GET(field)                                                                     \
    if (strcmp(name, #field) == 0) {                                                   \
        return PyLong_FromLongLong((long long)the_fake.field);                         \
    }
    NUMBERS(GET)
#undef GET
    return PyErr_Format(PyExc_AttributeError, "the fake device has no %s", name);
}

/* Puts another callable in the place of one that oomkit._C looked up in torch at
 * import, by the name of the state's field. Returns the one before (None for none). */
static PyObject *
look_up(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *core, *object; /* borrowed from args */
    PyObject **place = NULL, *before;
    oomkit_state *st;
    const char *name;

    if (!PyArg_ParseTuple(args, "OsO", &core, &name, &object)) {
        return NULL;
    }
    st = PyModule_GetState(core);
#define FIND(field, module, attribute, required)                                       \
    if (strcmp(name, #field) == 0) {                                                   \
        place = &st->field;                                                            \
    }
    OOMKIT_STATE_TORCH(FIND)
#undef FIND
    if (place == NULL) {
        return PyErr_Format(PyExc_AttributeError, "oomkit._C looks up no %s", name);
    }
    before = *place;
    *place = object == Py_None ? NULL : Py_NewRef(object);
    return before == NULL ? Py_NewRef(Py_None) : before;
}

/* Takes the bridge away or gives it back: without it torch's own calls are used. */
static PyObject *
without_bridge(PyObject *Py_UNUSED(self), PyObject *args)
{
    static const oomkit_bridge *kept;
    static uint64_t kept_size;
    PyObject *core; /* borrowed from args */
    oomkit_state *st;
    int away;

    if (!PyArg_ParseTuple(args, "Op", &core, &away)) {
        return NULL;
    }
    st = PyModule_GetState(core);
    Py_CLEAR(st->settings_seen); /* of another test's allocator */
    st->flush_pending = 0;       /* of another test's guard */
    if (away) {
        kept = st->bridge;
        kept_size = st->stream_size;
        st->bridge = st->plain_bridge;
        st->stream_size = 0;
    } else {
        st->bridge = kept;
        st->stream_size = kept_size;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"install", install, METH_VARARGS, NULL},
    {"uninstall", uninstall, METH_NOARGS, NULL},
    {"set", set, METH_VARARGS, NULL},
    {"get", get, METH_O, NULL},
    {"look_up", look_up, METH_VARARGS, NULL},
    {"without_bridge", without_bridge, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "fake_device", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC
PyInit_fake_device(void);

PyMODINIT_FUNC
PyInit_fake_device(void)
{
    return PyModule_Create(&module);
}
