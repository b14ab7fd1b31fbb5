"""What the rows of a trainer's batch are: pairs go together, packed batches stay whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .. import _C

__all__ = ["Halves", "Pairs", "Whole", "shapes", "together", "whole_because"]

_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


def _rows(value: Any) -> int | None:
    if isinstance(value, torch.Tensor):
        return int(value.shape[0]) if value.ndim else None
    return len(value) if isinstance(value, (list, tuple)) else None


class Pairs:
    """A batch of n pairs: 2n rows, the chosen before the rejected, and values of n rows."""

    __slots__ = ("inputs", "rows")

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        rows = _rows(inputs["input_ids"]) or 0
        if rows % 2:
            raise _C.SplitError(
                "oomkit expected a batch of pairs, the chosen rows before as many rejected ones, "
                f"got input_ids with {rows} rows: give the trainer its own data collator"
                f"{_C.see('trainers')}"
            )
        self.inputs, self.rows = inputs, rows // 2

    def part(self, start: int, length: int) -> Pairs:
        end, found = start + length, {}
        for name, value in self.inputs.items():
            rows = _rows(value)
            if rows == self.rows:
                value = value[start:end]
            elif rows == 2 * self.rows:
                both = value[start:end], value[self.rows + start : self.rows + end]
                value = torch.cat(both) if isinstance(value, torch.Tensor) else both[0] + both[1]
            found[name] = value
        return Pairs(found)


class Whole:
    """A batch that has no rows to cut: one row."""

    __slots__ = ("inputs",)

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self.inputs = inputs

    def part(self, start: int, length: int) -> Whole:
        return self


class Halves:
    """A result with 2n rows, of which the first half is of the chosen."""

    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    @staticmethod
    def join(results: list[Halves], rows: list[int]) -> Halves:
        """All chosen rows before all rejected ones."""
        halves = [part.value.chunk(2) for part in results]
        return Halves(torch.cat([one for one, _ in halves] + [two for _, two in halves]))


def _no_part(halves: Halves, start: int, length: int) -> Halves:
    raise TypeError(f"results are joined, not split{_C.see('internal-error')}")


_C.register_splitter(
    Pairs, split=lambda pairs, start, length: pairs.part(start, length), size=lambda p: p.rows
)
_C.register_splitter(
    Whole, split=lambda whole, start, length: whole.part(start, length), size=lambda whole: 1
)
_C.register_splitter(Halves, split=_no_part, size=lambda h: len(h.value) // 2, join=Halves.join)


def together(result: Any, rows: int) -> Any:
    """A result of a paired trainer, with tensors of both halves marked as such."""
    if isinstance(result, torch.Tensor):
        return Halves(result) if result.ndim and len(result) == 2 * rows else result
    if isinstance(result, Halves):
        return result.value
    return tuple(together(each, rows) for each in result) if type(result) is tuple else result


def whole_because(inputs: Any, paired: bool) -> str | None:
    """Why a batch cannot be cut into rows, or None.

    Args:
        inputs: of the trainer.
        paired: whether its rows are halves of pairs.
    """
    if not isinstance(inputs, Mapping):
        return None
    for name in _PACKED:
        if name in inputs:
            return f"sequences are packed into one row ({name})"
    sizes = {
        int(value.shape[0])
        for value in inputs.values()
        if isinstance(value, torch.Tensor) and value.ndim
    } - {1}
    several = len(sizes) > 1
    if paired:
        rows = _rows(inputs["input_ids"]) or 0
        several = bool(sizes - {rows, rows // 2})
    return "its tensors have no number of rows in common" if several else None


def shapes(inputs: Mapping[str, Any]) -> str:
    """Shapes by key, for a message."""
    found = [
        f"{name} {list(value.shape)}"
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor)
    ]
    return ", ".join(found)
