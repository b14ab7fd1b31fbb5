"""Memory that grows from step to step, and who keeps it."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

SHOWN = 4  # steps in a row that must show it
LOOKED_AT = 16
FEW = 3  # tensors with graphs that make a container suspicious
MOST_ITEMS = 100_000


@dataclass(frozen=True)
class Growth:
    """Baselines of the last steps, each higher than the one before."""

    steps: int
    each: int  # bytes, the median
    total: int


def growth_of(records: Sequence[Any]) -> Growth | None:
    """Growth of what was allocated before each of the last steps, or None without one."""
    known = [r.baseline for r in records[-LOOKED_AT:] if r.baseline is not None]
    steps = [later - earlier for earlier, later in zip(known, known[1:], strict=False)]
    shown = 0
    while shown < len(steps) and steps[-1 - shown] > 0:
        shown += 1
    if shown < SHOWN:
        return None
    last = sorted(steps[-shown:])
    each = last[len(last) // 2]
    # Caches and states of a first step are no growth: the steps are much alike.
    alike = sum(each // 2 <= step <= each * 2 for step in last)
    return Growth(shown, each, sum(last)) if alike >= SHOWN else None


def _with_graphs(items: Iterable[Any]) -> int:
    return sum(isinstance(item, torch.Tensor) and item.grad_fn is not None for item in items)


def _count(value: object) -> int:
    """Tensors with graphs in a container, nested ones one deep."""
    if not isinstance(value, (list, tuple, set, dict, deque)) or len(value) > MOST_ITEMS:
        return 0
    items = list(value.values() if isinstance(value, dict) else value)
    inner = (list(item.values()) if isinstance(item, dict) else item for item in items)
    nested = sum(_with_graphs(item) for item in inner if isinstance(item, (list, tuple)))
    return _with_graphs(items) + nested


def _names(frame: FrameType) -> Iterator[tuple[str, object]]:
    """Variables in sight of a frame, and attributes of its own object."""
    names = dict(frame.f_locals)
    yield from names.items()
    for name in ("self", "cls"):
        own = getattr(names.get(name), "__dict__", None)
        if isinstance(own, dict):
            yield from ((f"{name}.{key}", value) for key, value in own.items())


def _describe(name: str, value: object, count: int, place: str) -> str:
    return f"{name}, a {type(value).__name__} of {count} tensors with graphs ({place}),"


def keeper(function: object) -> str | None:
    """The variable that keeps most tensors with graphs, and the line at work with it.

    Looked for among the variables of all frames below, their modules' and the step's own.
    """
    best: tuple[int, str] | None = None

    def look(name: str, value: object, place: str) -> None:
        nonlocal best
        count = _count(value)
        if count >= FEW and (best is None or count > best[0]):
            best = count, _describe(name, value, count, place)

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        if not frame.f_globals.get("__name__", "").startswith(("oomkit.", "torch.")):
            for name, value in _names(frame):
                look(name, value, place)
            for name, value in list(frame.f_globals.items()):
                look(name, value, place)
        frame = frame.f_back
    code = getattr(function, "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else "the step"
    for name, value in list(getattr(function, "__globals__", {}).items()):
        look(name, value, place)
    for name, cell in zip(
        getattr(code, "co_freevars", ()), getattr(function, "__closure__", None) or (), strict=False
    ):
        try:
            look(name, cell.cell_contents, place)
        except ValueError:  # not bound yet
            continue
    return None if best is None else best[1]
