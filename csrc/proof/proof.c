/* When a split is proven, and what comes of it. */
#include "proof.h"
#include "../accum/accum.h"
#include "../batch/batch.h"
#include "../call/call.h"
#include "../ranks/agree.h"
#include "../sizes/sizes.h"

#define FEW 5 /* rows that say little about a batch: more are tried if they may fit */
#define CHANCE 32      /* rows of which parts may agree by chance */
#define APART 3        /* places at which weights are told apart, at most */
#define HALVES 7       /* wholes whose halves are compared: of 8 micro-batches all */
#define HALVES_AGAIN 3 /* ... a few calls later */
#define OTHERS 3       /* micro-batches that are shown where no whole of two fits */

/* --- what comes of it --- */

int
oomkit_proof_log(oomkit_call *call, const char *level, PyObject *text)
{
    return text == NULL ? -1 : oomkit_say(call->st, level, "sO", "%s", text);
}

/* It differs: SplitError, or with verify="warn" a warning. `rules` (borrowed) would
 * make it equal. Steals `text`. 0 or -1. */
static int
proof_refuse(oomkit_proof *p, PyObject *text, PyObject *rules)
{
    oomkit_call *call = p->call;
    OWNED PyObject *advice =
        text == NULL || rules == NULL
            ? NULL
            : PyObject_CallMethod(p->judge, "advice", "OO", rules,
                                  oomkit_losses_are_sums(call) ? Py_True : Py_False);
    int result = -1;

    if (advice != NULL && call->options->verify == OOMKIT_VERIFY_WARN) {
        result = oomkit_warn(
            call->st->OomkitWarning, 1,
            "oomkit: %U is split (verify=\"warn\"), but not exactly: %U; %U" SEE(
                "split-not-exact"),
            call->options->label, text, advice);
    } else if (advice != NULL) {
        oomkit_refuse(
            call, "auto_batch cannot split %U exactly: %U; %U" SEE("split-not-exact"),
            call->options->label, text, advice);
        result = oomkit_split_alone(call);
    }
    Py_XDECREF(text);
    return result;
}

/* The first cut that the step works on: two parts of even length where it fails on
 * these; those of the call itself where the whole batch has run. As
 * oomkit_proof_compare(). */
static int
proof_parts(oomkit_proof *p, PyObject **text)
{
    const int64_t first = p->first;
    PyObject *exception; /* owned, given back */
    int result = oomkit_proof_compare(p, p->first, text);

    if (result == 0 || !oomkit_proof_own_error(p->call)) {
        return result;
    }
    exception = oomkit_exception_take();
    if (oomkit_proof_covers(p) && p->cut.count > 2) {
        Py_DECREF(exception);
        p->own = 1;
        return oomkit_proof_compare_with(p, p->cut.slices, p->cut.count, text);
    }
    if (!oomkit_proof_rows_even(p) || p->first == first) {
        p->first = first;
        oomkit_exception_give(exception);
        return oomkit_proof_raises(p, text);
    }
    Py_DECREF(exception);
    result = oomkit_proof_compare(p, p->first, text);
    return result < 0 && oomkit_proof_own_error(p->call) ? oomkit_proof_raises(p, text)
                                                         : result;
}

/* --- the proof --- */

/* The parts are not the whole, as `text` (stolen) says. 1 with weights that make them
 * so, 0 split all the same, -1. */
static int
proof_differs(oomkit_proof *p, PyObject *text)
{
    OWNED PyObject *rules = NULL;
    int found;

    if (oomkit_proof_is_weak(p)) {
        rules = Py_NewRef(p->rules);
    } else if (!oomkit_weights_are_free(p->call) ||
               oomkit_search_ask(p, "fuller") >= 0) {
        rules = oomkit_search_rules(p);
    }
    found = rules == NULL                      ? -1
            : oomkit_weights_are_free(p->call) ? oomkit_search_try(p, rules, &text)
                                               : 0;

    if (found == 0) {
        return proof_refuse(p, text, rules);
    }
    Py_DECREF(text);
    return found;
}

