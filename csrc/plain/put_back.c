/* Puts what a container, a tensor or an array held back into it. */
#include "plain_state.h"
#include "../py/modes.h"

/* What the items were. New list; NULL, without an exception where one is gone. */
static PyObject *
items_give(oomkit_call *call, const oomkit_content *content)
{
    OWNED PyObject *list = PyList_New(content->count);
    Py_ssize_t i;

    for (i = 0; list != NULL && i < content->count; i++) {
        PyObject *item = oomkit_held_give(call, &content->items[i]); /* owned */
        if (item == NULL) {
            return NULL;
        }
        PyList_SET_ITEM(list, i, item);
    }
    return STEAL(list);
}

static int
call_and_drop(PyObject *done)
{
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* An OrderedDict has an order of its own beside the dictionary's. */
static int
restore_dict(const oomkit_content *content, PyObject *target, PyObject *items)
{
    Py_ssize_t i;
    int ordered = PyODict_Check(target);

    if (ordered) {
        PyObject *done = /* owned */
            PyObject_CallMethod((PyObject *)&PyODict_Type, "clear", "O", target);
        if (call_and_drop(done) < 0) {
            return -1;
        }
    } else {
        PyDict_Clear(target);
    }
    for (i = 0; i < content->count; i++) {
        PyObject *value = PyList_GET_ITEM(items, i); /* borrowed */
        if ((ordered ? PyODict_SetItem(target, content->keys[i], value)
                     : PyDict_SetItem(target, content->keys[i], value)) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
restore_items(const oomkit_content *content, PyObject *target, PyObject *items)
{
    Py_ssize_t i;
    int result;

    switch (content->kind) {
    case OOMKIT_CONTENT_LIST:
        return PyList_SetSlice(target, 0, PyList_GET_SIZE(target), items);
    case OOMKIT_CONTENT_DICT:
        return restore_dict(content, target, items);
    case OOMKIT_CONTENT_SET:
        result = PySet_Clear(target);
        for (i = 0; result == 0 && i < content->count; i++) {
            result = PySet_Add(target, PyList_GET_ITEM(items, i));
        }
        return result;
    default:
        return call_and_drop(PyObject_CallMethod(target, "clear", NULL)) < 0
                   ? -1
                   : call_and_drop(PyObject_CallMethod(target, "extend", "O", items));
    }
}

static int
restore_array(const oomkit_content *content, PyObject *target)
{
    Py_buffer view;
    int result = oomkit_array_view(
        target, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE, &view);

    if (result == 1) {
        if ((uint64_t)view.len == content->size) {
            memcpy(view.buf, content->bytes, (size_t)content->size);
        } else {
            result = 0;
        }
        PyBuffer_Release(&view);
    }
    return result < 0 ? -1 : !result;
}

static int
restore_tensor(oomkit_state *st, const oomkit_content *content, PyObject *target)
{
    if (content->bytes != NULL) {
        return st->bridge->bytes_set(target, st->impl_offset, content->bytes,
                                     content->size) != OOMKIT_OK;
    }
    if (content->copy == NULL) {
        return 1;
    }
    if (oomkit_tensor_write(st, target, content->copy) == 0) {
        return 0;
    }
    if (oomkit_exception_is_oom(st) || !PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        return -1;
    }
    PyErr_Clear(); /* it was given another shape */
    return 1;
}

int
oomkit_content_restore(oomkit_call *call, const oomkit_content *content,
                       PyObject *target)
{
    oomkit_state *st = call->st;
    int moved = oomkit_content_moved(st, content, target);
    OWNED PyObject *items = NULL;

    if (moved <= 0) {
        return moved;
    }
    switch (content->kind) {
    case OOMKIT_CONTENT_ARRAY:
        return restore_array(content, target);
    case OOMKIT_CONTENT_TENSOR:
        return restore_tensor(st, content, target);
    case OOMKIT_CONTENT_LENGTH:
        if (!PyList_Check(target) || PyList_GET_SIZE(target) < content->count) {
            return 1;
        }
        return PyList_SetSlice(target, content->count, PyList_GET_SIZE(target), NULL);
    default:
        items = items_give(call, content);
        if (items == NULL) {
            return PyErr_Occurred() ? -1 : 1;
        }
        return restore_items(content, target, items);
    }
}
