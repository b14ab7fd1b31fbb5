#include "knowledge.h"

#include <stddef.h>
#include <string.h>

#define MARGIN_MOST 0.25 /* of a budget that is given up at most */
#define MARGIN_FADES 0.98
#define RETRIED_OFTEN 2 /* calls in a row that count as thrashing */

int
oomkit_knowledge_valid(const oomkit_knowledge *known)
{
    int i, role;

    for (role = 0; role < OOMKIT_ROLES; role++) {
        if (known->bounds[role].largest_ok < 0 ||
            known->bounds[role].smallest_failed < 0) {
            return 0;
        }
    }
    if (known->point_count < 0 || known->point_count > OOMKIT_POINTS ||
        known->batch < 0 || known->k < 0 ||
        !(known->margin >= 0.0 && known->margin <= MARGIN_MOST)) { /* NaN too */
        return 0;
    }
    for (i = 0; i < known->point_count; i++) {
        if (known->points[i].rows <= (i > 0 ? known->points[i - 1].rows : 0)) {
            return 0;
        }
    }
    return 1;
}

uint64_t
oomkit_room(uint64_t baseline_bytes, uint64_t budget_bytes)
{
    if (budget_bytes == OOMKIT_UNKNOWN || baseline_bytes == OOMKIT_UNKNOWN) {
        return OOMKIT_UNKNOWN;
    }
    return budget_bytes > baseline_bytes ? budget_bytes - baseline_bytes : 0;
}

/* --- prediction --- */

/* What lies below a later micro-batch however small it is: the gradients of the model.
 */
static double
floor_of(const oomkit_knowledge *known, oomkit_role role, uint64_t gradient_bytes)
{
    uint64_t least = gradient_bytes;
    int i;

    for (i = 0; role == OOMKIT_LATER && i < known->point_count; i++) {
        uint64_t bytes = known->points[i].bytes[role];
        least = bytes != 0 && bytes < least ? bytes : least;
    }
    return role == OOMKIT_LATER ? (double)least : 0.0;
}

/* By the points of one role alone. Below 0 when there are none. */
static double
series_predict(const oomkit_knowledge *known, oomkit_role role, int64_t rows,
               uint64_t gradient_bytes)
{
    const oomkit_point *top = NULL, *below = NULL;
    double floor_bytes = floor_of(known, role, gradient_bytes);
    double high, low, slope;
    int i;

    for (i = known->point_count - 1; i >= 0 && below == NULL; i--) {
        const oomkit_point *point = &known->points[i];
        if (point->bytes[role] == 0) {
            continue;
        }
        if (point->rows == rows) {
            return (double)point->bytes[role];
        }
        below = top == NULL ? NULL : point;
        top = top == NULL ? point : top;
    }
    if (top == NULL) {
        return -1.0;
    }
    high = (double)top->bytes[role];
    slope = (high - floor_bytes) / (double)top->rows; /* the ray: too steep beyond the
                              point, for what does not grow is spread over its rows */
    if (below != NULL) {
        low = (double)below->bytes[role];
        /* A plateau (workspaces, the gradients of a small micro-batch) has no slope to
         * go by: the secant must explain half of the peak. */
        if ((high - low) / (double)(top->rows - below->rows) * (double)top->rows >=
            0.5 * (high - floor_bytes)) {
            slope = (high - low) / (double)(top->rows - below->rows);
        }
    }
    high += slope * (double)(rows - top->rows);
    return high < 0.0 ? 0.0 : high;
}

/* A first micro-batch by what later ones show: without the gradients of those that went
 * before, but no less than was measured: it ends with all the gradients itself. */
static double
first_from_later(const oomkit_knowledge *known, double later, uint64_t gradient_bytes)
{
    double bytes = later - (double)gradient_bytes;
    int i;

    for (i = 0; i < known->point_count; i++) {
        double measured = (double)known->points[i].bytes[OOMKIT_FIRST];
        bytes = measured > bytes ? measured : bytes;
    }
    return bytes;
}

