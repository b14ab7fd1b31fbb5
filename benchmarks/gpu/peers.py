"""Other packages on the same training under the same limit: GPT-2 124M by default at 16 GiB.

Each contender runs in a process of its own, forked from none. Counted: errors that torch raised,
whoever caught them; micro-batches of the last update; seconds of the first ten batches, searches
included, and rows in a second after them. Composer's policy (half the micro-batch at each error)
is a few lines of ours. A contender whose package is not installed is named.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from support import GIB, Setup, parser, report, setup_of
from support.workloads import Workload, workloads

import oomkit

FIRST, TIMED = 10, 6
Train = Callable[["World"], Callable[[], int]]


class World:
    """What a contender trains, and the errors that it meets."""

    def __init__(self, setup: Setup, work: Workload) -> None:
        self.setup, self.work = setup, work
        self.model, self.optimizer = work.start(setup)
        self.x, self.y = work.batch(work.rows, setup.device)
        self.ooms = 0

    def counted(self, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except torch.OutOfMemoryError:
            self.ooms += 1
            raise

    def update(self, rows: int) -> int:
        """One batch in micro-batches of so many rows; their number."""
        self.optimizer.zero_grad()
        parts = list(zip(self.x.split(rows), self.y.split(rows), strict=True))
        for x, y in parts:
            loss = self.work.loss(self.model, x, y) * (len(x) / len(self.x))
            loss.backward()
        self.optimizer.step()
        return len(parts)


def with_oomkit(world: World) -> Callable[[], int]:
    model, optimizer, work = world.model, world.optimizer, world.work

    @oomkit.auto_batch(model=model, optimizer=optimizer, verify=False)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        work.loss(model, x, y).backward()
        optimizer.step()

    def call() -> int:
        step(world.x, world.y)
        record = step.records[-1]
        world.ooms += record.ooms
        return int(record.accumulation_steps)

    return call


def composer_policy(world: World) -> Callable[[], int]:
    size = len(world.x)

    def call() -> int:
        nonlocal size
        while True:
            try:
                return int(world.counted(partial(world.update, size)))
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                size = (size + 1) // 2
            oomkit.cleanup()

    return call


def _searching(decorate: Callable[[Callable[[int], int]], Callable[[], int]]) -> Train:
    """For packages that call a function with a size until it does not fail."""

    def make(world: World) -> Callable[[], int]:
        return decorate(lambda size: int(world.counted(lambda: world.update(size))))

    return make


def with_accelerate() -> Train:
    found = importlib.import_module("accelerate.utils").find_executable_batch_size

    def decorate(run: Callable[[int], int]) -> Callable[[], int]:
        def inner(batch_size: int) -> int:
            return run(batch_size)

        return found(inner, starting_batch_size=ROWS)

    return _searching(decorate)


def with_toma() -> Train:
    found = importlib.import_module("toma").toma

    def decorate(run: Callable[[int], int]) -> Callable[[], int]:
        def inner(batchsize: int) -> int:
            return run(batchsize)

        return found.batch(initial_batchsize=ROWS)(inner)

    return _searching(decorate)


def with_torch_max_mem() -> Train:
    found = importlib.import_module("torch_max_mem").maximize_memory_utilization

    def decorate(run: Callable[[int], int]) -> Callable[[], int]:
        def inner(batch_size: int) -> int:
            return run(batch_size)

        wrapped = found()(inner)

        def call() -> int:
            result = wrapped(batch_size=ROWS)
            return int(result[0] if isinstance(result, tuple) else result)

        return call

    return _searching(decorate)


ROWS = 0  # of the batch, set by main()
CONTENDERS: dict[str, Callable[[], Train]] = {
    "oomkit": lambda: with_oomkit,
    "Composer's policy": lambda: composer_policy,
    "accelerate": with_accelerate,
    "toma": with_toma,
    "torch-max-mem": with_torch_max_mem,
}


def measure(setup: Setup, work: Workload, size: int, name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"contender": name}
    try:
        make = CONTENDERS[name]()
    except ImportError:
        return {**row, "OOMs": "not installed"}
    world = World(setup, work)
    call = make(world)
    with setup.limit(size):
        begin = time.perf_counter()
        k = 0
        try:
            for _ in range(FIRST):
                k = call()
            setup.wait()
            first = time.perf_counter() - begin
            begin = time.perf_counter()
            for _ in range(TIMED):
                k = call()
            setup.wait()
        except (RuntimeError, ValueError) as error:
            return {**row, "OOMs": world.ooms, "k": f"died: {str(error).splitlines()[0]}"}
    rate = TIMED * work.rows / (time.perf_counter() - begin)
    return {**row, "OOMs": world.ooms, "k": k, "first ten, s": first, "rows/s": rate}


def dry_limit(setup: Setup, work: Workload) -> int:
    """Seven tenths of what a whole batch takes, beside what is there without it."""
    gc.collect()
    there = oomkit.memory(setup.device).allocated or 0
    world = World(setup, work)
    with oomkit.guard() as guard:
        world.update(work.rows)
    return there + int(((guard.records[-1].peak_allocated or 0) - there) * 0.7)


def in_a_process(options: Any, name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"
        command = [sys.executable, __file__, "--part", str(part), "--only", name]
        command += ["--workload", options.workload, "--gib", str(options.gib)]
        done = subprocess.run([*command, *["--dry"] * options.dry], check=False)
        if done.returncode != 0:
            return {"contender": name, "OOMs": f"exit status {done.returncode}"}
        row: dict[str, Any] = json.loads(part.read_text(encoding="utf-8"))
    return row


def main() -> int:
    global ROWS
    found = parser(__doc__)
    found.add_argument("--workload", default="gpt2-124m")
    found.add_argument("--gib", type=float, default=16.0, help="the limit")
    found.add_argument("--only", choices=CONTENDERS, help="one contender")
    found.add_argument("--part", type=Path, help="in the process of one: where its row goes")
    options = found.parse_args()
    setup = setup_of(options)
    work = workloads(setup.dry)[options.workload]
    ROWS = work.rows
    if options.part is not None:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        size = dry_limit(setup, work) if setup.dry else int(options.gib * GIB)
        row = measure(setup, work, size, options.only)
        options.part.write_text(json.dumps(row), encoding="utf-8")
        return 0
    names = [options.only] if options.only else list(CONTENDERS)
    report(setup, "peers", __doc__ or "", [in_a_process(options, name) for name in names])
    return 0


if __name__ == "__main__":
    sys.exit(main())
