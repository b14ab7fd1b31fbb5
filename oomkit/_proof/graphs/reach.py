"""Which functions of a loss's graph are given numbers that all rows make.

In a part, what has rows has another shape than in the whole. A function whose result has not,
although it is made from what has, makes one number, or a few, of all rows: a mean, a norm.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["Sketch", "reached", "sketch"]

# By function, children before or after it: its kind, the shapes of its results (None where they
# cannot be told), the results it is made from, and the name of its bound if it has one.
_Result = tuple[int, int]  # of a function: which one
Sketch = tuple[tuple[str, Any, "tuple[_Result | None, ...]", "str | None"], ...]

_OF_PARAMETERS, _OF_ROWS, _OF_ALL = range(3)
# These take some rows out, or put rows among others, and make nothing of all.
_MOVES = frozenset(
    "Amax Amin AsStrided Cat Chunk ConstantPadNd Cummax Cummin Diagonal Gather Index IndexCopy "
    "IndexPut IndexPutImpl IndexSelect Kthvalue MaskedScatter MaskedSelect Max Median Min Mode "
    "Nanmedian Scatter Select SelectScatter Slice SliceScatter Sort Split SplitWithSizes Stack "
    "Take Topk Unbind UnsafeIndex UnsafeSplit torch::autograd::CopySlices".split()
)
# Each of their results is one of what they are given.
_PASS = frozenset({"RegisterPostBackwardFunction", "_DDPSink"})


def sketch(nodes: list[tuple[str, Any]], names: list[str | None]) -> Sketch:
    """What `reached` is told of a graph; it keeps nothing of it alive.

    Args:
        nodes: kinds of its functions, and these, the last one first.
        names: of their bounds.
    """
    at = {node: i for i, (_, node) in enumerate(nodes)}
    return tuple(
        (
            kind,
            _shapes(node),
            tuple((at[of], nr) if of in at else None for of, nr in node.next_functions),
            name,
        )
        for (kind, node), name in zip(nodes, names, strict=True)
    )


def _shapes(node: Any) -> Any:
    try:
        shapes = tuple(tuple(each.shape) for each in node._input_metadata)
    except (AttributeError, RuntimeError):  # of a nested tensor
        return None
    return shapes if all(type(size) is int for shape in shapes for size in shape) else None


def reached(whole: Sketch, *parts: Sketch) -> tuple[str | None, set[int]]:
    """The name of a bound on what is made from numbers of all rows, or None; and which bounds are
    on what has rows.

    Args:
        whole: of the whole.
        parts: of each part. One with other functions, as of a loop over samples, tells nothing.
    """
    kinds = [(kind, of) for kind, _, of, _ in whole]
    if any([(kind, of) for kind, _, of, _ in part] != kinds for part in parts):
        return None, set()
    found: list[list[int]] = [[]] * len(whole)
    have_rows = set()
    for i in _children_first(whole):
        kind, _, of, name = whole[i]
        given = [_OF_PARAMETERS if at is None else _state(found, *at) for at in of]
        made_from = max(given, default=_OF_PARAMETERS)
        if name and made_from == _OF_ALL:
            return name, set()
        differ = _differ(whole[i][1], [part[i][1] for part in parts])
        passes = kind in _PASS and len(given) == len(differ)
        found[i] = [
            _made(kind, given[at] if passes else made_from, differs, any(differ))
            for at, differs in enumerate(differ)
        ]
        if name and (any(differ) or made_from == _OF_ROWS):
            have_rows.add(i)
    return None, have_rows


def _state(found: list[list[int]], of: int, at: int) -> int:
    return found[of][at] if at < len(found[of]) else max(found[of], default=_OF_PARAMETERS)


def _differ(whole: Any, parts: list[Any]) -> list[bool]:
    """By result: whether it has rows."""
    if not _is_fixed(whole) or any(part is None or len(part) != len(whole) for part in parts):
        return [True]
    return [any(part[at] != shape for part in parts) for at, shape in enumerate(whole)]


def _made(kind: str, made_from: int, differs: bool, some_differ: bool) -> int:
    """What a result is of. One beside others that have rows may be of parameters as well, so that
    nothing is said of it: values are compared then."""
    if differs:
        return max(made_from, _OF_ROWS)
    if made_from == _OF_PARAMETERS or (some_differ and kind not in _PASS):
        return _OF_PARAMETERS
    return made_from if made_from == _OF_ROWS and kind in _MOVES | _PASS else _OF_ALL


def _is_fixed(shapes: Any) -> bool:
    """Whether a result that is as large in each part has no rows: none may have been chosen."""
    return shapes is not None and any(math.prod(shape) for shape in shapes)


def _children_first(graph: Sketch) -> list[int]:
    order: list[int] = []
    begun, done, work = set(), set(), [0] if graph else []
    while work:
        at = work[-1]
        if at not in begun:
            begun.add(at)
            work += [of[0] for of in graph[at][2] if of is not None and of[0] not in begun]
            continue
        work.pop()
        if at not in done:
            done.add(at)
            order.append(at)
    return order
