"""The best fixed number of micro-batches, found by trying them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .trial import longest
from .workloads import Work

TIMED = 4  # steps, after two on the longest batch


@dataclass
class Sweep:
    k: int  # the fewest micro-batches that fit
    plan: tuple[int, int]  # (micro-batch, larger first one or 0) of the best
    times: dict[int, float]  # k -> seconds of the timed steps


def attempt(oracle: Any, index: int, work: Work, budget: int, plan: tuple[int, int]) -> Any:
    """Seconds, or None when memory ran out."""
    order = [longest(work)] * 2 + list(range(TIMED))
    course = oracle.ask("run", index, budget, {"plan": plan, "order": order})
    return None if course.died else course.steps[-1].time - course.steps[1].time


def sweep(oracle: Any, index: int, work: Work, budget: int, quick: bool) -> Sweep:
    """All k with sizes of their own, as far as four times the first that fits; then
    fewer, with a larger first micro-batch."""
    times: dict[int, float] = {}
    sizes: dict[int, tuple[int, int]] = {}
    for k in range(1, work.rows + 1):
        size = -(-work.rows // k)
        if -(-work.rows // size) != k:
            continue
        if times and k > (1 if quick else 4) * min(times):
            break
        seconds = attempt(oracle, index, work, budget, (size, 0))
        if seconds is not None:
            times[k], sizes[k] = seconds, (size, 0)
    k = min(times) - 1
    while work.training and k > 1:
        for eighths in range(7, 0, -1):
            later = work.rows * eighths // (8 * k)
            plan = (later, work.rows - (k - 1) * later)
            seconds = attempt(oracle, index, work, budget, plan)
            if seconds is not None:
                times[k], sizes[k] = seconds, plan
                break
        if k not in times:
            break
        k -= 1
    best = min(times)
    return Sweep(best, sizes[best], dict(sorted(times.items())))
