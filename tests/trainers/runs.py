"""Whole runs of real trainers: undisturbed, and with an error in one of their calls."""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import os
import pickle
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

import oomkit

POINTS = int(os.environ.get("OOMKIT_TRAINER_POINTS", "12"))  # of a call that fail; 0: all
TIMES = ("runtime", "per_second", "step_time", "profiling/")
SINGLE, HALF = 1e-4, 2e-2  # of the largest update
ROUNDING = 1e-6  # of gradients that were added to, and are computed again
MODES = (1, 2, None)  # allocations that fail in a row: once, twice, from there on


@dataclasses.dataclass
class Outcome:
    """What a run leaves."""

    parameters: dict[str, torch.Tensor]
    begun: dict[str, torch.Tensor]
    rest: dict[str, Any]
    log: list[dict[str, Any]]
    said: list[str]
    error: BaseException | None = None


class Forks:
    """Faults of one call, each in a process of its own that is made when the call begins.

    What `Arm` takes for its fault: in a new process it is one of the faults, in the first one,
    when all processes have ended, none.

    Args:
        times: how many allocations fail in a row, None: all from there on; several are tried,
            at each place if all allocations are.
        fault: further options of `inject_oom`.
    """

    def __init__(self, times: Sequence[int | None], fault: dict[str, Any]) -> None:
        self.times, self.fault = times, {"nth": 2**40, **fault}
        self.seen = 0
        self.answers: list[tuple[dict[str, Any], Any]] = []
        self._to: int | None = None

    def __call__(self) -> dict[str, Any]:
        gc.freeze()  # collections in the processes look at what is new
        if self._child(self.fault):
            return self.fault
        self.seen = self.answers.pop()[1][1].seen
        assert self.seen > 0, "the call allocates nothing"
        for at, nth in enumerate(places(self.seen)):
            one = at % len(self.times)  # of a sample: in turn
            for times in self.times[one : one + 1] if POINTS else self.times:
                fault = {**self.fault, "nth": nth, "times": times}
                if self._child(fault):
                    return fault
        gc.unfreeze()
        return self.fault

    def _child(self, fault: dict[str, Any]) -> bool:
        """Whether this is the new process; in the first one, when that has ended."""
        source, self._to = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(source)
            return True
        os.close(self._to)
        self._to = None
        with os.fdopen(source, "rb") as lines:
            answer = lines.read()
        _, status = os.waitpid(child, 0)
        assert answer, f"{fault}: the process ended with {status} and without an answer"
        self.answers.append((fault, pickle.loads(answer)))
        return False

    def run(self, work: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """What `work` returns in the first process; in the others it is kept as an answer.

        Args:
            work: in which the call is.
        """
        result: Any
        try:
            result = work()
        except BaseException:
            if self._to is None:
                raise
            result = traceback.format_exc()
        if self._to is None:
            return result
        try:
            with os.fdopen(self._to, "wb") as pipe:
                pickle.dump(result, pipe)
        finally:
            os._exit(0)  # whatever happens: it is no second run of the tests

    @staticmethod
    def ended(where: str, outcome: Outcome, arm: Counts) -> str:
        """How a run ended whose memory did not come back.

        Args:
            where: for a message.
            outcome: of the run.
            arm: of its arm.
        """
        error = outcome.error
        assert isinstance(error, oomkit.OutOfMemory), f"{where}: {error!r}"
        changed = arm.changed
        said = "earlier calls of this update could not be made again .* and are cleared"
        if re.search(said, str(error)):
            changed = [line for line in changed if "/gradients/" not in line]
            if ".compute_loss ran out" in str(error):  # what came before the backward stays
                changed = []
        elif "the state is as before the backward()" in str(error):
            # What was done before, by the step and by zero_grad(), stays.
            changed = [line for line in changed if re.search("/gradients/.*(?<!: gone)$", line)]
        elif "except for gradients that the step itself cleared" in str(error):
            changed = [line for line in changed if not re.search("/gradients/.*: gone$", line)]
        assert not changed, f"{where}: {changed}"
        return "said" if re.search(said, str(error)) else "ended"


class Counts(NamedTuple):
    """Of an arm: allocations of its call, those that failed, and what its error has changed.

    And whether the call was one with gradients.
    """

    seen: int
    fired: int
    changed: list[str]
    learns: bool


class Arm:
    """Stands before a step: makes it fail in one call, or gives each call its slices.

    Args:
        step: what is called.
        number: of the call that is looked at.
        fault: options of `inject_oom`, or what gives them; None: its allocations are counted.
        slices: of each call, by number.
        look: at what an error of the call must not change.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        number: int,
        fault: dict[str, Any] | Forks | None,
        slices: dict[int, tuple[int, ...]] | None = None,
        look: Callable[[], Any] = dict,
    ) -> None:
        self.step, self.number, self.slices = step, number, slices or {}
        self.fault = {"nth": 2**40} if fault is None else fault
        self.look = look
        self.calls = self.seen = self.fired = 0
        self.changed: list[str] = []
        self.learns = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        forced = self.slices.get(self.calls)
        with nullcontext() if forced is None else oomkit.testing.force_slices(forced):
            if self.calls != self.number:
                return self.step(*args, **kwargs)
            fault = self.fault() if isinstance(self.fault, Forks) else self.fault
            injected, before = oomkit.testing.inject_oom(**fault), self.look()
            self.learns = torch.is_grad_enabled()
            try:
                with injected:
                    return self.step(*args, **kwargs)
            except oomkit.OutOfMemory:
                self.changed = gaps("after the error", before, self.look(), ROUNDING)
                raise
            finally:
                self.seen, self.fired = injected.seen, injected.fired

    @property
    def counts(self) -> Counts:
        return Counts(self.seen, self.fired, self.changed, self.learns)


@contextmanager
def listening() -> Iterator[list[str]]:
    """Warnings of oomkit and lines of its logger."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("oomkit")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    level, logger.propagate = logger.level, False
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield lines
            lines += [
                str(w.message) for w in caught if issubclass(w.category, oomkit.OomkitWarning)
            ]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = True


def peak_of(work: Callable[[], Any], parts: int) -> tuple[Any, int]:
    """What some work returns, and a part of the memory that it needs beside what there is.

    Args:
        work: that is measured.
        parts: of how many it is one.
    """
    gc.collect()
    with oomkit.guard() as measured:
        result = work()
    (record,) = measured.records
    assert record.peak_allocated is not None and record.baseline is not None
    return result, (record.peak_allocated - record.baseline) // parts


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """A budget of so much beside what there is."""
    gc.collect()
    with oomkit.limit_memory((oomkit.memory("cpu").allocated or 0) + size, device="cpu"):
        yield


def places(count: int) -> list[int]:
    """Which of so many allocations fail, counted from 1."""
    if not POINTS or count <= POINTS:
        return list(range(1, count + 1))
    return sorted({1 + (count - 1) * i // (POINTS - 1) for i in range(POINTS)})


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _tensors(each, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for key, each in enumerate(value):
            yield from _tensors(each, f"{path}/{key}")


def _gap(name: str, one: Any, two: Any, limit: float) -> list[str]:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) and not one.ndim + two.ndim:
        return _gap(name, one.item(), two.item(), limit)  # a loss: terms that cancel make it 0
    if isinstance(one, torch.Tensor):
        if not isinstance(two, torch.Tensor) or one.shape != two.shape:
            return [f"{name}: {'gone' if two is None else 'another tensor'}"]
        scale = float(one.double().abs().max()) if one.numel() else 0.0
        gap = float((one.double() - two.double()).abs().max()) if one.numel() else 0.0
        if gap <= limit * max(scale, 1e-6):
            return []
        return [f"{name}: by {gap:.2g}, the largest is {scale:.2g}"]
    if isinstance(one, float) and isinstance(two, (int, float)):
        if one == two or (math.isnan(one) and math.isnan(two)):
            return []
        if abs(one - two) <= limit * max(1e-3, abs(one)):
            return []
    elif one == two:
        return []
    return [f"{name}: {two}, expected {one}"]


def gaps(prefix: str, one: dict[str, Any], two: dict[str, Any], limit: float) -> list[str]:
    """What is another in the second of two mappings."""
    found = []
    mine, its = dict(_tensors(one, prefix)), dict(_tensors(two, prefix))
    for name in dict.fromkeys((*mine, *its)):
        found += _gap(name, mine.get(name), its.get(name), limit)
    for name in dict.fromkeys((*one, *two)):
        if not any(True for _ in _tensors(one.get(name))):
            found += _gap(f"{prefix}/{name}", one.get(name), two.get(name), limit)
    return found


def timeless(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of a log without what a clock gives."""
    return [
        {key: value for key, value in line.items() if not any(word in key for word in TIMES)}
        for line in log
    ]


def differences(one: Outcome, two: Outcome, limit: float, logged: float | None = None) -> list[str]:
    """What is another in the second run; with a limit of 0, bit for bit.

    Args:
        logged: the limit of figures in the log; as all others where it is None.
    """
    if one.error is not None or two.error is not None:
        return [f"ended in {two.error!r}, expected {one.error!r}"]
    found = []
    update = max(float((one.parameters[k] - v).abs().max()) for k, v in one.begun.items())
    for name, value in one.parameters.items():
        gap = float((two.parameters[name] - value).abs().max())
        if gap > limit * update:
            found.append(f"{name}: by {gap / update:.2g} of the largest update")
    loose = 10 * limit
    found += gaps("", one.rest, two.rest, loose)
    loose = loose if logged is None else logged
    if len(one.log) != len(two.log):
        return [*found, f"{len(two.log)} lines of the log, expected {len(one.log)}"]
    for at, (line, other) in enumerate(zip(one.log, two.log, strict=True)):
        if line.keys() != other.keys():
            found.append(f"line {at} of the log has {sorted(other)}, expected {sorted(line)}")
        for name in line.keys() & other.keys():
            found += _gap(f"{name} in line {at} of the log", line[name], other[name], loose)
    return found


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone().double() for name, p in model.named_parameters()}
