/* What a site learns about its arguments from the calls that were not split. */
#include "batch.h"

const oomkit_seen *
oomkit_site_seen(const oomkit_batch_site *site, Py_ssize_t position, PyObject *keyword)
{
    Py_ssize_t i;
    if (site == NULL) {
        return NULL;
    }
    for (i = 0; i < site->count; i++) {
        const oomkit_seen *seen = &site->seen[i];
        if (keyword == NULL ? seen->position == position
                            : seen->keyword != NULL &&
                                  PyUnicode_Compare(seen->keyword, keyword) == 0) {
            return seen;
        }
    }
    return NULL;
}

/* The entry of an argument, made when there is none; NULL when memory is short. */
static oomkit_seen *
site_entry(oomkit_batch_site *site, Py_ssize_t position, PyObject *keyword)
{
    const oomkit_seen *known = oomkit_site_seen(site, position, keyword);
    oomkit_seen *seen;

    if (known != NULL) {
        return &site->seen[known - site->seen];
    }
    if (site->count == site->room) {
        Py_ssize_t room = site->room == 0 ? 4 : site->room * 2;
        seen = PyMem_Realloc(site->seen, (size_t)room * sizeof(*seen));
        if (seen == NULL) {
            return NULL;
        }
        site->seen = seen;
        site->room = room;
    }
    seen = &site->seen[site->count++];
    *seen = (oomkit_seen){.keyword = Py_XNewRef(keyword),
                          .position = keyword == NULL ? position : -1,
                          .size = -1,
                          .length = -1};
    return seen;
}

static void
site_note(oomkit_batch_site *site, const oomkit_batch *batch, int64_t rows,
          Py_ssize_t argument, Py_ssize_t index)
{
    const oomkit_node *root = &batch->nodes[index];
    Py_ssize_t i, end = oomkit_node_end(batch, index);
    int keyword = argument >= batch->positional;
    int64_t size = -1, length = -1;
    oomkit_seen *seen = site_entry(
        site, argument,
        keyword ? PyTuple_GET_ITEM(batch->kwnames, argument - batch->positional)
                : NULL);

    if (seen == NULL) {
        return;
    }
    for (i = index; i < end && size < 0; i++) {
        size = batch->nodes[i].rows;
    }
    if (root->kind == OOMKIT_NODE_LIST || root->kind == OOMKIT_NODE_TUPLE) {
        length = root->children;
    }
    seen->size_other |= size > 1 && size != rows;
    if (seen->size >= 0 && size >= 0 && site->rows == rows) {
        seen->size_wanders |= size != seen->size;
    } else if (site->rows >= 0) {
        seen->size_moves |= size == rows && seen->size == site->rows;
        seen->size_stays |= size >= 0 && size == seen->size;
        seen->length_stays |= length >= 0 && length == seen->length;
        seen->length_moves |= length == rows && seen->length == site->rows;
    }
    seen->size = size;
    seen->length = length;
}

#define COLUMNS 3 /* lists of more tensors are taken for samples as well */

/* The rows that a whole call shows: the size of the first tensor, where its argument
 * can be read in no other way; the length of a list of samples of several sizes. -1
 * where it is not sure: what would be learned from it is worse than nothing. */
static int64_t
learn_rows(const oomkit_batch *batch)
{
    int64_t rows = oomkit_batch_rows(batch);
    Py_ssize_t root = 0, end;
    const oomkit_node *node;

    if (rows < 0 || (batch->rows >= 0 && batch->searched)) {
        return rows;
    }
    while ((end = oomkit_node_end(batch, root)) <= batch->lead) {
        root = end;
    }
    node = &batch->nodes[root];
    if (node->kind != OOMKIT_NODE_LIST && node->kind != OOMKIT_NODE_TUPLE) {
        return oomkit_node_fits(batch, root, rows) ? rows : -1;
    }
    if (batch->lead == root) {
        return rows; /* of samples */
    }
    if (oomkit_node_is_ragged(batch, root)) {
        return -1;
    }
    if (end - root == node->children + 1 && node->children > COLUMNS) {
        return -1;
    }
    return oomkit_node_fits(batch, root, rows) ? rows : -1;
}

void
oomkit_batch_learn(oomkit_batch_site **site, const oomkit_batch *batch)
{
    int64_t rows;
    Py_ssize_t argument, index = 0;

    /* Only a change of sizes shows anything, and only a second argument matters. */
    if (batch->total < 2 || (*site != NULL && (*site)->sizes == batch->sizes)) {
        return;
    }
    rows = learn_rows(batch);
    if (rows < 0) {
        return;
    }
    if (*site == NULL) {
        *site = PyMem_Calloc(1, sizeof(**site));
        if (*site == NULL) {
            return;
        }
        (*site)->rows = -1;
    }
    for (argument = 0; argument < batch->total; argument++) {
        site_note(*site, batch, rows, argument, index);
        index = oomkit_node_end(batch, index);
    }
    (*site)->rows = rows;
    (*site)->sizes = batch->sizes;
}

void
oomkit_batch_site_clear(oomkit_batch_site **site)
{
    oomkit_batch_site *old = *site;
    Py_ssize_t i;

    if (old == NULL) {
        return;
    }
    *site = NULL;
    for (i = 0; i < old->count; i++) {
        Py_XDECREF(old->seen[i].keyword);
    }
    PyMem_Free(old->seen);
    PyMem_Free(old);
}
