"""What a loss may be a mean over, where it is not one over the rows of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from .. import _C
from .graphs.bounds import class_weights, ignored_labels
from .lengths import FIRST

__all__ = [
    "TOLD",
    "Cut",
    "Leaves",
    "Tried",
    "Weigher",
    "candidates",
    "confirm",
    "cuts",
    "decisive",
    "facts",
    "fuller",
    "is_varied",
    "learn",
    "less_likely",
    "pairs",
    "possible",
    "settled",
    "undecided",
    "varied",
]

_INTEGERS = {
    dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)
}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_IGNORED = (-100, 255)  # PyTorch's default, and that of segmentation
_PADDING = (0, -1)  # of tokens: in one dimension these are classes
_CUTS = 8  # micro-batches that are looked at, and places to cut each on either side
_CLASSES = 100_000  # of a vector that may hold weights of classes, at most
_ASKED = 3.0  # times that labels are looked for where they differ
TOLD = 1e-3  # a difference of two parts' weights that gradients can tell
_NEWS = 8  # proofs because of a label beyond all that were seen: others are running numbers
_ALIKE = 4  # numbers of columns that one place need not tell apart, at most
# What sums are divided by max(1, n) of.
_AT_LEAST = frozenset({"labels", "values", "padding", "both"})
_ONE = " of 1 at least"
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
        first: of its columns, the first one that counts.
        text: for the log: what it counts, and the option that says the same.
        least: what a count is at least, as where a sum is divided by `max(1, n)`; or 0.
    """

    def __init__(
        self,
        kind: str,
        leaf: int = -1,
        text: str = "",
        tensor: Any = None,
        value: int = 0,
        weights: torch.Tensor | None = None,
        first: int = 0,
        least: float = 0.0,
    ) -> None:
        self.kind, self.leaf, self.text, self.first = kind, leaf, text, first
        self._value, self._weights, self.least = value, weights, least
        self._tensor = tensor  # while it is looked for; the batch of one call
        self._counted: dict[tuple[Any, ...], list[float]] = {}  # of slices of it

    @property
    def key(self) -> tuple[Any, ...]:
        """What it is, whatever batch it is asked of."""
        kind = f"{self.kind}[:, {self.first}:]" if self.first else self.kind
        kind += _ONE * bool(self.least)
        return kind, self.leaf, self._value, None if self._weights is None else self.text

    def forget(self) -> Weigher:
        """The same without the batch that it was found with."""
        self._tensor, self._counted = None, {}
        return self

    def at_least_one(self) -> Weigher:
        """The same for a sum that is divided by `max(1, n)`: slices with nothing of it count."""
        text = f"{self.text},{_ONE}"
        given = self._tensor, self._value, self._weights, self.first, 1.0
        made = Weigher(self.kind, self.leaf, text, *given)
        made._counted = self._counted
        return made

    def of(self, leaves: Leaves) -> Weigher:
        """The same of the batch with these leaves."""
        tensor = next((tensor for leaf, _, tensor, _ in leaves if leaf == self.leaf), None)
        given = self._value, self._weights, self.first, self.least
        return Weigher(self.kind, self.leaf, self.text, tensor, *given)

    def later(self, cut: Cut) -> Iterator[tuple[Weigher, tuple[float, ...]]]:
        """The same of what comes after so many columns, two and more, and the shares of that."""
        if self._tensor is None or self._tensor.ndim != 2 or self.kind not in ("labels", "values"):
            return
        parts = [self._tensor.narrow(0, start, length) for start, length in cut]
        counted = [part != self._value if self.kind == "labels" else part for part in parts]
        columns = torch.stack([each.double().sum(0) for each in counted])
        for first, values in enumerate(columns.flip(1).cumsum(1).flip(1).T.tolist()):
            if first >= 2 and sum(values) > 0:
                text = f"{self.text}, without its first {first} columns"
                given = self._tensor, self._value, self._weights, first
                yield (
                    Weigher(self.kind, self.leaf, text, *given),
                    tuple(value / sum(values) for value in values),
                )

    def _count(self, part: torch.Tensor) -> torch.Tensor:
        part = part[:, self.first :] if self.first else part
        if self.kind == "labels":
            return (part != self._value).sum()
        if self.kind == "padding":
            return (~part).sum()
        if self.kind == "numbers":
            return (~part.isnan()).sum()
        if self.kind in _ROWS:
            return _ROWS[self.kind][1](part).sum()
        if self.kind == "both":
            return ((part != self._value) & (part >= 0)).sum()
        if self.kind == "classes" and self._weights is not None:
            part = part.long()
            kept = part[(part >= 0) & (part < len(self._weights)) & (part != self._value)]
            return self._weights.detach()[kept.to(self._weights.device)].double().sum()
        return part.double().sum()

    def counts(self, tensor: torch.Tensor | None, cut: Cut) -> list[float]:
        """What slices weigh, before they are made shares of their sum or of `least`.

        Args:
            tensor: the leaf of the present batch.
            cut: start and length of each slice.
        """
        if self.kind == "sum" or tensor is None or not cut:
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
            of = tuple(cut)
            if of not in self._counted:
                self._counted[of] = self.counts(self._tensor, cut)
            values = self._counted[of]
        total = max(sum(values), self.least)
        return tuple(max(value, self.least) / total for value in values) if total > 0 else None


