"""What a healthy call costs the host: decorated against bare, on tensors of a device.

The function returns its argument, so that nothing but the wrapper is timed. *memory calls* are the
three that a program makes by hand to know a step's peak. Target: 2 us with peaks.
"""

from __future__ import annotations

import importlib
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from support import Setup, parser, report, setup_of

import oomkit

TARGET = 2.0  # us


def by_hand(setup: Setup) -> Callable[[torch.Tensor], Any]:
    if setup.dry:
        return lambda x: (x, oomkit.memory("cpu").peak_allocated)

    def call(x: torch.Tensor) -> Any:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.memory_allocated()
        return x, torch.cuda.max_memory_allocated()

    return call


def _accelerate(bare: Callable[..., Any]) -> Callable[..., Any]:
    found = importlib.import_module("accelerate.utils").find_executable_batch_size
    return found(starting_batch_size=8)(lambda batch_size, x: bare(x))


def _toma(bare: Callable[..., Any]) -> Callable[..., Any]:
    found = importlib.import_module("toma").toma
    wrapped = found.batch(initial_batchsize=8)(lambda batchsize, x: bare(x))
    return lambda x: wrapped(x)


def _torch_max_mem(bare: Callable[..., Any]) -> Callable[..., Any]:
    found = importlib.import_module("torch_max_mem").maximize_memory_utilization

    def sized(x: torch.Tensor, batch_size: int) -> Any:
        return bare(x)

    wrapped = found()(sized)
    return lambda x: wrapped(x=x, batch_size=8)


PEERS = {"accelerate": _accelerate, "toma": _toma, "torch-max-mem": _torch_max_mem}


def variants(setup: Setup) -> tuple[dict[str, Callable[[torch.Tensor], Any]], list[str]]:
    def bare(x: torch.Tensor) -> torch.Tensor:
        return x

    guard = oomkit.guard(label="healthy")

    def guarded(x: torch.Tensor) -> torch.Tensor:
        with guard:
            return x

    found: dict[str, Callable[[torch.Tensor], Any]] = {
        "bare": bare,
        "auto_batch": oomkit.auto_batch(bare, label="whole"),
        "auto_batch, reset_peaks=False": oomkit.auto_batch(bare, reset_peaks=False),
        'auto_batch, rng="none"': oomkit.auto_batch(bare, rng="none"),
        "guard": guarded,
        "memory calls": by_hand(setup),
    }
    missing = []
    for name, make in PEERS.items():
        try:
            found[name] = make(bare)
        except ImportError:
            missing.append(name)
    return found, missing


def timed(call: Callable[[torch.Tensor], Any], x: torch.Tensor, count: int) -> float:
    begin = time.perf_counter_ns()
    for _ in range(count):
        call(x)
    return (time.perf_counter_ns() - begin) / count / 1000


def main() -> int:
    options = parser(__doc__).parse_args()
    setup = setup_of(options)
    x = torch.zeros(8, 4, device=setup.device)
    found, missing = variants(setup)
    turns = 2 if setup.dry else 30
    times: dict[str, list[float]] = {name: [] for name in found}
    slow: set[str] = set()
    for turn in range(turns):
        names = random.Random(turn).sample(list(found), len(found))
        for name in names:
            count = 2 if setup.dry or name in slow else 2000
            took = timed(found[name], x, 2 if turn == 0 else count)
            if turn == 0:
                if took > 500:
                    slow.add(name)  # milliseconds each: a few are enough
            else:
                times[name].append(took)
    bare = statistics.median(times["bare"])
    rows: list[dict[str, Any]] = []
    for name, each in times.items():
        over = statistics.median(each) - bare
        rows.append({"call": name, "us": statistics.median(each), "over bare, us": over})
        if name == "auto_batch":
            rows[-1]["target"] = f"<= {TARGET}"
    rows += [{"call": name, "us": None, "over bare, us": "not installed"} for name in missing]
    report(setup, "healthy", __doc__ or "", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
