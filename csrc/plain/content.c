/* What a container, a tensor or an array of the user's holds: marked, compared, put
 * back in place, so that everybody who has the object sees it. */
#include "plain_state.h"
#include "../py/tensor.h"

#define ITEMS 1024 /* of a container; a longer list is known by its length */

static int
is_deque(const PyTypeObject *type)
{
    for (; type != NULL; type = type->tp_base) {
        if (strcmp(type->tp_name, "collections.deque") == 0) {
            return 1;
        }
    }
    return 0;
}

static int
kind_of(const oomkit_state *st, PyObject *value, int what)
{
    if (PyList_Check(value)) {
        return (what & OOMKIT_PLAIN_ALL) != 0 || ((what & OOMKIT_PLAIN_CONTENT) != 0 &&
                                                  PyList_GET_SIZE(value) <= ITEMS)
                   ? OOMKIT_CONTENT_LIST
                   : OOMKIT_CONTENT_LENGTH;
    }
    return PyDict_Check(value)               ? OOMKIT_CONTENT_DICT
           : PySet_Check(value)              ? OOMKIT_CONTENT_SET
           : oomkit_tensor_check(st, value)  ? OOMKIT_CONTENT_TENSOR
           : oomkit_is_array(Py_TYPE(value)) ? OOMKIT_CONTENT_ARRAY
           : is_deque(Py_TYPE(value))        ? OOMKIT_CONTENT_DEQUE
                                             : OOMKIT_CONTENT_NONE;
}

/* Of a container; 0 of a tensor. -1 with an exception. */
static Py_ssize_t
size_of(PyObject *value)
{
    return PyList_Check(value)        ? PyList_GET_SIZE(value)
           : PyDict_Check(value)      ? PyDict_GET_SIZE(value)
           : PySet_Check(value)       ? PySet_GET_SIZE(value)
           : is_deque(Py_TYPE(value)) ? PyObject_Length(value)
                                      : 0;
}

void
oomkit_content_clear(oomkit_content *content)
{
    Py_ssize_t i, count = content->count;

    content->kind = OOMKIT_CONTENT_NONE;
    content->count = 0;
    for (i = 0; content->items != NULL && i < count; i++) {
        oomkit_held_clear(&content->items[i]);
    }
    for (i = 0; content->keys != NULL && i < count; i++) {
        Py_CLEAR(content->keys[i]);
    }
    PyMem_Free(content->items);
    PyMem_Free(content->keys);
    PyMem_Free(content->bytes);
    content->items = NULL;
    content->keys = NULL;
    content->bytes = NULL;
    Py_CLEAR(content->copy);
    oomkit_held_clear(&content->target);
}

/* --- marking --- */

static int
take_room(oomkit_content *content, Py_ssize_t count, int keys)
{
    content->items = PyMem_Calloc((size_t)count + 1, sizeof(oomkit_held));
    if (keys && content->items != NULL) {
        content->keys = PyMem_Calloc((size_t)count + 1, sizeof(PyObject *));
    }
    if (content->items == NULL || (keys && content->keys == NULL)) {
        PyErr_NoMemory();
        return -1;
    }
    content->count = count;
    return 0;
}

/* A list of what is in `value`: new, or itself. New reference or NULL. */
static PyObject *
as_list(PyObject *value)
{
    return PyList_Check(value) ? Py_NewRef(value) : PySequence_List(value);
}