def _ignored(own: list[Any], known: Tried) -> list[int]:
    found = [value for value in own if isinstance(value, int) and not isinstance(value, bool)]
    found += [key[1] for key in known if key[0] == "ignored"]
    return list(dict.fromkeys([*found, *_IGNORED]))


def _filled(part: torch.Tensor) -> torch.Tensor:
    """Which vectors of the last dimension are not all 0."""
    largest: torch.Tensor = torch.linalg.vector_norm(part, math.inf, -1)  # nothing of their size
    return largest != 0


def _uneven(part: torch.Tensor) -> torch.Tensor:
    """Which of them have more than one value, or are all 1, as in a mask of what counts."""
    least, largest = part.aminmax(dim=-1)
    return (least != largest) | (least == 1)


# What fills up a batch, and which vectors do not.
_ROWS = {"filled": ("all 0", _filled), "uneven": ("of one value", _uneven)}


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

    def beyond(self, leaf: int, known: Tried) -> list[int]:
        """Of the two, those that no proof has seen: what is ignored may be none of the classes."""
        if ("least", leaf) not in known or known.get(("news", leaf), 0.0) >= _NEWS:
            return []
        news = {self._low} if self._low < known["least", leaf] else set()
        if self._high > known["most", leaf]:
            news.add(self._high)
        return sorted(int(value) for value in news if abs(value) < math.inf)

    def padding(self) -> list[int]:
        """What most rows end or begin with that repeat it there, of tokens."""
        if self.tensor.ndim != 2 or self.tensor.shape[1] < 3:
            return []
        found = []
        for ends in (self.tensor[:, -3:], self.tensor[:, :3]):
            values = ends[(ends == ends[:, :1]).all(1), 0]
            found += [int(values.mode().values)] if values.numel() else []
        return found

    def seen(self, leaf: int, known: Tried) -> None:
        """A proof has told what its values are."""
        if abs(self._low) == math.inf:
            return
        known["news", leaf] = known.get(("news", leaf), 0.0) + bool(self.beyond(leaf, known))
        known["least", leaf] = min(self._low, known.get(("least", leaf), math.inf))
        known["most", leaf] = max(self._high, known.get(("most", leaf), -math.inf))

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
    for value in dict.fromkeys([*ignored, *(_PADDING if tensor.ndim >= 2 else ())]):
        if labels.has(value):
            yield Weigher("labels", leaf, f"mean over {name} that are not {value}", tensor, value)
            if tensor.ndim >= 2 and tensor.shape[1] > 1:
                text = f"mean over {name}[:, 1:] that are not {value}"
                yield Weigher("labels", leaf, text, tensor, value, first=1)
    negative = tensor.dtype != torch.uint8 and labels.is_negative
    for value in (*ignored, 0) if negative and tensor.ndim >= 2 else ():
        if value >= 0 and labels.has(value):
            text = f"mean over {name} that are neither negative nor {value}"
            yield Weigher("both", leaf, text, tensor, value)


