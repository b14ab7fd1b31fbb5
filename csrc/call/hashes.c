/* A set of hashes. */
#include "proven.h"

/* The place of a hash, or the free one where it belongs. */
static uint64_t *
hashes_place(const oomkit_hashes *hashes, uint64_t hash)
{
    uint32_t at = (uint32_t)hash & (hashes->room - 1);

    while (hashes->items[at] != 0 && hashes->items[at] != hash) {
        at = (at + 1) & (hashes->room - 1);
    }
    return &hashes->items[at];
}

/* Room for one more. 0 or -1. */
static int
hashes_grow(oomkit_hashes *hashes)
{
    oomkit_hashes grown = {.room = hashes->room == 0 ? 128 : hashes->room * 2};
    uint32_t i;

    grown.items = PyMem_Calloc(grown.room, sizeof(*grown.items));
    if (grown.items == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (i = 0; i < hashes->room; i++) {
        if (hashes->items[i] != 0) {
            *hashes_place(&grown, hashes->items[i]) = hashes->items[i];
        }
    }
    grown.count = hashes->count;
    oomkit_hashes_clear(hashes);
    *hashes = grown;
    return 0;
}

int
oomkit_hashes_have(const oomkit_hashes *hashes, uint64_t hash)
{
    return hashes->room > 0 && *hashes_place(hashes, hash) == hash;
}

int
oomkit_hashes_add(oomkit_hashes *hashes, uint64_t hash)
{
    if (hashes->count >= OOMKIT_HASHES && !oomkit_hashes_have(hashes, hash)) {
        oomkit_hashes_clear(hashes);
    }
    return oomkit_hashes_keep(hashes, hash);
}

int
oomkit_hashes_keep(oomkit_hashes *hashes, uint64_t hash)
{
    if (oomkit_hashes_have(hashes, hash)) {
        return 0;
    }
    if (hashes->count * 2 >= hashes->room && hashes_grow(hashes) < 0) {
        return -1;
    }
    *hashes_place(hashes, hash) = hash;
    hashes->count++;
    return 1;
}

void
oomkit_hashes_clear(oomkit_hashes *hashes)
{
    PyMem_Free(hashes->items);
    *hashes = (oomkit_hashes){0};
}
