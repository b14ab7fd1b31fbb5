/* The heap types of oomkit._C, for module.c. */
#ifndef OOMKIT_TYPES_HEAP_TYPES_H
#define OOMKIT_TYPES_HEAP_TYPES_H

#include "../py/state.h"

extern PyType_Spec oomkit_guard_spec;   /* guard_type.c */
extern PyType_Spec oomkit_guarded_spec; /* guarded_type.c */
extern PyType_Spec oomkit_guarded_object_spec;
extern PyType_Spec oomkit_chunks_spec; /* chunks_type.c */
extern PyMethodDef oomkit_chunks_methods[];
extern PyMethodDef oomkit_guarded_methods[];

#endif
