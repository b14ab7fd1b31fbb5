"""Plain attributes of a trainer: numbers, texts, containers of them, small tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from .. import _C

__all__ = ["PlainState"]

_PLAIN = frozenset((int, float, bool, str, complex, type(None)))
_CONTAINERS = frozenset((list, dict, set, deque, defaultdict, OrderedDict, Counter))
_ITEMS = 4096  # of what is copied
_DEPTH = 3  # of containers in dictionaries

_Back = Callable[[], object]


def _is_kept(value: Any) -> bool:
    return type(value) in _CONTAINERS or isinstance(value, torch.Tensor)


def _list_back(value: list[Any], copy: list[Any] | None, length: int) -> None:
    if copy is None:
        del value[length:]
    else:
        value[:] = copy


def _refilled(value: Any, copy: Any) -> None:
    value.clear()
    (value.extend if isinstance(value, deque) else value.update)(copy)


def _tensor_back(value: torch.Tensor, copy: torch.Tensor) -> None:
    with torch.no_grad():
        value.copy_(copy)


def _of_tensor(value: torch.Tensor) -> Iterator[_Back]:
    if value.requires_grad or value.layout is not torch.strided or value.numel() > _ITEMS:
        return
    try:
        copy = _C.exempt(value.clone)  # small, and outside the budget
    except torch.OutOfMemoryError:
        copy = value.to("cpu", copy=True)
    yield lambda: _tensor_back(value, copy)


def _backs(value: Any, depth: int = _DEPTH) -> Iterator[_Back]:
    """What puts the content of a container or a tensor back."""
    if isinstance(value, torch.Tensor):
        yield from _of_tensor(value)
    elif isinstance(value, list):
        kept = value[:] if len(value) <= _ITEMS else None
        length = len(value)
        yield lambda: _list_back(value, kept, length)
    elif len(value) <= _ITEMS:
        copy = value.copy()
        yield lambda: _refilled(value, copy)
        if isinstance(value, dict) and depth:
            for inner in copy.values():
                if _is_kept(inner):
                    yield from _backs(inner, depth - 1)


class PlainState:
    """The plain attributes of an object as they are now.

    Args:
        owner: whose dictionary is read.
        but: names that are left alone.
    """

    def __init__(self, owner: Any, but: Collection[str] = ()) -> None:
        self._values: dict[str, Any] = {}
        self._backs: list[_Back] = []
        self._but = but
        for name, value in vars(owner).items():
            if name in but:
                continue
            if type(value) in _PLAIN:
                self._values[name] = value
            elif _is_kept(value):
                self._values[name] = value
                self._backs += _backs(value)

    def restore(self, owner: Any) -> None:
        """The same values and objects by the same names, with the content that they had.

        Args:
            owner: the same object.
        """
        there = vars(owner)
        for name, value in list(there.items()):
            if name in self._but:
                continue
            if name not in self._values and (type(value) in _PLAIN or _is_kept(value)):
                del there[name]
        there.update(self._values)
        for back in self._backs:
            back()