uint64_t
oomkit_predict(const oomkit_knowledge *known, oomkit_role role, int64_t rows,
               uint64_t gradient_bytes)
{
    double first, later, bytes;

    if (rows < 1) {
        return OOMKIT_UNKNOWN;
    }
    first = series_predict(known, OOMKIT_FIRST, rows, gradient_bytes);
    later = series_predict(known, OOMKIT_LATER, rows, gradient_bytes);
    if (first < 0.0 && later < 0.0) {
        return OOMKIT_UNKNOWN;
    }
    if (role == OOMKIT_LATER) {
        bytes = later >= 0.0 ? later : first + (double)gradient_bytes;
    } else if (first < 0.0) { /* it never needs more than a later one of its size */
        bytes = later;
    } else {
        double other =
            later < 0.0 ? first : first_from_later(known, later, gradient_bytes);
        bytes = other < first ? other : first;
    }
    return bytes >= 9e18 ? OOMKIT_UNKNOWN - 1 : (uint64_t)bytes;
}

/* --- learning --- */

/* Points stay in order of rows; of five the smallest goes: secants start from the top.
 */
static void
point_add(oomkit_knowledge *known, oomkit_role role, int64_t rows, uint64_t bytes)
{
    oomkit_point *points = known->points;
    int at = 0;

    while (at < known->point_count && points[at].rows < rows) {
        at++;
    }
    if (at == known->point_count || points[at].rows != rows) {
        if (known->point_count == OOMKIT_POINTS) {
            if (at == 0) {
                return;
            }
            at--;
            memmove(&points[0], &points[1], (size_t)at * sizeof(*points));
        } else {
            memmove(&points[at + 1], &points[at],
                    (size_t)(known->point_count - at) * sizeof(*points));
            known->point_count++;
        }
        memset(&points[at], 0, sizeof(points[at]));
        points[at].rows = rows;
    }
    points[at].bytes[role] = bytes;
}

/* Points of `rows` rows and more are not to be believed any longer. */
static void
points_forget(oomkit_knowledge *known, int64_t rows)
{
    while (known->point_count > 0 &&
           known->points[known->point_count - 1].rows >= rows) {
        known->point_count--;
    }
}

/* A peak was higher than predicted: that share of the budget is left free from now on.
 * It fades from call to call. */
static void
margin_learn(oomkit_knowledge *known, uint64_t predicted, uint64_t found,
             uint64_t baseline_bytes)
{
    double base = baseline_bytes == OOMKIT_UNKNOWN ? 0.0 : (double)baseline_bytes;
    double share;

    if (predicted == OOMKIT_UNKNOWN || found <= predicted) {
        return;
    }
    share = ((double)found - (double)predicted) / (base + (double)predicted + 1.0);
    share = share > MARGIN_MOST ? MARGIN_MOST : share;
    known->margin = share > known->margin ? share : known->margin;
}

static void
bound_worked(oomkit_bound *bound, int64_t rows, uint64_t room)
{
    if (rows >= bound->largest_ok) {
        bound->largest_ok = rows;
        bound->ok_room = room;
    }
    if (bound->smallest_failed != 0 && rows >= bound->smallest_failed) {
        bound->smallest_failed = 0; /* it failed in other circumstances */
    }
}

/* What a larger shape could do a smaller one can; what a smaller one could not do a
 * larger one cannot. */
void
oomkit_know_neighbour(oomkit_knowledge *known, const oomkit_knowledge *neighbour,
                      double ratio)
{
    int role, i;

    memset(known, 0, sizeof(*known));
    known->borrowed = 1;
    known->margin = neighbour->margin;
    known->failures = neighbour->failures;
    for (role = 0; role < OOMKIT_ROLES; role++) {
        const oomkit_bound *theirs = &neighbour->bounds[role];
        oomkit_bound *bound = &known->bounds[role];
        if (ratio <= 1.0) {
            bound->largest_ok = theirs->largest_ok;
            bound->ok_room = theirs->ok_room;
        } else {
            bound->smallest_failed = theirs->smallest_failed;
            bound->failed_room = theirs->failed_room;
        }
    }
    known->point_count = neighbour->point_count;
    for (i = 0; i < known->point_count; i++) {
        known->points[i] = neighbour->points[i];
        for (role = 0; role < OOMKIT_ROLES && ratio > 1.0; role++) {
            double bytes = (double)known->points[i].bytes[role] * ratio;
            known->points[i].bytes[role] = bytes < 9e18 ? (uint64_t)bytes : 0;
        }
    }
}

