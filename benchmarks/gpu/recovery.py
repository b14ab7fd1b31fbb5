"""From a real error to the first kernel of the replay, in stages, against the model's size.

    drop          to the end of a local variable of the failed step: its frames are cleared
    restore       to the call that clears autocast's cache: rolled back
    flush         to on_retry: the device waited for, its cache emptied, the plan made
    first kernel  to the end of the first operation of the replay

A step asks for more than the limit leaves once its forward and backward have run. Times of the
wall clock: nothing else runs on the machine. Target: 1 ms without the flush.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
import warnings
from collections import UserDict, UserList
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from torch import nn

# What a failed attempt puts into a dict is undone; this one is the standard library's.
MARKS: UserDict[str, int] = UserDict()
STAGES = ("drop", "restore", "flush", "first kernel")


def _marking(function: Any) -> Any:
    def wrapper() -> None:
        MARKS["restore"] = time.perf_counter_ns()
        function()

    return wrapper


# oomkit looks the function up when it is imported.
torch.clear_autocast_cache = _marking(torch.clear_autocast_cache)

from support import Setup, parser, report, setup_of  # noqa: E402

import oomkit  # noqa: E402


class Local:
    """A local variable of the step that notes when it dies."""

    def __del__(self) -> None:
        MARKS["drop"] = time.perf_counter_ns()


def once(setup: Setup, layers: int) -> dict[str, float]:
    width = 8 if setup.dry else 128
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(setup.device)
    x = torch.randn(64, width, device=setup.device)
    large = (64 << 10) if setup.dry else (4 << 30)
    seen: UserList[int] = UserList()

    def told(record: Any) -> None:
        MARKS["flush"] = time.perf_counter_ns()

    @oomkit.auto_batch(model=model, on_retry=told, verify=False, label="recovery")
    def step(x: torch.Tensor) -> None:
        if seen:
            (x + 1).sum()
            setup.wait()
            MARKS.setdefault("first kernel", time.perf_counter_ns())
        local = Local() if not seen else None
        seen.append(len(x))
        model(x).sum().backward()
        setup.wait()
        if len(seen) == 1:
            MARKS["error"] = time.perf_counter_ns()
            torch.empty(large, dtype=torch.uint8, device=setup.device)
        del local

    MARKS.clear()
    setup.forget()
    with setup.limit(setup.held() + large // 2):
        step(x)
    assert step.records[0].ooms == 1, "no error was provoked"
    times: dict[str, float] = {}
    before = MARKS["error"]
    for stage in STAGES:
        times[stage] = (MARKS[stage] - before) / 1000
        before = MARKS[stage]
    return times


def main() -> int:
    options = parser(__doc__).parse_args()
    setup = setup_of(options)
    warnings.simplefilter("ignore", oomkit.OomkitWarning)
    logging.getLogger("oomkit").setLevel(logging.ERROR)
    oomkit._C._keep_sizes(False)  # a step would begin split, as the one before it ended
    rows: list[dict[str, Any]] = []
    for layers in (2,) if setup.dry else (5, 50, 500):
        found = [once(setup, layers) for _ in range(2 if setup.dry else 30)]
        middle = {stage: statistics.median(each[stage] for each in found) for stage in STAGES}
        rest = sum(middle.values()) - middle["flush"]
        rows.append(
            {
                "parameters": 2 * layers,
                **{f"{stage}, us": value for stage, value in middle.items()},
                "without flush, us": rest,
                "target": "<= 1000",
            }
        )
    report(setup, "recovery", __doc__ or "", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
