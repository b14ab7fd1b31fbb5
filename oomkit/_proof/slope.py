"""Whether two parts weigh what they should, where single gradients are too coarse to tell.

In half precision a gradient is known to some per cent, so that parts may weigh 0.51 and 0.49
instead of 0.5 each. What they then lack of the whole is a hundredth of the difference of their own
gradients, in all elements alike, and shows in its inner product with that difference. Rounding
has no such direction, but for a factor that all have in common: of the mean of a loss, and of
weights. So the direction is that part of the difference that is orthogonal to the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from . import values

__all__ = ["COARSE", "slope"]

COARSE = 5e-3  # limits of gradients from which on this is asked: half precision, TF32
_LIMIT = 3e-3  # how much more or less a part may weigh
_APART = 0.3  # of the gradient: parts that differ by less differ by rounding, too
_SURE = 5.0  # standard deviations of rounding that is independent in each element

Terms = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.device]


def slope(
    terms: Iterable[Terms], weights: Sequence[float], *, apart: bool = False
) -> tuple[float, str]:
    """How far off the first part's weight is, and what to say of it; 0.0 where it is not, or where
    that cannot be told.

    Args:
        terms: for each parameter the gradient of the whole, that of the parts, what the first of
            them has given to that, and the device to reckon on.
        weights: what the parts weigh, the first one at least.
        apart: terms are the gradients of the whole, of the first part and of the second, which
            have no weights yet.
    """
    first = weights[0]
    if not 0.0 < first < math.inf or first == 1.0 == sum(weights):
        return 0.0, ""
    found = _Sums(first, 1.0 if first >= 1.0 else 1.0 - first)
    for each in terms:
        if all(t.layout == torch.strided for t in each[:3]):
            found.add(each, weights if apart else ())
    product, between, squares = found.orthogonal()
    if not between > _APART**2 * found.size or not math.isfinite(product):
        return 0.0, ""
    more = product / between
    if abs(product) <= _SURE * math.sqrt(squares) or abs(more) <= _LIMIT:
        return 0.0, ""
    return abs(more), f"the first part weighs {first + more:.4g} of the whole, not {first:.4g}"


class _Sums:
    """Over all elements: inner products of what is left of the whole (l), of how the gradients of
    the parts differ (d), and of the gradient (g)."""

    def __init__(self, first: float, second: float) -> None:
        self._first, self._second = first, second
        self._sums = torch.zeros(7, dtype=torch.float64)

    def add(self, terms: Terms, weights: Sequence[float]) -> None:
        *gradients, device = terms
        found = []
        for piece in values.pieces(*(values.dense(t.detach()) for t in gradients), device=device):
            whole, g, one = (t.float() for t in piece)
            if weights:
                one, two = g * weights[0], one * weights[1]
                g = one + two
            left, d = whole - g, one / self._first - (g - one) / self._second
            by_d, by_g = left * d, left * g
            products = (by_d, by_g, d * d, d * g, g * g, by_d**2, by_g**2)
            found.append(torch.stack([t.sum(dtype=torch.float64) for t in products]))
        if found:
            self._sums += torch.stack(found).sum(0).cpu()

    @property
    def size(self) -> float:
        return float(self._sums[4])

    def orthogonal(self) -> tuple[float, float, float]:
        """With d less what of it is along g: l.d, d.d, and a bound of the sum of the squares of the
        terms of l.d."""
        by_d, by_g, dd, dg, gg, of_d, of_g = self._sums.tolist()
        along = dg / gg if gg > 0.0 else 0.0
        root = math.sqrt(of_d) + abs(along) * math.sqrt(of_g)  # by the triangle inequality
        return by_d - along * by_g, dd - along * dg, root * root
