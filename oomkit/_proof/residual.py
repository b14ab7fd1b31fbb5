"""Whether gradients of two parts, weighed, make the gradient of both."""

from __future__ import annotations

import math

import torch

from . import values

__all__ = ["Products", "left"]


def left(
    whole: dict[int, torch.Tensor],
    one: dict[int, torch.Tensor],
    two: dict[int, torch.Tensor],
    a: float,
    b: float,
) -> float:
    """The norm of whole - a first - b second, relative to the whole's."""
    left = size = 0.0
    for i in {*whole, *one, *two}:
        terms = ((1.0, whole.get(i)), (-a, one.get(i)), (-b, two.get(i)))
        flat = [by * values.dense(g).double().reshape(-1) for by, g in terms if g is not None]
        left += values.norm(sum(flat[1:], flat[0])) ** 2
        size += values.norm(whole[i]) ** 2 if i in whole else 0.0
    return math.sqrt(left / size) if size > 0.0 else math.inf


class Products:
    """Inner products of three sets of gradients, summed over all tensors."""

    __slots__ = ("sums",)

    def __init__(self) -> None:
        self.sums = [0.0] * 6  # ww, w1, w2, 11, 12, 22

    def add(self, *three: torch.Tensor | None) -> None:
        present = [values.dense(t).double() for t in three if t is not None]
        if not present:
            return
        zero = torch.zeros_like(present[0])
        flat = [(zero if t is None else values.dense(t).double()).reshape(-1) for t in three]
        at = 0
        for i in range(3):
            for j in range(i, 3):
                self.sums[at] += float(torch.dot(flat[i], flat[j]))
                at += 1

    def residual(self, a: float, b: float) -> float:
        """As left(), at once, but for rounding."""
        ww, w1, w2, o, mixed, t = self.sums
        square = ww - 2 * a * w1 - 2 * b * w2 + a * a * o + 2 * a * b * mixed + b * b * t
        if not ww > 0.0 or not math.isfinite(square):
            return math.inf
        return math.sqrt(max(0.0, square) / ww)
