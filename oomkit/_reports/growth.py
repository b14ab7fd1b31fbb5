"""Memory that grows from step to step, and who keeps it."""

from __future__ import annotations

import ast
import linecache
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

SHOWN = 4  # steps in a row that must show it
LOOKED_AT = 16
FEW = 3  # tensors with graphs that make a container suspicious
MOST_ITEMS = 100_000
ADDS = {"append", "appendleft", "add", "extend", "insert", "setdefault", "update"}


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


def _adds(node: ast.AST, name: str) -> bool:
    """Is it `name.append(...)`, `name[...] = ...` or `name += ...`?"""
    target: ast.AST | None = None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        target = node.func.value if node.func.attr in ADDS else None
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        target = node.targets[0].value
    elif isinstance(node, ast.AugAssign):
        target = node.target
    return target is not None and ast.unparse(target) == name


def _adding_line(name: str, code: CodeType) -> int | None:
    """The line that puts something into the container: in this function, else in its file."""
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
        found = sorted(node.lineno for node in ast.walk(tree) if _adds(node, name))  # type: ignore[attr-defined]
        own = {line for _, _, line in code.co_lines() if line is not None}
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return None  # no source, or none of Python's
    return next((line for line in found if line in own), found[0] if found else None)


def _describe(name: str, value: object, count: int, code: CodeType | None, line: int) -> str:
    what = f"{name}, a {type(value).__name__} of {count} tensors with graphs"
    if code is None:
        return f"{what},"
    added = _adding_line(name, code)
    if added is not None:
        return f"{what} (filled at {code.co_filename}:{added}),"
    return f"{what} (a variable at {code.co_filename}:{line} in {code.co_name}),"


def keeper(function: object) -> str | None:
    """The variable that keeps most tensors with graphs, and the line that fills it.

    Looked for among the variables of all frames below, their modules' and the step's own.
    """
    best: tuple[int, str, object, CodeType | None, int] | None = None

    def look(name: str, value: object, code: CodeType | None, line: int) -> None:
        nonlocal best
        count = _count(value)
        if count >= FEW and (best is None or count > best[0]):
            best = count, name, value, code, line

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(("oomkit.", "torch.")):
            for name, value in _names(frame):
                look(name, value, frame.f_code, frame.f_lineno)
            for name, value in list(frame.f_globals.items()):
                look(name, value, frame.f_code, frame.f_lineno)
        frame = frame.f_back
    code = getattr(function, "__code__", None)
    line = getattr(code, "co_firstlineno", 0)
    for name, value in list(getattr(function, "__globals__", {}).items()):
        look(name, value, code, line)
    for name, cell in zip(
        getattr(code, "co_freevars", ()), getattr(function, "__closure__", None) or (), strict=False
    ):
        try:
            look(name, cell.cell_contents, code, line)
        except ValueError:  # not bound yet
            continue
    if best is None:
        return None
    count, name, value, code, line = best
    return _describe(name, value, count, code, line)
