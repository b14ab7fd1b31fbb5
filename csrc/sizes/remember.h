/* Knowledge that outlives a run: in a user's checkpoint, and in a file of the user's.
 */
#ifndef OOMKIT_SIZES_REMEMBER_H
#define OOMKIT_SIZES_REMEMBER_H

#include "../call/step.h"

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

/* remember.c: (torch, device, number of parameters, their bytes) of a step whose
 * figures are there (see oomkit_signature_survey). New tuple or NULL. */
PyObject *
oomkit_recall_place(const oomkit_step *step);

/* kept_sizes.c: what a step that goes has found is kept for the next of the same code.
 * Never fails; keeps the exception in flight. */
void
oomkit_kept_put(oomkit_step *step);

/* In a step's first call: the sizes that were kept for it. 0 or -1. Runs Python code.
 */
int
oomkit_kept_take(oomkit_call *call);

extern PyMethodDef oomkit_state_methods[];
extern PyMethodDef oomkit_kept_methods[];

#endif
