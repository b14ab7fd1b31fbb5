"""What a loss may be a mean over, where it is not one over the rows of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["Cut", "Leaves", "Weigher", "candidates", "cuts", "undecided"]

_INTEGERS = frozenset({torch.uint8, torch.int16, torch.int32, torch.int64})
_IGNORED = (-100, 255)  # PyTorch's default, and that of segmentation
_PADDING = (0, -1)  # of tokens: in one dimension these are classes
_CUTS = 8  # micro-batches that are looked at, and places to cut each on either side
_CLASSES = 100_000  # of a vector that may hold weights of classes, at most


Leaves = list[tuple[int, str, Any, bool]]
Cut = list[tuple[int, int]]


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

    def _count(self, part: torch.Tensor) -> float:
        if self.kind == "shifted":
            part = part[:, 1:]
        if self.kind in ("labels", "shifted"):
            return float((part != self._value).sum())
        if self.kind == "classes" and self._weights is not None:
            kept = part[(part >= 0) & (part < len(self._weights))].reshape(-1)
            return float(self._weights.detach()[kept.to(self._weights.device)].double().sum())
        return float(part.double().sum())

    def counts(self, tensor: torch.Tensor | None, cut: Cut) -> list[float]:
        """What slices weigh, before they are made shares of their sum.

        Args:
            tensor: the leaf of the present batch.
            cut: start and length of each slice.
        """
        if self.kind == "sum" or tensor is None:
            return [1.0] * len(cut)
        return [self._count(tensor.narrow(0, start, length)) for start, length in cut]

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


def _ignored(modules: list[torch.nn.Module]) -> list[int]:
    own = [getattr(module, "ignore_index", None) for module in modules]
    found = [value for value in own if isinstance(value, int) and not isinstance(value, bool)]
    return list(dict.fromkeys([*found, *_IGNORED]))


def _of_labels(leaf: int, name: str, tensor: torch.Tensor, ignored: list[int]) -> Iterator[Weigher]:
    for value in [*ignored, *(_PADDING if tensor.ndim >= 2 else ())]:
        if bool((tensor == value).any()):
            yield Weigher("labels", leaf, f"mean over {name} that are not {value}", tensor, value)
            if tensor.ndim >= 2 and tensor.shape[1] > 1:
                yield Weigher(
                    "shifted",
                    leaf,
                    f"mean over {name}[:, 1:] that are not {value}",
                    tensor,
                    value,
                )


def _vectors(leaves: Leaves, modules: list[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """What may be weights of classes: one number each."""
    seen = [tensor for _, _, tensor, sliced in leaves if not sliced]
    for module in modules:
        seen += list(module.buffers(recurse=False))
    for tensor in seen:
        if (
            isinstance(tensor, torch.Tensor)
            and tensor.ndim == 1
            and tensor.is_floating_point()
            and 1 < tensor.numel() <= _CLASSES
            and bool((tensor >= 0).all())
        ):
            yield tensor


def candidates(leaves: Leaves, modules: list[torch.nn.Module]) -> Iterator[Weigher]:
    """Everything that a loss may be a mean over, most likely first.

    Args:
        leaves: tensors among the arguments: number, name, tensor, whether it is sliced.
        modules: those that take part.
    """
    yield Weigher("rows", text="mean over rows")
    yield Weigher("sum", text="sum")
    ignored = _ignored(modules)
    vectors = list(_vectors(leaves, modules))
    for leaf, name, tensor, sliced in leaves:
        if not sliced or not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
            continue
        if tensor.dtype in _INTEGERS:
            yield from _of_labels(leaf, name, tensor, ignored)
            for at, vector in enumerate(vectors):
                text = f"mean over weights of the classes {name}" + (f" ({at + 1})" if at else "")
                yield Weigher("classes", leaf, text, tensor, 0, vector)
        if _is_mask(tensor):
            yield Weigher("values", leaf, f"mean over {name}", tensor)


def _is_mask(tensor: torch.Tensor) -> bool:
    """Whether a tensor may say what counts, and how much."""
    if tensor.dtype == torch.bool:
        return True
    if tensor.is_complex() or tensor.ndim > 2 or not tensor.numel():
        return False
    if tensor.dtype in _INTEGERS:
        return bool(((tensor == 0) | (tensor == 1)).all())
    return bool((tensor >= 0).all())


def _same(one: tuple[float, ...], two: tuple[float, ...]) -> bool:
    return all(abs(a - b) <= 1e-9 for a, b in zip(one, two, strict=True))


def undecided(
    leaves: Leaves,
    modules: list[torch.nn.Module],
    slices: Cut,
    chosen: Weigher | None,
    refuted: set[tuple[Any, ...]],
) -> list[Weigher]:
    """Weights that were never told apart from the chosen ones, and differ from them here.

    Args:
        leaves, modules: see `candidates`.
        slices: start and length of the micro-batches of a call.
        chosen: the weights that are in use; None for rows.
        refuted: keys of those that the program does not take a mean over.
    """
    found = []
    mine = (chosen or Weigher("rows")).of(leaves).shares(slices)
    for weigher in candidates(leaves, modules):
        if weigher.kind == "sum" or weigher.key in refuted:
            continue
        if (
            chosen is not None
            and weigher.key == chosen.key
            or not chosen
            and weigher.kind == "rows"
        ):
            continue
        its = weigher.shares(slices)
        if its is not None and mine is not None and not _same(its, mine):
            found.append(weigher)
    return found


def cuts(slices: Cut) -> Iterator[tuple[int, int, int]]:
    """Start, length and first part of ways to cut the micro-batches, few of each."""
    for start, length in slices[:_CUTS]:
        middle = length // 2
        for step in range(min(middle, _CUTS)):
            for first in {middle + step, middle - step}:
                if 0 < first < length:
                    yield start, length, first
