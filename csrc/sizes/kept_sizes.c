/* Sizes of steps that are gone: a function that is defined and decorated anew in each
 * turn of a loop is the same code, and what one turn has found the next begins with. In
 * memory, a few shapes of a process, whatever remember= says. Like sizes out of a file
 * they hold until this step's own calls have borne them out or not. */
#include "remember.h"
#include "sizes.h"
#include "../py/tensor.h"

#define KEPT 32

typedef struct kept_entry {
    PyObject *code; /* owned: weak reference to the function's code; NULL: free */
    oomkit_device device;
    uint64_t param_count, param_bytes;
    Py_ssize_t dim;
    int least_rows, even_rows;
    uint64_t serial; /* of the note: the oldest gives way */
    oomkit_signature signature;
} kept_entry;

typedef struct kept_entries {
    uint64_t serial;
    kept_entry entries[KEPT];
} kept_entries;

static const char capsule_name[] = "oomkit._C.kept";

static void
kept_free(PyObject *capsule)
{
    kept_entries *kept = PyCapsule_GetPointer(capsule, capsule_name);
    int i;

    for (i = 0; i < KEPT; i++) {
        Py_CLEAR(kept->entries[i].code);
    }
    PyMem_Free(kept);
}

/* All of them, or NULL: there are none, or (with `create`) an exception. */
static kept_entries *
kept_get(oomkit_state *st, int create)
{
    kept_entries *kept;

    if (st->kept != NULL) {
        return PyCapsule_GetPointer(st->kept, capsule_name);
    }
    if (!create) {
        return NULL;
    }
    kept = PyMem_Calloc(1, sizeof(*kept));
    if (kept == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    st->kept = PyCapsule_New(kept, capsule_name, kept_free);
    if (st->kept == NULL) {
        PyMem_Free(kept);
        return NULL;
    }
    return kept;
}

/* The code that a step's sizes belong to; NULL where its function is not a plain one:
 * what is known of a method is its object's. Borrowed from the step. */
static PyObject *
kept_code(const oomkit_step *step)
{
    return step->func != NULL && PyFunction_Check(step->func) && step->skip == 0 &&
                   step->parent == NULL
               ? ((PyFunctionObject *)step->func)->func_code
               : NULL;
}

static int
kept_is_of(const kept_entry *entry, PyObject *code)
{
    return entry->code != NULL && PyWeakref_GET_OBJECT(entry->code) == code;
}

/* The same function over as large a model? */
static int
kept_fits(const kept_entry *entry, const oomkit_step *step)
{
    return entry->device.type == step->device.type &&
           entry->device.index == step->device.index &&
           entry->param_count == step->param_count &&
           entry->param_bytes == step->param_bytes && entry->dim == step->options.dim;
}

/* On a CPU without a limit nothing runs out of memory but by chance. */
static int
kept_is_worth_it(const oomkit_step *step, const oomkit_signature *signature)
{
    return oomkit_signature_can_go(signature) && signature->known.successes > 0 &&
           (step->device.type != OOMKIT_DEVICE_CPU ||
            signature->known.roles[OOMKIT_FIRST].ok_room != OOMKIT_UNKNOWN);
}

/* The place of a shape: where it was, one that is free, or the oldest. */
static kept_entry *
kept_place(kept_entries *kept, const oomkit_step *step, PyObject *code,
           const oomkit_signature *signature)
{
    kept_entry *place = &kept->entries[0];
    int i;

    for (i = 0; i < KEPT; i++) {
        kept_entry *entry = &kept->entries[i];
        if (kept_is_of(entry, code) && kept_fits(entry, step) &&
            entry->signature.hash == signature->hash) {
            return entry;
        }
        if (entry->code != NULL && PyWeakref_GET_OBJECT(entry->code) == Py_None) {
            Py_CLEAR(entry->code); /* nobody can define it again */
        }
        if (place->code != NULL &&
            (entry->code == NULL || entry->serial < place->serial)) {
            place = entry;
        }
    }
    return place;
}

void
oomkit_kept_put(oomkit_step *step)
{
    PyObject *code = kept_code(step); /* borrowed from step */
    int i;

    if (code == NULL || !step->surveyed || step->signature_count == 0 ||
        step->st->keeps_nothing) {
        return;
    }
    KEEPING_EXCEPTION {
        for (i = 0; i < step->signature_count; i++) {
            OWNED PyObject *ref = NULL;
            kept_entries *kept;
            kept_entry *entry;
            if (!kept_is_worth_it(step, &step->signatures[i])) {
                continue;
            }
            ref = PyWeakref_NewRef(code, NULL);
            kept = ref == NULL ? NULL : kept_get(step->st, 1);
            if (kept == NULL) {
                break;
            }
            entry = kept_place(kept, step, code, &step->signatures[i]);
            Py_XSETREF(entry->code, STEAL(ref));
            entry->device = step->device;
            entry->param_count = step->param_count;
            entry->param_bytes = step->param_bytes;
            entry->dim = step->options.dim;
            entry->least_rows = step->least_rows;
            entry->even_rows = step->even_rows;
            entry->serial = ++kept->serial;
            entry->signature = step->signatures[i];
        }
        oomkit_error_dismiss(); /* the next step finds its sizes itself */
    }
}

/* Has one of them an entry of this shape? */
static int
kept_is_known(const oomkit_step *step, const oomkit_signature *signature)
{
    int i;

    for (i = 0; i < step->signature_count; i++) {
        if (step->signatures[i].hash == signature->hash) {
            return 1;
        }
    }
    return 0;
}

int
oomkit_kept_take(oomkit_call *call)
{
    oomkit_step *step = call->step;
    const kept_entries *kept = kept_get(step->st, 0);
    PyObject *code = kept_code(step); /* borrowed from step */
    int i, taken = 0;

    for (i = 0; kept != NULL && code != NULL && i < KEPT; i++) {
        const kept_entry *entry = &kept->entries[i];
        oomkit_signature *place = &step->signatures[step->signature_count];
        if (!kept_is_of(entry, code) || step->signature_count == OOMKIT_SIGNATURES) {
            continue;
        }
        if (!step->surveyed) {
            oomkit_signature_survey(call);
        }
        if (!kept_fits(entry, step) || kept_is_known(step, &entry->signature)) {
            continue;
        }
        *place = entry->signature;
        place->known.recalled = 1;
        place->noted = 0;
        place->used = step->calls;
        step->signature_count++;
        step->least_rows = entry->least_rows;
        step->even_rows = entry->even_rows;
        taken++;
    }
    if (taken == 0) {
        return 0;
    }
    return oomkit_say(call->st, "info", "sOi",
                      "%s begins with sizes of %d shapes that an earlier step "
                      "of the same function has found",
                      call->options->label, taken);
}

/* Forgets all of them, and takes no more unless it is to. */
static PyObject *
kept_switch(PyObject *module, PyObject *on)
{
    oomkit_state *st = oomkit_state_of_module(module);
    int truth = PyObject_IsTrue(on);

    if (truth < 0) {
        return NULL;
    }
    st->keeps_nothing = !truth;
    Py_CLEAR(st->kept);
    Py_RETURN_NONE;
}

PyMethodDef oomkit_kept_methods[] = {
    {"_keep_sizes", kept_switch, METH_O,
     "_keep_sizes(on, /)\n--\n\nForget the sizes of steps that are gone; whether to "
     "keep those of others."},
    {NULL, NULL, 0, NULL},
};