/* Weights that pass at one place fail at another, time and again. As proof_refuse(). */
static int
proof_unsettled(oomkit_proof *p, PyObject *text)
{
    OWNED PyObject *none = PyList_New(0);
    int result = proof_refuse(p, text, none);

    Py_CLEAR(p->rule);
    return result;
}

/* The parts have passed, but results of one of them, of one row, could not be joined:
 * in the middle, if neither part has one row alone. *text (owned) as in
 * oomkit_proof_compare(). */
static int
proof_joins(oomkit_proof *p, PyObject **text)
{
    const int64_t first = p->first;
    int result = 0;

    if (p->unjoined && !p->own &&
        oomkit_proof_rows_middle(p, oomkit_unfit_multiple(p->call)) && p->first > 1 &&
        p->length - p->first > 1) {
        result = oomkit_proof_compare(p, p->first, text);
    }
    p->first = first;
    return result;
}

/* The parts have passed. Where the batch has labels or masks, other weights may pass,
 * too: then at a place that tells them apart. *text (owned) as in
 * oomkit_proof_compare(). */
static int
proof_apart(oomkit_proof *p, PyObject **text)
{
    int tries, found = !p->own && oomkit_weights_are_free(p->call);

    for (tries = 0; tries < APART && found > 0 && *text == NULL; tries++) {
        found = oomkit_search_ask(p, "told_apart");
        if (found > 0 && oomkit_proof_there(p, text) < 0) {
            return -1;
        }
    }
    return found < 0 ? -1 : 0;
}

/* The parts have passed, as the halves of few rows may by chance (labels that cancel,
 * the hardest half of each): where the call itself cuts, if these rows reach so far,
 * else near a third. *text (owned) as in oomkit_proof_compare(). */
static int
proof_elsewhere(oomkit_proof *p, PyObject **text)
{
    const oomkit_slice *own = &p->cut.slices[0];
    const int64_t first = p->first, multiple = oomkit_unfit_multiple(p->call);
    int result;

    if (p->own || p->no_parts || p->by_chance || p->length > CHANCE) {
        return 0;
    }
    p->first = p->length / 3 / multiple * multiple;
    if (p->start == own->start && own->length > 1 && own->length + 1 < p->length &&
        own->length != first) {
        p->first = own->length;
    } else if (p->first < 2 || p->first == first) {
        p->first = p->length - first;
    }
    if (p->first == first || !oomkit_proof_rows_fit(p)) {
        p->first = first;
        return 0;
    }
    result = oomkit_proof_compare(p, p->first, text);
    if (result < 0 && oomkit_proof_own_error(p->call)) {
        oomkit_error_dismiss(); /* it works on other parts */
        result = 0;
    }
    if (*text == NULL) {
        p->first = first;
    }
    return result;
}

/* A part of one row has shown something else: a row alone may be taken for what it is
 * not (a score of each row for a loss). Parts of two rows at least decide then, of two
 * micro-batches, for the halves of one may agree by chance. *text (owned) as in
 * oomkit_proof_compare(). */
