"""Whether two parts weigh what they should, where single gradients are too coarse to tell.

In half precision a gradient is known to some per cent, so that parts may weigh 0.51 and 0.49
instead of 0.5 each. What they then lack of the whole is a hundredth of the difference of their own
gradients, in all elements alike, and shows in its inner product with that difference. Rounding
has no such direction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from . import values

__all__ = ["Slope", "Terms"]

_COARSE = 5e-3  # limits of gradients from which on this is asked: half precision, TF32
_ROUNDED, _EXACT = 3e-3, 5e-4  # how much more or less a part may weigh; a loss in half
# precision rounds the weight itself, by which its backward begins.
_APART = 0.3  # of the gradient: parts that differ by less differ by rounding, too
_SURE = 5.0  # standard deviations of rounding that is independent in each element
_CHUNK = 1 << 18

Terms = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Slope:
    """What the gradients of a proof tell of the weights of its two parts.

    `sharp` tells whether they would have told of weights that are farther off than `limit()`.
    """

    def __init__(self) -> None:
        self.sharp = False
        self._limit = _EXACT

    def root(self, tensor: torch.Tensor) -> None:
        """A backward begins there."""
        if tensor.dtype.itemsize < 4:
            self._limit = _ROUNDED

    def limit(self, gradients: float) -> float:
        """How much more or less a part may weigh, by the limit of gradients; infinite where that
        is exact enough."""
        return self._limit if gradients >= _COARSE else math.inf

    def compare(self, terms: Iterable[Terms], weights: list[float]) -> tuple[float, str]:
        """How far off the first part's weight is, and what to say of it; 0.0 where it is not.

        Args:
            terms: for each parameter the gradient of the whole, that of the parts, and what the
                first of them has given to that.
            weights: what the parts weigh, the first one at least.
        """
        first = weights[0]
        if not 0.0 < first < math.inf or first == 1.0 == sum(weights):
            return 0.0, ""
        product, between, squares, size = _sums(terms, first, 1.0 if first >= 1.0 else 1.0 - first)
        if not between > _APART**2 * size or not math.isfinite(product):
            return 0.0, ""
        rounding = _SURE * math.sqrt(squares)
        self.sharp = self.sharp or self._limit * between > rounding
        more = product / between
        if abs(product) <= rounding or abs(more) <= self._limit:
            return 0.0, ""
        return abs(more), f"the first part weighs {first + more:.4g} of the whole, not {first:.4g}"


def _sums(terms: Iterable[Terms], first: float, second: float) -> list[float]:
    """Over all elements: what is left of the whole times how the gradients of the parts differ;
    the squares of the latter, of that product, and of the gradient."""
    sums = torch.zeros(4, dtype=torch.float64)
    for each in terms:
        flat = [values.dense(t.detach()).reshape(-1).cpu() for t in each]
        for at in range(0, flat[0].numel(), _CHUNK):
            whole, made, one = (t[at : at + _CHUNK].float() for t in flat)
            left, between = whole - made, one / first - (made - one) / second
            product = left * between
            for i, t in enumerate((product, between**2, product**2, made**2)):
                sums[i] += t.sum(dtype=torch.float64)
    found: list[float] = sums.tolist()
    return found
