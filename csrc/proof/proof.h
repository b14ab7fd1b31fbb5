/* The proof of a split: before a call is split for the first time the rows of one
 * micro-batch are run whole and then in two parts, by the machinery of the real call
 * with updates held back, and what both show is compared. */
#ifndef OOMKIT_PROOF_PROOF_H
#define OOMKIT_PROOF_PROOF_H

#include "../call/events.h"
#include "../call/proven.h"
#include "../engine/engine.h"
#include "../hook/method.h"

typedef struct oomkit_proof_gradient oomkit_proof_gradient;

/* Random numbers that a step draws although modules of chance are in eval mode. */
typedef enum oomkit_numbers {
    OOMKIT_NUMBERS_NONE,  /* none have been seen */
    OOMKIT_NUMBERS_SAME,  /* parts get those that their rows have in the whole */
    OOMKIT_NUMBERS_OTHER, /* some cannot be given: as near as chance lets, then ... */
    OOMKIT_NUMBERS_QUIET, /* ... exactly, with every module in eval mode */
    OOMKIT_NUMBERS_CHANCE /* ... or not, for they are drawn there, too */
} oomkit_numbers;

/* Sets of random numbers that are tried, the call's among them. */
#define OOMKIT_TURNS 3

/* Graphs of several micro-batches are, too. */
#define OOMKIT_ALL_ON_HOST 2

/* A proof in progress; on the C stack of oomkit_prove(). */
typedef struct oomkit_proof {
    oomkit_call *call;
    PyObject *judge;          /* owned: _proof.Proof */
    PyObject *quieted;        /* owned: its list of what oomkit_proof_loud() puts
                                 back */
    PyObject *draws;          /* owned: its _proof.Draws */
    PyObject *around;         /* owned: its _proof.Around */
    PyObject *rule;           /* owned: weights on trial, or NULL */
    PyObject *rules;          /* owned: that a weak comparison lacked, or NULL */
    oomkit_proof_level level; /* of what is shown in the end */
    int weakly;               /* rows that need not fit are run without a graph */
    int on_host;              /* the graph of a whole run is kept in host memory, or
                                 OOMKIT_ALL_ON_HOST */
    int around_host;          /* ... of this run, by `around` */
    int own;                  /* these rows were cut as the call's own, no other way */
    int stands;               /* rows of a later call show what others have shown */
    int no_parts;             /* the step raises errors of its own on any part */
    int unsplit;              /* runs are those of whole calls, but for their updates */
    int draw;                 /* the next run is to have other random numbers: which */
    PyObject *dealt;          /* owned: _proof.Dealt while micro-batches run, or NULL */
    oomkit_numbers numbers;   /* that the step draws */
    int everything;           /* every module is in eval, not those of chance alone */
    int by_chance;            /* numbers are drawn all the same: compared coarsely */
    int moved;                /* ... in the last run without a graph */
    int drew;                 /* ... in the last whole run */
    int unfit;                /* which has run out of memory */
    int raises;               /* ... or raised another error, */
    PyObject *raised;         /* owned: which says this, or NULL */
    int trained;              /* a backward was seen */
    int unjoined;             /* results of parts of one row could not be joined */
    uint64_t sequence;        /* of the events of the whole run */
    int64_t start, length, first;
    int64_t fits;       /* rows of the largest micro-batch */
    int anchored;       /* these rows are to be shown, no others */
    oomkit_slice shown; /* the first rows that were looked at */
    /* the call's own, aside while the proof runs */
    oomkit_options options; /* a copy; its references are the call's */
    const oomkit_options *own_options;
    oomkit_grads grads;
    struct oomkit_proof_gradient *gradients; /* owned: of the parameters, at entry */
    Py_ssize_t gradient_count;
    uint8_t *moving;         /* owned: parts->moving as it was, */
    Py_ssize_t moving_count; /* of so many */
    oomkit_cut_own cut;
    PyObject *flags; /* owned */
    oomkit_join join;
    int saved; /* the batch's values were copied for the proof */
} oomkit_proof;

/* What happens in a call concerns (call/events.h): */
extern const oomkit_rule oomkit_proof_of_split_rule;

/* --- proof.c --- */

/* Before the micro-batches of an attempt. 0 go on; -1 with an exception: SplitError
 * where a part is not what it is in the whole, or what the step raised; everything is
 * as it was at the begin of the attempt. */
int
oomkit_prove(oomkit_call *call);
/* See step_repeats in call/events.h. Runs Python code. */
int
oomkit_proof_repeats(oomkit_call *call, int runs, PyObject **why);
/* Where it is the whole batch that begins again: OutOfMemory, or the refusal that
 * stands, if it would not do the same. 0 or -1. */
int
oomkit_repeats_before_retry(oomkit_call *call);

/* A line of the log. Steals nothing; `text` may be NULL with an exception. 0 or -1. */
int
oomkit_proof_log(oomkit_call *call, const char *level, PyObject *text);

extern PyMethodDef oomkit_proof_methods[];

/* --- weights_search.c --- */

