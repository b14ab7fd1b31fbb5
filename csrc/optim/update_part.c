/* An update in parts: copies of one parameter and its state before its update, and the
 * way back to them. The values are those of the optimizer's mark (optimizer.c), the
 * copies stand beside them. */
#include "update_part.h"
#include "optim.h"
#include "../call/call.h"
#include "../device/device.h"
#include "../py/tensor.h"

/* --- which values are whose --- */

/* Dict of address of a state dict to its first value in the mark. New or NULL. */
static PyObject *
first_values(const oomkit_optimizer_mark *mark)
{
    OWNED PyObject *places = PyDict_New();
    PyObject *last = NULL; /* borrowed from the mark */
    Py_ssize_t i;

    for (i = 0; places != NULL && i < mark->count; i++) {
        OWNED PyObject *key = NULL, *at = NULL;
        if (mark->items[i].dict == NULL || mark->items[i].dict == last) {
            continue;
        }
        last = mark->items[i].dict;
        key = PyLong_FromVoidPtr(last);
        at = PyLong_FromSsize_t(i);
        if (key == NULL || at == NULL || PyDict_SetItem(places, key, at) < 0) {
            return NULL;
        }
    }
    return STEAL(places);
}

/* Where the state of a parameter stands. 0 or -1. */
static int
param_state(const oomkit_optimizer_mark *mark, PyObject *places,
            oomkit_part_param *param)
{
    PyObject *dict = PyDict_GetItemWithError(mark->state, param->param); /* borrowed */
    OWNED PyObject *key = NULL;
    PyObject *at; /* borrowed from places */
    Py_ssize_t i;

    if (dict == NULL || !PyDict_Check(dict)) {
        return PyErr_Occurred() ? -1 : 0;
    }
    key = PyLong_FromVoidPtr(dict);
    at = key == NULL ? NULL : PyDict_GetItemWithError(places, key);
    if (at == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    param->first = PyLong_AsSsize_t(at);
    for (i = param->first; i < mark->count && mark->items[i].dict == dict; i++) {
        param->count++;
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int
param_bytes(oomkit_state *st, oomkit_part_param *param)
{
    oomkit_tensor_facts facts;
    OWNED PyObject *grad = PyObject_GetAttr(param->param, st->str_grad);

    if (grad == NULL || oomkit_tensor_facts_get(st, param->param, 0, &facts) < 0) {
        return -1;
    }
    param->all_bytes = facts.bytes;
    param->bytes = grad == Py_None ? 0 : facts.bytes;
    return 0;
}

int
oomkit_part_list(oomkit_call *call, int index, oomkit_part_param **list,
                 Py_ssize_t *count)
{
    const oomkit_optimizer_mark *mark = &call->updating.marks[index];
    OWNED_MEMORY oomkit_part_param *made =
        PyMem_Calloc((size_t)mark->count + 1, sizeof(*made));
    OWNED PyObject *places = NULL;
    Py_ssize_t g, i, n = 0;

    if (made == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    places = first_values(mark);
    for (g = 0; places != NULL && g < PyList_GET_SIZE(mark->groups); g++) {
        PyObject *params = oomkit_item(PyList_GET_ITEM(mark->groups, g), "params");
        for (i = 0; params != NULL && PyList_Check(params) &&
                    i < PyList_GET_SIZE(params) && n < mark->count;
             i++) {
            made[n] = (oomkit_part_param){
                .param = mark->items[n].value, .group = g, .item = n};
            if (!oomkit_tensor_check(call->st, made[n].param) ||
                param_state(mark, places, &made[n]) < 0 ||
                param_bytes(call->st, &made[n]) < 0) {
                if (!PyErr_Occurred()) {
                    PyErr_SetString(PyExc_TypeError,
                                    "param_groups[...]['params'] expected tensors" SEE(
                                        "internal-error"));
                }
                return -1;
            }
            n++;
        }
    }
    *count = n;
    *list = made;
    made = NULL;
    return places == NULL ? -1 : 0;
}

/* --- host memory for copies --- */

void
oomkit_host_share_begin(oomkit_call *call, uint64_t bytes)
{
    call->updating.host = (oomkit_host_share){
        .limited = bytes != OOMKIT_UNKNOWN, .short_of = 0, .left = bytes};
}

void
oomkit_host_share_end(oomkit_call *call)
{
    call->updating.host.limited = 0;
}

uint64_t
oomkit_host_share_of(const oomkit_call *call, uint64_t bytes)
{
    return call->device.type == OOMKIT_DEVICE_CUDA ? 2 * bytes : bytes;
}

int
oomkit_host_share_take(oomkit_call *call, uint64_t bytes)
{
    oomkit_host_share *host = &call->updating.host;
    const uint64_t share = oomkit_host_share_of(call, bytes);

    if (!host->limited) {
        return 1;
    }
    if (share > host->left) {
        host->short_of = 1;
        return 0;
    }
    host->left -= share;
    return 1;
}

void
oomkit_host_share_give(oomkit_call *call, uint64_t bytes)
{
    call->updating.host.left +=
        call->updating.host.limited ? oomkit_host_share_of(call, bytes) : 0;
}

int
oomkit_host_share_refuse(oomkit_call *call, PyObject *optimizer)
{
    char left[32];

    call->refused.raised = 1;
    return oomkit_give_up_for(
        call,
        PyUnicode_FromFormat(
            "%s.step() goes in parts, and the host has no room for the copies that "
            "takes (at most half of its free memory is used, of which %s are left): "
            "nothing was updated; give the process more host memory, or the step a "
            "larger budget" SEE("out-of-memory"),
            Py_TYPE(optimizer)->tp_name,
            oomkit_format_bytes(oomkit_host_share_left(call), left)));
}

/* --- before and after --- */

static int
is_hosted(PyObject *hosted, PyObject *tensor)
{
    OWNED PyObject *key = hosted == NULL ? NULL : PyLong_FromVoidPtr(tensor);
    return hosted == NULL ? 0 : key == NULL ? -1 : PyDict_Contains(hosted, key);
}

static int
value_keep(oomkit_call *call, int index, Py_ssize_t at, PyObject *hosted)
{
    oomkit_state_item *item = &call->updating.marks[index].items[at];
    PyObject **copies = call->updating.marks[index].copies, *copy;
    oomkit_tensor_facts facts;
    int there;

    if (item->version == NULL || copies[at] != NULL) {
        return 0;
    }
    there = is_hosted(hosted, item->value);
    if (there < 0 ||
        (!there && oomkit_tensor_facts_get(call->st, item->value, 0, &facts) < 0)) {
        return -1;
    }
    if (!there && !oomkit_host_share_take(call, facts.bytes) &&
        !call->options->optimizer_parts) { /* who asks for copies gets them */
        return oomkit_host_share_refuse(call, call->updating.marks[index].optimizer);
    }
    copy = there ? PyObject_CallMethodNoArgs(item->value, call->st->str_detach)
                 : oomkit_host_copy_pinned(call->st, item->value); /* owned, stolen */
    Py_XSETREF(copies[at], copy);
    item->was_out = there;
    return copy == NULL ? -1 : 0;
}

int
oomkit_part_keep(oomkit_call *call, int index, const oomkit_part_param *param,
                 PyObject *hosted)
{
    oomkit_optimizer_mark *mark = &call->updating.marks[index];
    Py_ssize_t i;

    if (mark->copies == NULL) {
        mark->copies = PyMem_Calloc((size_t)mark->count + 1, sizeof(PyObject *));
        if (mark->copies == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    for (i = param->first; i < param->first + param->count; i++) {
        if (value_keep(call, index, i, hosted) < 0) {
            return -1;
        }
    }
    return value_keep(call, index, param->item, NULL);
}

/* It is on the host, as it was. 0 or -1. */
static int
value_out(oomkit_call *call, oomkit_state_item *item, PyObject *copy, PyObject *hosted)
{
    OWNED PyObject *key = PyLong_FromVoidPtr(item->value);

    if (key == NULL || PyDict_SetItem(hosted, key, item->value) < 0 ||
        PyObject_SetAttr(item->value, call->st->str_data, copy) < 0) {
        return -1;
    }
    return oomkit_tensor_version(call->st, item->value, item->version);
}

/* A tensor's value from its copy: the memory itself where that is on the host. */
static int
value_back(oomkit_call *call, int index, Py_ssize_t at, PyObject *hosted)
{
    oomkit_state_item *item = &call->updating.marks[index].items[at];
    PyObject *copy = call->updating.marks[index].copies[at]; /* borrowed */
    OWNED PyObject *done = NULL;
    int there;

    if (item->version == NULL || copy == NULL) {
        return 0;
    }
    there = is_hosted(hosted, item->value);
    if (there < 0) {
        return -1;
    }
    if (there || (item->was_out && hosted != NULL)) {
        return value_out(call, item, copy, hosted);
    }
    done = PyObject_CallMethodOneArg(item->value, call->st->str_copy, copy);
    return done == NULL ? -1
                        : oomkit_tensor_version(call->st, item->value, item->version);
}

/* What its step() has put into the state of a parameter goes. */
static int
state_back(const oomkit_optimizer_mark *mark, const oomkit_part_param *param)
{
    PyObject *dict = PyDict_GetItemWithError(mark->state, param->param); /* borrowed */
    Py_ssize_t i;

    if (dict == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    if (param->count == 0) {
        return PyDict_DelItem(mark->state, param->param);
    }
    if (dict != mark->items[param->first].dict) {
        dict = mark->items[param->first].dict;
        if (PyDict_SetItem(mark->state, param->param, dict) < 0) {
            return -1;
        }
    }
    for (i = param->first; i < param->first + param->count; i++) {
        const oomkit_state_item *item = &mark->items[i];
        if (item->key != NULL && PyDict_SetItem(dict, item->key, item->value) < 0) {
            return -1;
        }
    }
    return oomkit_undo_new_values(&mark->items[param->first], param->count);
}

int
oomkit_part_put_back(oomkit_call *call, int index, const oomkit_part_param *param,
                     PyObject *hosted, oomkit_param_is_back told)
{
    const oomkit_optimizer_mark *mark = &call->updating.marks[index];
    const oomkit_state_item *items = mark->items; /* they stay where marks may move */
    Py_ssize_t i;

    if (mark->copies == NULL) {
        return 0;
    }
    if (state_back(mark, param) < 0 || value_back(call, index, param->item, NULL) < 0) {
        return -1;
    }
    told(call, param->param, *items[param->item].version);
    for (i = param->first; i < param->first + param->count; i++) {
        if (value_back(call, index, i, hosted) < 0) {
            return -1;
        }
    }
    return 0;
}

void
oomkit_part_unkeep(oomkit_call *call, int index, const oomkit_part_param *param)
{
    PyObject **copies = call->updating.marks[index].copies;
    Py_ssize_t i;

    for (i = param->first; copies != NULL && i < param->first + param->count; i++) {
        Py_CLEAR(copies[i]);
    }
}

void
oomkit_part_forget(oomkit_call *call, int index)
{
    oomkit_optimizer_mark *mark = &call->updating.marks[index];
    PyObject **copies = mark->copies;
    Py_ssize_t i;

    mark->copies = NULL;
    for (i = 0; copies != NULL && i < mark->count; i++) {
        Py_CLEAR(copies[i]);
    }
    PyMem_Free(copies);
}
