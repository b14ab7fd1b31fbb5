"""Arguments of a forward taken apart into tensors and the rest, and what it may return."""

from __future__ import annotations

import enum
import types
from collections import OrderedDict
from typing import Any

import torch

_CONSTANT = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(...), range, slice, type}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
    | {types.BuiltinFunctionType}
)


class OpaqueError(Exception):
    """An argument whose contents are out of sight: they may be other ones by the backward."""

    def __init__(self, value: object) -> None:
        self.kind = type(value).__name__


class Leaf(int):
    """Stands for the tensor with this number."""


def take_apart(value: Any, leaves: list[torch.Tensor]) -> Any:
    """The value with numbers for its tensors, which are added to `leaves`.

    Raises:
        OpaqueError: it is, or holds, an object that is no tensor, constant or plain container.
    """
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return Leaf(len(leaves) - 1)
    kind = type(value)
    if kind in _CONSTANT:
        return value
    if kind is list:
        return [take_apart(item, leaves) for item in value]
    if kind is dict or kind is OrderedDict:
        return kind((key, take_apart(item, leaves)) for key, item in value.items())
    if kind is tuple or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        return tuple.__new__(kind, [take_apart(item, leaves) for item in value])
    if kind is types.FunctionType and value.__closure__ is None:
        return value
    if isinstance(value, enum.Enum):
        return value
    raise OpaqueError(value)


def put_together(parts: Any, leaves: tuple[torch.Tensor, ...]) -> Any:
    """The value that `take_apart` was given, with other tensors, in new containers."""
    kind = type(parts)
    if kind is Leaf:
        return leaves[parts]
    if kind is list:
        return [put_together(item, leaves) for item in parts]
    if kind is dict or kind is OrderedDict:
        return kind((key, put_together(item, leaves)) for key, item in parts.items())
    if isinstance(parts, tuple) and kind is not torch.Size:
        return tuple.__new__(kind, [put_together(item, leaves) for item in parts])
    return parts


def result_problem(result: Any, given: list[torch.Tensor]) -> str | None:
    """Why a result makes no sense to compute again: other objects in it, no tensor, none new."""
    found: list[torch.Tensor] = []
    odd = _search(result, found)
    if odd is not None:
        return f"returns a {odd}"
    if all(any(tensor is its for its in given) for tensor in found):
        return "returns nothing but what it was given" if found else "returns no tensor"
    return None


def _search(value: Any, found: list[torch.Tensor]) -> str | None:
    if isinstance(value, torch.Tensor):
        found.append(value)
        return None
    if type(value) in _CONSTANT:
        return None
    if isinstance(value, (list, tuple, dict)):
        items = dict.values(value) if isinstance(value, dict) else value
        return next((odd for item in items if (odd := _search(item, found)) is not None), None)
    return type(value).__name__
