/* Torch's modes: gradient recording, inference. */
#ifndef OOMKIT_PY_MODES_H
#define OOMKIT_PY_MODES_H

#include "state.h"

/* Turns gradient recording off and gives back how it was (1, 0), or -1. */
int
oomkit_grad_mode_off(oomkit_state *st);
int
oomkit_grad_mode_set(oomkit_state *st, int enabled);
/* Back to `mode`, twice tried: a mode of torch's that intercepts functions may raise.
 * Keeps the exception in flight. `result`, or -1 with an exception. */
int
oomkit_grad_mode_back(oomkit_state *st, int mode, int result);

/* Inference mode on or off until the guard is dropped; 0 or -1. What is copied for a
 * call must be normal tensors. */
int
oomkit_inference_begin(oomkit_state *st, int enabled, PyObject **guard);
int
oomkit_inference_end(const oomkit_state *st, PyObject *guard, int result);
int
oomkit_tensor_write(oomkit_state *st, PyObject *tensor, PyObject *value);

#endif
