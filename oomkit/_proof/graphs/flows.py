"""Where gradients flow in a graph: what nothing but 0 has come to was not compared by a proof."""

from __future__ import annotations

from typing import Any

from torch.utils.hooks import RemovableHandle

from ... import _C

__all__ = ["Flows", "hooks"]


def hooks() -> int:
    """How many hooks were registered in this process: each handle of torch's takes a number."""
    return int(RemovableHandle.next_id)


class Flows:
    """Operations of a graph whose gradients are looked at when the backward comes to them."""

    __slots__ = ("_before", "_came", "_handles")

    def __init__(self) -> None:
        self._came: dict[int, bool] = {}
        self._before: dict[int, int] = {}
        self._handles: list[RemovableHandle] = []

    def watch(self, node: Any, place: int, before: int) -> None:
        """Look at what comes to ``node``, which is at ``place`` and was reached from ``before``."""
        self._before.setdefault(place, before)
        self._handles.append(node.register_prehook(_C.flow_hook(self._came, place)))
        _C.own_hooks(1)

    def take(self) -> list[tuple[int, bool]]:
        """What has come so far: places, and whether it was something else than 0.

        A place behind one that nothing has come to is left out. Hooks are removed.
        """
        for handle in self._handles:
            handle.remove()
        came, before = dict(self._came), dict(self._before)
        self._came.clear()
        self._before.clear()
        self._handles.clear()
        return [(at, some) for at, some in came.items() if some or came.get(before[at], True)]
