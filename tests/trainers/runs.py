"""Whole runs of real trainers: undisturbed, and with an error in one of their calls."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

import oomkit

POINTS = int(os.environ.get("OOMKIT_TRAINER_POINTS", "12"))  # of a call that fail; 0: all
TIMES = ("runtime", "per_second", "step_time", "profiling/")
SINGLE, HALF = 1e-4, 2e-2  # of the largest update


@dataclasses.dataclass
class Outcome:
    """What a run leaves."""

    parameters: dict[str, torch.Tensor]
    begun: dict[str, torch.Tensor]
    rest: dict[str, Any]
    log: list[dict[str, Any]]
    said: list[str]
    error: BaseException | None = None


class Arm:
    """Stands before a step: makes it fail in one call, or gives each call its slices.

    Args:
        step: what is called.
        number: of the call that is looked at.
        fault: options of `inject_oom`; None: its allocations are counted.
        slices: of each call, by number.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        number: int,
        fault: dict[str, Any] | None,
        slices: dict[int, tuple[int, ...]] | None,
    ) -> None:
        self.step, self.number, self.slices = step, number, slices or {}
        self.fault = {"nth": 2**40} if fault is None else fault
        self.calls = self.seen = self.fired = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        forced = self.slices.get(self.calls)
        with nullcontext() if forced is None else oomkit.testing.force_slices(forced):
            if self.calls != self.number:
                return self.step(*args, **kwargs)
            injected = oomkit.testing.inject_oom(**self.fault)
            try:
                with injected:
                    return self.step(*args, **kwargs)
            finally:
                self.seen, self.fired = injected.seen, injected.fired


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
    if isinstance(one, torch.Tensor):
        same = isinstance(two, torch.Tensor) and one.shape == two.shape
        scale = float(one.double().abs().max()) if one.numel() else 0.0
        if same and (one.double() - two.double()).abs().max() <= limit * max(scale, 1e-6):
            return []
        return [f"{name}: another tensor"]
    if isinstance(one, float) and isinstance(two, (int, float)):
        if one == two or (math.isnan(one) and math.isnan(two)):
            return []
        if abs(one - two) <= limit * max(1e-3, abs(one)):
            return []
    elif one == two:
        return []
    return [f"{name}: {two}, expected {one}"]


def timeless(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of a log without what a clock gives."""
    return [
        {key: value for key, value in line.items() if not any(word in key for word in TIMES)}
        for line in log
    ]


def differences(one: Outcome, two: Outcome, limit: float) -> list[str]:
    """What is another in the second run; with a limit of 0, bit for bit."""
    if one.error is not None or two.error is not None:
        return [f"ended in {two.error!r}, expected {one.error!r}"]
    found = []
    update = max(float((one.parameters[k] - v).abs().max()) for k, v in one.begun.items())
    for name, value in one.parameters.items():
        gap = float((two.parameters[name] - value).abs().max())
        if gap > limit * update:
            found.append(f"{name}: by {gap / update:.2g} of the largest update")
    loose = 10 * limit
    mine, its = dict(_tensors(one.rest)), dict(_tensors(two.rest))
    for name, tensor in mine.items():
        found += _gap(name, tensor, its.get(name), loose)
    for name, value in one.rest.items():
        if not any(True for _ in _tensors(value)):
            found += _gap(name, value, two.rest.get(name), loose)
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
