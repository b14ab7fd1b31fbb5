/* Places in the plain state of a split step that each micro-batch changes alike,
 * whatever its rows: a count of steps, an average of the weights. Where the runs of a
 * proof show that the whole batch and each part of it leave the same there, each
 * micro-batch begins with it as at entry, and it moves once: by what the last one does,
 * which has the weights behind the update. What a count decides (`if self.steps % 10 ==
 * 0`) is then decided alike in all of them. */
#include "alike.h"
#include "../call/call.h"
#include "../call/step.h"
#include "marks.h"

/* What is known of a place, in step->alike. */
typedef enum {
    ALIKE_UNKNOWN = 0,
    ALIKE_YES,     /* of numbers: compared in each micro-batch of a call, too */
    ALIKE_TENSORS, /* with tensors, which differ behind the update: to be told */
    ALIKE_TOLD,    /* the same, told */
    ALIKE_NO,      /* it goes on from one micro-batch to the next */
    ALIKE_UNTOLD,  /* the same, and it was said to move once */
    ALIKE_ASKED,   /* a proof was begun, because it was changed for the first time */
    ALIKE_MADE     /* the same, and there was nothing: see alike_notice_made() */
} alike_state;

static void
alike_end(oomkit_call *call)
{
    call->cut->alike.made = 0;
    Py_CLEAR(call->cut->alike.wholes);
    Py_CLEAR(call->cut->alike.first);
}

/* Of a dict that may be NULL: borrowed, or NULL, perhaps with an exception. */
static PyObject *
alike_get(PyObject *dict, PyObject *key)
{
    return dict == NULL ? NULL : PyDict_GetItemWithError(dict, key);
}

static int
alike_set(PyObject **dict, PyObject *key, PyObject *value)
{
    return *dict == NULL && (*dict = PyDict_New()) == NULL
               ? -1
               : PyDict_SetItem(*dict, key, value);
}

/* Modules of one class have places of one name. New reference (str) or NULL. */
static PyObject *
alike_key(const oomkit_call *call, Py_ssize_t node)
{
    return PyUnicode_FromFormat("%U %zd", call->entry.plain->site->nodes[node].name,
                                node);
}

/* alike_state, or -1. */
static int
alike_known(const oomkit_call *call, PyObject *key)
{
    PyObject *known = alike_get(call->step->alike, key); /* borrowed */

    return known != NULL      ? (int)PyLong_AsLong(known)
           : PyErr_Occurred() ? -1
                              : ALIKE_UNKNOWN;
}

/* 0 or -1. */
static int
alike_learn(oomkit_call *call, PyObject *key, alike_state state)
{
    OWNED PyObject *known = PyLong_FromLong(state);

    return known == NULL ? -1 : alike_set(&call->step->alike, key, known);
}

static int
alike_is_known(int known)
{
    return known == ALIKE_YES || known == ALIKE_TENSORS || known == ALIKE_TOLD;
}

static int
alike_has_tensors(PyObject *copies)
{
    return PyTuple_Check(copies) && PyTuple_GET_ITEM(copies, 0) == Py_True;
}

/* What lies in a place now, if something else did, as oomkit._code.alike copies it: new
 * reference; None where nothing else did, or (*moved) it is not to be considered; or
 * NULL. What is made once (`if self.steps == 0: self.codes = torch.randn(...)`) is not
 * to be made again by the next micro-batch: no number that may decide it is put back in
 * such a call, whose last micro-batch leaves what the first one has left. */
static PyObject *
alike_now(oomkit_call *call, Py_ssize_t node, int *moved)
{
    OWNED PyObject *value = NULL, *copies = NULL;

    *moved = oomkit_plain_node_moved(call, node, &value);
    call->cut->alike.made |= *moved == 3;
    if (*moved <= 0 || *moved == 3 || value == NULL) {
        return *moved < 0 || PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    }
    EXEMPT (call->st) {
        copies = PyObject_CallOneArg(call->st->value_copies, value);
    }
    if (copies != NULL && *moved == 2 && alike_has_tensors(copies)) {
        call->cut->alike.made = 1;
        Py_SETREF(copies, Py_NewRef(Py_None));
    }
    return STEAL(copies);
}