def _of_classes(
    leaf: int, name: str, labels: _Range, ignored: list[int], vectors: list[tuple[str, Any]]
) -> Iterator[Weigher]:
    for which, weights in vectors:
        classes = [value for value in ignored if 0 <= value < len(weights) and labels.has(value)]
        shifted = labels.tensor.ndim >= 2 and labels.tensor.shape[1] > 1
        for value in (-1, *classes):
            but = f" that are not {value}" * (value >= 0)
            for first, columns in ((0, ""), (1, "[:, 1:]"))[: 1 + shifted]:
                text = f"mean over weights of the classes {name}{columns}{which}{but}"
                yield Weigher("classes", leaf, text, labels.tensor, value, weights, first)


def _of_numbers(leaf: int, name: str, tensor: torch.Tensor, known: Tried) -> Iterator[Weigher]:
    """Rows, or vectors of them, that are there for the shape alone."""
    if tensor.dtype not in _FLOATS or not tensor.numel():
        return
    there = {"numbers": bool(tensor.sum().isnan()) and bool(tensor.isnan().any())}
    width = tensor.shape[-1] if tensor.ndim >= 2 else 0
    there["filled"] = width > 0 and bool((tensor[..., 0] == 0).any())
    there["uneven"] = width > 1 and bool((tensor[..., 0] == tensor[..., 1]).any())
    for kind in [kind for kind, may in there.items() if may]:
        what, counted = _ROWS.get(kind, ("nan", None))
        weigher = Weigher(kind, leaf, f"mean over {name} that are not {what}", tensor)
        if known.get(weigher.key) == math.inf:  # gradients have told that it is another one
            continue
        if counted is None or not bool(counted(tensor).all()):
            yield weigher


def learn(root: torch.Tensor, tried: Tried) -> None:
    """What the cross entropies in the graph of a loss say of labels is noted in `tried`: of weights
    a copy, so that those that change later are others."""
    tried.update({("ignored", label): 0.0 for label in ignored_labels(root)})
    for weights in class_weights(root):
        known = {key: number for key, number in tried.items() if key[0] == "weights"}
        if not any(_is_equal(key[1], weights) for key in known):
            for key in list(known)[: 1 - _ALIKE]:
                del tried[key]
            tried["weights", weights.clone()] = max(known.values(), default=0.0) + 1.0


def _is_equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and one.device == two.device and torch.equal(one, two)


def _vectors(leaves: Leaves, buffers: list[Any], known: Tried) -> Iterator[tuple[str, Any]]:
    """What may be weights of classes, one number each, and its name. Statistics of a norm are
    none."""
    seen = [(f" (seen {number:g})", key[1]) for key, number in known.items() if key[0] == "weights"]
    others = [tensor for _, _, tensor, sliced in leaves if not sliced] + buffers
    there = [
        tensor
        for tensor in others
        if isinstance(tensor, torch.Tensor)
        and not any(_is_equal(tensor, weights) for _, weights in seen)
    ]
    for name, tensor in [*seen, *((f" ({at + 1})" * (at > 0), t) for at, t in enumerate(there))]:
        if (
            tensor.ndim == 1
            and tensor.is_floating_point()
            and 1 < tensor.numel() <= _CLASSES
            and bool((tensor >= 0).all())
        ):
            yield name, tensor


