/* The options of chunks(): most are auto_batch's, parsed as there. */
#include "types.h"

/* Options of auto_batch that mean the same here; micro_batch= and bucket= are chunks'
 * own. */
static const char *const chunks_options[] = {
    "micro_batch",   "bucket",   "min_micro_batch", "multiple_of",  "dim",
    "static",        "split",    "batch",           "participants", "rng",
    "restore_batch", "on_retry", "label",           "join",         NULL,
};

/* Takes `name` out of the options. New reference; NULL, perhaps with an exception, when
 * it is not there or None. */
static PyObject *
options_pop(PyObject *kwargs, const char *name)
{
    OWNED PyObject *value = Py_XNewRef(oomkit_item(kwargs, name));

    if (value == NULL || PyDict_DelItemString(kwargs, name) < 0 || value == Py_None) {
        return NULL;
    }
    return STEAL(value);
}

/* micro_batch=: the largest part that is tried. 0 or -1. */
static int
options_largest(oomkit_chunks *self, PyObject *kwargs)
{
    OWNED PyObject *given = options_pop(kwargs, "micro_batch");
    int overflow = 0;

    if (given == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    if (!PyLong_Check(given) || PyBool_Check(given)) {
        PyErr_Format(PyExc_TypeError,
                     "chunks(micro_batch=...) expected an int, got %s" SEE("options"),
                     Py_TYPE(given)->tp_name);
        return -1;
    }
    self->largest = PyLong_AsLongLongAndOverflow(given, &overflow);
    if (overflow != 0 || self->largest < 1) {
        PyErr_Format(
            PyExc_ValueError,
            "chunks(micro_batch=...) expected 1 row or more, got %S" SEE("options"),
            given);
        return -1;
    }
    return 0;
}

/* bucket=: whatever the memory of a row depends on besides its shape. 0 or -1. */
static int
options_bucket(oomkit_chunks *self, PyObject *kwargs)
{
    OWNED PyObject *given = options_pop(kwargs, "bucket");
    Py_hash_t hash;

    if (given == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    hash = PyObject_Hash(given);
    self->bucket = ((uint64_t)hash + 1) * 0x9e3779b97f4a7c15u;
    return hash == -1 ? -1 : 0;
}

/* What auto_batch says of an option, as chunks' own message. -1 always. */
static int
options_ours(void)
{
    OWNED PyObject *exception = oomkit_exception_take();
    OWNED PyObject *text = PyObject_Str(exception);
    OWNED PyObject *from = PyUnicode_FromString("auto_batch(");
    OWNED PyObject *to = PyUnicode_FromString("chunks(");
    OWNED PyObject *ours = NULL;

    if (text != NULL && from != NULL && to != NULL) {
        ours = PyUnicode_Replace(text, from, to, 1);
    }
    if (ours != NULL && (Py_IS_TYPE(exception, (PyTypeObject *)PyExc_TypeError) ||
                         Py_IS_TYPE(exception, (PyTypeObject *)PyExc_ValueError))) {
        PyErr_SetObject((PyObject *)Py_TYPE(exception), ours);
    } else {
        Py_XDECREF(oomkit_exception_take()); /* the first one tells more */
        oomkit_exception_give(STEAL(exception));
    }
    return -1;
}

/* No part may be both above and below a size. 0 or -1. */
static int
options_agree(oomkit_chunks *self)
{
    const oomkit_options *options = &self->options;
    int64_t least = options->multiple_of > options->min_micro_batch
                        ? options->multiple_of
                        : options->min_micro_batch;

    if (self->largest == 0) {
        return 0;
    }
    if (self->largest < least) {
        PyErr_Format(PyExc_ValueError,
                     "chunks(micro_batch=...) expected no less than min_micro_batch "
                     "and multiple_of (%lld), got %lld" SEE("options"),
                     (long long)least, (long long)self->largest);
        return -1;
    }
    self->largest -= self->largest % options->multiple_of;
    return 0;
}

int
oomkit_chunks_options(oomkit_chunks *self, PyObject *given)
{
    OWNED PyObject *kwargs = given == NULL ? PyDict_New() : PyDict_Copy(given);

    if (kwargs == NULL ||
        oomkit_options_known(self->st, "chunks", kwargs, chunks_options) < 0 ||
        options_largest(self, kwargs) < 0 || options_bucket(self, kwargs) < 0) {
        return -1;
    }
    if (oomkit_options_parse(self->st, kwargs, &self->options) < 0) {
        return options_ours();
    }
    return options_agree(self);
}
