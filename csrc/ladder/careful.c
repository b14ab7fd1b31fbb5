/* A step that updates at several places (a GAN in one step): behind the first of its
 * updates an error would leave it half done, and nothing that is predicted of an update
 * tells whether what comes behind it fits. So a call of which that is not known keeps
 * host copies of what its updates change and of the gradients that it finds, as with
 * optimizer_safety="copy" and gradient_safety="copy". */
#include "activations.h"
#include "ladder.h"
#include "../batch/batch.h"
#include "../optim/updating.h"
#include "../py/tensor.h"
#include "../ranks/agree.h"
#include "../sizes/sizes.h"

#define COPIES 3 /* a parameter, and two values of its state, as Adam has them */
/* So many calls may leave an optimizer out before it is believed that all do. GANs step
 * the second one in each fifth call (WGAN's n_critic). */
#define LEFT_OUT 8

static int
optimizers(const oomkit_call *call)
{
    int count = 0;

    EACH_OWNER (one, call->parts, OWNERS_OF(OOMKIT_OWNER_OPTIMIZER)) {
        count++;
    }
    return count;
}

/* Has a call of this shape and of as many rows come to its end, with an update behind
 * another one, since the step ran out of memory? */
static int
is_known_to_fit(oomkit_call *call)
{
    const oomkit_signature *entry = oomkit_signature_get(call, 0); /* borrowed */
    const int64_t rows = oomkit_batch_rows(&call->batch);

    return entry != NULL && entry->known.successes > 0 && !entry->known.recalled &&
           entry->known.roles[OOMKIT_FIRST].largest_ok >= rows &&
           entry->apart_rows >= rows;
}

int
oomkit_host_has_room(const oomkit_call *call)
{
    const uint64_t spare = oomkit_host_spare(call->st);
    oomkit_tensor_facts facts;
    uint64_t bytes = 0;
    Py_ssize_t i;

    for (i = 0; i < call->parts->param_count; i++) {
        if (oomkit_tensor_facts_get(call->st, call->parts->params[i], INT64_MAX,
                                    &facts) < 0) {
            oomkit_error_dismiss(); /* one that has no values (a lazy module's) */
            continue;
        }
        bytes += COPIES * facts.bytes;
    }
    return bytes <= spare;
}

int
oomkit_careful_begin(oomkit_call *call)
{
    oomkit_step *step = call->step;

    if (call->options->optimizer_copy || oomkit_call_is_replay(call) ||
        oomkit_ranks_agreed(call) ||
        (step->updates_apart == OOMKIT_APART_UNKNOWN
             ? optimizers(call) < 2
             : !step->seen_oom || is_known_to_fit(call)) ||
        !oomkit_host_has_room(call)) {
        return 0;
    }
    if (step->careful == NULL) {
        step->careful = PyMem_Malloc(sizeof(*step->careful));
        if (step->careful == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        *step->careful = *call->options; /* its references are the step's */
        step->careful->optimizer_copy = 1;
        if (step->careful->gradient_safety == OOMKIT_SAFETY_AUTO) {
            step->careful->gradient_safety = OOMKIT_SAFETY_COPY;
        }
    }
    call->options = step->careful;
    return 0;
}

void
oomkit_careful_learn(oomkit_call *call, int64_t rows)
{
    oomkit_step *step = call->step;

    if (oomkit_updates_were_apart(call)) {
        oomkit_signature *entry = /* borrowed; shapes are known since the first error */
            step->seen_oom ? oomkit_signature_get(call, 0) : NULL;
        step->updates_apart = OOMKIT_APART_YES;
        if (entry != NULL && entry->apart_rows < rows) {
            entry->apart_rows = rows;
        }
    } else if (step->updates_apart == OOMKIT_APART_UNKNOWN &&
               (oomkit_updates_made(call) >= optimizers(call) ||
                step->calls >= LEFT_OUT)) {
        step->updates_apart = OOMKIT_APART_NO;
    }
}