static int
proof_without_single(oomkit_proof *p, PyObject **text)
{
    const oomkit_slice found = {p->start, p->length};
    const int64_t first = p->first, rows = p->call->batch.rows;
    const int64_t next =
        p->start + 2 * p->length <= rows ? p->start + p->length : p->start - p->length;
    OWNED PyObject *other = NULL;
    int single = first == 1 || p->length - first == 1;

    if (p->own || !single || oomkit_proof_returns_nothing(p->call) ||
        !oomkit_proof_rows_middle(p, oomkit_unfit_multiple(p->call)) || p->first < 2 ||
        p->length - p->first < 2 || next < 0 || next + p->length > rows) {
        p->first = first;
        return 0;
    }
    if (oomkit_proof_compare(p, p->first, &other) < 0) {
        Py_CLEAR(*text);
        return -1;
    }
    if (other == NULL) {
        p->start = next;
        if (oomkit_proof_whole_again(p) < 0 ||
            oomkit_proof_compare(p, p->first, &other) < 0) {
            Py_CLEAR(*text);
            return -1;
        }
        if (other == NULL) {
            Py_CLEAR(*text);
            return 0;
        }
        p->start = found.start; /* for what is searched now */
        if (oomkit_proof_whole_again(p) < 0) {
            Py_CLEAR(*text);
            return -1;
        }
    }
    p->first = first;
    return 0;
}

/* Where they differ, as `text` (owned, taken) says: with weights that make the parts
 * the whole, wherever weights can be told apart. 1 shown, 0 split all the same (a
 * warning said so), -1. */
static int
proof_settle(oomkit_proof *p, PyObject *text)
{
    int searches, found = 0;

    for (searches = 0; text != NULL; searches++) {
        found = searches < APART && !p->no_parts && !p->own ? proof_differs(p, text)
                                                            : proof_unsettled(p, text);
        text = NULL;
        if (found <= 0) {
            return found;
        }
        if (proof_apart(p, &text) < 0) {
            return -1;
        }
    }
    return found == 0 || oomkit_search_say(p) == 0 ? 1 : -1;
}

/* The rows that a proof begins with are those that it shows; more follow where they
 * agree. */
static void
proof_shows(oomkit_proof *p)
{
    if (p->shown.length == 0) {
        p->shown = (oomkit_slice){p->start, p->length};
    }
}

/* The parts are the whole, and weights are settled. 1 or -1. */
static int
proof_proven(oomkit_proof *p)
{
    PyObject *text = /* owned, then stolen */
        PyObject_CallMethod(p->judge, "proven", "LLL", (long long)p->length,
                            (long long)p->first, (long long)(p->length - p->first));
    const int said = oomkit_proof_log(p->call, "info", text);

    Py_XDECREF(text);
    return said < 0 ? -1 : 1;
}

/* As proof_settle(). */
static int
proof_full(oomkit_proof *p)
{
    OWNED PyObject *text = NULL;

    if (oomkit_proof_rows_varied(p) < 0) {
        return -1;
    }
    proof_shows(p);
    if (oomkit_proof_whole(p) < 0 || proof_parts(p, &text) < 0 ||
        (text == NULL && proof_joins(p, &text) < 0) ||
        (text != NULL && proof_without_single(p, &text) < 0) ||
        (text == NULL && proof_elsewhere(p, &text) < 0) ||
        (text == NULL && proof_apart(p, &text) < 0)) {
        return -1;
    }
    return text != NULL ? proof_settle(p, STEAL(text)) : proof_proven(p);
}

/* Weights are to be told apart, and no micro-batch can be cut: two of them. As
 * proof_settle(). */
static int
proof_pair(oomkit_proof *p)
{
    OWNED PyObject *text = NULL;
    int found;

    p->level = oomkit_proven_find(p->call)->level; /* which it does not raise */
    p->weakly = p->call->tries.ooms > 0;
    p->first = 0; /* nothing has passed */
    found = oomkit_search_ask(p, "told_apart");
    if (found <= 0 || oomkit_proof_there(p, &text) < 0 ||
        (text == NULL && proof_apart(p, &text) < 0)) {
        return found <= 0 ? found : -1;
    }
    return proof_settle(p, STEAL(text));
}

/* Two micro-batches without a graph. As proof_settle(). */
static int
proof_weak(oomkit_proof *p)
{
    OWNED PyObject *text = NULL;
    int compared;

    p->level = OOMKIT_PROVEN_WEAKLY;
    p->weakly = 1;
    oomkit_proof_rows_two(p);
    proof_shows(p);
    compared = oomkit_proof_weakly(p, &text);
    if (compared > 0 && text == NULL && !p->no_parts && proof_apart(p, &text) < 0) {
        return -1;
    }
    return compared <= 0 ? compared : proof_settle(p, STEAL(text));
}

