/* What the ranks of a process group agree on. */
#ifndef OOMKIT_RANKS_RANKS_H
#define OOMKIT_RANKS_RANKS_H

#include "../call/events.h"

extern PyType_Spec oomkit_vote_spec;                                  /* vote_type.c */
extern const oomkit_rule oomkit_ranks_rule, oomkit_rank_weights_rule; /* rank_rules.c */

#endif
