"""What a healthy call costs: decorated against bare, in one process.

Every variant of a row is timed in turn, again and again, so that a slow moment of the
machine falls on all of them. `--json FILE` writes the figures too. The exit status is
always 0: the targets are printed beside the figures and judged by the reader.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import statistics
import subprocess
import sys
import time
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, make_dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn

import oomkit

Call = Callable[[], object]
clock = time.perf_counter_ns
ORDER = random.Random(0)


@dataclass
class Row:
    """One line of the table. Times in microseconds unless `unit` says otherwise."""

    name: str
    median: float | None
    p99: float | None
    over_bare: float | None
    unit: str = "us"
    target: str = ""


def block(call: Call, count: int) -> float:
    """Nanoseconds of one call, from a loop of `count`."""
    start = clock()
    for _ in repeat(None, count):
        call()
    return (clock() - start) / count


def single(call: Call) -> int:
    """Nanoseconds of one call, clock included."""
    start = clock()
    call()
    return clock() - start


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def shuffled(names: list[str]) -> list[str]:
    """The names in another order at every turn, so that none always follows the same one."""
    return ORDER.sample(names, len(names))


def interleave(calls: dict[str, Call], count: int, repetitions: int) -> dict[str, list[float]]:
    """Times of one call: per variant, one value for each repetition of a block."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        block(calls[name], max(3, count // 10))
    for _ in range(repetitions):
        for name in shuffled(names):
            times[name].append(block(calls[name], count))
    return times


def tails(calls: dict[str, Call], repetitions: int) -> dict[str, float]:
    """99th percentile of a single call, variants interleaved."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repetitions):
        for name in shuffled(names):
            times[name].append(single(calls[name]))
    return {name: quantile(values, 0.99) for name, values in times.items()}


def paired(times: dict[str, list[float]], name: str) -> float:
    """Median over the repetitions of (variant - bare), in nanoseconds."""
    return statistics.median(
        mine - bare for mine, bare in zip(times[name], times["bare"], strict=True)
    )


def rows_of(
    title: str, calls: dict[str, Call], count: int, repetitions: int, targets: dict[str, str]
) -> list[Row]:
    times = interleave(calls, count, repetitions)
    last = tails(calls, max(repetitions * 10, 300))
    return [
        Row(
            f"{title}: {name}",
            statistics.median(times[name]) / 1e3,
            last[name] / 1e3,
            None if name == "bare" else paired(times, name) / 1e3,
            target=targets.get(name, ""),
        )
        for name in calls
    ]


# --- the rows -----------------------------------------------------------------------


def try_except(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def wrapper(batch: Any) -> Any:
        try:
            return function(batch)
        except torch.OutOfMemoryError:
            raise

    return wrapper


def wraps(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def wraps_recording(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    ring: deque[int] = deque(maxlen=1024)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = clock()
        result = function(*args, **kwargs)
        ring.append(clock() - start)
        return result

    return wrapper


def plain() -> dict[str, Call]:
    def function(batch: Any) -> Any:
        return batch

    batch = torch.zeros(8, 4)
    variants = {
        "bare": function,
        "try/except": try_except(function),
        "functools.wraps": wraps(function),
        "functools.wraps, two timestamps, deque": wraps_recording(function),
        "auto_batch(rng='none')": oomkit.auto_batch(function, rng="none"),
        "auto_batch": oomkit.auto_batch(function),
    }
    return {name: functools.partial(variant, batch) for name, variant in variants.items()}


def plain_calls(scale: float) -> list[Row]:
    targets = {"auto_batch(rng='none')": "over bare <= 0.25", "auto_batch": "over bare <= 1.5"}
    return rows_of("call", plain(), 1000, int(200 * scale), targets)


def nested() -> dict[str, dict[str, Call]]:
    """By kind of batch."""

    def function(batch: Any) -> None:
        pass

    names = [f"field{i}" for i in range(50)]
    tensors = {name: torch.zeros(8, 4) for name in names}
    batches = {
        "nested batch of 50 tensors": {
            "inputs": [torch.zeros(8, 4) for _ in range(25)],
            "targets": tuple(torch.zeros(8) for _ in range(25)),
        },
        "UserDict (BatchEncoding) of 50 tensors": UserDict(tensors),
        "OrderedDict (ModelOutput) of 50 tensors": OrderedDict(tensors),
        "data class of 50 tensors": make_dataclass("Batch", names)(**tensors),
        "data class of 3 tensors": make_dataclass("Batch", names[:3])(*list(tensors.values())[:3]),
    }
    return {
        title: {
            "bare": functools.partial(function, batch),
            "auto_batch(rng='none')": functools.partial(
                oomkit.auto_batch(function, rng="none"), batch
            ),
            "auto_batch": functools.partial(oomkit.auto_batch(function), batch),
        }
        for title, batch in batches.items()
    }


def nested_batch(scale: float) -> list[Row]:
    """What taking the arguments apart costs."""
    rows = []
    for title, calls in nested().items():
        targets = {"auto_batch": "over bare <= 3"}
        rows += rows_of(title, calls, 200, int(100 * scale), targets)
    return rows


def one_backward(count: int) -> dict[str, Call]:
    """A step with one backward over `count` parameters."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(count))
    parameters = list(model)

    def step(batch: torch.Tensor) -> torch.Tensor:
        for parameter in parameters:
            parameter.grad = None
        loss = torch.cat(parameters).sum() * batch.mean()
        loss.backward()
        return loss.detach()

    batch = torch.ones(8)
    return {
        "bare": functools.partial(step, batch),
        "bare once more (noise)": functools.partial(step, batch),
        "auto_batch(rng='none')": functools.partial(
            oomkit.auto_batch(step, rng="none", model=model), batch
        ),
    }