/* More rows than a micro-batch has: what few rows have in common with others may not
 * show. Where an error of this call says that they need not fit, with their graph in
 * host memory. 1 they were tried, as *result (see proof_settle()) says; 0 they were
 * not, or do not fit; -1. */
static int
proof_larger(oomkit_proof *p, int64_t rows, int *result)
{
    const int64_t start = p->start, length = p->length, first = p->first;
    const int64_t multiple = oomkit_unfit_multiple(p->call);
    int tried = 0;

    rows = rows < p->call->batch.rows ? rows : p->call->batch.rows;
    if (rows <= p->length) {
        return 0;
    }
    p->start = !p->anchored                             ? 0
               : p->start + rows <= p->call->batch.rows ? p->start
                                                        : p->call->batch.rows - rows;
    p->length = rows;
    p->on_host = p->call->tries.ooms > 0;
    if (oomkit_proof_rows_middle(p, multiple)) {
        if (p->first * 2 == p->length && p->length > 2 * multiple) {
            p->first += multiple;
        }
        *result = proof_full(p);
        if (*result < 0 && (length > 1 || p->on_host) &&
            oomkit_proof_own_error(p->call)) {
            oomkit_error_dismiss(); /* that size is none that the call needs */
            p->no_parts = 0;
        } else if (*result >= 0 || p->call->tries.restart != 0 ||
                   !oomkit_exception_is_oom(p->call->st)) {
            tried = 1;
        } else if (oomkit_proof_forgive(p) < 0) {
            tried = -1;
        }
    }
    p->on_host = 0;
    p->own = 0;
    if (tried == 0) {
        p->start = start;
        p->length = length;
        p->first = first;
        p->shown = (oomkit_slice){0};
        oomkit_paths_forget(p->call);
    }
    return tried;
}

/* As proof_settle(), of the largest micro-batch if it can be cut. `stands`: what was
 * shown before does, where nothing fits that can be compared with gradients. */
static int
proof_best(oomkit_proof *p, int cut, int stands)
{
    int result = -1;
    int tried =
        p->length < FEW && p->call->tries.ooms == 0 ? proof_larger(p, FEW, &result) : 0;

    if (tried == 0 && (!cut || (p->length < FEW && p->call->tries.ooms > 0))) {
        tried = proof_larger(p, p->length * 2, &result);
    }
    if (tried != 0) {
        return tried < 0 ? -1 : result;
    }
    if (cut) {
        return proof_full(p);
    }
    if (stands) {
        oomkit_proven_again(p->call);
        return 1;
    }
    return proof_weak(p);
}

/* Gradients of these rows were all 0 (they are masked): those of another micro-batch
 * need not be, and are to be shown before an update has them. As proof_settle(), which
 * has said `result`. */
static int
proof_telling(oomkit_proof *p, int result)
{
    const int64_t multiple = oomkit_unfit_multiple(p->call);
    int64_t i;

    for (i = p->cut.count - 1; result > 0 && i >= 0; i--) {
        OWNED PyObject *silent = PyObject_GetAttrString(p->judge, "is_silent");
        if (silent != Py_True) {
            return silent == NULL ? -1 : result;
        }
        p->start = p->cut.slices[i].start;
        p->length = p->cut.slices[i].length;
        if (oomkit_proof_rows_middle(p, multiple)) {
            p->own = 0;
            result = proof_full(p);
        }
    }
    return result;
}

/* What was shown a few calls ago, where a micro-batch can be cut: with gradients, for a
 * loss may have the same value with other ones, as with a factor that was a number and
 * is computed from the rows now. As proof_settle(). */
