/* What a type is to capture, remembered: arguments of the same few types come with
 * every call. */
#include "flatten.h"
#include "named_parts.h"
#include "tree.h"

#include <string.h>

/* The type, or one that it comes from, that has a splitter. Borrowed from the state;
 * NULL when there is none. Hashing types runs no Python code but that of a metaclass.
 */
PyObject *
oomkit_splitter_of(const oomkit_state *st, PyTypeObject *type)
{
    PyObject *found = NULL; /* borrowed from st->splitters */
    Py_ssize_t i;

    if (st->splitters == NULL || type->tp_mro == NULL) {
        return NULL;
    }
    for (i = 0; found == NULL && i < PyTuple_GET_SIZE(type->tp_mro); i++) {
        found = PyDict_GetItem(st->splitters, PyTuple_GET_ITEM(type->tp_mro, i));
    }
    return found;
}

static int
is_array(const PyTypeObject *type)
{
    for (; type != NULL; type = type->tp_base) {
        if (strcmp(type->tp_name, "numpy.ndarray") == 0) {
            return 1;
        }
    }
    return 0;
}

static int
is_model(const oomkit_state *st, PyTypeObject *type)
{
    return PyType_IsSubtype(type, (PyTypeObject *)st->Module) ||
           PyType_IsSubtype(type, (PyTypeObject *)st->Optimizer) ||
           PyType_IsSubtype(type, (PyTypeObject *)st->LRScheduler) ||
           PyType_IsSubtype(type, (PyTypeObject *)st->GradScaler);
}

static int
kind_find(const oomkit_state *st, PyTypeObject *type)
{
    int custom = oomkit_splitter_of(st, type) != NULL ? OOMKIT_KIND_CUSTOM : 0;

    if (PyType_FastSubclass(type, Py_TPFLAGS_TUPLE_SUBCLASS)) {
        if (type == (PyTypeObject *)st->Size || !oomkit_type_is_named_tuple(st, type)) {
            return custom | OOMKIT_KIND_CLOSED;
        }
        if (PyType_IsSubtype(type, (PyTypeObject *)st->PackedSequence)) {
            custom |= OOMKIT_KIND_PACKED;
        }
        return custom | OOMKIT_KIND_TUPLE;
    }
    if (PyType_IsSubtype(type, (PyTypeObject *)st->Tensor)) {
        return PyType_IsSubtype(type, (PyTypeObject *)st->Parameter)
                   ? OOMKIT_KIND_CLOSED
                   : custom | OOMKIT_KIND_TENSOR;
    }
    if (is_model(st, type)) {
        return custom | OOMKIT_KIND_MODEL;
    }
    if (is_array(type)) {
        return custom | OOMKIT_KIND_ARRAY;
    }
    if (oomkit_output_type(st, type) ||
        (custom != 0 && oomkit_type_is_plain_object(type))) {
        return custom | OOMKIT_KIND_OBJECT;
    }
    return custom | OOMKIT_KIND_CLOSED;
}

/* A type that was freed may leave its address to another one, but never its tag; one
 * without a tag (0) is looked at anew each time. Types written in C stay. */
int
oomkit_kind_of(oomkit_state *st, PyTypeObject *type)
{
    size_t place = ((size_t)(uintptr_t)type >> 4) ^ ((size_t)(uintptr_t)type >> 10);
    oomkit_type_kind *known = &st->kinds[place % OOMKIT_TYPE_KINDS];
    unsigned int tag =
        (type->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0 ? type->tp_version_tag : UINT_MAX;

    if (known->type == type && known->tag == tag && tag != 0) {
        return known->kind;
    }
    *known = (oomkit_type_kind){
        .type = type, .tag = tag, .kind = (uint8_t)kind_find(st, type)};
    return known->kind;
}

void
oomkit_kinds_forget(oomkit_state *st)
{
    memset(st->kinds, 0, sizeof(st->kinds));
}
