"""The micro-batch that oomkit finds, against the best fixed one that a search by hand finds.

Per workload, limit and kind of segments (each kind in a process of its own, for the settings are
read when a device is first used): errors until the size stands, micro-batches k and the fewest k*
that fit, and rows in a second after the first steps in % of the best fixed k's. Target: 97 %. A
larger first slice can make k smaller than k*, whose slices are equal. --workload, --gib and
--segments choose a part, which has a table of its own.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from support import GIB, Setup, parser, report, setup_of
from support.workloads import Workload, workloads

import oomkit

WORKLOADS = ["gpt2-124m", "resnet50-like"]
LIMITS = [8, 16, 24, 40]  # GiB
SEGMENTS = {"native": "expandable_segments:False", "expandable": "expandable_segments:True"}
FIND, TIMED = 6, 4  # steps until the size stands, and steps that are timed


def fixed_step(work: Workload, model: Any, optimizer: Any, k: int) -> Any:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        for part, target in zip(x.tensor_split(k), y.tensor_split(k), strict=True):
            (work.loss(model, part, target) * (len(part) / len(x))).backward()
        optimizer.step()

    return step


def speed(setup: Setup, step: Any, x: torch.Tensor, y: torch.Tensor, calls: int) -> float:
    """Rows in a second, after one call that makes the optimizer's state."""
    step(x, y)
    setup.wait()
    begin = time.perf_counter()
    for _ in range(calls):
        step(x, y)
    setup.wait()
    return calls * len(x) / (time.perf_counter() - begin)


def fixed(setup: Setup, work: Workload, size: int, k: int, calls: int) -> float | None:
    """Rows in a second with k equal micro-batches; None where they do not fit."""
    model, optimizer = work.start(setup)
    x, y = work.batch(work.rows, setup.device)
    try:
        with setup.limit(size):
            return speed(setup, fixed_step(work, model, optimizer, k), x, y, calls)
    except torch.OutOfMemoryError:
        return None
    finally:
        del model, optimizer, x, y
        oomkit.cleanup()


def best_fixed(setup: Setup, work: Workload, size: int) -> tuple[int | None, float | None]:
    """The fewest micro-batches that fit, by bisection, and their speed."""
    low, high = 1, work.rows + 1
    while low < high:
        k = 1 if low == 1 and high > work.rows else (low + high) // 2
        if fixed(setup, work, size, k, 1) is None:
            low = k + 1
        else:
            high = k
    return (None, None) if high > work.rows else (high, fixed(setup, work, size, high, TIMED))


def with_oomkit(setup: Setup, work: Workload, size: int) -> dict[str, Any]:
    model, optimizer = work.start(setup)
    x, y = work.batch(work.rows, setup.device)

    @oomkit.auto_batch(model=model, optimizer=optimizer, verify=False, ladder=(), label=work.name)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        work.loss(model, x, y).backward()
        optimizer.step()

    with setup.limit(size):
        begin = time.perf_counter()
        for _ in range(FIND):
            step(x, y)
        setup.wait()
        first = time.perf_counter() - begin
        ooms = sum(record.ooms for record in step.records)
        rate = speed(setup, step, x, y, TIMED)
    record = step.records[-1]
    return {
        "OOMs": sum(record.ooms for record in step.records),
        "OOMs in the first steps": ooms,
        "k": record.accumulation_steps,
        "first steps, s": first,
        "rows/s": rate,
        "peak, GiB": (record.peak_allocated or 0) / GIB,
    }


def limits(setup: Setup, work: Workload, sizes: list[int]) -> list[int]:
    if not setup.dry:
        total = torch.cuda.get_device_properties(0).total_memory
        return [size * GIB for size in sizes if size * GIB < total]
    model, optimizer = work.start(setup)
    x, y = work.batch(work.rows, setup.device)
    step = fixed_step(work, model, optimizer, 1)
    step(x, y)  # makes the optimizer's state
    with oomkit.guard() as guard:
        step(x, y)
    record = guard.records[-1]
    before = record.baseline or 0
    return [before + ((record.peak_allocated or 0) - before) * 3 // 4]


def measure(setup: Setup, options: Any) -> list[dict[str, Any]]:
    rows = []
    for name in options.workload:
        work = workloads(setup.dry)[name]
        for size in limits(setup, work, options.gib):
            k, rate = best_fixed(setup, work, size)
            row = {"workload": name, "limit, GiB": size / GIB, "segments": options.segments}
            try:
                found = with_oomkit(setup, work, size)
                share = 100 * found["rows/s"] / rate if rate else None
                row |= {**found, "k*": k, "of the best fixed, %": share, "target": ">= 97"}
            except torch.OutOfMemoryError as error:
                row |= {"k*": k, "OOMs": f"gave up: {str(error).splitlines()[0]}"}
            oomkit.cleanup()
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def in_a_process(options: Any, segments: str) -> list[dict[str, Any]]:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    environment = {**os.environ, **dict.fromkeys(names, SEGMENTS[segments])}
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"
        command = [sys.executable, __file__, "--part", str(part), "--segments", segments]
        command += ["--workload", *options.workload, "--gib", *map(str, options.gib)]
        command += ["--dry"] * options.dry
        subprocess.run(command, check=True, env=environment)
        rows: list[dict[str, Any]] = json.loads(part.read_text(encoding="utf-8"))
    return rows


def name_of(options: Any) -> str:
    """policies, or policies-gpt2-124m-8-native of a part that is run alone."""
    parts = ["policies"]
    parts += options.workload if options.workload != WORKLOADS else []
    parts += map(str, options.gib) if options.gib != LIMITS else []
    return "-".join([*parts, *([options.segments] if options.segments else [])])


def main() -> int:
    found = parser(__doc__)
    found.add_argument("--workload", nargs="*", choices=WORKLOADS, default=WORKLOADS)
    found.add_argument("--gib", nargs="*", type=int, default=LIMITS, help="the limits")
    found.add_argument("--segments", choices=SEGMENTS, help="one kind only")
    found.add_argument("--part", type=Path, help="in the process of one kind: where rows go")
    options = found.parse_args()
    setup = setup_of(options)
    warnings.simplefilter("ignore", oomkit.OomkitWarning)
    logging.getLogger("oomkit").setLevel(logging.ERROR)
    if options.part is not None:
        rows = measure(setup, options)
        options.part.write_text(json.dumps(rows), encoding="utf-8")
        return 0
    kinds = [options.segments] if options.segments else list(SEGMENTS)
    rows = [row for kind in kinds for row in in_a_process(options, kind)]
    report(setup, name_of(options), __doc__ or "", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