static int
proof_again_fully(oomkit_proof *p)
{
    OWNED PyObject *text = NULL;

    /* A gradient may cancel at the end of a training, to less than what rounding of the
     * others is: what has been shown is not put in doubt by that. */
    if (PyObject_SetAttrString(p->judge, "later", Py_True) == 0 &&
        oomkit_proof_rows_varied(p) == 0 && oomkit_proof_whole(p) == 0 &&
        oomkit_proof_compare(p, p->first, &text) == 0) {
        p->stands = text == NULL;
        return text == NULL ? 1 : proof_full(p);
    }
    if (p->call->tries.restart != 0 || !oomkit_exception_is_oom(p->call->st)) {
        return -1;
    }
    if (oomkit_proof_forgive(p) < 0) {
        return -1;
    }
    oomkit_proven_again(p->call); /* what was shown before stands */
    return 1;
}

/* The same where none can: by losses alone, and with gradients where those differ. As
 * proof_settle(). */
static int
proof_again(oomkit_proof *p, int cut)
{
    const int64_t start = p->start, length = p->length, first = p->first;
    PyObject *verdict;              /* owned */
    PyObject *equal, *text, *rules; /* borrowed from verdict */
    int differs = 0, raised = 0;

    if (p->length < FEW && p->call->tries.ooms == 0) {
        p->start = 0;
        p->length = FEW < p->call->batch.rows ? FEW : p->call->batch.rows;
        p->first = length < p->length ? length : first;
    } else if (!cut) {
        oomkit_proof_rows_two(p);
    }
    verdict = oomkit_verify_rows(p, p->start, p->length, p->first);
    p->start = start;
    p->length = length;
    p->first = first;
    if (verdict == NULL) {
        return -1;
    }
    if (verdict == Py_None &&
        (p->unfit || p->call->options->verify == OOMKIT_VERIFY_WARN)) {
        oomkit_proven_again(p->call);
    } else if (verdict == Py_None) {
        /* The step raised an error of its own: it needs a graph, or its parts met what
         * other rows have left. */
        raised = 1;
    } else {
        differs = PyArg_ParseTuple(verdict, "OUO", &equal, &text, &rules) &&
                  equal == Py_False;
        if (!differs && !p->moved) {
            OWNED PyObject *others =
                PyObject_GetAttrString(p->judge, "has_other_figures");
            differs = others == Py_True;
        }
    }
    Py_DECREF(verdict);
    if (PyErr_Occurred()) {
        return -1;
    }
    return differs || raised ? proof_best(p, cut, raised) : 1;
}

/* Two halves of the call's own micro-batches do not make their whole, as `text` (owned,
 * taken) and p->rules say of their losses: gradients decide if all of them fit. As
 * proof_settle(). */
static int
proof_of_halves(oomkit_proof *p, PyObject *text)
{
    const int anchored = p->anchored;
    int result;

    p->anchored = 1;
    p->on_host = p->call->tries.ooms > 0;
    result = proof_full(p);
    p->on_host = 0;
    if (result < 0 && p->call->tries.restart == 0 &&
        oomkit_exception_is_oom(p->call->st)) {
        p->weakly = 1;
        result = oomkit_proof_forgive(p) < 0 ? -1 : proof_settle(p, Py_NewRef(text));
    }
    p->anchored = anchored;
    Py_DECREF(text);
    return result;
}

/* What was shown of some rows may be so by chance: a loss that is divided by how many
 * rows count (positives, a mask that the step makes) is that of its parts wherever as
 * many count in each. Where the losses of halves make those of the whole, down to the
 * micro-batches, it is so in this call. At most `most` wholes are compared, the largest
 * that fit first, and again from the first one where one of them leads to other
 * weights; where none fits, some micro-batches are shown as the first one was. As
 * proof_settle(), which has said `result`. */