/* Is something made again in this call? 0 or -1. */
static int
alike_notice_made(oomkit_call *call, Py_ssize_t node)
{
    OWNED PyObject *value = NULL;
    const int moved = oomkit_plain_node_moved(call, node, &value);

    call->cut->alike.made |= moved == 3;
    return moved < 0 ? -1 : 0;
}

/* 1, 0 or -1. */
static int
alike_same(const oomkit_call *call, PyObject *a, PyObject *b)
{
    OWNED PyObject *same = NULL;

    EXEMPT (call->st) {
        same = PyObject_CallFunctionObjArgs(call->st->same_copies, a, b, NULL);
    }
    return same == NULL ? -1 : same == Py_True;
}

/* --- the runs of a proof --- */

static int
alike_note_whole(oomkit_call *call, Py_ssize_t node, PyObject *key)
{
    const oomkit_slice *slice = &call->cut->slices[0];
    OWNED PyObject *copies = NULL, *noted = NULL;
    int moved;

    copies = alike_now(call, node, &moved);
    if (copies == NULL) {
        return -1;
    }
    if (moved && copies == Py_None) {
        return alike_learn(call, key, ALIKE_NO);
    }
    noted = Py_BuildValue("LLO", (long long)slice->start,
                          (long long)(slice->start + slice->length), copies);
    return noted == NULL ? -1 : alike_set(&call->cut->alike.wholes, key, noted);
}

/* Has it become what the whole of these rows has made of it? 1, 0; 2 there is nothing
 * to compare: neither has changed it, or these rows had no whole run; -1. */
static int
alike_as_whole(oomkit_call *call, Py_ssize_t node, PyObject *key, int *tensors)
{
    const oomkit_slice *slices = call->cut->slices;
    const oomkit_slice *last = &slices[call->cut->count - 1];
    PyObject *noted = alike_get(call->cut->alike.wholes, key); /* borrowed */
    PyObject *whole;                                           /* borrowed from noted */
    OWNED PyObject *copies = NULL;
    long long start, end;
    int moved;

    if (noted == NULL || !PyArg_ParseTuple(noted, "LLO", &start, &end, &whole)) {
        return PyErr_Occurred() ? -1 : 2;
    }
    if (start != slices->start || end != last->start + last->length) {
        return 2;
    }
    copies = alike_now(call, node, &moved);
    if (copies == NULL || whole == Py_None || copies == Py_None) {
        return copies == NULL ? -1 : whole == Py_None && !moved ? 2 : 0;
    }
    *tensors = alike_has_tensors(copies);
    return alike_same(call, whole, copies);
}

