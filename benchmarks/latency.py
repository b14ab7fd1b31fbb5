"""How long from an out-of-memory error to the first operation of the replay?

A step runs forward and backward over its whole batch, then asks for one tensor that is
made to fail (or fails in the middle of its backward); the replay's first statement stops
the clock. What lies between is told apart from outside, without a timer in the engine:

    drop     to the end of a local variable of the failed step: its frames are cleared
    restore  to the call that clears autocast's cache: drained and rolled back
    plan     to on_retry: cache emptied (nothing to do on the CPU), batch checked, planned
    start    to the first statement of the replay: marks, first slice

Every call is made by a step that never ran before. "first" is its first error ever,
"again" a second one in the micro-batch that follows. The first two calls of each row are
left out; the very first of the process has a line of its own. "flat" is a model of one module and
one operation for all its parameters, "layers" one of linear layers, with a module for every
two parameters and a graph as long. "torch" is what the same error costs without oomkit:
`try` and `except`, until its last frame is gone and each gradient is None: what the
allocator gets back; "beyond" is the median of the differences, turn by turn.
A table below has what the proof of a split adds to the first split call, in forwards and
backwards of a slice. README.md beside this file has more.

Usage: python benchmarks/latency.py [--quick] [--output FILE]
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import time
import warnings
from collections import UserDict, UserList
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

clock = time.thread_time_ns  # waiting for a core that others have is not in it
# What a failed attempt puts into a dict is undone; this one is the standard library's.
MARKS: UserDict[str, int] = UserDict()
STAGES = ("drop", "restore", "plan", "start")
LARGE = 2**20  # of the tensor that fails: nothing else here is as large
TARGET = 1000.0  # us
LEFT_OUT = [2]  # repetitions before those that count


def marking(function: Callable[[], None]) -> Callable[[], None]:
    def wrapper() -> None:
        MARKS["restore"] = clock()
        function()

    return wrapper


# oomkit looks the function up when it is imported.
torch.clear_autocast_cache = marking(torch.clear_autocast_cache)

import oomkit  # noqa: E402


class Local:
    """A local variable of the step that notes when it dies."""

    def __del__(self) -> None:
        MARKS["drop"] = clock()


class Failing(torch.autograd.Function):
    """Passes its input on; its backward asks for the tensor that fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        MARKS["raise"] = clock()
        torch.empty(LARGE, dtype=torch.uint8)
        return gradient


