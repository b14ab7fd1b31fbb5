/* Knowledge as named numbers: one table says which they are, and between what they lie.
 */
#include "numbers.h"

#include <stddef.h>
#include <string.h>

#define ROWS_MOST (UINT64_C(1) << 48)
#define BYTES_MOST (UINT64_C(1) << 60)
#define SHARE_MOST 0.25
#define UPDATE_RUNG_MOST 2 /* no higher one is an update's */
#define FAILED_MOST 1024

typedef enum field_type {
    FIELD_U32,
    FIELD_I64,
    FIELD_U64,
    FIELD_ROOM,
    FIELD_DOUBLE
} field_type;

typedef struct field {
    const char *name;
    size_t offset;
    field_type type;
    uint64_t most;
} field;

#define AT(member) offsetof(oomkit_knowledge, member)
#define POINT(role, prefix, i)                                                         \
    {prefix "_rows_" #i, AT(roles[role].points[(i) - 1].rows), FIELD_I64, ROWS_MOST},  \
    {                                                                                  \
        prefix "_bytes_" #i, AT(roles[role].points[(i) - 1].bytes), FIELD_U64,         \
            BYTES_MOST                                                                 \
    }
#define ROLE(role, prefix)                                                             \
    {prefix "_largest_ok", AT(roles[role].largest_ok), FIELD_I64, ROWS_MOST},          \
        {prefix "_ok_room", AT(roles[role].ok_room), FIELD_ROOM, BYTES_MOST},          \
        {prefix "_smallest_failed", AT(roles[role].smallest_failed), FIELD_I64,        \
         ROWS_MOST},                                                                   \
        {prefix "_failed_room", AT(roles[role].failed_room), FIELD_ROOM, BYTES_MOST},  \
        POINT(role, prefix, 1), POINT(role, prefix, 2), POINT(role, prefix, 3),        \
        POINT(role, prefix, 4)

/* By name, so that later versions can have more of them. */
static const field fields[] = {
    {"batch", AT(batch), FIELD_I64, ROWS_MOST},
    {"accumulation_steps", AT(k), FIELD_I64, ROWS_MOST},
    {"successes", AT(successes), FIELD_U32, UINT32_MAX},
    {"failures", AT(failures), FIELD_U32, UINT32_MAX},
    {"missed", AT(missed), FIELD_U32, UINT32_MAX},
    {"fooled", AT(fooled), FIELD_U32, UINT32_MAX},
    {"late", AT(late), FIELD_U32, UINT32_MAX},
    {"healthy", AT(healthy), FIELD_U32, UINT32_MAX},
    {"optimizer_bytes", AT(optimizer_bytes), FIELD_U64, BYTES_MOST},
    {"margin", AT(margin), FIELD_DOUBLE, 0},
    {"rung", AT(rung), FIELD_U32, OOMKIT_RUNG_NONE_BESIDE},
    {"climb_room", AT(climb_room), FIELD_ROOM, BYTES_MOST},
    {"update_rung", AT(update.rung), FIELD_U32, UPDATE_RUNG_MOST},
    {"update_failed", AT(update.failed), FIELD_U32, FAILED_MOST},
    {"update_grads", AT(update.grads), FIELD_U32, 1},
    {"update_most", AT(update.most), FIELD_I64, ROWS_MOST},
    {"update_slice_bytes", AT(update.slice_bytes), FIELD_U64, BYTES_MOST},
    {"update_budget", AT(update.budget_bytes), FIELD_ROOM, BYTES_MOST},
    ROLE(OOMKIT_FIRST, "first"),
    ROLE(OOMKIT_LATER, "later"),
};

int
oomkit_number_count(void)
{
    return (int)(sizeof(fields) / sizeof(fields[0]));
}

const char *
oomkit_number_name(int index)
{
    return fields[index].name;
}

oomkit_number_kind
oomkit_number_kind_of(int index)
{
    return fields[index].type == FIELD_ROOM     ? OOMKIT_NUMBER_ROOM
           : fields[index].type == FIELD_DOUBLE ? OOMKIT_NUMBER_SHARE
                                                : OOMKIT_NUMBER_WHOLE;
}

int
oomkit_number_is_nothing(int index, const oomkit_number *number)
{
    return fields[index].type == FIELD_DOUBLE ? number->share <= 0.0
                                              : number->whole == 0;
}

void
oomkit_number_get(const oomkit_knowledge *known, int index, oomkit_number *number)
{
    const char *at = (const char *)known + fields[index].offset;
    uint32_t small;
    int64_t rows;

    *number = (oomkit_number){0, 0.0};
    switch (fields[index].type) {
    case FIELD_U32:
        memcpy(&small, at, sizeof(small));
        number->whole = small;
        break;
    case FIELD_I64:
        memcpy(&rows, at, sizeof(rows));
        number->whole = rows > 0 ? (uint64_t)rows : 0;
        break;
    case FIELD_U64:
    case FIELD_ROOM:
        memcpy(&number->whole, at, sizeof(number->whole));
        break;
    case FIELD_DOUBLE:
        memcpy(&number->share, at, sizeof(number->share));
        break;
    }
}

int
oomkit_number_set(oomkit_knowledge *known, int index, const oomkit_number *number)
{
    char *at = (char *)known + fields[index].offset;
    field_type type = fields[index].type;
    int64_t rows = (int64_t)number->whole;
    uint32_t small = (uint32_t)number->whole;

    if (type == FIELD_DOUBLE) { /* written so that what is no number fails */
        if (!(number->share >= 0.0 && number->share <= SHARE_MOST)) {
            return OOMKIT_EINVAL;
        }
        memcpy(at, &number->share, sizeof(number->share));
        return OOMKIT_OK;
    }
    if (number->whole > fields[index].most &&
        (type != FIELD_ROOM || number->whole != OOMKIT_UNKNOWN)) {
        return OOMKIT_EINVAL;
    }
    if (type == FIELD_U32) {
        memcpy(at, &small, sizeof(small));
    } else if (type == FIELD_I64) {
        memcpy(at, &rows, sizeof(rows));
    } else {
        memcpy(at, &number->whole, sizeof(number->whole));
    }
    return OOMKIT_OK;
}

/* The points that are there come first, and none is half there. 0 or OOMKIT_EINVAL. */
static int
count_points(oomkit_sizes *sizes)
{
    int64_t i;

    for (i = 0; i < OOMKIT_POINTS; i++) {
        const oomkit_point *point = &sizes->points[i];
        if ((point->rows > 0) != (point->bytes > 0) ||
            (point->rows > 0 && i > sizes->count)) {
            return OOMKIT_EINVAL;
        }
        sizes->count += point->rows > 0;
    }
    return OOMKIT_OK;
}

int
oomkit_numbers_end(oomkit_knowledge *known)
{
    int role;

    for (role = 0; role < OOMKIT_ROLES; role++) {
        oomkit_sizes *sizes = &known->roles[role];
        if (count_points(sizes) != OOMKIT_OK ||
            (sizes->smallest_failed > 0 &&
             sizes->largest_ok >= sizes->smallest_failed &&
             oomkit_room_enough(sizes->failed_room, sizes->ok_room))) {
            return OOMKIT_EINVAL;
        }
    }
    if (!oomkit_knowledge_valid(known) || known->k > known->batch ||
        (known->k > 0) != (known->batch > 0)) {
        return OOMKIT_EINVAL;
    }
    known->recalled = 1;
    return OOMKIT_OK;
}