static int
proof_halves(oomkit_proof *p, int result, int most)
{
    const oomkit_proof was = *p;
    const int all = most;
    int i, others = 0;

    for (i = 0; result > 0 && !p->own && !p->moved && most > 0; i++) {
        const PyObject *rule = p->rule; /* borrowed, only compared */
        PyObject *equal, *text, *rules; /* borrowed from verdict */
        OWNED PyObject *verdict = NULL;
        int found = oomkit_proof_rows_halves(p, i);
        if (found <= 0) {
            if (found < 0) {
                break;
            }
            continue;
        }
        verdict = oomkit_verify_rows(p, p->start, p->length, p->first);
        if (verdict == NULL) {
            return -1;
        }
        if (verdict == Py_None) { /* nothing to compare, or it does not fit */
            i = p->unfit ? oomkit_proof_rows_level_end(i) : i;
            continue;
        }
        if (!PyArg_ParseTuple(verdict, "OUO", &equal, &text, &rules)) {
            return -1;
        }
        most--;
        if (equal != Py_False || p->moved) { /* random numbers show nothing exact */
            continue;
        }
        Py_XSETREF(p->rules, Py_NewRef(rules));
        result = proof_of_halves(p, Py_NewRef(text));
        if (result > 0 && p->rule != rule) {
            if (others++ == APART) {
                return proof_unsettled(p, Py_NewRef(text));
            }
            i = -1;
            most = HALVES;
        }
    }
    for (i = 1; i <= OTHERS && i < p->cut.count && all == most && p->unfit; i++) {
        p->start = p->cut.slices[p->cut.count - i].start; /* the first was shown */
        p->length = p->cut.slices[p->cut.count - i].length;
        result =
            result > 0 && oomkit_proof_rows_middle(p, oomkit_unfit_multiple(p->call))
                ? proof_full(p)
                : result;
    }
    p->start = was.start;
    p->length = was.length;
    p->first = was.first;
    return result;
}

/* Two micro-batches, and each of them, with their graph in host memory. 1 or 0 as
 * proof_settle(); 2 where they do not fit or work; -1. */
static int
proof_two(oomkit_proof *p)
{
    const oomkit_slice own = {p->start, p->length};
    OWNED PyObject *text = NULL;
    int result;

    oomkit_proof_rows_two(p);
    p->on_host = p->call->tries.ooms > 0;
    result = oomkit_proof_whole(p) < 0 ? -1 : oomkit_proof_compare(p, p->first, &text);
    p->on_host = 0;
    if (result == 0) {
        proof_shows(p);
        return text == NULL ? proof_proven(p) : proof_settle(p, STEAL(text));
    }
    if (oomkit_proof_own_error(p->call)) {
        oomkit_error_dismiss();
    } else if (p->call->tries.restart != 0 || !oomkit_exception_is_oom(p->call->st) ||
               oomkit_proof_forgive(p) < 0) {
        return -1;
    }
    p->start = own.start;
    p->length = own.length;
    return 2;
}

/* The step cannot work on any part of a micro-batch, as the exception in flight says,
 * but on two of them. Where those cannot be compared, that is what is wrong. */
static int
proof_no_parts(oomkit_proof *p)
{
    oomkit_call *call = p->call;
    PyObject *exception = oomkit_exception_take(); /* owned, or given back */
    const int raised = call->refused.raised, parked = call->tries.parked;
    int result = proof_two(p);

    if (result == 2) {
        result = proof_weak(p);
        if (result < 0 && p->raises && call->tries.restart == 0) {
            oomkit_exception_discard(call->st, oomkit_exception_take());
            call->refused.raised = raised;
            call->tries.parked = parked;
            oomkit_exception_give(exception);
            return -1;
        }
    }
    Py_DECREF(exception);
    return result;
}

/* With numbers that Python or numpy draws the same step may choose rows another time:
 * other ones are tried. *text (owned) as in oomkit_proof_compare(). 0 or -1. */
