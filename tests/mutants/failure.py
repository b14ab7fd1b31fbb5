"""Invariants between failure and retry: what is retried, and what the failure leaves behind."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = [
    Mutant(
        "exception-alive-in-the-replay",
        "the exception, its frames and their tensors are gone before the replay begins",
        "csrc/engine/recover.c",
        "    oomkit_exception_discard(st, exception);\n    oomkit_phase_set",
        "    static PyObject *late; /* until the next one */\n    Py_XSETREF(late, exception);\n"
        "    oomkit_phase_set",
        ("engine/test_steps.py::test_replay_sees_nothing_of_the_failed_attempt",),
    ),
    Mutant(
        "frames-not-cleared",
        "the locals of frames that somebody else holds are cleared",
        "csrc/py/discard.c",
        "        if (!list_has_frame(kept, frame)) {",
        "        if (0) {",
        ("errors/test_drop.py::test_nothing_outlives_a_dropped_exception",),
    ),
    Mutant(
        "callers-exception-stripped",
        "an exception that the caller is handling keeps its traceback and its frames",
        "csrc/py/discard.c",
        "    list_collect(&kept, keep, NULL);\n    list_collect(&gone, exception, &kept);",
        "    (void)keep;\n    list_collect(&kept, NULL, NULL);\n"
        "    list_collect(&gone, exception, &kept);",
        ("errors/test_drop.py::test_what_the_caller_is_handling_keeps_everything",),
    ),
    Mutant(
        "stored-exceptions-stay",
        "exceptions that are attributes of the dropped one (.inner_exception) are dropped too",
        "csrc/py/discard.c",
        "        list_add(list, value, kept);\n    }",
        "        ;\n    }",
        ("errors/test_drop.py::test_nothing_outlives_a_dropped_exception",),
    ),
    Mutant(
        "generators-closed",
        "a generator that only paused goes on after the failure",
        "csrc/py/discard.c",
        "    if (generator != NULL) {\n",
        "    if (0) {\n",
        ("errors/test_drop.py::test_a_generator_that_paused_goes_on",),
    ),
    Mutant(
        "no-drain",
        "the graph that a failed CPU backward left queued is gone before the replay",
        "csrc/undo/rollback.c",
        "    if (result == 0 && call->backward.queued) {",
        "    if (0) {",
        ("leaks/test_leaks.py::test_nothing_of_a_failed_backward_stays_queued",),
    ),
    Mutant(
        "no-collection",
        "cycles of the failed attempt are collected before the replay, when bytes are alive",
        "csrc/device/reclaim.c",
        "before != OOMKIT_UNKNOWN && now > before;",
        "before != OOMKIT_UNKNOWN && 0;",
        ("engine/test_judged.py::test_cycles_of_the_failed_attempt_are_gone_before_the_retry",),
    ),
    Mutant(
        "no-cache-flush",
        "the allocator's cache is emptied before the replay",
        "csrc/device/reclaim.c",
        "         clear_workspaces(st, device, &workspaces) < 0) ||\n"
        "        oomkit_device_empty_cache(st, device) < 0) {",
        "         clear_workspaces(st, device, &workspaces) < 0)) {",
        (
            "bridge/test_without_bridge.py::"
            "test_the_allocators_cache_is_emptied_once_before_the_retry",
        ),
    ),
    Mutant(
        "autocast-cache-stays",
        "autocast's cache of weights is empty before the replay",
        "csrc/engine/recover.c",
        "PyObject *done = PyObject_CallNoArgs(st->clear_autocast_cache);",
        "PyObject *done = Py_NewRef(Py_None);",
        ("engine/test_judged.py::test_weights_that_autocast_has_kept_are_gone_before_the_retry",),
    ),
    Mutant(
        "interrupt-takes-nothing-back",
        "an interrupt in a split call takes the step back",
        "csrc/engine/passthrough.c",
        "    if ((call->split || call->tries.ooms > 0 || interrupted) &&",
        "    if ((call->tries.ooms > 0 || interrupted) && !interrupted &&",
        ("accum/test_once_changes.py::test_a_keyboard_interrupt_rolls_back_and_passes",),
    ),
    Mutant(
        "interrupt-swallowed",
        "an interrupt while everything is taken back is raised when that is done",
        "csrc/undo/rollback.c",
        "    if (result >= 0 && *error != NULL && is_oom(st, *error)) {",
        "    if (result >= 0 && *error != NULL) {",
        (
            "undo/test_recovery_faults.py::"
            "test_an_exception_while_rolling_back_passes_when_all_is_back",
        ),
    ),
    Mutant(
        "small-error-keeps-its-half",
        "another error in a later micro-batch takes the earlier ones back",
        "csrc/engine/passthrough.c",
        "    if ((call->split || call->tries.ooms > 0 || interrupted) &&",
        "    if (interrupted &&",
        (
            "accum/test_once_decisions.py::"
            "test_an_error_of_the_step_passes_with_a_note_and_everything_back",
        ),
    ),
    Mutant(
        "any-group-is-oom",
        "a group of exceptions is out-of-memory only when all of it is",
        "csrc/py/oom_error.c",
        "    return severity[one] >= severity[two] ? one : two;",
        "    return severity[one] <= severity[two] ? one : two;",
        ("core/test_classifier.py",),
    ),
    Mutant(
        "look-alikes-are-oom",
        "a message that only quotes bad_alloc is not out-of-memory",
        "csrc/core/classify.c",
        '    {"std::bad_alloc", AT_END_OF_WORD, OOMKIT_CLASS_CERTAIN},',
        '    {"std::bad_alloc", NULL, OOMKIT_CLASS_CERTAIN},',
        ("core/test_core.py::test_core[classify]",),
    ),
    Mutant(
        "any-type-is-oom",
        "an exception whose type is never out-of-memory may say what it likes",
        "csrc/py/oom_error.c",
        "    return exception_is_wrapper(st, exception) ? OOMKIT_EXCEPTION_RUNTIME\n",
        "    return st != NULL ? OOMKIT_EXCEPTION_RUNTIME\n",
        ("core/test_classifier.py::test_a_type_that_is_never_out_of_memory_may_quote_it",),
    ),
    Mutant(
        "sticky-retried",
        "an error that leaves the device unusable is not retried",
        "csrc/engine/driver.c",
        "class_ == OOMKIT_CLASS_CERTAIN ||",
        "class_ == OOMKIT_CLASS_CERTAIN || class_ == OOMKIT_CLASS_STICKY ||",
        ("engine/test_judged.py::test_what_a_retry_cannot_help_passes_as_it_came",),
    ),
    Mutant(
        "never-retried",
        "a dead communicator, and our own OutOfMemory from inside, are not retried",
        "csrc/engine/driver.c",
        "class_ == OOMKIT_CLASS_CERTAIN ||",
        "class_ == OOMKIT_CLASS_CERTAIN || class_ == OOMKIT_CLASS_NEVER ||",
        (
            "engine/test_judged.py::test_what_a_retry_cannot_help_passes_as_it_came",
            "engine/test_judged.py::test_our_own_out_of_memory_from_inside_is_not_tried_again",
        ),
    ),
    Mutant(
        "masked-retried-for-ever",
        "an error that may hide an out-of-memory is retried twice, not more",
        "csrc/engine/driver.c",
        "(class_ == OOMKIT_CLASS_MASKED && ooms <= MASKED_RETRIES);",
        "class_ == OOMKIT_CLASS_MASKED;",
        ("engine/test_judged.py::test_and_passes_with_everything_back_when_it_comes_a_third_time",),
    ),
    Mutant(
        "retried-under-distribution",
        "where a replay would be wrong (DDP, FSDP, graph capture) nothing is retried",
        "csrc/engine/recover.c",
        "                   (call->refused.why == NULL &&\n"
        "                    oomkit_refusal(call, &call->refused.why) < 0) ||\n",
        "",
        ("call/test_surroundings.py::test_more_than_one_rank",),
    ),
    Mutant(
        "never-exhausted",
        "at the smallest micro-batch there is an error that tells what was tried",
        "csrc/core/plan.c",
        "        *reason = OOMKIT_REASON_EXHAUSTED;\n        return OOMKIT_EREFUSED;",
        "        next = *failed;",
        ("core/test_core.py::test_core[plan]",),
    ),
    Mutant(
        "first-oom-of-many",
        "out-of-memory errors before anything has worked make the micro-batch a quarter",
        "csrc/core/plan.c",
        "    factor = known->successes == 0 && known->failures > 1 ? 4 : 2;",
        "    factor = 2;",
        ("sizes/test_planner.py::test_further_ooms_before_any_success_quadruple",),
    ),
    Mutant(
        "memory-that-lacks-is-no-bridge",
        "an import that lacks memory to try out the bridge fails, and a later one has the bridge",
        "csrc/py/state.c",
        "    if (PyErr_ExceptionMatches(PyExc_MemoryError) ||\n",
        "    if ((0 && PyErr_ExceptionMatches(PyExc_MemoryError)) ||\n",
        ("nomemory/test_nomemory.py::test_an_import_that_lacks_memory_for_the_bridge_fails",),
    ),
    Mutant(
        "half-the-errors-are-all",
        "an import that failed while the errors were made can be repeated",
        "csrc/module/module.c",
        "st->OomkitWarning == NULL && oomkit_errors_init(st) < 0",
        "st->OutOfMemory == NULL && oomkit_errors_init(st) < 0",
        (
            "nomemory/test_nomemory.py::"
            "test_an_import_that_fails_while_errors_are_made_can_be_repeated",
        ),
    ),
    Mutant(
        "a-frame-without-memory-is-the-last",
        "a frame whose object cannot be made is an error, not the end of the stack",
        "csrc/loop/handout.c",
        "    if (frame == NULL && PyErr_Occurred()) {",
        "    if (0) {",
        (
            "nomemory/test_nomemory.py::"
            "test_a_frame_without_memory_for_its_object_is_not_the_outermost",
        ),
    ),
    Mutant(
        "first-split-not-doubted",
        "after an error in a step's first split its next call begins whole",
        "csrc/sizes/shapes.c",
        "if (entry != NULL && entry->known.k <= 1) {",
        "if (0) {",
        (
            "engine/test_split_errors.py"
            "::test_after_an_error_in_the_first_split_a_call_begins_whole",
        ),
    ),
    Mutant(
        "unsplittable-not-tried-whole",
        "arguments that cannot be split are passed whole where the call fits",
        "csrc/engine/whole.c",
        "        PyErr_Clear(); /* said again if it must be */\n",
        "        return -1;\n",
        (
            "engine/test_split_errors.py"
            "::test_arguments_that_could_not_be_split_are_passed_whole_where_they_fit",
        ),
    ),
]
