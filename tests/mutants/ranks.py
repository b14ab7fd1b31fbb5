"""With several ranks."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = [
    Mutant(
        "reducer-not-reset",
        "an attempt that ranks begin again begins with a reducer that expects nothing",
        "oomkit/_ranks/agreement.py",
        "        self.real._reset_state()\n        self.due",
        "        self.due",
        ("ranks/test_ddp.py::test_faults_leave_no_trace[plain]",),
    ),
    Mutant(
        "stale-segment-opened",
        "memory that ranks share is of this start of this job",
        "csrc/ranks/vote.c",
        "        m->world != world || m->epoch != epoch || rank >= world) {",
        "        m->world != world || rank >= world) {",
        ("ranks/test_vote.py::test_the_vote[plain]",),
    ),
    Mutant(
        "dead-rank-waited-for",
        "a rank whose process has ended is not waited for",
        "csrc/ranks/process.c",
        "    if (state == 'Z' || state == 'X' || (started != 0 && now != started)) {",
        "    if (state == 'X') {",
        ("ranks/test_vote.py::test_the_vote[plain]",),
    ),
    Mutant(
        "own-collective-repeated",
        "after a collective of the step's own no rank begins again",
        "oomkit/_ranks/agreement.py",
        "        self.own = name\n",
        "        self.own = str()\n",
        (
            "ranks/test_steps.py::test_a_collective_of_the_steps_own_is_made_once[backward-2-0]",
            "ranks/test_steps.py::test_a_collective_of_the_steps_own_is_made_once[backward-2-1]",
        ),
    ),
    Mutant(
        "backward-of-the-caller-not-reduced",
        "a loss that is returned is reduced by torch in the caller's backward",
        "oomkit/_ranks/agreement.py",
        "            self.real.prepare_for_backward(self._outputs)\n",
        "            pass\n",
        ("ranks/test_steps.py::test_a_loss_that_is_returned_is_torchs_affair",),
    ),
]
