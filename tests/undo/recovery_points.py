"""Every point at which something can go wrong between a failure and the end of its step, by
enumeration: nth = 1, 2, 3, ... until it did not happen.

A suite is a generator of (what was done, what was wrong with the outcome). `SUITES` has them
all; with `stride` and `first` a suite does a part of its points.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from helpers.recovery_world import FORMS, Disturbance, Judge, quiet
from torch.overrides import TorchFunctionMode

from oomkit.testing import inject_oom

Case = tuple[str, list[str]]


class Own(Exception):
    """An exception of the user's."""


class Planned(torch.OutOfMemoryError):
    """Memory that runs out where the CPU has no allocation to fail."""

    def __init__(self) -> None:
        super().__init__("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full")


class Never(Exception):
    pass


def chain(*stages: dict[str, Any]) -> inject_oom:
    fault = None
    for stage in reversed(stages):
        fault = inject_oom(then=fault, **stage)
    assert fault is not None
    return fault


class Point:
    """After the first failure of `fault`, `what` is raised at the n-th point of a kind."""

    def __init__(self, fault: inject_oom, nth: int, what: type[BaseException]) -> None:
        self.fault, self.nth, self.what = fault, nth, what
        self.seen = self.happened = 0
        self.where = ""

    def arrive(self, where: str) -> None:
        self.seen += 1
        if self.seen == self.nth:
            self.happened = 1
            self.where = where
            self.stop()
            raise self.what()

    def stop(self) -> None:
        """No further point is to come."""