static int
training_draws(oomkit_proof *p, PyObject **text)
{
    OWNED PyObject *drawn = PyObject_GetAttrString(p->draws, "drawn_beside");
    int turn, result = drawn == NULL ? -1 : 0;

    if (p->numbers != OOMKIT_NUMBERS_SAME || !oomkit_proof_rows_fit(p) ||
        p->level == OOMKIT_PROVEN_WEAKLY) {
        return result;
    }
    for (turn = 1;
         drawn == Py_True && result == 0 && *text == NULL && turn < OOMKIT_TURNS;
         turn++) {
        p->draw = turn; /* parts are given what the whole draws */
        result = oomkit_proof_whole(p);
        p->draw = 0;
        result = result < 0 ? -1 : oomkit_proof_compare(p, p->first, text);
    }
    return result;
}

/* What one micro-batch does not show, or this call's numbers, or eval mode, where
 * numbers that no part can be given were left out. As proof_settle(), which has said
 * `result`.
 */
static int
proof_further(oomkit_proof *p, int result, int (*runs)(oomkit_proof *, PyObject **))
{
    OWNED PyObject *text = NULL;

    if (result <= 0 || p->own) {
        return result;
    }
    if (runs(p, &text) >= 0) {
        return text == NULL ? result : proof_unsettled(p, STEAL(text));
    }
    if (oomkit_proof_own_error(p->call)) {
        oomkit_error_dismiss(); /* it does not work on these rows, which are no more */
        return result;
    }
    return p->call->tries.restart == 0 && oomkit_exception_is_oom(p->call->st) &&
                   oomkit_proof_forgive(p) == 0
               ? result
               : -1;
}

/* Autocast leaves gradients known to some per cent: the same without it, where the step
 * works so and has room for it. As proof_settle(), which has said `result`. */
static int
proof_exactly(oomkit_proof *p, int result)
{
    OWNED PyObject *text = NULL, *begun = NULL;
    int runs = -1;

    if (result <= 0 || p->own || p->level == OOMKIT_PROVEN_WEAKLY ||
        !oomkit_proof_rows_fit(p)) {
        return result;
    }
    begun = PyObject_CallMethod(p->judge, "exactly", NULL);
    if (begun != Py_True) {
        return begun == NULL ? -1 : result;
    }
    p->on_host = p->call->tries.ooms > 0;
    if (oomkit_proof_whole(p) == 0) {
        runs = oomkit_proof_compare(p, p->first, &text);
    }
    p->on_host = 0;
    if (runs == 0 && text != NULL) {
        result = proof_settle(p, STEAL(text));
    } else if (runs < 0 && oomkit_proof_own_error(p->call)) {
        oomkit_error_dismiss(); /* kernels of half precision alone */
    } else if (runs < 0 &&
               (p->call->tries.restart != 0 || !oomkit_exception_is_oom(p->call->st) ||
                oomkit_proof_forgive(p) < 0)) {
        result = -1;
    }
    return oomkit_proof_coarsely(p) < 0 ? -1 : result;
}

/* All runs of it. As proof_settle(). */
static int
prove_by_runs(oomkit_proof *p, int wanted, int cut, int pair)
{
    int result = oomkit_proof_aside(p) < 0 || oomkit_proof_judge(p) < 0 ? -1
                 : pair                                                 ? proof_pair(p)
                 : wanted == OOMKIT_PROOF_LOSSES
                     ? (cut && p->call->options->verify != OOMKIT_VERIFY_WARN
                            ? proof_again_fully(p)
                            : proof_again(p, cut))
                     : proof_telling(p, proof_best(p, cut, 0));

    if (result < 0 && p->no_parts) {
        result = proof_no_parts(p);
    }
    result = proof_exactly(p, proof_further(p, result, training_draws));
    if (!pair && (wanted != OOMKIT_PROOF_LOSSES ||
                  p->call->options->verify != OOMKIT_VERIFY_WARN)) {
        result = proof_halves(p, result,
                              wanted == OOMKIT_PROOF_LOSSES ? HALVES_AGAIN : HALVES);
    }
    if (!p->stands) { /* with weights settled */
        result = proof_further(p, result, oomkit_proof_dealt);
    }
    return result >= 0 && oomkit_ranks_proof_ends(p->call) < 0 ? -1 : result;
}

