/* The state of torch's CPU generator: marks of it, and whether it has moved. */
#ifndef OOMKIT_PY_GENERATOR_H
#define OOMKIT_PY_GENERATOR_H

#include "../py/state.h"

/* A mark that can be put back: *tensor (owned; never written to, may be that of an
 * earlier mark) and *bytes (owned, or NULL where there are none). 0 or -1. */
int
oomkit_stream_mark(oomkit_state *st, PyObject **tensor, PyObject **bytes);

/* A mark that can only be compared: one of the two is set. 0 or -1. */
int
oomkit_stream_note(oomkit_state *st, PyObject **tensor, PyObject **bytes);

/* Has it moved since the mark (either may be NULL, not both)? 1, 0 or -1. */
int
oomkit_stream_moved(oomkit_state *st, PyObject *tensor, PyObject *bytes);

/* Are two state tensors equal? 1, 0 or -1. */
int
oomkit_stream_equal(oomkit_state *st, PyObject *one, PyObject *other);

/* Tries out on a generator of its own what the bridge reads. 0, or -1 with an exception
 * that says nothing of the bridge (oomkit_state_passes). */
int
oomkit_stream_calibrate(oomkit_state *st);

#endif