def candidates(leaves: Leaves, modules: list[torch.nn.Module], tried: Tried) -> Iterator[Weigher]:
    """Everything that a loss may be a mean over, most likely first.

    Args:
        leaves: tensors among the arguments: number, name, tensor, whether it is sliced.
        modules: those that take part.
        tried: see `Tried`; of those that are decided, some are left out.
    """
    found = []
    for weigher in _means(leaves, modules, tried):
        yield weigher
        if weigher.kind in _AT_LEAST:
            found.append(weigher)
    yield from (weigher.at_least_one() for weigher in found)


def possible(leaves: Leaves, modules: list[torch.nn.Module], tried: Tried) -> list[Weigher]:
    """Candidates of a search: see `candidates`. Those that gradients have spoken against come last,
    for the step may have changed."""
    every = candidates(leaves, modules, facts(tried))
    return sorted(every, key=lambda weigher: tried.get(weigher.key) == math.inf)


def _means(leaves: Leaves, modules: list[torch.nn.Module], tried: Tried) -> Iterator[Weigher]:
    yield Weigher("rows", text="mean over rows")
    yield Weigher("sum", text="sum")
    own, buffers = _C.label_hints(modules, _NormBase)
    ignored, vectors = _ignored(own, tried), list(_vectors(leaves, buffers, tried))
    for leaf, name, tensor, sliced in leaves:
        if not sliced or not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
            continue
        if leaf >= FIRST:
            if _is_open("values", leaf, tried):
                yield Weigher("values", leaf, f"mean over as many as the sum of {name}", tensor)
            continue
        if tensor.layout != torch.strided:
            continue
        labels = _Range(tensor) if tensor.dtype in _INTEGERS else None
        if labels is not None:
            news = dict.fromkeys([*ignored, *labels.beyond(leaf, tried), *labels.padding()])
            yield from _of_labels(leaf, name, labels, [*news])
            yield from _of_classes(leaf, name, labels, ignored, vectors)
        if _is_open("values", leaf, tried) and _is_mask(tensor, labels):
            yield Weigher("values", leaf, f"mean over {name}", tensor)
        if _is_open("values[:, 1:]", leaf, tried) and _is_mask_of_tokens(tensor, labels):
            yield Weigher("values", leaf, f"mean over {name}[:, 1:]", tensor, first=1)
        if tensor.dtype == torch.bool:
            yield Weigher("padding", leaf, f"mean over ~{name}", tensor)
            if tensor.ndim == 2 and tensor.shape[1] > 1:
                yield Weigher("padding", leaf, f"mean over ~{name}[:, 1:]", tensor, first=1)
        if labels is None:
            yield from _of_numbers(leaf, name, tensor, tried)


def less_likely(
    leaves: Leaves,
    modules: list[torch.nn.Module],
    tried: Tried,
    cut: Cut,
    residual: Callable[[float, float], float],
) -> Iterator[Weigher]:
    """What else it may be a mean over, where it is none of the candidates: lengths; or what comes
    after the first columns, as where the step ignores prompts of one length. The best few of each.

    Args:
        leaves, modules, tried: see `candidates`.
        cut: start and length of two parts.
        residual: how far they are from the whole with these weights.
    """
    for leaf, name, tensor, sliced in leaves:
        if sliced and isinstance(tensor, torch.Tensor) and tensor.ndim == 1 and leaf < FIRST:
            if tensor.dtype in _INTEGERS and tensor.numel() and bool((tensor >= 0).all()):
                yield Weigher("values", leaf, f"mean over as many as the sum of {name}", tensor)
    for weigher in _means(leaves, modules, tried):
        later = [] if weigher.first else list(weigher.later(cut))
        yield from [it for it, _ in sorted(later, key=lambda of: residual(*of[1]))[:_ALIKE]]


