"""What an evaluation returned for a slice, beside what it returned for the slice's halves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["Finding", "findings", "leaves_of", "places"]

_DEPTH = 8
_EXACT = (torch.float32, torch.float64)
_FLOAT = 1e-3  # matrix products of other sizes are summed in another order
_HALF = 2e-2
_SHARE = 0.1  # of integers: an argmax may flip by rounding

COUPLED = "depends on the other rows of the batch"


@dataclasses.dataclass(frozen=True)
class Finding:
    """How far one place of the results is from what the halves make of it.

    Attributes:
        difference: relative; infinite where the shapes tell it.
        limit: what rounding explains.
        text: what is wrong where the difference is larger, with the name of the place.
    """

    difference: float
    limit: float
    text: str


def leaves_of(
    value: Any, where: str, opened: tuple[Any, ...] = (tuple,), depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """The places of a result that can be compared, as the messages of joining name them.

    Args:
        value: the result.
        where: its own place.
        opened: sequences whose items are places of their own.
        depth: how many containers it is in.
    """
    items: Iterator[tuple[str, Any]]
    if depth > _DEPTH:
        return
    if isinstance(value, Mapping):
        items = ((f"{where}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = ((f"{where}.{name}", getattr(value, name)) for name in value._fields)
    elif isinstance(value, opened):
        items = ((f"{where}[{i}]", item) for i, item in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = (
            (f"{where}.{field.name}", getattr(value, field.name))
            for field in dataclasses.fields(value)
        )
    elif type(value) is SimpleNamespace:
        items = ((f"{where}.{name}", item) for name, item in vars(value).items())
    else:
        yield where, value
        return
    for place, item in items:
        yield from leaves_of(item, place, opened, depth + 1)


def _tensor(value: Any) -> Any:
    """An array of numpy as a tensor, so that it is compared as one."""
    kind = type(value)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray" and value.dtype.kind in "fiub":
        return torch.from_numpy(value)
    return value


def _apart(place: str, whole: torch.Tensor, parts: torch.Tensor) -> Finding:
    """Tensors alike in shape."""
    if not whole.is_floating_point():
        share = float((whole != parts).double().mean()) if whole.numel() else 0.0
        return Finding(share, _SHARE, f"{place} {COUPLED}")
    limit = _FLOAT if whole.dtype in _EXACT else _HALF
    one, two = whole.double(), parts.double()
    finite = torch.isfinite(one) & torch.isfinite(two)
    if not bool(finite.any()):
        return Finding(0.0, limit, "")
    one, two = one[finite], two[finite]
    scale = float(one.abs().max()) or 1.0
    return Finding(float((one - two).abs().max()) / scale, limit, f"{place} {COUPLED}")


def _rows(place: str, values: list[torch.Tensor], rows: list[int], dim: int) -> Finding | None:
    """Tensors with the rows in front, or None where they are no such."""
    whole, *parts = values
    for value, n in zip(values, rows, strict=True):
        if value.ndim <= dim or value.shape[dim] != n:
            return None
    others = [tuple(n for i, n in enumerate(v.shape) if i != dim) for v in values]
    if others[0] != others[1] or others[0] != others[2]:
        if len(others[0]) > 0 and any(
            n == rows[0] and one == rows[1] and two == rows[2]
            for n, one, two in zip(*others, strict=False)
        ):
            return Finding(
                math.inf, _FLOAT, f"{place} has the rows in two dimensions: it {COUPLED}"
            )
        return None  # ragged: what is padded to the longest row of its part
    return _apart(place, whole, torch.cat(parts, dim))


def _numbers(
    place: str, values: list[float], shares: tuple[float, float], summed: bool
) -> Finding | None:
    whole, one, two = values
    if not all(math.isfinite(value) for value in values) or whole == one == two:
        return None
    made = one + two if summed else shares[0] * one + shares[1] * two
    scale = max(abs(whole), abs(one), abs(two))
    rule = "sum" if summed else "mean over the rows"
    return Finding(
        abs(whole - made) / scale, _FLOAT, f"{place} is not the {rule} of its parts: pass join=..."
    )


def _compare(
    place: str,
    values: list[Any],
    rows: list[int],
    shares: tuple[float, float],
    dim: int,
) -> Finding | None:
    values = [_tensor(value) for value in values]
    if all(isinstance(value, torch.Tensor) for value in values):
        if all(value.ndim == 0 for value in values):
            if values[0].dtype == torch.bool or values[0].is_complex():
                return None
            summed = not values[0].is_floating_point()
            return _numbers(place, [float(value) for value in values], shares, summed)
        if any(value.is_complex() or value.layout != torch.strided for value in values):
            return None
        return _rows(place, values, rows, dim)
    if all(type(value) in (int, float) for value in values):
        summed = type(values[0]) is int
        return _numbers(place, [float(value) for value in values], shares, summed)
    if all(type(value) is list for value in values):
        lengths = [len(value) for value in values]
        if lengths == rows and not any(isinstance(item, torch.Tensor) for item in values[0]):
            return _items(place, values)
    return None


def _items(place: str, values: list[list[Any]]) -> Finding | None:
    whole, one, two = values
    differ = [a != b for a, b in zip(whole, one + two, strict=True)]
    if not all(isinstance(each, bool) for each in differ):
        return None
    return Finding(sum(differ) / max(1, len(differ)), _SHARE, f"{place} {COUPLED}")


def places(result: Any, loss: Any) -> dict[str, Any]:
    """What of a result can be compared, by place: nothing with a graph, and not the loss."""
    found = {}
    for place, value in leaves_of(result, "result"):
        if value is loss or isinstance(value, torch.Tensor) and value.requires_grad:
            continue
        if type(value) is list and any(isinstance(item, torch.Tensor) for item in value):
            continue
        found[place] = value
    return found


def findings(
    results: list[dict[str, Any]], rows: list[int], shares: tuple[float, float], dim: int = 0
) -> list[Finding]:
    """Compare a slice's result with those of its two halves, place by place.

    Args:
        results: `places` of the slice and of its halves.
        rows: how many rows each was computed of.
        shares: what the halves count for in a mean.
        dim: where the rows are.
    """
    whole, one, two = results
    found = (
        _compare(place, [value, one[place], two[place]], rows, shares, dim)
        for place, value in whole.items()
        if place in one and place in two
    )
    return [finding for finding in found if finding is not None]