class Lines(Point):
    """Lines of Python code: where an interrupt arrives."""

    # Torch's context managers lose the mode they were to put back: no matter of ours.
    FILES = (
        "_contextlib.py",
        "contextlib.py",
        "grad_mode.py",
        "profiler.py",
        "recovery_points.py",
        "_dynamo/decorators.py",
        # Callbacks of weak references and of Hypothesis, which a collection calls: an error of a
        # trace function in one breaks CPython 3.11 without oomkit, too.
        "_dynamo/utils.py",
        "weakref.py",
        "_weakrefset.py",
        "junkdrawer.py",
    )
    NAMES = ("_use_grad", "profile_hook_step", "wrapper", "run", "state", "evaluate")

    def __enter__(self) -> Lines:
        self.fault.__enter__()
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()
        self.fault.__exit__(*error)

    def stop(self) -> None:
        sys.settrace(self.before)

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_filename.endswith(self.FILES) or code.co_name in self.NAMES:
            return None
        if event == "line" and self.fault.fired > 0:
            self.arrive(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        return self.trace


class Functions(Point, TorchFunctionMode):
    """Functions of torch, also those that oomkit calls: a mode of the user's may raise."""

    def __init__(self, fault: inject_oom, nth: int, what: type[BaseException]) -> None:
        TorchFunctionMode.__init__(self)
        Point.__init__(self, fault, nth, what)

    def __enter__(self) -> Functions:
        self.fault.__enter__()
        TorchFunctionMode.__enter__(self)
        return self

    def __exit__(self, *error: Any) -> None:
        TorchFunctionMode.__exit__(self, *error)
        self.fault.__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        # As above; and a setter that raises inside of a Function's apply() is a SystemError.
        if self.fault.fired > 0 and "grad_enabled" not in name and name != "__set__":
            self.arrive(name)
        return func(*args, **(kwargs or {}))


def run(
    judge: Judge, part: str, disturb: Disturbance, own: type[BaseException] = Never
) -> tuple[Any, list[str]]:
    """A disturbed run: (its error or None, what is wrong with the outcome)."""
    world = judge.world()
    error = result = None
    with quiet():
        try:
            result = world.run(0, disturb, part)
        except BaseException as caught:
            error = caught
            # Else the frames keep losses, and with them their calls, for the runs to come.
            traceback.clear_frames(caught.__traceback__)
            error.__traceback__ = None
    return error, judge.judge(world, part, result, error, own)


def parts(*options: dict[str, Any]) -> Iterator[tuple[Judge, str, str]]:
    for form in FORMS:
        for option in options:
            judge = Judge(form, **option)
            for part in judge.world().parts():
                name = ", ".join([form, part, *(k for k, v in option.items() if v)])
                yield judge, part, name


def allocations(
    stride: int = 1,
    first: int = 1,
    *,
    options: tuple[dict[str, Any], ...] = ({}, {"gradients": True}, {"warm": True}),
    **schedule: Any,
) -> Iterator[Case]:
    """Each allocation fails, of those that `schedule` is about."""
    for judge, part, name in parts(*options):
        nth = first
        while True:
            fault = inject_oom(nth=nth, **schedule)
            error, wrong = run(judge, part, fault)
            if fault.fired == 0:
                break
            yield f"{name}, {schedule}, nth={nth}: {type(error).__name__}", wrong
            nth += stride


def pairs(
    stride: int = 1,
    first: int = 1,
    *,
    options: tuple[dict[str, Any], ...] = ({"hook": False}, {"gradients": True}),
    **second: Any,
) -> Iterator[Case]:
    """Each allocation fails, and after it each of those that `second` is about."""
    for judge, part, name in parts(*options):
        nth = first
        while True:
            then = 1 + nth % stride
            while True:
                fault = chain({"nth": nth}, {"nth": then, **second})
                error, wrong = run(judge, part, fault)
                if fault.fired < 2:
                    break
                yield f"{name}, {nth}, then {second}, {then}: {type(error).__name__}", wrong
                then += stride
            if fault.fired == 0:
                break
            nth += stride


def points(
    kind: Callable[[inject_oom, int, type[BaseException]], Any],
    what: type[BaseException],
    stride: int = 1,
    first: int = 1,
    options: tuple[dict[str, Any], ...] = ({"hook": False, "gradients": True}, {"hook": False}),
) -> Iterator[Case]:
    """After a failure in the middle, each point of a kind raises."""
    for judge, part, name in parts(*options):
        count = inject_oom(nth=2**60)
        run(judge, part, count)
        nth = first
        while count.seen > 0:
            point = kind(inject_oom(nth=1 + count.seen // 3), nth, what)
            error, wrong = run(judge, part, point, what)
            if not point.happened:
                break
            yield f"{name}, {nth} ({point.where}): {type(error).__name__}", wrong
            nth += stride


SUITES: dict[str, Callable[..., Iterator[Case]]] = {
    "out of memory once": allocations,
    "out of memory from there on": lambda *a: allocations(
        *a, options=({"hook": False}, {"hook": False, "gradients": True}, {}), times=None
    ),
    "oomkit's own memory": lambda *a: allocations(*a, phase="recovery"),
    "oomkit's own memory from there on": lambda *a: allocations(*a, phase="recovery", times=None),
    "again in a later attempt": pairs,
    "again, in oomkit's own memory": lambda *a: pairs(*a, phase="recovery"),
    "again, and from there on": lambda *a: pairs(*a, times=None),
    "an interrupt at a line": lambda *a: points(Lines, KeyboardInterrupt, *a),
    "an exception at a line": lambda *a: points(Lines, Own, *a),
    "an interrupt at a function": lambda *a: points(Functions, KeyboardInterrupt, *a),
    "an exception at a function": lambda *a: points(Functions, Own, *a),
    "out of memory at a function": lambda *a: points(Functions, Planned, *a),
}


# For `make prove`: one point of so many, of thousands since each split is proven in a recovery.
STRIDES = {
    "out of memory once": 7,
    "out of memory from there on": 7,
    "oomkit's own memory": 3,
    "oomkit's own memory from there on": 3,
    "again in a later attempt": 61,
    "again, in oomkit's own memory": 31,
    "again, and from there on": 71,
    "an interrupt at a line": 1501,
    "an exception at a line": 1501,
    "an interrupt at a function": 41,
    "an exception at a function": 41,
    "out of memory at a function": 41,
}


def prove(name: str, stride: int = 1, first: int = 1) -> tuple[int, list[str]]:
    """One suite: how many cases, and a line for each failure."""
    count, failures = 0, []
    for done, wrong in SUITES[name](stride, first):
        count += 1
        failures += [f"{done}: {line}" for line in wrong]
    return count, failures


if __name__ == "__main__":
    import logging
    import time

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    begin = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    for suite in sys.argv[3:] or SUITES:
        started = time.monotonic()
        cases, lines = prove(suite, steps, begin)
        taken = time.monotonic() - started
        print(f"{suite:40} {cases:7} cases {len(lines):5} failures {taken:7.1f} s", flush=True)
        for line in lines[:20]:
            print("   ", line[:300], flush=True)
