/* The marks of a call's plain state; used by plain_state.c and walk.c. */
#ifndef OOMKIT_PLAIN_MARKS_H
#define OOMKIT_PLAIN_MARKS_H

#include "plain_state.h"

/* What one place was. */
typedef struct oomkit_plain_mark {
    oomkit_at at;    /* holder NULL: only the content is marked */
    oomkit_held old; /* what it led to, if that is marked */
    oomkit_content content;
    Py_ssize_t node;
    uint8_t bound;  /* old is a mark */
    uint8_t inside; /* the content is that of a thing in what lies there */
} oomkit_plain_mark;

typedef struct oomkit_plain_marks {
    oomkit_plain_mark *items;
    Py_ssize_t count, room;
    int taken;
    int all; /* OOMKIT_PLAIN_ALL: what is put back now must be what stands now */
} oomkit_plain_marks;

typedef struct oomkit_plain {
    oomkit_plain_site *site; /* counted reference */
    oomkit_plain_marks entry;
    oomkit_plain_marks part; /* since finished parts of an evaluation are kept */
    int keep;                /* the roll-back that comes keeps them */
    PyObject *lost; /* owned set of names that could not be put back, or NULL */
} oomkit_plain;

/* Visits every place of a site in this call: `visit` may take *at. 0 or -1. */
int
oomkit_plain_walk(oomkit_call *call, const oomkit_plain_site *site,
                  int (*visit)(void *argument, Py_ssize_t node, oomkit_at *at,
                               PyObject *value),
                  void *argument);

#endif
