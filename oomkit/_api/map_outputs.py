"""What becomes of the outputs of `oomkit.map`: moved, padded or taken apart, and joined rows."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import _C

__all__ = ["Outputs", "tensors"]

_PINNED_LEAST = 1 << 20  # a smaller copy is done before memory could be pinned for it
_PINNED_MOST = 1 << 28  # pinned memory is taken from everybody on the machine


class Outputs:
    """Moves the tensors of each part's result, and pads those of all of them alike."""

    def __init__(self, to: torch.device | None, copies: int, pad: float | str | None) -> None:
        self.to, self.copies, self.pad = to, copies, pad
        self.pinned = 0
        self.listed: set[int] = set()  # tensors that came back as lists, by their order
        self.repeated: list[bool] = []  # which tensors of a part had rows several times
        self.waiting: dict[torch.device, torch.Event] = {}

    def converter(self, rows: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
        if self.to is None and self.copies == 1:
            return None

        self.repeated = []

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor if self.to is None else self.move(tensor, self.to)
            if self.copies == 1:
                return tensor
            self.repeated.append(bool(tensor.dim()) and tensor.shape[0] == rows * self.copies)
            if self.repeated[-1]:
                tensor = tensor.reshape(rows, self.copies, *tensor.shape[1:])
            return tensor

        return convert

    def move(self, tensor: torch.Tensor, to: torch.device) -> torch.Tensor:
        size = tensor.numel() * tensor.element_size()
        if (
            to.type != "cpu"
            or tensor.device.type != "cuda"
            or tensor.layout != torch.strided
            or not _PINNED_LEAST <= size <= _PINNED_MOST - self.pinned
        ):
            return tensor.to(to)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        self.pinned += size
        event = self.waiting.setdefault(tensor.device, torch.Event(tensor.device))
        event.record(torch.cuda.current_stream(tensor.device))
        return host

    def wait(self) -> None:
        """Until what was copied is there."""
        for event in self.waiting.values():
            event.synchronize()
        self.waiting.clear()
        self.pinned = 0

    def even(self, results: list[Any], dim: int, where: str) -> None:
        """Makes results whose tensors differ in other sizes than the rows' joinable."""
        if len(results) < 2 and self.pad != "list":
            return
        columns = [tensors(result) for result in results]
        if len({len(column) for column in columns}) != 1:
            return  # results of different forms: the rules for joining say which
        largest = [_largest([column[i] for column in columns], dim) for i in range(len(columns[0]))]
        if all(size is None for size in largest) and self.pad != "list":
            return
        if self.pad is None:
            warnings.warn(
                f"{where}: outputs of the parts differ in other sizes than their rows and came "
                "back as lists of one tensor per row: pass pad=VALUE to have them padded on the "
                'right, or pad="list" to have lists in any case'
                f"{_C.see('map-results')}",
                _C.OomkitWarning,
                stacklevel=8,
            )
        if not isinstance(self.pad, (int, float)):
            every = self.pad == "list"
            self.listed = {i for i, size in enumerate(largest) if every or size is not None}
        for number, result in enumerate(results):
            sizes = iter(largest)
            fitted = functools.partial(self.fit, sizes=sizes, dim=dim)
            results[number] = _C._map_tensors(result, fitted)

    def fit(self, tensor: torch.Tensor, sizes: Iterator[list[int] | None], dim: int) -> Any:
        return self.fit_to(tensor, next(sizes), dim)

    def fit_to(self, tensor: torch.Tensor, sizes: list[int] | None, dim: int) -> Any:
        if self.pad == "list":
            return list(tensor.unbind(dim)) if tensor.dim() else tensor
        if sizes is None:
            return tensor
        if self.pad is None or isinstance(self.pad, str):
            return list(tensor.unbind(dim))
        if list(tensor.shape) == [*sizes[:dim], tensor.shape[dim], *sizes[dim + 1 :]]:
            return tensor
        widths: list[int] = []
        for i in reversed(range(tensor.dim())):
            widths += [0, 0 if i == dim % tensor.dim() else sizes[i] - tensor.shape[i]]
        return torch.nn.functional.pad(tensor, widths, value=self.pad)

    def even_items(self, results: list[Any], listed: list[set[int]], dim: int) -> bool:
        """Lists in place of tensors where any item of a stream has them; was there any?"""
        wanted: set[int] = set().union(*listed)

        def unbound(order: Iterator[int], tensor: torch.Tensor) -> Any:
            return list(tensor.unbind(dim)) if next(order) in wanted else tensor

        for number, result in enumerate(results):
            if wanted and not listed[number]:
                order = iter(range(len(tensors(result))))
                results[number] = _C._map_tensors(result, functools.partial(unbound, order))
        return bool(wanted)

    def flat(self, result: Any, rows: int) -> Any:
        """Rows that the function returned several times each, one after the other again."""
        if self.copies == 1:
            return result
        repeated = iter(self.repeated)
        is_known = len(tensors(result)) == len(self.repeated)  # nothing was left out

        def back(tensor: torch.Tensor) -> torch.Tensor:
            was = next(repeated) if is_known else True
            if was and tensor.dim() > 1 and tensor.shape[:2] == (rows, self.copies):
                return tensor.flatten(0, 1)
            return tensor

        return _C._map_tensors(result, back)


def tensors(result: Any) -> list[torch.Tensor]:
    """Those in a result, in the order in which they are joined."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _C._map_tensors(result, note)
    return found


def _largest(tensors: list[torch.Tensor], dim: int) -> list[int] | None:
    """The largest sizes where they differ beside the rows; None where nothing does."""
    shapes = [list(tensor.shape) for tensor in tensors]
    count = len(shapes[0])
    if count == 0 or any(len(shape) != count for shape in shapes):
        return None
    others = [[n for i, n in enumerate(shape) if i != dim % count] for shape in shapes]
    if all(sizes == others[0] for sizes in others):
        return None
    return [max(sizes) for sizes in zip(*shapes, strict=True)]
