/* What is known of the sizes of a shape of batch: how each finished or failed call
 * changes it. */
#include "knowledge.h"

#include <stddef.h>
#include <string.h>

#define ROOMIER 4        /* a quarter more */
#define MARGIN_MOST 0.25 /* of a budget that is given up at most */
#define MARGIN_FADES 0.98
#define RETRIED_OFTEN 2 /* calls in a row that count as thrashing */

static int
sizes_valid(const oomkit_sizes *sizes)
{
    int64_t i;

    if (sizes->largest_ok < 0 || sizes->smallest_failed < 0 || sizes->count < 0 ||
        sizes->count > OOMKIT_POINTS) {
        return 0;
    }
    for (i = 0; i < sizes->count; i++) {
        if (sizes->points[i].rows <= (i > 0 ? sizes->points[i - 1].rows : 0) ||
            sizes->points[i].bytes == 0) {
            return 0;
        }
    }
    return 1;
}

int
oomkit_knowledge_valid(const oomkit_knowledge *known)
{
    return sizes_valid(&known->roles[OOMKIT_FIRST]) &&
           sizes_valid(&known->roles[OOMKIT_LATER]) && known->batch >= 0 &&
           known->k >= 0 && known->margin >= 0.0 && known->margin <= MARGIN_MOST;
}

uint64_t
oomkit_room(uint64_t baseline_bytes, uint64_t budget_bytes)
{
    if (budget_bytes == OOMKIT_UNKNOWN || baseline_bytes == OOMKIT_UNKNOWN) {
        return OOMKIT_UNKNOWN;
    }
    return budget_bytes > baseline_bytes ? budget_bytes - baseline_bytes : 0;
}

int
oomkit_room_enough(uint64_t room, uint64_t then)
{
    return room == OOMKIT_UNKNOWN ||
           (then != OOMKIT_UNKNOWN && room >= then - then / 64);
}

/* --- prediction --- */

/* What lies below a later micro-batch however small it is: the gradients of the model.
 */
static double
floor_of(const oomkit_knowledge *known, oomkit_role role, uint64_t gradient_bytes)
{
    const oomkit_sizes *sizes = &known->roles[role];

    if (role == OOMKIT_FIRST) {
        return 0.0;
    }
    return (double)(sizes->count > 0 && sizes->points[0].bytes < gradient_bytes
                        ? sizes->points[0].bytes
                        : gradient_bytes);
}

/* Bytes of one more row at most: every peak is at least what its rows take, so that the
 * flattest ray of both roles bounds it. */
static double
steepest(const oomkit_knowledge *known, uint64_t gradient_bytes)
{
    double least = -1.0;
    int role;

    for (role = 0; role < OOMKIT_ROLES; role++) {
        const oomkit_sizes *sizes = &known->roles[role];
        double floor_bytes = floor_of(known, (oomkit_role)role, gradient_bytes);
        double ray;
        if (sizes->count == 0) {
            continue;
        }
        ray = ((double)sizes->points[sizes->count - 1].bytes - floor_bytes) /
              (double)sizes->points[sizes->count - 1].rows;
        least = least < 0.0 || ray < least ? ray : least;
    }
    return least;
}

/* Bytes of one more row by the two largest sizes, below 0 where they do not tell: a
 * plateau (workspaces, the gradients of a small micro-batch) has no slope to go by, so
 * it must explain half of the peak. */
static double
secant(const oomkit_sizes *sizes, double floor_bytes)
{
    const oomkit_point *top; /* the largest */
    double slope;

    if (sizes->count < 2) {
        return -1.0;
    }
    top = &sizes->points[sizes->count - 1];
    slope = ((double)top->bytes - (double)top[-1].bytes) /
            (double)(top->rows - top[-1].rows);
    return slope * (double)top->rows >= 0.5 * ((double)top->bytes - floor_bytes) ? slope
                                                                                 : -1.0;
}

