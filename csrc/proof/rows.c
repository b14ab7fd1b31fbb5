/* Which rows a proof looks at, and where it cuts them. */
#include "proof.h"
#include "../accum/accum.h"
#include "../sizes/sizes.h"

int
oomkit_proof_rows_fit(const oomkit_proof *p)
{
    const int64_t least = oomkit_unfit_least(p->call);
    return p->first > 0 && p->first < p->length && p->first >= least &&
           p->length - p->first >= least;
}

int
oomkit_proof_rows_middle(oomkit_proof *p, int64_t multiple)
{
    p->first = ((p->length + 1) / 2 + multiple - 1) / multiple * multiple;
    return oomkit_proof_rows_fit(p);
}

int
oomkit_proof_rows_even(oomkit_proof *p)
{
    const int64_t multiple = oomkit_unfit_multiple(p->call);
    return oomkit_proof_rows_middle(p, multiple % 2 == 0 ? multiple : multiple * 2);
}

int
oomkit_proof_rows_largest(oomkit_proof *p)
{
    const oomkit_call *call = p->call;
    const int64_t multiple = oomkit_unfit_multiple(call);
    const int64_t anchor = oomkit_paths_anchor(call);
    int64_t i;

    p->anchored = anchor >= 0;
    for (i = 0; i < call->cut->count; i++) {
        const oomkit_slice *slice = &call->cut->slices[i];
        if (p->anchored
                ? slice->start <= anchor && anchor < slice->start + slice->length
                : slice->length > p->length) {
            p->start = slice->start;
            p->length = slice->length;
        }
    }
    if (!oomkit_proof_rows_middle(p, multiple)) {
        return 0;
    }
    if (p->first * 2 == p->length && p->length - p->first - multiple >= 1) {
        p->first += multiple;
        if (!oomkit_proof_rows_fit(p)) {
            p->first -= multiple;
        }
    }
    return 1;
}

void
oomkit_proof_rows_two(oomkit_proof *p)
{
    const int64_t size = p->length, rows = p->call->batch.rows;

    p->first = size;
    if (p->start + size < rows) {
        p->length = p->start + 2 * size <= rows ? 2 * size : rows - p->start;
    } else if (p->start >= size) { /* it is the last one */
        p->start -= size;
        p->length = 2 * size;
    } else { /* what is before it is smaller */
        p->first = p->start;
        p->length += p->start;
        p->start = 0;
    }
}

int
oomkit_proof_rows_level_end(int number)
{
    int end = 0;

    while (end < number) {
        end = 2 * end + 2;
    }
    return end;
}

int
oomkit_proof_rows_halves(oomkit_proof *p, int number)
{
    const oomkit_slice *slices = p->cut.slices;
    int64_t from = 0, to = p->cut.count, middle;
    int bit = (oomkit_proof_rows_level_end(number) + 2) / 2;

    if (bit >= p->cut.count) {
        return -1;
    }
    while ((bit /= 2) > 0) {
        middle = (from + to + 1) / 2;
        if ((number + 1) & bit) {
            from = middle;
        } else {
            to = middle;
        }
    }
    if (to - from < 2) {
        return 0;
    }
    middle = (from + to + 1) / 2;
    p->start = slices[from].start;
    p->first = slices[middle].start - p->start;
    p->length = slices[to - 1].start + slices[to - 1].length - p->start;
    return 1;
}

int
oomkit_proof_rows_varied(oomkit_proof *p)
{
    OWNED PyObject *leaves = NULL, *slices = NULL, *start = NULL;

    if (p->anchored) {
        return 0;
    }
    leaves = oomkit_proof_leaves(p->call);
    slices = oomkit_proof_slices(p->cut.slices, p->cut.count);
    if (leaves == NULL || slices == NULL) {
        return -1;
    }
    EXEMPT (p->call->st) {
        start = PyObject_CallMethod(p->judge, "place", "OLLLLO", leaves,
                                    (long long)p->start, (long long)p->length,
                                    (long long)p->call->batch.rows,
                                    (long long)oomkit_unfit_multiple(p->call), slices);
    }
    if (start != NULL) {
        p->start = PyLong_AsLongLong(start);
    }
    return PyErr_Occurred() ? -1 : 0;
}
