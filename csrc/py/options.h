/* The options of auto_batch, parsed and checked once at decoration. */
#ifndef OOMKIT_PY_OPTIONS_H
#define OOMKIT_PY_OPTIONS_H

#include "state.h"

typedef enum { OOMKIT_REDUCTION_MEAN, OOMKIT_REDUCTION_SUM } oomkit_reduction;
typedef enum {
    OOMKIT_SAFETY_AUTO,
    OOMKIT_SAFETY_COPY,
    OOMKIT_SAFETY_OFF
} oomkit_safety;
typedef enum { OOMKIT_RNG_NONE, OOMKIT_RNG_TORCH, OOMKIT_RNG_ALL } oomkit_rng_scope;

#define OOMKIT_VERIFY_WARN 2 /* once, and what differs is a warning */

typedef struct oomkit_options {
    PyObject *batch;   /* owned: tuple of argument names, or NULL */
    PyObject *statics; /* owned: tuple of argument names, never NULL */
    PyObject *split;   /* owned: callable(batch, start, length), or NULL */
    PyObject *join;    /* owned: callable(list of results, list of rows), or NULL */
    PyObject
        *participants;  /* owned: tuple of weakrefs (or objects that cannot be weakly
                           referenced) given as model=, optimizer=, participants= */
    PyObject *backward; /* owned: True or a callable, or NULL */
    PyObject *weight;   /* owned: callable, or NULL */
    int global_weight;  /* counts over all ranks */
    PyObject *on_retry; /* owned: callable(record), or NULL */
    PyObject *sinks;    /* owned: tuple of callable(record), or NULL */
    PyObject *window; /* owned: an adapter's, which can make gradients of earlier calls
                         again (oomkit/_trainers/window.py), or NULL */
    PyObject *label;  /* owned: str */
    PyObject *dims;   /* owned: dict: argument name -> int, or NULL: dim everywhere */
    int64_t dim;      /* with dims: of the results */
    int64_t accumulation_steps, min_micro_batch, multiple_of;
    oomkit_reduction reduction;
    int reduction_given; /* not the default */
    int verify; /* -1: each structure of a batch once, 1: each shape, 0: never, or
                   OOMKIT_VERIFY_WARN */
    oomkit_rng_scope rng;
    oomkit_safety gradient_safety;
    int optimizer_copy;  /* optimizer_safety="copy" or "parts": it can go back */
    int optimizer_parts; /* optimizer_safety="parts": updates go in parts */
    unsigned ladder;     /* bits 1 << rung of those that may be climbed */
    int ladder_given;    /* not the default */
    int hooks_error;     /* hooks="error" */
    int restore_batch;
    int remember; /* sizes outlive the run */
    int reset_peaks;
    int phases; /* memory and time of each phase is measured */
} oomkit_options;

#endif