def settled(leaves: Leaves, tried: Tried) -> None:
    """A proof has nothing more to tell of these leaves: their labels are noted in `tried`."""
    for leaf, tensor in _labels(leaves):
        if tensor.dtype in _INTEGERS:
            _Range(tensor).seen(leaf, tried)


def facts(tried: Tried) -> Tried:
    """What is known of the batches, not of weights."""
    return {key: value for key, value in tried.items() if len(key) == 2}


def _is_open(kind: str, leaf: int, tried: Tried) -> bool:
    """Whether gradients have not spoken yet against a mean over it, and against that of 1 at
    least."""
    both = (kind, leaf, 0, None), (kind + _ONE, leaf, 0, None)
    return any(tried.get(key) != math.inf for key in both)


def _is_mask(tensor: torch.Tensor, labels: _Range | None) -> bool:
    """Whether a tensor may say what counts, and how much."""
    if tensor.dtype == torch.bool:
        return True
    if tensor.is_complex() or tensor.ndim > 2 or not tensor.numel():
        return False
    return bool((tensor >= 0).all()) if labels is None else labels.is_binary


def _is_mask_of_tokens(tensor: torch.Tensor, labels: _Range | None) -> bool:
    """Whether a loss over tokens that come next may count by it."""
    if tensor.ndim != 2 or tensor.shape[1] < 2 or not tensor.numel() or tensor.is_complex():
        return False
    if labels is not None or tensor.dtype == torch.bool:
        return labels is None or labels.is_binary
    return bool(((tensor == 0) | (tensor == 1)).all())


def _is_even(tensor: torch.Tensor, start: int, length: int) -> bool:
    """Whether rows are all alike."""
    part = tensor.narrow(0, start, length)
    return bool((part == part[:1]).all())


def _labels(leaves: Leaves) -> list[tuple[int, torch.Tensor]]:
    return [
        (leaf, tensor)
        for leaf, _, tensor, sliced in leaves
        if sliced
        and leaf < FIRST
        and isinstance(tensor, torch.Tensor)
        and tensor.ndim > 0
        and tensor.layout == torch.strided
        and (tensor.dtype in _INTEGERS or tensor.dtype == torch.bool)
    ]


def varied(
    tried: Tried, leaves: Leaves, start: int, length: int, rows: int, multiple: int, slices: Cut
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
    weighers: list[Weigher], cut: Cut, rule: Weigher, tried: Tried, sums: bool = False
) -> dict[tuple[Any, ...], float]:
    """Weights that may be the true ones although others are in use, and make a difference to
    slices: keys and how large it is, where it is more than what was tried.

    Args:
        weighers: all that there are, of the present batch.
        cut: start and length of each slice.
        rule: the weights in use, of the present batch.
        tried: what is known of earlier slices.
        sums: whether a sum is looked at, which is no reason to look for more.
    """
    found: dict[tuple[Any, ...], float] = {}
    if not cut:
        return found
    mine = rule.shares(cut)
    if mine is None:  # nothing counts: of others only this can make a difference
        mine = (1.0 / len(cut),) * len(cut)
        own = rule.at_least_one().key
        weighers = [weigher for weigher in weighers if weigher.key == own]
    for weigher in weighers:
        if weigher.key == rule.key or (weigher.kind == "sum" and not sums):
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


def fuller(
    leaves: Leaves,
    rule: Weigher | None,
    start: int,
    length: int,
    first: int,
    slices: Cut,
    unit: tuple[int, int],
) -> tuple[int, int, int] | None:
    """Another cut of the same rows, both parts of which have something of what may be counted: a
    mean over nothing is nan. None where they have it, or no cut has more of it.

    Args:
        leaves: tensors of the batch.
        rule: the weights in use: whether what a mask leaves out counts, or what it has.
        start, length, first: the cut.
        unit: see `cuts`.
    """
    weighers = list(candidates(leaves, [], {}))
    is_padding = rule is not None and rule.kind == "padding"

    def empty(place: tuple[int, int, int]) -> tuple[int, int]:
        at, rows, part = place
        parts = [(at, part), (at + part, rows - part)]
        found = [it.kind == "padding" for it in weighers if 0.0 in (it.shares(parts) or ())]
        return found.count(is_padding), found.count(not is_padding)

    now = start, length, first
    best = min(cuts([(start, length)], unit), key=empty, default=now)
    return best if empty(best) < empty(now) else None


