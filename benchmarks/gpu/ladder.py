"""How little memory is enough for a GPT of 774 million parameters, and what the ladder costs.

First the smallest limit, in % of what the plain program reserves, at which three steps are trained
(bisection in steps of 2.5 %): plain, Composer's policy (half the micro-batch at each error; the
optimizer is left alone), oomkit with ladder=(), oomkit. Then oomkit at some limits: its rung, its
speed in % of the plain program's without a limit, and `moves, ms`: what a step takes beyond the
same micro-batches by hand without a limit. All in one process; before each run nothing may be
allocated.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import time
import warnings
from collections import UserList
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from support import GIB, Setup, parser, report, setup_of
from support.workloads import GPT, Workload

import oomkit

GRID, ROUGH = 0.025, 0.05  # places that bisection tries; of a dry run
SHARES = (1.0, 0.8, 0.6, 0.4, 0.3)
STEPS, WARM, TIMED = 3, 4, 6
Step = Callable[[], Any]


def workload(dry: bool) -> Workload:
    layers, width, heads, length, words = (4, 32, 2, 16, 64) if dry else (36, 1280, 20, 1024, 50257)

    def tokens(rows: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.randint(0, words, (rows, length + 1), device=device)
        return drawn[:, :-1], drawn[:, 1:].contiguous()

    return Workload("gpt2-774m", 8, lambda: GPT(layers, width, heads, length, words), tokens)


class World:
    """A model, its optimizer and a batch."""

    def __init__(self, setup: Setup, work: Workload) -> None:
        self.work = work
        self.model, self.optimizer = work.start(setup)
        self.x, self.y = work.batch(work.rows, setup.device)

    def gradients(self, rows: int | list[int]) -> None:
        self.optimizer.zero_grad()
        for x, y in zip(self.x.split(rows), self.y.split(rows), strict=True):
            (self.work.loss(self.model, x, y) * (len(x) / len(self.x))).backward()

    def update(self, rows: int | list[int]) -> None:
        self.gradients(rows)
        self.optimizer.step()


def plain(world: World) -> Step:
    return lambda: world.update(len(world.x))


def composer_policy(world: World) -> Step:
    size = len(world.x)

    def call() -> None:
        nonlocal size
        while True:
            try:
                world.gradients(size)
                break
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
            size = (size + 1) // 2
            oomkit.cleanup()
        world.optimizer.step()

    return call


def with_oomkit(world: World, ladder: Any = "auto") -> Step:
    model, optimizer, work = world.model, world.optimizer, world.work
    sizes: UserList[int] = UserList()  # a list would be put back with an attempt

    @oomkit.auto_batch(model=model, optimizer=optimizer, verify=False, ladder=ladder)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        sizes.append(len(x))
        optimizer.zero_grad()
        work.loss(model, x, y).backward()
        optimizer.step()

    def call() -> Any:
        del sizes[:]
        step(world.x, world.y)
        record = step.records[-1]
        return record, sizes[-record.accumulation_steps :]

    return call


CONTENDERS: dict[str, Callable[[World], Step]] = {
    "plain": plain,
    "Composer's policy": composer_policy,
    "oomkit, ladder=()": partial(with_oomkit, ladder=()),
    "oomkit": with_oomkit,
}


def nothing_left(setup: Setup) -> None:
    if not setup.dry:  # 32 MiB on an H100, for each thread that multiplies
        torch._C._cuda_clearCublasWorkspaces()
    setup.forget()
    left = oomkit.memory(setup.device).allocated or 0
    # A dry run is part of a process that has other things.
    if left > 64 << 20 and not setup.dry:
        raise AssertionError(f"{left} bytes are left of the run before")


def trains(setup: Setup, work: Workload, size: int, make: Callable[[World], Step]) -> bool:
    nothing_left(setup)
    try:
        with setup.limit(size):
            call = make(World(setup, work))
            for _ in range(STEPS):
                call()
            setup.wait()
    except (RuntimeError, ValueError):  # the error holds what died until here
        return False
    return True


def peak(setup: Setup, work: Workload) -> int:
    nothing_left(setup)
    with setup.limit(1 << 50 if setup.dry else None), oomkit.guard(label="plain") as guard:
        call = plain(World(setup, work))
        for _ in range(STEPS):
            call()
        setup.wait()
    record = guard.records[-1]
    return (record.peak_allocated if setup.dry else record.peak_reserved) or 0


def smallest(setup: Setup, work: Workload, whole: int, name: str) -> float | None:
    """In % of the whole; None where 110 % is not enough either."""
    grid = ROUGH if setup.dry else GRID
    low, high = 0, round(1.1 / grid) + 1
    while high - low > 1:
        middle = (low + high) // 2
        enough = trains(setup, work, int(middle * grid * whole), CONTENDERS[name])
        low, high = (low, middle) if enough else (middle, high)
    return None if high > round(1.1 / grid) else 100 * high * grid


def seconds(setup: Setup, call: Step) -> tuple[float, Any]:
    """Of a step, and what the last one returned."""
    taken: list[float] = []
    last = None
    for _ in range(WARM):
        call()
    for _ in range(2 if setup.dry else TIMED):
        setup.wait()
        begun = time.perf_counter()
        last = call()
        setup.wait()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken), last


def by_hand(setup: Setup, work: Workload, rows: int | list[int]) -> float:
    nothing_left(setup)
    world = World(setup, work)
    return seconds(setup, lambda: world.update(rows))[0]


def at(setup: Setup, work: Workload, whole: int, share: float) -> dict[str, Any]:
    nothing_left(setup)
    row: dict[str, Any] = {"contender": "oomkit", "limit, %": 100 * share}
    try:
        with setup.limit(int(share * whole)):
            taken, (record, sizes) = seconds(setup, with_oomkit(World(setup, work)))
    except (RuntimeError, ValueError) as error:
        return {**row, "rung": f"died: {str(error).splitlines()[0][:80]}"}
    whole_batch = by_hand(setup, work, work.rows)
    same = by_hand(setup, work, list(sizes))
    return {
        **row,
        "rung": record.rung,
        "k": record.accumulation_steps,
        "speed, %": 100 * whole_batch / taken,
        "s/step": taken,
        "moves, ms": 1000 * (taken - same),
        "peak, GiB": (record.peak_allocated or 0) / GIB,
    }


def main() -> int:
    setup = setup_of(parser(__doc__).parse_args())
    warnings.simplefilter("ignore", oomkit.OomkitWarning)
    logging.getLogger("oomkit").setLevel(logging.ERROR)
    oomkit._C._keep_sizes(False)  # a step would begin as the one before it ended
    if setup.dry:
        torch.set_num_threads(1)
    work = workload(setup.dry)
    whole = peak(setup, work)
    rows: list[dict[str, Any]] = []
    for name in CONTENDERS:
        found = smallest(setup, work, whole, name)
        rows.append({"contender": name, "smallest, %": found, "whole, GiB": whole / GIB})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    for share in SHARES:
        rows.append(at(setup, work, whole, share))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    report(setup, "ladder", __doc__ or "", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