class Scales(nn.Module):
    """As many parameters of eight elements as wanted, all used."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.each = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.stack(list(self.each)).mean(0)


class Layers(nn.Module):
    """Linear layers, two parameters each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.each = nn.Sequential(*(nn.Linear(8, 8) for _ in range(count // 2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.each(x)


MODELS = {"flat": Scales, "layers": Layers}


def batches(tensors: int) -> Any:
    """A tensor, or a nested batch of `tensors` of them."""
    if tensors == 1:
        return torch.ones(64, 8)
    half = tensors // 2
    return {
        "inputs": {f"input{i}": torch.ones(64, 8) for i in range(tensors - half)},
        "more": {"targets": {f"target{i}": torch.ones(64) for i in range(half)}},
    }


def planned(record: Any) -> None:
    MARKS["plan"] = clock()


def by_torch(model: nn.Module, batch: Any, backward: bool) -> float:
    """Microseconds from the error to the end of what torch and Python do themselves."""
    x = batch if isinstance(batch, Tensor) else batch["inputs"]["input0"]
    parameters = list(model.parameters())

    def step() -> None:
        out = model(Failing.apply(x.detach().requires_grad_()) if backward else x)
        out.mean().backward()
        MARKS["raise"] = clock()
        torch.empty(LARGE, dtype=torch.uint8)

    with oomkit.testing.inject_oom(min_bytes=LARGE):
        try:
            step()
        except torch.OutOfMemoryError:
            pass
        for parameter in parameters:
            parameter.grad = None
    taken = (clock() - MARKS["raise"]) / 1e3
    MARKS.clear()
    return taken


def latencies(model: nn.Module, batch: Any, backward: bool) -> list[dict[str, float]]:
    """Microseconds of each stage, for two errors of one call of a new step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found: UserList[dict[str, float]] = UserList()

    @oomkit.auto_batch(on_retry=planned)
    def step(batch: Any) -> None:
        if "raise" in MARKS:
            MARKS["start"] = clock()
            found.append(stages())
            MARKS.clear()
        local = Local()
        optimizer.zero_grad()
        x = batch if isinstance(batch, Tensor) else batch["inputs"]["input0"]
        out = model(Failing.apply(x.detach().requires_grad_()) if backward else x)
        out.mean().backward()
        if not backward:
            MARKS["raise"] = clock()
            torch.empty(LARGE, dtype=torch.uint8)
        optimizer.step()
        del local
        MARKS.clear()

    with oomkit.testing.inject_oom(times=2, min_bytes=LARGE) as injected:
        step(batch)
    assert injected.fired == len(found) == 2, (injected.fired, len(found))
    return found


def stages() -> dict[str, float]:
    times, before = {}, MARKS["raise"]
    for stage in STAGES:
        times[stage] = (MARKS[stage] - before) / 1e3
        before = MARKS[stage]
    return times


def measure(
    kind: str, parameters: int, tensors: int, backward: bool, repetitions: int
) -> list[str]:
    model, batch = MODELS[kind](parameters), batches(tensors)
    collections: list[int] = []
    watch = lambda phase, info: collections.append(info["generation"])  # noqa: E731
    calls, alone = [], []
    for _ in range(repetitions + LEFT_OUT[0]):
        alone.append(by_torch(model, batch, backward))
        gc.collect()
        gc.callbacks.append(watch)
        calls.append(latencies(model, batch, backward))
        gc.callbacks.remove(watch)
    lines = []
    for which, name in enumerate(("first", "again")):
        taken = [call[which] for call in calls[LEFT_OUT[0] :]]
        middle = {stage: statistics.median(one[stage] for one in taken) for stage in STAGES}
        totals = sorted(sum(one.values()) for one in taken)
        total = statistics.median(totals)
        beyond = statistics.median(
            sum(one.values()) - least
            for one, least in zip(taken, alone[LEFT_OUT[0] :], strict=True)
        )
        lines.append(
            f"{kind:7}{parameters:10d}{tensors:9d}  "
            f"{'backward' if backward else 'forward':10}{name:6}"
            + "".join(f"{middle[stage]:9.0f}" for stage in STAGES)
            + f"{total:9.0f}{totals[0]:9.0f}{totals[-1]:9.0f}"
            + f"{statistics.median(alone[LEFT_OUT[0] :]):9.0f}{beyond:9.0f}"
            + ("" if total <= TARGET else "  > 1 ms")
            + ("" if beyond <= TARGET else " beyond torch, too")
        )
    full = sum(generation == 2 for generation in collections)
    if full:
        lines.append(f"    {full} full garbage collections during these calls")
    return lines


def first_split(width: int, rows: int, verify: bool) -> float:
    """Microseconds of the first call of a new step, which is split in two."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.ones(rows, width)
    runs: UserList[int] = UserList()

    @oomkit.auto_batch(accumulation_steps=2, verify=None if verify else False)
    def step(x: Tensor) -> None:
        runs.append(len(x))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    optimizer.zero_grad()
    model(x[: rows // 2]).square().mean().backward()
    begin = clock()
    step(x)
    taken = (clock() - begin) / 1e3
    assert (len(runs) > 2) == verify, runs
    return taken


def one_slice(width: int, rows: int) -> float:
    """Microseconds of the forward and backward of half the batch."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)))
    x = torch.ones(rows // 2, width)
    for _ in range(2):
        begin = clock()
        model(x).square().mean().backward()
        taken = (clock() - begin) / 1e3
    return taken


def proofs(repetitions: int) -> list[str]:
    """What the proof of a split adds to the first split call of a step, turn by turn."""
    lines = [
        "",
        "us that the proof adds to a step's first split call; a slice: one forward and backward",
        f"{'width':>7}{'rows':>10}{'slice':>9}{'proof':>9}{'slices':>9}",
    ]
    for width, rows in ((256, 256), (512, 1024), (1536, 32)):
        added, slices = [], []
        for _ in range(repetitions + LEFT_OUT[0]):
            slices.append(one_slice(width, rows))
            without = first_split(width, rows, False)
            added.append(first_split(width, rows, True) - without)
        slice_, proof = (statistics.median(of[LEFT_OUT[0] :]) for of in (slices, added))
        lines.append(f"{width:7d}{rows:10d}{slice_:9.0f}{proof:9.0f}{proof / slice_:9.2f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the table there too")
    parser.add_argument("--repetitions", type=int, default=50)
    parser.add_argument("--quick", action="store_true", help="few, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("oomkit").addHandler(logging.NullHandler())
    logging.getLogger("oomkit").propagate = False
    warnings.simplefilter("ignore")
    sizes = [10, 100] if options.quick else [10, 30, 100, 300, 1000]
    nested = [1, 5] if options.quick else [1, 2, 10, 50]
    repetitions = 1 if options.quick else options.repetitions
    if options.quick:
        LEFT_OUT[0] = 0
    # Before anything else: what is imported or made once per process is in it.
    first = latencies(Scales(10), batches(1), False)[0]
    lines = [
        f"us of the first error of this process, with 10 parameters: {sum(first.values()):.0f}",
        "us from the error to the first statement of the replay (target: 1000): medians of the",
        "stages, median, least and most of their sum; the same error without oomkit, and beyond it",
        "",
        f"{'model':7}{'parameters':>10}{'tensors':>9}  {'fault in':10}{'':6}"
        + "".join(f"{stage:>9}" for stage in STAGES)
        + f"{'total':>9}{'least':>9}{'most':>9}{'torch':>9}{'beyond':>9}",
    ]
    for backward in (False, True):
        for parameters in sizes:
            lines += measure("flat", parameters, 1, backward, repetitions)
        for parameters in sizes:
            lines += measure("layers", parameters, 1, backward, repetitions)
        for tensors in nested[1:]:
            lines += measure("flat", 100, tensors, backward, repetitions)
    lines += proofs(1 if options.quick else max(2, repetitions // 5))
    text = "\n".join(lines)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