/* Asks judge.method(leaves, rule, ..., slices) for a place. 1, 0 or -1. */
int
oomkit_search_ask(oomkit_proof *p, const char *method);

/* The rules that make this cut's parts the whole, also where they must not be used. New
 * list or NULL. */
PyObject *
oomkit_search_rules(oomkit_proof *p);

/* Which of these weights make the parts the whole: p->rule. Those that do not are taken
 * from the list; *text (owned) is then what differs with the likeliest, with which
 * gradients do not. 1, 0 or -1. */
int
oomkit_search_try(oomkit_proof *p, PyObject *rules, PyObject **text);

/* A line that says which. 0 or -1. */
int
oomkit_search_say(oomkit_proof *p);

/* Are these rows compared without a graph? */
int
oomkit_proof_is_weak(const oomkit_proof *p);

/* These rows and their parts without a graph. What that shows, or that nothing could
 * be shown, is logged. *text (owned) as in oomkit_proof_compare(), with weights that
 * would make them equal in p->rules. 1, 0 where nothing could be compared, -1. */
int
oomkit_proof_weakly(oomkit_proof *p, PyObject **text);

/* Whole and parts at a place that tells weights apart. Two micro-batches need not fit:
 * then without a graph. *text (owned) as in oomkit_proof_compare(). 0 or -1. */
int
oomkit_proof_there(oomkit_proof *p, PyObject **text);

/* --- observe.c: what a run of a proof sees. 0 or -1 --- */
/* Does the step train, and its caller run no backward of what it returns? */
int
oomkit_proof_returns_nothing(const oomkit_call *call);
int
oomkit_proof_joined(oomkit_call *call);
/* A number for each parameter that changes when one is written to, through `.data`,
 * too. New list; None where it is to be looked at in Python; NULL. */
PyObject *
oomkit_proof_marks(const oomkit_call *call);
int
oomkit_proof_finish(oomkit_proof *p);
/* --- rows.c: start, length and first of *p --- */

/* Is it a cut? */
int
oomkit_proof_rows_fit(const oomkit_proof *p);

/* In the middle, as near as the multiple lets it. 1, or 0 when it cannot be cut. */
int
oomkit_proof_rows_middle(oomkit_proof *p, int64_t multiple);

/* In two parts of even length, for a step that works on such alone. */
int
oomkit_proof_rows_even(oomkit_proof *p);

/* The micro-batch that does what no proof has seen, else the largest, and where it is
 * cut: off its middle, so that a part's share is not one over the number of parts, and
 * pairs and ranks are others. */
int
oomkit_proof_rows_largest(oomkit_proof *p);

/* No micro-batch can be cut: two of them. */
void
oomkit_proof_rows_two(oomkit_proof *p);

/* Halves of the call's own micro-batches: number 0 of all, 1 and 2 of each half, 3 to 6
 * of each quarter. 1; 0 where there are not two; -1 where no later number has two. */
int
oomkit_proof_rows_halves(oomkit_proof *p, int number);

/* The last number that is of as few as this one. */
int
oomkit_proof_rows_level_end(int number);

/* So many rows where their labels differ, if anywhere. 0 or -1. */
int
oomkit_proof_rows_varied(oomkit_proof *p);

/* --- compare.c --- */

/* The whole slice as the program would run it, but for modules of chance: where numbers
 * are drawn all the same, as p->numbers says, or for the first time so that they are
 * kept for its parts. 0 or -1. */
int
oomkit_proof_whole(oomkit_proof *p);

/* The whole slice, with modules of chance in eval, or every module. *moved: numbers
 * were drawn all the same. 0 or -1. */
int
oomkit_proof_whole_once(oomkit_proof *p, int everything, int *moved);

/* The same in the way in which it ran last. 0 or -1. */
int
oomkit_proof_whole_again(oomkit_proof *p);

/* The rows whole and in two parts, the first of `first` rows, compared. *text (owned)
 * is what differs, NULL for nothing. 0 or -1. */
int
oomkit_proof_compare(oomkit_proof *p, int64_t first, PyObject **text);

/* The same with these parts: the call's own micro-batches, where the whole batch ran.
 */
int
oomkit_proof_compare_with(oomkit_proof *p, const oomkit_slice *cut, int64_t count,
                          PyObject **text);
int
oomkit_proof_covers(const oomkit_proof *p);

/* Have parts got all numbers of the whole, where they were to? `drawn`: they drew
 * others. 1, 0 or -1. */
int
oomkit_proof_kept(oomkit_proof *p, int drawn);

/* What is to be done where they have not, or where they differ: see Draws.after(). -1
 * with an exception. */
int
oomkit_proof_after(oomkit_proof *p, int kept);

/* Numbers that no part can be given are drawn in eval mode, too. Do they hide what a
 * split may make of the step? `by_chance`: a coarse comparison has passed. *text
 * (owned) says so, NULL if not. 0 or -1. */
int
oomkit_proof_hidden(oomkit_proof *p, int by_chance, PyObject **text);

