"""What a contender does, seen from below: the same for all, through hooks of torch.

Time is processor time of the process, because waiting for a core that another program
has is no property of a contender; time spent in here is taken out.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import oomkit

from .paired import Pair, Paired
from .workloads import FIRST, Work


def allocated() -> int:
    return oomkit.memory("cpu").allocated or 0  # None before the first limit


class Errors:
    """Counts every out-of-memory error that torch makes, whoever catches it."""

    count = 0

    @classmethod
    def install(cls) -> None:
        def init(self: Any, *_: Any) -> None:
            cls.count += type(self) is torch.OutOfMemoryError

        torch.OutOfMemoryError.__init__ = init


class Enough(BaseException):
    """Ends a run of which only the first steps were asked for; no contender catches it."""


@dataclass
class Step:
    """One update of the parameters, or one evaluated batch."""

    time: float  # when it was finished, since the first model was built
    ooms: int  # during it
    forwards: int
    rows: int


@dataclass
class Course:
    """What a run was like."""

    steps: list[Step] = field(default_factory=list)
    ooms: int = 0
    stray: int = 0  # bytes that a retry finds beyond what the first attempt found
    restarted: float = 0.0  # when the last training began
    died: str = ""
    pairs: list[Pair] = field(default_factory=list)
    gradient_error: float | None = None
    lost: int | None = None
    twice: int | None = None


class Watch:
    """`reference`: gradients of the first whole batch, or outputs of all batches. `beside`: the
    oracle's plan, whose steps take turns with the contender's; `brief`: the first steps only."""

    def __init__(
        self,
        work: Work,
        reference: Any,
        beside: tuple[int, int] | None = None,
        brief: bool = False,
    ) -> None:
        self.work, self.reference, self.beside, self.brief = work, reference, beside, brief
        self.quiet = False  # the oracle's steps: watched at the same cost, counted nowhere
        self.course = Course()
        self.hidden = 0.0
        self.start: float | None = None
        self.baseline: int | None = None
        self.first_baseline: int | None = None
        self.ooms_seen = 0
        work.built, work.restarted, work.result = self.built, self.reset, self.result
        work.pause = self.pause
        Errors.count = 0
        self.reset()

    def now(self) -> float:
        return time.process_time() - self.hidden

    def reset(self) -> None:
        """A new training begins: an earlier one counts as way, not as result."""
        self.course.steps.clear()
        self.sizes: list[int] = []  # rows of each forward of this step
        self.ooms_told = Errors.count
        self.baseline = self.first_baseline
        self.weights = np.zeros(self.work.rows * self.work.steps)
        self.unseen = np.zeros_like(self.weights)
        self.outputs: dict[int, Any] = {}
        self.paired = None if self.beside is None else Paired(self, self.beside)
        self.course.gradient_error = None
        if self.start is not None:
            self.course.restarted = self.now() - self.start

    def built(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.reset()
        if self.start is None:
            self.start = self.now()
        model.register_forward_pre_hook(self.forward_begins)
        # Weakly: a contender that makes another model has dropped this one.
        self.model = weakref.ref(model)
        self.optimizer = None if optimizer is None else weakref.ref(optimizer)
        if optimizer is not None:
            optimizer.register_step_post_hook(self.update_ends)

    def pause(self) -> None:
        """Data is asked for. Between two updates? Loaders fetch ahead."""
        if self.quiet or self.sizes or len(self.course.steps) < FIRST:
            return
        if self.brief:
            raise Enough
        if self.paired is not None:
            self.paired.turn()

    def forward_begins(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        begun = time.process_time()
        if self.quiet:
            allocated()
            self.hidden += time.process_time() - begun
            return
        self.sizes.append(args[0].shape[0])
        if self.baseline is None:
            self.baseline = allocated()
            self.first_baseline = self.first_baseline or self.baseline
        elif self.ooms_seen != Errors.count:
            self.course.stray = max(self.course.stray, allocated() - self.baseline)
        self.ooms_seen = Errors.count
        self.hidden += time.process_time() - begun

    def update_ends(self, *_: Any) -> None:
        """After an update: its gradients are still there (before it they need not be: a
        closure that the optimizer is given makes them)."""
        begun = time.process_time()
        model = self.model()
        seen = model.seen.grad
        if seen is not None:
            weights = self.unseen if self.quiet else self.weights
            weights += seen.numpy()
        if self.course.gradient_error is None:
            self.course.gradient_error = difference(gradients(model), self.reference)
        self.hidden += time.process_time() - begun
        if not self.quiet:
            self.step_ends()

    def step_ends(self) -> None:
        assert self.start is not None
        ooms = Errors.count
        self.course.steps.append(
            Step(self.now() - self.start, ooms - self.ooms_told, len(self.sizes), sum(self.sizes))
        )
        self.ooms_told, self.sizes = ooms, []
        self.baseline = None

    def result(self, step: int, output: Tensor) -> None:
        if not self.quiet:
            self.step_ends()
        begun = time.process_time()
        copied = output.numpy().copy()
        if not self.quiet:
            self.outputs[step] = copied
        self.hidden += time.process_time() - begun

    def finish(self) -> Course:
        course = self.course
        course.ooms = Errors.count
        if self.paired is not None:
            course.pairs = self.paired.pairs
        if self.brief:
            return course
        if self.work.training:
            expected = shares(self.work)
            course.lost = int((np.abs(self.weights) < 1e-3 * expected).sum())
            course.twice = int((self.weights > 1.9 * expected).sum())
        elif self.reference is not None and not course.died:
            course.lost = course.twice = 0
            course.gradient_error = 0.0
            for step, expected in enumerate(self.reference):
                found = self.outputs.get(step, expected[:0])
                course.lost += max(0, len(expected) - len(found))
                course.twice += max(0, len(found) - len(expected))
                if len(found) == len(expected):
                    course.gradient_error = max(
                        course.gradient_error, difference([found], [expected])
                    )
        return course


def gradients(model: Any) -> list[Any]:
    """As numpy sees them: a copy made by torch would lie in the budget."""
    return [p.grad.numpy() for p in model.net.parameters()]


def difference(found: list[Any], expected: list[Any]) -> float:
    """Largest difference, as a share of the largest expected value."""
    largest = max(float(np.abs(e).max()) for e in expected)
    return max(float(np.abs(f - e).max()) for f, e in zip(found, expected, strict=True)) / largest


def shares(work: Work) -> Any:
    """The weight with which each sample should enter the update of its batch."""
    if work.y.dim() == 2:
        tokens = (work.y != -100).sum(1).double().view(work.steps, work.rows)
    else:
        tokens = torch.ones(work.steps, work.rows, dtype=torch.float64)
    return (tokens / tokens.sum(1, keepdim=True)).flatten().numpy()


def reference(work: Work) -> Any:
    """Gradients of the first whole batch, or all outputs, without any limit."""
    model = work.new_model()
    if not work.training:
        return [work.predict(model, x).numpy() for x, _, _ in work.batches()]
    work.loss(model, next(work.batches())).backward()
    return [p.grad.numpy().copy() for p in model.net.parameters()]
