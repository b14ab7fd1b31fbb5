"""Whether gradients of two parts, weighed, make the gradient of both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement

import torch

from . import values

__all__ = ["Products", "left"]


def left(
    whole: dict[int, torch.Tensor],
    one: dict[int, torch.Tensor],
    two: dict[int, torch.Tensor],
    weights: Sequence[float],
    devices: Sequence[torch.device],
) -> float:
    """The norm of the whole less the weighed parts, relative to the whole's.

    Args:
        whole, one, two: gradients, by the number of their parameter.
        weights: of the parts.
        devices: where to reckon, by parameter.
    """
    left = size = 0.0
    factors = (1.0, -weights[0], -weights[1])
    for i in {*whole, *one, *two}:
        for three in _side_by_side((whole.get(i), one.get(i), two.get(i)), devices[i]):
            parts = [by * t for by, t in zip(factors, three, strict=True) if t is not None]
            left += values.norm(sum(parts[1:], parts[0])) ** 2
            size += 0.0 if three[0] is None else values.norm(three[0]) ** 2
    return math.sqrt(left / size) if size > 0.0 else math.inf


def _side_by_side(
    three: Sequence[torch.Tensor | None], device: torch.device
) -> Iterator[list[torch.Tensor | None]]:
    """Pieces in double precision; None for those of a tensor that is not there."""
    dense = [values.dense(t) for t in three if t is not None]
    for piece in values.pieces(*dense, device=device) if dense else ():
        each = iter(piece)
        yield [None if t is None else next(each).double() for t in three]


class Products:
    """Inner products of three sets of gradients, summed over all tensors."""

    __slots__ = ("sums",)

    def __init__(self) -> None:
        self.sums = [0.0] * 6  # ww, w1, w2, 11, 12, 22

    def add(self, *three: torch.Tensor | None, device: torch.device) -> None:
        for piece in _side_by_side(three, device):
            for at, (a, b) in enumerate(combinations_with_replacement(piece, 2)):
                if a is not None and b is not None:
                    self.sums[at] += float(torch.dot(a, b))

    def residual(self, a: float, b: float) -> float:
        """As left(), at once, but for rounding."""
        ww, w1, w2, o, mixed, t = self.sums
        square = ww - 2 * a * w1 - 2 * b * w2 + a * a * o + 2 * a * b * mixed + b * b * t
        if not ww > 0.0 or not math.isfinite(square):
            return math.inf
        return math.sqrt(max(0.0, square) / ww)
