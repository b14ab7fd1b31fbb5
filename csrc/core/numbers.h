/* Knowledge as named numbers: what a file or a checkpoint holds of it, and back. What
 * comes back may be anything; out of it comes knowledge that the planner can take. */
#ifndef OOMKIT_CORE_NUMBERS_H
#define OOMKIT_CORE_NUMBERS_H

#include "knowledge.h"

typedef enum oomkit_number_kind {
    OOMKIT_NUMBER_WHOLE, /* from 0 on; 0 = none */
    OOMKIT_NUMBER_ROOM,  /* bytes from 0 on, or OOMKIT_UNKNOWN */
    OOMKIT_NUMBER_SHARE  /* a fraction */
} oomkit_number_kind;

typedef struct oomkit_number {
    uint64_t whole;
    double share; /* of the third kind alone */
} oomkit_number;

int
oomkit_number_count(void);

/* 0 <= index < oomkit_number_count() */
const char *
oomkit_number_name(int index);

oomkit_number_kind
oomkit_number_kind_of(int index);

/* Is it as in knowledge of nothing? Then it need not be kept. */
int
oomkit_number_is_nothing(int index, const oomkit_number *number);

void
oomkit_number_get(const oomkit_knowledge *known, int index, oomkit_number *number);

/* OOMKIT_OK, or OOMKIT_EINVAL for a number out of range: *known is as before. */
int
oomkit_number_set(oomkit_knowledge *known, int index, const oomkit_number *number);

/* After the last of them, set into all zeros: knowledge of an earlier run. OOMKIT_OK,
 * or OOMKIT_EINVAL for numbers that do not go together. */
int
oomkit_numbers_end(oomkit_knowledge *known);

#endif