static int
take_sequence(oomkit_state *st, PyObject *value, int what, uint64_t *room,
              oomkit_content *content)
{
    OWNED PyObject *list = as_list(value);
    Py_ssize_t i;

    if (list == NULL || take_room(content, PyList_GET_SIZE(list), 0) < 0) {
        return -1;
    }
    for (i = 0; i < content->count && i < PyList_GET_SIZE(list); i++) {
        PyObject *item = PyList_GET_ITEM(list, i); /* borrowed */
        if (content->kind == OOMKIT_CONTENT_SET) { /* looked for by its hash */
            content->items[i] = (oomkit_held){
                .value = Py_NewRef(item), .address = item, .kind = OOMKIT_HELD_STRONG};
        } else if (oomkit_held_take(st, item, what, room, &content->items[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
take_dict(oomkit_state *st, PyObject *dict, int what, uint64_t *room,
          oomkit_content *content)
{
    PyObject *key, *value; /* borrowed from dict */
    Py_ssize_t at = 0, i;
    int result = take_room(content, PyDict_GET_SIZE(dict), 1);

    for (i = 0;
         result == 0 && i < content->count && PyDict_Next(dict, &at, &key, &value);
         i++) {
        content->keys[i] = Py_NewRef(key);
        result = oomkit_held_take(st, value, what, room, &content->items[i]);
    }
    return result;
}

static int
take_bytes(oomkit_content *content, uint64_t size)
{
    content->bytes = PyMem_Malloc((size_t)size);
    if (content->bytes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    content->size = size;
    return 0;
}

/* A copy beside it. New reference or NULL. */
static PyObject *
tensor_clone(oomkit_state *st, PyObject *tensor)
{
    OWNED PyObject *plain = PyObject_CallMethodNoArgs(tensor, st->str_detach);
    PyObject *copy = NULL; /* owned */

    EXEMPT (st) {
        copy = plain == NULL ? NULL : PyObject_CallMethodNoArgs(plain, st->str_clone);
    }
    return copy;
}

/* Its version, and its value where that is small or was copied already. 1, 0 or -1. */
static int
take_tensor(oomkit_state *st, PyObject *tensor, oomkit_content *content)
{
    oomkit_tensor_facts facts;

    if (oomkit_tensor_facts_get(st, tensor, 0, &facts) < 0) {
        return -1;
    }
    if (facts.requires_grad) {
        return 0;
    }
    content->version = oomkit_tensor_mark(st, tensor, &facts);
    content->sample = oomkit_tensor_sample(st, tensor);
    if (content->target.copy != NULL) {
        content->copy = Py_NewRef(content->target.copy);
        return 1;
    }
    if (facts.bytes == 0 || facts.bytes > OOMKIT_PLAIN_SMALL) {
        return facts.bytes != 0;
    }
    if (facts.device_type == 0) {
        if (take_bytes(content, facts.bytes) < 0) {
            return -1;
        }
        if (st->bridge->bytes_get(tensor, st->impl_offset, content->bytes,
                                  content->size) == OOMKIT_OK) {
            return 1;
        }
        PyMem_Free(content->bytes);
        content->bytes = NULL;
    }
    content->copy = tensor_clone(st, tensor);
    if (content->copy == NULL) {
        if (!oomkit_exception_is_oom(st)) {
            return -1;
        }
        PyErr_Clear(); /* accounted for: said, should it be missing */
    }
    return 1;
}

int
oomkit_array_view(PyObject *array, int flags, Py_buffer *view)
{
    if (PyObject_GetBuffer(array, view, flags) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) {
            return -1;
        }
        PyErr_Clear(); /* gaps, or a dtype without a buffer */
        return 0;
    }
    if (view->format != NULL && strchr(view->format, 'O') != NULL) {
        PyBuffer_Release(view); /* references */
        return 0;
    }
    return 1;
}

static int
take_array(PyObject *array, uint64_t *room, oomkit_content *content)
{
    Py_buffer view;
    int result = oomkit_array_view(array, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT, &view);

    if (result <= 0) {
        return result;
    }
    if (view.len > OOMKIT_PLAIN_SMALL) {
        if ((uint64_t)view.len > *room) {
            PyBuffer_Release(&view);
            return 0;
        }
        *room -= (uint64_t)view.len;
    }
    result = view.len == 0 ? 0 : take_bytes(content, (uint64_t)view.len);
    if (result == 0 && view.len > 0) {
        memcpy(content->bytes, view.buf, (size_t)view.len);
        result = 1;
    }
    PyBuffer_Release(&view);
    return result;
}

int
oomkit_content_take(oomkit_state *st, PyObject *value, int what, uint64_t *room,
                    oomkit_content *content)
{
    int kind = kind_of(st, value, what), result;
    Py_ssize_t most = (what & OOMKIT_PLAIN_ALL) != 0 ? PY_SSIZE_T_MAX : ITEMS, size;

    memset(content, 0, sizeof(*content));
    if (kind == OOMKIT_CONTENT_NONE) {
        return 0;
    }
    size = size_of(value);
    if (size < 0) {
        return -1;
    }
    if (size > most) { /* that it changed can be said */
        kind = OOMKIT_CONTENT_LENGTH;
    }
    content->kind = (uint8_t)kind;
    if (kind == OOMKIT_CONTENT_LENGTH) { /* held only while nothing large is in it */
        content->count = size;
        content->target = (oomkit_held){.address = value, .kind = OOMKIT_HELD_ADDRESS};
        return 1;
    }
    if (oomkit_held_take(st, value, what, room, &content->target) < 0) {
        result = -1;
    } else if (kind == OOMKIT_CONTENT_TENSOR) {
        result = take_tensor(st, value, content);
    } else if (kind == OOMKIT_CONTENT_ARRAY) {
        result = take_array(value, room, content);
    } else if (kind == OOMKIT_CONTENT_DICT) {
        result = take_dict(st, value, what, room, content) < 0 ? -1 : 1;
    } else {
        result = take_sequence(st, value, what, room, content) < 0 ? -1 : 1;
    }
    if (result <= 0) {
        oomkit_content_clear(content);
    }
    return result;
}

/* --- comparing --- */

static int
dict_same(const oomkit_content *content, PyObject *dict)
{
    PyObject *key, *value; /* borrowed from dict */
    Py_ssize_t at = 0, i = 0;

    if (PyDict_GET_SIZE(dict) != content->count) {
        return 0;
    }
    while (i < content->count && PyDict_Next(dict, &at, &key, &value)) {
        if (content->keys[i] != key || !oomkit_held_same(&content->items[i], value)) {
            return 0;
        }
        i++;
    }
    return 1;
}

/* 1, 0 or -1. */
static int
sequence_same(const oomkit_content *content, PyObject *target)
{
    OWNED PyObject *list = NULL;
    Py_ssize_t i;
    int same;

    if (content->kind == OOMKIT_CONTENT_SET) {
        same = PySet_GET_SIZE(target) == content->count;
        for (i = 0; same == 1 && i < content->count; i++) {
            same = PySet_Contains(target, content->items[i].value);
        }
        return same;
    }
    list = as_list(target);
    if (list == NULL) {
        return -1;
    }
    same = PyList_GET_SIZE(list) == content->count;
    for (i = 0; same && i < content->count; i++) {
        same = oomkit_held_same(&content->items[i], PyList_GET_ITEM(list, i));
    }
    return same;
}

/* 1, 0 or -1. */
static int
bytes_same(oomkit_state *st, const oomkit_content *content, PyObject *target)
{
    OWNED_MEMORY void *now = PyMem_Malloc((size_t)content->size);

    if (now == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return st->bridge->bytes_get(target, st->impl_offset, now, content->size) ==
               OOMKIT_OK &&
           memcmp(now, content->bytes, (size_t)content->size) == 0;
}

static int
array_same(const oomkit_content *content, PyObject *target)
{
    Py_buffer view;
    int same = oomkit_array_view(target, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT, &view);

    if (same == 1) {
        same = (uint64_t)view.len == content->size &&
               memcmp(view.buf, content->bytes, (size_t)content->size) == 0;
        PyBuffer_Release(&view);
    }
    return same;
}

int
oomkit_content_moved(oomkit_state *st, const oomkit_content *content, PyObject *target)
{
    oomkit_tensor_facts facts;
    Py_ssize_t size;
    int same;

    if (content->kind == OOMKIT_CONTENT_LENGTH) {
        size = size_of(target);
        return size < 0 ? -1 : size != content->count;
    }
    if (kind_of(st, target, OOMKIT_PLAIN_ALL) != content->kind) {
        return 1;
    }
    switch (content->kind) {
    case OOMKIT_CONTENT_DICT:
        return !dict_same(content, target);
    case OOMKIT_CONTENT_ARRAY:
        same = array_same(content, target);
        break;
    case OOMKIT_CONTENT_TENSOR:
        if (content->bytes != NULL) { /* `.data` bumps no version */
            same = bytes_same(st, content, target);
            break;
        }
        if (oomkit_tensor_facts_get(st, target, 0, &facts) < 0) {
            return -1;
        }
        return oomkit_tensor_mark(st, target, &facts) != content->version ||
               oomkit_tensor_sample(st, target) != content->sample;
    default:
        same = sequence_same(content, target);
    }
    return same < 0 ? -1 : !same;
}
