"""What a loss may be a mean over, where it is not one over the rows of the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from .. import _C

__all__ = [
    "TOLD",
    "Cut",
    "Leaves",
    "Tried",
    "Weigher",
    "candidates",
    "cuts",
    "decisive",
    "is_varied",
    "pairs",
    "undecided",
    "varied",
]

_INTEGERS = {
    dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)
}
_IGNORED = (-100, 255)  # PyTorch's default, and that of segmentation
_PADDING = (0, -1)  # of tokens: in one dimension these are classes
_CUTS = 8  # micro-batches that are looked at, and places to cut each on either side
_CLASSES = 100_000  # of a vector that may hold weights of classes, at most
_ASKED = 3.0  # times that labels are looked for where they differ
TOLD = 1e-3  # a difference of two parts' weights that gradients can tell
_MORE = 2.0  # times the difference that was tried before: worth to try again


Leaves = list[tuple[int, str, Any, bool]]
Cut = list[tuple[int, int]]
# Keys of weights that are not in use, and the largest difference that they have made to parts
# without a difference in the gradients; infinity where gradients would have told it.
Tried = dict[tuple[Any, ...], float]


class Weigher:
    """How much each slice of a batch weighs.

    Attributes:
        kind: "rows", "sum", or what is counted of one leaf of the batch.
        leaf: number of that leaf among the batch's nodes, or -1.
        text: for the log: what it counts, and the option that says the same.
    """

    def __init__(
        self,
        kind: str,
        leaf: int = -1,
        text: str = "",
        tensor: Any = None,
        value: int = 0,
        weights: torch.Tensor | None = None,
    ) -> None:
        self.kind, self.leaf, self.text = kind, leaf, text
        self._value, self._weights = value, weights
        self._tensor = tensor  # while it is looked for; the batch of one call

    @property
    def key(self) -> tuple[Any, ...]:
        """What it is, whatever batch it is asked of."""
        return self.kind, self.leaf, self._value, None if self._weights is None else self.text

    def forget(self) -> Weigher:
        """The same without the batch that it was found with."""
        self._tensor = None
        return self

    def of(self, leaves: Leaves) -> Weigher:
        """The same of the batch with these leaves."""
        tensor = next((tensor for leaf, _, tensor, _ in leaves if leaf == self.leaf), None)
        return Weigher(self.kind, self.leaf, self.text, tensor, self._value, self._weights)

    def _count(self, part: torch.Tensor) -> torch.Tensor:
        if self.kind == "shifted":
            part = part[:, 1:]
        if self.kind in ("labels", "shifted"):
            return (part != self._value).sum()
        if self.kind == "both":
            return ((part != self._value) & (part >= 0)).sum()
        if self.kind == "classes" and self._weights is not None:
            kept = part[(part >= 0) & (part < len(self._weights))].reshape(-1)
            return self._weights.detach()[kept.to(self._weights.device)].double().sum()
        return part.double().sum()

    def counts(self, tensor: torch.Tensor | None, cut: Cut) -> list[float]:
        """What slices weigh, before they are made shares of their sum.

        Args:
            tensor: the leaf of the present batch.
            cut: start and length of each slice.
        """
        if self.kind == "sum" or tensor is None:
            return [1.0] * len(cut)
        parts = [self._count(tensor.narrow(0, start, length)) for start, length in cut]
        return [float(value) for value in torch.stack(parts).tolist()]  # a device waits once

    def shares(self, cut: Cut) -> tuple[float, ...] | None:
        """Weights of these slices, or None where it says nothing of them."""
        if self.kind == "sum":
            return (1.0,) * len(cut)
        if self.kind == "rows":
            values = [float(length) for _, length in cut]
        elif self._tensor is None:
            return None
        else:
            values = self.counts(self._tensor, cut)
        total = sum(values)
        return tuple(value / total for value in values) if total > 0 else None


def _ignored(own: list[Any]) -> list[int]:
    found = [value for value in own if isinstance(value, int) and not isinstance(value, bool)]
    return list(dict.fromkeys([*found, *_IGNORED]))


class _Range:
    """The least and the largest of integers: most values need not be looked for."""

    __slots__ = ("_high", "_low", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._low, self._high = -math.inf, math.inf  # not known
        if type(tensor) is torch.Tensor and tensor.numel():
            found = _C.label_range(tensor)
            self._low, self._high = found or (int(tensor.min()), int(tensor.max()))

    def has(self, value: int) -> bool:
        least, most = _INTEGERS[self.tensor.dtype]  # others are another value there
        if least <= value <= most and not self._low <= value <= self._high:
            return False
        return bool((self.tensor == value).any())

    @property
    def is_negative(self) -> bool:
        """Whether one of them is."""
        if self._low == -math.inf:
            return bool((self.tensor < 0).any())
        return self._low < 0

    @property
    def is_binary(self) -> bool:
        """Whether all are 0 or 1."""
        if self._low == -math.inf:
            return bool(((self.tensor == 0) | (self.tensor == 1)).all())
        return self._low >= 0 and self._high <= 1


def _of_labels(leaf: int, name: str, labels: _Range, ignored: list[int]) -> Iterator[Weigher]:
    tensor = labels.tensor
    for value in [*ignored, *(_PADDING if tensor.ndim >= 2 else ())]:
        if labels.has(value):
            yield Weigher("labels", leaf, f"mean over {name} that are not {value}", tensor, value)
            if tensor.ndim >= 2 and tensor.shape[1] > 1:
                yield Weigher(
                    "shifted",
                    leaf,
                    f"mean over {name}[:, 1:] that are not {value}",
                    tensor,
                    value,
                )
    negative = tensor.dtype != torch.uint8 and labels.is_negative
    for value in (*ignored, 0) if negative and tensor.ndim >= 2 else ():
        if value >= 0 and labels.has(value):
            text = f"mean over {name} that are neither negative nor {value}"
            yield Weigher("both", leaf, text, tensor, value)


def _vectors(leaves: Leaves, buffers: list[Any]) -> Iterator[torch.Tensor]:
    """What may be weights of classes: one number each. Statistics of a norm are none."""
    for tensor in [tensor for _, _, tensor, sliced in leaves if not sliced] + buffers:
        if (
            isinstance(tensor, torch.Tensor)
            and tensor.ndim == 1
            and tensor.is_floating_point()
            and 1 < tensor.numel() <= _CLASSES
            and bool((tensor >= 0).all())
        ):
            yield tensor


def candidates(
    leaves: Leaves, modules: list[torch.nn.Module], tried: Tried | None = None
) -> Iterator[Weigher]:
    """Everything that a loss may be a mean over, most likely first.

    Args:
        leaves: tensors among the arguments: number, name, tensor, whether it is sliced.
        modules: those that take part.
        tried: see `Tried`; of those that are decided, some are left out.
    """
    yield Weigher("rows", text="mean over rows")
    yield Weigher("sum", text="sum")
    own, buffers = _C.label_hints(modules, _NormBase)
    ignored, vectors = _ignored(own), list(_vectors(leaves, buffers))
    for leaf, name, tensor, sliced in leaves:
        if not sliced or not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
            continue
        if tensor.layout != torch.strided:
            continue
        labels = _Range(tensor) if tensor.dtype in _INTEGERS else None
        if labels is not None:
            yield from _of_labels(leaf, name, labels, ignored)
            for at, vector in enumerate(vectors):
                text = f"mean over weights of the classes {name}" + (f" ({at + 1})" if at else "")
                yield Weigher("classes", leaf, text, tensor, 0, vector)
        decided = tried is not None and tried.get(("values", leaf, 0, None)) == math.inf
        if not decided and _is_mask(tensor, labels):
            yield Weigher("values", leaf, f"mean over {name}", tensor)


def _is_mask(tensor: torch.Tensor, labels: _Range | None) -> bool:
    """Whether a tensor may say what counts, and how much."""
    if tensor.dtype == torch.bool:
        return True
    if tensor.is_complex() or tensor.ndim > 2 or not tensor.numel():
        return False
    return bool((tensor >= 0).all()) if labels is None else labels.is_binary


def _is_even(tensor: torch.Tensor, start: int, length: int) -> bool:
    """Whether rows are all alike."""
    part = tensor.narrow(0, start, length)
    return bool((part == part[:1]).all())


def _labels(leaves: Leaves) -> list[tuple[int, torch.Tensor]]:
    return [
        (leaf, tensor)
        for leaf, _, tensor, sliced in leaves
        if sliced
        and isinstance(tensor, torch.Tensor)
        and tensor.ndim > 0
        and tensor.layout == torch.strided
        and (tensor.dtype in _INTEGERS or tensor.dtype == torch.bool)
    ]


def varied(
    leaves: Leaves, start: int, length: int, rows: int, multiple: int, slices: Cut, tried: Tried
) -> int:
    """Where labels differ from row to row: a loss may couple rows and not show it where they are
    all of one class.

    Args:
        leaves: tensors of the batch: number, name, tensor, whether it is sliced.
        start, length: the rows that are looked at otherwise.
        rows: of the batch.
        multiple: of it is where rows begin.
        slices: start and length of the micro-batches.
        tried: what stays even there is noted in it.
    """
    labels = _labels(leaves)

    def even(at: int) -> int:
        return sum(_is_even(tensor, at, length) for _, tensor in labels)

    step = max(1, length // 2 // multiple) * multiple
    own = [min(at, rows - length) // multiple * multiple for at, _ in slices[:_CUTS]]
    places = [*own, *range(0, rows - length + 1, step)][: 2 * _CUTS]
    best, fewest = start, even(start)
    for at in places if fewest else ():
        if even(at) < fewest:
            best, fewest = at, even(at)
    for leaf, tensor in labels:
        times = tried.pop(("even", leaf), 0.0)
        if _is_even(tensor, best, length):
            tried["even", leaf] = times + 1.0
    return best


def is_varied(leaves: Leaves, slices: Cut, tried: Tried) -> bool:
    """Whether labels differ within a micro-batch that were alike wherever a proof has looked."""
    return any(
        0.0 < tried.get(("even", leaf), 0.0) < _ASKED
        and any(not _is_even(tensor, start, length) for start, length in slices[:_CUTS])
        for leaf, tensor in _labels(leaves)
    )


def undecided(
    weighers: list[Weigher], cut: Cut, rule: Weigher, tried: Tried
) -> dict[tuple[Any, ...], float]:
    """Weights that may be the true ones although others are in use, and make a difference to
    slices: keys and how large it is, where it is more than what was tried.

    Args:
        weighers: all that there are, of the present batch.
        cut: start and length of each slice.
        rule: the weights in use, of the present batch.
        tried: what is known of earlier slices.
    """
    mine = rule.shares(cut)
    found: dict[tuple[Any, ...], float] = {}
    if mine is None:
        return found
    for weigher in weighers:
        if weigher.kind == "sum" or weigher.key == rule.key:
            continue
        its = weigher.shares(cut)
        if its is None:
            continue
        gap = max(abs(a - b) for a, b in zip(its, mine, strict=True))
        if gap >= max(TOLD, _MORE * tried.get(weigher.key, 0.0)):
            found[weigher.key] = gap
    return found


def cuts(slices: Cut, unit: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """Start, length and first part of ways to cut the micro-batches, few of each.

    Args:
        slices: start and length of each.
        unit: what the first part is a multiple of, and the fewest rows of a part.
    """
    multiple, least = unit
    for start, length in slices[:_CUTS]:
        middle = length // 2
        for step in range(min(middle, _CUTS)):
            for first in {middle + step, middle - step}:
                if least <= first <= length - least and first % multiple == 0:
                    yield start, length, first


def pairs(slices: Cut) -> Iterator[tuple[int, int, int]]:
    """Start, length and first part of each two micro-batches beside each other."""
    for (start, one), (_, two) in pairwise(slices):
        yield start, one + two, one


def decisive(
    weighers: list[Weigher],
    slices: Cut,
    rule: Weigher,
    tried: Tried,
    unit: tuple[int, int],
    before: Sequence[tuple[int, int]] = (),
) -> tuple[int, int, int] | None:
    """Where weights that make a difference to these slices can be told from those in use.

    Args:
        weighers, rule, tried: see `undecided`.
        slices: start and length of the micro-batches.
        unit: see `cuts`.
        before: what to cut besides the micro-batches.

    Returns:
        Start, length and first part of the cut that tells best, or None where there is nothing
        to tell, or no cut tells it.
    """
    open_ = undecided(weighers, slices, rule, tried)
    there = [each for each in weighers if each.key in open_]
    best, where = 0.0, None
    for places in (cuts([*before, *slices], unit), pairs(slices)) if there else ():
        for at, rows, part in places if where is None else ():
            gaps = undecided(there, [(at, part), (at + part, rows - part)], rule, tried)
            if max(gaps.values(), default=0.0) > best:
                best, where = max(gaps.values()), (at, rows, part)
    return where
