/* Python's frames: which line of the user's is running. */
#ifndef OOMKIT_PY_FRAMES_H
#define OOMKIT_PY_FRAMES_H

#include "state.h"

/* "file:line" of the innermost frame that is neither torch's nor ours. New reference,
 * or NULL with an exception. */
PyObject *
oomkit_where(void);

#endif