def pairs(slices: Cut) -> Iterator[tuple[int, int, int]]:
    """Start, length and first part of each two micro-batches beside each other."""
    for (start, one), (_, two) in pairwise(slices):
        yield start, one + two, one


def _spans(slices: Cut) -> Iterator[tuple[int, int, int]]:
    """Start, length and first part of more micro-batches beside each other, few first."""
    count = 3
    while count // 2 < len(slices):
        for at in range(0, len(slices), count // 2):
            some = slices[at : at + count]
            if len(some) > 2:
                rows, first = (sum(n for _, n in each) for each in (some, some[: len(some) // 2]))
                yield some[0][0], rows, first
        count *= 2


def decisive(
    weighers: list[Weigher],
    slices: Cut,
    rule: Weigher,
    tried: Tried,
    unit: tuple[int, int],
    before: Sequence[tuple[int, int]] = (),
    everywhere: bool = False,
) -> tuple[int, int, int] | None:
    """Where weights that make a difference to these slices can be told from those in use.

    Args:
        weighers, rule, tried: see `undecided`.
        slices: start and length of the micro-batches.
        unit: see `cuts`.
        before: what to cut besides the micro-batches.
        everywhere: also weights that make none here: to slices of other rows they may.

    Returns:
        Start, length and first part of the cut that tells best, or None where there is nothing
        to tell, or no cut tells it.
    """
    open_ = undecided(weighers, slices, rule, tried)
    there = [each for each in weighers if each.key in open_ or (everywhere and not each.least)]
    best, where = (False, 0.0), None
    # Pairs tell shares; a sum is like one of 1 at least where two of them count no more.
    wider = _spans(slices) if rule.kind == "sum" else ()
    for places in (cuts([*before, *slices], unit), pairs(slices), wider) if there else ():
        if best[0] or (places is wider and best[1] > 0.0):
            break
        for at, rows, part in places:
            cut = [(at, part), (at + part, rows - part)]
            gap = max(undecided(there, cut, rule, tried).values(), default=0.0)
            if gap > 0.0:  # a mean over nothing is nan
                full = all(0.0 not in (weigher.shares(cut) or ()) for weigher in there)
                if (full, gap) > best:
                    best, where = (full, gap), (at, rows, part)
    return where


def confirm(
    leaves: Leaves,
    rule: Weigher,
    start: int,
    length: int,
    first: int,
    slices: Cut,
    unit: tuple[int, int],
) -> tuple[int, int, int] | None:
    """Another place to try weights at: start, length and first part. None where they
    cannot be told from rows there.

    Args:
        rule: the weights.
        start, length, first: where they were found.
        slices: the micro-batches of the call.
        unit: see `cuts`.
    """
    rows = Weigher("rows")
    best = None
    for at, size, part in [*cuts([(start, length), *slices], unit), *pairs(slices)]:
        cut = [(at, part), (at + part, size - part)]
        mine, plain = rule.shares(cut), rows.shares(cut)
        told = mine is not None and plain is not None and abs(mine[0] - plain[0]) >= TOLD
        if rule.kind != "rows" and not told:
            continue
        if best is not None and size > max(length, *(each for _, each in slices)):
            break  # two micro-batches need not fit
        full = mine is None or 0.0 not in mine  # a mean over nothing is nan
        if at != start and full:
            return at, size, part
        if (at, size, part) != (start, length, first):
            best = best or (at, size, part)
    return best or ((start, length, first) if rule.kind in ("rows", "sum") else None)