void
oomkit_know_measured(oomkit_knowledge *known, oomkit_role role, int64_t rows,
                     uint64_t bytes, uint64_t baseline_bytes, uint64_t budget_bytes,
                     uint64_t gradient_bytes)
{
    if (rows < 1) {
        return;
    }
    bound_worked(&known->bounds[role], rows, oomkit_room(baseline_bytes, budget_bytes));
    if (bytes == 0) {
        return;
    }
    if (known->borrowed) { /* a measurement of its own: those of others go */
        known->borrowed = 0;
        known->point_count = 0;
    }
    /* A ray is too flat below its point, which costs nothing: that size fits. */
    if (known->point_count > 0 && rows >= known->points[known->point_count - 1].rows) {
        margin_learn(known, oomkit_predict(known, role, rows, gradient_bytes), bytes,
                     baseline_bytes);
    }
    point_add(known, role, rows, bytes);
}

void
oomkit_know_worked(oomkit_knowledge *known, const oomkit_measured *measured)
{
    int role;

    known->margin *= MARGIN_FADES;
    for (role = OOMKIT_ROLES - 1; role >= 0; role--) {
        oomkit_know_measured(known, (oomkit_role)role, measured->rows[role],
                             measured->bytes[role], measured->baseline_bytes,
                             measured->budget_bytes, measured->gradient_bytes);
    }
    if (measured->optimizer_bytes > known->optimizer_bytes) {
        known->optimizer_bytes = measured->optimizer_bytes;
    }
    known->healthy = known->batch == measured->batch && known->k == measured->k
                         ? known->healthy + (known->healthy < UINT32_MAX)
                         : 1;
    known->batch = measured->batch;
    known->k = measured->k;
    known->successes += known->successes < UINT32_MAX;
    known->retried = measured->alloc_retries > 0 ? known->retried + 1 : 0;
    if (known->retried >= RETRIED_OFTEN) {
        role = measured->rows[OOMKIT_LATER] >= 1 ? OOMKIT_LATER : OOMKIT_FIRST;
        if (measured->rows[role] > 1) {
            oomkit_know_failed(known, (oomkit_role)role, measured->rows[role],
                               measured->baseline_bytes, measured->budget_bytes,
                               measured->gradient_bytes);
        }
        known->retried = 0;
    }
}

void
oomkit_know_failed(oomkit_knowledge *known, oomkit_role role, int64_t rows,
                   uint64_t baseline_bytes, uint64_t budget_bytes,
                   uint64_t gradient_bytes)
{
    oomkit_bound *bound = &known->bounds[role];
    uint64_t room = oomkit_room(baseline_bytes, budget_bytes);
    uint64_t predicted;

    if (known->successes == 0) {
        known->failures += known->failures < UINT32_MAX;
    } else if (bound->largest_ok >= rows) {
        known->late += known->late < UINT32_MAX;
    } else {
        known->missed += known->missed < UINT32_MAX;
    }
    known->healthy = 0;
    if (bound->smallest_failed == 0 || rows <= bound->smallest_failed) {
        bound->smallest_failed = rows;
        bound->failed_room = room;
    }
    predicted = oomkit_predict(known, role, rows, gradient_bytes);
    if (predicted != OOMKIT_UNKNOWN && room != OOMKIT_UNKNOWN && predicted < room) {
        margin_learn(known, predicted, room, baseline_bytes);
    }
    if (bound->largest_ok >= rows) { /* what worked once works no more */
        bound->largest_ok = 0;
        points_forget(known, rows);
    }
}
