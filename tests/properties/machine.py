"""A program under oomkit and its twin without, driven by hypothesis.

Each rule does the same to both. A call may end for lack of memory: then the state is the one
before it, and the twin does not make the call. A SplitError is one that the program deserves
(DESERVED). Everything else has to be equal: parameters,
gradients, buffers, flags, optimizer, scheduler, random state, what comes back.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import oomkit
from oomkit.testing import force_slices, inject_oom

from . import programs
from .compare import difference, state_of
from .programs import CONTAINERS, FORMS, KINDS, OPTIMIZERS, Program, make_world

FAULTS = st.fixed_dictionaries(
    {
        "nth": st.integers(1, 25),
        "times": st.sampled_from([1, 1, 1, 2, 3, 7, None]),
        "min_bytes": st.sampled_from([1, 1, 300]),
        "phase": st.sampled_from(
            [None, "forward", "backward", "backward", "optimizer", "recovery"]
        ),
    }
)
SAID = ("contain a part of this batch", "gradients cannot be restored")
"""In the error that ends a call: gradients that were there before have no copy."""
DESERVED: dict[str, Callable[[Programs], bool]] = {
    # One loss for each row, and a micro-batch of one row: it might be a mean as well.
    "cannot tell whether the loss of shape torch.Size([1])": lambda program: program.form.rows,
    # The first backward ran out of memory over gradients of which there are no copies.
    "cannot replay a step with several backward() calls: gradients were present": (
        lambda program: program.options["gradient_safety"] != "copy"
    ),
    # Of sequences as long as the micro-batch has rows, where no proof has told them apart.
    "and the rows in two dimensions": lambda program: program.kind is KINDS["tokens"],
}
"""Part of a SplitError's text: is that one this program's?"""
BUDGETS = (None, 1500, 3000, 6000, 12000, 24000)
TWO_FAULTS = st.lists(FAULTS, min_size=0, max_size=2)


def _inject(faults: list[dict[str, Any]]) -> contextlib.AbstractContextManager[Any]:
    armed: inject_oom | None = None
    for fault in reversed(faults):
        # Only the last may go on for ever.
        times = fault["times"] if fault["times"] is not None or armed is None else 2
        armed = inject_oom(**{**fault, "times": times, "then": armed})
    return contextlib.nullcontext() if armed is None else armed


class Programs(RuleBasedStateMachine):
    counts: Counter[str] = Counter()
    """Of all programs: what came out how often."""

    def __init__(self) -> None:
        super().__init__()
        self.budget: int | None = None
        self.serial = 0

    # ---- the program

    @initialize(
        kind=st.sampled_from(sorted(KINDS)),
        form=st.sampled_from(sorted(FORMS)),
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        container=st.sampled_from(sorted(CONTAINERS)),
        scheduled=st.booleans(),
        program=st.builds(
            Program,
            reduction=st.sampled_from(["mean", "mean", "sum"]),
            set_to_none=st.booleans(),
            clip=st.booleans(),
            returns=st.sampled_from(["loss", "nothing", "number", "outputs"]),
        ),
        options=st.fixed_dictionaries(
            {
                "accumulation_steps": st.sampled_from([1, 1, 2, 3]),
                "multiple_of": st.sampled_from([1, 1, 1, 2]),
                "gradient_safety": st.sampled_from(["auto", "auto", "copy", "off"]),
                "optimizer_safety": st.sampled_from(["predict", "copy", "parts"]),
                "verify": st.sampled_from([None, None, True, False]),
            }
        ),
        seed=st.integers(0, 5),
    )
    def begin(
        self,
        kind: str,
        form: str,
        optimizer: str,
        container: str,
        scheduled: bool,
        program: Program,
        options: dict[str, Any],
        seed: int,
    ) -> None:
        self.kind, self.form, self.program = KINDS[kind], FORMS[form], program
        self.container = CONTAINERS[container]
        self.mine, self.twin = (make_world(kind, optimizer, scheduled, seed) for _ in range(2))
        self.options = {**options, **self.form.options()}
        if not self.form.rows:
            self.options["reduction"] = program.reduction
            if self.kind.weight is not None and program.reduction == "mean":
                self.options["weight"] = self.kind.weight
        self.plain = self.form.make(self.twin, program)
        self.plain_evaluation = programs.evaluation(self.twin)
        self._decorate(self.options)

    def _decorate(self, options: dict[str, Any]) -> None:
        self.step = oomkit.auto_batch(self.form.make(self.mine, self.program), **options)
        self.evaluate_step = oomkit.auto_batch(
            programs.evaluation(self.mine),
            weight=self.kind.weight,
            multiple_of=options["multiple_of"],
        )

    def _batch(self, rows: int, size: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The arguments of a call, twice."""
        self.serial += 1
        made = []
        for _ in range(2):
            draw = torch.Generator().manual_seed(1000 * self.serial + rows)
            made.append(self.container(*self.kind.batch(rows, size, draw)))
        return made[0], made[1]

    @contextlib.contextmanager
    def _limited(self, faults: list[dict[str, Any]]) -> Any:
        limit = contextlib.nullcontext()
        if self.budget is not None:
            used = oomkit.memory("cpu").allocated or 0
            limit = oomkit.limit_memory(used + self.budget, device="cpu")
        with warnings.catch_warnings(), limit, _inject(faults) as fault:
            warnings.simplefilter("ignore", oomkit.OomkitWarning)
            try:
                yield
            finally:
                if fault is not None and fault.fired:
                    self.counts["calls with faults"] += 1

    def _protected(
        self, what: str, run: Callable[[], Any], faults: list[dict[str, Any]]
    ) -> tuple[bool, Any]:
        """Has it been done, and its result."""
        before = state_of(self.mine)
        self.counts["calls"] += 1
        try:
            with self._limited(faults):
                result = run()
        except oomkit.PartialUpdate as error:
            note(f"{what}: {error}")
            self.counts["partial updates"] += 1
            assert self.options["optimizer_safety"] == "predict", error
            self._resume(before)
            return False, None
        except oomkit.OutOfMemory as error:
            note(f"{what}: {error}")
            if error.committed:
                self.counts["out of memory after the update"] += 1
                return True, error
            self.counts["out of memory"] += 1
            self._gradients_may_stay(error, before)
        except oomkit.SplitError as error:
            note(f"{what}: {error}")
            told = [t for t, deserves in DESERVED.items() if t in str(error) and deserves(self)]
            assert told, error
            self.counts[f"refused: {told[0]}"] += 1
            self._gradients_may_stay(error, before)
        except torch.OutOfMemoryError as error:
            # The caller's own operations between several losses and one root, whose few bytes
            # are outside the budget: only a fault in what is oomkit's own gets there.
            note(f"{what}: {error}")
            assert any(fault["phase"] == "recovery" for fault in faults), error
            self.counts["out of memory between root and losses"] += 1
        else:
            return True, result
        now = state_of(self.mine)
        if self.form.clears:
            for i, p in enumerate(self.twin.model.parameters()):
                grad = now["gradients"][i]
                if grad is None or not grad.any():
                    before["gradients"][i] = grad
                    p.grad = copy.deepcopy(grad)
        found = difference(now, before, exact=True, where="refused")
        assert found is None, f"{what} was refused and has changed {found}"
        return False, None

    def _gradients_may_stay(self, error: Exception, before: dict[str, Any]) -> None:
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        if any(said in text for said in SAID):
            assert self.options["gradient_safety"] != "copy", error
            self.counts["gradients that were not copied"] += 1
            self._resume(before)

    def _resume(self, before: dict[str, Any]) -> None:
        """As a user does from a checkpoint, where the error says that there is no other way."""
        model, optimizer, scheduler = self.mine.model, self.mine.optimizer, self.mine.scheduler
        with torch.no_grad():
            for p, was, grad in zip(
                model.parameters(), before["parameters"], before["gradients"], strict=True
            ):
                p.copy_(was)
                p.grad = grad
        if optimizer is not None:
            optimizer.load_state_dict(before["optimizer"])
        if scheduler is not None:
            scheduler.load_state_dict(before["scheduler"])

    # ---- calls

    @rule(
        rows=st.integers(1, 9),
        size=st.integers(2, 6),
        faults=TWO_FAULTS,
        second=TWO_FAULTS,
        factor=st.sampled_from([1, 1, 0.5, 3.0]),
        hold=st.booleans(),
        data=st.data(),
    )
    def call(
        self,
        rows: int,
        size: int,
        faults: list[dict[str, Any]],
        second: list[dict[str, Any]],
        factor: float,
        hold: bool,
        data: st.DataObject,
    ) -> None:
        batch, again = self._batch(rows, size)
        slices: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if rows > 1 and data.draw(st.integers(0, 4), "forced") == 0:
            cuts = data.draw(st.sets(st.integers(1, rows - 1), min_size=1, max_size=3), "cuts")
            ends = [*sorted(cuts), rows]
            slices = force_slices([b - a for a, b in zip([0, *ends], ends, strict=False)])
        with slices:
            done, got = self._protected("call", lambda: self.step(*batch), faults)
        if not done:
            return
        want = self.plain(*again)
        if self.options.get("backward"):
            programs.loss_of(want).backward()
        if not self.form.second:
            if not isinstance(got, BaseException):
                self._equal(got, want, "returned")
            self.counts["split"] += self.step.records[-1].accumulation_steps > 1
            return
        self._equal(got, want, "returned")
        mine, theirs = (
            self._loss(result, a, factor) for result, a in ((got, batch), (want, again))
        )
        self.mine.held.append(mine)
        self.twin.held.append(theirs)
        if hold and len(self.mine.held) < 3:
            return
        self._backward(second)

    def _loss(self, result: Any, batch: tuple[Any, ...], factor: float) -> torch.Tensor:
        """The scalar that the caller makes of what came back."""
        if self.form.rows and result.dim() == 1:
            rows = torch.linspace(0.5, 2, len(result), dtype=torch.float64)
            return (result * rows).mean() * factor
        if self.form.rows:
            return self.kind.loss(result, programs.read(*batch)[1], "mean") * factor
        result = programs.loss_of(result)
        return result if factor == 1 else result * factor

    def _backward(self, faults: list[dict[str, Any]]) -> None:
        held, self.mine.held = self.mine.held, []
        theirs, self.twin.held = self.twin.held, []
        root = held[0] if len(held) == 1 else torch.stack(held).sum()
        held.clear()
        done, _ = self._protected("backward", root.backward, faults)
        if done:
            (theirs[0] if len(theirs) == 1 else torch.stack(theirs).sum()).backward()
            self.counts["split"] += self.step.records[-1].accumulation_steps > 1

    def _equal(self, got: Any, want: Any, what: str) -> None:
        found = difference(got, want, exact=False, where=what)
        assert found is None, found

    @precondition(lambda self: self.mine.held)
    @rule(faults=TWO_FAULTS)
    def backward_of_what_waits(self, faults: list[dict[str, Any]]) -> None:
        self._backward(faults)

    @rule(rows=st.integers(1, 9), size=st.integers(2, 6), faults=TWO_FAULTS)
    def evaluate(self, rows: int, size: int, faults: list[dict[str, Any]]) -> None:
        batch, again = self._batch(rows, size)
        done, got = self._protected("evaluation", lambda: self.evaluate_step(*batch), faults)
        if done:
            self._equal(got, self.plain_evaluation(*again), "evaluation")

    # ---- between calls

    @rule(
        what=st.sampled_from(["limit", "update", "decorate", "freeze"]),
        n=st.integers(0, 20),
        flag=st.booleans(),
    )
    def between(self, what: str, n: int, flag: bool) -> None:
        if what == "limit":
            self.budget = BUDGETS[n % len(BUDGETS)]
        elif self.mine.held:
            return  # what a backward needs must not change
        elif what == "decorate":
            self._decorate({**self.options, "accumulation_steps": n % 3 + 1})
        elif what == "freeze":
            for world in (self.mine, self.twin):
                parameters = list(world.model.parameters())
                parameters[n % (len(parameters) - 1) + 1].requires_grad_(flag)
        elif not self.form.updates:
            for world in (self.mine, self.twin):
                if world.optimizer is not None and n % 4:
                    world.optimizer.step()
                world.model.zero_grad(set_to_none=flag)

    # ---- always

    @invariant()
    def agree(self) -> None:
        found = difference(state_of(self.mine), state_of(self.twin), exact=False, where="state")
        assert found is None, found
        assert oomkit._C.phase_set(0) == 0
