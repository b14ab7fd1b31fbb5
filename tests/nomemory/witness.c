/* Which of CPython's functions, or of an extension's, was refused memory.
 *
 * A layer above the allocators of _testcapi: what they refuse passes through here, and
 * the functions on the stack are written down, the innermost first and up to the one
 * that runs Python code. They lie in memory that is shared with the process that forked
 * this one, which reads them when this one has crashed. Functions that export no name
 * are "?", and some of them in a row are one. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <execinfo.h>
#include <stdio.h>
#include <string.h>

#define PLACES 24
#define ROOM 480
#define DEEPEST 300
#define LOOKED_AT 200 /* refusals: a loop without an end has millions */

typedef struct {
    int32_t refused, places;
    char text[PLACES][ROOM];
} witness_notes;

static PyMemAllocatorEx below[3];
static const PyMemAllocatorDomain domains[3] = {PYMEM_DOMAIN_RAW, PYMEM_DOMAIN_MEM,
                                                PYMEM_DOMAIN_OBJ};
static witness_notes *notes; /* borrowed: a mapping that nobody takes down */

static const char *
base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

/* Adds a frame to the text: `name`, or `name of library` outside of CPython. `last` is
 * where the frame before begins, and becomes this one's place. */
static void
add_frame(char *text, size_t *last, const Dl_info *found, const char *python)
{
    const char *name = found->dli_sname == NULL ? "?" : found->dli_sname;
    const char *library = found->dli_fname == NULL ? "?" : found->dli_fname;
    const size_t used = strlen(text);
    char frame[ROOM];

    if (strcmp(library, python) == 0) {
        snprintf(frame, sizeof frame, "%s", name);
    } else {
        snprintf(frame, sizeof frame, "%.200s of %.200s", name, base_name(library));
    }
    if (found->dli_sname != NULL || used == 0 || strcmp(text + *last, frame) != 0) {
        *last = used == 0 ? 0 : used + 3;
        snprintf(text + used, ROOM - used, "%s%s", used == 0 ? "" : " < ", frame);
    }
}

static void
write_down(void)
{
    void *frames[DEEPEST];
    char text[ROOM] = "";
    Dl_info own, python, found;
    size_t last = 0;
    int count, i;

    if (notes == NULL || notes->refused++ >= LOOKED_AT || notes->places == PLACES) {
        return;
    }
    memset(&own, 0, sizeof own);
    memset(&python, 0, sizeof python);
    dladdr((void *)write_down, &own);
    dladdr((void *)PyMem_Malloc, &python);
    count = backtrace(frames, DEEPEST);
    for (i = 0; i < count; i++) {
        memset(&found, 0, sizeof found);
        /* Where it returns to may be the next function's first instruction. */
        dladdr((char *)frames[i] - 1, &found);
        if (found.dli_fbase == own.dli_fbase) {
            continue; /* one allocator asks another one */
        }
        add_frame(text, &last, &found, python.dli_fname);
        if (found.dli_sname != NULL &&
            strncmp(found.dli_sname, "_PyEval_Eval", 12) == 0) {
            break;
        }
    }
    for (i = 0; i < notes->places; i++) {
        if (strcmp(notes->text[i], text) == 0) {
            return;
        }
    }
    memcpy(notes->text[notes->places++], text, sizeof text);
}

static void *
witness_malloc(void *context, size_t size)
{
    const PyMemAllocatorEx *next = context;
    void *given = next->malloc(next->ctx, size);
    if (given == NULL) {
        write_down();
    }
    return given;
}

static void *
witness_calloc(void *context, size_t count, size_t size)
{
    const PyMemAllocatorEx *next = context;
    void *given = next->calloc(next->ctx, count, size);
    if (given == NULL) {
        write_down();
    }
    return given;
}

static void *
witness_realloc(void *context, void *old, size_t size)
{
    const PyMemAllocatorEx *next = context;
    void *given = next->realloc(next->ctx, old, size);
    if (given == NULL) {
        write_down();
    }
    return given;
}

static void
witness_free(void *context, void *given)
{
    const PyMemAllocatorEx *next = context;
    next->free(next->ctx, given);
}

/* begin(room, set_nomemory, *arguments): calls set_nomemory, whose remove_mem_hooks()
 * puts back what was there before either. Allocates nothing after it. */
static PyObject *
witness_begin(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    PyMemAllocatorEx own = {NULL, witness_malloc, witness_calloc, witness_realloc,
                            witness_free};
    void *first[1];
    Py_buffer room;
    PyObject *done; /* owned */

    if (count < 2) {
        PyErr_SetString(PyExc_TypeError, "begin(room, set_nomemory, *arguments)");
        return NULL;
    }
    if (PyObject_GetBuffer(args[0], &room, PyBUF_WRITABLE) < 0) {
        return NULL;
    }
    notes = room.len < (Py_ssize_t)sizeof *notes ? NULL : room.buf;
    PyBuffer_Release(&room);
    if (notes == NULL) {
        PyErr_Format(PyExc_ValueError, "room of %zu bytes", sizeof *notes);
        return NULL;
    }
    memset(notes, 0, sizeof *notes);
    backtrace(first, 1); /* loads what it needs now */
    done = PyObject_Vectorcall(args[1], args + 2, (size_t)(count - 2), NULL);
    if (done == NULL) {
        return NULL;
    }
    for (int i = 0; i < 3; i++) {
        PyMem_GetAllocator(domains[i], &below[i]);
        own.ctx = &below[i];
        PyMem_SetAllocator(domains[i], &own);
    }
    return done;
}

/* size() -> bytes of a room; read(room) -> list of places. */
static PyObject *
witness_size(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    return PyLong_FromSize_t(sizeof(witness_notes));
}

static PyObject *
witness_read(PyObject *Py_UNUSED(module), PyObject *arg)
{
    const witness_notes *found;
    PyObject *list = NULL; /* owned, returned */
    Py_buffer room;

    if (PyObject_GetBuffer(arg, &room, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    found = room.buf;
    if (room.len >= (Py_ssize_t)sizeof *found) {
        list = PyList_New(0);
    }
    for (int i = 0; list != NULL && i < found->places; i++) {
        PyObject *text = PyUnicode_FromString(found->text[i]); /* owned */
        if (text == NULL || PyList_Append(list, text) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(text);
    }
    PyBuffer_Release(&room);
    if (list == NULL && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_ValueError, "this is no room of a witness");
    }
    return list;
}

static PyMethodDef witness_methods[] = {
    {"begin", (PyCFunction)(void (*)(void))witness_begin, METH_FASTCALL, NULL},
    {"size", witness_size, METH_NOARGS, NULL},
    {"read", witness_read, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef witness_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "witness",
    .m_size = -1,
    .m_methods = witness_methods,
};

PyMODINIT_FUNC
PyInit_witness(void)
{
    return PyModule_Create(&witness_module);
}