/* What was shown stays with the site, and the rows with the call: those that were to be
 * shown, too, where fewer were tried. 0 or -1. */
static int
prove_note(oomkit_proof *p, oomkit_slice own)
{
    oomkit_call *call = p->call;

    if (oomkit_proof_judge_level(p) < 0 || oomkit_proof_figures(p) < 0) {
        return -1;
    }
    if (p->sequence != 0 || p->level == OOMKIT_PROVEN_WEAKLY) {
        if ((p->anchored && oomkit_paths_prove(call, own) < 0) ||
            (p->shown.length > 0 && oomkit_paths_prove(call, p->shown) < 0)) {
            return -1;
        }
    }
    if (oomkit_proven_note(call, Py_XNewRef(p->rule),
                           PyObject_GetAttrString(p->judge, "tried"), p->sequence,
                           p->level) < 0) {
        return -1;
    }
    oomkit_proven_find(call)->draws = p->numbers == OOMKIT_NUMBERS_SAME;
    return 0;
}

/* As oomkit_prove(). */
static int
prove(oomkit_call *call)
{
    oomkit_proof p = {.call = call};
    PyObject *exception; /* owned, given back */
    const oomkit_proven *known;
    oomkit_slice own;
    int cut, wanted, result, phase, pair;

    if ((wanted = oomkit_proof_wanted(call)) <= 0) {
        return wanted;
    }
    cut = oomkit_proof_rows_largest(&p);
    own = (oomkit_slice){p.start, p.length};
    p.fits = p.length;
    known = oomkit_proven_find(call);
    pair = !cut && wanted != OOMKIT_PROOF_LOSSES && known != NULL &&
           known->level != OOMKIT_PROVEN_NOT && known->level != OOMKIT_PROVEN_HERE;
    if (pair && wanted != OOMKIT_PROOF_WEIGHTS) {
        return 0;
    }
    result = oomkit_batch_moved(call->st, &call->batch);
    if (result != 0) {
        return result < 0 ? -1 : 0;
    }
    if (oomkit_ranks_proof_begins(call) < 0) {
        return -1;
    }
    phase = oomkit_phase_set(call->st, OOMKIT_PHASE_FORWARD);
    p.level = OOMKIT_PROVEN_FULLY;
    result = prove_by_runs(&p, wanted, cut, pair);
    exception = result < 0 ? oomkit_exception_take() : NULL;
    oomkit_proof_loud(&p);
    if (oomkit_proof_back(&p) < 0) {
        if (exception != NULL) {
            oomkit_error_beside(call->st, call->given.func);
        }
        result = -1;
    }
    if (result >= 0) {
        result = prove_note(&p, own);
    }
    if (exception != NULL && wanted > 1 &&
        PyErr_GivenExceptionMatches(exception, call->st->SplitError)) {
        oomkit_proven_forget(call);
    }
    oomkit_proof_clear(&p);
    oomkit_phase_set(call->st, phase);
    if (exception != NULL) {
        oomkit_exception_give(exception);
    }
    return result < 0 ? -1 : 0;
}

int
oomkit_prove(oomkit_call *call)
{
    int result = prove(call);

    if (result == 0 && oomkit_paths_begin(call) < 0) {
        return -1;
    }
    if (call->batch.ambiguous != NULL && call->proof == NULL && call->split &&
        !call->cut->forced && call->cut->at == 0 &&
        (result < 0 || !oomkit_proof_known(call))) {
        return oomkit_proof_ambiguous(call);
    }
    return result;
}
