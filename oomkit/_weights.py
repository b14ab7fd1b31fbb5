"""What a loss may be a mean over, where it is not one over the rows of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["Weigher", "candidates"]

_INTEGERS = frozenset({torch.uint8, torch.int16, torch.int32, torch.int64})
_IGNORED = (-100, 255, -1, 0)  # PyTorch's default, segmentation's, and what pads tokens
_CLASSES = 100_000  # of a vector that may hold weights of classes, at most


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

    def forget(self) -> Weigher:
        """The same without the batch that it was found with."""
        self._tensor = None
        return self

    def _count(self, part: torch.Tensor) -> float:
        if self.kind == "shifted":
            part = part[:, 1:]
        if self.kind in ("labels", "shifted"):
            return float((part != self._value).sum())
        if self.kind == "classes" and self._weights is not None:
            kept = part[(part >= 0) & (part < len(self._weights))].reshape(-1)
            return float(self._weights.detach()[kept.to(self._weights.device)].double().sum())
        return float(part.double().sum())

    def counts(self, tensor: torch.Tensor | None, cut: list[tuple[int, int]]) -> list[float]:
        """What slices weigh, before they are made shares of their sum.

        Args:
            tensor: the leaf of the present batch.
            cut: start and length of each slice.
        """
        if self.kind == "sum" or tensor is None:
            return [1.0] * len(cut)
        return [self._count(tensor.narrow(0, start, length)) for start, length in cut]

    def shares(self, cut: list[tuple[int, int]]) -> tuple[float, ...] | None:
        """Weights of these slices, or None where it says nothing of them."""
        if self.kind == "sum":
            return (1.0,) * len(cut)
        if self.kind == "rows":
            values = [float(length) for _, length in cut]
        else:
            values = self.counts(self._tensor, cut)
        total = sum(values)
        return tuple(value / total for value in values) if total > 0 else None


def _ignored(modules: list[torch.nn.Module]) -> list[int]:
    own = [getattr(module, "ignore_index", None) for module in modules]
    found = [value for value in own if isinstance(value, int) and not isinstance(value, bool)]
    return list(dict.fromkeys([*found, *_IGNORED]))


def _of_labels(leaf: int, name: str, tensor: torch.Tensor, ignored: list[int]) -> Iterator[Weigher]:
    for value in ignored:
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


def _vectors(
    leaves: list[tuple[int, str, Any, bool]], modules: list[torch.nn.Module]
) -> Iterator[torch.Tensor]:
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


def candidates(
    leaves: list[tuple[int, str, Any, bool]], modules: list[torch.nn.Module]
) -> Iterator[Weigher]:
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
            for vector in vectors:
                yield Weigher(
                    "classes", leaf, f"mean over classes' weights of {name}", tensor, 0, vector
                )
        if tensor.dtype == torch.bool or (
            not tensor.is_complex() and tensor.numel() and bool((tensor >= 0).all())
        ):
            yield Weigher("values", leaf, f"mean over {name}", tensor)
