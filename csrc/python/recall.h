/* Knowledge that outlives a run: in a user's checkpoint, and in a file of the user's.
 */
#ifndef OOMKIT_PYTHON_RECALL_H
#define OOMKIT_PYTHON_RECALL_H

#include "step.h"

/* knowledge_dict.c: a dict of str to str, int, float and None. New reference or NULL.
 */
PyObject *
oomkit_signature_dict(const oomkit_signature *entry);

/* Has it anything to say in another run? */
int
oomkit_signature_can_go(const oomkit_signature *entry);

/* Fills *entry from what should be such a dict. 0, or -1 with ValueError. */
int
oomkit_signature_parse(PyObject *dict, oomkit_signature *entry);

/* recall.c: (torch, device, number of parameters, their bytes) of a step whose figures
 * are there (see oomkit_signature_survey). New tuple or NULL. */
PyObject *
oomkit_recall_place(const oomkit_step *step);

/* step_state.c. New references or NULL. */
PyObject *
oomkit_step_state(PyObject *op, PyObject *ignored);
PyObject *
oomkit_step_load(PyObject *op, PyObject *state);
extern PyMethodDef oomkit_state_methods[];

#endif
