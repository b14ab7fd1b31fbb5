/* In the first call of a step: what an earlier run knew. After calls that taught
 * something: a note of it. Files are the package's affair (oomkit/sizes.py). */
#include "remember.h"
#include "sizes.h"

/* Bytes as an int, None where unknown. New reference or NULL. */
static PyObject *
budget_new(const oomkit_call *call)
{
    uint64_t budget = oomkit_device_budget(call->st, call->device);
    return budget == OOMKIT_UNKNOWN ? Py_NewRef(Py_None)
                                    : PyLong_FromUnsignedLongLong(budget);
}

PyObject *
oomkit_recall_place(const oomkit_step *step)
{
    return PyObject_CallFunction(
        step->st->memory_place, "iiKK", step->device.type, step->device.index,
        (unsigned long long)step->param_count, (unsigned long long)step->param_bytes);
}

/* A checkpoint from elsewhere (another device or torch, another model): what it knows
 * is as good as a neighbour's, until something was measured here. 0 or -1. */
static int
recall_compare(oomkit_step *step, PyObject *here)
{
    OWNED PyObject *origin = step->origin; /* cleared first */
    int same, i;

    step->origin = NULL;
    same = PyObject_RichCompareBool(origin, here, Py_EQ);
    for (i = 0; same == 0 && i < step->signature_count; i++) {
        oomkit_knowledge theirs = step->signatures[i].known;
        oomkit_know_neighbour(&step->signatures[i].known, &theirs, 1.0);
    }
    return same < 0 ? -1 : 0;
}

/* Takes in what the file has, but for shapes that a checkpoint has told of. 0 or -1. */
static int
recall_take(oomkit_step *step, PyObject *entries)
{
    Py_ssize_t i;
    int j, taken = 0;

    for (i = 0; i < PyList_GET_SIZE(entries); i++) {
        oomkit_signature *entry = &step->signatures[step->signature_count];
        if (step->signature_count == OOMKIT_SIGNATURES) {
            break;
        }
        if (oomkit_signature_parse(PyList_GET_ITEM(entries, i), entry) < 0) {
            return -1;
        }
        for (j = 0; step->signatures[j].hash != entry->hash; j++) {
        }
        if (j == step->signature_count) {
            step->signature_count++;
            taken++;
        }
    }
    return taken;
}

/* 0 or -1 */
static int
recall_read(oomkit_call *call, PyObject *here)
{
    oomkit_step *step = call->step;
    OWNED PyObject *budget = budget_new(call), *found = NULL;
    PyObject *key, *entries; /* borrowed from found */
    int taken;

    if (budget != NULL) {
        found = PyObject_CallFunctionObjArgs(call->st->recall_sizes, step->func, here,
                                             budget, NULL);
    }
    if (found == NULL ||
        !PyArg_ParseTuple(found, "OO!:recall_sizes", &key, &PyList_Type, &entries)) {
        return -1;
    }
    Py_XSETREF(step->memory_key, key == Py_None ? NULL : Py_NewRef(key));
    taken = recall_take(step, entries);
    if (taken <= 0) {
        return taken;
    }
    return oomkit_say(call->st, "info", "sOi",
                      "%s begins with remembered sizes of %d shapes",
                      call->options->label, taken);
}

int
oomkit_recall(oomkit_call *call)
{
    oomkit_step *step = call->step;
    OWNED PyObject *here = NULL;
    int result;

    step->recall = 0; /* once, also when it fails */
    if (step->origin == NULL && !call->options->remember) {
        result = oomkit_kept_take(call);
        step->seen_oom = step->signature_count > 0;
        return result;
    }
    oomkit_signature_survey(call);
    here = oomkit_recall_place(step);
    result = here == NULL ? -1 : 0;
    if (result == 0 && step->origin != NULL) {
        result = recall_compare(step, here);
    }
    if (result == 0) { /* of this very process: it knows better than a file */
        result = oomkit_kept_take(call);
    }
    if (result == 0 && call->options->remember) {
        result = recall_read(call, here);
    }
    step->seen_oom = step->signature_count > 0;
    return result;
}

/* --- notes --- */

static uint64_t
mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0xff51afd7ed558ccdu;
    return hash ^ (hash >> 32);
}

/* Of what a plan depends on, but for figures that differ from call to call. */
static uint64_t
fingerprint(const oomkit_knowledge *known)
{
    uint64_t hash = mix((uint64_t)known->batch, (uint64_t)known->k);
    int64_t i;
    int role;

    hash = mix(hash, known->update.rung);
    hash = mix(hash, known->failures + ((uint64_t)known->missed << 32));
    hash = mix(hash, known->fooled + ((uint64_t)known->late << 32));
    for (role = 0; role < OOMKIT_ROLES; role++) {
        const oomkit_sizes *sizes = &known->roles[role];
        hash = mix(hash, (uint64_t)sizes->largest_ok);
        hash = mix(hash, (uint64_t)sizes->smallest_failed);
        for (i = 0; i < sizes->count; i++) {
            hash = mix(hash, (uint64_t)sizes->points[i].rows);
        }
    }
    return hash | 1; /* 0: not noted yet */
}

void
oomkit_recall_note(oomkit_call *call, oomkit_signature *entry)
{
    oomkit_step *step = call->step;
    OWNED PyObject *dict = NULL, *budget = NULL, *done = NULL;
    uint64_t print;

    /* Where the room is not known nothing could be said about that of another run. */
    if (step->memory_key == NULL || call->cut->forced ||
        !oomkit_signature_can_go(entry) ||
        entry->known.roles[OOMKIT_FIRST].ok_room == OOMKIT_UNKNOWN) {
        return;
    }
    print = fingerprint(&entry->known);
    if (print == entry->noted) {
        return;
    }
    entry->noted = print;
    dict = oomkit_signature_dict(entry);
    budget = dict == NULL ? NULL : budget_new(call);
    if (budget != NULL) {
        done = PyObject_CallFunctionObjArgs(call->st->note_sizes, step->memory_key,
                                            budget, dict, NULL);
    }
    oomkit_error_dismiss(); /* the step has done its work */
}