def backward_over(count: int, scale: float) -> tuple[list[Row], dict[str, float]]:
    """Rows of that step, and nanoseconds over bare."""
    calls = one_backward(count)
    times = interleave(calls, 2, int(2000 * scale))
    last = tails(calls, int(1000 * scale))
    over = {name: paired(times, name) for name in calls}
    rows = [
        Row(
            f"backward, {count} parameters: {name}",
            statistics.median(times[name]) / 1e3,
            last[name] / 1e3,
            None if name == "bare" else over[name] / 1e3,
        )
        for name in calls
    ]
    return rows, over


def backward(scale: float) -> list[Row]:
    few, few_over = backward_over(10, scale)
    many, many_over = backward_over(150, scale)
    rows = [*few, *many]
    for name, target in (
        ("bare once more (noise)", ""),
        ("auto_batch(rng='none')", "over bare <= 15"),
    ):
        slope = (many_over[name] - few_over[name]) / 140
        rows.append(
            Row(f"backward, each further parameter: {name}", None, None, slope, "ns", target)
        )
    return rows


def adamw_step() -> Callable[[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.detach()

    return step


def whole_calls() -> dict[str, Call]:
    batch = torch.ones(16, 32)
    return {
        "bare": functools.partial(adamw_step(), batch),
        "auto_batch": functools.partial(oomkit.auto_batch(adamw_step()), batch),
    }


def whole_step(scale: float) -> list[Row]:
    title = "whole step, AdamW and scheduler"
    return rows_of(title, whole_calls(), 5, int(300 * scale), {"auto_batch": "over bare <= 6"})


def returned_loss(scale: float) -> list[Row]:
    """The step returns its loss and the caller runs backward."""

    def make() -> Callable[[torch.Tensor], torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64))

        def step(batch: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(batch).square().mean()
            return loss

        return step

    def run(step: Callable[[torch.Tensor], torch.Tensor]) -> None:
        step(batch).backward()

    def inside(step: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], None]:
        def whole(batch: torch.Tensor) -> None:
            step(batch).backward()

        return whole

    batch = torch.ones(16, 32)
    calls = {
        "bare": functools.partial(run, make()),
        "bare once more (noise)": functools.partial(run, make()),
        "auto_batch, backward inside the step": functools.partial(
            oomkit.auto_batch(inside(make())), batch
        ),
        "auto_batch(rng='none')": functools.partial(run, oomkit.auto_batch(make(), rng="none")),
        "auto_batch": functools.partial(run, oomkit.auto_batch(make())),
    }
    targets = {"auto_batch": "<= 5 more than backward inside"}
    return rows_of("returned loss, caller's backward", calls, 5, int(600 * scale), targets)


def buffers(scale: float) -> list[Row]:
    count = 20

    def make() -> Callable[[torch.Tensor], torch.Tensor]:
        model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(count)))

        def step(batch: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return model(batch)

        return step

    batch = torch.randn(8, 4)
    name = "auto_batch(rng='none')"
    calls = {
        "bare": functools.partial(make(), batch),
        name: functools.partial(oomkit.auto_batch(make(), rng="none"), batch),
    }
    rows = rows_of(f"{count} BatchNorm layers, {3 * count} buffers", calls, 5, int(300 * scale), {})
    each = 1e3 * (rows[1].over_bare or 0.0) / (3 * count)
    row = Row("moving buffers, each", None, None, each, "ns", "over bare <= 600")
    return [*rows, row]


def guards(scale: float) -> list[Row]:
    kept = oomkit.guard()
    null = contextlib.nullcontext()

    def bare() -> None:
        pass

    def null_context() -> None:
        with null:
            pass

    def guard_kept() -> None:
        with kept:
            pass

    def guard_made() -> None:
        with oomkit.guard():
            pass

    calls = {
        "bare": bare,
        "nullcontext": null_context,
        "enter and exit": guard_kept,
        "made, enter and exit": guard_made,
    }
    targets = {"enter and exit": "over bare <= 0.3"}
    return rows_of("guard", calls, 1000, int(200 * scale), targets)


def loops(scale: float) -> list[Row]:
    """Evaluation that never splits: a loop over chunks() with its guard, and map()."""
    batch = torch.ones(8, 4)
    taken: list[torch.Tensor] = []

    def bare() -> None:
        taken[:] = [batch]

    def chunks() -> None:
        for part in oomkit.chunks(batch):
            with oomkit.guard():
                taken[:] = [part]

    def mapped() -> None:
        taken[:] = [oomkit.map(same, batch)]

    def same(part: torch.Tensor) -> torch.Tensor:
        return part

    calls = {"bare": bare, "chunks and guard": chunks, "map": mapped}
    return rows_of("evaluation", calls, 200, int(100 * scale), {})


# --- the allocator: installed in one process, not in another --------------------------

SIZES = (64, 4096, 1 << 20)


def allocation_child(installed: bool) -> None:
    """Prints nanoseconds per torch.empty of each size, as JSON."""
    if installed:
        oomkit.limit_memory(1 << 50, device="cpu")
    result = {}
    for size in SIZES:
        call = functools.partial(torch.empty, size, dtype=torch.uint8)
        block(call, 2000)
        result[str(size)] = statistics.median(block(call, 2000) for _ in range(30))
    print(json.dumps(result))


def allocator(scale: float) -> list[Row]:
    times: dict[bool, dict[str, list[float]]] = {False: {}, True: {}}
    for turn in range(max(2, int(4 * scale))):
        for installed in (False, True) if turn % 2 else (True, False):
            command = [sys.executable, __file__, "--allocation-child", str(int(installed))]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for size, value in json.loads(output).items():
                times[installed].setdefault(size, []).append(value)
    rows = []
    for size in map(str, SIZES):
        plain = statistics.median(times[False][size])
        ours = statistics.median(times[True][size])
        title = f"torch.empty of {size} bytes"
        rows.append(
            Row(f"{title}: torch's allocator", plain / 1e3, max(times[False][size]) / 1e3, None)
        )
        rows.append(
            Row(
                f"{title}: budget allocator",
                ours / 1e3,
                max(times[True][size]) / 1e3,
                (ours - plain) / 1e3,
            )
        )
    return rows


# --- the program ----------------------------------------------------------------------

SECTIONS = (
    plain_calls,
    nested_batch,
    backward,
    whole_step,
    returned_loss,
    buffers,
    guards,
    loops,
    allocator,
)


def figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def show(rows: list[Row]) -> None:
    width = max(len(row.name) for row in rows)
    print(f"{'':{width}}  {'median':>9} {'p99':>9} {'over bare':>10}      target")
    for row in rows:
        figures = f"{figure(row.median):>9} {figure(row.p99):>9} {figure(row.over_bare):>10}"
        print(f"{row.name:{width}}  {figures} {row.unit}  {row.target}".rstrip())
    print(
        "\nmedian: of one call, over blocks of calls; p99: of single calls, clock included;"
        "\nover bare: median of the differences to the bare block of the same turn. For the"
        "\nallocator: medians and largest of several processes."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--scale", type=float, default=1.0, help="repetitions, relative")
    names = [section.__name__ for section in SECTIONS]
    parser.add_argument("--sections", nargs="+", choices=names, default=names)
    parser.add_argument("--allocation-child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.allocation_child is not None:
        allocation_child(bool(args.allocation_child))
        return 0
    rows: list[Row] = []
    for section in SECTIONS:
        if section.__name__ in args.sections:
            rows += section(args.scale)
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, one thread\n")
    show(rows)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
