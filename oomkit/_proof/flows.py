"""Where gradients flow in a graph: what nothing but 0 has come to was not compared by a proof."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from .. import _C

__all__ = ["Flows", "hooks"]

_own = 0  # handles of hooks that were made here


def hooks() -> int:
    """How many hooks were registered in this process, by anybody but :class:`Flows`.

    Each handle of torch's takes the next number (``RemovableHandle.next_id``).
    """
    return int(RemovableHandle.next_id) - _own


def _tells(gradient: Any) -> bool:
    if gradient is None:
        return False
    if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
        return True  # to look into it may be a collective, or not be possible
    with torch.no_grad():
        return bool(_C.exempt(gradient.any))  # nan, too


class Flows:
    """Operations of a graph whose gradients are looked at when the backward comes to them."""

    __slots__ = ("_before", "_came", "_handles")

    def __init__(self) -> None:
        self._came: dict[int, bool] = {}
        self._before: dict[int, int] = {}
        self._handles: list[RemovableHandle] = []

    def watch(self, node: Any, place: int, before: int) -> None:
        """Look at what comes to ``node``, which is at ``place`` and was reached from ``before``."""
        global _own
        self._before.setdefault(place, before)
        self._handles.append(node.register_prehook(functools.partial(self._look, place)))
        _own += 1

    def _look(self, place: int, gradients: Any) -> None:
        if not self._came.get(place):
            self._came[place] = any(_tells(g) for g in gradients)

    def take(self) -> list[tuple[int, bool]]:
        """What has come so far: places, and whether it was something else than 0.

        A place behind one that nothing has come to is left out. Hooks are removed.
        """
        for handle in self._handles:
            handle.remove()
        came, self._came, self._handles = self._came, {}, []
        before, self._before = self._before, {}
        return [(at, some) for at, some in came.items() if some or came.get(before[at], True)]
