"""The figures of all repetitions as a table and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .adapters.fixed import NAME as ORACLE
from .sweep import Sweep
from .watch import Course
from .workloads import FIRST, Work

OURS = "oomkit"


@dataclass
class Found:
    work: Work
    base: int
    peak: int
    budget: int
    swept: Sweep
    courses: dict[str, list[Course]]  # contender -> one for each repetition
    begins: dict[str, list[float]]  # contender -> its first steps' time over the oracle's


def steady(course: Course) -> tuple[int, float] | None:
    """k at the end, and when the steps began from which on neither it nor memory failed.
    Shapes that vary (and what belongs to each) may vary in k: the largest counts."""
    if course.died or not course.steps:
        return None
    start, steps = 0, course.steps
    k = max((step.forwards for step in steps[len(steps) // 2 :] if not step.ooms), default=0)
    for index, step in enumerate(steps):
        if step.ooms or step.forwards > k:
            start = index + 1
    return k, steps[start - 1].time if start else course.restarted


def first_steps(one: Found, course: Course) -> float | None:
    """Seconds from the first model until as many rows as ten batches have were trained on,
    the search before included."""
    if course.died or not course.steps:
        return None
    rows = statistics.median(step.rows for step in course.steps if not step.ooms)
    last = course.steps[min(FIRST, len(course.steps)) - 1].time
    return course.restarted + (last - course.restarted) * one.work.rows / rows


def errors(one: Found, name: str) -> float:
    """Out-of-memory errors of a run: the median, for some search by the clock."""
    return float(statistics.median(course.ooms for course in one.courses[name]))


def speeds(one: Found, name: str) -> list[float] | None:
    """By repetition: rows in a second over the oracle's in the blocks between."""
    found = []
    for course in one.courses[name]:
        if course.died or not course.pairs:
            return None
        mine, theirs = (
            sum(pair[side].seconds for pair in course.pairs)
            / sum(pair[side].rows for pair in course.pairs)
            for side in (0, 1)
        )
        found.append(theirs / mine)
    return found


def middle(values: Iterable[float] | None, pattern: str, factor: float = 1.0) -> str:
    """Median, and half of what lies between the extremes."""
    if values is None:
        return "-"
    values = [value * factor for value in values]
    text = format(statistics.median(values), pattern)
    if len(values) > 1:
        text += "±" + format((max(values) - min(values)) / 2, pattern)
    return text


def bytes_of(size: float) -> str:
    return "0" if size < 2**10 else f"{size / 2**20:.2f} MiB"


HEADER = (
    f"{'':19}{'OOMs':>5}{'k':>5}{'steady after, s':>18}{'ten steps, x':>15}"
    f"{'steady speed':>15}{'alive at retry':>16}{'lost':>6}{'twice':>7}{'gradient':>10}"
)


def row(one: Found, name: str) -> str:
    courses = one.courses[name]
    last = courses[-1]
    ooms = f"{errors(one, name):.0f}"
    if last.died:
        return f"{name:19}{ooms:>5}  died after {len(last.steps)} steps: {last.died[:70]}"
    ends = [found for found in map(steady, courses) if found is not None]
    error = last.gradient_error
    return (
        f"{name:19}{ooms:>5}{max(k for k, _ in ends):5d}"
        f"{middle([after for _, after in ends], '.2f'):>18}"
        f"{middle(one.begins.get(name), '.2f'):>15}"
        f"{middle(speeds(one, name), '.1f', 100):>15}"
        f"{bytes_of(max(course.stray for course in courses)):>16}"
        f"{last.lost!s:>6}{last.twice!s:>7}{'-' if error is None else f'{error:.0e}':>10}"
    )


def report(found: list[Found], rest: dict[str, Any], ooms: int) -> str:
    lines = []
    for one in found:
        work, swept = one.work, one.swept
        times = swept.times
        lines += [
            f"{work.name}: {work.steps} batches of {work.rows}, budget "
            f"{one.budget / 2**20:.1f} MiB (model {one.base / 2**20:.1f}, whole step "
            f"{one.peak / 2**20:.1f}), k* = {swept.k}"
            + (f" ({swept.plan[1]} rows, then {swept.plan[0]})" if swept.plan[1] else ""),
            "    seconds of 4 steps by k: "
            + ", ".join(f"{k}: {seconds:.2f}" for k, seconds in times.items()),
            HEADER,
            *(row(one, name) for name in rest),
            "",
        ]
    return "\n".join(lines + totals(found, rest, ooms))


def totals(found: list[Found], rest: dict[str, Any], ooms: int) -> list[str]:
    lines = [f"{'':19}{'OOMs in all':>12}{'healthy call, us':>20}{f'left by {ooms} OOMs':>26}"]
    for name, (calls, left) in rest.items():
        total = sum(errors(one, name) for one in found)
        cost = middle(calls, ".3g", 1e-3) if None not in calls else "-"
        kept = "-"
        if left is not None:
            kept = bytes_of(left[0]) + (f", {left[1]} runs died" if left[1] else "")
        lines.append(f"{name:19}{total:12.0f}{cost:>20}{kept:>26}")
    return lines


def draw(found: list[Found], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted(name for name in found[0].courses if name != ORACLE)
    names.sort(key=lambda name: name == OURS)
    panels: list[tuple[str, Callable[[Found, str], float | None], float | None]] = [
        ("out-of-memory errors", errors, None),
        ("first ten steps, oracle = 1", lambda one, name: mid(one.begins.get(name)), 1.0),
        ("steady speed, oracle = 1", lambda one, name: mid(speeds(one, name)), 1.0),
    ]
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4.2), sharey=True)
    for axis, (title, value, line) in zip(axes, panels, strict=True):
        for number, one in enumerate(found):
            points = [(value(one, name), place) for place, name in enumerate(names)]
            shown = [(x, y) for x, y in points if x is not None]
            shift = 0.09 * (number - (len(found) - 1) / 2)
            axis.plot(
                [x for x, _ in shown], [y + shift for _, y in shown], "o", label=one.work.name
            )
        if line is not None:
            axis.axvline(line, color="grey", linewidth=0.8)
        axis.set_title(title, fontsize=10)
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(names)), names)
    axes[1].set_xscale("log")
    axes[0].legend(fontsize=7, loc="lower right")
    figure.text(0.01, 0.01, "missing: died, or has no figure (see peers.txt)", fontsize=7)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=120)


def mid(values: list[float] | None) -> float | None:
    return None if values is None else statistics.median(values)
