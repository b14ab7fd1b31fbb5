/* Finding participants: what search.c and bound_objects.c share. */
#ifndef OOMKIT_MEMBERS_SEARCH_H
#define OOMKIT_MEMBERS_SEARCH_H

#include "members.h"

#define OOMKIT_OBJECT_DEPTH 3 /* objects in attributes of the user's own objects */

typedef struct oomkit_search {
    oomkit_state *st;
    const oomkit_options *options;
    oomkit_participants *parts;
    int looked_at; /* attributes so far */
} oomkit_search;

/* Known kinds are added; an object or a class of the user's own is opened, `depth`
 * levels deep. A module may hold its optimizer (an agent): its attributes are looked
 * at, not theirs. 0 or -1. */
int
oomkit_search_value(oomkit_search *s, PyObject *value, int depth);

/* The attributes in the dictionary of an object of the user's own (a trainer), and of
 * theirs; of a class those without underscores in front. 0 or -1. */
int
oomkit_search_attributes(oomkit_search *s, PyObject *object, int depth);

/* --- bound_objects.c: what is bound before the call --- */

/* Values in a tuple and a dictionary (either may be NULL): default arguments. 0 or -1.
 */
int
oomkit_search_bound(oomkit_search *s, PyObject *args, PyObject *keywords);

/* What a functools.partial binds; nothing of other objects. 0 or -1. */
int
oomkit_search_partial(oomkit_search *s, PyObject *func);

/* The attributes of a class and of those that it comes from. 0 or -1. */
int
oomkit_search_class(oomkit_search *s, PyTypeObject *type, int depth);

#endif