/* By the points of one role. Below 0 when there are none. */
static double
series_predict(const oomkit_knowledge *known, oomkit_role role, int64_t rows,
               uint64_t gradient_bytes)
{
    const oomkit_sizes *sizes = &known->roles[role];
    const oomkit_point *top, *from; /* the largest, and the nearest */
    double floor_bytes = floor_of(known, role, gradient_bytes);
    double slope, bytes;
    int64_t i;

    for (i = 0; i < sizes->count; i++) {
        const oomkit_point *at = &sizes->points[i];
        if (at->rows == rows) {
            return (double)at->bytes;
        }
        if (i > 0 && at[-1].rows < rows && rows < at->rows) {
            return (double)at[-1].bytes + ((double)at->bytes - (double)at[-1].bytes) *
                                              (double)(rows - at[-1].rows) /
                                              (double)(at->rows - at[-1].rows);
        }
    }
    if (sizes->count == 0) {
        return -1.0;
    }
    top = &sizes->points[sizes->count - 1];
    slope = secant(sizes, floor_bytes);
    if (sizes->count == 1 && role == OOMKIT_LATER) { /* rows cost the same there */
        slope = secant(&known->roles[OOMKIT_FIRST], 0.0);
    }
    if (slope < 0.0 || rows > top->rows) { /* a ray: too steep beyond its point */
        double most = steepest(known, gradient_bytes);
        slope = slope < 0.0 || most < slope ? most : slope;
    }
    from = rows < sizes->points[0].rows ? &sizes->points[0] : top;
    bytes = (double)from->bytes + slope * (double)(rows - from->rows);
    return bytes < 0.0 ? 0.0 : bytes;
}

/* A first micro-batch by what later ones show: without the gradients of those that went
 * before, but no less than was measured: it ends with all the gradients itself. */
