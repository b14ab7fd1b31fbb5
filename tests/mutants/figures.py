"""Invariants of figures and instruments: plans, budget, peaks, faults; and of Python code."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = [
    Mutant(
        "failed-size-again",
        "a size that failed is not planned again while the room is the same",
        "csrc/core/plan.c",
        "    if (bound->smallest_failed != 0 && rows >= bound->smallest_failed &&\n"
        "        !room_has_grown",
        "    if (0 &&\n        !room_has_grown",
        ("test_core.py::test_core[plan]", "test_core.py::test_core[knowledge]"),
    ),
    Mutant(
        "worked-with-more-room",
        "a size that worked is believed only while there is as much room as then",
        "csrc/core/plan.c",
        "    if (rows <= bound->largest_ok && oomkit_room_enough(room, bound->ok_room)) {",
        "    if (rows <= bound->largest_ok) {",
        ("test_core.py::test_core[plan]", "test_core.py::test_core[knowledge]"),
    ),
    Mutant(
        "grows-at-once",
        "a size that was given up is left alone for longer each time",
        "csrc/core/plan.c",
        "    return known->late == 0 || known->healthy >= UINT32_C(8) << doublings ||\n"
        "           (failed && grown);",
        "    return (int)doublings >= 0 && (failed | grown) >= 0;",
        ("test_core.py::test_core[plan]", "test_core.py::test_core[knowledge]"),
    ),
    Mutant(
        "no-margin",
        "predictions that were too low leave a margin free",
        "csrc/core/knowledge.c",
        "    known->margin = share > known->margin ? share : known->margin;",
        "    (void)share;",
        ("test_core.py::test_core[knowledge]", "test_core.py::test_core[plan]"),
    ),
    Mutant(
        "plateau-believed",
        "a secant that explains less than half of a peak is not believed",
        "csrc/core/knowledge.c",
        "    return slope * (double)top->rows >= 0.5 * ((double)top->bytes - floor_bytes) ? slope",
        "    return slope * (double)top->rows >= 0.0 * ((double)top->bytes - floor_bytes) ? slope",
        ("test_core.py::test_core[knowledge]", "test_core.py::test_core[plan]"),
    ),
    Mutant(
        "state-not-predicted",
        "an optimizer's first step() that cannot fit is refused before anything has moved",
        "csrc/python/predict.c",
        "    if (answer != Py_None) {",
        "    if (0) {",
        ("test_optimizer_faults.py::"
         "test_the_first_step_that_cannot_fit_is_refused_before_anything_moves",),
    ),
    Mutant(
        "state-of-all-parameters",
        "parameters without a gradient get no state: they are not counted as what must fit",
        "oomkit/optim.py",
        "            if p.grad is not None:\n                total +=",
        "            if True:\n                total +=",
        ("test_optimizer_faults.py::"
         "test_parameters_without_a_gradient_are_not_counted_as_state",),
    ),
    Mutant(
        "budget-released-twice",
        "a block that is freed gives back what it took, once",
        "csrc/core/budget.c",
        "atomic_fetch_sub_explicit(&budget->used_bytes, bytes, memory_order_relaxed);",
        "atomic_fetch_sub_explicit(&budget->used_bytes, 2 * bytes, memory_order_relaxed);",
        ("test_core.py::test_core[budget]",),
    ),
    Mutant(
        "budget-one-byte-short",
        "a request that fits exactly is admitted",
        "csrc/core/budget.c",
        "if (bytes > limit || used > limit - bytes) {",
        "if (bytes > limit || used >= limit - bytes) {",
        ("test_memory.py::test_a_request_that_fits_exactly_is_admitted_and_one_byte_more_is_not",),
    ),
    Mutant(
        "refused-request-counted",
        "a request that the machine cannot serve gives its reservation back",
        "csrc/torch/allocator.cpp",
        "            if (counted) {\n                oomkit_budget_release(",
        "            if (0) {\n                oomkit_budget_release(",
        ("test_memory.py::"
         "test_a_request_that_the_machine_cannot_serve_gives_its_reservation_back",),
    ),
    Mutant(
        "own-copies-counted",
        "what oomkit allocates for itself is outside the budget and its faults",
        "csrc/torch/allocator.cpp",
        "        const bool counted = exempt_depth == 0;",
        "        const bool counted = exempt_depth >= 0;",
        ("test_bridge.py::"
         "test_exempt_allocations_are_neither_counted_nor_refused_nor_failed",),
    ),
    Mutant(
        "child-inherits-the-limit",
        "a process made by fork has neither limit nor faults",
        "csrc/torch/allocator.cpp",
        "    oomkit_fault_disarm(counters.fault);\n}\n\n} // namespace",
        "}\n\n} // namespace",
        ("test_inject.py::test_a_child_made_by_fork_starts_disarmed",),
    ),
    Mutant(
        "fault-off-by-one",
        "the n-th allocation fails, not the one after it",
        "csrc/core/fault.c",
        "    if (seen < nth || (times != 0",
        "    if (seen <= nth || (times != 0",
        ("test_core.py::test_core[fault]",),
    ),
    Mutant(
        "fault-once-too-often",
        "as many allocations fail as were asked for",
        "csrc/core/fault.c",
        "(times != 0 && seen - nth >= times)) {",
        "(times != 0 && seen - nth > times)) {",
        ("test_inject.py::test_exactly_the_named_allocations_fail",),
    ),
    Mutant(
        "inner-peak-outside",
        "a window's peak is that of its own time, not that of the process",
        "csrc/core/peak.c",
        "    value = atomic_load_explicit(&peak->highest_bytes[window], memory_order_relaxed);\n"
        "    atomic_fetch_and",
        "    value = atomic_load_explicit(&peak->maximum_bytes, memory_order_relaxed);\n"
        "    atomic_fetch_and",
        ("test_core.py::test_core[peak]",),
    ),
    Mutant(
        "torn-record",
        "a record that was overwritten while it was read is not given out",
        "csrc/core/ring.c",
        "        if ((after & NUMBER_MASK) > 2 * index + 2) {",
        "        if (0) {",
        ("test_core.py::test_core[ring]",),
    ),
    Mutant(
        "limit-stays",
        "a limit of a with block ends with it",
        "oomkit/memory.py",
        "        _layers.set_user(self._key, self._previous)  # needs",
        "        pass  # needs",
        ("test_memory.py::test_with_puts_the_previous_limit_back",),
    ),
    Mutant(
        "gradient-through-detached-output",
        "a gradient that reaches an output whose graph is gone is an error",
        "oomkit/_nodes.py",
        "        raise _C.SplitError(ctx.why)",
        "        return torch.zeros(0), None, None",
        ("test_join_grad.py::test_a_gradient_through_a_sum_with_the_model",),
        also=(('        raise _C.SplitError("a gradient passed',
               '        return (None,) * 99\n        raise _C.SplitError("a gradient passed'),),
    ),
    Mutant(
        "refusal-without-leaves",
        "autograd.grad for a parameter meets the refusing node too",
        "oomkit/_nodes.py",
        "self._anchor = _Anchor.apply(leaf, *self._leaves)",
        "self._anchor = _Anchor.apply(leaf)",
        ("test_join_grad.py::test_a_gradient_through_a_sum_with_the_model",),
    ),
    Mutant(
        "forced-slices-stay",
        "force_slices ends with its block",
        "oomkit/testing.py",
        "        _C._force_slices(self._before.pop())",
        "        self._before.pop()",
        ("test_weights.py::test_forced_slices_are_the_slices_that_run",),
    ),
    Mutant(
        "companions-unsaid",
        "a tensor beside the batch that is as long as it (in a closure) is refused or said",
        "oomkit/_companions.py",
        "    return len(shape) > 0 and shape[0] == rows",
        "    return False",
        ("test_batch_doubt.py", "test_batch_review.py", "test_batch_refuse.py"),
    ),
    Mutant(
        "replay-in-the-callers-autocast",
        "the replay of a returned loss does not see an autocast that the caller has on by then",
        "oomkit/_second.py",
        "        elif torch.is_autocast_enabled(device):",
        "        elif False:",
        ("test_returned_modes.py::test_autocast_has_begun_when_backward_comes",),
    ),
]  # fmt: skip
