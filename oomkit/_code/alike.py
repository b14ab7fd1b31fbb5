"""What lies in a place of the plain state of a step: copied, and compared by value.

The C engine (csrc/plain/alike.c, csrc/accum/moved.c) asks in the runs that verify a split, where
a place or a parameter has changed: what the whole of some rows has left there, and what parts of
them leave.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _C

PLAIN = (bool, int, float, complex, str, bytes, type(None))
NUMBERS = (int, float)
_DEPTH = 4
_ITEMS = 1024  # of a container: as csrc/plain/content.c
_ROOM = 1 << 28  # bytes of all copies of one place, on the host


class _Opaque(Exception):
    """What cannot be compared by value."""


class _Copies:
    """Of one place: whether it has tensors in it, and what room is left for these."""

    __slots__ = ("left", "tensors")

    def __init__(self) -> None:
        self.tensors, self.left = False, _ROOM

    def of(self, value: Any, depth: int = _DEPTH) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind in (torch.Tensor, torch.nn.Parameter):
            return self.tensor(value)
        if kind in (list, tuple, dict) and depth and len(value) <= _ITEMS:
            items = [*value.items()] if kind is dict else value
            return [self.of(item, depth - 1) for item in items]
        raise _Opaque

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        if value.layout != torch.strided or value.device.type == "meta":
            raise _Opaque
        self.tensors = True
        self.left -= value.nbytes
        if self.left < 0:
            raise _Opaque
        try:
            return value.detach().to("cpu", copy=True)
        except RuntimeError as error:
            if _C.is_oom_error(error):
                raise
            raise _Opaque from error  # of a kind of its own, without a storage


def copies(value: object) -> tuple[bool, Any] | None:
    """What ``value`` is or holds, with host copies of its tensors.

    Args:
        value: a number, a tensor, or a list, tuple or dict with tensors.

    Returns:
        Whether tensors are in it, and an object for `same`. None where it is no number and has no
        tensor, or something else beside, or more than 256 MiB of tensors. A flag that says that
        something was done is none of these: what is done once is not to be done again in the
        next micro-batch. A dictionary of numbers is not, because one of them may depend on the
        rows, and be the same in micro-batches of as many rows.
    """
    made = _Copies()
    try:
        found = made.of(value)
    except _Opaque:
        return None
    return (made.tensors, found) if made.tensors or type(value) in NUMBERS else None


def same(a: Any, b: Any) -> bool:
    """Are two results of `copies` equal, bit for bit?"""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


__all__ = ["copies", "same"]