static int
alike_proof_ends(oomkit_call *call, Py_ssize_t node, PyObject *key)
{
    const int known = alike_known(call, key), first = call->cut->at == 0;
    int as_whole, tensors = 0;

    if (known < 0 || known == ALIKE_NO || known == ALIKE_UNTOLD) {
        return known < 0 ? -1 : 0; /* once is enough */
    }
    if (known == ALIKE_MADE) {
        return alike_notice_made(call, node);
    }
    if (call->cut->count == 1) {
        return alike_note_whole(call, node, key);
    }
    if (call->cut->alike.made) {
        return 0;
    }
    as_whole = alike_as_whole(call, node, key, &tensors);
    if (as_whole < 0 || as_whole == 2) {
        return as_whole < 0 ? -1 : 0;
    }
    if (!as_whole) {
        return alike_learn(call, key,
                           known == ALIKE_YES || known == ALIKE_TOLD ? ALIKE_UNTOLD
                                                                     : ALIKE_NO);
    }
    if (first) { /* a step that asks for current() decides itself what runs when */
        return call->sequence_waived ? 0
                                     : alike_set(&call->cut->alike.first, key, Py_True);
    }
    if (alike_get(call->cut->alike.first, key) == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    return alike_is_known(known)
               ? 0
               : alike_learn(call, key, tensors ? ALIKE_TENSORS : ALIKE_YES);
}

int
oomkit_plain_is_random(oomkit_call *call)
{
    const oomkit_plain_site *site =
        call->entry.plain == NULL ? NULL : call->entry.plain->site;
    Py_ssize_t i;

    for (i = 0; site != NULL && i < site->count; i++) {
        OWNED PyObject *key = alike_key(call, i);
        const int known = key == NULL ? -1 : alike_known(call, key);
        if (known < 0 ||
            ((known == ALIKE_TENSORS || known == ALIKE_TOLD) &&
             alike_learn(call, key, known == ALIKE_TOLD ? ALIKE_UNTOLD : ALIKE_NO) <
                 0)) {
            return -1;
        }
    }
    return 0;
}

/* --- the call itself --- */

/* It was shown to be changed alike, and was not: told, and left to go on from now on. 0
 * or -1. */
static int
alike_differs(oomkit_call *call, Py_ssize_t node, PyObject *key)
{
    if (alike_learn(call, key, ALIKE_NO) < 0) {
        return -1;
    }
    return oomkit_warn(
        call->st->OomkitWarning, 1,
        "oomkit: the batch of %U is split, and its micro-batches change %U by "
        "different "
        "amounts now, which earlier ones did not. Guard what must run once per batch "
        "with `if oomkit.current().is_last:`. Warned once" SEE("side-effects"),
        call->options->label, call->entry.plain->site->nodes[node].name);
}

int
oomkit_plain_moves_once(oomkit_call *call, PyObject *name)
{
    return oomkit_warn(
        call->st->OomkitWarning, 1,
        "oomkit: the batch of %U is split, and %U moves once, by what the last "
        "micro-batch does: when the split was verified, all parts of the batch have "
        "moved it alike, as an average of the weights. Guard with `if "
        "oomkit.current().is_last:` what depends on the rows. Warned once" SEE(
            "side-effects"),
        call->options->label, name);
}

static int
alike_tell(oomkit_call *call, Py_ssize_t node, PyObject *key)
{
    return alike_learn(call, key, ALIKE_TOLD) < 0
               ? -1
               : oomkit_plain_moves_once(call,
                                         call->entry.plain->site->nodes[node].name);
}

/* What this micro-batch has left, compared with the first one: of tensors only whether
 * it has moved them. 0 or -1. */
static int
alike_compare(oomkit_call *call, Py_ssize_t node, PyObject *key, int tensors)
{
    OWNED PyObject *value = NULL, *now = NULL;
    PyObject *first; /* borrowed */
    int moved, same;

    if (tensors) {
        moved = oomkit_plain_node_moved(call, node, &value);
        now = moved < 0 ? NULL : PyBool_FromLong(moved);
    } else {
        now = alike_now(call, node, &moved);
    }
    first = now == NULL ? NULL : alike_get(call->cut->alike.first, key);
    if (now == NULL || PyErr_Occurred()) {
        return -1;
    }
    if (call->cut->at == 0 || first == NULL) { /* finished parts: their first is gone */
        return alike_set(&call->cut->alike.first, key, now);
    }
    if (call->cut->alike.made && PyTuple_Check(first)) { /* has gone on */
        return call->cut->at < call->cut->count - 1
                   ? 0
                   : oomkit_plain_node_set(call, node, PyTuple_GET_ITEM(first, 1));
    }
    same = alike_same(call, first, now);
    return same < 0 ? -1 : same ? 0 : alike_differs(call, node, key);
}

static int
alike_call_ends(oomkit_call *call, Py_ssize_t node, PyObject *key)
{
    const int known = alike_known(call, key);
    OWNED PyObject *value = NULL;
    int moved;

    switch (known) {
    case ALIKE_YES:
        return alike_compare(call, node, key, 0);
    case ALIKE_TOLD:
        return alike_compare(call, node, key, 1);
    case ALIKE_TENSORS:
    case ALIKE_UNTOLD:
        moved = oomkit_plain_node_moved(call, node, &value);
        return moved <= 0               ? moved < 0 ? -1 : 0
               : known == ALIKE_TENSORS ? alike_tell(call, node, key)
                                        : alike_differs(call, node, key);
    case ALIKE_MADE:
        return alike_notice_made(call, node);
    default:
        return known < 0 ? -1 : 0;
    }
}

/* Has it been changed for the first time? 1, 0 or -1. */
static int
alike_is_new(oomkit_call *call, Py_ssize_t node, PyObject *key)
{
    const int known = alike_known(call, key);
    OWNED PyObject *copies = NULL;
    int moved;

    if (known != ALIKE_UNKNOWN) {
        return known < 0 ? -1 : 0;
    }
    copies = alike_now(call, node, &moved);
    if (copies == NULL || !moved) {
        return copies == NULL ? -1 : 0;
    }
    return alike_learn(call, key,
                       moved == 3          ? ALIKE_MADE
                       : copies == Py_None ? ALIKE_NO
                                           : ALIKE_ASKED) < 0
               ? -1
               : moved == 3 || copies != Py_None;
}

/* --- the rule --- */

/* The marks of the entry, or NULL. */
static const oomkit_plain *
alike_marks(const oomkit_call *call)
{
    const oomkit_plain *plain = call->entry.plain;

    return call->split && plain != NULL && plain->entry.taken &&
                   call->st->value_copies != NULL && !oomkit_call_is_replay(call)
               ? plain
               : NULL;
}

/* Nothing is marked there, or it is a metric's: its counts belong to what goes on. */
static int
alike_left_out(const oomkit_plain *plain, Py_ssize_t node)
{
    const int what = plain->site->nodes[node].what;

    return what == 0 || (what & OOMKIT_PLAIN_FLOWS) != 0;
}

int
oomkit_plain_alike_ends(oomkit_call *call, PyObject *result)
{
    const oomkit_plain *plain = alike_marks(call);
    const int within = call->cut->at > 0 && call->cut->at < call->cut->count - 1;
    Py_ssize_t i;
    int status = 0;

    (void)result;
    for (i = 0; status == 0 && plain != NULL && i < plain->site->count; i++) {
        OWNED PyObject *key = NULL;
        if (alike_left_out(plain, i) || (within && call->proof != NULL)) {
            continue;
        }
        key = alike_key(call, i);
        status = key == NULL           ? -1
                 : call->proof != NULL ? alike_proof_ends(call, i, key)
                                       : alike_call_ends(call, i, key);
    }
    return status;
}

/* Shown before, or by the first part of this run? 1, 0 or -1. */
static int
alike_is(const oomkit_call *call, PyObject *key)
{
    const int known = alike_known(call, key);

    if (call->cut->alike.made) {
        return known < 0 ? -1 : known == ALIKE_TENSORS || known == ALIKE_TOLD;
    }
    if (known >= 0 && !alike_is_known(known) && call->proof != NULL) {
        return alike_get(call->cut->alike.first, key) != NULL ? 1
               : PyErr_Occurred()                             ? -1
                                                              : 0;
    }
    return known < 0 ? -1 : alike_is_known(known);
}

int
oomkit_plain_alike_begins(oomkit_call *call)
{
    const oomkit_plain *plain = alike_marks(call);
    Py_ssize_t i;

    if (plain == NULL || call->cut->at == 0) {
        Py_CLEAR(call->cut->alike.first);
        return 0;
    }
    for (i = 0; i < plain->site->count; i++) {
        OWNED PyObject *key = NULL;
        int alike;
        if (alike_left_out(plain, i)) {
            continue;
        }
        key = alike_key(call, i);
        alike = key == NULL ? -1 : alike_is(call, key);
        if (alike < 0 || (alike && oomkit_plain_node_back(call, i) < 0)) {
            return -1;
        }
    }
    return call->proof == NULL ? oomkit_plain_say(call) : 0;
}

int
oomkit_plain_is_new(oomkit_call *call)
{
    const oomkit_plain *plain = alike_marks(call);
    Py_ssize_t i;
    int found = 0;

    if (call->sequence_waived) {
        return 0; /* nothing would be learned */
    }
    for (i = 0; found >= 0 && plain != NULL && i < plain->site->count; i++) {
        OWNED PyObject *key = NULL;
        int is_new;
        if (alike_left_out(plain, i)) {
            continue;
        }
        key = alike_key(call, i);
        is_new = key == NULL ? -1 : alike_is_new(call, i, key);
        found = is_new < 0 ? -1 : found | is_new;
    }
    return found;
}

PyObject *
oomkit_plain_settled(const oomkit_call *call)
{
    OWNED PyObject *names = PySet_New(NULL);
    PyObject *name, *known; /* borrowed from the dict */
    Py_ssize_t at = 0;

    while (names != NULL && call->step->alike != NULL &&
           PyDict_Next(call->step->alike, &at, &name, &known)) {
        if (alike_is_known((int)PyLong_AsLong(known)) && PySet_Add(names, name) < 0) {
            return NULL;
        }
    }
    return STEAL(names);
}

const oomkit_rule oomkit_plain_alike_rule = {.micro_begins = oomkit_plain_alike_begins,
                                             .micro_ends = oomkit_plain_alike_ends,
                                             .call_ends = alike_end};