/* The step has raised an error of its own, which is in flight, on parts of these rows:
 * on any, or because of numbers that they were given? Then *text says so, and 0 is
 * returned. Else -1, with that error. */
int
oomkit_proof_raises(oomkit_proof *p, PyObject **text);
/* The exception in flight is out of memory, in rows that need not fit: it goes, and
 * what it held. 0 or -1. */
int
oomkit_proof_forgive(oomkit_proof *p);
/* Was that the step's own error, which another size may not raise? */
int
oomkit_proof_own_error(const oomkit_call *call);

/* --- judge.c: 0 or -1 --- */

/* Who judges. */
int
oomkit_proof_judge(oomkit_proof *p);
/* Lets go of what a proof has. */
void
oomkit_proof_clear(oomkit_proof *p);
/* What was shown of numbers in the results stays with the site. */
int
oomkit_proof_figures(oomkit_proof *p);
/* Gradients that are all 0, or not finite, are the same whatever they are made of:
 * nothing was shown of the next batch. */
int
oomkit_proof_judge_level(oomkit_proof *p);

/* A batch that was read in one of two ways, and that way is not shown to be exact:
 * refused as if it had not been tried. -1. */
int
oomkit_proof_ambiguous(oomkit_call *call);

/* --- dealt_rows.c --- */

/* All micro-batches of the call, and the same where its rows are dealt to them in
 * another way; where numbers were left out for the proof, in training mode. *text
 * (owned) is what differs then, NULL for nothing. 1; 0 where that cannot be compared;
 * -1. */
int
oomkit_proof_dealt(oomkit_proof *p, PyObject **text);

/* --- without_graph.c --- */

/* Where no micro-batch can be cut: `length` rows from `start` and their two parts
 * without a graph, by losses and results alone. New reference to (equal, text, weights
 * that would make them equal), None when there was nothing to compare, NULL with an
 * exception. */
PyObject *
oomkit_verify_rows(oomkit_proof *p, int64_t start, int64_t length, int64_t first);

/* --- flows.c: functions of the module --- */
PyObject *
oomkit_proof_flow_hook(PyObject *module, PyObject *args);
PyObject *
oomkit_proof_own_hooks(PyObject *module, PyObject *count);

/* --- module_hints.c: functions of the module --- */
PyObject *
oomkit_proof_modules_of(PyObject *module, PyObject *roots);
PyObject *
oomkit_proof_label_hints(PyObject *module, PyObject *args);
PyObject *
oomkit_proof_label_range(PyObject *module, PyObject *tensor);

/* --- entry_gradients.c: those that were there. Values: new list or NULL --- */
int
oomkit_proof_gradients_take(oomkit_proof *p);
int
oomkit_proof_gradients_back(oomkit_proof *p);
PyObject *
oomkit_proof_gradients_values(const oomkit_proof *p);
void
oomkit_proof_gradients_free(oomkit_proof *p);

/* --- run.c --- */

/* The call's own state aside, and back again: then an attempt has begun, and nothing of
 * it has happened. 0 or -1; the second keeps an exception in flight. */
int
oomkit_proof_aside(oomkit_proof *p);
int
oomkit_proof_back(oomkit_proof *p);

/* object.method(), with an exception in flight, which stays. 0 or -1. */
int
oomkit_proof_ask(const oomkit_proof *p, PyObject *object, const char *method);

/* Modules are in the mode that they were in before the proof. */
void
oomkit_proof_loud(oomkit_proof *p);

/* One run of `name`, whole or in two parts (cut[0 .. count)); everything is put back.
 * *moved (may be NULL) tells whether random numbers were drawn. 0, or -1 with what the
 * step raised. */
int
oomkit_proof_run(oomkit_proof *p, const char *name, const oomkit_slice *cut,
                 int64_t count, int *moved);

/* Were random numbers drawn that no part can be given? 1, 0 or -1. */
int
oomkit_proof_drew(oomkit_proof *p);

/* Before the slices of a run: matrix products in full precision, and parts get the
 * numbers of the whole. 0 or -1. */
int
oomkit_proof_run_enter(oomkit_proof *p);

/* After them. An exception in flight stays. 0 or -1. */
int
oomkit_proof_run_leave(oomkit_proof *p);

/* With autocast again. The same. */
int
oomkit_proof_coarsely(oomkit_proof *p);

/* Puts everything back after a run. Keeps the exception in flight. 0, or -1 with one.
 */
int
oomkit_proof_put_back(oomkit_proof *p);

/* --- terms.c --- */

/* The gradients that a program gives its roots. Those of ones, which torch makes where
 * there is none and nothing else has, are None: to read them is to wait for a device.
 * New tuple or NULL. */
PyObject *
oomkit_terms_given(PyObject *gradients);
/* A backward of a micro-batch begins. 0 or -1. */
int
oomkit_terms_note(oomkit_call *call, const oomkit_backward *backward);
/* At the end of the last micro-batch, or before its update: 1 where another proof is to
 * tell of terms, with which the attempt begins again; 0, or -1 with SplitError. */
int
oomkit_terms_are_new(oomkit_call *call);

#endif
