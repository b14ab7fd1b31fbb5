/* What is remembered of a loop over chunks(): by the line that made it, or its label.
 */
#include "chunks.h"

#define SITES 128 /* of a process; the oldest gives way */

/* "chunks at eval.py:12". New reference or NULL. */
static PyObject *
site_name(PyFrameObject *frame, PyCodeObject *code)
{
    PyObject *path = code->co_filename; /* borrowed */
    Py_ssize_t end = PyUnicode_GET_LENGTH(path);
    Py_ssize_t slash = PyUnicode_FindChar(path, '/', 0, end, -1);
    OWNED PyObject *file = PyUnicode_Substring(path, slash < 0 ? 0 : slash + 1, end);

    return file == NULL ? NULL
                        : PyUnicode_FromFormat("chunks at %U:%d", file,
                                               PyFrame_GetLineNumber(frame));
}

/* The key and the label of the running frame's call. 0 or -1. */
static int
site_here(PyObject **key, PyObject **label)
{
    PyFrameObject *frame = PyEval_GetFrame(); /* borrowed */
    PyCodeObject *code;                       /* owned */

    if (frame == NULL) { /* called from C alone */
        *key = PyUnicode_FromString("");
        *label = PyUnicode_FromString("chunks");
        return *key == NULL || *label == NULL ? -1 : 0;
    }
    code = PyFrame_GetCode(frame);
    *key = Py_BuildValue("(OOi)", code->co_filename, code->co_qualname,
                         PyFrame_GetLasti(frame));
    *label = *key == NULL ? NULL : site_name(frame, code);
    Py_DECREF(code);
    return *label == NULL ? -1 : 0;
}

/* A step that is never called: the place for what is known. New reference or NULL. */
static PyObject *
site_make(oomkit_state *st, PyObject *label)
{
    OWNED PyObject *kwargs = PyDict_New();

    if (kwargs == NULL || PyDict_SetItemString(kwargs, "label", label) < 0) {
        return NULL;
    }
    return st->wiring->make_step(st, st->is_grad_enabled, kwargs);
}

/* The oldest one gives way. 0 or -1. */
static int
sites_room(PyObject *sites)
{
    PyObject *key, *value; /* borrowed from sites */
    OWNED PyObject *oldest = NULL;
    Py_ssize_t at = 0;

    if (PyDict_GET_SIZE(sites) < SITES || !PyDict_Next(sites, &at, &key, &value)) {
        return 0;
    }
    oldest = Py_NewRef(key);
    return PyDict_DelItem(sites, oldest);
}

/* New reference or NULL. */
static PyObject *
site_get(oomkit_state *st, PyObject *key, PyObject *label)
{
    PyObject *step; /* borrowed, then owned */

    if (st->chunk_sites == NULL && (st->chunk_sites = PyDict_New()) == NULL) {
        return NULL;
    }
    step = PyDict_GetItemWithError(st->chunk_sites, key);
    if (step != NULL || PyErr_Occurred()) {
        return Py_XNewRef(step);
    }
    step = site_make(st, label);
    if (step == NULL || sites_room(st->chunk_sites) < 0 ||
        PyDict_SetItem(st->chunk_sites, key, step) < 0) {
        Py_CLEAR(step);
    }
    return step;
}

int
oomkit_chunks_site(oomkit_chunks *self, PyObject *key)
{
    OWNED PyObject *label = Py_XNewRef(self->options.label), *own = NULL;

    if (key != NULL) {
        own = Py_NewRef(key);
        label = label == NULL ? PyUnicode_FromString("map") : label;
    } else if (label != NULL) {
        own = Py_NewRef(label);
    } else if (site_here(&own, &label) < 0) {
        return -1;
    }
    if (label != NULL) {
        Py_XSETREF(self->options.label, Py_NewRef(label));
        self->site = (oomkit_step *)site_get(self->st, own, label);
    }
    return self->site == NULL ? -1 : 0;
}

/* --- who takes part --- */

/* The module that a loop runs, or a method of (borrowed), with that method's function;
 * NULL for other callables: a site that knew the cells of a closure would keep alive
 * what is in them. */
static PyObject *
parts_owner(const oomkit_chunks *self, const void **function)
{
    PyObject *owner = self->func; /* borrowed */

    *function = NULL;
    if (owner != NULL && PyMethod_Check(owner)) {
        *function = PyMethod_GET_FUNCTION(owner);
        owner = PyMethod_GET_SELF(owner);
    }
    return owner != NULL &&
                   PyObject_TypeCheck(owner, (PyTypeObject *)self->st->Module) &&
                   PyTuple_GET_SIZE(self->options.participants) == 0
               ? owner
               : NULL;
}

static int
parts_have_cells(const oomkit_participants *parts)
{
    Py_ssize_t i;
    for (i = 0; i < parts->source_count; i++) {
        if (parts->sources[i].container != NULL &&
            PyCell_Check(parts->sources[i].container)) {
            return 1;
        }
    }
    return 0;
}

oomkit_participants *
oomkit_chunks_known_parts(const oomkit_chunks *self)
{
    oomkit_step *site = self->site;
    const void *function;
    PyObject *owner = parts_owner(self, &function); /* borrowed */

    if (owner == NULL || site->parts == NULL || site->loop_of == NULL ||
        PyWeakref_GET_OBJECT(site->loop_of) != owner ||
        site->loop_function != function) {
        return NULL;
    }
    site->parts->refs++;
    return site->parts;
}

int
oomkit_chunks_know_parts(const oomkit_chunks *self)
{
    oomkit_step *site = self->site;
    const void *function;
    PyObject *owner = parts_owner(self, &function); /* borrowed */
    PyObject *ref;                                  /* owned */
    oomkit_participants *old;                       /* counted reference */

    if (owner == NULL || parts_have_cells(self->parts)) {
        return 0;
    }
    ref = PyWeakref_NewRef(owner, NULL);
    if (ref == NULL) {
        return -1;
    }
    old = site->parts;
    site->parts = self->parts;
    site->parts->refs++;
    Py_XSETREF(site->loop_of, ref);
    site->loop_function = function;
    oomkit_participants_release(old);
    return 0;
}