static double
first_from_later(const oomkit_knowledge *known, double later, uint64_t gradient_bytes)
{
    const oomkit_sizes *sizes = &known->roles[OOMKIT_FIRST];
    double bytes = later - (double)gradient_bytes;
    int64_t i;

    for (i = 0; i < sizes->count; i++) {
        double measured = (double)sizes->points[i].bytes;
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

/* Points stay in order of rows; of five the second smallest goes: secants start from
 * the top, and the smallest is what there is when the room shrinks. */
static void
point_add(oomkit_sizes *sizes, int64_t rows, uint64_t bytes)
{
    oomkit_point *points = sizes->points;
    int64_t at = 0;

    while (at < sizes->count && points[at].rows < rows) {
        at++;
    }
    if (at == sizes->count || points[at].rows != rows) {
        if (sizes->count == OOMKIT_POINTS) {
            /* At 0 or 1 it takes the place of the smallest, or of the second. */
            if (at > 1) {
                at--;
                memmove(&points[1], &points[2], (size_t)(at - 1) * sizeof(*points));
            }
        } else {
            memmove(&points[at + 1], &points[at],
                    (size_t)(sizes->count - at) * sizeof(*points));
            sizes->count++;
        }
    }
    points[at] = (oomkit_point){rows, bytes};
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
bound_worked(oomkit_sizes *bound, int64_t rows, uint64_t room)
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
oomkit_know_rung(oomkit_knowledge *known, uint32_t rung, uint64_t room)
{
    memset(known, 0, sizeof(*known));
    known->rung = rung;
    known->climb_room = room;
}

int
oomkit_rung_is_roomy(const oomkit_knowledge *known, uint64_t room)
{
    const uint64_t then = known->climb_room;

    return known->rung > 0 && room != OOMKIT_UNKNOWN && then != OOMKIT_UNKNOWN &&
           room > then && room - then > then / ROOMIER;
}

int
oomkit_update_known_holds(const oomkit_knowledge *known, uint64_t budget_bytes)
{
    const uint64_t then = known->update.budget_bytes;

    return known->recalled && known->update.rung > 0 &&
           budget_bytes != OOMKIT_UNKNOWN &&
           (budget_bytes <= then || budget_bytes - then <= then / ROOMIER);
}

void
oomkit_know_neighbour(oomkit_knowledge *known, const oomkit_knowledge *neighbour,
                      double ratio)
{
    int64_t i;
    int role;

    memset(known, 0, sizeof(*known));
    if (ratio >= 1.0) { /* a smaller one may do without */
        oomkit_know_rung(known, neighbour->rung, neighbour->climb_room);
    }
    known->borrowed = 1;
    known->margin = neighbour->margin;
    known->failures = neighbour->failures;
    for (role = 0; role < OOMKIT_ROLES; role++) {
        const oomkit_sizes *theirs = &neighbour->roles[role];
        oomkit_sizes *ours = &known->roles[role];
        if (ratio <= 1.0) {
            ours->largest_ok = theirs->largest_ok;
            ours->ok_room = theirs->ok_room;
        } else {
            ours->smallest_failed = theirs->smallest_failed;
            ours->failed_room = theirs->failed_room;
        }
        for (i = 0; i < theirs->count; i++) {
            double bytes =
                (double)theirs->points[i].bytes * (ratio > 1.0 ? ratio : 1.0);
            ours->points[i].rows = theirs->points[i].rows;
            ours->points[i].bytes = bytes < 9e18 ? (uint64_t)bytes : UINT64_C(1) << 62;
        }
        ours->count = theirs->count;
    }
}

void
oomkit_know_measured(oomkit_knowledge *known, oomkit_role role, int64_t rows,
                     uint64_t bytes, uint64_t baseline_bytes, uint64_t budget_bytes,
                     uint64_t gradient_bytes)
{
    oomkit_sizes *sizes = &known->roles[role];

    if (rows < 1) {
        return;
    }
    bound_worked(sizes, rows, oomkit_room(baseline_bytes, budget_bytes));
    if (bytes == 0) {
        return;
    }
    if (known->borrowed) { /* a measurement of its own: those of others go */
        known->borrowed = 0;
        known->roles[OOMKIT_FIRST].count = known->roles[OOMKIT_LATER].count = 0;
    }
    /* A ray is too flat below its point, which costs nothing: that size fits. */
    if (sizes->count > 0 && rows >= sizes->points[sizes->count - 1].rows) {
        margin_learn(known, oomkit_predict(known, role, rows, gradient_bytes), bytes,
                     baseline_bytes);
    }
    point_add(sizes, rows, bytes);
}

/* Does a size need much less or more than it did in the run that this was recalled
 * from? Then something has changed, and what fitted and failed there says nothing. */
static int
recalled_otherwise(const oomkit_knowledge *known, const oomkit_measured *measured)
{
    int64_t i;
    int role;

    for (role = 0; role < OOMKIT_ROLES; role++) {
        const oomkit_sizes *sizes = &known->roles[role];
        for (i = 0; i < sizes->count; i++) {
            uint64_t was = sizes->points[i].bytes, is = measured->bytes[role];
            if (sizes->points[i].rows == measured->rows[role] && is > 0 &&
                (is < was - was / 8 || is > was + was / 8)) {
                return 1;
            }
        }
    }
    return 0;
}

void
oomkit_know_worked(oomkit_knowledge *known, const oomkit_measured *measured)
{
    int role;

    if (known->recalled && recalled_otherwise(known, measured)) {
        oomkit_know_rung(known, known->rung, known->climb_room);
        known->failures = 1; /* the batch was split for a reason: peaks decide */
    }
    known->recalled = 0;
    known->update = measured->update;
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
        /* Which micro-batch it was is not known: a larger first one is no way out. */
        for (role = 0; role < OOMKIT_ROLES; role++) {
            if (measured->rows[role] > 1) {
                oomkit_know_failed(known, (oomkit_role)role, measured->rows[role],
                                   measured->baseline_bytes, measured->budget_bytes,
                                   measured->gradient_bytes);
            }
        }
        known->retried = 0;
    }
}

void
oomkit_know_failed(oomkit_knowledge *known, oomkit_role role, int64_t rows,
                   uint64_t baseline_bytes, uint64_t budget_bytes,
                   uint64_t gradient_bytes)
{
    oomkit_sizes *bound = &known->roles[role];
    uint64_t room = oomkit_room(baseline_bytes, budget_bytes);
    uint64_t predicted;
    /* In less room than it had it says nothing against what was measured. */
    int worked = bound->largest_ok >= rows && oomkit_room_enough(room, bound->ok_room);

    if (known->recalled && worked) { /* it holds no longer: no size of it */
        const oomkit_update_known update = known->update;
        oomkit_know_rung(known, known->rung, known->climb_room);
        known->update = update;
        worked = 0;
    }
    if (known->successes == 0) {
        known->failures += known->failures < UINT32_MAX;
    } else if (worked) {
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
        known->fooled += known->fooled < UINT32_MAX;
    }
    if (worked) { /* what worked once works no more */
        bound->largest_ok = 0;
        while (bound->count > 0 && bound->points[bound->count - 1].rows >= rows) {
            bound->count--;
        }
    }
}
